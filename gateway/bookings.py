"""What this gateway has sent to one pod and not got back: counted before dispatch, returned on every path."""

from __future__ import annotations

import time


class Bookings:
    """Open bookings of one pod: request id -> (tokens, when)."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, request_id: str, tokens: int) -> None:
        """Books work of `tokens` tokens."""
        self._open[request_id] = (tokens, time.monotonic())

    def remove(self, request_id: str) -> None:
        """Returns a booking; without effect when there is none."""
        self._open.pop(request_id, None)

    def tokens(self, since: float = 0.0) -> int:
        """Tokens booked at or after a time.monotonic()."""
        return sum(tokens for tokens, at in self._open.values() if at >= since)

    def count(self, since: float = 0.0) -> int:
        """Bookings made at or after a time.monotonic()."""
        return sum(1 for _, at in self._open.values() if at >= since)
