"""The pool of KV blocks: what is free, cached, leased or quarantined, and the prefix cache over it.

Lifecycle of a block: free -> leased (`lease`, `grow`) -> cached (its request ended, its hash is published) -> leased
again by a prefix match, or evicted and leased to someone else. Without a hash it goes from leased to free. While a
writer's or reader's hold is open the block is not reused, whatever its request does: with a reader it stays leased,
with writers alone it is quarantined. At all times free + cached + leased + quarantined == total.

With a host tier (host_tier.py) what is evicted stays in host memory, and a lease may get blocks from there, which are
written while its `load` is not done: they count a writer until then.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from common.errors import InternalError
from common.types import PoolCounts
from engine.block_ledger import BlockLedger, HashesCallback
from engine.hold import Hold
from engine.host_tier import HostStats, HostTier, Parked
from engine.lease import Lease
from engine.step_fence import StepFence

__all__ = ["BlockPool", "Hold", "HostStats", "Lease", "Parked", "StepFence"]

RESERVE = 8  # of so many blocks one is kept ready to be handed out, where evicted ones go to the host


def _ignore(hashes: list[bytes]) -> None:
    """Nobody listens."""


class BlockPool:
    """num_blocks blocks of block_size tokens each; thread-safe.

    on_stored is called with hashes that became available to matches (parents first), on_evicted with hashes that
    ceased to be (children first), before their blocks are reused. Both run under the lock: they may only enqueue.
    host_blocks: blocks of the host tier, of which a copier makes at most host_batch at a time; 0: there is none.
    on_host_stored, on_host_evicted: the same of the host.
    """

    __slots__ = ("_ledger", "block_size", "host_tier", "num_blocks")

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        on_stored: HashesCallback = _ignore,
        on_evicted: HashesCallback = _ignore,
        host_blocks: int = 0,
        host_batch: int = 64,
        on_host_stored: HashesCallback = _ignore,
        on_host_evicted: HashesCallback = _ignore,
    ) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ledger = ledger = BlockLedger(num_blocks, on_stored, on_evicted, tiered=host_blocks > 0)
        self.host_tier: HostTier | None = None
        if host_blocks:
            self.host_tier = ledger.host_tier = HostTier(
                ledger.lock,
                ledger.cache,
                lambda: ledger.num_available,
                num_host_blocks=host_blocks,
                min_available=max(1, num_blocks // RESERVE),
                batch=host_batch,
                on_stored=on_host_stored,
                on_evicted=on_host_evicted,
            )

    @property
    def lock(self) -> threading.Lock:
        """Guards everything here; for whoever makes the tier's copies by hand."""
        return self._ledger.lock

    def lease(
        self,
        hashes: Sequence[bytes],
        total_blocks: int,
        *,
        keep_free: int = 0,
        host: bool = False,
        parked: Parked | None = None,
    ) -> Lease | None:
        """Lease total_blocks blocks, the lead ones from the longest cached prefix of `hashes`, the rest empty.

        The caller has cut `hashes` to its matchable blocks. None, and no change, when fewer than keep_free blocks would
        stay available. host: the match may go on in the host; the lease is to be used once its `load` is done. parked:
        what `park` kept comes back too, where all before it does and nothing goes on from there.
        """
        ledger = self._ledger
        tier = ledger.host_tier if host else None
        with ledger.lock:
            cached = ledger.cache.match(hashes[:total_blocks])
            evictable = ledger.cache.evictable
            need = total_blocks - len(cached)
            if not ledger.can_allocate(keep_free + need + sum(b in evictable for b in cached)):
                return None
            ledger.acquire(cached, ledger.requests)
            keys = [] if tier is None else list(hashes[len(cached) : len(cached) + tier.match(hashes[len(cached) :])])
            full = len(cached) + len(keys)
            resumed = False
            if tier is not None and parked is not None and full < total_blocks:
                resumed = full == parked.computed // self.block_size and tier.match([parked.key]) == 1
            keys += [parked.key] if parked is not None and resumed else []
            lease = Lease(ledger, cached + ledger.allocate(need), len(cached), host_blocks=full - len(cached))
            lease.restored_partial = resumed
            if tier is not None and keys:
                targets = lease.blocks[len(cached) : len(cached) + len(keys)]
                lease.host_load = tier.load(keys, targets, Hold(ledger, targets, is_writer=True))
            return lease

    def match_prefix(self, hashes: Sequence[bytes]) -> int:
        """Blocks of the longest cached prefix of `hashes`, the host's included."""
        with self._ledger.lock:
            here = len(self._ledger.cache.match(hashes))
            return here if self._ledger.host_tier is None else here + self._ledger.host_tier.match(hashes[here:])

    def pin_prefix(self, hashes: Sequence[bytes], first: int) -> Hold | None:
        """Holds, for somebody who reads them, the pool's blocks of this chain from place `first` on; None for none."""
        ledger = self._ledger
        with ledger.lock:
            found = ledger.cache.match(hashes)[first:]
            return Hold(ledger, found, is_writer=False) if found else None

    def save_partial_block(self, lease: Lease, computed: int) -> Parked | None:
        """Keeps the partial last of `computed` tokens in the host, for a request that gives its lease up; None where
        there is nothing to keep, or no host.
        """
        ledger, place = self._ledger, computed // self.block_size
        with ledger.lock:
            if (
                ledger.host_tier is None
                or ledger.host_tier.closed
                or computed % self.block_size == 0
                or lease.num_published < place
            ):
                return None
            block = lease.blocks[place]
            parent = ledger.cache.hash_by_block[lease.blocks[place - 1]] if place else None
            return Parked(
                ledger.host_tier.save_partial_block(parent, block, Hold(ledger, [block], is_writer=False)), computed
            )

    def drop_partial_block(self, parked: Parked) -> None:
        """Nobody will ask for it any more; idempotent."""
        with self._ledger.lock:
            if self._ledger.host_tier is not None:
                self._ledger.host_tier.drop_partial_block(parked.key)

    def begin_step(self) -> StepFence:
        """Call before launching an engine step that may still run when leases change; `end` it after completion."""
        with self._ledger.lock:
            return StepFence(self._ledger)

    def num_available(self) -> int:
        """Blocks that a lease could get: free and evictable ones, some perhaps only after a copy to the host."""
        with self._ledger.lock:
            cache = self._ledger.cache
            return self._ledger.num_available + (
                0 if self.host_tier is None else len(cache.unsaved) + len(cache.saving)
            )

    def num_deferred(self) -> int:
        """Block references that come back when the steps in flight end."""
        with self._ledger.lock:
            return sum(len(fence.blocks) for fence in self._ledger.fences)

    def copies_pending(self) -> bool:
        """Blocks become available by the end of copies to the host alone."""
        with self._ledger.lock:
            return self._ledger.host_tier is not None and self._ledger.host_tier.busy

    def counts(self) -> PoolCounts:
        with self._ledger.lock:
            return self._ledger.counts()

    def cached_hashes(self) -> list[bytes]:
        """All hashes that a match can find, parents before children."""
        with self._ledger.lock:
            return list(self._ledger.cache.block_by_hash)

    def host_hashes(self) -> list[bytes]:
        """All hashes of which the host has a copy."""
        with self._ledger.lock:
            return [] if self._ledger.host_tier is None else self._ledger.host_tier.hashes()

    def host_stats(self) -> HostStats | None:
        """None: there is no host tier."""
        with self._ledger.lock:
            return None if self._ledger.host_tier is None else self._ledger.host_tier.stats()

    def reset_prefix_cache(self) -> int:
        """Evict everything evictable, and forget what the host has; returns how many blocks of the pool that was."""
        ledger = self._ledger
        with ledger.lock:
            if ledger.host_tier is not None:
                ledger.host_tier.clear()
            evicted = ledger.evict(len(ledger.cache.evictable))
            ledger.free.extend(evicted)
            return len(evicted)

    def check_integrity(self) -> None:
        """Integrity check over all blocks; raises InternalError naming the first defects."""
        with self._ledger.lock:
            found = self._ledger.inconsistencies()
        if found:
            raise InternalError("block pool is inconsistent: " + "; ".join(found[:5]))
