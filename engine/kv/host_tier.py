"""The prefix cache's second tier: which blocks have a copy in host memory, and which copies are to be made. Pure
policy; the ledger's lock guards it, a copier (host_copier.py) makes the copies, in the order in which they are asked
for.

Blocks that nobody uses are copied to the host, oldest first, while fewer than `reserve` blocks of the pool (or than
somebody just asked for in vain) could be handed out. A block is evicted from the pool only once its copy exists, so
nothing waits for a copy but who finds no other block, and what leaves the pool is never lost on the way. A match that
goes on in the host has its blocks copied back into leased ones; the host keeps its copies.

Invariants:

- Copies are made one after the other. So a slot may be given away while a copy from it is still queued, and a block be
  asked back while its copy to the host is.
- Pool and host together are prefix-closed, and so is the pool alone: what leaves both takes with it what continues it.
- The host forgets the least recently used first, and a block counts as used when it leaves the pool: after all that
  continue it. So this is leaf-first, too.

The last block of a preempted sequence, which is not full, is *parked* here under a key of its own, which no prompt
matches.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from common.block_hash import HASH_BYTES
from common.errors import BatonError
from engine.kv.prefix_cache import HashesCallback, PrefixCache

NO_PARENT = b""
CLEAR_S = 1.0  # longest wait for a copy that is under way


@dataclass(frozen=True, slots=True)
class HostTierStats:
    """slots: blocks that fit; used: of them. saved, loaded: blocks copied to the host and back since the start;
    forgotten: that the host had no room for any more. damaged: whose checksum was wrong when they came back.
    """

    host_blocks: int
    used: int
    saved: int
    loaded: int
    dropped: int
    damaged: int


class HostLoad:
    """Blocks on their way from the host into leased ones; done once nothing is written there any more.

    error: why they are of no use.
    """

    __slots__ = ("_release", "done", "error")

    def __init__(self, release: Callable[[], None]) -> None:
        """release: ends the writer's pin on the target blocks; called under the ledger's lock."""
        self.done = False
        self.error: BatonError | None = None
        self._release = release

    def finish(self, error: BatonError | None = None) -> None:
        """Under the ledger's lock. error: why the blocks are of no use."""
        self.error = error
        self._release()
        self.done = True


@dataclass(frozen=True, slots=True)
class HostCopy:
    """One batch: blocks to slots of the host, or, where `load` is set, slots to blocks. keys: of the slots' contents.

    release: ends the reader's pin that keeps a block that is not registered from reuse meanwhile.
    """

    keys: Sequence[bytes]
    blocks: Sequence[int]
    host_blocks: Sequence[int]
    host_load: HostLoad | None = None
    release: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class SavedPartialBlock:
    """The partial last block of a preempted sequence, of `computed` tokens, waits in the host under this key."""

    key: bytes
    computed: int


