"""Settings: the dataclasses, and the kinds of values that they accept."""
