"""KV blocks in files of one directory, which survive a restart: the storage of the disk tier.

The files are segments: segment_format.py has their bytes, and segment_index.py the blocks in them. One thread appends
to the newest segment; any thread reads. A record is written by one call, and a segment is synced to the disk
(fdatasync) when it is full and when the store closes. So a crash of the process loses no written block, and a loss of
power loses at most the last segment. A file that is cut or damaged loses blocks and never gives wrong ones: `scan`
checks the records' headers, and `read` checks the content.

The files never exceed `max_bytes`. The segment that has been unused for the longest time is removed as a whole.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from common.errors import describe
from engine.kv.prefix_cache import HashesCallback
from engine.kv.tiers.block_store import StoredBlock
from engine.kv.tiers.cold_codec import BlockCodec
from engine.kv.tiers.segment_format import (
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    SEGMENT_SUFFIX,
    RecordCoder,
    RecordHeader,
    segment_header,
    segment_name,
    why_not_used,
)
from engine.kv.tiers.segment_index import BlockPlace, Segment, SegmentIndex, reachable

log = logging.getLogger(__name__)

MAX_SEGMENT_BYTES = 1 << 30
MIN_SEGMENTS = 8  # The files have room for at least so many segments, so that a removal loses a small part
SCAN_BATCH = 10_000  # Blocks that enter the index at once
READ_THREADS = 8  # A CRC-32 runs at about 1 GB/s on one core, and an NVMe disk reads several GB/s


class SegmentStore:
    """The segments of one directory, and the index of their blocks. Thread-safe; only one thread calls `append`."""

    searches = False

    def __init__(
        self,
        directory: Path,
        fingerprint: str,  # Of the KV layout; blocks of other layouts are never read
        block_bytes: int,
        max_bytes: int,  # Of all files together
        *,
        codec: BlockCodec | None = None,  # Encodes the content of records; None: it is the block
        on_stored: HashesCallback = lambda _: None,  # Gets hashes that `match` finds from now on. Must not block.
        on_evicted: HashesCallback = lambda _: None,  # Gets hashes that it does not find any more
    ) -> None:
        """Reads nothing yet: `scan` does."""
        self.directory, self.block_bytes, self.max_bytes = directory, block_bytes, max_bytes
        self.codec = codec
        self._coder = RecordCoder(block_bytes, codec)
        self.content_bytes, self.record_bytes = self._coder.content_bytes, self._coder.record_bytes
        self._segment_bytes = max(self.min_bytes(self.content_bytes) // MIN_SEGMENTS, self._segment_size())
        self._header = segment_header(block_bytes, fingerprint, "" if codec is None else codec.format)
        self._on_stored, self._on_evicted = on_stored, on_evicted
        self._lock = threading.Lock()  # Guards all fields below; the callbacks run under it
        self._index = SegmentIndex()
        self._active: tuple[int, Segment] | None = None  # The file that is appended to, and its descriptor
        self._doomed: list[Path] = []  # Files to remove
        self._next_number = 0
        self._readers: ThreadPoolExecutor | None = None
        self.epoch = 0  # Number of calls of `clear` and `forget`
        self.damaged = 0  # Blocks and ends of files that were cut or had a wrong checksum

    @staticmethod
    def min_bytes(content_bytes: int) -> int:
        """Returns the smallest max_bytes for blocks of this size in a file."""
        return MIN_SEGMENTS * (SEGMENT_HEADER_BYTES + RECORD_HEADER_BYTES + content_bytes)

    def _segment_size(self) -> int:
        return min(MAX_SEGMENT_BYTES, self.max_bytes // (4 * MIN_SEGMENTS))

    # -- any thread ---------------------------------------------------------------------------------------------------

    def __contains__(self, key: object) -> bool:
        return key in self._index.places

    def __len__(self) -> int:
        return len(self._index.places)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        with self._lock:
            return self._index.size

    def match(self, hashes: Iterable[bytes]) -> int:
        """Returns the length of the longest prefix of `hashes` in the index."""
        return sum(1 for _ in takewhile(self._index.places.__contains__, hashes))

    def find(self, keys: Sequence[bytes]) -> int:
        """Returns what `match` returns, because the index has all blocks."""
        return self.match(keys)

    def hashes(self) -> list[bytes]:
        """Returns the hashes of the index."""
        with self._lock:
            return list(self._index.places)

    @property
    def has_chores(self) -> bool:
        """Whether `append` has work besides blocks: files wait for their removal."""
        return bool(self._doomed)

    def read(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> int:
        """Reads blocks, parents first, into `targets`; returns the number of leading blocks that are intact.

        A damaged block and all that continue it leave the index. A target behind the intact ones may hold anything.
        """
        with self._lock:
            places = [place for key in keys if (place := self._index.places.get(key)) is not None]
            if len(places) < len(keys):
                places = places[: self.match(keys)]
            paths = {place.segment: self._index.segments[place.segment].path for place in places}
            stale = self._index.use(keys[: len(places)])
            if self._readers is None:
                self._readers = ThreadPoolExecutor(READ_THREADS, "disk-read")
            readers = self._readers
        _touch(stale)
        files: dict[int, int] = {}
        for number, path in paths.items():
            try:
                files[number] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:  # the blocks of this file count as damaged
                log.warning("%s cannot be opened: %s", path, describe(error))
        try:
            jobs = [(files.get(place.segment), place, key) for key, place in zip(keys, places, strict=False)]
            intact = list(readers.map(self._read_block, jobs, targets))
        finally:
            for file in files.values():
                os.close(file)
        count = intact.index(False) if False in intact else len(intact)
        if count < len(intact):
            self._drop_damaged(keys[count], paths[places[count].segment])
        return count

    def _read_block(self, job: tuple[int | None, BlockPlace, bytes], target: memoryview) -> bool:
        """Returns whether the block came whole."""
        file, place, key = job
        header = bytearray(RECORD_HEADER_BYTES)
        content = self._coder.content_target(target)
        try:
            if file is None or os.preadv(file, [header, content], place.offset) != self.record_bytes:
                return False
        except OSError as error:
            log.warning("a KV block cannot be read from %s: %s", self.directory, describe(error))
            return False
        return self._coder.decode(key, header, content, target)

    def _drop_damaged(self, key: bytes, path: Path) -> None:
        with self._lock:
            dropped = self._drop([key])
            self.damaged += bool(dropped)
        if dropped:
            log.warning("%s: a block is damaged or gone: it and %d others are computed again", path, len(dropped) - 1)

    def clear(self) -> None:
        """Forgets all blocks. The files are removed by the next `append`, `scan` or `close`."""
        with self._lock:
            self._forget()
            self._doomed += [segment.path for segment in self._index.segments.values()]
            self._index.segments.clear()

    def forget(self) -> None:
        """Forgets all blocks and keeps the files: the next start finds the blocks again."""
        with self._lock:
            self._forget()

    def inconsistencies(self) -> list[str]:
        """Returns violations of the invariants, one sentence each."""
        with self._lock:
            defects = self._index.inconsistencies()
            if self._index.size > self.max_bytes:
                defects.append(f"the disk tier has {self._index.size} bytes, more than {self.max_bytes}")
            return defects

    # -- the thread that writes ---------------------------------------------------------------------------------------

    def scan(self, stopped: Callable[[], bool] = lambda: False) -> int:
        """Reads the headers of all records into the index; returns the number of blocks. Call it once, first.

        Files that cannot be read, or have another layout, count; they are the first to be removed. If `stopped` returns
        True, the scan ends early, and no other call but `close` may follow. A `clear` meanwhile holds for all blocks.
        """
        epoch = self.epoch
        found: dict[bytes, BlockPlace] = {}
        segments: list[tuple[int, Segment]] = []
        for path in sorted(self.directory.glob("*" + SEGMENT_SUFFIX)):
            if stopped():
                return 0
            try:
                status = path.lstat()
                number = int(path.stem)
                if not stat.S_ISREG(status.st_mode) or path.name != segment_name(number):
                    raise ValueError("expected a file that a disk tier has written")
            except (ValueError, OSError) as error:
                log.warning("%s is not used: %s", path, describe(error))
                continue
            segment = Segment(number, path, status.st_size)
            blocks = self._scan_segment(segment)
            found.update(blocks)  # of a block that was written twice, the newer one counts
            segments.append((status.st_mtime_ns if blocks else 0, segment))
        order = reachable(found)
        with self._lock:
            self._next_number = max((segment.number + 1 for _, segment in segments), default=0)
            if epoch != self.epoch:
                self._doomed += [segment.path for _, segment in segments]
            else:
                for _, segment in sorted(segments, key=lambda pair: pair[0]):
                    self._index.segments[segment.number] = segment
        for start in range(0, len(order), SCAN_BATCH):  # other threads need the lock in between
            with self._lock:
                if epoch != self.epoch:
                    break
                part = order[start : start + SCAN_BATCH]
                for key in part:
                    self._index.insert(key, found[key])
                self._on_stored(part)
        with self._lock:
            self._make_room(0)
            count = len(self._index.places)
        with suppress(OSError):  # the next `append` tries again and tells the error
            self._remove_doomed()
        return count

    def _scan_segment(self, segment: Segment) -> dict[bytes, BlockPlace]:
        """Returns the blocks up to the first damage."""
        blocks: dict[bytes, BlockPlace] = {}
        try:
            self._read_headers(segment, blocks)
        except OSError as error:
            self.damaged += 1
            log.warning("%s cannot be read, %d blocks of it are used: %s", segment.path, len(blocks), describe(error))
        return blocks

    def _read_headers(self, segment: Segment, blocks: dict[bytes, BlockPlace]) -> None:
        """Adds the blocks of a file to `blocks`. Raises OSError."""
        with segment.path.open("rb", buffering=0) as file:
            header = file.read(SEGMENT_HEADER_BYTES)
            if header != self._header:
                log.warning("%s: %s: not used", segment.path, why_not_used(header, self._header))
                return
            offset = SEGMENT_HEADER_BYTES
            while offset < segment.size:
                record = RecordHeader.parse(os.pread(file.fileno(), RECORD_HEADER_BYTES, offset))
                end = offset + self.record_bytes
                if record is None or record.content_bytes != self.content_bytes or end > segment.size:
                    self.damaged += 1
                    log.warning("%s: cut or damaged at byte %d: the rest is computed again", segment.path, offset)
                    break
                blocks[record.key] = BlockPlace(segment.number, offset, record.parent)
                offset = end

    def append(self, blocks: Sequence[StoredBlock], epoch: int | None = None) -> int:
        """Writes blocks, parents first; returns how many entered the index. Removes segments if there is no room.

        A block is skipped without its parent, if it is there already, or if the codec cannot encode it. Nothing is kept
        after a `clear` or `forget` since `epoch` or the call. Raises OSError (a full disk); the blocks before it are
        written. Nothing is written while a file cannot be removed, so the files stay bounded.
        """
        stored: list[bytes] = []
        stale: list[Path] = []
        places = self._index.places
        epoch = self.epoch if epoch is None else epoch
        self._remove_doomed()
        try:
            for block in blocks:
                if epoch != self.epoch:
                    break
                if block.key in places or (block.parent and block.parent not in places):
                    continue
                record = self._coder.encode(*block)
                if record is None:
                    continue
                file, segment = self._open_segment()
                place = BlockPlace(segment.number, segment.size, block.parent)
                self._write(file, segment, *record)
                with self._lock:
                    if epoch == self.epoch and (not block.parent or block.parent in places):
                        self._index.insert(block.key, place)
                        stored.append(block.key)
        finally:
            with self._lock:
                alive = [key for key in stored if key in places]
                if alive:
                    stale = self._index.use(alive)
                    self._on_stored(alive)
            _touch(stale)
            with suppress(OSError):  # the next `append` tries again and tells the error
                self._remove_doomed()
        return len(alive)

    def seal(self) -> None:
        """Ends the newest segment: its bytes reach the disk, and leave the page cache."""
        active, self._active = self._active, None
        if active is None:
            return
        file, segment = active
        try:
            if segment.number in self._index.segments:
                os.fdatasync(file)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)

    def close(self) -> None:
        """Ends the newest segment. No other call may be under way or follow. Idempotent."""
        try:
            self.seal()
        except OSError as error:
            log.warning("the newest KV segment in %s may be lost: %s", self.directory, describe(error))
        try:
            self._remove_doomed()
        except OSError as error:
            log.warning("KV segments in %s cannot be removed: %s", self.directory, describe(error))
        if self._readers is not None:
            self._readers.shutdown()

    def _open_segment(self) -> tuple[int, Segment]:
        """Returns the file to append one record to."""
        if self._active is not None:
            _, segment = self._active
            full = segment.size + self.record_bytes > self._segment_bytes
            if full or segment.number not in self._index.segments:
                self.seal()
        with self._lock:
            self._make_room(self.record_bytes + (SEGMENT_HEADER_BYTES if self._active is None else 0))
        self._remove_doomed()
        if self._active is None:
            path, file = self._create_file()
            segment = Segment(self._next_number, path, 0, touched_at=time.monotonic())
            self._next_number += 1
            self._active = file, segment
            with self._lock:
                self._index.segments[segment.number] = segment
            self._write(file, segment, self._header)
        return self._active

    def _create_file(self) -> tuple[Path, int]:
        """Creates the file of the next number that is free; returns it and its descriptor."""
        while True:
            path = self.directory / segment_name(self._next_number)
            try:
                return path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileExistsError:  # something that is no segment
                self._next_number += 1

    def _write(self, file: int, segment: Segment, *parts: bytes | memoryview) -> None:
        """Appends to the segment. Raises OSError if not all was written; the file has its former length then."""
        size = sum(map(len, parts))
        try:
            if os.pwritev(file, parts, segment.size) != size:
                raise OSError(errno.ENOSPC, "a KV block was written in part")
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, segment.size)
            with suppress(OSError):
                self.seal()
            if not segment.size:  # without its header the file is useless
                with self._lock:
                    self._index.segments.pop(segment.number, None)
                    self._doomed.append(segment.path)
            raise
        segment.size += size

    def _remove_doomed(self) -> None:
        """Removes files. Raises OSError for one that cannot be removed; it stays in the list."""
        while self._doomed:
            path = self._doomed.pop()
            try:
                path.unlink(missing_ok=True)
            except OSError:
                self._doomed.append(path)
                raise

    # -- the lock is held ---------------------------------------------------------------------------------------------

    def _make_room(self, size: int) -> None:
        """Removes segments until `size` more bytes fit. The newest one, which is appended to, stays."""
        active = None if self._active is None else self._active[1]
        while self._index.size + size > self.max_bytes:
            victim = next((segment for segment in self._index.segments.values() if segment is not active), None)
            if victim is None:
                return
            self._drop(list(victim.keys))
            del self._index.segments[victim.number]
            self._doomed.append(victim.path)

    def _forget(self) -> None:
        self.epoch += 1
        if forgotten := self._index.clear():
            self._on_evicted(forgotten[::-1])

    def _drop(self, keys: Sequence[bytes]) -> list[bytes]:
        """Forgets blocks and all that continue them; returns them."""
        dropped = self._index.drop(keys)
        if dropped:
            self._on_evicted(dropped[::-1])
        return dropped


def _touch(paths: Iterable[Path]) -> None:
    """Sets the times of files to now."""
    for path in paths:
        with suppress(OSError):
            os.utime(path)
