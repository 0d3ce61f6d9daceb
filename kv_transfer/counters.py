"""Messages that did not fit, counted by reason; written by the transfer thread and by the event loop."""

from __future__ import annotations

import threading
from collections import Counter


class Drops:
    """A thread-safe counter per reason."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, reason: str) -> None:
        with self._lock:
            self._counts[reason] += 1

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
