"""The engine's thread: runs steps, and between them the messages of its inbox in the order of their arrival.

    start -> running -> stop: abort all sequences (on_step gets them), refuse waiting messages, end the thread

All access to the engine goes through the inbox, which never blocks the sender. With overlap a step may be on the device
while a message runs. The step's results are dropped for the sequences that the message ends, and a sequence that it
adds joins the next step. A failed step ends its sequences, and an error of on_step is logged; neither ends the loop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from common.errors import BatonError, InternalError, Unavailable, describe
from common.process.thread_call import ThreadCall
from common.process.watchdog import Heartbeat
from common.types import FinishReason
from engine.device import make_current
from engine.engine import Engine
from engine.schedule.outputs import OnStep, SequenceOutput, StepResult
from engine.schedule.sequence import Sequence

log = logging.getLogger(__name__)
T = TypeVar("T")
IDLE_S = 1.0  # Longest sleep without a message
#: Longest sleep while all sequences wait for blocks that are leased or pinned elsewhere; a copy that ends, ends it.
NO_BLOCKS_SLEEP_S = 0.002
#: A message to the engine's thread: `run` is called there, or `refuse` if the loop has ended before.
Message = tuple[Callable[[], None], Callable[[BatonError], None]]


class EngineLoop:
    """Runs `engine` on a thread of its own, and calls on_step there after each step and each abort."""

    def __init__(self, engine: Engine, on_step: OnStep) -> None:
        self.heartbeat = Heartbeat()  # Beats once per step; idle without work
        self._engine, self._on_step = engine, on_step
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._wake = threading.Event()
        self._stopping = self._closed = False
        self._send_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        engine.pool.on_progress = self._wake.set

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread is running. Any thread may read it."""
        return self._thread.is_alive()

    @property
    def failure(self) -> str | None:
        """Why the engine cannot compute any more; None while it can. Any thread may read it."""
        return self._engine.failure

    def stop(self, timeout_s: float) -> None:
        """Aborts all sequences and ends the thread; InternalError if the thread does not end within timeout_s."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is None:
            self._close()
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise InternalError(f"the engine did not stop within {timeout_s:g} s")

    def add(self, seq: Sequence, on_refused: Callable[[BatonError], None]) -> None:
        """Adds a sequence and its lease to the engine. on_refused runs on the engine's or on the caller's thread."""

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
                on_refused(InternalError(describe(error)))

        self._send(run, refuse)

    def abort(self, request_id: str, child: int | None = None) -> None:
        """Ends the sequences of a request, or one child; on_step gets ABORT for each that had not ended before."""
        self._send(lambda: self._abort(request_id, child))

    def set_paused(self, request_ids: Iterable[str], paused: bool) -> None:
        """Pauses or resumes the sequences of requests; unknown ids are skipped."""
        ids = tuple(request_ids)

        def run() -> None:
            for request_id in ids:
                for seq in self._engine.scheduler.sequences_of(request_id):
                    seq.paused = paused

        self._send(run)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs `function` between two steps. The future gets its result or error, or Unavailable if the loop ended."""
        call = ThreadCall(function)
        self._send(call.run, call.refuse)
        return call.future

    def _send(self, run: Callable[[], None], refuse: Callable[[BatonError], None] = lambda _: None) -> None:
        with self._send_lock:
            if not self._closed:
                self._inbox.put((run, refuse))
                self._wake.set()
                return
        refuse(Unavailable("the engine has stopped"))

    def _run(self) -> None:
        try:
            make_current(self._engine.device)
            self.heartbeat.begin()
            while not self._stopping:
                self.heartbeat.beats += 1
                self._wake.clear()
                self._run_messages()
                if not self._engine.has_work:
                    self._engine.drop_unused_adapters()
                    self.heartbeat.idle = True
                    self._wake.wait(IDLE_S)
                    self.heartbeat.idle = False
                elif not self._step():
                    self._wake.wait(NO_BLOCKS_SLEEP_S)
        except Exception:
            log.exception("the engine's thread ends")
        finally:
            self._close()
            self.heartbeat.idle = True

    def _read_inbox(self, until: float) -> bool:
        """Runs messages until a time of `time.perf_counter()` or until `stop`. Returns whether there were any."""
        self._wake.clear()
        had_messages = self._run_messages()
        while not self._stopping and (remaining_s := until - time.perf_counter()) > 0:
            if self._wake.wait(remaining_s):
                self._wake.clear()
                had_messages |= self._run_messages()
        return had_messages

    def _run_messages(self) -> bool:
        """Runs all messages in the inbox. Returns whether there were any."""
        had_messages = False
        while not self._inbox.empty():  # this thread alone takes messages
            run, _ = self._inbox.get_nowait()
            had_messages = True
            try:
                run()
            except Exception:
                log.exception("a message to the engine failed")
        return had_messages

    def _step(self) -> bool:
        """Runs one step. Returns False if nothing could run."""
        try:
            return bool(self._engine.step(self._on_step, self._read_inbox).outputs)
        except Exception:
            log.exception("on_step failed after an engine step")
            return True

    def _abort(self, request_id: str, child: int | None = None) -> None:
        ended = self._engine.abort(request_id, child)
        outputs = [SequenceOutput(seq, seq.computed, finish_reason=FinishReason.ABORT) for seq in ended]
        if outputs:
            self._on_step(StepResult(outputs))

    def _close(self) -> None:
        """Aborts all sequences and refuses the waiting messages; later messages are refused at once."""
        with self._send_lock:
            self._closed = True
        for request_id in self._engine.scheduler.request_ids():
            try:
                self._abort(request_id)
            except Exception:
                log.exception("on_step failed for an aborted request")
        try:
            self._engine.finish_in_flight(self._on_step)
        except Exception:
            log.exception("the last step of the engine failed")
        while not self._inbox.empty():
            _, refuse = self._inbox.get_nowait()
            refuse(Unavailable("the engine has stopped"))
