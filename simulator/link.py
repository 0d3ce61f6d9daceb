"""A network adapter that sends one thing after another."""

from __future__ import annotations


class Link:
    """free_at: when everything given to it has been sent. Seconds."""

    __slots__ = ("busy_s", "free_at")

    def __init__(self) -> None:
        self.free_at = 0.0
        self.busy_s = 0.0

    def send(self, now: float, seconds: float) -> float:
        """Takes `seconds` of the link from now on, behind what it still sends; when that is done."""
        self.free_at = max(now, self.free_at) + seconds
        self.busy_s += seconds
        return self.free_at
