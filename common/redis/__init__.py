"""Redis."""
