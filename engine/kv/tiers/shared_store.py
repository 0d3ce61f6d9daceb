"""KV blocks in files that many pods read and write: the storage of the shared tier.

    DIRECTORY/FINGERPRINT/5f/5f3a...c1.kv     a block; its name is its hash, and 5f is one of 256 folders
    DIRECTORY/FINGERPRINT/5f/.6b1e...tmp      a block that is being written; a rename gives it its name
    DIRECTORY/FINGERPRINT/5f/bytes            bytes of the folder's files, changed under its lock (flock)

The fingerprint names model, weights, dtype, layout and codec; a hash covers tokens, tenant and adapter. So equal names
mean equal content. A file is a segment (segment_format.py) with one record. A reader checks its header, hash and CRC,
so a file that is cut, damaged or foreign is a miss. Each call to the file system runs on deadline_workers.py, and
shared_folders.py has those that concern a folder as a whole.

The lock only bounds the bytes: each folder has its part of `max_bytes`, and a pod counts a block and creates its file
before it writes it. A pod that needs room removes the files of the folder that were unused for the longest time, of
any pod. Where the file system has no locks, the bound is approximate. A file may go at any time; its reader misses it.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from engine.kv.tiers.block_store import StoredBlock
from engine.kv.tiers.cold_codec import BlockCodec
from engine.kv.tiers.deadline_workers import DeadlineWorkers
from engine.kv.tiers.segment_format import (
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    SEGMENT_SUFFIX,
    RecordCoder,
    segment_header,
    why_not_used,
)
from engine.kv.tiers.segment_index import TOUCH_S
from engine.kv.tiers.shared_folders import FILE_FLAGS, NUM_FOLDERS, TEMPORARY_SUFFIX, ForeignEntry, SharedFolders

log = logging.getLogger(__name__)

MIN_FOLDER_BLOCKS = 4  # A folder has room for at least so many blocks
KNOWN_BLOCKS = 1 << 18  # Blocks that a pod remembers, about 40 MB
THREADS = 8  # For reads, and as many for writes
FIND_TIMEOUT_S, READ_TIMEOUT_S, WRITE_TIMEOUT_S, SCAN_TIMEOUT_S = 1.0, 5.0, 5.0, 10.0  # Of one call to the workers
READ_BATCH_BYTES, READ_BATCH = 64 << 20, 256  # Bytes and blocks that one call to the workers reads at most
MAX_READ_S = 10.0  # A read ends after this time with the blocks that it has; no prompt waits longer
MAX_FIND = 64  # Blocks looked for by one call to the workers
MAX_FIND_S = 0.25  # A search ends after this time with the blocks that it has found
MAX_REMOVE_S = 2.0  # One `append` removes files for this time at most
#: There is no such block: it is gone, or something else has the name of its folder.
MISSING = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTDIR, errno.ELOOP})


class BlockFile(NamedTuple):
    """A block to write."""

    key: bytes
    content: bytes  # Of its file
    epoch: int  # It is not kept after a later `clear`


class SharedStore:
    """The files of one KV layout in a directory of many pods. Thread-safe; one thread appends, one finds and reads."""

    searches = True

    def __init__(
        self,
        directory: Path,
        fingerprint: str,  # Of the KV layout; blocks of other layouts are never read
        block_bytes: int,
        max_bytes: int,  # Of the files of all pods with this layout
        *,
        codec: BlockCodec | None = None,  # Encodes the content of records; None: it is the block
    ) -> None:
        """Touches no file yet: `scan` does."""
        self.directory, self.block_bytes, self.max_bytes = directory / fingerprint, block_bytes, max_bytes
        self.codec = codec
        self._coder = RecordCoder(block_bytes, codec)
        self.content_bytes = self._coder.content_bytes
        self.file_bytes = SEGMENT_HEADER_BYTES + self._coder.record_bytes
        self._folders = SharedFolders(self.directory, self.file_bytes, max_bytes, lambda key: self._unlearn([key]))
        self._header = segment_header(block_bytes, fingerprint, "" if codec is None else codec.format)
        self._lock = threading.Lock()  # Guards the fields below
        self._known: OrderedDict[bytes, None] = OrderedDict()  # Blocks that were there, the least recently used first
        self._clearing = False  # Files are to be removed, and none may be read
        self._readers = DeadlineWorkers(THREADS, "shared-read")
        self._writers = DeadlineWorkers(THREADS, "shared-write")
        self.epoch = 0  # Number of calls of `clear` and `forget`
        self.damaged = 0  # Blocks that were cut, foreign or had a wrong checksum

    @staticmethod
    def min_bytes(content_bytes: int) -> int:
        """Returns the smallest max_bytes for blocks of this size in a file."""
        return NUM_FOLDERS * MIN_FOLDER_BLOCKS * (SEGMENT_HEADER_BYTES + RECORD_HEADER_BYTES + content_bytes)

    # -- any thread, no I/O -------------------------------------------------------------------------------------------

    def __contains__(self, key: object) -> bool:
        return key in self._known

    def __len__(self) -> int:
        return len(self._known)

    def hashes(self) -> list[bytes]:
        """Returns the hashes of the blocks that this pod has seen there."""
        with self._lock:
            return list(self._known)

    @property
    def size(self) -> int:
        """Bytes of all files, as this pod saw them last."""
        return self._folders.size

    @property
    def has_chores(self) -> bool:
        """Whether `append` has to remove files."""
        return self._clearing

    def match(self, hashes: Sequence[bytes]) -> int:
        """Returns the most blocks that `find` may find."""
        return 0 if self._clearing else len(hashes)

    def clear(self) -> None:
        """Forgets all blocks. The files, of all pods, are removed by the next `append`; none is read before."""
        self._forget(clearing=True)

    def forget(self) -> None:
        """Forgets all blocks and keeps the files."""
        self._forget(clearing=False)

    def _forget(self, *, clearing: bool) -> None:
        with self._lock:
            self.epoch += 1
            self._clearing |= clearing
            self._known.clear()

    def inconsistencies(self) -> list[str]:
        """Returns violations of the invariants, one sentence each."""
        return ["the shared tier remembers too many blocks"] if len(self._known) > KNOWN_BLOCKS else []

    def _learn(self, keys: Sequence[bytes], epoch: int) -> int:
        """Remembers blocks, parents first, unless the store was cleared since. Returns how many."""
        with self._lock:
            if epoch != self.epoch:
                return 0
            for key in reversed(keys):  # so the start of a prompt is remembered longest
                self._known[key] = None
                self._known.move_to_end(key)
            while len(self._known) > KNOWN_BLOCKS:
                self._known.popitem(last=False)
            return len(keys)

    def _unlearn(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._known.pop(key, None)

    # -- the thread that reads ----------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes]) -> int:
        """Returns how many of the leading blocks are there, or fewer after MAX_FIND_S.

        Raises OSError, TimeoutError among them.
        """
        found, count, epoch = 0, 1, self.epoch  # most prompts have no block here, so the first one is asked alone
        until = time.monotonic() + MAX_FIND_S
        while found < len(keys) and (not found or time.monotonic() < until):
            part = keys[found : found + count]
            there = self._readers.map(self._exists, part, FIND_TIMEOUT_S)
            found += sum(takewhile(bool, there))
            if not all(there):
                self._unlearn([key for key, is_there in zip(part, there, strict=True) if not is_there])
                break
            count = min(MAX_FIND, 8 * count)
        self._learn(keys[:found], epoch)
        return found

    def read(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> int:
        """Reads blocks, parents first, into `targets`; returns the number of leading blocks that are intact.

        No target is written after the return. Raises OSError, TimeoutError among them.
        """
        done, epoch, until = 0, self.epoch, time.monotonic() + MAX_READ_S
        batch = max(1, min(READ_BATCH, READ_BATCH_BYTES // self.block_bytes))
        while done < len(keys) and time.monotonic() < until:
            part = keys[done : done + batch]
            blocks = self._readers.map(self._read_block, part, READ_TIMEOUT_S)
            intact = list(takewhile(lambda block: block is not None, blocks))
            for target, block in zip(targets[done:], intact, strict=False):
                assert block is not None
                target[:] = block
            done += len(intact)
            if len(intact) < len(part):
                self._unlearn([key for key, block in zip(part, blocks, strict=True) if block is None])
                break
        self._learn(keys[:done], epoch)
        return done

    # -- the thread that writes ---------------------------------------------------------------------------------------

    def scan(self, stopped: Callable[[], bool] = lambda: False) -> int:
        """Makes the directory and reads the sizes of the folders. Returns 0: blocks are found by their names only."""
        if not stopped():
            self._writers.map(lambda _: self._folders.read_sizes(), [None], SCAN_TIMEOUT_S)
        return 0

    def append(self, blocks: Sequence[StoredBlock], epoch: int | None = None) -> int:
        """Writes those blocks that are not there yet; returns how many.

        A block that the codec cannot encode is skipped, and one whose folder has another pod's lock for too long.
        Raises OSError, TimeoutError among them.
        """
        if self._clearing:
            self._remove_all()
        epoch = self.epoch if epoch is None else epoch
        if epoch != self.epoch or self._clearing:
            return 0
        files = []
        for block in blocks:
            if block.key not in self._known and (record := self._coder.encode(*block)) is not None:
                files.append(BlockFile(block.key, b"".join((self._header, *record)), epoch))
        written = self._writers.map(self._write_file, files, WRITE_TIMEOUT_S) if files else []
        self._learn([file.key for file, is_new in zip(files, written, strict=True) if is_new is not None], epoch)
        return written.count(True)

    def _remove_all(self) -> None:
        """Removes files of all pods for at most MAX_REMOVE_S. The store is cleared once they are gone."""
        epoch, until = self.epoch, time.monotonic() + MAX_REMOVE_S
        empty = functools.partial(self._folders.empty, until=until)
        emptied = self._writers.map(empty, range(NUM_FOLDERS), SCAN_TIMEOUT_S)
        with self._lock:
            self._clearing = epoch != self.epoch or not all(emptied)

    def close(self) -> None:
        """Ends the workers. No other call may be under way or follow."""
        self._readers.close()
        self._writers.close()

    # -- on the workers: these calls may hang -------------------------------------------------------------------------

    def path_of(self, key: bytes) -> Path:
        """Returns the file of a block."""
        return self._folders.path_of(key[0]) / f"{key.hex()}{SEGMENT_SUFFIX}"

    def _exists(self, key: bytes, folder: int | None = None) -> bool:
        """Returns whether a whole file has the name of the block, in an open folder or by its path."""
        path = self.path_of(key)
        try:
            status = os.stat(path if folder is None else path.name, dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            if error.errno in MISSING:
                return False
            raise
        return stat.S_ISREG(status.st_mode) and status.st_size == self.file_bytes

    def _read_block(self, key: bytes) -> memoryview | None:
        """Returns the content of a block; None if its file is gone, or does not have it."""
        try:
            with self._folders.opened(key[0]) as folder:
                return self._read_from(folder, key)
        except ForeignEntry:
            return None
        except OSError as error:  # ESTALE: another pod has removed the file
            if error.errno in MISSING:
                return None
            raise

    def _read_from(self, folder: int, key: bytes) -> memoryview | None:
        """Returns the content of a block in an open folder; None if its file does not have it. Raises OSError."""
        header, head = bytearray(SEGMENT_HEADER_BYTES), bytearray(RECORD_HEADER_BYTES)
        block = memoryview(bytearray(self.block_bytes))
        content = self._coder.content_target(block)
        path = self.path_of(key)
        with self._folders.refusing_foreign(f"{path.parent.name}/{path.name}"):
            file = os.open(path.name, os.O_RDONLY | FILE_FLAGS, dir_fd=folder)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                return None
            size = os.preadv(file, [header, head, content], 0)
            if size == self.file_bytes and header == self._header and self._coder.decode(key, head, content, block):
                if time.time() - status.st_mtime > TOUCH_S:
                    with suppress(OSError):
                        os.utime(file)
                return block
        finally:
            os.close(file)
        why = "cut or damaged" if header == self._header else why_not_used(bytes(header), self._header)
        log.warning("%s: %s: its block is computed again", path, why)
        with self._lock:
            self.damaged += 1
        with suppress(OSError):
            os.unlink(path.name, dir_fd=folder)
        return None

    def _write_file(self, file: BlockFile) -> bool | None:
        """Writes a block.

        Returns False if it was there, None if there was no room, if the store was cleared, or if something else has
        the name of its file or folder.
        """
        try:
            with self._folders.opened(file.key[0], create=True) as folder:
                if self._exists(file.key, folder):
                    with suppress(OSError):
                        os.utime(self.path_of(file.key).name, dir_fd=folder, follow_symlinks=False)
                    return False
                return True if self._write_to(folder, file) else None
        except ForeignEntry:
            return None

    def _write_to(self, folder: int, file: BlockFile) -> bool:
        """Writes a block into an open folder. Returns False if there was no room or the store was cleared."""
        path = self.path_of(file.key)
        temporary = f".{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"
        descriptor = self._folders.create(folder, temporary, file.key[0])
        if descriptor is None:
            return False
        renamed = False
        try:
            try:
                if os.write(descriptor, file.content) != len(file.content):
                    raise OSError(errno.ENOSPC, "a KV block was written in part")
            finally:
                os.close(descriptor)  # a network file system may tell only now that it has no room
            if file.epoch == self.epoch:
                with self._folders.refusing_foreign(f"{path.parent.name}/{path.name}"):
                    os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
                renamed = True
        finally:
            if not renamed:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
        return renamed