class HostTier:
    """num_slots: blocks in host memory. reserve: blocks of the pool to keep ready; batch: most blocks of one copy to
    the host, which loads may have to wait for. ready: blocks of the pool that can be handed out now.

    on_stored, on_evicted: hashes that the host gained and lost, called under the lock.
    """

    def __init__(
        self,
        lock: threading.Lock,
        cache: PrefixCache,
        num_available: Callable[[], int],
        *,
        num_host_blocks: int,
        min_available: int,
        batch: int,
        on_stored: HashesCallback,
        on_evicted: HashesCallback,
    ) -> None:
        self.num_host_blocks = num_host_blocks
        self.damaged = 0
        self._cache = cache
        self._num_available = num_available
        self._min_available = min(min_available, num_host_blocks // 2)
        self._batch = batch
        self._on_stored = on_stored
        self._on_evicted = on_evicted
        self._index: OrderedDict[bytes, int] = OrderedDict()  # key -> slot, the least recently used first
        self._parents: dict[bytes, bytes] = {}
        self._children: dict[bytes, set[bytes]] = {}  # those that are here, of parents here or in the pool
        self._free = list(range(num_host_blocks - 1, -1, -1))
        self._queue: deque[HostCopy] = deque()
        self._copying: HostCopy | None = None
        self._requested_free = 0
        self._num_saved = self._num_loaded = self._dropped = 0
        self._numbers = itertools.count()
        self._changed = threading.Condition(lock)
        self._copier_waits = False
        self._stopping = self._closed = False

    @property
    def closed(self) -> bool:
        """No copy is made any more."""
        return self._closed

    # -- what the ledger tells ----------------------------------------------------------------------------------------

    def mark_used(self, block_hash: bytes) -> bool:
        """A block of the pool is not used any more; whether it need not be copied."""
        if self._closed:
            return True
        if block_hash not in self._index:
            return False
        self._index.move_to_end(block_hash)
        return True

    def on_evicted_from_pool(self, block_hash: bytes) -> None:
        """The pool evicts the block; all that continue it left before."""
        if block_hash in self._index:
            self._index.move_to_end(block_hash)
        else:
            self._drop(self._children.get(block_hash, ()))

    def request_free(self, count: int) -> None:
        """So many blocks were asked for in vain."""
        self._requested_free = max(self._requested_free, count)
        self.wake_copier()

    def wake_copier(self) -> None:
        """The copier looks whether there is something to do."""
        if self._copier_waits and (self._queue or self._needs_saves()):
            self._copier_waits = False
            self._changed.notify_all()

    # -- what leases ask ----------------------------------------------------------------------------------------------

    def match(self, hashes: Iterable[bytes]) -> int:
        """Length of the longest prefix of `hashes` that is here."""
        return sum(1 for _ in itertools.takewhile(self._index.__contains__, hashes))

    def load(self, keys: Sequence[bytes], blocks: Sequence[int], release: Callable[[], None]) -> HostLoad:
        """Copies what is here under `keys`, parents first, into leased blocks, pinned for write until `release`."""
        for key in reversed(keys):
            self._index.move_to_end(key)
        load = HostLoad(release)
        self._queue_copy(HostCopy(keys, blocks, [self._index[key] for key in keys], host_load=load))
        return load

    def save_partial_block(self, parent: bytes | None, block: int, release: Callable[[], None]) -> bytes:
        """Copies a block that is not full to the host, pinned for read until `release`; returns its key there."""
        key = b"parked-" + next(self._numbers).to_bytes(HASH_BYTES, "little")
        slots = self._allocate(1)
        self._insert(key, parent or NO_PARENT, slots[0])
        self._queue_copy(HostCopy([key], [block], slots, release=release))
        return key

    def drop_partial_block(self, key: bytes) -> None:
        """What was parked under the key is not needed any more."""
        if key in self._index:
            self._drop([key])

    # -- what the copier does -----------------------------------------------------------------------------------------

    def next_copy(self) -> HostCopy | None:
        """Waits for the next copy to make; None once the copier is to end. Without the lock."""
        with self._changed:
            while not self._stopping:
                if copy := self.start_next_copy():
                    return copy
                self._copier_waits = True
                self._changed.wait()
            return None

    def start_next_copy(self) -> HostCopy | None:
        """The next copy to make, which is under way from now on."""
        assert self._copying is None, "two copies at a time"
        if not self._queue and self._needs_saves():
            self._queue_saves()
        if self._queue:
            self._copying = self._queue.popleft()
        return self._copying

    def finish_copy(self, copy: HostCopy, error: BatonError | None = None) -> None:
        """The copy was made, error: but its blocks came back damaged; the host forgets them. Without the lock."""
        with self._changed:
            assert copy is self._copying
            self._copying = None
            if copy.host_load is not None:
                self._num_loaded += len(copy.blocks)
                if error is not None:
                    self.damaged += 1
                    self._drop(copy.keys)
                copy.host_load.finish(error)
            else:
                self._num_saved += len(copy.blocks)
                self._release(copy)
            self._changed.notify_all()

    def _release(self, copy: HostCopy) -> None:
        """Its blocks may be evicted, or reused, as far as the copy is concerned."""
        if copy.release is not None:
            copy.release()
            return
        for block in copy.blocks:
            self._cache.mark_saved(block)

    def stop(self) -> None:
        """The copier ends, and closes. Without the lock."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def close(self, error: BatonError) -> None:
        """No copy is made any more: the pool evicts as if there were no host, and loads end with the error. For whoever
        makes the copies; none touches memory from now on. Idempotent. Without the lock.
        """
        with self._changed:
            left = [*([] if self._copying is None else [self._copying]), *self._queue]
            self._queue.clear()
            self._copying = None
            self._closed = True
            for copy in left:
                if copy.host_load is not None:
                    copy.host_load.finish(error)
                else:
                    self._release(copy)
            self.clear()
            self._changed.notify_all()

    # -- the whole ----------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Copies are under way or asked for, or the pool is short of blocks that one would make ready."""
        return self._copying is not None or bool(self._queue) or self._needs_saves()

    def hashes(self) -> list[bytes]:
        """Of all full blocks here."""
        return [key for key in self._index if len(key) == HASH_BYTES]

    def clear(self) -> int:
        """Forgets everything, also that idle blocks are still to be copied; how many blocks were here."""
        for block in tuple(self._cache.unsaved):
            self._cache.mark_saved(block)
        self._changed.wait_for(lambda: not self._cache.saving, CLEAR_S)
        count = len(self._index)
        self._drop(tuple(self._index))
        self._dropped -= count
        return count

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no copy is under way or asked for, and the pool has its reserve; False when that took too long.
        Without the lock.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self.busy, timeout_s)

    def stats(self) -> HostTierStats:
        used = len(self._index)
        return HostTierStats(self.num_host_blocks, used, self._num_saved, self._num_loaded, self._dropped, self.damaged)

    def inconsistencies(self) -> list[str]:
        """What does not add up."""
        found: list[str] = []
        slots = [*self._index.values(), *self._free]
        if sorted(slots) != list(range(self.num_host_blocks)):
            found.append("slots of the host tier are lost or used twice")
        known = self._cache.block_by_hash
        for key in self._index:
            parent = self._parents[key]
            if key not in self._children.get(parent, ()):
                found.append("a block of the host tier is not known to its parent")
            if parent != NO_PARENT and parent not in known and parent not in self._index:
                found.append("a block of the host tier outlived its parent")
        if sum(map(len, self._children.values())) != len(self._index) or len(self._parents) != len(self._index):
            found.append("parents and children in the host tier differ")
        return found

    def _needs_saves(self) -> bool:
        if not self._cache.unsaved:
            self._requested_free = 0
            return False
        ready = self._num_available()
        if ready >= self._requested_free:
            self._requested_free = 0
        return ready < max(self._min_available, self._requested_free)

    def _queue_copy(self, copy: HostCopy) -> None:
        self._queue.append(copy)
        self.wake_copier()

    def _queue_saves(self) -> None:
        blocks = self._cache.start_saving(min(self._batch, self.num_host_blocks))
        keys: list[bytes] = []
        # Neighbours in the pool become neighbours here, so that they are copied at once.
        slots = dict(zip(sorted(blocks), self._allocate(len(blocks)), strict=True))
        for block in blocks:
            key = self._cache.hash_by_block[block]
            assert key is not None
            keys.append(key)
            self._insert(key, self._cache.parent_hash(block) or NO_PARENT, slots[block])
        self._on_stored(keys[::-1])
        self._queue.append(HostCopy(keys, blocks, [slots[block] for block in blocks]))

    def _allocate(self, count: int) -> list[int]:
        """Slots for `count` blocks, ascending; the oldest blocks here give theirs up."""
        while len(self._free) < count:
            self._drop([next(iter(self._index))])
        return sorted(self._free.pop() for _ in range(count))

    def _insert(self, key: bytes, parent: bytes, slot: int) -> None:
        assert key not in self._index
        self._index[key] = slot
        self._parents[key] = parent
        self._children.setdefault(parent, set()).add(key)

    def _drop(self, keys: Iterable[bytes]) -> None:
        """Forgets blocks, and of those that the pool does not have either, what continues them."""
        gone: list[bytes] = []
        waiting = list(keys)
        while waiting:
            key = waiting.pop()
            if key not in self._index:
                continue
            self._free.append(self._index.pop(key))
            parent = self._parents.pop(key)
            siblings = self._children[parent]
            siblings.discard(key)
            if not siblings:
                del self._children[parent]
            gone.append(key)
            if key not in self._cache.block_by_hash:
                waiting += self._children.get(key, ())
        self._dropped += len(gone)
        if hashes := [key for key in reversed(gone) if len(key) == HASH_BYTES]:
            self._on_evicted(hashes)
