"""What this gateway has sent to one pod and not got back: counted before dispatch, returned on every path."""

from __future__ import annotations


class Bookings:
    """Open bookings of one pod. tokens: of all; fresh, fresh_count: of those made at or after the last mark."""

    __slots__ = ("_open", "_since", "fresh", "fresh_count", "tokens")

    def __init__(self) -> None:
        self._open: dict[str, tuple[int, float]] = {}
        self._since = float("-inf")
        self.tokens = 0
        self.fresh = 0
        self.fresh_count = 0

    def __len__(self) -> int:
        return len(self._open)

    def add(self, request_id: str, tokens: int, now: float) -> None:
        """Books work of `tokens` tokens; again replaces."""
        self.remove(request_id)
        self._open[request_id] = (tokens, now)
        self._count(tokens, now, 1)

    def shrink(self, request_id: str, tokens: int) -> None:
        """Only `tokens` of a booking are left to do; without effect when there is none, or when fewer are."""
        entry = self._open.get(request_id)
        if entry is not None and tokens < entry[0]:
            self._open[request_id] = (tokens, entry[1])
            self._count(tokens - entry[0], entry[1], 0)

    def remove(self, request_id: str) -> None:
        """Returns a booking; without effect when there is none."""
        entry = self._open.pop(request_id, None)
        if entry is not None:
            self._count(-entry[0], entry[1], -1)

    def mark(self, since: float) -> None:
        """What was booked before `since` is not fresh any more: the pod's own report includes it."""
        self._since = since
        fresh = [tokens for tokens, at in self._open.values() if at >= since]
        self.fresh, self.fresh_count = sum(fresh), len(fresh)

    def _count(self, tokens: int, at: float, number: int) -> None:
        self.tokens += tokens
        if at >= self._since:
            self.fresh += tokens
            self.fresh_count += number
