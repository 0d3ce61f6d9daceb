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
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import NamedTuple

from common.errors import BatonError, InternalError
from common.types import PoolCounts
from engine.kv.host_tier import HostLoad, HostTier, HostTierStats, SavedPartialBlock
from engine.kv.prefix_cache import HashesCallback, PrefixCache

#: With a host tier one block of this many is kept free or evictable, by copies to the host ahead of time.
AVAILABLE_SHARE = 8


class BlockCopy(NamedTuple):
    """A copy of the bytes of one physical block to another."""

    source: int
    target: int


class _BlockLedger:
    """The counts of each block, the free blocks and the prefix cache. Every method expects `lock` to be held."""

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
        self, num_blocks: int, on_stored: HashesCallback, on_evicted: HashesCallback, *, has_host_tier: bool
    ) -> None:
        self.lock = threading.Lock()
        self.cache = PrefixCache(num_blocks, has_host_tier=has_host_tier)
        #: Set by the pool at once if there is one.
        self.host_tier: HostTier | None = None
        #: Leases and step fences on each block.
        self.requests = [0] * num_blocks
        #: Writers' and readers' pins on each block.
        self.writers = [0] * num_blocks
        self.readers = [0] * num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))
        #: Number of quarantined blocks.
        self.quarantined = 0
        self.leases: set[Lease] = set()
        self.pins: set[BlockPin] = set()
        #: Open step fences, oldest first.
        self.fences: list[StepFence] = []
        #: Blocks that the step being planned copies from, with a request on each; its fence takes them over.
        self.copy_sources: list[int] = []
        self.on_stored = on_stored
        self._on_evicted = on_evicted
        self._num_blocks = num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now: free and evictable ones."""
        return len(self.free) + self.cache.num_evictable

    def can_allocate(self, count: int) -> bool:
        """Returns whether `count` blocks can be allocated now. If not, asks the host tier to make more evictable."""
        if self.num_available >= count:
            return True
        if self.host_tier is not None:
            self.host_tier.request_free(count)
        return False

    def allocate(self, count: int) -> list[int]:
        """Allocates `count` available blocks with one request on each; evicts cached ones if too few are free.

        The blocks ascend: neighbours in a sequence are then often neighbours in memory, and KV is sent in longer runs.
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
        """Unregisters the `count` oldest evictable blocks and returns them; they are in no list afterwards."""
        evicted = [self.cache.evict() for _ in range(count)]
        if evicted:
            self._on_evicted([block_hash for _, block_hash in evicted])
            if self.host_tier is not None:
                for _, block_hash in evicted:
                    self.host_tier.on_evicted_from_pool(block_hash)
        return [block for block, _ in evicted]

    def acquire(self, blocks: Sequence[int], counts: list[int]) -> None:
        """Adds one to `counts` (`requests`, `writers` or `readers`) of each block."""
        self.cache.pin_all(blocks)
        for block in blocks:
            counts[block] += 1

    def release(self, blocks: Sequence[int], counts: list[int]) -> None:
        """Takes one from `counts` of each block; the blocks of a sequence come last to first."""
        requests, readers, writers = self.requests, self.readers, self.writers
        unused: list[int] = []
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
            unused.append(block)
        host_tier = self.host_tier
        self.free += self.cache.unpin_all(unused, None if host_tier is None else host_tier.mark_used)
        if host_tier is not None:
            host_tier.wake_copier()

    def release_after_steps(self, blocks: Sequence[int]) -> None:
        """Releases a request's blocks, last to first, when the steps in flight, which may use them, have ended."""
        if self.fences:
            self.fences[-1].blocks.extend(blocks)
        else:
            self.release(blocks, self.requests)

    def is_shared(self, block: int) -> bool:
        """Returns whether a second lease or a reader uses a leased block.

        Steps that copy from the block do not count.
        """
        step_users = self.copy_sources.count(block) + sum(fence.blocks.count(block) for fence in self.fences)
        return self.requests[block] - step_users > 1 or self.readers[block] > 0

    def counts(self) -> PoolCounts:
        free, cached = len(self.free), self.cache.num_idle
        leased = self._num_blocks - free - cached - self.quarantined
        return PoolCounts(free=free, cached=cached, leased=leased, quarantined=self.quarantined)

    def inconsistencies(self) -> list[str]:
        """Returns the defects, one sentence each; recomputes everything from the live leases, pins and fences."""
        expected = {
            "request": [0] * self._num_blocks,
            "writer": [0] * self._num_blocks,
            "reader": [0] * self._num_blocks,
        }
        for blocks, kind in (
            *((lease.blocks, "request") for lease in self.leases),
            *((fence.blocks, "request") for fence in self.fences),
            (self.copy_sources, "request"),
            *((pin.pinned, "writer" if pin.is_writer else "reader") for pin in self.pins),
        ):
            for block in blocks:
                expected[kind][block] += 1
        defects = self.cache.inconsistencies()
        if self.host_tier is not None:
            defects += self.host_tier.inconsistencies()
        for kind, actual in (("request", self.requests), ("writer", self.writers), ("reader", self.readers)):
            defects += [
                f"block {b} has a {kind} count of {n}, not {expected[kind][b]}"
                for b, n in enumerate(actual)
                if n != expected[kind][b]
            ]
        states = [0, 0, 0, 0]
        free = set(self.free)
        for b in range(self._num_blocks):
            used = self.requests[b] or self.readers[b]
            hashed = self.cache.hash_of(b) is not None
            if self.writers[b] and hashed:
                defects.append(f"block {b} is published and being written")
            states[2 if used else 3 if self.writers[b] else 1 if hashed else 0] += 1
            if (b in free) != (not used and not self.writers[b] and not hashed):
                defects.append(f"block {b} is wrongly {'' if b in free else 'not '}free")
            if self.cache.is_idle(b) != (hashed and not used):
                defects.append(f"block {b} is wrongly {'' if self.cache.is_idle(b) else 'not '}idle")
        counts = self.counts()
        if len(free) != len(self.free) or states != [counts.free, counts.cached, counts.leased, counts.quarantined]:
            defects.append(f"free, cached, leased, quarantined are {states}, reported {counts}")
        return defects


