"""One run: who sends what when.

Lifecycle: warm-up -> build what comes first -> the run -> wait for what is under way -> a Run, with a record of every
request. stop() ends it early: nothing more is sent, what is under way is abandoned and not counted.

Open loop: requests leave at their times, whatever became of those before, and if one leaves late (the generator was
busy, or max_concurrency was reached) its record says by how much. Closed loop: every user sends when the answer before
has come and the user has thought.
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
from loadtest.config import LoadConfig
from loadtest.run import LoadRun, RequestRecord
from loadtest.workload import arrivals
from loadtest.workload.prompts import ModelAnswer, Session
from loadtest.workload.sessions import SyntheticWorkload, TraceWorkload, fit_trace
from loadtest.workload.trace import WorkloadTrace

SPIN_S = 0.0015  # timers of event loops count whole milliseconds; the rest is waited out turn by turn
AHEAD = 128  # requests that are built before their time
LEAD_S = 0.05  # from the decision to begin until the beginning
WARM_AT_ONCE = 8
AFTER_ERROR_S = 0.5  # a user who was refused does not try again at once


@dataclass(frozen=True, slots=True)
class _PreparedRequest:
    """A request that only waits for its time."""

    session: Session
    record: RequestRecord
    request: Any


class LoadRunner:
    """One load test by one client. `run` grows while it goes on, for who wants to watch."""

    def __init__(self, config: LoadConfig, client: LoadClient, trace: WorkloadTrace | None = None) -> None:
        self._config = config
        self._client = client
        self._trace = trace
        self.run = LoadRun(config, "")
        if trace is not None:
            self._trace = fit_trace(
                trace,
                length_scale=config.length_scale,
                most_input=config.max_input_tokens,
                most_output=config.max_output_tokens,
            )
            self.run.skipped_too_long = len(trace.requests) - len(self._trace.requests)
        sizes = [config.requests] if self._trace is None else [config.requests, len(self._trace.requests)]
        self.run.planned = min((size for size in sizes if size is not None), default=None)
        self._tag = secrets.token_hex(3)
        self._stopped = asyncio.Event()
        self._room: AbstractAsyncContextManager[Any] = (
            nullcontext() if config.max_concurrency is None else asyncio.Semaphore(config.max_concurrency)
        )
        self._taken = 0

    def stop(self) -> None:
        """Ends the run early."""
        self._stopped.set()

    async def execute(self) -> LoadRun:
        """Raises Unavailable when there is no server, ConfigError."""
        self._begin()
        self.run.model = await self._client.model()
        with _no_collections():
            work = asyncio.create_task(self._work())
            stopped = asyncio.create_task(self._stopped.wait())
            await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            if not work.done():
                self.run.stopped = True
                work.cancel()
                await asyncio.wait((work,))
            elif (error := work.exception()) is not None:
                raise error
            self.run.ended = time.perf_counter()
            self.run.cpu_s = time.process_time() - self.run.cpu_s
        return self.run

    # -- what is sent

    def _sessions(self) -> Iterator[Session]:
        if self._trace is not None:
            return TraceWorkload(self._trace, self._config.seed, self._config.length_scale).sessions()
        return self._made().sessions()

    def _made(self) -> SyntheticWorkload:
        config = self._config
        return SyntheticWorkload(
            seed=config.seed,
            input_tokens=config.input_tokens,
            output_tokens=config.output_tokens,
            prefix_tokens=config.prefix_tokens,
            prefixes=config.prefixes,
            turns=config.turns,
            pause_s=config.think_s,
        )

    def _times(self) -> Iterator[float]:
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

    def _take(self) -> bool:
        """Whether one more request may be sent."""
        if self._config.requests is not None and self._taken >= self._config.requests:
            return False
        self._taken += 1
        return True

    async def _warm(self) -> None:
        """Requests that are not counted, of their own content: they open connections and heat what has to be hot."""
        number = self._config.warmup
        if not number:
            return
        sessions = islice(self._made().sessions("warm-up"), number)

        async def work() -> None:
            for session in sessions:
                item = await self._ready(session)
                item.record.abort_after = None
                await self._client.send(item.request, item.record)

        await asyncio.gather(*(work() for _ in range(min(number, WARM_AT_ONCE))))

    # -- loops

    async def _work(self) -> None:
        await self._warm()
        await (self._closed() if self._config.closed_loop else self._open())

    async def _open(self) -> None:
        ready: asyncio.Queue[_PreparedRequest | None] = asyncio.Queue(AHEAD)
        begin = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            builder = group.create_task(self._build_ahead(ready, begin))
            await begin.wait()
            self._begin()
            for at in self._times():
                item = await ready.get()
                if item is None or not self._take():
                    break
                item.record.intended_s = self.run.began + at
                await _wait_until(item.record.intended_s)
                group.create_task(self._session(item))
            builder.cancel()

    async def _build_ahead(self, ready: asyncio.Queue[_PreparedRequest | None], begin: asyncio.Event) -> None:
        for session in islice(self._sessions(), self._config.requests):
            await ready.put(await self._ready(session))
            if ready.full():
                begin.set()
        begin.set()
        await ready.put(None)

    async def _closed(self) -> None:
        sessions = self._sessions()
        self._begin()
        users = self._config.users
        assert users is not None
        async with asyncio.TaskGroup() as group:
            for number in range(users):
                due = self.run.began + self._config.ramp_s * number / users
                group.create_task(self._user(number, due, sessions))

    async def _user(self, number: int, due: float, sessions: Iterator[Session]) -> None:
        think_s = self._config.think_s
        thinking = random.Random(f"{self._config.seed} user {number}")
        while self._lasts(due) and (session := next(sessions, None)) is not None and self._take():
            item = await self._ready(session)
            await _wait_until(due)
            item.record.intended_s = time.perf_counter()  # building was the user's own time
            await self._session(item)
            due = time.perf_counter() + (thinking.expovariate(1 / think_s) if think_s else 0.0)
            if item.record.error:
                due += AFTER_ERROR_S

    async def _session(self, item: _PreparedRequest) -> None:
        """Turn by turn, until one fails or the run is over."""
        turns, answers = item.session.turns, dict[int, ModelAnswer]()
        for number in range(len(turns)):
            if number:
                due = time.perf_counter() + turns[number].pause_s
                if not self._lasts(due) or not self._take():
                    return
                item = await self._ready(item.session, number, dict(answers))
                item.record.intended_s = due
                await _wait_until(due)
            record = item.record
            await self._send(item.request, record)
            if record.answer is None:
                self.run.skipped += len(turns) - number - 1
                return
            if number + 1 < len(turns):
                answers[number] = record.answer
            record.answer = None  # nobody else reads it, and it would be kept to the end

    def _lasts(self, at: float) -> bool:
        """Whether requests may still be sent at that time."""
        return self._config.duration_s is None or at < self.run.began + self._config.duration_s

    async def _send(self, request: Any, record: RequestRecord) -> None:
        run = self.run
        async with self._room:
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

    def _begin(self) -> None:
        """The run's zero is almost now."""
        self.run.began = time.perf_counter() + LEAD_S
        self.run.began_at = time.time() + LEAD_S
        self.run.cpu_s = time.process_time()

    async def _ready(
        self, session: Session, number: int = 0, answers: Mapping[int, ModelAnswer] = MappingProxyType({})
    ) -> _PreparedRequest:
        """One turn's request, built, and its record; who sends it says when it is due."""
        turn, config = session.turns[number], self._config
        leaving = random.Random(f"{config.seed} leaving {session.number} {number}")
        leaves = leaving.random() < config.abort_share
        record = RequestRecord(
            request_id=f"load-{self._tag}-{session.number}-{number}",
            session=session.number,
            turn=number,
            planned_input=turn.prompt_tokens,
            planned_output=turn.output_tokens,
            intended_s=0.0,
            abort_after=leaving.randrange(turn.output_tokens) if leaves else None,
        )
        key = config.api_keys[session.number % len(config.api_keys)] if config.api_keys else ""
        draft = RequestDraft(turn, answers, record.request_id, f"load-{self._tag}-{session.number}", key)
        return _PreparedRequest(session, record, await self._client.build(draft))


async def _wait_until(at: float) -> None:
    """To within some tens of microseconds, on a loop that is not busy."""
    if (left := at - time.perf_counter()) > SPIN_S:
        await asyncio.sleep(left - SPIN_S)
    while time.perf_counter() < at:  # noqa: ASYNC110 - nothing tells that a time has come
        await asyncio.sleep(0)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Without the collector of reference cycles: a collection stops all streams for tens of milliseconds, and a request
    leaves no cycles behind.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
