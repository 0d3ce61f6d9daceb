"""The virtual time of a simulation."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class VirtualClock:
    """Runs actions in order of their simulated time; equal times keep the order in which they were scheduled.

    Invariant: `now` never goes back, and a run depends only on the scheduled actions.
    """

    def __init__(self) -> None:
        self.now = 0.0  # Seconds since the start of the simulation.
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0

    def time(self) -> float:
        """Returns `now`, for code that takes a clock function."""
        return self.now

    def call_at(self, when: float, action: Callable[[], None]) -> None:
        """Runs an action at a time, or now if that time has passed."""
        self._scheduled += 1
        heapq.heappush(self._due, (max(when, self.now), self._scheduled, action))

    def call_after(self, seconds: float, action: Callable[[], None]) -> None:
        self.call_at(self.now + seconds, action)

    def run(self, until: Callable[[], bool]) -> None:
        """Runs actions until `until()`, evaluated before each action, is true or no action is left."""
        while self._due and not until():
            self.now, _, action = heapq.heappop(self._due)
            action()