class BlockPin:
    """Keeps blocks from reuse while a writer or a reader outside the request may touch them. Thread-safe."""

    __slots__ = ("_ledger", "blocks", "is_writer", "pinned")

    def __init__(self, ledger: _BlockLedger, blocks: Sequence[int], *, is_writer: bool) -> None:
        """Made by a lease or the pool, under the lock."""
        #: The physical blocks, in logical order.
        self.blocks = tuple(blocks)
        self.is_writer = is_writer
        #: The blocks that are not released yet.
        self.pinned = set(self.blocks)
        self._ledger = ledger
        ledger.acquire(self.blocks, ledger.writers if is_writer else ledger.readers)
        ledger.pins.add(self)

    def release(self, blocks: Sequence[int] | None = None) -> None:
        """Releases physical blocks (None for all); skips blocks released before. InternalError for other blocks."""
        with self._ledger.lock:
            if blocks is not None and not set(blocks).issubset(self.blocks):
                raise InternalError(f"blocks {sorted(set(blocks).difference(self.blocks))} do not belong to this pin")
            self.release_locked(self.pinned if blocks is None else self.pinned.intersection(blocks))

    def release_locked(self, released: Collection[int] | None = None) -> None:
        """`release` of blocks that are still pinned (None for all), for a caller that holds the lock."""
        ledger = self._ledger
        released = self.pinned if released is None else released
        if not released:
            return
        ledger.release(
            [b for b in reversed(self.blocks) if b in released], ledger.writers if self.is_writer else ledger.readers
        )
        self.pinned = self.pinned.difference(released)
        if not self.pinned:
            ledger.pins.discard(self)


class StepFence:
    """Keeps blocks that leases release during a step until the step has ended on the device.

    A step may read and write the blocks that it was launched with, whatever an abort or a preemption does to their
    leases meanwhile. This is the epoch scheme of Fraser (Practical lock-freedom, 2004): the cost does not depend on the
    number of blocks that the step uses. The fence also keeps the blocks that the step copies from
    (`Lease.copy_on_write`).
    """

    __slots__ = ("_ledger", "blocks")

    def __init__(self, ledger: _BlockLedger) -> None:
        """Made by the pool, under the lock."""
        #: Blocks to release when the step ends.
        self.blocks, ledger.copy_sources = ledger.copy_sources, []
        self._ledger = ledger
        ledger.fences.append(self)

    def end(self) -> None:
        """Call when the step has ended. Idempotent, thread-safe, in any order: blocks wait for older open steps."""
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


