"""What this gateway has sent to one pod and not got back: counted before dispatch, returned on every path."""

from __future__ import annotations


class Bookings:
    """Open bookings of one pod. tokens: of all; fresh, fresh_count: of those made at or after the last mark.

    fresh_booked: as fresh, of what was booked at first; that is what other gateways may know.
    """

    __slots__ = ("_open", "_since", "tokens", "unreported_booked", "unreported_count", "unreported_tokens")

    def __init__(self) -> None:
        self._open: dict[str, tuple[int, int, float]] = {}  # left, booked, when
        self._since = float("-inf")
        self.tokens = 0
        self.unreported_tokens = 0
        self.unreported_booked = 0
        self.unreported_count = 0

    def __len__(self) -> int:
        return len(self._open)

    def add(self, request_id: str, tokens: int, now: float) -> None:
        """Books work of `tokens` tokens; again replaces."""
        self.remove(request_id)
        self._open[request_id] = (tokens, tokens, now)
        self.tokens += tokens
        if now >= self._since:
            self.unreported_tokens += tokens
            self.unreported_booked += tokens
            self.unreported_count += 1

    def shrink(self, request_id: str, tokens: int) -> None:
        """Only `tokens` of a booking are left to do; without effect when there is none, or when fewer are."""
        left, booked, at = self._open.get(request_id, (0, 0, 0.0))
        if tokens < left:
            self._open[request_id] = (tokens, booked, at)
            self.tokens -= left - tokens
            if at >= self._since:
                self.unreported_tokens -= left - tokens

    def remove(self, request_id: str) -> None:
        """Returns a booking; without effect when there is none."""
        entry = self._open.pop(request_id, None)
        if entry is not None:
            left, booked, at = entry
            self.tokens -= left
            if at >= self._since:
                self.unreported_tokens -= left
                self.unreported_booked -= booked
                self.unreported_count -= 1

    def mark_reported(self, since: float) -> None:
        """What was booked before `since` is not fresh any more: the pod's own report includes it."""
        self._since = since
        fresh = [entry for entry in self._open.values() if entry[2] >= since]
        self.unreported_tokens = sum(left for left, _, _ in fresh)
        self.unreported_booked = sum(booked for _, booked, _ in fresh)
        self.unreported_count = len(fresh)
