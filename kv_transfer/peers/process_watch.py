"""Proof that a peer's process ended, where the kernel can give it: a pidfd of a process on this host.

A pid alone proves nothing, because a peer in another container names a pid of its own namespace. So the watch exists
only when the process behind the pid holds the listening socket of the peer's address, and the pidfd was opened before
that was looked up.
"""

from __future__ import annotations

import os
import select
from pathlib import Path

from common.process.lifecycle import host_boot_id

_LISTEN = "0A"


class ProcessWatch:
    """Owns a pidfd; close() gives it back. Idempotent; a closed watch proves nothing."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd: int | None = pidfd
        self._poll = select.poll()
        self._poll.register(pidfd, select.POLLIN)

    def ended(self) -> bool:
        """The process is gone; stays true until close()."""
        return bool(self._poll.poll(0))

    @property
    def closed(self) -> bool:
        return self._pidfd is None

    def close(self) -> None:
        if self._pidfd is not None:
            self._poll.unregister(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None


def watch_process(pid: int, boot_id: str, address: str) -> ProcessWatch | None:
    """A watch on the process that listens at `address` (host:port); None when it cannot be seen from here or is this
    one.
    """
    if not pid or pid == os.getpid() or boot_id != host_boot_id():
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        if _listens(pid, int(address.rpartition(":")[2])):
            return ProcessWatch(pidfd)
    except (OSError, ValueError):
        pass  # gone already, or not ours to look at: then there is no proof to be had
    os.close(pidfd)
    return None


def _listens(pid: int, port: int) -> bool:
    sockets = {
        f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _listeners(Path("/proc/net") / table, port)
    }
    return any(_link(fd) in sockets for fd in Path(f"/proc/{pid}/fd").iterdir())


def _link(fd: Path) -> str:
    try:
        return os.readlink(fd)
    except FileNotFoundError:  # closed since the directory was read
        return ""


def _listeners(table: Path, port: int) -> list[str]:
    rows = [line.split() for line in table.read_text().splitlines()[1:]] if table.exists() else []
    return [row[9] for row in rows if row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port]
