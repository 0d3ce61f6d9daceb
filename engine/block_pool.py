"""The pool of KV blocks: what is free, cached, leased or quarantined, and the prefix cache over it.

Lifecycle of a block: free -> leased (`lease`, `grow`) -> cached (its request ended, its hash is published) -> leased
again by a prefix match, or evicted and leased to someone else. Without a hash it goes from leased to free. While a
writer's or reader's hold is open the block is not reused, whatever its request does: with a reader it stays leased,
with writers alone it is quarantined. At all times free + cached + leased + quarantined == total.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import InternalError
from common.types import PoolCounts
from engine.block_ledger import BlockLedger, HashesCallback
from engine.hold import Hold
from engine.lease import Lease
from engine.step_fence import StepFence

__all__ = ["BlockPool", "Hold", "Lease", "StepFence"]


def _ignore(hashes: list[bytes]) -> None:
    """Nobody listens."""


class BlockPool:
    """num_blocks blocks of block_size tokens each; thread-safe.

    on_stored is called with hashes that became available to matches (parents first), on_evicted with hashes that
    ceased to be (children first), before their blocks are reused. Both run under the lock: they may only enqueue.
    """

    __slots__ = ("_ledger", "block_size", "num_blocks")

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        on_stored: HashesCallback = _ignore,
        on_evicted: HashesCallback = _ignore,
    ) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ledger = BlockLedger(num_blocks, on_stored, on_evicted)

    def lease(self, hashes: Sequence[bytes], total_blocks: int, *, keep_free: int = 0) -> Lease | None:
        """Lease total_blocks blocks, the lead ones from the longest cached prefix of `hashes`, the rest empty.

        The caller has cut `hashes` to its matchable blocks. None, and no change, when fewer than keep_free blocks would
        stay available.
        """
        ledger = self._ledger
        with ledger.lock:
            cached = ledger.cache.match(hashes[:total_blocks])
            evictable = ledger.cache.evictable
            need = total_blocks - len(cached)
            if ledger.available - sum(b in evictable for b in cached) - need < keep_free:
                return None
            ledger.add(cached, ledger.requests)
            return Lease(ledger, cached + ledger.take(need), len(cached))

    def match(self, hashes: Sequence[bytes]) -> int:
        """Blocks of the longest cached prefix of `hashes`."""
        with self._ledger.lock:
            return len(self._ledger.cache.match(hashes))

    def begin_step(self) -> StepFence:
        """Call before launching an engine step that may still run when leases change; `end` it after completion."""
        with self._ledger.lock:
            return StepFence(self._ledger)

    def available(self) -> int:
        """Blocks that a lease could get now: free and evictable ones."""
        with self._ledger.lock:
            return self._ledger.available

    def deferred(self) -> int:
        """Block references that come back when the steps in flight end."""
        with self._ledger.lock:
            return sum(len(fence.blocks) for fence in self._ledger.fences)

    def counts(self) -> PoolCounts:
        with self._ledger.lock:
            return self._ledger.counts()

    def cached_hashes(self) -> list[bytes]:
        """All hashes that a match can find, parents before children."""
        with self._ledger.lock:
            return list(self._ledger.cache.index)

    def clear_cache(self) -> int:
        """Evict everything evictable; returns how many blocks that was."""
        ledger = self._ledger
        with ledger.lock:
            evicted = ledger.evict(len(ledger.cache.evictable))
            ledger.free.extend(evicted)
            return len(evicted)

    def check(self) -> None:
        """Integrity check over all blocks; raises InternalError naming the first defects."""
        with self._ledger.lock:
            found = self._ledger.defects()
        if found:
            raise InternalError("block pool is inconsistent: " + "; ".join(found[:5]))
