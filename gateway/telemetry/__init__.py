"""Metrics of a gateway, and the timelines and trace spans of its requests."""
