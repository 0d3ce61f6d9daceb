"""The one thread that owns the backend. Other threads submit work to it and never block on it.

An iteration handles notifications and then commands, so a commit finds the ranges that arrived before it. Next it posts
at most one new write of every transfer, polls the pending writes and runs the ticks. An error in an iteration does not
end the thread.

Between iterations the thread sleeps until a command wakes it or the next poll is due. NIXL without a progress thread
receives only while it polls:
- idle: every IDLE_S. No request waits for this poll, because the Commit that ends a transfer is a command.
- writes are pending, or poll_fast(): every FAST_POLL_S. Polling every millisecond on two pods cost a 128-token prefill
  on two cores 35 of 470 ms. With KV on a GPU the interpreter, which the engine's thread needs too, is the limit.
- poll_hot(): every HOT_POLL_S, while a commit is under way and a request waits for it.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol, TypeVar

from common.errors import TransferFailed, describe
from common.process.thread_call import ThreadCall
from common.process.watchdog import Heartbeat
from kv_transfer.backend.interface import Backend, Notification, WriteState
from kv_transfer.memory import MemoryKind, PoolMemory

_log = logging.getLogger(__name__)

FAST_POLL_S: dict[MemoryKind, float] = {"DRAM": 0.001, "VRAM": 0.0003}
HOT_POLL_S: dict[MemoryKind, float] = {"DRAM": 0.001, "VRAM": 0.00003}
HOT_POLL_LIMIT_S = 0.25  #: After this time without an answer the peer may be frozen, and hot polling ends.
IDLE_S = 0.02
TICK_S = 0.002
_FIRST_WAIT_S = 0.0001
_COMMANDS_PER_ITERATION = 256
_PR_SET_TIMERSLACK, _SLACK_NS = 29, 1000
T = TypeVar("T")
#: Called with None for a write that is done, else with the reason of its failure.
WriteCallback = Callable[[str | None], None]


class TransferWork(Protocol):
    """The work of the thread. Every method runs on it."""

    def on_notification(self, notification: Notification) -> None:
        """Handles one notification."""

    def post_writes(self) -> bool:
        """Posts at most a few writes. Returns whether it posted any."""

    def tick(self, now: float) -> None:
        """Runs about every TICK_S seconds."""

    def poll_fast(self) -> bool:
        """Returns whether messages are expected."""

    def poll_hot(self) -> bool:
        """Returns whether a transfer is about to end."""


class TransferThread:
    """Runs `backend` on a thread."""

    def __init__(self, backend: Backend, clock: Callable[[], float]) -> None:
        self.backend = backend
        self.heartbeat = Heartbeat()  #: Beats once per iteration.
        self._clock = clock
        self._commands: deque[Callable[[], object]] = deque()
        self._wake = threading.Event()
        self._pending: dict[int, WriteCallback] = {}  #: By handle of the backend.
        self._stopping = False
        self._next_tick = 0.0
        self._thread: threading.Thread | None = None

    def start(self, name: str, memory: PoolMemory, work: TransferWork) -> Future[None]:
        """Starts the thread, which starts the backend. If that fails, the future has the error and the thread ends."""
        started: Future[None] = Future()
        run = partial(self._run, name, memory, work, started)
        self._thread = threading.Thread(target=run, name="kv-transfer", daemon=True)
        self._thread.start()
        return started

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and not self._stopping

    def submit(self, command: Callable[[], object]) -> None:
        """Runs `command` on the thread, after the commands submitted before. Any thread; never blocks."""
        self._commands.append(command)
        self._wake.set()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs the function like `submit` and returns a future with its result."""
        call = ThreadCall(function)
        self.submit(call.run)
        return call.future

    async def run(self, function: Callable[[], T]) -> T:
        """Runs the function like `submit` and waits for its result. Event loop."""
        return await asyncio.wrap_future(self.call(function))

    def stop(self) -> None:
        """Ends the thread after the commands that were submitted before. join() waits for the end."""
        self.submit(lambda: setattr(self, "_stopping", True))

    def join(self, timeout_s: float) -> bool:
        """Returns whether the thread ended in time."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- on the thread ------------------------------------------------------------------------------------------------
    def write(
        self, agent: str, local: Sequence[int], remote: Sequence[int], notification: bytes, on_ended: WriteCallback
    ) -> None:
        """Posts a write. `on_ended` is called once it is terminal."""
        self._pending[self.backend.write(agent, local, remote, notification)] = on_ended

    @property
    def num_pending(self) -> int:
        """Writes that are not terminal."""
        return len(self._pending)

    def _run(self, name: str, memory: PoolMemory, work: TransferWork, started: Future[None]) -> None:
        try:
            self.backend.start(name, memory)
        except BaseException as e:
            started.set_exception(e)
            return
        started.set_result(None)
        reduce_timer_slack()
        wait, poll, hot = _FIRST_WAIT_S, FAST_POLL_S[memory.kind], HOT_POLL_S[memory.kind]
        self.heartbeat.begin()
        while not self._stopping:
            self.heartbeat.beats += 1
            if self._guard(partial(self._iterate, work)):
                wait = _FIRST_WAIT_S
                continue
            if self._pending:
                limit = poll
            else:
                wait = limit = poll if self._guard(work.poll_fast) else IDLE_S
            if self._guard(work.poll_hot):
                limit = min(limit, hot)
                wait = min(wait, limit)
            self._wake.wait(wait)
            self._wake.clear()
            wait = min(wait * 2, limit)
        self.heartbeat.idle = True
        while self._commands:
            self._guard(self._commands.popleft())
        self._guard(self.backend.close)

    def _iterate(self, work: TransferWork) -> bool:
        worked = False
        for notification in self._guard(self.backend.notifications) or ():
            self._guard(partial(work.on_notification, notification))
            worked = True
        for _ in range(min(len(self._commands), _COMMANDS_PER_ITERATION)):
            self._guard(self._commands.popleft())
            worked = True
        worked |= bool(self._guard(work.post_writes))
        worked |= self._poll()
        now = self._clock()
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._guard(partial(work.tick, now))
        return worked

    def _poll(self) -> bool:
        ended: dict[int, str | None] = {}  # Handle -> reason of the failure
        for handle in self._pending:
            try:
                state = self.backend.poll(handle)
                error = self.backend.error(handle) if state is WriteState.FAILED else None
            except Exception as e:
                _log.exception("the backend could not poll a write")
                state, error = WriteState.FAILED, describe(e)
            if state is not WriteState.PENDING:
                ended[handle] = error
        callbacks = [(handle, self._pending.pop(handle), error) for handle, error in ended.items()]
        for handle, on_ended, error in callbacks:
            self._guard(partial(self.backend.release, handle))
            self._guard(partial(on_ended, error))
        return bool(ended)

    def _guard(self, function: Callable[[], T]) -> T | None:
        """Runs `function` and logs its errors: one broken callback or message must not end other transfers."""
        try:
            return function()
        except TransferFailed as e:
            _log.warning("transfer thread: %s", e)
        except Exception:
            _log.exception("unexpected error on the transfer thread")
        return None


def reduce_timer_slack() -> None:
    """Makes sleeps of the calling thread precise to 1 us. No effect where prctl does not exist."""
    if (prctl := getattr(ctypes.CDLL(None), "prctl", None)) is not None:
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NS), 0, 0, 0)
