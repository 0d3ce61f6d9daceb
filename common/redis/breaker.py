"""A circuit breaker: after some failures in a row it stays open and lets one call through per interval.

closed --failures in a row--> open --one call per probe_s--> closed on its success, else open again
"""

from __future__ import annotations

import time
from collections.abc import Callable


class CircuitBreaker:
    """Says whether a dependency is worth a call now; the caller reports how each call ended."""

    def __init__(self, *, failures: int = 3, probe_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = failures
        self._probe_s = probe_s
        self._clock = clock
        self._failures = 0
        self._next_probe = 0.0

    @property
    def open(self) -> bool:
        """The dependency counts as away."""
        return self._failures >= self._limit

    def allow_call(self) -> bool:
        """Whether to call now; while open, True once per probe_s (that call is the probe)."""
        if not self.open:
            return True
        now = self._clock()
        if now < self._next_probe:
            return False
        self._next_probe = now + self._probe_s
        return True

    def record_success(self) -> None:
        """A call was answered."""
        self._failures = 0

    def record_failure(self) -> None:
        """A call failed."""
        self._failures += 1
        if self._failures == self._limit:
            self._next_probe = self._clock() + self._probe_s
