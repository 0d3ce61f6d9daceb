"""States of a process, and its signals.

    starting --> ready --> draining --> stopped

States only move forward. The first SIGTERM or SIGINT starts the drain; a second one ends the process at once with exit
code 128 + the signal's number. The owner calls ready() when it serves, awaits wait_stopped(), and then frees resources.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import signal
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType

_log = logging.getLogger(__name__)
#: Key of log lines about the start of a process, for `baton up`: "now" for what goes on, "done" for a finished phase.
PHASE = "phase"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def log_phase(text: str, *, done: bool = False) -> None:
    """Logs a phase of the start: what this process does now, or (`done`) what it has done and how long that took."""
    _log.info(text, extra={PHASE: "done" if done else "now"})


class LifecycleState(enum.IntEnum):
    """State of the process; it only increases."""

    STARTING = 0
    READY = 1
    DRAINING = 2
    STOPPED = 3


class Lifecycle:
    """State of one service in one event loop.

    `drain` runs once before the end, for at most `drain_s` seconds. If it fails, the error is logged and the service
    stops all the same.
    """

    def __init__(self, drain: Callable[[], Awaitable[None]], *, drain_s: float) -> None:
        self._drain, self._drain_s = drain, drain_s
        self.state = LifecycleState.STARTING
        self._stopped, self._signalled = asyncio.Event(), False
        self._task: asyncio.Task[None] | None = None
        self._limit: asyncio.Timeout | None = None  # Of the drain under way
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def draining(self) -> bool:
        """The service refuses new requests."""
        return self.state >= LifecycleState.DRAINING

    def ready(self) -> None:
        """Marks the service as accepting requests. Has no effect after the drain began."""
        self.state = max(self.state, LifecycleState.READY)

    def install_signals(self) -> None:
        """Makes SIGTERM and SIGINT start the drain. Call it on the event loop of the main thread."""
        self._loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sig, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # Not loop.add_signal_handler: the second signal must work even if the event loop is stuck.
        if self._signalled or self._loop is None or self._loop.is_closed():
            os._exit(128 + number)
        self._signalled = True
        self._loop.call_soon_threadsafe(self.begin_drain, signal.Signals(number).name)

    def begin_drain(self, reason: str, limit_s: float | None = None) -> None:
        """Starts the drain, of at most limit_s seconds. Later calls have no effect. On the event loop."""
        if self.draining:
            return
        self._drain_s = self._drain_s if limit_s is None else min(limit_s, self._drain_s)
        self.state = LifecycleState.DRAINING
        _log.info("draining: %s", reason)
        self._task = asyncio.get_running_loop().create_task(self._run_drain())

    def limit_drain(self, limit_s: float) -> None:
        """Ends the drain under way within limit_s seconds. No effect if it ends sooner anyway. On the event loop."""
        self._drain_s = min(limit_s, self._drain_s)
        end = asyncio.get_running_loop().time() + limit_s
        if self._limit is not None and not self._limit.expired() and end < (self._limit.when() or 0.0):
            self._limit.reschedule(end)

    async def _run_drain(self) -> None:
        limit = asyncio.timeout(self._drain_s)
        try:
            async with limit:
                self._limit = limit
                await self._drain()
        except Exception as error:  # whatever it is, the process must end
            if limit.expired() and isinstance(error, TimeoutError):
                _log.warning("drain took more than %.0f s; stopping anyway", self._drain_s)
            else:
                _log.exception("drain failed; stopping anyway")
        finally:
            self._limit = None
            self.state = LifecycleState.STOPPED
            self._stopped.set()

    async def wait_stopped(self) -> None:
        """Returns after the drain."""
        await self._stopped.wait()


def host_boot_id() -> str:
    """Returns this host's boot id, or its hardware address. Processes with the same id can check each other's pids."""
    if _BOOT_ID.is_file():
        return _BOOT_ID.read_text().strip()
    return f"node-{uuid.getnode():012x}"
