"""Runs seeds. A seed is a load with the faults of its schedule, and then a check of the invariants."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.rigs.chaos.catalogue import Case
from tests.rigs.chaos.client import CLIENTS, ChaosClients, Verdict
from tests.rigs.chaos.invariants import Baseline, ReadinessWatch, baseline, canaries, leaks
from tests.rigs.chaos.schedule import GROUPS, PROCESSES, ScheduledFault, schedule
from tests.rigs.chaos.stack import TENANTS, ChaosStack

MOMENT_S = 1.0  #: Longest wait for the moment of a fault.
LOG_LINES = 15  #: Warnings and errors of each process that are printed after a bad seed.
_LOUD = re.compile(r"\b(warning|error|critical)\b|Traceback|^\w*Error", re.IGNORECASE)


@dataclass
class SeedResult:
    """The outcome of one seed."""

    seed: int
    seconds: float
    verdicts: dict[str, int]  #: Number of requests by verdict.
    retried: int  #: Requests that were sent again because their connection broke.
    leaks: list[str]  #: Resources that were not free at the end.
    crashes: list[str]  #: Ends of processes that no fault caused.
    lies: list[str]  #: Refusals by a gateway that said that it was ready.
    problems: list[str]  #: Failed, wrong and hanging requests.
    deaths: dict[str, int]  #: Kills by process.
    faults: list[str] = field(default_factory=list)

    @property
    def accepted(self) -> int:
        """Requests that were neither refused nor left by their client."""
        return sum(self.verdicts.get(v, 0) for v in (Verdict.COMPLETED, Verdict.FAILED, Verdict.WRONG, Verdict.HANG))

    @property
    def good(self) -> bool:
        """No invariant is broken. A failed request breaks none; it lowers completed_share."""
        bad = self.verdicts.get(Verdict.WRONG, 0) + self.verdicts.get(Verdict.HANG, 0)
        return not (bad or self.leaks or self.crashes or self.lies)

    def row(self) -> dict[str, Any]:
        """Returns the row of the result file."""
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "requests": sum(self.verdicts.values()),
            "accepted": self.accepted,
            **{verdict.value: self.verdicts.get(verdict, 0) for verdict in Verdict},
            "retried": self.retried,
            "leaks": len(self.leaks),
            "crashes": len(self.crashes),
            "lies": len(self.lies),
            "faults": len(self.faults),
            "deaths": self.deaths,
        }

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(self.verdicts.items()))
        killed = ", ".join(f"{name} {count}x" for name, count in self.deaths.items()) or "none"
        state = "good" if self.good and not self.problems else "NOT GOOD"
        return f"seed {self.seed}: {state}: {counts}; {self.retried} retried; killed: {killed}; {self.seconds:.1f} s"


class SeedRunner:
    """Runs seeds on one stack."""

    def __init__(self, stack: ChaosStack, cases: Sequence[Case], start: Baseline, say: Callable[[str], None]) -> None:
        self.stack, self.cases = stack, cases
        self.start = start  #: Resources of the processes after the warm-up, by role.
        self._say = say  #: Prints a line.

    @classmethod
    async def warmed_up(cls, stack: ChaosStack, cases: Sequence[Case], say: Callable[[str], None]) -> SeedRunner:
        """Returns a runner. First it sends every case to the undisturbed stack, and requires the right answers."""
        clients = clients_of(stack, cases)
        checked = iter(range(len(cases)))
        rounds = 3  # enough for each pair of pods and each gateway to get requests

        async def each(worker: int) -> None:
            rng = random.Random(f"warm-up-{worker}")
            for number in checked:
                for _ in range(rounds):
                    salt = f"{rng.getrandbits(64):x}"
                    body = {**cases[number].body, "stream": bool(rng.getrandbits(1)), "cache_salt": salt}
                    await clients.one(cases[number], body, rng, number=number)

        await asyncio.gather(*(each(worker) for worker in range(CLIENTS)))
        tally = clients.tally
        assert not tally.problems, tally.problems
        say(f"undisturbed: {tally.verdicts.total()} requests, median {statistics.median(tally.seconds):.2f} s")
        # The processes hold most resources right after the load, because idle clients keep their connections.
        return cls(stack, cases, await baseline(stack), say)

    async def run(self, seed: int, seconds: float) -> SeedResult:
        """Runs one seed. After a bad seed it prints the faults, the problems and the warnings of all processes."""
        stack, faults = self.stack, schedule(seed, seconds)
        self._say(f"seed {seed}: {len(faults)} faults in {seconds:g} s")
        before, crashed = dict(stack.deaths), len(stack.crashes)
        sizes, began = stack.log_sizes(), time.monotonic()
        clients, watch = clients_of(stack, self.cases), ReadinessWatch(stack.gateways)
        watching = asyncio.create_task(watch.run())
        groups = [asyncio.create_task(self._group(faults, group, clients, began)) for group in GROUPS]
        all_faults = asyncio.gather(*groups, return_exceptions=True)
        try:
            await clients.run(seed, lambda: all_faults.done() and time.monotonic() - began > seconds)
            errors = [f"a fault did not end: {error!r}" for error in await all_faults if error is not None]
            await stack.revive()
            found = await leaks(stack, self.start) + errors
            lies = watch.lies(clients.refusals) + await canaries(clients, stack.gateways, self.cases)
            stack.note_crashes()
        finally:
            for task in (watching, *groups):
                task.cancel()
            await asyncio.wait([watching, *groups])
        tally = clients.tally
        result = SeedResult(
            seed=seed,
            seconds=time.monotonic() - began,
            verdicts={verdict.value: count for verdict, count in tally.verdicts.items()},
            retried=tally.retried,
            leaks=found,
            crashes=stack.crashes[crashed:],
            lies=lies,
            problems=tally.problems,
            deaths={name: n for name in PROCESSES if (n := stack.deaths.get(name, 0) - before.get(name, 0))},
            faults=[str(fault) for fault in faults],
        )
        self._say(str(result))
        if not result.good or result.problems:
            self._explain(result, sizes)
        return result

    async def _group(self, faults: Sequence[ScheduledFault], group: str, clients: ChaosClients, began: float) -> None:
        """Causes the faults of one group, one after another."""
        for fault in faults:
            if fault.group == group:
                await asyncio.sleep(began + fault.at_s - time.monotonic())
                await _moment(fault, clients)
                await self.stack.apply(fault)

    def _explain(self, result: SeedResult, sizes: dict[str, int]) -> None:
        """Prints everything that helps to find the cause."""
        self._say(f"  run it again: make chaos SEEDS={result.seed}")
        for title, lines in (
            ("fault", result.faults),
            ("request", result.problems),
            ("leak", result.leaks),
            ("crash", result.crashes),
            ("readiness", result.lies),
        ):
            for line in lines:
                self._say(f"  {title}: {line}")
        for name in PROCESSES:
            lines = self.stack.log_since(name, sizes.get(name, 0))
            for line in [text for text in lines if _LOUD.search(text)][-LOG_LINES:]:
                self._say(f"  {name} | {line}")
        self._say(f"  whole logs: {self.stack.directory / 'logs'}")


def clients_of(stack: ChaosStack, cases: Sequence[Case]) -> ChaosClients:
    """Returns clients of all gateways. Their tenants take turns."""
    keys = [stack.keys[tenant] for tenant in TENANTS]
    return ChaosClients(stack.gateways, cases, key=lambda number: keys[number % len(keys)])


async def _moment(fault: ScheduledFault, clients: ChaosClients) -> None:
    """Waits until the load is in the state that the fault wants, at most MOMENT_S."""
    waits_for = {"prompt": lambda: clients.prompts > 0, "answer": lambda: clients.answers > 0}.get(fault.moment)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(MOMENT_S):
            while waits_for is not None and not waits_for():
                await asyncio.sleep(0.002)
