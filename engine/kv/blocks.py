"""The pool of KV blocks: which blocks are free, leased, cached or quarantined, and the leases on them.

+--------+   allocate    +--------+   last user ends, block is registered   +--------+
|  free  | ------------> | leased | --------------------------------------> | cached |
|        | <------------ |        | <-------------------------------------- |        |
+--------+   last user   +--------+   a prompt matches, or the block is     +--------+
    ^        ends             |       evicted and allocated
    |                         | last user ends, a writer is left
    | last writer ends        v
    |                  +-------------+   A *user* is a lease, a step fence or a reader's pin.
    +----------------- | quarantined |   A *writer* is a writer's pin: bytes may still arrive.
                       +-------------+   Always: free + cached + leased + quarantined == total.

Leases, pins and fences are made by the pool and change its counts under its lock.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypedDict, Unpack

from common.errors import InternalError
from common.types import PoolCounts
from engine.kv.eviction import Retention
from engine.kv.lease import BlockPin, Lease, StepFence
from engine.kv.prefix_cache import HashesCallback, PrefixCache
from engine.kv.tiers.disk_tier import NO_LOAD, DiskLoad, DiskTier, DiskTierStats
from engine.kv.tiers.host_tier import HostTier, HostTierStats, SavedPartialBlock
from engine.kv.tiers.segment_store import SegmentStore

AVAILABLE_SHARE = 8  # With a host tier, copies keep 1 / AVAILABLE_SHARE of the blocks free or evictable


class CacheCallbacks(TypedDict, total=False):
    """Callbacks of a pool. They run under its lock, so they may only enqueue, and must not raise."""

    on_stored: HashesCallback  # Gets hashes that a match can find from now on, parents before children
    on_evicted: HashesCallback  # Gets hashes that a match no longer finds, children first, before blocks are reused
    on_host_stored: HashesCallback  # Gets hashes that the host tier gained
    on_host_evicted: HashesCallback  # Gets hashes that the host tier lost
    on_disk_stored: HashesCallback  # As for the host; called under the lock of the disk tier's files
    on_disk_evicted: HashesCallback


def _no_callback(hashes: list[bytes]) -> None:
    """Does nothing."""


class BlockPool:
    """The blocks, a prefix cache and, on request, a host tier. Thread-safe; methods with `_` need the lock."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        host_blocks: int = 0,  # Blocks of the host tier; 0 for no host tier
        host_batch: int = 64,  # Max blocks of one copy to the host
        policy: str = "lru",  # One of eviction.POLICIES
        max_pinned: int = 0,  # Blocks that may have the priority PINNED
        max_pinned_by_tenant: int = 0,  # Part of them that one tenant may have; 0 for all of them
        keeps_prefixes: bool = True,  # False: no block is published, so none is found again
        **callbacks: Unpack[CacheCallbacks],
    ) -> None:
        assert num_blocks > 0
        assert block_size > 0
        assert callbacks.keys() <= CacheCallbacks.__annotations__.keys()
        self.num_blocks, self.block_size = num_blocks, block_size
        self._keeps_prefixes = keeps_prefixes
        self.pages_per_block = 1  # More with KV groups, see grouped_blocks.py; `num_blocks` counts pages then
        self.lock = threading.Lock()  # Guards the pool, its leases and pins, the prefix cache and the host tier
        self._cache = PrefixCache(
            num_blocks,
            has_host_tier=host_blocks > 0,
            policy=policy,
            max_pinned=max_pinned,
            max_pinned_by_tenant=max_pinned_by_tenant,
        )
        self._holds = [0] * num_blocks  # Leases, step fences and planned copies on each block
        self._writers = [0] * num_blocks  # Writers' pins on each block
        self._readers = [0] * num_blocks  # Readers' pins on each block
        self._free = list(range(num_blocks - 1, -1, -1))
        self._quarantined = 0  # Number of quarantined blocks
        self._leases: set[Lease] = set()
        self._pins: set[BlockPin] = set()
        self._fences: list[StepFence] = []  # Open step fences, oldest first
        self._copy_sources: list[int] = []  # Blocks that the planned step copies from, with one hold on each
        self._on_stored = callbacks.get("on_stored", _no_callback)
        self._on_evicted = callbacks.get("on_evicted", _no_callback)
        self.disk_tier: DiskTier | None = None
        self.host_tier: HostTier | None = None
        if host_blocks:
            self.host_tier = HostTier(
                self.lock,
                self._cache,
                self._num_allocatable,
                num_host_blocks=host_blocks,
                min_available=max(1, num_blocks // AVAILABLE_SHARE),
                batch=host_batch,
                on_stored=callbacks.get("on_host_stored", _no_callback),
                on_evicted=callbacks.get("on_host_evicted", _no_callback),
            )

    def attach_disk_tier(self, store: SegmentStore) -> DiskTier:
        """Puts a disk tier behind the host tier. Call it once, before the first lease."""
        host_tier = self.host_tier
        assert host_tier is not None
        self.disk_tier = DiskTier(self.lock, self._cache, host_tier, store, self.block_size)
        host_tier.disk_tier = self.disk_tier
        host_tier.pin_for_read = lambda blocks: BlockPin(self, blocks, is_writer=False).release_locked
        return self.disk_tier

    def load_from_disk(self, hashes: Sequence[bytes], compute_s: Callable[[int], float] | None = None) -> DiskLoad:
        """Starts to read what follows the cached prefix of `hashes`, see DiskTier.load; done without a disk tier."""
        return NO_LOAD if self.disk_tier is None else self.disk_tier.load(hashes, compute_s)

    def pages_for(self, num_tokens: int) -> int:
        """Returns the number of blocks that a sequence of `num_tokens` tokens needs."""
        return -(-num_tokens // self.block_size)

    def blocks_that_fit(self, num_pages: int) -> int:
        """Returns the blocks of the longest sequence that fits in so many pages: with KV groups they are fewer."""
        return num_pages

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that fits."""
        return self.blocks_that_fit(self.num_blocks) * self.block_size

    def lease(
        self,
        hashes: Sequence[bytes],  # Hashes of the blocks that a cache may supply, in order
        total_blocks: int,
        *,
        keep_free: int = 0,  # Blocks that must stay available
        host: bool = False,
        saved_partial: SavedPartialBlock | None = None,  # Restored if exactly the blocks before it are cached
        retention: Retention | None = None,  # Of the blocks that match, and of those that the lease publishes
    ) -> Lease | None:
        """Leases total_blocks blocks: the longest cached prefix of `hashes`, then empty blocks.

        With `host` the prefix may go on in the host tier; `Lease.host_load` must then be done before the lease is used.
        Returns None, and changes nothing, if too few blocks are available.
        """
        host_tier = self.host_tier if host else None
        with self.lock:
            cached = self._cache.match(hashes[:total_blocks])
            need = total_blocks - len(cached)
            if not self._can_allocate(keep_free + need + self._cache.count_evictable(cached)):
                return None
            self._acquire(cached, self._holds)
            self._cache.retain(cached, retention)
            if host_tier is None:
                return Lease(self, cached + self._allocate(need), len(cached), retention=retention)
            keys = list(hashes[len(cached) : len(cached) + host_tier.match(hashes[len(cached) :])])
            lease = Lease(self, cached + self._allocate(need), len(cached), host_blocks=len(keys), retention=retention)
            if (
                saved_partial is not None
                and lease.cached_blocks < total_blocks
                and lease.cached_blocks == saved_partial.computed // self.block_size
                and host_tier.match([saved_partial.key])
            ):
                lease.restored_partial = True
                keys.append(saved_partial.key)
            if keys:
                targets = lease.blocks[len(cached) : len(cached) + len(keys)]
                lease.host_load = host_tier.load(keys, targets, BlockPin(self, targets, is_writer=True).release_locked)
            return lease

    def match_prefix(self, hashes: Sequence[bytes]) -> int:
        """Returns the length of the longest cached prefix of `hashes` in blocks, in the pool and then the host tier."""
        with self.lock:
            count = len(self._cache.match(hashes))
            return count if self.host_tier is None else count + self.host_tier.match(hashes[count:])

    def prefix_pages(self, num_blocks: int) -> int:
        """Returns the number of pages in which a prefix of blocks is lent to another pod: more with KV groups."""
        return num_blocks

    def lendable_blocks(self, hashes: Sequence[bytes]) -> int:
        """Returns the length of the longest prefix of `hashes` that another pod can get from the pool, in blocks."""
        with self.lock:
            return len(self._cache.match(hashes))

    def pin_prefix(self, hashes: Sequence[bytes], first: int) -> BlockPin | None:
        """Pins for a reader the longest prefix of `hashes` in the pool, from block `first` on; None without blocks."""
        with self.lock:
            matched = self._cache.match(hashes)[first:]
            return BlockPin(self, matched, is_writer=False) if matched else None

    def save_partial_block(self, lease: Lease, computed: int) -> SavedPartialBlock | None:
        """Starts to copy the last, partial block of `computed` tokens to the host, before the lease is given up.

        Returns None if the block is full, if blocks before it are not published, or without a host tier.
        """
        host_tier, (index, tokens) = self.host_tier, divmod(computed, self.block_size)
        with self.lock:
            if host_tier is None or host_tier.closed or not tokens or lease.num_published < index:
                return None
            block = lease.blocks[index]
            parent = self._cache.hash_by_block[lease.blocks[index - 1]] if index else None
            pin = BlockPin(self, [block], is_writer=False)
            return SavedPartialBlock(host_tier.save_partial_block(parent, block, pin.release_locked), computed)

    def drop_partial_block(self, saved: SavedPartialBlock) -> None:
        """Forgets a saved partial block. Idempotent."""
        with self.lock:
            if self.host_tier is not None:
                self.host_tier.drop_partial_block(saved.key)

    def begin_step(self) -> StepFence:
        """Makes the fence of a step; call before the launch, and `end` the fence when the step has ended."""
        with self.lock:
            return StepFence(self)

    def num_available(self) -> int:
        """Returns the number of blocks that a lease could get, if need be after copies to the host."""
        with self.lock:
            return self._num_allocatable() + len(self._cache.unsaved) + len(self._cache.saving)

    def num_deferred(self) -> int:
        """Returns the number of block references that are released when the steps in flight end."""
        with self.lock:
            return sum(len(fence.blocks) for fence in self._fences)

    def copies_pending(self) -> bool:
        """Returns whether copies to the host will make blocks available, without any other event."""
        with self.lock:
            return self.host_tier is not None and self.host_tier.busy

    def counts(self) -> PoolCounts:
        """Returns the number of blocks in each state."""
        with self.lock:
            return self._counts()

    def cached_hashes(self) -> list[bytes]:
        """Returns all hashes that a match can find in the pool, parents before children."""
        with self.lock:
            return list(self._cache.block_by_hash)

    def host_hashes(self) -> list[bytes]:
        """Returns all hashes of full blocks in the host tier."""
        with self.lock:
            return [] if self.host_tier is None else self.host_tier.hashes()

    def disk_hashes(self) -> list[bytes]:
        """Returns all hashes in the disk tier."""
        return [] if self.disk_tier is None else self.disk_tier.store.hashes()

    def disk_tokens_per_s(self) -> float:
        """Returns the prompt tokens per second that loads from the disk reach; 0 before the first one."""
        tier = self.disk_tier
        return 0.0 if tier is None else tier.read_rate / tier.store.block_bytes * self.block_size

    def disk_stats(self) -> DiskTierStats | None:
        """Returns the counts of the disk tier; None without one."""
        return None if self.disk_tier is None else self.disk_tier.stats()

    def host_stats(self) -> HostTierStats | None:
        """Returns the counts of the host tier; None without one."""
        with self.lock:
            return None if self.host_tier is None else self.host_tier.stats()

    def reset_prefix_cache(self) -> int:
        """Evicts all evictable blocks and empties the other tiers; returns the number of evicted blocks."""
        with self.lock:
            if self.host_tier is not None:
                self.host_tier.clear()  # releases the lock for a while, so the disk tier forgets its blocks last
            if self.disk_tier is not None:
                self.disk_tier.clear()
            evicted = self._evict(len(self._cache.evictable))
            self._free += evicted
            return len(evicted)

    def check_integrity(self) -> None:
        """Recomputes all counts from leases, pins and fences. Raises InternalError with the first five defects."""
        with self.lock:
            defects = self._inconsistencies()
        if defects:
            raise InternalError("block pool is inconsistent: " + "; ".join(defects[:5]))

    # -- for leases, pins and fences; the lock is held ---------------------------------------------------------------

    def _num_allocatable(self) -> int:
        """Returns the number of free and evictable blocks."""
        return len(self._free) + len(self._cache.evictable)

    def _can_allocate(self, count: int) -> bool:
        """Returns whether `count` blocks can be allocated now. If not, asks the host tier to make more evictable."""
        if len(self._free) + len(self._cache.evictable) >= count:
            return True
        if self.host_tier is not None:
            self.host_tier.request_free(count)
        return False

    def _allocate(self, count: int) -> list[int]:
        """Allocates `count` available blocks with one hold on each; evicts cached ones if too few are free.

        The blocks ascend: neighbours in a sequence are then often neighbours in memory, and KV is sent in longer runs.
        """
        free, holds = self._free, self._holds
        cut = max(0, len(free) - count)
        taken = free[cut:]
        del free[cut:]
        if len(taken) < count:
            taken += self._evict(count - len(taken))
        taken.sort()
        for block in taken:
            holds[block] = 1
        if self.host_tier is not None:
            self.host_tier.wake_copier()
        return taken

    def _evict(self, count: int) -> list[int]:
        """Unregisters the `count` oldest evictable blocks and returns them; they are in no list afterwards."""
        evicted = [self._cache.evict() for _ in range(count)]
        if evicted:
            self._on_evicted([block_hash for _, block_hash in evicted])
            if self.host_tier is not None:
                for _, block_hash in evicted:
                    self.host_tier.on_evicted_from_pool(block_hash)
        return [block for block, _ in evicted]

    def _acquire(self, blocks: Sequence[int], counts: list[int]) -> None:
        """Adds one to `counts` (`_holds`, `_writers` or `_readers`) of each block."""
        self._cache.mark_in_use(blocks)
        for block in blocks:
            counts[block] += 1

    def _release(self, blocks: Iterable[int], counts: list[int]) -> None:
        """Takes one from `counts` of each block; the blocks of a sequence come last to first."""
        holds, readers, writers, host_tier = self._holds, self._readers, self._writers, self.host_tier
        unused: list[int] = []
        for block in blocks:
            assert counts[block] > 0
            counts[block] -= 1
            if holds[block] or readers[block]:
                continue
            if not writers[block]:
                unused.append(block)
            elif counts is not writers:
                self._quarantined += 1
        if counts is writers:
            self._quarantined -= len(unused)
        self._free += self._cache.mark_idle(unused, None if host_tier is None else host_tier.on_idle)
        if host_tier is not None:
            host_tier.wake_copier()

    def _release_after_steps(self, blocks: Sequence[int]) -> None:
        """Releases a lease's blocks, last to first, when the steps in flight, which may use them, have ended."""
        if self._fences:
            self._fences[-1].blocks.extend(blocks)
        else:
            self._release(blocks, self._holds)

    def _is_shared(self, block: int) -> bool:
        """Returns whether a second lease or a reader uses a leased block; steps that copy from it do not count."""
        step_users = self._copy_sources.count(block) + sum(fence.blocks.count(block) for fence in self._fences)
        return self._holds[block] - step_users > 1 or self._readers[block] > 0

    def _counts(self) -> PoolCounts:
        free, cached = len(self._free), self._cache.num_idle
        leased = self.num_blocks - free - cached - self._quarantined
        return PoolCounts(free=free, cached=cached, leased=leased, quarantined=self._quarantined)

    def _inconsistencies(self) -> list[str]:
        """Returns the defects, one sentence each."""
        defects = self._cache.inconsistencies()
        defects += [] if self.host_tier is None else self.host_tier.inconsistencies()
        defects += [] if self.disk_tier is None else self.disk_tier.store.inconsistencies()
        users = [*(lease.all_pages() for lease in self._leases), *(fence.blocks for fence in self._fences)]
        for kind, actual, holders in (
            ("hold", self._holds, [*users, self._copy_sources]),
            ("writer", self._writers, [pin.pinned for pin in self._pins if pin.is_writer]),
            ("reader", self._readers, [pin.pinned for pin in self._pins if not pin.is_writer]),
        ):
            expected = Counter(itertools.chain.from_iterable(holders))
            wrong = [(b, n) for b, n in enumerate(actual) if n != expected[b]]
            defects += [f"block {b} has a {kind} count of {n}, not {expected[b]}" for b, n in wrong]
        states = [0, 0, 0, 0]
        free = set(self._free)
        for b in range(self.num_blocks):
            used = self._holds[b] or self._readers[b]
            hashed, idle = self._cache.hash_by_block[b] is not None, bool(self._cache.idle[b])
            if self._writers[b] and hashed:
                defects.append(f"block {b} is published and being written")
            states[2 if used else 3 if self._writers[b] else 1 if hashed else 0] += 1
            if (b in free) != (not used and not self._writers[b] and not hashed):
                defects.append(f"block {b} is wrongly {'' if b in free else 'not '}free")
            if idle != (hashed and not used):
                defects.append(f"block {b} is wrongly {'' if idle else 'not '}idle")
        counts = self._counts()
        if len(free) != len(self._free) or states != [counts.free, counts.cached, counts.leased, counts.quarantined]:
            defects.append(f"free, cached, leased, quarantined are {states}, reported {counts}")
        return defects
