"""A process's way through life: starting -> ready -> draining -> stopped, and dying with its parent.

The first SIGTERM or SIGINT starts the drain, once; a second one ends the process at once with 128 + its number. States
only move forward. The owner calls ready() when it serves, awaits wait_stopped() and then frees what it owns.
"""

from __future__ import annotations

import asyncio
import ctypes
import enum
import logging
import os
import signal
import sys
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType

_log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class LifecycleState(enum.IntEnum):
    """Where the process is; the order is the only way through."""

    STARTING = 0
    READY = 1
    DRAINING = 2
    STOPPED = 3


class Lifecycle:
    """States of one service inside one event loop.

    drain: what to do before the end (leave the index, refuse new work, finish what runs); runs once, at most
    drain_s seconds. Its failure is logged and does not keep the process alive.
    """

    def __init__(self, drain: Callable[[], Awaitable[None]], *, drain_s: float) -> None:
        self._drain = drain
        self._drain_s = drain_s
        self._state = LifecycleState.STARTING
        self._stopped = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signalled = False

    @property
    def state(self) -> LifecycleState:
        return self._state

    @property
    def draining(self) -> bool:
        """New work is refused from now on."""
        return self._state >= LifecycleState.DRAINING

    def ready(self) -> None:
        """The service takes work; without effect once the drain began."""
        self._state = max(self._state, LifecycleState.READY)

    def install_signals(self) -> None:
        """Routes SIGTERM and SIGINT here; call on the event loop of the main thread."""
        self._loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sig, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # A plain signal handler, not loop.add_signal_handler: the second signal must work when the loop is stuck.
        if self._signalled or self._loop is None or self._loop.is_closed():
            os._exit(128 + number)
        self._signalled = True
        self._loop.call_soon_threadsafe(self.begin_drain, signal.Signals(number).name)

    def begin_drain(self, reason: str) -> None:
        """Starts the drain, for a signal or any other reason; later calls are without effect. On the event loop."""
        if self.draining:
            return
        self._state = LifecycleState.DRAINING
        _log.info("draining: %s", reason)
        self._task = asyncio.get_running_loop().create_task(self._run_drain())

    async def _run_drain(self) -> None:
        limit = asyncio.timeout(self._drain_s)
        try:
            async with limit:
                await self._drain()
        except Exception as error:  # of any kind: a process that was told to end ends
            if limit.expired() and isinstance(error, TimeoutError):
                _log.warning("drain took more than %.0f s; stopping anyway", self._drain_s)
            else:
                _log.exception("drain failed; stopping anyway")
        finally:
            self._state = LifecycleState.STOPPED
            self._stopped.set()

    async def wait_stopped(self) -> None:
        """Returns once the drain is over."""
        await self._stopped.wait()


def die_with_parent(parent: int | None = None) -> None:
    """Asks the kernel to kill this process (SIGKILL) when the thread that started it ends. Linux; elsewhere a no-op.

    parent: the pid that the starter handed down. A parent that died before this call cannot be seen by the kernel's
    signal any more, so this process then ends at once, with 1. Note that "parent" is the *thread* that forked.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def host_boot_id() -> str:
    """Identifies one boot of one host, so that two processes know that they can see each other's pids.

    Where the kernel offers none, the machine's hardware address stands in.
    """
    if _BOOT_ID.is_file():
        return _BOOT_ID.read_text().strip()
    return f"node-{uuid.getnode():012x}"
