"""Host memory through which KV is staged.

    file:  | token, one page | slot 0 | slot 1 | ... |        a slot holds one block

The area is a file in a directory that pods of one machine may share, like /dev/shm. A pod that can open the area of
another pod writes to it without a transport. The token proves that both have the same file. The owner locks the file;
the file of an owner that was killed is unlocked, and the next pod that starts removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from common.errors import TransferFailed, describe
from kv_transfer.memory import PoolMemory

_log = logging.getLogger(__name__)

PREFIX = "baton-kv-"
HEAD_BYTES = mmap.PAGESIZE
TOKEN_BYTES = 16


@dataclass(eq=False)
class StagingArea:
    """`slots` slots of slot_bytes bytes. Owned by the transfer thread."""

    slots: int
    slot_bytes: int
    file: str  #: Name in the directory; "" for memory that is not shared.
    token: bytes
    owner: bool

    _map: mmap.mmap | None
    _lock_fd: int | None = None
    _path: Path | None = None

    def __post_init__(self) -> None:
        assert self._map is not None
        self._anchor: ctypes.c_char | None = ctypes.c_char.from_buffer(self._map)
        self.base = ctypes.addressof(self._anchor) + HEAD_BYTES  #: Address of slot 0.

    @classmethod
    def create(cls, directory: str | None, slots: int, slot_bytes: int) -> Self:
        """Reserves the memory, in a file of `directory` if it has room for it. Raises TransferFailed."""
        size, token = HEAD_BYTES + slots * slot_bytes, secrets.token_bytes(TOKEN_BYTES)
        if directory is not None:
            remove_stale(directory)
            try:
                return cls._create_file(Path(directory), slots, slot_bytes, token)
            except OSError as e:
                wanted, text = f"{size >> 20} MiB in {directory}", "no shared memory for KV (%s): %s"
                _log.warning(f"{text}; pods of this machine use the network", wanted, describe(e))
        try:
            return cls(slots, slot_bytes, "", token, True, mmap.mmap(-1, size))
        except OSError as e:
            raise TransferFailed(f"no {size >> 20} MiB of host memory for staging: {describe(e)}") from e

    @classmethod
    def _create_file(cls, directory: Path, slots: int, slot_bytes: int, token: bytes) -> Self:
        path, size = directory / f"{PREFIX}{secrets.token_hex(8)}", HEAD_BYTES + slots * slot_bytes
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # another pod's remove_stale holds it for a moment at most
            os.posix_fallocate(fd, 0, size)  # a page that cannot be had later would end the process by SIGBUS
            area = mmap.mmap(fd, size)
            area[:TOKEN_BYTES] = token
            return cls(slots, slot_bytes, path.name, token, True, area, fd, path)
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise

    @classmethod
    def attach(cls, directory: str | None, file: str, token: bytes, slots: int, slot_bytes: int) -> Self | None:
        """Maps the area of another pod; None if this pod cannot reach it."""
        if directory is None or not file.startswith(PREFIX) or "/" in file:
            return None
        size = HEAD_BYTES + slots * slot_bytes
        try:
            fd = os.open(Path(directory) / file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != size:
                return None
            area = mmap.mmap(fd, size)
        except OSError:
            return None
        finally:
            os.close(fd)
        if area[:TOKEN_BYTES] != token:
            area.close()
            return None
        return cls(slots, slot_bytes, file, token, False, area)

    def buffer(self) -> memoryview:
        """Returns the slots as writable bytes. Release it before close()."""
        assert self._map is not None
        return memoryview(self._map)[HEAD_BYTES:]

    def address(self, slot: int) -> int:
        return self.base + slot * self.slot_bytes

    def memory(self) -> PoolMemory:
        """Returns the slots as the pool of a transfer agent."""

        def read(slot: int) -> bytes:
            return ctypes.string_at(self.address(slot), self.slot_bytes)

        def write(slot: int, content: bytes) -> None:
            if len(content) != self.slot_bytes:
                raise ValueError(f"a slot has {self.slot_bytes} bytes, got {len(content)}")
            ctypes.memmove(self.address(slot), content, self.slot_bytes)

        return PoolMemory(self.base, self.slot_bytes, self.slots, 0, "DRAM", 0, read, write)

    def close(self) -> None:
        """Frees the memory, and removes the file of the owner. Idempotent."""
        area, self._map, self._anchor = self._map, None, None
        if self.owner and self._path is not None:
            self._path.unlink(missing_ok=True)
        if area is not None:
            with contextlib.suppress(BufferError):  # a copier still has a view: freed with it
                area.close()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def remove_stale(directory: str) -> None:
    """Removes areas whose owner has ended without removing them."""
    for path in Path(directory).glob(f"{PREFIX}*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # removed meanwhile, or of another user
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A file without content is about to be locked by its owner.
            if os.fstat(fd).st_size:
                path.unlink(missing_ok=True)
                _log.info("removed %s, which a killed pod had left", path)
        except OSError:
            pass  # in use
        finally:
            os.close(fd)
