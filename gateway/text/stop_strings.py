"""Stop strings over a growing text: they may begin in one token and end in another.

Invariant: `feed` never returns a character that could still belong to a stop string, and everything else at once. When
several stop strings occur, the one that begins first wins.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStringScanner:
    """Scans one output. hit: a stop string occurred; nothing more is released after it. include: it is itself."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """Text that may be sent now."""
        if self.found or not self._stops:
            return "" if self.found else text
        buffer = self._held + text
        found = [(at, len(stop)) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if found:
            self.found, self._held = True, ""
            start, length = min(found)
            return buffer[: start + length if self._include else start]
        keep = max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """The text held back, once it is known that the output ends."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
