"""Threads that compute the masks of a step, so that a slow one delays neither the engine's thread nor other masks.

    engine's thread   run_jobs: waits until all jobs are done, but at most wait_s
    helper threads    take one job after the other; if a job runs for SLICE_S, another helper takes the next job

A late job goes on at a low priority. Its owner checks `done` before it uses the matcher again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import ClassVar

log = logging.getLogger(__name__)
STEP_WAIT_S = 0.03  # Longest wait of a step for the masks of its sequences
SLICE_S = 0.004  # The jobs behind a job wait for it at most this long
MAX_IDLE = 4  # Helpers that wait for work
MAX_EXTRA = 32  # Helpers that start when a step stops waiting, so that quick jobs are done for the next step
LATE_NICE = 10


class MaskJob:
    """Work of one sequence for its matcher. `cancel` makes a call of the matcher fail soon; any thread may call it."""

    def __init__(self, work: Callable[[MaskJob], None], cancel: Callable[[], None]) -> None:
        self._work, self.cancel = work, cancel
        self.done = self.cancelled = False
        self._thread_id = 0
        self._began = self._began_wall = 0.0

    def run(self) -> None:
        """Does the work, on this thread."""
        self._thread_id = threading.get_native_id()
        self.begin_token()
        try:
            self._work(self)
        except Exception:  # its owner finds no results and reports that
            log.exception("following a grammar failed")
        finally:
            self.done = True

    def begin_token(self) -> None:
        """Begins to measure a token. Only the work calls it."""
        self._began_wall, self._began = time.monotonic(), time.thread_time()

    def token_s(self) -> float:
        """Returns the processor seconds of this token. Only the work calls it."""
        return time.thread_time() - self._began

    def cancel_after(self, limit_s: float) -> None:
        """Cancels the job if its token has taken more processor time. Any thread."""
        began, taken = self._began, time.monotonic() - self._began_wall
        if self.done or not self._thread_id or taken < limit_s:
            return
        with suppress(OSError, ValueError, IndexError):  # without this file (Linux) the wall clock is used
            used_ns = Path(f"/proc/self/task/{self._thread_id}/schedstat").read_text().split()[0]
            taken = int(used_ns) / 1e9 - began
        if taken > limit_s and began == self._began:
            self.cancelled = True
            self.cancel()

    def make_late(self) -> None:
        """Lowers the priority of the thread that works on it."""
        if self._thread_id and not self.done:
            with suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, self._thread_id, LATE_NICE)


class _Batch:
    """The jobs of one call of run_jobs; several helpers may work on them."""

    def __init__(self, jobs: Sequence[MaskJob]) -> None:
        self.jobs = jobs
        self.todo = deque(jobs)
        self.finished = threading.Event()
        self.is_late = False

    def work(self) -> None:
        with suppress(IndexError):
            while True:
                self.todo.popleft().run()
        if all(job.done for job in self.jobs):
            self.finished.set()


class _Helper(threading.Thread):
    _idle: ClassVar[list[_Helper]] = []

    def __init__(self) -> None:
        super().__init__(name="mask-helper", daemon=True)
        self._batches: SimpleQueue[_Batch] = SimpleQueue()

    @classmethod
    def start_on(cls, batch: _Batch) -> None:
        try:
            helper = cls._idle.pop()
        except IndexError:
            helper = cls()
            helper.start()
        helper._batches.put(batch)

    def run(self) -> None:
        while True:
            batch = self._batches.get()
            batch.work()
            if batch.is_late or len(self._idle) >= MAX_IDLE:
                return  # a priority that was lowered cannot be raised again
            self._idle.append(self)


def run_jobs(jobs: Sequence[MaskJob], wait_s: float, limit_s: float) -> None:
    """Returns when all jobs are done, or after wait_s. Jobs that are not done go on.

    A job is cancelled when a token has taken limit_s of processor time: here, or by a later `cancel_after`.
    """
    batch = _Batch(jobs)
    end = time.monotonic() + wait_s
    _Helper.start_on(batch)
    while not batch.finished.wait(min(SLICE_S, max(0.0, end - time.monotonic()))):
        if time.monotonic() >= end:
            batch.is_late = True
            for job in jobs:
                job.make_late()
            for _ in range(min(len(batch.todo), MAX_EXTRA)):
                _Helper.start_on(batch)
            return
        for job in jobs:
            job.cancel_after(limit_s)
        if batch.todo:
            _Helper.start_on(batch)
