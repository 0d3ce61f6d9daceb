"""The virtual clock: what happens next, in order of time, and of scheduling among equal times.

Invariant: `now` never goes back, and a run depends on nothing but what was scheduled.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Coroutine
from typing import Any

Action = Callable[[], "Coroutine[Any, Any, None] | None"]


class Clock:
    """now: seconds since the start of the simulation."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._due: list[tuple[float, int, Action]] = []
        self._scheduled = 0

    def time(self) -> float:
        """`now`, as a function for code that takes a clock."""
        return self.now

    def at(self, when: float, action: Action) -> None:
        """Runs action at a time, now when that is past. A coroutine that it returns is awaited; no virtual time goes
        by meanwhile.
        """
        self._scheduled += 1
        heapq.heappush(self._due, (max(when, self.now), self._scheduled, action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    async def run(self, until: Callable[[], bool]) -> None:
        """Until the condition holds, looked at after each event, or nothing is left."""
        due = self._due
        while due and not until():
            when, _, action = heapq.heappop(due)
            assert when >= self.now
            self.now = when
            self.events += 1
            waits = action()
            if waits is not None:
                await waits
