"""The folders of the shared tier: their files, the count of their bytes, and the locks that guard it.

Other users may put things into the directory. No symbolic link below DIRECTORY is followed, and only regular files with
names of the shared tier are read or removed. A folder, counter or block that is something else costs only its own
blocks. Each call here may hang, so it runs on a thread of deadline_workers.py.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.errors import describe
from engine.kv.tiers.segment_format import SEGMENT_SUFFIX

log = logging.getLogger(__name__)

NUM_FOLDERS = 256  # By the first byte of the hash; all pods must agree
COUNTER, TEMPORARY_SUFFIX = "bytes", ".tmp"
KEPT_SHARE = 0.9  # Of a folder's bytes, after files were removed: a removal lists the folder, so it should be rare
ABANDONED_S = 3_600.0  # A temporary file of this age belongs to a pod that has ended
LOCK_WAIT_S, LOCK_POLL_S = 1.0, 0.005
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
#: Something else has the name of a folder, a counter or a block: no directory, a directory, a link, a pipe or a socket.
FOREIGN = frozenset({errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENOTEMPTY, errno.EEXIST})
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: the opening of a pipe would wait
BLOCK_NAME = re.compile(r"[0-9a-f]{32}" + re.escape(SEGMENT_SUFFIX))
COUNTER_BYTES = 32


class ForeignEntry(Exception):
    """Something that no pod has made has the name of a folder, a counter or a block. That part is not used."""


class SharedFolders:
    """The folders of one KV layout. Thread-safe."""

    def __init__(
        self,
        directory: Path,
        file_bytes: int,  # Of the file of a block
        max_bytes: int,  # Of the files of all folders
        on_removed: Callable[[bytes], None],  # Gets the hash of each block that was removed to make room
    ) -> None:
        self.directory = directory
        self._file_bytes, self._folder_bytes, self._on_removed = file_bytes, max_bytes // NUM_FOLDERS, on_removed
        self._lock = threading.Lock()  # Guards the fields below
        self._sizes: dict[int, int] = {}  # Bytes of each folder when this pod looked at it
        self._locks = True  # The file system has locks, as far as is known
        self._foreign: set[str] = set()  # Foreign entries of which the log has told

    @property
    def size(self) -> int:
        """Bytes of all files, as this pod saw them last. No I/O."""
        with self._lock:
            return sum(self._sizes.values())

    def path_of(self, number: int) -> Path:
        """Returns the path of a folder. No I/O."""
        return self.directory / f"{number:02x}"

    def read_sizes(self) -> None:
        """Makes the directory and reads the counters. Raises OSError."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(NUM_FOLDERS):
            with suppress(FileNotFoundError, ValueError, ForeignEntry), self.opened(number) as folder:
                counter = self._open_counter(folder, number, os.O_RDONLY)
                try:
                    size = _parse_size(os.pread(counter, COUNTER_BYTES, 0))
                finally:
                    os.close(counter)
                with self._lock:
                    self._sizes[number] = size

    @contextmanager
    def opened(self, number: int, *, create: bool = False) -> Iterator[int]:
        """Yields the descriptor of a folder. Raises ForeignEntry if something else has its name, and OSError."""
        try:
            folder = self._open_folder(number, create=False)
        except FileNotFoundError:
            if not create:
                raise
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = self._open_folder(number, create=True)
        try:
            yield folder
        finally:
            os.close(folder)

    def _open_folder(self, number: int, *, create: bool) -> int:
        name = self.path_of(number).name
        base = os.open(self.directory, FOLDER_FLAGS)
        try:
            with self.refusing_foreign(name):
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=base)
                return os.open(name, FOLDER_FLAGS, dir_fd=base)
        finally:
            os.close(base)

    @contextmanager
    def refusing_foreign(self, name: str) -> Iterator[None]:
        """Turns an OSError that tells of a foreign entry into ForeignEntry. The log tells of each entry once."""
        try:
            yield
        except OSError as error:
            if error.errno not in FOREIGN:
                raise
            with self._lock:
                told = name in self._foreign or len(self._foreign) > NUM_FOLDERS
                self._foreign.add(name)
            if not told:
                text = "%s/%s was not made by a pod, so its blocks are computed again: %s; remove it"
                log.warning(text, self.directory, name, describe(error))
            raise ForeignEntry(name) from error

    def _open_counter(self, folder: int, number: int, flags: int) -> int:
        """Returns the descriptor of a folder's counter. Raises ForeignEntry if something else has its name."""
        name = f"{number:02x}/{COUNTER}"
        with self.refusing_foreign(name):
            counter = os.open(COUNTER, flags | FILE_FLAGS, 0o600, dir_fd=folder)
            status = os.fstat(counter)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                os.close(counter)
                raise OSError(errno.EEXIST, "expected a file with one name")
        return counter

    def create(self, folder: int, name: str, number: int) -> int | None:
        """Creates the file of a block in a folder, with its full size, after the removal of old ones if need be.

        So a pod that lists the folder counts it. Returns its descriptor; None if there is no room, or no lock in time.
        """
        with self.locked(folder, number) as counter:
            if counter is None:
                return None
            try:
                size = _parse_size(os.pread(counter, COUNTER_BYTES, 0))
            except ValueError:  # new, or damaged
                size = self._make_room(folder, self._folder_bytes)
            if size + self._file_bytes > self._folder_bytes:
                kept = min(self._folder_bytes - self._file_bytes, int(KEPT_SHARE * self._folder_bytes))
                size = self._make_room(folder, kept)
            if size + self._file_bytes > self._folder_bytes:
                self._set_size(number, counter, size)
                return None
            self._set_size(number, counter, size + self._file_bytes)
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | FILE_FLAGS, 0o600, dir_fd=folder)
            try:
                os.ftruncate(descriptor, self._file_bytes)
            except OSError:
                os.close(descriptor)
                with suppress(OSError):
                    os.unlink(name, dir_fd=folder)
                raise
            return descriptor

    @contextmanager
    def locked(self, folder: int, number: int) -> Iterator[int | None]:
        """Yields the open counter of a folder while this pod has its lock; None if another pod has it for too long."""
        counter = self._open_counter(folder, number, os.O_RDWR | os.O_CREAT)
        try:
            yield counter if self._take_lock(counter) else None
        finally:
            os.close(counter)  # ends the lock

    def _take_lock(self, counter: int) -> bool:
        until = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(counter, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > until:
                    return False
                time.sleep(LOCK_POLL_S)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                if self._locks:
                    self._locks = False
                    log.warning("%s has no file locks, so its size is approximate: %s", self.directory, describe(error))
                return True

    def _set_size(self, number: int, counter: int, size: int) -> None:
        os.pwrite(counter, b"%-31d\n" % size, 0)
        with self._lock:
            self._sizes[number] = size

    def _make_room(self, folder: int, kept: int, until: float = float("inf")) -> int:
        """Removes the files of a folder that were unused for the longest time until at most `kept` bytes are left.

        Returns the bytes that are left: more than `kept` if `until` has passed. The lock of the folder is held. Files
        with a wrong size go first. What no pod has made does not count, and stays.
        """
        files: list[tuple[float, int, str]] = []
        size, now = 0, time.time()
        with os.scandir(folder) as entries:
            for entry in entries:
                is_block = BLOCK_NAME.fullmatch(entry.name) is not None
                if not (is_block or (entry.name.startswith(".") and entry.name.endswith(TEMPORARY_SUFFIX))):
                    continue
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(status.st_mode):
                        continue
                    if is_block:
                        size += status.st_size
                        is_whole = status.st_size == self._file_bytes
                        files.append((status.st_mtime if is_whole else 0.0, status.st_size, entry.name))
                    elif now - status.st_mtime > ABANDONED_S:
                        os.unlink(entry.name, dir_fd=folder)
                    else:
                        size += min(status.st_size, self._file_bytes)
        for _, file_size, name in sorted(files):
            if size <= kept or time.monotonic() > until:
                break
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            size -= file_size
            self._on_removed(bytes.fromhex(name.removesuffix(SEGMENT_SUFFIX)))
        return size

    def empty(self, number: int, until: float) -> bool:
        """Removes all blocks of a folder, until a time of time.monotonic(). Returns whether none is left."""
        if time.monotonic() > until:
            return False
        try:
            with self.opened(number) as folder, self.locked(folder, number) as counter:
                if counter is None:
                    raise OSError(errno.EBUSY, f"another pod has the lock of {self.path_of(number)}")
                self._set_size(number, counter, self._make_room(folder, 0, until))
                return time.monotonic() <= until
        except (FileNotFoundError, ForeignEntry):
            return True


def _parse_size(raw: bytes) -> int:
    """Returns the size in a counter. Raises ValueError if there is none."""
    size = int(raw)
    if size < 0:
        raise ValueError(f"{size} is no size")
    return size