class Lease:
    """The blocks of one sequence, from allocation to one `finish`.

        0        cached_blocks - host_blocks     cached_blocks                 len(blocks)
        | found in the pool | loaded from the host | (saved partial block) | empty |      when it is made

        0                 num_published                     cow_index          len(blocks)
        | published       | computed or being written | last shared block | not shared |  later

    `blocks` grows and shrinks at the end; `num_replaced` counts the entries that were replaced by another block.
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

    def __init__(self, ledger: _BlockLedger, blocks: list[int], num_registered: int, *, host_blocks: int = 0) -> None:
        """Made by the pool or by `fork`, under the lock, with a request on each block; lead ones are registered."""
        #: Physical blocks in logical order; empty once the lease has finished.
        self.blocks = blocks
        #: Lead blocks that came with their KV, from the pool or from the host.
        self.cached_blocks = num_registered + host_blocks
        #: The last blocks of `cached_blocks`, which came from the host.
        self.host_blocks = host_blocks
        #: Index of the last block shared by a fork, which must not be written before `copy_on_write`; -1 for none.
        self.cow_index = -1
        #: The copy from the host, until it has been finished; no block of the lease may be used before it is done.
        self.host_load: HostLoad | None = None
        #: A saved partial block follows the cached ones.
        self.restored_partial = False
        #: Lead blocks with a registered hash.
        self.num_published = num_registered
        self.finished = False
        #: Why the lease finished.
        self.reason = ""
        self.num_replaced = 0
        self._ledger = ledger
        ledger.leases.add(self)

    @property
    def host_loading(self) -> bool:
        """Whether blocks are still being copied from the host."""
        return self.host_load is not None and not self.host_load.done

    def finish_host_load(self) -> BatonError | None:
        """Takes note that the copy from the host is done. Returns its error; nothing is published after an error."""
        assert self.host_load is not None
        assert self.host_load.done
        if self.host_load.error is None:
            self.host_load = None
            return None
        return self.host_load.error

    def grow(self, n: int = 1) -> bool:
        """Appends n blocks; False, and no change, if the pool has too few."""
        ledger = self._ledger
        with ledger.lock:
            self._require_live()
            if not ledger.can_allocate(n):
                return False
            self.blocks.extend(ledger.allocate(n))
            return True

    def trim(self, count: int) -> None:
        """Releases all but the first `count` blocks; the released ones are not published and their KV is not needed."""
        ledger = self._ledger
        with ledger.lock:
            self._require_live()
            if count < self.num_published:
                raise InternalError(f"cannot trim a lease to {count} blocks: {self.num_published} are published")
            surplus = self.blocks[count:]
            del self.blocks[count:]
            surplus.reverse()
            ledger.release_after_steps(surplus)

    def fork(self, shared: int, *, spare: int = 0) -> Lease:
        """Returns another lease that shares the first `shared` blocks and takes the last `spare` blocks of this one.

        The KV of the shared blocks is complete, except in the last one. If not all shared blocks are published,
        both leases must `copy_on_write` the last one before they write to it.
        """
        ledger = self._ledger
        with ledger.lock:
            self._require_live()
            if not self.num_published <= shared <= len(self.blocks) - spare:
                raise InternalError(
                    f"cannot fork {shared} blocks with {spare} spare ones from a lease of {len(self.blocks)} blocks, "
                    f"{self.num_published} of them published"
                )
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
        """Replaces the shared block at `cow_index`, so that the step being planned may write there.

        Returns the copy that the step has to do first; source and target are equal if no other lease uses the block any
        more. Returns None, and changes nothing, if this takes a block and the pool has none.
        """
        ledger = self._ledger
        with ledger.lock:
            self._require_live()
            index = self.cow_index
            block = self.blocks[index]
            if not ledger.is_shared(block):
                self.cow_index = -1
                return BlockCopy(block, block)
            if index < len(self.blocks) - 1:
                target = self.blocks.pop()
            elif ledger.can_allocate(1):
                (target,) = ledger.allocate(1)
            else:
                return None
            self.blocks[index] = target
            self.cow_index = -1
            self.num_replaced += 1
            ledger.copy_sources.append(block)
            return BlockCopy(block, target)

    def publish(self, hashes: Sequence[bytes]) -> None:
        """Registers the first len(hashes) blocks; their KV is complete.

        If a hash is registered already, the registered block replaces this one. Publishing stops before a block
        that has a writer, which cannot be complete; a later call goes on. Nothing is published after a failed load.
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
                canonical = ledger.cache.lookup(block_hash)
                if canonical is None:
                    ledger.cache.register(block, block_hash, self.blocks[i - 1] if i else -1)
                    stored.append(block_hash)
                elif canonical != block:  # equal if a fork of this lease has registered it
                    self._replace(i, canonical, duplicates)
                self.num_published = i + 1
            ledger.release_after_steps(duplicates)
            if stored:
                ledger.on_stored(stored)

    def rematch(self, hashes: Sequence[bytes]) -> int:
        """Replaces lead blocks by blocks that were registered after the lease was made; returns cached_blocks.

        `hashes` are the hashes of the sequence's matchable blocks. Nothing may have been computed in the lease yet.
        """
        ledger = self._ledger
        with ledger.lock:
            self._require_live()
            duplicates: list[int] = []
            for i in range(self.num_published, min(len(hashes), len(self.blocks))):
                canonical = ledger.cache.lookup(hashes[i])
                if canonical is None or ledger.writers[self.blocks[i]]:
                    break
                self._replace(i, canonical, duplicates)
                self.num_published = self.cached_blocks = i + 1
            ledger.release_after_steps(duplicates)
            return self.cached_blocks

    def pin_for_write(self, first: int, count: int) -> BlockPin:
        """Pins logical blocks first..first+count for a writer of bytes; none of them may be published."""
        with self._ledger.lock:
            blocks = self._range(first, count)
            if first < self.num_published:
                raise InternalError(f"cannot pin published block {blocks[0]} for a writer")
            return BlockPin(self._ledger, blocks, is_writer=True)

    def pin_for_read(self, first: int, count: int) -> BlockPin:
        """Pins logical blocks first..first+count for a reader that may outlive the request."""
        with self._ledger.lock:
            return BlockPin(self._ledger, self._range(first, count), is_writer=False)

    def finish(self, reason: str) -> None:
        """Releases all blocks. Idempotent, the first reason stays. Pinned blocks return when their pins end."""
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

    def _replace(self, i: int, canonical: int, duplicates: list[int]) -> None:
        block = self.blocks[i]
        assert canonical != block, "a block published twice at one place"
        self._ledger.acquire((canonical,), self._ledger.requests)
        self.blocks[i] = canonical
        self.num_replaced += 1
        duplicates.append(block)

    def _range(self, first: int, count: int) -> list[int]:
        self._require_live()
        if first < 0 or count < 0 or first + count > len(self.blocks):
            raise InternalError(f"blocks {first}..{first + count} are outside a lease of {len(self.blocks)} blocks")
        return self.blocks[first : first + count]

    def _require_live(self) -> None:
        if self.finished:
            raise InternalError(f"the lease was used after its end ({self.reason})")


