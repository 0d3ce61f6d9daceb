"""A soak: steady load below the capacity with rare faults, and what the processes hold over time.

The capacity is measured by CLOSED clients that never pause. Then requests arrive at LOAD_SHARE of it, as a Poisson
process. FAULT_SHARE of the arrivals are faults in place of a request: a client that leaves early, connections that
break, or a process that stands still for a moment. No fault ends a process, so that memory can be compared. The soak
fails when a process ends.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support import report
from loadtest.slo import percentile
from tests.rigs.chaos.catalogue import Case, catalogue, write_model
from tests.rigs.chaos.client import ChaosClients, Verdict
from tests.rigs.chaos.invariants import FD_SLACK, THREAD_SLACK, Held, held, leaks
from tests.rigs.chaos.results import PACKAGES
from tests.rigs.chaos.schedule import FaultKind, Moment, ScheduledFault
from tests.rigs.chaos.seeds import SeedRunner, clients_of
from tests.rigs.chaos.stack import GATEWAYS, PODS, ChaosStack

CLOSED, CAPACITY_S = 12, 15.0
LOAD_SHARE, FAULT_SHARE = 0.7, 0.01
WINDOW_S = 300.0  #: The first and the last part of the soak that are compared; at most a third of it.
SAMPLE_S = 5.0
FREEZE_S = 0.2
MIB = 1 << 20
#: Largest growth, and largest ratio of the two p99, of a soak with two whole windows.
LIMITS = {
    "rss_growth_mib": 32.0,
    "fd_growth": float(FD_SLACK),
    "thread_growth": float(THREAD_SLACK),
    "redis_growth_mib": 4.0,
    "p99_ratio_last_to_first": 1.1,
}


@dataclass(frozen=True, slots=True)
class Sample:
    """What the processes held at one time."""

    at_s: float  #: Seconds after the begin of the load.
    processes: Mapping[str, Held]
    redis_bytes: int  #: Memory of Valkey's data.


@dataclass
class SoakResult:
    """The outcome of one soak."""

    minutes: float
    capacity_per_s: float  #: Requests per second of clients that never pause.
    samples: list[Sample]
    times: list[tuple[float, float]]  #: Arrival and duration in seconds of each completed request.
    verdicts: Counter[Verdict]
    faults: Counter[str]  #: By kind.
    leaks: list[str]
    problems: list[str]  #: Bad ends of requests.

    def metrics(self) -> dict[str, Any]:
        """Returns the metrics. Growth compares the ends of the first and of the last window."""
        window = min(WINDOW_S, self.minutes * 20)
        end = self.minutes * 60
        first = [took for at, took in self.times if at < window]
        last = [took for at, took in self.times if at >= end - window]
        p99 = [percentile(part, 0.99) for part in (first, last)]
        early = [s for s in self.samples if window / 2 <= s.at_s < window]
        late = [s for s in self.samples if s.at_s >= end - window / 2]

        def growth(value: Callable[[Sample], float]) -> float:
            return statistics.median(map(value, late)) - statistics.median(map(value, early))

        names = (*PODS, *GATEWAYS)
        rss = {name: round(growth(lambda s, n=name: s.processes[n].rss) / MIB, 1) for name in names}
        fds = {name: growth(lambda s, n=name: s.processes[n].fds) for name in names}
        threads = {name: growth(lambda s, n=name: s.processes[n].threads) for name in names}
        return {
            "minutes": self.minutes,
            "rss_growth_mib": max(rss.values()),
            "fd_growth": max(fds.values()),
            "thread_growth": max(threads.values()),
            "redis_growth_mib": round(growth(lambda s: s.redis_bytes) / MIB, 2),
            "p99_ratio_last_to_first": round(p99[1] / p99[0], 3),
            "p99_first_s": round(p99[0], 3),
            "p99_last_s": round(p99[1], 3),
            "p50_first_s": round(statistics.median(first), 3),
            "p50_last_s": round(statistics.median(last), 3),
            "capacity_per_s": round(self.capacity_per_s, 2),
            "requests": self.verdicts.total(),
            **{verdict.value: self.verdicts[verdict] for verdict in Verdict},
            "faults": dict(self.faults),
            "leaks": len(self.leaks),
            "rss_growth_by_process_mib": rss,
            "rss_mib": {name: round(self.samples[-1].processes[name].rss / MIB) for name in names},
        }


async def soak(minutes: float, directory: Path, say: Callable[[str], None]) -> SoakResult:
    """Runs a soak on a new stack."""
    (directory / "oracle").mkdir(parents=True)
    write_model(directory / "oracle")
    cases = await asyncio.to_thread(catalogue, directory / "oracle")
    async with ChaosStack.running(directory) as stack:
        runner = await SeedRunner.warmed_up(stack, cases, say)
        capacity = await _capacity(stack, cases)
        say(f"capacity {capacity:.1f} requests/s; {minutes:g} minutes at {LOAD_SHARE:.0%} of it")
        load = _Load(stack, cases, capacity * LOAD_SHARE)
        async with asyncio.TaskGroup() as group:
            sampling = group.create_task(load.sample(say))
            await load.run(minutes * 60)
            sampling.cancel()
        found = await leaks(stack, runner.start)
        require_no_crash(stack)
        tally = load.clients.tally
        return SoakResult(
            minutes, capacity, load.samples, load.times, tally.verdicts, load.faults, found, tally.problems
        )


def require_no_crash(stack: ChaosStack) -> None:
    """Raises AssertionError with the log of a process that ended."""
    stack.note_crashes()
    assert not stack.crashes, "\n".join(stack.crashes)


def report_soak(result: SoakResult, out: Path | None) -> int:
    """Prints and writes the metrics. Returns the exit code: 1 after a bad end of a request, a leak or growth."""
    metrics = result.metrics()
    report.show(metrics)
    whole = result.minutes * 60 >= 2 * WINDOW_S
    growth = [f"{name} is {metrics[name]}, at most {most}" for name, most in LIMITS.items() if metrics[name] > most]
    bad = [*result.problems, *result.leaks, *(growth if whole else [])]
    for line in bad:
        print(f"  {line}", flush=True)
    rows = [
        {
            "minute": round(sample.at_s / 60, 2),
            "redis_mib": round(sample.redis_bytes / MIB, 2),
            "rss_mib": {name: round(now.rss / MIB) for name, now in sample.processes.items()},
            "fds": {name: now.fds for name, now in sample.processes.items()},
            "threads": {name: now.threads for name, now in sample.processes.items()},
        }
        for sample in result.samples[:: max(1, len(result.samples) // 60)]
    ]
    report.write(out, "soak", metrics, *PACKAGES, rows=rows)
    return 1 if bad else 0


async def _capacity(stack: ChaosStack, cases: Sequence[Case]) -> float:
    """Returns the completed requests per second of clients that never pause."""
    clients, began = clients_of(stack, cases), time.monotonic()

    async def client(number: int) -> None:
        rng = random.Random(f"capacity-{number}")
        while time.monotonic() - began < CAPACITY_S:
            await clients.one(*_draw(rng, cases), rng, number=number)

    await asyncio.gather(*(client(number) for number in range(CLOSED)))
    return clients.tally.verdicts[Verdict.COMPLETED] / (time.monotonic() - began)


def _draw(rng: random.Random, cases: Sequence[Case]) -> tuple[Case, dict[str, Any]]:
    case = rng.choice(cases)
    salt = {} if rng.random() < 0.5 else {"cache_salt": f"{rng.getrandbits(64):x}"}
    return case, {**case.body, **salt, "stream": rng.random() < 0.6}


class _Load:
    """Arrivals, faults and samples of one soak."""

    def __init__(self, stack: ChaosStack, cases: Sequence[Case], rate: float) -> None:
        self.clients: ChaosClients = clients_of(stack, cases)
        self.samples: list[Sample] = []
        self.times: list[tuple[float, float]] = []
        self.faults: Counter[str] = Counter()
        self._stack, self._cases, self._rate = stack, cases, rate
        self._began = time.monotonic()
        self._rng = random.Random("soak")

    async def run(self, seconds: float) -> None:
        rng, at, number = self._rng, 0.0, 0
        async with asyncio.TaskGroup() as group:
            while (at := at + rng.expovariate(self._rate)) < seconds:
                await asyncio.sleep(self._began + at - time.monotonic())
                number += 1
                seed = rng.getrandbits(64)
                group.create_task(self._fault(seed) if rng.random() < FAULT_SHARE else self._one(at, number, seed))

    async def _one(self, at: float, number: int, seed: int) -> None:
        rng = random.Random(seed)
        if await self.clients.one(*_draw(rng, self._cases), rng, number=number) is Verdict.COMPLETED:
            self.times.append((at, time.monotonic() - self._began - at))

    async def _fault(self, seed: int) -> None:
        rng = random.Random(seed)
        what = rng.choice(("client leaves", "client leaves", "reset", "freeze"))
        self.faults[what] += 1
        if what == "client leaves":
            case, body = _draw(rng, self._cases)
            await self.clients.one(case, body, rng, leave_after=rng.randrange(case.body["max_tokens"]))
            return
        kind = FaultKind.RESET if what == "reset" else FaultKind.FREEZE
        victim = rng.choice(PODS if kind is FaultKind.RESET else (*PODS, *GATEWAYS))
        await self._stack.apply(ScheduledFault(0.0, "", kind, victim, FREEZE_S, Moment.ANY))

    async def sample(self, say: Callable[[str], None]) -> None:
        """Takes a sample every SAMPLE_S until it is cancelled."""
        async with self._stack.redis() as client:
            while True:
                await asyncio.sleep(SAMPLE_S)
                require_no_crash(self._stack)
                used = int((await client.info("memory"))["used_memory"])
                self.samples.append(Sample(time.monotonic() - self._began, held(self._stack), used))
                if len(self.samples) % 12 == 0:
                    done = self.clients.tally.verdicts.total()
                    say(f"  {self.samples[-1].at_s / 60:.0f} min: {done} requests, {used / MIB:.1f} MiB in Valkey")
