"""The ledger of KV blocks: which blocks are free, leased, cached or quarantined, and who keeps them.

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

Pins and fences change the counts under the ledger's lock, as leases do (lease.py).
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol, TypedDict, Unpack

from common.errors import InternalError
from common.types import PoolCounts
from engine.kv.prefix_cache import HashesCallback, PrefixCache
from engine.kv.tiers.file_tier import FileTier
from engine.kv.tiers.host_tier import HostTier

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


class PageHolder(Protocol):
    """A lease, as the ledger sees it."""

    def all_pages(self) -> list[int]: ...


class BlockLedger:
    """The counts of all blocks, and the changes of their states. Thread-safe; methods with `_` need the lock."""

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
        self._leases: set[PageHolder] = set()
        self._pins: set[BlockPin] = set()
        self._fences: list[StepFence] = []  # Open step fences, oldest first
        self._copy_sources: list[int] = []  # Blocks that the planned step copies from, with one hold on each
        self._on_stored = callbacks.get("on_stored", _no_callback)
        self._on_evicted = callbacks.get("on_evicted", _no_callback)
        self.disk_tier: FileTier | None = None  # Files of this pod
        self.shared_tier: FileTier | None = None  # Files of all pods
        #: Called under the lock when a load or a copy has ended for which a sequence may wait. Must not block.
        self.on_progress: Callable[[], None] = lambda: None
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
            self.host_tier.on_copied = self._tell_progress

    def check_integrity(self) -> None:
        """Recomputes all counts from leases, pins and fences. Raises InternalError with the first five defects."""
        with self.lock:
            defects = self._inconsistencies()
        if defects:
            raise InternalError("block pool is inconsistent: " + "; ".join(defects[:5]))

    def _tell_progress(self) -> None:
        """Tells the engine that a load or a copy has ended."""
        self.on_progress()

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
        for tier in (self.disk_tier, self.shared_tier):
            defects += [] if tier is None else tier.store.inconsistencies()
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


class BlockPin:
    """Keeps blocks from reuse while a writer or a reader outside the request may touch them. Thread-safe."""

    __slots__ = ("_counts", "_ledger", "blocks", "is_writer", "pinned")

    def __init__(self, ledger: BlockLedger, blocks: Sequence[int], *, is_writer: bool) -> None:
        """Made by a lease or the pool, under the lock."""
        self.blocks = tuple(blocks)  # The physical blocks, in logical order
        self.is_writer = is_writer
        self.pinned = set(self.blocks)  # The blocks that are not released yet
        self._ledger = ledger
        self._counts = ledger._writers if is_writer else ledger._readers
        ledger._acquire(self.blocks, self._counts)
        ledger._pins.add(self)

    def release(self, blocks: Sequence[int] | None = None) -> None:
        """Releases physical blocks (None for all); skips blocks released before. InternalError for other blocks."""
        with self._ledger.lock:
            if blocks is not None and not set(blocks).issubset(self.blocks):
                raise InternalError(f"blocks {sorted(set(blocks).difference(self.blocks))} do not belong to this pin")
            self.release_locked(self.pinned if blocks is None else self.pinned.intersection(blocks))

    def release_locked(self, released: Collection[int] | None = None) -> None:
        """`release` of blocks that are still pinned (None for all), for a caller that holds the lock."""
        released = self.pinned if released is None else released
        if released:
            self._ledger._release([b for b in reversed(self.blocks) if b in released], self._counts)
            self.pinned = self.pinned.difference(released)
            if not self.pinned:
                self._ledger._pins.discard(self)


class StepFence:
    """Keeps blocks that leases release during a step, and those that the step copies from, until the step has ended.

    A step may read and write the blocks that it was launched with, whatever an abort or a preemption does to their
    leases meanwhile. This is the epoch scheme of Fraser (Practical lock-freedom, 2004): the cost does not depend on the
    number of blocks that the step uses.
    """

    __slots__ = ("_ledger", "blocks")

    def __init__(self, ledger: BlockLedger) -> None:
        """Made by the pool, under the lock."""
        self.blocks, ledger._copy_sources = ledger._copy_sources, []  # Blocks to release when the step ends
        self._ledger = ledger
        ledger._fences.append(self)

    def end(self) -> None:
        """Call when the step has ended. Idempotent, thread-safe, in any order: blocks wait for older open steps."""
        ledger = self._ledger
        with ledger.lock:
            if self not in ledger._fences:
                return
            position = ledger._fences.index(self)
            del ledger._fences[position]
            if position:
                ledger._fences[position - 1].blocks.extend(self.blocks)
            else:
                ledger._release(self.blocks, ledger._holds)
            self.blocks = []
