"""The second tier of the prefix cache: which blocks have a copy in host memory, and which copies have to be made.

This is policy only. The lock of the block pool guards it, and host_copier.py makes the copies in the queued order.

Idle blocks are copied to the host, oldest first, while the pool has too few available blocks. A block is evicted from
the pool only after its copy exists, so an allocation waits for a copy only if no other block is available, and no
evicted block is lost. If a prompt matches blocks of the host, they are copied into leased blocks; the host keeps them.

Invariants:

- One copy is made at a time. So a host block may be reassigned while an earlier copy from it is queued.
- Pool and host together are prefix-closed, and so is the pool alone.
- A host block that a file tier (file_tier.py) writes to a file or fills from one is in no list of free blocks.
- The host forgets the least recently used block first. A block counts as used when it leaves the pool, which is after
  all blocks that continue it, so this order is leaf-first too.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from common.block_hash import HASH_BYTES
from common.errors import BatonError
from engine.kv.prefix_cache import HashesCallback, PrefixCache

NO_PARENT = b""
ANCESTOR_BATCHES = 4  # Copies of blocks for the file tiers that one copy of idle blocks may cause
CLEAR_S = 1.0  # Longest wait of `clear` for the copy under way


@dataclass(slots=True)
class HostTierStats:
    """Counts of the host tier, in blocks; all but the first two since the start."""

    host_blocks: int  # Blocks that fit
    used: int = 0  # Blocks in use
    saved: int = 0  # Blocks copied to the host
    loaded: int = 0  # Blocks copied back
    dropped: int = 0  # Blocks that the host forgot because others needed their place
    damaged: int = 0  # Loads with a wrong checksum


@dataclass(slots=True)
class HostLoad:
    """A copy of host blocks into leased blocks, from its request to its end."""

    done: bool = False  # The target blocks are not written any more
    error: BatonError | None = None  # Why the target blocks are useless


@dataclass(frozen=True, slots=True)
class HostCopy:
    """One batch of blocks to copy: from the pool to the host, or back if `host_load` is set."""

    keys: Sequence[bytes]  # Keys of the contents, in the order of the blocks
    blocks: Sequence[int]
    host_blocks: Sequence[int]
    release: Callable[[], None] | None = None  # Ends the pin, under the lock; None for registered blocks without pin
    host_load: HostLoad | None = None


@dataclass(frozen=True, slots=True)
class SavedPartialBlock:
    """The last, partial block of a preempted sequence, kept in host memory. No prompt matches its key."""

    key: bytes
    computed: int  # Tokens of the sequence up to the end of the block's KV


class NextTier(Protocol):
    """What the host tier tells the file tiers. The lock of the block pool is held."""

    def on_saved(self, keys: Sequence[bytes]) -> None:
        """Called when full blocks have their copy in the host."""

    def on_forgotten(self, keys: Sequence[bytes]) -> None:
        """Called when the host forgets full blocks."""

    def on_host_closed(self) -> None:
        """Called when the host tier has ended."""

    def __contains__(self, key: bytes, /) -> bool:
        """Returns whether the tier has the block, as far as is known."""


class HostTier:
    """Decides which blocks are copied, loaded and forgotten. The caller holds the lock, unless the method takes it."""

    def __init__(
        self,
        lock: threading.Lock,  # The lock of the block pool
        cache: PrefixCache,
        num_allocatable: Callable[[], int],  # Returns the number of blocks that the pool can allocate now
        *,
        num_host_blocks: int,
        min_available: int,  # Blocks of the pool to keep available by copies ahead of time
        batch: int,  # Max blocks of one copy to the host; a load may have to wait for one copy
        on_stored: HashesCallback,
        on_evicted: HashesCallback,
    ) -> None:
        self.num_host_blocks = num_host_blocks
        self._stats = HostTierStats(num_host_blocks)
        self._cache, self._num_allocatable, self._batch = cache, num_allocatable, batch
        self._min_available = min(min_available, num_host_blocks // 2)
        self._on_stored, self._on_evicted = on_stored, on_evicted
        self._index: OrderedDict[bytes, int] = OrderedDict()  # Host block of each key, the least recently used first
        self._parents: dict[bytes, bytes] = {}
        self._children: dict[bytes, set[bytes]] = {}  # Keys by their parent, which is in the host or in the pool
        self._free = list(range(num_host_blocks - 1, -1, -1))
        self._queue: deque[HostCopy] = deque()
        self._copying: HostCopy | None = None  # The copy under way
        self._requested_free = 0  # Blocks of the largest failed allocation
        self._partial_numbers = itertools.count()
        self._changed = threading.Condition(lock)
        self._copier_waits = self._stopping = False
        self.on_copied: Callable[[], None] = lambda: None  # Called under the lock when a copy has ended
        self.next_tiers: list[NextTier] = []  # The file tiers
        #: Pins blocks of the pool for a reader and returns what releases them; set with the first file tier.
        self.pin_for_read: Callable[[Sequence[int]], Callable[[], None]] | None = None
        self._lent: Counter[int] = Counter()  # Host blocks that are being written to files: number of tiers
        self._orphans: set[int] = set()  # Those of them that the host has forgotten meanwhile
        self._reserved: set[int] = set()  # Host blocks that are being filled from files
        self._saves_all = False  # Idle blocks are copied although enough blocks are available
        self.closed = False  # The tier has ended: no copies are made any more

    # -- called by the block pool -------------------------------------------------------------------------------------

    def on_idle(self, block_hash: bytes) -> bool:
        """Called when a block of the pool became idle. Returns whether it needs no copy before eviction."""
        if block_hash in self._index:
            self._index.move_to_end(block_hash)
            return True
        return self.closed

    def on_evicted_from_pool(self, block_hash: bytes) -> None:
        """Called when the pool evicts a block; it has evicted all blocks that continue it before."""
        if block_hash in self._index:
            self._index.move_to_end(block_hash)
        else:
            self._drop(self._children.get(block_hash, ()))

    def request_free(self, count: int) -> None:
        """Called when an allocation of `count` blocks failed; copies are made until that many are available."""
        self._requested_free = max(self._requested_free, count)
        self.wake_copier()

    def wake_copier(self) -> None:
        """Wakes the copier if it waits and a copy has to be made."""
        if self._copier_waits and (self._queue or self._needs_saves()):
            self._copier_waits = False
            self._changed.notify_all()

    # -- called for leases --------------------------------------------------------------------------------------------

    def match(self, hashes: Iterable[bytes]) -> int:
        """Returns the length of the longest prefix of `hashes` in the host."""
        return sum(1 for _ in itertools.takewhile(self._index.__contains__, hashes))

    def load(self, keys: Sequence[bytes], blocks: Sequence[int], release: Callable[[], None]) -> HostLoad:
        """Queues a copy of host blocks, parents first, into leased `blocks`; `release` ends the writer's pin on it."""
        self.mark_used(keys)
        load = HostLoad()
        self._queue_copy(HostCopy(keys, blocks, [self._index[key] for key in keys], release, load))
        return load

    def save_partial_block(self, parent: bytes | None, block: int, release: Callable[[], None]) -> bytes:
        """Queues a copy of a partial block to the host; returns its key. `release` ends the reader's pin on `block`."""
        key = b"partial-" + next(self._partial_numbers).to_bytes(HASH_BYTES, "little")  # longer than a hash
        host_blocks = self._allocate(1)
        self._insert(key, parent or NO_PARENT, host_blocks[0])
        self._queue_copy(HostCopy([key], [block], host_blocks, release))
        return key

    def drop_partial_block(self, key: bytes) -> None:
        """Forgets a saved partial block, if it is in the host."""
        self._drop([key])

    # -- called by the file tiers -------------------------------------------------------------------------------------

    @property
    def max_lent(self) -> int:
        """Host blocks that may be lent to a tier at once. A quarter of all is never lent or reserved."""
        return self.num_host_blocks // (4 * max(1, len(self.next_tiers)))

    @property
    def max_reserved(self) -> int:
        """Host blocks that may be reserved at once, by all tiers together."""
        return self.num_host_blocks // 2

    def lend(self, key: bytes) -> int:
        """Returns the host block of a saved block. It is not reused before `take_back`."""
        block = self._index[key]
        self._lent[block] += 1
        return block

    def take_back(self, blocks: Sequence[int]) -> None:
        """Ends the loan of host blocks."""
        self._lent.subtract(blocks)
        self._lent = +self._lent  # without those that are back
        orphans = {block for block in blocks if block in self._orphans and block not in self._lent}
        self._orphans -= orphans
        self._free += orphans

    def incomplete(self) -> set[bytes]:
        """Returns the keys of blocks in the host whose copy is queued or under way."""
        copies = (*self._queue, *([] if self._copying is None else [self._copying]))
        return {key for copy in copies if copy.host_load is None for key in copy.keys}

    def parent_of(self, key: bytes) -> bytes | None:
        """Returns the parent's key of a block in the host, NO_PARENT for the first one; None if it is not there."""
        return self._parents.get(key)

    def reserve(self, count: int) -> list[int]:
        """Takes at most `count` host blocks to be filled; none of a queued copy, which is made after the filling."""
        copies = (*self._queue, *([] if self._copying is None else [self._copying]))
        used = {block for copy in copies for block in copy.host_blocks}
        count = min(count, self.max_reserved - len(self._reserved))
        while len(self._free) < count and self._index:
            self._drop([next(iter(self._index))])
        taken = [block for block in self._free if block not in used][: max(0, count)]
        self._reserved.update(taken)
        self._free = [block for block in self._free if block not in self._reserved]
        return taken

    def insert_filled(self, parent: bytes, keys: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Registers filled host blocks, a chain behind `parent`; returns how many.

        Those of a chain that is broken meanwhile are given back, and those that have another copy now.
        """
        stored: list[bytes] = []
        self._reserved.difference_update(blocks)
        for key, block in zip(keys, blocks, strict=True):
            reachable = parent == NO_PARENT or parent in self._index or parent in self._cache.block_by_hash
            if reachable and key not in self._index and not self.closed:
                self._insert(key, parent, block)
                stored.append(key)
            else:
                self._free.append(block)
            parent = key
        self.mark_used(stored)
        if stored:
            self._on_stored(stored)
        return len(stored)

    def release_reserved(self, blocks: Sequence[int]) -> None:
        """Gives back host blocks that were not filled."""
        self._reserved.difference_update(blocks)
        self._free += blocks

    def mark_used(self, keys: Sequence[bytes]) -> None:
        """Makes blocks in the host, parents first, the most recently used ones."""
        for key in reversed(keys):
            self._index.move_to_end(key)

    def save_all(self) -> None:
        """Copies all idle blocks from now on, because the process ends. Takes the lock."""
        with self._changed:
            self._saves_all = True
            self.wake_copier()

    # -- called by the copier -----------------------------------------------------------------------------------------

    def next_copy(self) -> HostCopy | None:
        """Waits for the next copy to make; None after `stop`. Takes the lock."""
        with self._changed:
            while not self._stopping:
                if copy := self.start_next_copy():
                    return copy
                self._copier_waits = True
                self._changed.wait()
            return None

    def start_next_copy(self) -> HostCopy | None:
        """Returns the next copy to make, which counts as under way from now on; None if there is none."""
        assert self._copying is None, "two copies at a time"
        if not self._queue and self._needs_saves():
            self._queue_saves()
        if self._queue:
            self._copying = self._queue.popleft()
        return self._copying

    def finish_copy(self, copy: HostCopy, error: BatonError | None = None) -> None:
        """Records that the copy was made. With `error` the host forgets its damaged blocks. Takes the lock."""
        with self._changed:
            assert copy is self._copying
            self._copying = None
            if copy.host_load is None:
                self._stats.saved += len(copy.blocks)
                kept = self._kept_copies(copy) if self.next_tiers else []
                for tier in self.next_tiers:
                    tier.on_saved(kept)
            else:
                self._stats.loaded += len(copy.blocks)
                if error is not None:
                    self._stats.damaged += 1
                    self._drop(copy.keys)
            self._finish(copy, error)
            self.on_copied()
            self._changed.notify_all()

    def _kept_copies(self, copy: HostCopy) -> list[bytes]:
        """Returns the hashes of full blocks in the host whose content is complete, and stays while they are known."""
        overwritten = {block for later in self._queue if later.host_load is None for block in later.host_blocks}
        return [
            key
            for key, block in zip(copy.keys, copy.host_blocks, strict=True)
            if len(key) == HASH_BYTES and self._index.get(key) == block and block not in overwritten
        ]

    def _finish(self, copy: HostCopy, error: BatonError | None) -> None:
        """Lets the pool use, evict or reuse the blocks of a copy that has ended or will not be made."""
        if copy.host_load is not None:
            copy.host_load.error = error
        if copy.release is not None:
            copy.release()
        else:
            self._cache.mark_saved(copy.blocks)
        if copy.host_load is not None:
            copy.host_load.done = True

    def stop(self) -> None:
        """Makes `next_copy` return None, so that the copier ends and calls `close`. Takes the lock."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def close(self, error: BatonError) -> None:
        """Ends the tier: queued loads fail with `error`, and the pool evicts without copies from now on.

        Called by the copier once it touches no memory any more. Idempotent. Takes the lock.
        """
        with self._changed:
            unfinished = (self._copying, *self._queue)
            self._queue.clear()
            self._copying, self.closed = None, True
            for copy in unfinished:
                if copy is not None:
                    self._finish(copy, error)
            self.clear()
            for tier in tuple(self.next_tiers):
                tier.on_host_closed()
            self._changed.notify_all()

    # -- the state as a whole -----------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a copy is under way or queued, or has to be made because the pool has too few available blocks."""
        return self._copying is not None or bool(self._queue) or self._needs_saves()

    def hashes(self) -> list[bytes]:
        """Returns the hashes of all full blocks in the host."""
        return [key for key in self._index if len(key) == HASH_BYTES]

    def clear(self) -> None:
        """Forgets all blocks, and lets the pool evict idle blocks without copies."""
        self._cache.skip_unsaved()
        self._changed.wait_for(lambda: not self._cache.saving, CLEAR_S)
        self._stats.dropped -= len(self._index)
        self._drop(tuple(self._index))

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until the tier is not `busy`; False after the timeout. Takes the lock."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.busy, timeout_s)

    def stats(self) -> HostTierStats:
        return replace(self._stats, used=len(self._index))

    def inconsistencies(self) -> list[str]:
        """Returns violations of the invariants, one sentence each."""
        defects: list[str] = []
        host_blocks = [*self._index.values(), *self._free, *self._orphans, *self._reserved]
        if sorted(host_blocks) != list(range(self.num_host_blocks)):
            defects.append("blocks of the host tier are lost or used twice")
        for key in self._index:
            parent = self._parents[key]
            if key not in self._children.get(parent, ()):
                defects.append("a block of the host tier is not known to its parent")
            if parent != NO_PARENT and parent not in self._cache.block_by_hash and parent not in self._index:
                defects.append("a block of the host tier outlived its parent")
        if sum(map(len, self._children.values())) != len(self._index) or len(self._parents) != len(self._index):
            defects.append("parents and children in the host tier differ")
        return defects

    def _needs_saves(self) -> bool:
        """Returns whether idle blocks have to be copied to the host now."""
        if not self._cache.unsaved:
            self._requested_free = 0
            return False
        if self._saves_all:
            return True
        available = self._num_allocatable()
        if available >= self._requested_free:
            self._requested_free = 0
        return available < max(self._min_available, self._requested_free)

    def _queue_copy(self, copy: HostCopy) -> None:
        self._queue.append(copy)
        self.wake_copier()

    def _queue_saves(self) -> None:
        """Queues a copy of the oldest unsaved blocks, and registers them here."""
        usable = self.num_host_blocks - len(self._lent) - len(self._reserved)
        blocks = self._cache.start_saving(min(self._batch, usable))
        keys: list[bytes] = []
        # Neighbours in the pool become neighbours in the host, so that one copy moves them together.
        host_blocks = dict(zip(sorted(blocks), self._allocate(len(blocks)), strict=True))
        for block in blocks:
            key = self._cache.hash_by_block[block]
            assert key is not None
            keys.append(key)
            self._insert(key, self._cache.parent_hash(block) or NO_PARENT, host_blocks[block])
        self._on_stored(keys[::-1])
        self._queue.append(HostCopy(keys, blocks, [host_blocks[block] for block in blocks]))
        if self.next_tiers:
            self._queue_saves_of_ancestors(blocks)

    def _queue_saves_of_ancestors(self, blocks: Sequence[int]) -> None:
        """Queues copies of the blocks before `blocks`, used or idle, that the host and a file tier lack.

        A file tier takes a block after its parent, and without this the first blocks of prompts, which are used most,
        would be the last to come.
        """
        assert self.pin_for_read is not None
        hash_by_block, seen = self._cache.hash_by_block, set(blocks)
        missing: list[int] = []
        for block in blocks:
            ancestor = self._cache.parent(block)
            while ancestor >= 0 and ancestor not in seen:
                seen.add(ancestor)
                key = hash_by_block[ancestor]
                assert key is not None
                if all(key in tier for tier in self.next_tiers):
                    break
                if key not in self._index and ancestor not in self._cache.saving:
                    missing.append(ancestor)
                ancestor = self._cache.parent(ancestor)
        missing = missing[-min(ANCESTOR_BATCHES * self._batch, self.max_lent) :]  # those next to the start of a prompt
        for start in range(0, len(missing), self._batch):
            part = missing[start : start + self._batch]
            keys = [key for block in part if (key := hash_by_block[block]) is not None]
            parents = [self._cache.parent_hash(block) or NO_PARENT for block in part]
            release = self.pin_for_read(part)
            host_blocks = self._allocate(len(part))
            for key, parent, host_block in zip(keys, parents, host_blocks, strict=True):
                self._insert(key, parent, host_block)
            self._on_stored(keys[::-1])
            self._queue.append(HostCopy(keys, part, host_blocks, release))

    def _allocate(self, count: int) -> list[int]:
        """Returns `count` host blocks, ascending; the least recently used contents are forgotten for them."""
        while len(self._free) < count:
            self._drop([next(iter(self._index))])
        return sorted(self._free.pop() for _ in range(count))

    def _insert(self, key: bytes, parent: bytes, host_block: int) -> None:
        assert key not in self._index
        self._index[key] = host_block
        self._parents[key] = parent
        self._children.setdefault(parent, set()).add(key)

    def _drop(self, keys: Iterable[bytes]) -> None:
        """Forgets blocks; of each block that the pool does not have, also the blocks that continue it."""
        dropped: list[bytes] = []
        pending = list(keys)
        while pending:
            key = pending.pop()
            if key not in self._index:
                continue
            host_block = self._index.pop(key)
            (self._orphans.add if host_block in self._lent else self._free.append)(host_block)
            parent = self._parents.pop(key)
            siblings = self._children[parent]
            siblings.discard(key)
            if not siblings:
                del self._children[parent]
            dropped.append(key)
            if key not in self._cache.block_by_hash:
                pending += self._children.get(key, ())
        self._stats.dropped += len(dropped)
        if hashes := [key for key in reversed(dropped) if len(key) == HASH_BYTES]:
            self._on_evicted(hashes)
            for tier in self.next_tiers:
                tier.on_forgotten(hashes)
