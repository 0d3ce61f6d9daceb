"""A clock for what waits for a time: a test decides when that has come."""

from __future__ import annotations

import time


class Clock:
    """time.monotonic(), and so much more as a test puts it forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s
