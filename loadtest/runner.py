"""Sends the requests of one run on time.

    warm-up -> build the first requests -> send -> wait for requests in flight -> LoadRun with one record per request

Open loop: a request is sent at its arrival time, independently of earlier answers. If the generator is busy or
max_concurrency is reached, the request is sent late and its record holds the lag.
Closed loop: each user sends the next request after the previous answer and a think time.
"""

from __future__ import annotations

import asyncio
import gc
import random
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any

from loadtest.client.base import LoadClient, RequestDraft
from loadtest.config import SYNTHETIC, LoadConfig
from loadtest.run import LoadRun, RequestRecord
from loadtest.workload import arrivals
from loadtest.workload.sessions import ModelAnswer, Session, SyntheticWorkload, TraceWorkload, fit_trace
from loadtest.workload.trace import WorkloadTrace

SPIN_S = 0.0015  # Event loop timers have a resolution of one millisecond. The last part of a wait polls the clock.
BUILT_AHEAD = 128  # Requests that are built before their arrival time.
START_DELAY_S = 0.05  # Seconds from `_mark_start()` to the start of the run.
WARMUP_CONCURRENCY = 8  # Warm-up requests in flight.
AFTER_ERROR_S = 0.5  # Extra pause of a user after a failed request.


@dataclass(frozen=True, slots=True)
class _PreparedRequest:
    """A built request and its record. The caller of `_prepare` sets `record.intended_s`."""

    session: Session
    record: RequestRecord
    request: Any


