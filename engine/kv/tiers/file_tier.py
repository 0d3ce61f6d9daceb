"""A file tier of the prefix cache: which host blocks are written to files, and which are read back for a prompt.

    pool  <-- host_copier.py -->  host tier  <-- file_copier.py -->  disk tier: files of this pod (segment_store.py)
                                      ^
                                      '--------- file_copier.py -->  shared tier: files of all pods (shared_store.py)

This is policy only, the same for both tiers. The lock of the block pool guards it, and two threads of file_copier.py do
the work of each.

A block is written once it is in the host, after the blocks before it; no request waits for that. A block that the host
forgets earlier is not written. A prompt whose cached prefix may go on in files waits for a *load* into the host, if
reading takes less time than computing by the measured rates of both. It never waits longer than computing would take.
Other sequences run meanwhile. Then the prompt is matched again, so a load that fails or comes late costs computing, and
nothing else depends on it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.kv.prefix_cache import PrefixCache
from engine.kv.tiers.block_store import BlockStore
from engine.kv.tiers.file_load import FileLoad, ReadRate, saves_time
from engine.kv.tiers.host_tier import NO_PARENT, HostTier

MIN_HOST_BLOCKS = 16  # A smaller host tier has no room for blocks under way
MAX_LOADS = 64  # Loads that wait for the thread; further prompts are computed
WRITE_BATCH_BYTES, WRITE_BATCH = 64 << 20, 256  # Bytes and blocks of one batch; a slow file server writes small ones
WRITE_DELAY_S = 0.05  # Blocks of an answer come at its end; without this their writes would slow down its last token
MAX_TRIES = 256  # Blocks that one search for a batch looks at
WAIT_FACTOR, MIN_WAIT_S, MAX_WAIT_S = 4.0, 0.5, 10.0  # A prompt waits for a load for so many times its predicted time


@dataclass(slots=True)
class FileTierStats:
    """Counts of a file tier, in blocks; all but the first three since the start."""

    blocks: int  # Known to be in files
    size: int  # Bytes of the files, as far as is known
    max_size: int
    written: int = 0
    loaded: int = 0  # Read back into the host
    decoded: int = 0  # Those of them that a codec has decoded, so they are not exact
    restored: int = 0  # Found in the files at the start
    damaged: int = 0  # Blocks and ends of files that were cut or had a wrong checksum
    computed: int = 0  # Prompts whose blocks were not read because computing them is predicted to be faster
    late: int = 0  # Loads that a prompt did not wait for to the end
    failures: int = 0  # Reads and writes that failed, and ends of the tier by an error
    searches: int = 0  # Loads that looked for blocks, if the store has no index
    absent: int = 0  # Those of them that found none


class HostWrite(NamedTuple):
    """A host block to write to a file."""

    key: bytes
    parent: bytes
    host_block: int


class Pause:
    """The time without work after an error. The first work after it is a trial."""

    __slots__ = ("failing", "until")

    def __init__(self) -> None:
        self.until = 0.0
        self.failing = False  # The last work has failed

    def begin(self, seconds: float) -> None:
        """Starts a pause."""
        self.until, self.failing = time.monotonic() + seconds, True

    @property
    def active(self) -> bool:
        """Whether the pause has not ended."""
        return time.monotonic() < self.until


class FileTier:
    """Decides what is written and read. The caller holds the lock, unless the method takes it."""

    def __init__(
        self,
        lock: threading.Lock,  # The lock of the block pool
        cache: PrefixCache,
        host_tier: HostTier,
        store: BlockStore,
        block_size: int,  # Tokens
    ) -> None:
        self.store, self.block_size = store, block_size
        #: Predicts the seconds of computing prompt tokens; 0 while unknown, and then every load is worth it.
        self.compute_s: Callable[[int], float] = lambda _: 0.0
        self.next_tier: FileTier | None = None  # Continues the loads of this one
        self.on_load_ended: Callable[[], None] = lambda: None  # Called under the lock
        self._cache, self._host = cache, host_tier
        self._stats = FileTierStats(0, 0, store.max_bytes)
        self._unwritten: OrderedDict[bytes, None] = OrderedDict()  # Blocks of the host to write, oldest first
        self._rewritten: set[bytes] = set()  # Blocks of the host that were written again: each is at most once
        self.write_epoch = 0  # Epoch of the store when the writes under way were chosen
        self._writing = self._reading = False
        self._write_at = 0.0  # No write begins before, unless the tier stops
        self._loads: deque[FileLoad] = deque()  # Loads that wait, and the one under way, which is the first
        self.rate = ReadRate()
        self.search_rate = ReadRate()  # In searches instead of bytes
        self.writes, self.reads = Pause(), Pause()
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
        if not self._unwritten:
            self._write_at = time.monotonic() + WRITE_DELAY_S
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

    def load(self, hashes: Sequence[bytes], compute_s: Callable[[int], float] | None = None) -> FileLoad:
        """Starts to read the blocks that follow the cached prefix of `hashes`, if that is faster than computing them.

        The next tier continues the load. Returns a load that is done if there is nothing to read. `compute_s` replaces
        the tiers' own prediction. Takes the lock.
        """
        load = FileLoad(hashes, compute_s)
        with self._changed:
            self._start(load)
        return load

    def _start(self, load: FileLoad) -> None:
        """Queues a load here, or at the next tier if there is nothing to gain here."""
        if self._queue(load):
            return
        if self.next_tier is None:
            self._end_wait(load)
        else:
            self.next_tier._start(load)

    def _queue(self, load: FileLoad) -> bool:
        """Queues a load, or lets it follow one of the same blocks. Returns whether it did."""
        if self.closed or self._host.closed or self.reads.active or self._hangs:
            return False
        hashes, held = load.hashes, self._num_held(load.hashes)
        keys = hashes[held : held + min(self._host.max_reserved, self.store.match(hashes[held:]))]
        if not keys:
            return False
        running = next((other for other in self._loads if other.valid and other.keys[0] == keys[0]), None)
        if running is not None:
            load.follow(running)
            return True
        if len(self._loads) >= MAX_LOADS or not self._saves_time(load, len(keys)):
            self._stats.computed += 1
            return False
        load.set_range(held, keys, self._worth_s(load, len(keys), MIN_WAIT_S))
        if not self.store.searches and not self._reserve(load):
            return False
        self._loads.append(load)
        self._changed.notify_all()
        return True

    def _num_held(self, hashes: Sequence[bytes]) -> int:
        """Returns the number of leading blocks in the pool and the host."""
        device = len(self._cache.match(hashes))
        return device + self._host.match(hashes[device:])

    def _saves_time(self, load: FileLoad, blocks: int) -> bool:
        """Returns whether a load of so many blocks, after those that wait, is faster than computing them."""
        read_s = self.read_s(blocks)
        if self.store.searches and not read_s:
            read_s = self.search_rate.predict_s(1)  # the rate of loads has the search in it
        return saves_time(read_s, self._compute_s(load, blocks))

    def _compute_s(self, load: FileLoad, blocks: int) -> float:
        return (load.compute_s or self.compute_s)(blocks * self.block_size)

    def _worth_s(self, load: FileLoad, blocks: int, wait_s: float) -> float:
        """Returns wait_s, or the seconds of computing the blocks if that is less: a longer wait cannot win time."""
        return min(wait_s, self._compute_s(load, blocks) or wait_s)

    @property
    def _hangs(self) -> bool:
        """Whether the load under way is so late that a prompt would wait behind it in vain."""
        return self._reading and time.monotonic() > self._loads[0].expires_at + MIN_WAIT_S

    def _reserve(self, load: FileLoad) -> bool:
        """Takes host blocks for as much of a load as there is room for. Returns whether there are some."""
        read_s = self.read_s(len(load.keys))
        self._host.mark_used(load.hashes[len(self._cache.match(load.hashes[: load.held])) : load.held])
        blocks = self._host.reserve(len(load.keys))
        wait_s = min(MAX_WAIT_S, max(MIN_WAIT_S, WAIT_FACTOR * read_s))
        load.set_range(load.held, load.keys[: len(blocks)], self._worth_s(load, len(blocks), wait_s))
        load.host_blocks = blocks
        return bool(blocks)

    def read_s(self, blocks: int) -> float:
        """Returns the predicted seconds of a load that begins now; 0 while the rate is unknown."""
        waiting = sum(len(load.host_blocks) for load in self._loads)
        return self.rate.predict_s((waiting + blocks) * self.store.block_bytes)

    @property
    def read_rate(self) -> float:
        """Bytes of the pool per second of the last loads, with decoding; 0 before the first one. Any thread."""
        return self.rate.bytes_per_s

    # -- called by the threads; they take the lock --------------------------------------------------------------------

    def next_writes(self) -> list[HostWrite] | None:
        """Waits for blocks to write, parents first; None after `stop`. `finish_writes` follows.

        The list is empty if the store has only chores.
        """
        with self._changed:
            while True:
                now = time.monotonic()
                if self.closed or (self._stop_at is not None and now >= self._stop_at):
                    return None
                delay_s = 0.0 if self._stop_at is not None or self.store.has_chores else self._write_at - now
                if not self.writes.active and delay_s <= 0:
                    writes = [] if self.store.has_chores else self._choose_writes()
                    if writes or self.store.has_chores:
                        self._writing = True
                        return writes
                if self._stop_at is not None and (self.writes.until >= self._stop_at or not self._host.busy):
                    return None
                paused_s = max(0.0, self.writes.until - now, delay_s)
                left_s = None if self._stop_at is None else max(0.0, self._stop_at - now)
                waits = [seconds for seconds in (paused_s or None, left_s) if seconds is not None]
                self._changed.wait(min(waits, default=None))

    def _choose_writes(self) -> list[HostWrite]:
        """Takes the start of the chain of the oldest block whose chain can be written now; empty if there is none.

        The chain has also blocks that were written before and whose file is gone since.
        """
        self.write_epoch = self.store.epoch
        incomplete = self._host.incomplete()
        limit = max(1, min(self._host.max_lent, WRITE_BATCH, WRITE_BATCH_BYTES // self.store.block_bytes))
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

    def finish_writes(
        self, writes: Sequence[HostWrite], written: int, *, pause_s: float = 0.0, unreachable: bool = False
    ) -> None:
        """Records that `written` of the blocks were written. pause_s: how long to write nothing after an error.

        After the pause the blocks that the error has kept from the files are written, if the host still has them. Files
        that are `unreachable` are not read in that time either.
        """
        with self._changed:
            self._writing = False
            self._host.take_back([write.host_block for write in writes])
            if pause_s:
                self._stats.failures += 1
                self.writes.begin(pause_s)
                if unreachable:
                    self.reads.begin(pause_s)
                missing = [write.key for write in writes if write.key not in self.store]
                written = len(writes) - len(missing)
                for key in reversed(missing):
                    if not self.closed and self._host.parent_of(key) is not None:
                        self._unwritten[key] = None
                        self._unwritten.move_to_end(key, last=False)
            else:
                self.writes.failing = False
            self._stats.written += written
            self._changed.notify_all()

    def next_load(self) -> FileLoad | None:
        """Waits for a load; None after `stop`. `finish_load` follows. A load that is late already is left out.

        If the store searches, the load has no host blocks yet, and `narrow` comes first.
        """
        with self._changed:
            while not self.stopping:
                while self._loads and not self._reading and (self._loads[0].done or self.reads.active):
                    self._end_load(self._loads.popleft(), 0)
                if self._loads and not self._reading:
                    self._reading = True
                    return self._loads[0]
                self._changed.wait()
            return None

    def narrow(self, load: FileLoad, found: int, seconds: float = 0.0) -> bool:
        """Restricts the load under way to the first `found` of its blocks, and takes host blocks for them.

        seconds: how long the search has taken.

        Returns False if nothing is to be read: `finish_load` follows at once. Takes the lock.
        """
        with self._changed:
            self._stats.searches += 1
            self._stats.absent += not found
            self.search_rate.observe(1, seconds)
            if self.closed or load.done or not load.valid:
                return False
            held = self._num_held(load.hashes)
            keys = load.keys[max(0, held - load.held) : found]
            if held < load.held or not keys:  # the blocks before them have left the host, or have come meanwhile
                return False
            if not self._saves_time(load, len(keys)):
                self._stats.computed += 1
                return False
            load.set_range(held, keys, self._worth_s(load, len(keys), MIN_WAIT_S))  # any thread may ask for `done`
            return self._reserve(load)

    def finish_load(self, load: FileLoad, intact: int, seconds: float, *, pause_s: float = 0.0) -> None:
        """Records a load of which the first `intact` blocks came whole.

        pause_s: how long to use no file after an error. The loads that wait end at once then.
        """
        with self._changed:
            self._reading = False
            if pause_s:
                self._stats.failures += 1
                self.reads.begin(pause_s)
                self.writes.begin(pause_s)
            elif intact or self.store.searches:
                self.reads.failing = False
            if self.closed:
                self._host.release_reserved(load.host_blocks)
            else:
                self._loads.popleft()
                self._end_load(load, intact)
                self.rate.observe(intact * self.store.block_bytes, seconds)
            self._changed.notify_all()

    def _end_load(self, load: FileLoad, intact: int) -> None:
        """Gives what was read to the host, and the load to the next tier if its prompt still waits."""
        intact = intact if load.valid else 0
        self._host.release_reserved(load.host_blocks[intact:])
        self._stats.loaded += intact
        self._stats.decoded += 0 if self.store.codec is None else intact
        self._host.insert_filled(load.parent, load.keys[:intact], load.host_blocks[:intact])
        if load.done:
            self._stats.late += 1
        elif self.next_tier is not None and load.valid:
            self.next_tier._start(load)
            return
        self._end_wait(load)

    def _end_wait(self, load: FileLoad) -> None:
        load.end()
        self.on_load_ended()

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
                self._end_wait(load)  # its host blocks are being filled; `finish_load` gives them back
            else:
                self._end_load(load, 0)
        self._loads.clear()
        self._unwritten.clear()
        if self in self._host.next_tiers:
            self._host.next_tiers.remove(self)
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
        trial = (self._writing and self.writes.failing) or (self._reading and self.reads.failing)
        return not (self.closed or self.writes.active or self.reads.active or trial)

    @property
    def busy(self) -> bool:
        """Whether a load or a write is under way or could begin."""
        return self._writing or bool(self._unwritten) or bool(self._loads)

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until the host tier and this one have nothing to do; False after the timeout. Takes the lock."""
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

    def stats(self) -> FileTierStats:
        """Returns the counts. Any thread."""
        self._stats.blocks, self._stats.size, self._stats.damaged = len(self.store), self.store.size, self.store.damaged
        return self._stats
