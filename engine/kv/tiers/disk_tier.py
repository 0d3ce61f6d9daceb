"""The third tier of the prefix cache: which host blocks are written to the disk, and which are read back for a prompt.

    pool  <-- host_copier.py -->  host tier  <-- disk_copier.py -->  files (segment_store.py)

This is policy only. The lock of the block pool guards it, and the two threads of disk_copier.py do the work.

A block is written once it is in the host, after the blocks before it; no request waits for that. A block that the host
forgets earlier is not written. A prompt whose cached prefix goes on in a file waits for a *load* into the host, if
reading takes less time than computing by the measured rates of both. Other sequences run meanwhile. Then the prompt is
matched again, so a load that fails or comes late costs computing, and nothing else depends on it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.kv.prefix_cache import PrefixCache
from engine.kv.tiers.host_tier import NO_PARENT, HostTier
from engine.kv.tiers.segment_store import SegmentStore

MIN_HOST_BLOCKS = 16  # A smaller host tier has no room for blocks under way
MAX_LOADS = 64  # Loads that wait for the thread; further prompts are computed
WRITE_BATCH_BYTES = 64 << 20
MAX_TRIES = 256  # Blocks that one search for a batch looks at
RATE_DECAY = 0.9  # Each load multiplies the weight of older ones by this
RATE_TTL_S = 60.0  # An older rate counts as unknown: a slow one would stop all loads, and so never be corrected
WAIT_FACTOR, MIN_WAIT_S, MAX_WAIT_S = 4.0, 0.5, 10.0  # A prompt waits for a load for so many times its predicted time


@dataclass(slots=True)
class DiskTierStats:
    """Counts of the disk tier, in blocks; all but the first three since the start."""

    blocks: int  # On the disk
    size: int  # Bytes of the files
    max_size: int
    written: int = 0
    loaded: int = 0  # Read back into the host
    decoded: int = 0  # Those of them that a codec has decoded, so they are not exact
    restored: int = 0  # Found in the files at the start
    damaged: int = 0  # Blocks and ends of files that were cut or had a wrong checksum
    computed: int = 0  # Prompts whose blocks were not read because computing them is predicted to be faster
    late: int = 0  # Loads that a prompt did not wait for to the end
    failures: int = 0  # Writes that failed, and ends of the tier by an error


def saves_time(read_s: float, compute_s: float) -> bool:
    """Returns whether blocks are read, not computed, by the predicted seconds of both; 0: unknown."""
    return not (read_s and compute_s) or read_s < compute_s


class HostWrite(NamedTuple):
    """A host block to write to the disk."""

    key: bytes
    parent: bytes
    host_block: int


class DiskLoad:
    """Blocks on their way from the disk to the host. A prompt may use the cache once `done` is true."""

    __slots__ = ("_ended", "expires_at", "host_blocks", "keys", "parent", "valid")

    def __init__(self, parent: bytes, keys: Sequence[bytes], host_blocks: Sequence[int], wait_s: float) -> None:
        self.parent = parent  # Hash of the block before the first one
        self.keys = keys  # Parents first
        self.host_blocks = host_blocks
        self.valid = True  # The cache was not reset since
        self.expires_at = time.monotonic() + wait_s
        self._ended = not keys

    @property
    def done(self) -> bool:
        """Whether the load has ended, or is late."""
        return self._ended or time.monotonic() > self.expires_at

    def end(self) -> bool:
        """Ends the wait for this load. Returns whether it came in time."""
        in_time = not self.done
        self._ended = True
        return in_time


NO_LOAD = DiskLoad(NO_PARENT, (), (), 0.0)


class DiskTier:
    """Decides what is written and read. The caller holds the lock, unless the method takes it."""

    def __init__(
        self,
        lock: threading.Lock,  # The lock of the block pool
        cache: PrefixCache,
        host_tier: HostTier,
        store: SegmentStore,
        block_size: int,  # Tokens
    ) -> None:
        self.store, self.block_size = store, block_size
        #: Predicts the seconds of computing prompt tokens; 0 while unknown, and then every load is worth it.
        self.compute_s: Callable[[int], float] = lambda _: 0.0
        self._cache, self._host = cache, host_tier
        self._stats = DiskTierStats(0, 0, store.max_bytes)
        self._unwritten: OrderedDict[bytes, None] = OrderedDict()  # Blocks of the host to write, oldest first
        self._rewritten: set[bytes] = set()  # Blocks of the host that were written again: each is at most once
        self.write_epoch = 0  # Epoch of the store when the writes under way were chosen
        self._writing = self._reading = False
        self._loads: deque[DiskLoad] = deque()  # Loads that wait, and the one under way, which is the first
        self._read_bytes = self._read_s = 0.0  # Of the last loads, with decaying weights
        self._measured_at = float("-inf")
        self._paused_until = 0.0
        self._stop_at: float | None = None
        self._changed = threading.Condition(lock)
        self.closed = False

    # -- called by the host tier --------------------------------------------------------------------------------------

    def __contains__(self, key: bytes) -> bool:
        return key in self.store

    def on_saved(self, keys: Sequence[bytes]) -> None:
        """Called when full blocks have their copy in the host."""
        if self.closed:
            return
        for key in keys:
            if key not in self.store:
                self._unwritten[key] = None
        self._changed.notify_all()

    def on_forgotten(self, keys: Sequence[bytes]) -> None:
        """Called when the host forgets full blocks."""
        for key in keys:
            self._unwritten.pop(key, None)
        self._rewritten.difference_update(keys)

    def on_host_closed(self) -> None:
        """Called when the host tier has ended: no block can be read or written any more."""
        self._end(failed=True)

    # -- called for prompts -------------------------------------------------------------------------------------------

    def load(self, hashes: Sequence[bytes], compute_s: Callable[[int], float] | None = None) -> DiskLoad:
        """Starts to read the blocks that follow the cached prefix of `hashes`, if that is faster than computing them.

        Returns a load that is done if there is nothing to read. `compute_s` replaces the tier's own prediction. Takes
        the lock.
        """
        if self.closed or not hashes:
            return NO_LOAD
        with self._changed:
            device = len(self._cache.match(hashes))
            held = device + self._host.match(hashes[device:])
            keys = hashes[held : held + self.store.match(hashes[held:])]
            if not keys or self.closed or self._host.closed:
                return NO_LOAD
            running = next((load for load in self._loads if load.valid and load.keys[0] == keys[0]), None)
            if running is not None:
                return running
            read_s, needed_s = self.read_s(len(keys)), (compute_s or self.compute_s)(len(keys) * self.block_size)
            if len(self._loads) >= MAX_LOADS or not saves_time(read_s, needed_s):
                self._stats.computed += 1
                return NO_LOAD
            self._host.mark_used(hashes[device:held])
            blocks = self._host.reserve(len(keys))
            if not blocks:
                return NO_LOAD
            wait_s = min(MAX_WAIT_S, max(MIN_WAIT_S, WAIT_FACTOR * read_s))
            load = DiskLoad(hashes[held - 1] if held else NO_PARENT, keys[: len(blocks)], blocks, wait_s)
            self._loads.append(load)
            self._changed.notify_all()
            return load

    def read_s(self, blocks: int) -> float:
        """Returns the predicted seconds of a load that begins now; 0 while the rate is unknown."""
        if not self._read_bytes or time.monotonic() - self._measured_at > RATE_TTL_S:
            return 0.0
        waiting = sum(len(load.keys) for load in self._loads)
        return (waiting + blocks) * self.store.block_bytes * self._read_s / self._read_bytes

    @property
    def read_rate(self) -> float:
        """Bytes of the pool per second of the last loads, with decoding; 0 before the first one. Any thread."""
        return self._read_bytes / self._read_s if self._read_bytes else 0.0

    # -- called by the threads; they take the lock --------------------------------------------------------------------

    def next_writes(self) -> list[HostWrite] | None:
        """Waits for blocks to write, parents first; None after `stop`. `finish_writes` follows.

        The list is empty if there are only files to remove.
        """
        with self._changed:
            while True:
                now = time.monotonic()
                if self.closed or (self._stop_at is not None and now >= self._stop_at):
                    return None
                if now >= self._paused_until:
                    writes = self._choose_writes()
                    if writes or self.store.has_doomed:
                        self._writing = True
                        return writes
                if self._stop_at is not None and not self._host.busy:
                    return None
                paused_s = max(0.0, self._paused_until - now)
                left_s = None if self._stop_at is None else max(0.0, self._stop_at - now)
                waits = [seconds for seconds in (paused_s or None, left_s) if seconds is not None]
                self._changed.wait(min(waits, default=None))

    def _choose_writes(self) -> list[HostWrite]:
        """Takes the start of the chain of the oldest block whose chain can be written now; empty if there is none.

        The chain has also blocks that were written before and whose file is gone since.
        """
        self.write_epoch = self.store.epoch
        incomplete = self._host.incomplete()
        limit = max(1, min(self._host.max_lent, WRITE_BATCH_BYTES // self.store.block_bytes))
        for _ in range(min(MAX_TRIES, len(self._unwritten))):
            key = next(iter(self._unwritten))
            chain = [key]
            while (parent := self._host.parent_of(chain[-1])) and self._can_write(parent, incomplete):
                chain.append(parent)
            if parent is not None and (parent == NO_PARENT or parent in self.store):
                writes: list[HostWrite] = []
                for link in chain[: -limit - 1 : -1]:
                    if link in self._unwritten:
                        del self._unwritten[link]
                    else:
                        self._rewritten.add(link)
                    writes.append(HostWrite(link, parent, self._host.lend(link)))
                    parent = link
                return writes
            if parent in incomplete or (parent in self._cache.block_by_hash and self._host.parent_of(parent) is None):
                self._unwritten.move_to_end(key)  # its parent comes later
            else:
                del self._unwritten[key]  # its parent is lost
        return []

    def _can_write(self, key: bytes, incomplete: Collection[bytes]) -> bool:
        """Returns whether a block before one to write is to be written too."""
        if key in self._unwritten:
            return True
        known = key in self.store or key in self._rewritten or key in incomplete
        return not known and self._host.parent_of(key) is not None

    def finish_writes(self, writes: Sequence[HostWrite], written: int, *, pause_s: float = 0.0) -> None:
        """Records that `written` of the blocks were written. pause_s: how long to write nothing after an error.

        After the pause the blocks that the error has kept from the disk are written, if the host still has them.
        """
        with self._changed:
            self._writing = False
            self._host.take_back([write.host_block for write in writes])
            if pause_s:
                self._stats.failures += 1
                self._paused_until = time.monotonic() + pause_s
                missing = [write.key for write in writes if write.key not in self.store]
                written = len(writes) - len(missing)
                for key in reversed(missing):
                    if not self.closed and self._host.parent_of(key) is not None:
                        self._unwritten[key] = None
                        self._unwritten.move_to_end(key, last=False)
            self._stats.written += written
            self._changed.notify_all()

    def next_load(self) -> DiskLoad | None:
        """Waits for a load; None after `stop`. `finish_load` follows. A load that is late already is left out."""
        with self._changed:
            while not self.stopping:
                while self._loads and not self._reading and self._loads[0].done:
                    self._end_load(self._loads.popleft(), 0)
                if self._loads and not self._reading:
                    self._reading = True
                    return self._loads[0]
                self._changed.wait()
            return None

    def finish_load(self, load: DiskLoad, intact: int, seconds: float) -> None:
        """Records a load of which the first `intact` blocks came whole."""
        with self._changed:
            self._reading = False
            if self.closed:
                self._host.release_reserved(load.host_blocks)
            else:
                self._loads.popleft()
                self._end_load(load, intact)
                self.observe_read(intact * self.store.block_bytes, seconds)
            self._changed.notify_all()

    def _end_load(self, load: DiskLoad, intact: int) -> None:
        intact = intact if load.valid else 0
        self._host.release_reserved(load.host_blocks[intact:])
        self._stats.loaded += intact
        self._stats.decoded += 0 if self.store.codec is None else intact
        self._host.insert_filled(load.parent, load.keys[:intact], load.host_blocks[:intact])
        self._stats.late += not load.end()

    def observe_read(self, size: int, seconds: float) -> None:
        """Records that reading `size` bytes of the pool, with decoding them, took so long."""
        if size and seconds > 0:
            self._read_bytes = RATE_DECAY * self._read_bytes + size
            self._read_s = RATE_DECAY * self._read_s + seconds
            self._measured_at = time.monotonic()

    def on_restored(self, blocks: int) -> None:
        """Records the blocks that were found at the start. Takes the lock."""
        with self._changed:
            self._stats.restored = blocks

    def stop(self, flush_s: float) -> None:
        """Ends the loads at once, and the writes when all blocks are written or after flush_s. Takes the lock."""
        with self._changed:
            if self._stop_at is None:
                self._stop_at = time.monotonic() + flush_s
            self._changed.notify_all()

    def close(self, *, failed: bool = False) -> None:
        """Ends the tier: the pool works without it. The threads begin no read and no write any more. Takes the lock."""
        with self._changed:
            self._end(failed=failed)

    def _end(self, *, failed: bool) -> None:
        if self.closed:
            return
        self.closed = True
        for number, load in enumerate(self._loads):
            if number == 0 and self._reading:
                load.end()  # its host blocks are being filled; `finish_load` gives them back
            else:
                self._end_load(load, 0)
        self._loads.clear()
        self._unwritten.clear()
        self._host.disk_tier = None
        if failed:
            self._stats.failures += 1
            self.store.forget()  # else the prefix index would send prompts here for blocks that cannot be read
        self._changed.notify_all()

    # -- the state as a whole -----------------------------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called, or the tier is closed. Any thread."""
        return self.closed or self._stop_at is not None

    @property
    def working(self) -> bool:
        """Whether blocks are read and written: no failure has ended the tier, and no error pauses it. Any thread."""
        return not self.closed and time.monotonic() >= self._paused_until

    @property
    def busy(self) -> bool:
        """Whether a load or a write is under way or could begin."""
        return self._writing or bool(self._unwritten) or bool(self._loads)

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until host and disk tier have nothing to do; False after the timeout. Takes the lock."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self.busy or self._host.busy), timeout_s)

    def clear(self) -> None:
        """Forgets all blocks; the loads and writes under way leave none."""
        for load in self._loads:
            load.valid = False
        self._unwritten.clear()
        self._rewritten.clear()
        self.store.clear()
        self._changed.notify_all()  # the files are removed now

    def stats(self) -> DiskTierStats:
        self._stats.blocks, self._stats.size, self._stats.damaged = len(self.store), self.store.size, self.store.damaged
        return self._stats