class LoadRunner:
    """Runs one load test with one client. `run` is updated during the test, so progress can be read from it."""

    def __init__(self, config: LoadConfig, client: LoadClient, trace: WorkloadTrace | None = None) -> None:
        self._config = config
        self._client = client
        self._trace: WorkloadTrace | None = None
        self.run = LoadRun(config, "", planned=config.requests)
        if trace is not None:
            limits = {"max_input": config.max_input_tokens, "max_output": config.max_output_tokens}
            self._trace = fit_trace(trace, length_scale=config.length_scale, **limits)
            fitting = len(self._trace.requests)
            self.run.skipped_too_long = len(trace.requests) - fitting
            self.run.planned = min(fitting, config.requests or fitting)
        self._tag = secrets.token_hex(3)
        self._stopped = asyncio.Event()
        self._concurrency_limit: AbstractAsyncContextManager[Any] = (
            nullcontext() if config.max_concurrency is None else asyncio.Semaphore(config.max_concurrency)
        )
        self._taken = 0

    def stop(self) -> None:
        """Ends the run early: cancels the requests in flight, which count only as unfinished."""
        self._stopped.set()

    async def execute(self) -> LoadRun:
        """Runs the test to its end. Raises Unavailable if the server does not answer, and ConfigError."""
        self._mark_start()
        self.run.model = await self._client.model()
        with _gc_disabled():
            work, stopped = asyncio.create_task(self._send_all()), asyncio.create_task(self._stopped.wait())
            await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            self.run.stopped = not work.done()
            if self.run.stopped:
                work.cancel()
                await asyncio.wait((work,))
            else:
                work.result()  # raises its error
            self.run.ended = time.perf_counter()
            self.run.cpu_s = time.process_time() - self.run.cpu_s
        return self.run

    def _sessions(self) -> Iterator[Session]:
        if self._trace is not None:
            return TraceWorkload(self._trace, self._config.seed, self._config.length_scale).sessions()
        return self._synthetic_sessions("run")

    def _synthetic_sessions(self, kind: str) -> Iterator[Session]:
        config = self._config
        lengths = {name: getattr(config, name) for name in SYNTHETIC}
        return SyntheticWorkload(seed=config.seed, pause_s=config.think_s, **lengths).sessions(kind)

    def _arrival_times(self) -> Iterator[float]:
        config = self._config
        rng = random.Random(f"{config.seed} arrivals")
        if config.rate is None:
            assert self._trace is not None
            times: Iterator[float] = (r.arrival_s for r in self._trace.sped_up(config.speed).requests)
        elif config.arrivals == "poisson":
            times = arrivals.poisson(config.rate, rng)
        elif config.arrivals == "gamma":
            times = arrivals.gamma(config.rate, config.burstiness, rng)
        elif config.arrivals == "onoff":
            times = arrivals.onoff(config.rate, config.on_s, config.off_s, rng)
        else:
            times = arrivals.constant(config.rate)
        return arrivals.until(times, config.duration_s)

    def _take_one(self) -> bool:
        """Counts one request against the limit. Returns False if the limit is reached."""
        self._taken += 1
        return self._config.requests is None or self._taken <= self._config.requests

    async def _send_all(self) -> None:
        """Sends the uncounted requests of the warm-up, which have separate content, then those of the run."""
        number = self._config.warmup
        sessions = islice(self._synthetic_sessions("warm-up"), number)

        async def warm_up() -> None:
            for session in sessions:
                prepared = await self._prepare(session)
                prepared.record.abort_after = None
                await self._client.send(prepared.request, prepared.record)

        await asyncio.gather(*(warm_up() for _ in range(min(number, WARMUP_CONCURRENCY))))
        await (self._run_closed_loop() if self._config.closed_loop else self._run_open_loop())

    async def _run_open_loop(self) -> None:
        ready: asyncio.Queue[_PreparedRequest | None] = asyncio.Queue(BUILT_AHEAD)
        ready_to_start = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            builder = group.create_task(self._build_ahead(ready, ready_to_start))
            await ready_to_start.wait()
            self._mark_start()
            for arrival_s in self._arrival_times():
                prepared = await ready.get()
                if prepared is None or not self._take_one():
                    break
                prepared.record.intended_s = self.run.began + arrival_s
                await _wait_until(prepared.record.intended_s)
                group.create_task(self._send_session(prepared))
            builder.cancel()

    async def _build_ahead(self, ready: asyncio.Queue[_PreparedRequest | None], ready_to_start: asyncio.Event) -> None:
        for session in islice(self._sessions(), self._config.requests):
            await ready.put(await self._prepare(session))
            if ready.full():
                ready_to_start.set()
        ready_to_start.set()
        await ready.put(None)

    async def _run_closed_loop(self) -> None:
        self._mark_start()
        sessions, users = self._sessions(), self._config.users
        assert users is not None
        async with asyncio.TaskGroup() as group:
            for number in range(users):
                due = self.run.began + self._config.ramp_s * number / users
                group.create_task(self._run_user(number, due, sessions))

    async def _run_user(self, number: int, due: float, sessions: Iterator[Session]) -> None:
        think_s = self._config.think_s
        think_rng = random.Random(f"{self._config.seed} user {number}")
        while self._sends_at(due) and (session := next(sessions, None)) is not None and self._take_one():
            prepared = await self._prepare(session)
            await _wait_until(due)
            # Build time counts as think time.
            prepared.record.intended_s = time.perf_counter()
            await self._send_session(prepared)
            due = time.perf_counter() + (think_rng.expovariate(1 / think_s) if think_s else 0.0)
            due += AFTER_ERROR_S if prepared.record.error else 0.0

    async def _send_session(self, prepared: _PreparedRequest) -> None:
        """Sends the turns of a session in order, until a turn fails or the run has ended."""
        turns, answers = prepared.session.turns, dict[int, ModelAnswer]()
        for number in range(len(turns)):
            if number:
                due = time.perf_counter() + turns[number].pause_s
                if not self._sends_at(due) or not self._take_one():
                    return
                prepared = await self._prepare(prepared.session, number, dict(answers))
                prepared.record.intended_s = due
                await _wait_until(due)
            record = prepared.record
            await self._send(prepared.request, record)
            if record.answer is None:
                self.run.skipped += len(turns) - number - 1
                return
            if number + 1 < len(turns):
                answers[number] = record.answer
            # Frees the text: records are kept until the end of the run.
            record.answer = None

    def _sends_at(self, at: float) -> bool:
        """Returns whether the run still sends requests at this time."""
        return self._config.duration_s is None or at < self.run.began + self._config.duration_s

    async def _send(self, request: Any, record: RequestRecord) -> None:
        run = self.run
        async with self._concurrency_limit:
            record.counted = record.intended_s - run.began >= self._config.settle_s
            run.sent += 1
            run.running += 1
            try:
                await self._client.send(request, record)
            except asyncio.CancelledError:
                run.unfinished += 1
                raise
            finally:
                run.running -= 1
        run.done += 1
        run.failed += bool(record.error)
        run.records.append(record)

    def _mark_start(self) -> None:
        """Sets the start of the run to START_DELAY_S from now. Called before the warm-up too, where a run may end."""
        self.run.began = time.perf_counter() + START_DELAY_S
        self.run.began_at = time.time() + START_DELAY_S
        self.run.cpu_s = time.process_time()

    async def _prepare(
        self, session: Session, number: int = 0, answers: Mapping[int, ModelAnswer] = MappingProxyType({})
    ) -> _PreparedRequest:
        """Builds the request and the record of one turn. The caller sets `record.intended_s`."""
        turn, config = session.turns[number], self._config
        abort_rng = random.Random(f"{config.seed} leaving {session.number} {number}")
        aborts = abort_rng.random() < config.abort_share
        record = RequestRecord(
            request_id=f"load-{self._tag}-{session.number}-{number}",
            session=session.number,
            turn=number,
            planned_input=turn.prompt_tokens,
            planned_output=turn.output_tokens,
            intended_s=0.0,
            abort_after=abort_rng.randrange(turn.output_tokens) if aborts else None,
        )
        affinity, key = f"load-{self._tag}-{session.number}", config.key_of(session.number)
        draft = RequestDraft(turn, answers, record.request_id, affinity, key)
        return _PreparedRequest(session, record, await self._client.build(draft))


async def _wait_until(at: float) -> None:
    """Waits until `at` (time.perf_counter()). The error is some tens of microseconds if the loop is not busy."""
    if (left := at - time.perf_counter()) > SPIN_S:
        await asyncio.sleep(left - SPIN_S)
    while time.perf_counter() < at:  # noqa: ASYNC110 - no event fires at a point in time
        await asyncio.sleep(0)


@contextmanager
def _gc_disabled() -> Iterator[None]:
    """Turns off the garbage collector, which stops all streams for tens of ms. Requests make no reference cycles."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
