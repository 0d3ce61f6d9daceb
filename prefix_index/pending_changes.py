"""Changes of a pod's caches that are not in the index yet: the last state of each block, bounded.

Invariant: while not stale, the index plus these changes equals the caches. Stale means that changes were dropped (too
many, or no publisher ran), so that only a snapshot makes the index right. Used by the engine's threads and the event
loop.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import islice

from prefix_index.records import CacheTier
from prefix_index.store import STORED_HASH_BYTES


class PendingChanges:
    """Starts stale. `limit` is the largest number of changed blocks, over all tiers."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()  # never held while another lock is taken
        #: Per tier: stored part of a block hash -> whether the cache holds the block now.
        self._changes: dict[CacheTier, dict[bytes, bool]] = {tier: {} for tier in CacheTier}
        self._stale = True

    def __len__(self) -> int:
        return sum(map(len, self._changes.values()))

    @property
    def stale(self) -> bool:
        """The index needs a snapshot."""
        return self._stale

    def record(self, tier: CacheTier, hashes: Sequence[bytes], held: bool) -> bool:
        """Records for each block whether the cache holds it, O(n). Returns whether the publisher must wake up."""
        with self._lock:
            if self._stale or not hashes:
                return False
            first = not len(self)
            changes = self._changes[tier]
            for h in hashes:
                changes[h[:STORED_HASH_BYTES]] = held
            if len(self) > self._limit:
                self._drop()
                return True
            return first

    def mark_stale(self) -> None:
        """Drops all changes until the next snapshot, because the content of the index is unknown."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        self._stale = True
        for changes in self._changes.values():
            changes.clear()

    def begin_snapshot(self) -> None:
        """Drops all changes and starts to keep new ones. Call it before reading the caches for a snapshot."""
        with self._lock:
            self._drop()
            self._stale = False

    def take_batch(self, max_blocks: int) -> dict[CacheTier, dict[bytes, bool]]:
        """Removes and returns the changes of at most `max_blocks` blocks, oldest first."""
        taken: dict[CacheTier, dict[bytes, bool]] = {}
        with self._lock:
            for tier, changes in self._changes.items():
                taken[tier] = dict(islice(changes.items(), max_blocks))
                max_blocks -= len(taken[tier])
                for h in taken[tier]:
                    del changes[h]
        return taken
