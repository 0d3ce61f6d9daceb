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
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from common.errors import InternalError
from common.types import PoolCounts
from engine.kv.host_tier import HostLoad, HostTier, HostTierStats, SavedPartialBlock
from engine.kv.prefix_cache import HashesCallback, PrefixCache

__all__ = ["BlockPin", "BlockPool", "HostTierStats", "Lease", "SavedPartialBlock", "StepFence"]

AVAILABLE_SHARE = 8  # of so many blocks one is kept ready to be handed out, where evicted ones go to the host


def _no_callback(hashes: list[bytes]) -> None:
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
        on_stored: HashesCallback = _no_callback,
        on_evicted: HashesCallback = _no_callback,
        host_blocks: int = 0,
        host_batch: int = 64,
        on_host_stored: HashesCallback = _no_callback,
        on_host_evicted: HashesCallback = _no_callback,
    ) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ledger = ledger = _BlockLedger(num_blocks, on_stored, on_evicted, tiered=host_blocks > 0)
        self.host_tier: HostTier | None = None
        if host_blocks:
            self.host_tier = ledger.host_tier = HostTier(
                ledger.lock,
                ledger.cache,
                lambda: ledger.num_available,
                num_host_blocks=host_blocks,
                min_available=max(1, num_blocks // AVAILABLE_SHARE),
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
        parked: SavedPartialBlock | None = None,
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
                lease.host_load = tier.load(keys, targets, BlockPin(ledger, targets, is_writer=True).release_locked)
            return lease

    def match_prefix(self, hashes: Sequence[bytes]) -> int:
        """Blocks of the longest cached prefix of `hashes`, the host's included."""
        with self._ledger.lock:
            here = len(self._ledger.cache.match(hashes))
            return here if self._ledger.host_tier is None else here + self._ledger.host_tier.match(hashes[here:])

    def pin_prefix(self, hashes: Sequence[bytes], first: int) -> BlockPin | None:
        """Holds, for somebody who reads them, the pool's blocks of this chain from place `first` on; None for none."""
        ledger = self._ledger
        with ledger.lock:
            found = ledger.cache.match(hashes)[first:]
            return BlockPin(ledger, found, is_writer=False) if found else None

    def save_partial_block(self, lease: Lease, computed: int) -> SavedPartialBlock | None:
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
            pin = BlockPin(ledger, [block], is_writer=False)
            return SavedPartialBlock(ledger.host_tier.save_partial_block(parent, block, pin.release_locked), computed)

    def drop_partial_block(self, parked: SavedPartialBlock) -> None:
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

    def host_stats(self) -> HostTierStats | None:
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


class _BlockLedger:
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
        self.pins: set[BlockPin] = set()
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


class BlockPin:
    """Blocks that bytes may still be written to (`writes`) or read from by someone other than the request.

    blocks: the physical blocks it was granted on, in logical order; held: those not released yet. Thread-safe.
    """

    __slots__ = ("_ledger", "blocks", "is_writer", "pinned")

    def __init__(self, ledger: _BlockLedger, blocks: Iterable[int], *, is_writer: bool) -> None:
        """Called under the ledger's lock, by a lease."""
        self.blocks = tuple(blocks)
        self.is_writer = is_writer
        self.pinned = set(self.blocks)
        self._ledger = ledger
        ledger.acquire(self.blocks, ledger.writers if is_writer else ledger.readers)
        ledger.pins.add(self)

    def release(self, blocks: Sequence[int] | None = None) -> None:
        """Give up `blocks` (physical; None for all); what was released before is skipped, a stranger raises."""
        with self._ledger.lock:
            if blocks is not None and not set(blocks).issubset(self.blocks):
                raise InternalError(f"blocks {sorted(set(blocks).difference(self.blocks))} are not of this hold")
            self.release_locked(self.pinned if blocks is None else self.pinned.intersection(blocks))

    def release_locked(self, gone: Collection[int] | None = None) -> None:
        """`release` of held blocks (None for all), under the ledger's lock."""
        ledger = self._ledger
        gone = self.pinned if gone is None else gone
        if not gone:
            return
        ledger.release(
            [b for b in reversed(self.blocks) if b in gone], ledger.writers if self.is_writer else ledger.readers
        )
        self.pinned = self.pinned.difference(gone)
        if not self.pinned:
            ledger.pins.discard(self)


class StepFence:
    """Open from before a step's launch until its completion; costs nothing per block the step touches.

    The epoch scheme of Fraser (Practical lock-freedom, 2004): releases during the step wait for its end, so neither an
    abort nor a preemption gives a block away that the device still reads or writes. The blocks that leases left behind
    for a copy (`Lease.own`) while this step was planned are kept too: it copies from them.
    """

    __slots__ = ("_ledger", "blocks")

    def __init__(self, ledger: _BlockLedger) -> None:
        """Called under the ledger's lock, by the pool."""
        self.blocks, ledger.copy_sources = ledger.copy_sources, []
        self._ledger = ledger
        ledger.fences.append(self)

    def end(self) -> None:
        """The step completed; idempotent, thread-safe, in any order (blocks wait for older open steps)."""
        ledger = self._ledger
        with ledger.lock:
            if self not in ledger.fences:
                return
            position = ledger.fences.index(self)
            del ledger.fences[position]
            if position:
                ledger.fences[position - 1].blocks.extend(self.blocks)
            else:
                ledger.release(self.blocks, ledger.requests)
            self.blocks = []


class BlockCopy(NamedTuple):
    """The bytes of one physical block go to another."""

    source: int
    target: int


class Lease:
    """blocks: physical blocks in logical order, empty once finished.

    cached_blocks: how many of them came from the cache with their KV, host_blocks of them from the host. published: how
    many lead blocks have their hash registered. swaps: how often one of `blocks` was replaced; otherwise they only grow
    and shrink at the end. borrowed: place of the block that may not be written before `own`, -1 for none. load: blocks
    on their way from the host; none of the lease is to be used before it is done. resumed: a parked block follows the
    cached ones.
    """

    __slots__ = (
        "_ledger",
        "blocks",
        "cached_blocks",
        "cow_index",
        "finished",
        "host_blocks",
        "host_load",
        "num_published",
        "num_replaced",
        "reason",
        "restored_partial",
    )

    def __init__(self, ledger: _BlockLedger, blocks: list[int], matched: int, *, host_blocks: int = 0) -> None:
        """Called under the ledger's lock, by the pool, with one request counted on each block. matched: blocks that are
        registered already.
        """
        self.blocks = blocks
        self.cached_blocks = matched + host_blocks
        self.host_blocks = host_blocks
        self.cow_index = -1
        self.host_load: HostLoad | None = None
        self.restored_partial = False
        self.num_published = matched
        self.finished = False
        self.reason = ""
        self.num_replaced = 0
        self._ledger = ledger
        ledger.leases.add(self)

    @property
    def host_loading(self) -> bool:
        """Blocks are still on their way from the host."""
        return self.host_load is not None and not self.host_load.done

    def grow(self, n: int = 1) -> bool:
        """Add n blocks at the end; False, and no change, when the pool has not that many."""
        ledger = self._ledger
        with ledger.lock:
            self._require_live()
            if not ledger.can_allocate(n):
                return False
            self.blocks.extend(ledger.allocate(n))
            return True

    def trim(self, count: int) -> None:
        """Give up all but the first `count` blocks; none of the others is published or has KV that counts."""
        ledger = self._ledger
        with ledger.lock:
            self._require_live()
            if count < self.num_published:
                raise InternalError(f"{self.num_published} published blocks do not fit in {count}")
            surplus = self.blocks[count:]
            del self.blocks[count:]
            surplus.reverse()
            ledger.release_after_steps(surplus)

    def fork(self, shared: int, *, spare: int = 0) -> Lease:
        """Another lease on the first `shared` blocks, whose KV is complete up to the last one; the last `spare` blocks
        of this lease go with it. Where not all that is shared is published, both borrow the last of it from now on.
        """
        ledger = self._ledger
        with ledger.lock:
            self._require_live()
            if not self.num_published <= shared <= len(self.blocks) - spare:
                raise InternalError(f"a fork of {shared} blocks, and {spare} more, from a lease of {len(self.blocks)}")
            lead = self.blocks[:shared]
            moved = [self.blocks.pop() for _ in range(spare)]
            ledger.acquire(lead, ledger.requests)
            other = Lease(ledger, lead + moved, self.num_published)
            other.cached_blocks, other.host_blocks, other.host_load = (
                self.cached_blocks,
                self.host_blocks,
                self.host_load,
            )
            if shared > self.num_published:
                self.cow_index = other.cow_index = shared - 1
            return other

    def copy_on_write(self) -> BlockCopy | None:
        """Replaces the borrowed block, so that the step that is being planned may write there.

        That step has to copy first. Source and target are one block when nobody else uses it any more. None, and no
        change, when it takes a block and the pool has none.
        """
        ledger = self._ledger
        with ledger.lock:
            self._require_live()
            place = self.cow_index
            block = self.blocks[place]
            if not ledger.is_shared(block):
                self.cow_index = -1
                return BlockCopy(block, block)
            if place < len(self.blocks) - 1:
                target = self.blocks.pop()
            elif ledger.can_allocate(1):
                (target,) = ledger.allocate(1)
            else:
                return None
            self.blocks[place] = target
            self.cow_index = -1
            self.num_replaced += 1
            ledger.copy_sources.append(block)
            return BlockCopy(block, target)

    def publish(self, hashes: Sequence[bytes]) -> None:
        """Register the first len(hashes) blocks, whose KV is complete; a duplicate is swapped for the canonical block.

        Stops before a block that has a writer: it is not complete, whatever the caller believes; a later call goes on.
        Publishes nothing after a load that failed.
        """
        ledger = self._ledger
        with ledger.lock:
            self._require_live()
            if self.host_load is not None and self.host_load.error is not None:
                return
            if len(hashes) > len(self.blocks):
                raise InternalError(f"{len(hashes)} hashes for a lease of {len(self.blocks)} blocks")
            stored: list[bytes] = []
            duplicates: list[int] = []
            for i in range(self.num_published, len(hashes)):
                block, block_hash = self.blocks[i], hashes[i]
                if ledger.writers[block]:
                    break
                canonical = ledger.cache.block_by_hash.get(block_hash)
                if canonical is None:
                    ledger.cache.register(block, block_hash, self.blocks[i - 1] if i else -1)
                    stored.append(block_hash)
                elif canonical != block:  # else a fork of this lease has registered it
                    self._swap(i, canonical, duplicates)
                self.num_published = i + 1
            ledger.release_after_steps(duplicates)
            if stored:
                ledger.on_stored(stored)

    def rematch(self, hashes: Sequence[bytes]) -> int:
        """Swap lead blocks, not computed yet, for blocks cached since the lease was taken; returns cached_blocks.

        hashes: of the sequence's matchable blocks. Only for a lease in which nothing has been computed.
        """
        ledger = self._ledger
        with ledger.lock:
            self._require_live()
            duplicates: list[int] = []
            for i in range(self.num_published, min(len(hashes), len(self.blocks))):
                canonical = ledger.cache.block_by_hash.get(hashes[i])
                if canonical is None or ledger.writers[self.blocks[i]]:
                    break
                self._swap(i, canonical, duplicates)
                self.num_published = self.cached_blocks = i + 1
            ledger.release_after_steps(duplicates)
            return self.cached_blocks

    def pin_for_write(self, first: int, count: int) -> BlockPin:
        """Claim logical blocks first..first+count for a writer of bytes; none of them may be published."""
        with self._ledger.lock:
            blocks = self._range(first, count)
            if first < self.num_published:
                raise InternalError(f"a writer on published block {blocks[0]}")
            return BlockPin(self._ledger, blocks, is_writer=True)

    def pin_for_read(self, first: int, count: int) -> BlockPin:
        """Claim logical blocks first..first+count for a reader that may outlive the request."""
        with self._ledger.lock:
            return BlockPin(self._ledger, self._range(first, count), is_writer=False)

    def finish(self, reason: str) -> None:
        """Give up all blocks; idempotent, the first reason stays. Blocks with holds come back when those end."""
        ledger = self._ledger
        with ledger.lock:
            if self.finished:
                return
            self.finished = True
            self.reason = reason
            ledger.leases.discard(self)
            blocks, self.blocks = self.blocks, []
            blocks.reverse()
            ledger.release_after_steps(blocks)

    def _swap(self, i: int, canonical: int, duplicates: list[int]) -> None:
        block = self.blocks[i]
        assert canonical != block, "a block published twice at one place"
        self._ledger.acquire((canonical,), self._ledger.requests)
        self.blocks[i] = canonical
        self.num_replaced += 1
        duplicates.append(block)

    def _range(self, first: int, count: int) -> list[int]:
        self._require_live()
        if first < 0 or count < 0 or first + count > len(self.blocks):
            raise InternalError(f"blocks {first}..{first + count} of a lease of {len(self.blocks)}")
        return self.blocks[first : first + count]

    def _require_live(self) -> None:
        if self.finished:
            raise InternalError(f"lease used after its end ({self.reason})")
