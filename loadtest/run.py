"""The state of one load run: its configuration, its counters, a record of each request, and its progress line."""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TextIO

from loadtest.config import LoadConfig
from loadtest.workload.sessions import ModelAnswer


@dataclass(slots=True)
class LoadRun:
    """One run, updated while it goes on."""

    config: LoadConfig
    model: str
    began: float = 0.0  # time.perf_counter() at the start of the run.
    began_at: float = 0.0  # Start of the run in seconds since the epoch.
    ended: float = 0.0  # time.perf_counter() at the end.
    cpu_s: float = 0.0  # CPU seconds of this process from start to end.
    records: list[RequestRecord] = field(default_factory=list)
    unfinished: int = 0  # Requests in flight when the run was stopped.
    stopped: bool = False  # The run was ended early.
    skipped: int = 0  # Turns that were not sent because an earlier turn of their conversation failed.
    skipped_too_long: int = 0  # Requests of the trace that are longer than the limits.
    planned: int | None = None  # Number of requests, if it is known before the run.
    sent: int = 0
    running: int = 0
    done: int = 0
    failed: int = 0


@dataclass(slots=True)
class RequestRecord:
    """One request. All times are time.perf_counter() seconds."""

    request_id: str
    session: int
    turn: int
    planned_input: int
    planned_output: int
    intended_s: float  # The time at which the request should be sent.
    counted: bool = True  # False for warm-up and settling requests.
    abort_after: int | None = None  # Number of events after which the client aborts; None if it never aborts.
    sent_s: float = 0.0
    ended_s: float = 0.0  # The time of the last byte or of the failure.
    event_times: array[float] = field(default_factory=lambda: array("d"))  # The time of each event with text or tokens.
    tokens: int = 0  # Output tokens, from the server's usage if it sends one. An event may bring several tokens.
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish: str = ""
    error: str = ""  # The kind of failure, "" for none.
    message: str = ""
    aborted: bool = False  # The client aborted on purpose.
    answer: ModelAnswer | None = None

    @property
    def ok(self) -> bool:
        """Whether the answer is complete."""
        return not self.error and not self.aborted

    @property
    def lag_s(self) -> float:
        """From the intended to the real sending."""
        return self.sent_s - self.intended_s

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending to the first text; None without text."""
        return self.event_times[0] - self.sent_s if self.event_times else None

    @property
    def ttft_intended_s(self) -> float | None:
        """Seconds from the intended time to the first text; None without text."""
        return self.event_times[0] - self.intended_s if self.event_times else None

    @property
    def e2e_s(self) -> float:
        """Seconds from sending to the end."""
        return self.ended_s - self.sent_s

    @property
    def e2e_intended_s(self) -> float:
        """Seconds from the intended time to the end."""
        return self.ended_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first; None for fewer than two tokens."""
        several = self.tokens >= 2 and len(self.event_times) >= 2
        return (self.event_times[-1] - self.event_times[0]) / (self.tokens - 1) if several else None

    @property
    def longest_gap_s(self) -> float | None:
        """The longest time between two events; None for fewer than two events."""
        return max(self.gaps(), default=None)

    def gaps(self) -> list[float]:
        """Seconds between events."""
        return [later - earlier for earlier, later in pairwise(self.event_times)]

    def fail(self, kind: str, message: str, at: float) -> None:
        """Marks the request as failed. The first failure counts."""
        if not self.error:
            self.error, self.message, self.ended_s = kind, message[:300], at


def progress_line(run: LoadRun, now: float) -> str:
    """Returns the line: share of the run and counters."""
    duration_s, elapsed = run.config.duration_s or math.inf, max(0.0, now - run.began)
    share = min(1.0, max(elapsed / duration_s, run.done / run.planned if run.planned else 0.0))
    filled, ending = round(share * 28), elapsed > duration_s
    return (
        f"{'█' * filled}{'░' * (28 - filled)} {share:4.0%}  {elapsed:.0f} s{' (ending)' if ending else ''}  "
        f"{run.sent} sent  {run.running} running  {run.done} done  {run.failed} failed"
    )


async def show_progress(run: LoadRun, out: TextIO) -> None:
    """Writes the progress line until the task is cancelled: redrawn on a terminal, printed every 10 s elsewhere.

    Drawing costs some tens of microseconds. Progress bars of libraries draw for milliseconds or from a thread, and
    every stream would wait for them.
    """
    terminal = out.isatty()
    try:
        while True:
            await asyncio.sleep(0.25 if terminal else 10.0)
            if run.began and time.perf_counter() >= run.began:
                text = progress_line(run, time.perf_counter())
                out.write(f"\r\x1b[2K{text}" if terminal else f"{text}\n")
                out.flush()
    finally:
        if terminal:
            out.write("\r\x1b[2K")
            out.flush()
