"""The blocks in the segments of a disk tier, and the order in which the segments are removed.

A use of a block also uses the segments of the blocks before it, so the start of a prompt outlives its end.

Invariant: the hashes are prefix-closed. A block that is not reachable any more stays in its file, unused.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

TOUCH_S = 60.0  # The time of a file, which orders the segments after a restart, is at most this old


class BlockPlace(NamedTuple):
    """Where a block is."""

    segment: int
    offset: int  # Of its record
    parent: bytes


@dataclass(slots=True)
class Segment:
    """A file."""

    number: int
    path: Path
    size: int  # Bytes of the file
    keys: set[bytes] = field(default_factory=set)  # Of its blocks in the index
    touched_at: float = 0.0  # When the time of the file was set


class SegmentIndex:
    """Where the blocks are. It has no lock: the store changes it under its own."""

    def __init__(self) -> None:
        self.places: dict[bytes, BlockPlace] = {}
        self.segments: OrderedDict[int, Segment] = OrderedDict()  # The least recently used first
        self._children: dict[bytes, set[bytes]] = {}

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(segment.size for segment in self.segments.values())

    def use(self, keys: Sequence[bytes]) -> list[Path]:
        """Makes the segments of blocks, and of all blocks before them, the most recently used ones.

        Returns the files whose time is to be set without the lock, which must not wait for a slow disk.
        """
        stale: list[Path] = []
        seen: set[bytes] = set()
        for key in keys:
            link = key
            while link and link not in seen:
                seen.add(link)
                link = self.places[link].parent
        now = time.monotonic()
        # A block is mostly in a newer segment than its parent, so the parents' segments become the last to be removed.
        for number in sorted({self.places[key].segment for key in seen}, reverse=True):
            self.segments.move_to_end(number)
            segment = self.segments[number]
            if now - segment.touched_at > TOUCH_S:
                segment.touched_at = now
                stale.append(segment.path)
        return stale

    def insert(self, key: bytes, place: BlockPlace) -> None:
        """Adds a block, whose parent is there."""
        self.places[key] = place
        self.segments[place.segment].keys.add(key)
        self._children.setdefault(place.parent, set()).add(key)

    def drop(self, keys: Sequence[bytes]) -> list[bytes]:
        """Forgets blocks and all that continue them; returns them, parents first."""
        dropped: list[bytes] = []
        pending = list(keys)
        while pending:
            key = pending.pop()
            place = self.places.pop(key, None)
            if place is None:
                continue
            dropped.append(key)
            self.segments[place.segment].keys.discard(key)
            siblings = self._children[place.parent]
            siblings.discard(key)
            if not siblings:
                del self._children[place.parent]
            pending += self._children.get(key, ())
        return dropped

    def clear(self) -> list[bytes]:
        """Forgets all blocks and keeps the segments; returns the blocks, parents first."""
        forgotten = list(self.places)
        self.places.clear()
        self._children.clear()
        for segment in self.segments.values():
            segment.keys.clear()
        return forgotten

    def inconsistencies(self) -> list[str]:
        """Returns violations of the invariants, one sentence each."""
        defects = []
        if any(place.parent and place.parent not in self.places for place in self.places.values()):
            defects.append("a block of the disk tier outlived its parent")
        if {key for segment in self.segments.values() for key in segment.keys} != self.places.keys():
            defects.append("the segments and the index of the disk tier differ")
        if sum(map(len, self._children.values())) != len(self.places):
            defects.append("parents and children in the disk tier differ")
        return defects


def reachable(found: Mapping[bytes, BlockPlace]) -> list[bytes]:
    """Returns those blocks whose parents are all there, parents first."""
    children: dict[bytes, list[bytes]] = {}
    for key, place in found.items():
        children.setdefault(place.parent, []).append(key)
    order = children.pop(b"", [])
    for key in order:  # grows meanwhile
        order += children.pop(key, ())
    return order
