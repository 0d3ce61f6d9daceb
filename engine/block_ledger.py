"""Who uses each block. Holders (leases, holds, step fences) change it under `lock`; the pool is its public face.

Per physical block there is a count of requests, writers and readers. All zero: the block is `cached` if it has a hash,
else `free`; only such a block is ever handed out. A request or a reader makes it `leased`. Writers alone make it
`quarantined`: its request ended, but bytes may still land in it.

A launched engine step reads and writes the blocks of its sequences, so request references that are given up while
steps are in flight are kept by the newest of them and dropped when it and all older ones have ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from common.types import PoolCounts
from engine.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from engine.hold import Hold
    from engine.host_tier import HostTier
    from engine.lease import Lease
    from engine.step_fence import StepFence

HashesCallback = Callable[[list[bytes]], None]


class BlockLedger:
    """Counts per block, the free blocks and the cache; every method expects `lock` to be taken.

    on_stored gets newly registered hashes, parents first; on_evicted gets forgotten ones, children first, before the
    blocks can be reused. Both run under the lock: they may only enqueue, and must not raise. copied: blocks from which
    the step that is being planned copies, with a request on each; its fence takes them over. tier: where evicted blocks
    go; None: nowhere.
    """

    __slots__ = (
        "_num_blocks",
        "_on_evicted",
        "cache",
        "copy_sources",
        "fences",
        "free",
        "host_tier",
        "leases",
        "lock",
        "on_stored",
        "pins",
        "quarantined",
        "readers",
        "requests",
        "writers",
    )

    def __init__(
        self, num_blocks: int, on_stored: HashesCallback, on_evicted: HashesCallback, *, tiered: bool = False
    ) -> None:
        """tiered: whoever makes it sets `tier` at once."""
        self.lock = threading.Lock()
        self.cache = PrefixCache(num_blocks, has_host_tier=tiered)
        self.host_tier: HostTier | None = None
        self.requests = [0] * num_blocks
        self.writers = [0] * num_blocks
        self.readers = [0] * num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))
        self.quarantined = 0
        self.leases: set[Lease] = set()
        self.pins: set[Hold] = set()
        self.fences: list[StepFence] = []
        self.copy_sources: list[int] = []
        self.on_stored = on_stored
        self._on_evicted = on_evicted
        self._num_blocks = num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: free and evictable ones."""
        return len(self.free) + len(self.cache.evictable)

    def can_allocate(self, count: int) -> bool:
        """So many blocks can be handed out now. If not, some that only need a copy in the host soon can."""
        if self.num_available >= count:
            return True
        if self.host_tier is not None:
            self.host_tier.request_free(count)
        return False

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` available blocks with one request on each, evicting where nothing is free. In rising order:
        neighbours then follow each other in a sequence, and its KV travels in longer runs.
        """
        assert count <= self.num_available
        cut = max(0, len(self.free) - count)
        taken = self.free[cut:][::-1]
        del self.free[cut:]
        if len(taken) < count:
            taken += self.evict(count - len(taken))
        taken.sort()
        requests = self.requests
        for block in taken:
            requests[block] = 1
        if self.host_tier is not None:
            self.host_tier.wake_copier()
        return taken

    def evict(self, count: int) -> list[int]:
        """Forget the `count` oldest evictable blocks; they are the caller's now."""
        evicted = [self.cache.evict() for _ in range(count)]
        if evicted:
            self._on_evicted([block_hash for _, block_hash in evicted])
            if self.host_tier is not None:
                for _, block_hash in evicted:
                    self.host_tier.on_evicted_from_pool(block_hash)
        return [block for block, _ in evicted]

    def acquire(self, blocks: Iterable[int], counts: list[int]) -> None:
        """One more user of each block; counts is `requests`, `writers` or `readers`."""
        idle, hold = self.cache.idle, self.cache.pin
        for block in blocks:
            if idle[block]:
                hold(block)
            counts[block] += 1

    def release(self, blocks: Iterable[int], counts: list[int]) -> None:
        """One user less of each block; give the blocks of one chain children first."""
        requests, readers, writers = self.requests, self.readers, self.writers
        hashes, rest, free, tier = self.cache.hash_by_block, self.cache.unpin, self.free, self.host_tier
        for block in blocks:
            assert counts[block] > 0
            counts[block] -= 1
            if requests[block] or readers[block]:
                continue
            if writers[block]:
                if counts is not writers:
                    self.quarantined += 1
                continue
            if counts is writers:
                self.quarantined -= 1
            if (block_hash := hashes[block]) is None:
                free.append(block)
                continue
            if tier is not None and block not in self.cache.saving:
                self.cache.saved[block] = tier.mark_used(block_hash)
            rest(block)
        if tier is not None:
            tier.wake_copier()

    def release_after_steps(self, blocks: Sequence[int]) -> None:
        """A request no longer needs `blocks` (children first); steps in flight still may."""
        if self.fences:
            self.fences[-1].blocks.extend(blocks)
        else:
            self.release(blocks, self.requests)

    def is_shared(self, block: int) -> bool:
        """Another lease, or a reader, uses the block that a lease holds; steps that copy from it do not count."""
        passing = self.copy_sources.count(block) + sum(fence.blocks.count(block) for fence in self.fences)
        return self.requests[block] - passing > 1 or self.readers[block] > 0

    def counts(self) -> PoolCounts:
        free, cached = len(self.free), self.cache.num_idle
        leased = self._num_blocks - free - cached - self.quarantined
        return PoolCounts(free=free, cached=cached, leased=leased, quarantined=self.quarantined)

    def inconsistencies(self) -> list[str]:
        """What does not add up; recomputed from the live leases, holds and fences, over all blocks."""
        expected = {
            "request": [0] * self._num_blocks,
            "writer": [0] * self._num_blocks,
            "reader": [0] * self._num_blocks,
        }
        for blocks, kind in (
            *((lease.blocks, "request") for lease in self.leases),
            *((fence.blocks, "request") for fence in self.fences),
            (self.copy_sources, "request"),
            *((hold.pinned, "writer" if hold.is_writer else "reader") for hold in self.pins),
        ):
            for block in blocks:
                expected[kind][block] += 1
        found = self.cache.inconsistencies()
        if self.host_tier is not None:
            found += self.host_tier.inconsistencies()
        for kind, actual in (("request", self.requests), ("writer", self.writers), ("reader", self.readers)):
            found += [
                f"block {b} has a {kind} count of {n}, not {expected[kind][b]}"
                for b, n in enumerate(actual)
                if n != expected[kind][b]
            ]
        states = [0, 0, 0, 0]
        free = set(self.free)
        for b in range(self._num_blocks):
            used = self.requests[b] or self.readers[b]
            hashed = self.cache.hash_by_block[b] is not None
            if self.writers[b] and hashed:
                found.append(f"block {b} is published and being written")
            states[2 if used else 3 if self.writers[b] else 1 if hashed else 0] += 1
            if (b in free) != (not used and not self.writers[b] and not hashed):
                found.append(f"block {b} is wrongly {'' if b in free else 'not '}free")
            if bool(self.cache.idle[b]) != (hashed and not used):
                found.append(f"block {b} is wrongly {'' if self.cache.idle[b] else 'not '}idle")
        counts = self.counts()
        if len(free) != len(self.free) or states != [counts.free, counts.cached, counts.leased, counts.quarantined]:
            found.append(f"free, cached, leased, quarantined are {states}, reported {counts}")
        return found
