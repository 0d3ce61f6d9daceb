"""Finds stop strings in a growing text; a stop string may begin in one token and end in another.

Invariant: `feed` never returns a character that may belong to a stop string, and returns all others at once. If
several stop strings occur, the one that begins first counts.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStringScanner:
    """Scans one output."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """
        Args:
            include: A stop string is part of the released text.
        """
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        #: A stop string occurred; no more text is released.
        self.found = False

    def feed(self, text: str) -> str:
        """Returns the text that may be sent now."""
        if self.found or not self._stops:
            return "" if self.found else text
        buffer = self._held + text
        matches = [(at, len(stop)) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if matches:
            self.found, self._held = True, ""
            start, length = min(matches)
            return buffer[: start + length if self._include else start]
        keep = max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """Returns the text held back, once the output is known to end."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest proper prefix of `stop` that `text` ends with."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
