"""The engine's thread. Everything that touches the engine runs on it, between steps, in the order it was asked for.
With overlap a step may be on the device meanwhile; what it does for a sequence that ends now is dropped, and what is
added is in the next one.

`start` -> running -> `stop`: what is still running is aborted (its hook is told), what still waits in the inbox is
refused, then the thread ends. The inbox is the only way in; it never blocks the caller. A failing step ends its
sequences, a failing hook is logged; neither ends the loop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeVar

from common.errors import BatonError, InternalError, Unavailable
from common.types import FinishReason
from engine.device import make_current
from engine.engine import Engine
from engine.schedule.outputs import OnStep, SequenceOutput, StepResult
from engine.schedule.sequence import Sequence

log = logging.getLogger(__name__)

T = TypeVar("T")
IDLE_S = 1.0  # longest sleep without a message
NO_BLOCKS_SLEEP_S = 0.002  # sleep while all work waits for blocks that are held outside


@dataclass(frozen=True, slots=True)
class _Message:
    """run is called on the engine's thread; refuse instead, when the loop ended before its turn came."""

    run: Callable[[], None]
    refuse: Callable[[BatonError], None]


def _ignore_refusal(error: BatonError) -> None:
    """Nobody waits for this message."""


class EngineLoop:
    """Runs `engine` on a thread of its own; on_step is called there after every step, and once per abort."""

    def __init__(self, engine: Engine, on_step: OnStep) -> None:
        self._engine = engine
        self._on_step = on_step
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._wake = threading.Event()
        self._stopping = False
        self._closed = False
        self._send_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        """The thread runs; any thread."""
        return self._thread.is_alive()

    @property
    def failure(self) -> str | None:
        """Why the engine computes nothing more, if so; any thread."""
        return self._engine.failure

    def stop(self, timeout_s: float) -> None:
        """Aborts what runs and ends the thread; InternalError when a step does not end in time."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is None:
            self._close()
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise InternalError(f"the engine did not stop within {timeout_s:g} s")

    def add(self, seq: Sequence, on_refused: Callable[[BatonError], None]) -> None:
        """Hands a sequence, and its lease, to the engine. on_refused may run on the engine's thread or on this one."""

        def refuse(error: BatonError) -> None:
            if seq.lease is not None:
                seq.lease.finish("refused")
            on_refused(error)

        def run() -> None:
            try:
                self._engine.add(seq)
            except BatonError as error:
                on_refused(error)
            except Exception as error:
                log.exception("a sequence could not be added")
                on_refused(InternalError(f"{type(error).__name__}: {error}"))

        self._send(_Message(run, refuse))

    def abort(self, request_id: str, child: int | None = None) -> None:
        """Ends a request's sequences, or one child; the hook sees finish=ABORT of those that had not ended before."""
        self._send(_Message(lambda: self._abort(request_id, child), _ignore_refusal))

    def set_paused(self, request_ids: Iterable[str], paused: bool) -> None:
        """Keeps requests' sequences out of steps, or lets them in again; unknown ids are skipped."""
        ids = tuple(request_ids)

        def run() -> None:
            for request_id in ids:
                for seq in self._engine.scheduler.sequences_of(request_id):
                    seq.paused = paused

        self._send(_Message(run, _ignore_refusal))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs function between steps; the future has its result, its exception, or Unavailable after the end."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        def refuse(error: BatonError) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

        self._send(_Message(run, refuse))
        return future

    def _send(self, message: _Message) -> None:
        with self._send_lock:
            if not self._closed:
                self._inbox.put(message)
                self._wake.set()
                return
        message.refuse(Unavailable("the engine has stopped"))

    def _run(self) -> None:
        try:
            make_current(self._engine.device)
            while not self._stopping:
                self._wake.clear()
                self._run_messages()
                if not self._engine.has_work:
                    self._wake.wait(IDLE_S)
                elif not self._step():
                    self._wake.wait(NO_BLOCKS_SLEEP_S)
        except Exception:
            log.exception("the engine's thread ends")
        finally:
            self._close()

    def _read_inbox(self, until: float) -> bool:
        """Takes messages in until then (time.perf_counter()), or until the end; whether there were any."""
        self._wake.clear()
        any_came = self._run_messages()
        while not self._stopping and (left := until - time.perf_counter()) > 0:
            if self._wake.wait(left):
                self._wake.clear()
                any_came |= self._run_messages()
        return any_came

    def _run_messages(self) -> bool:
        """Whether there was anything."""
        any_came = False
        while True:
            try:
                message = self._inbox.get_nowait()
            except Empty:
                return any_came
            any_came = True
            try:
                message.run()
            except Exception:
                log.exception("a message to the engine failed")

    def _step(self) -> bool:
        """One step; False when nothing could run."""
        try:
            return bool(self._engine.step(self._on_step, self._read_inbox).outputs)
        except Exception:
            log.exception("the hook of an engine step failed")
            return True

    def _abort(self, request_id: str, child: int | None = None) -> None:
        ended = self._engine.abort(request_id, child)
        if ended:
            self._on_step(
                StepResult([SequenceOutput(seq, seq.computed, finish_reason=FinishReason.ABORT) for seq in ended])
            )

    def _close(self) -> None:
        """Ends what is left; afterwards every post is refused at once."""
        with self._send_lock:
            self._closed = True
        for request_id in self._engine.scheduler.request_ids():
            try:
                self._abort(request_id)
            except Exception:
                log.exception("the engine's hook failed")
        try:
            self._engine.finish_in_flight(self._on_step)
        except Exception:
            log.exception("the last step of the engine failed")
        while not self._inbox.empty():
            self._inbox.get_nowait().refuse(Unavailable("the engine has stopped"))
