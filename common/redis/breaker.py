"""A circuit breaker: after several failures in a row it is open and lets one call through per interval.

closed --- failures in a row ---> open --- one call per probe_s succeeds ---> closed
"""

from __future__ import annotations

import time
from collections.abc import Callable


class CircuitBreaker:
    """Decides whether to call a dependency. The caller reports how each call ended."""

    def __init__(self, *, failures: int = 3, probe_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = failures
        self._probe_s = probe_s
        self._clock = clock
        self._failures = 0
        self._next_probe = 0.0

    @property
    def open(self) -> bool:
        """The last calls failed; the dependency counts as down."""
        return self._failures >= self._limit

    def allow_call(self) -> bool:
        """Returns whether to call now. While open, it is True once per probe_s: this call is the probe."""
        if not self.open:
            return True
        now = self._clock()
        if now < self._next_probe:
            return False
        self._next_probe = now + self._probe_s
        return True

    def record_success(self) -> None:
        """Reports that a call succeeded."""
        self._failures = 0

    def record_failure(self) -> None:
        """Reports that a call failed."""
        self._failures += 1
        if self._failures == self._limit:
            self._next_probe = self._clock() + self._probe_s
