"""What a pod's cache gained and lost since its index was last told: bounded, and only the last word on each block.

Invariant: while not stale, the index is right once these changes are applied to it; stale means that changes were not
kept (too many, or nobody listened) and only a snapshot makes it right. Used by the engine's threads and the event loop.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import islice

from prefix_index.records import CacheTier
from prefix_index.store import STORED_HASH_BYTES


class PendingChanges:
    """Starts stale. limit: blocks that changes are kept for, all tiers together."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()  # never held while another lock is taken
        self._words: dict[CacheTier, dict[bytes, bool]] = {
            tier: {} for tier in CacheTier
        }  # first bytes of a hash -> held
        self._stale = True

    def __len__(self) -> int:
        return sum(map(len, self._words.values()))

    @property
    def stale(self) -> bool:
        """A snapshot is due."""
        return self._stale

    def record(self, tier: CacheTier, hashes: Sequence[bytes], held: bool) -> bool:
        """Keeps the word on each block, O(n); True when there was nothing to do before, and now there is."""
        with self._lock:
            if self._stale or not hashes:
                return False
            first = not len(self)
            words = self._words[tier]
            for h in hashes:
                words[h[:STORED_HASH_BYTES]] = held
            if len(self) > self._limit:
                self._drop()
                return True
            return first

    def mark_stale(self) -> None:
        """What the index contains is not known any more."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        self._stale = True
        for words in self._words.values():
            words.clear()

    def begin_snapshot(self) -> None:
        """A snapshot is about to be taken: from now on, changes count."""
        with self._lock:
            self._drop()
            self._stale = False

    def take_batch(self, most: int) -> dict[CacheTier, dict[bytes, bool]]:
        """Takes out the words on at most so many blocks, the oldest first."""
        taken: dict[CacheTier, dict[bytes, bool]] = {}
        with self._lock:
            for tier, words in self._words.items():
                taken[tier] = dict(islice(words.items(), most))
                most -= len(taken[tier])
                for h in taken[tier]:
                    del words[h]
        return taken