def _no_callback(hashes: list[bytes]) -> None:
    """Does nothing."""


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each, with a prefix cache and, on request, a host tier. Thread-safe.

    The callbacks run under the lock, so they may only enqueue, and must not raise.
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
        """Makes a pool of free blocks.

        Args:
            on_stored: Gets hashes that a match can find from now on, parents before children.
            on_evicted: Gets hashes that a match no longer finds, children first, before their blocks are reused.
            host_blocks: Blocks of the host tier; 0 for no host tier.
            host_batch: Most blocks of one copy to the host.
            on_host_stored: Gets hashes that the host tier gained.
            on_host_evicted: Gets hashes that the host tier lost.
        """
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ledger = ledger = _BlockLedger(num_blocks, on_stored, on_evicted, has_host_tier=host_blocks > 0)
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
        """The lock of the pool, its leases and pins, the prefix cache and the host tier; the host copier takes it."""
        return self._ledger.lock

    def lease(
        self,
        hashes: Sequence[bytes],
        total_blocks: int,
        *,
        keep_free: int = 0,
        host: bool = False,
        saved_partial: SavedPartialBlock | None = None,
    ) -> Lease | None:
        """Leases total_blocks blocks: the longest cached prefix of `hashes`, then empty blocks.

        Args:
            hashes: Hashes of the blocks that a cache may supply, in order.
            total_blocks: Blocks of the lease.
            keep_free: Blocks that must stay available.
            host: The prefix may go on in the host tier; `Lease.host_load` must then be done before the lease is used.
            saved_partial: A partial block to restore, if all blocks before it are cached and none after it is.

        Returns:
            The lease, or None, and no change, if too few blocks are available.
        """
        ledger = self._ledger
        host_tier = ledger.host_tier if host else None
        with ledger.lock:
            cached = ledger.cache.match(hashes[:total_blocks])
            need = total_blocks - len(cached)
            if not ledger.can_allocate(keep_free + need + ledger.cache.count_evictable(cached)):
                return None
            ledger.acquire(cached, ledger.requests)
            num_host = 0 if host_tier is None else host_tier.match(hashes[len(cached) :])
            keys = list(hashes[len(cached) : len(cached) + num_host])
            num_full = len(cached) + len(keys)
            restored = False
            if host_tier is not None and saved_partial is not None and num_full < total_blocks:
                restored = (
                    num_full == saved_partial.computed // self.block_size and host_tier.match([saved_partial.key]) == 1
                )
            keys += [saved_partial.key] if saved_partial is not None and restored else []
            lease = Lease(ledger, cached + ledger.allocate(need), len(cached), host_blocks=num_full - len(cached))
            lease.restored_partial = restored
            if host_tier is not None and keys:
                targets = lease.blocks[len(cached) : len(cached) + len(keys)]
                lease.host_load = host_tier.load(
                    keys, targets, BlockPin(ledger, targets, is_writer=True).release_locked
                )
            return lease

    def match_prefix(self, hashes: Sequence[bytes]) -> int:
        """Returns the length of the longest cached prefix of `hashes` in blocks, in the pool and then the host tier."""
        with self._ledger.lock:
            count = len(self._ledger.cache.match(hashes))
            return count if self._ledger.host_tier is None else count + self._ledger.host_tier.match(hashes[count:])

    def pin_prefix(self, hashes: Sequence[bytes], first: int) -> BlockPin | None:
        """Pins for a reader the blocks of the longest prefix of `hashes` in the pool, from index `first` on.

        Returns None if there are none.
        """
        ledger = self._ledger
        with ledger.lock:
            matched = ledger.cache.match(hashes)[first:]
            return BlockPin(ledger, matched, is_writer=False) if matched else None

    def save_partial_block(self, lease: Lease, computed: int) -> SavedPartialBlock | None:
        """Starts to copy the last, partial block of `computed` tokens to the host, before the lease is given up.

        Returns None if the block is full, if blocks before it are not published, or without a host tier.
        """
        ledger, index = self._ledger, computed // self.block_size
        with ledger.lock:
            if (
                ledger.host_tier is None
                or ledger.host_tier.closed
                or computed % self.block_size == 0
                or lease.num_published < index
            ):
                return None
            block = lease.blocks[index]
            parent = ledger.cache.hash_of(lease.blocks[index - 1]) if index else None
            pin = BlockPin(ledger, [block], is_writer=False)
            return SavedPartialBlock(ledger.host_tier.save_partial_block(parent, block, pin.release_locked), computed)

    def drop_partial_block(self, saved: SavedPartialBlock) -> None:
        """Forgets a saved partial block. Idempotent."""
        with self._ledger.lock:
            if self._ledger.host_tier is not None:
                self._ledger.host_tier.drop_partial_block(saved.key)

    def begin_step(self) -> StepFence:
        """Makes the fence of a step; call before the launch, and `end` the fence when the step has ended."""
        with self._ledger.lock:
            return StepFence(self._ledger)

    def num_available(self) -> int:
        """Returns the number of blocks that a lease could get, if need be after copies to the host."""
        with self._ledger.lock:
            cache, now = self._ledger.cache, self._ledger.num_available
            return now if self.host_tier is None else now + cache.num_unsaved + cache.num_saving

    def num_deferred(self) -> int:
        """Returns the number of block references that are released when the steps in flight end."""
        with self._ledger.lock:
            return sum(len(fence.blocks) for fence in self._ledger.fences)

    def copies_pending(self) -> bool:
        """Returns whether copies to the host will make blocks available, without any other event."""
        with self._ledger.lock:
            return self._ledger.host_tier is not None and self._ledger.host_tier.busy

    def counts(self) -> PoolCounts:
        """Returns the number of blocks in each state."""
        with self._ledger.lock:
            return self._ledger.counts()

    def cached_hashes(self) -> list[bytes]:
        """Returns all hashes that a match can find in the pool, parents before children."""
        with self._ledger.lock:
            return self._ledger.cache.hashes()

    def host_hashes(self) -> list[bytes]:
        """Returns all hashes of full blocks in the host tier."""
        with self._ledger.lock:
            return [] if self._ledger.host_tier is None else self._ledger.host_tier.hashes()

    def host_stats(self) -> HostTierStats | None:
        """Returns the counts of the host tier; None without one."""
        with self._ledger.lock:
            return None if self._ledger.host_tier is None else self._ledger.host_tier.stats()

    def reset_prefix_cache(self) -> int:
        """Evicts all evictable blocks and empties the host tier; returns the number of blocks evicted from the pool."""
        ledger = self._ledger
        with ledger.lock:
            if ledger.host_tier is not None:
                ledger.host_tier.clear()
            evicted = ledger.evict(ledger.cache.num_evictable)
            ledger.free.extend(evicted)
            return len(evicted)

    def check_integrity(self) -> None:
        """Checks all blocks; raises InternalError with the first five defects."""
        with self._ledger.lock:
            defects = self._ledger.inconsistencies()
        if defects:
            raise InternalError("block pool is inconsistent: " + "; ".join(defects[:5]))
