"""The virtual clock: what happens next, in order of time, and of scheduling among equal times.

Invariant: `now` never goes back, and a run depends on nothing but what was scheduled.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable


class VirtualClock:
    """now: seconds since the start of the simulation."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0

    def time(self) -> float:
        """`now`, as a function for code that takes a clock."""
        return self.now

    def call_at(self, when: float, action: Callable[[], None]) -> None:
        """Runs an action at a time; now if that time is past."""
        self._scheduled += 1
        heapq.heappush(self._due, (max(when, self.now), self._scheduled, action))

    def call_after(self, seconds: float, action: Callable[[], None]) -> None:
        self.call_at(self.now + seconds, action)

    def run(self, until: Callable[[], bool]) -> None:
        """Runs actions until the condition, evaluated before each action, holds or no action is left."""
        due = self._due
        while due and not until():
            when, _, action = heapq.heappop(due)
            assert when >= self.now
            self.now = when
            self.events += 1
            action()
