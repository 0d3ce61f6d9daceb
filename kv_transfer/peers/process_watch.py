"""Proof that the process of a peer on this machine has ended."""

from __future__ import annotations

import os
import select
from pathlib import Path

from common.process.lifecycle import host_boot_id

_LISTEN = "0A"  #: State of a socket in /proc/net/tcp.


class ProcessWatch:
    """Proof that a peer's process ended: owns a pidfd. A closed watch proves nothing.

    A pid alone proves nothing, because a peer in another container reports a pid of its own namespace. A watch
    therefore exists only if the process with that pid holds the listening socket of the peer's address. The pidfd is
    opened before that check.
    """

    def __init__(self, pidfd: int) -> None:
        self._pidfd: int | None = pidfd
        self._poll = select.poll()
        self._poll.register(pidfd, select.POLLIN)

    def ended(self) -> bool:
        """Returns whether the process has ended. Stays true until close()."""
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
    """Returns a watch on the process that listens at `address`; None if it is this process or not visible from here."""
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
        pass  # the process ended, or /proc is not readable: no proof is possible
    os.close(pidfd)
    return None


def _listens(pid: int, port: int) -> bool:
    inodes = [*_listeners(Path("/proc/net/tcp"), port), *_listeners(Path("/proc/net/tcp6"), port)]
    sockets = {f"socket:[{inode}]" for inode in inodes}
    return any(_link(fd) in sockets for fd in Path(f"/proc/{pid}/fd").iterdir())


def _link(fd: Path) -> str:
    try:
        return os.readlink(fd)
    except FileNotFoundError:  # closed since the directory was read
        return ""


def _listeners(table: Path, port: int) -> list[str]:
    rows = [line.split() for line in table.read_text().splitlines()[1:]] if table.exists() else []
    return [row[9] for row in rows if row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port]
