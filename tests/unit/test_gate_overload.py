"""The gate under overload, on simulated time: waits, goodput, shed requests, fairness. At the end it holds nothing."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import BatonError, DeadlineExceeded, Overloaded, Unavailable
from common.settings.tiers import Tier
from gateway.admission.api_keys import ANONYMOUS, Caller
from gateway.admission.gate import (
    LATE_CHECK_S,
    LATE_FACTOR,
    TICK_S,
    UNPROVEN_PER_POD,
    Gate,
    GateLimits,
)
from gateway.admission.queue import QueueEntry
from gateway.admission.rejections import TOLERATED_WAIT_S
from gateway.telemetry.metrics import GatewayMetrics
from tests.rigs.virtual_time import run_virtual

LIMIT_S = 10.0


class SimulatedPods:
    """Pods that compute prompts one after another. It is also the gate's QueueForecast, with a wrong rate."""

    def __init__(self, rate: float, *, wrong: float = 1.0, pods: int = 1, measured: bool = True) -> None:
        """`rate`: prompt tokens per second of a pod. The pod reports this rate times `wrong`."""
        self.rate, self.wrong, self.num_pods, self.measured = rate, wrong, pods, measured
        self.computed = 0
        self._queued = [0] * pods
        self._turns = [asyncio.Lock() for _ in range(pods)]

    # -- QueueForecast

    def queue_s(self, unreported_tokens: int) -> float:
        return min(self._queued) / (self.rate * self.wrong)

    def compute_s(self, tokens: int) -> float:
        return tokens / (self.rate * self.wrong)

    def tokens_per_s(self) -> float:
        return self.num_pods * self.rate * self.wrong

    # -- the pods

    async def compute(self, tokens: int) -> None:
        """Computes a prompt, and returns when the first token exists."""
        pod = min(range(self.num_pods), key=lambda i: self._queued[i])
        self._queued[pod] += tokens
        try:
            async with self._turns[pod]:
                await asyncio.sleep(tokens / self.rate)
        finally:
            self._queued[pod] -= tokens
        self.measured = True
        self.computed += tokens


@dataclass
class Outcome:
    """How one request ended."""

    caller: Caller
    tokens: int
    kind: str  #: ok, refused (on arrival), shed (while it waited), late (shed at the pods), deadline or left
    seconds: float  #: Until the first token, or until it ended.
    alone: bool = False
    priority: int = 0
    limited: bool = False  #: Its tier was overloaded when it came, so its answer was shortened.


@dataclass
class Simulation:
    pods: SimulatedPods
    gate: Gate
    outcomes: list[Outcome] = field(default_factory=list)
    most_outstanding: int = 0

    @classmethod
    def of(cls, pods: SimulatedPods, **limits: Any) -> Simulation:
        bounds: dict[str, Any] = {"max_ttft_s": LIMIT_S, **limits}
        return cls(pods, Gate(GateLimits(**bounds), pods, GatewayMetrics(), asyncio.get_running_loop().time))  # type: ignore[arg-type]

    async def request(
        self,
        tokens: int,
        caller: Caller = ANONYMOUS,
        *,
        priority: int = 0,
        wait_s: float = 600.0,
        output_s: float = 0.0,
        patience_s: float | None = None,
    ) -> None:
        """Sends one request. Its client leaves after `patience_s`; None: it stays."""
        loop, gate = asyncio.get_running_loop(), self.gate
        began, task, waited, entry = loop.time(), asyncio.current_task(), [], None
        assert task is not None
        shed: list[BatonError] = []
        leaves = None if patience_s is None else loop.call_later(patience_s, task.cancel)

        async def no_hits() -> int:
            return 0

        def end(error: BatonError) -> None:
            shed.append(error)
            task.cancel()

        kind, used, retry_s = "ok", 0, 1.0
        limited = gate.answer_limit(caller, priority) is not None
        try:
            entry = await gate.acquire(
                caller,
                priority,
                tokens,
                2 * tokens,
                began + wait_s,
                no_hits,
                on_wait=lambda: waited.append(1),
                shed=end,
            )
            self.most_outstanding = max(self.most_outstanding, len(gate._outstanding))
            await self.pods.compute(tokens)
            gate.on_first_token(entry)
            first_s, used = loop.time() - began, 2 * tokens
            await asyncio.sleep(output_s)
        except (Overloaded, Unavailable) as e:
            retry_s, kind = e.retry_after_s or 0.0, "shed" if waited else "refused"
        except DeadlineExceeded:
            kind = "deadline"
        except asyncio.CancelledError:
            kind = "late" if shed else "left"
        finally:
            if leaves is not None:
                leaves.cancel()
            if entry is not None:
                gate.release(entry, used)
        assert 1 <= retry_s <= 60
        seconds = first_s if used else loop.time() - began
        alone = entry is not None and entry.alone
        self.outcomes.append(Outcome(caller, tokens, kind, seconds, alone, priority, limited))

    async def load(self, per_s: float, seconds: float, make: Callable[[], dict[str, Any]]) -> None:
        """Sends requests at even times, and waits for their ends."""
        tasks = []
        for _ in range(int(per_s * seconds)):
            tasks.append(asyncio.create_task(self.request(**make())))
            await asyncio.sleep(1 / per_s)
        await asyncio.gather(*tasks)

    def counts(self) -> Counter[str]:
        return Counter(outcome.kind for outcome in self.outcomes)

    def check_empty(self) -> None:
        """Asserts that the gate holds no request."""
        gate = self.gate
        assert (gate._running, gate.waiting, gate._waiters) == (0, 0, {})
        assert (gate._outstanding, gate._without_room, gate._outstanding_s) == ({}, {}, 0.0)
        gate.stop()


def good_per_s(load: float, *, wrong: float, measured: bool) -> tuple[float, Simulation]:
    """Returns the answers per second with a first token in time. The capacity is 5 requests a second."""

    async def run() -> Simulation:
        rng = random.Random(1)
        simulation = Simulation.of(SimulatedPods(1000.0, wrong=wrong, measured=measured))
        await simulation.load(load * 5, 60.0, lambda: {"tokens": rng.randrange(100, 300), "output_s": 1.0})
        simulation.check_empty()
        return simulation

    simulation = run_virtual(run())
    good = sum(o.kind == "ok" and o.seconds <= LIMIT_S for o in simulation.outcomes)
    return good / 60, simulation


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("wrong", [0.2, 1.0, 20.0])
def test_goodput_at_20_times_the_load_is_that_of_the_capacity(wrong: float, measured: bool) -> None:
    once, _ = good_per_s(1.0, wrong=wrong, measured=measured)
    often, simulation = good_per_s(20.0, wrong=wrong, measured=measured)
    counts = simulation.counts()
    assert often >= 0.9 * once, counts
    # Nearly all refusals come on arrival, and few requests are refused after they waited.
    assert counts["shed"] + counts["late"] <= 0.02 * len(simulation.outcomes), counts
    ttfts = [o.seconds for o in simulation.outcomes if o.kind == "ok"]
    assert max(ttfts) <= LIMIT_S + 1.0


@pytest.mark.parametrize("measured", [True, False])
def test_a_rate_that_is_wrong_by_a_factor_of_100_lets_few_requests_in(measured: bool) -> None:
    async def run() -> Simulation:
        simulation = Simulation.of(SimulatedPods(40.0, wrong=100.0, measured=measured))
        await asyncio.gather(*[simulation.request(40) for _ in range(200)])  # a second each
        simulation.check_empty()
        return simulation

    simulation = run_virtual(run())
    assert simulation.most_outstanding <= UNPROVEN_PER_POD
    assert simulation.counts()["ok"] >= 8


@settings(max_examples=40, deadline=None)
@given(
    rate=st.sampled_from([50.0, 300.0, 5000.0]),
    wrong=st.sampled_from([0.1, 0.5, 1.0, 3.0, 30.0]),
    pods=st.integers(1, 4),
    measured=st.booleans(),
    load=st.sampled_from([0.5, 2.0, 10.0]),
    slower=st.sampled_from([1.0, 4.0]),
    seed=st.integers(0, 10**6),
)
def test_no_accepted_request_waits_longer_than_the_limit_and_all_places_come_back(
    rate: float, wrong: float, pods: int, measured: bool, load: float, slower: float, seed: int
) -> None:
    """Pods of any speed and rates of any error, pods that become slower, clients that leave, and own deadlines.

    The stated error: a request at the pods is shed LATE_FACTOR times its own work after it passed, with pauses.
    """
    rng = random.Random(seed)
    callers = [Caller(tenant=name, key_id=name, weight=weight) for name, weight in (("a", 1.0), ("b", 2.0), ("c", 1.0))]

    def make() -> dict[str, Any]:
        return {
            "tokens": rng.randrange(1, 200),
            "caller": rng.choice(callers),
            "priority": rng.choice((0, 0, 1)),
            "wait_s": rng.choice((600.0, 600.0, 3.0)),
            "output_s": rng.choice((0.0, 1.0)),
            "patience_s": rng.choice((None, None, None, 0.0, 1.0, 8.0)),
        }

    async def run() -> Simulation:
        simulated = SimulatedPods(rate, wrong=wrong, pods=pods, measured=measured)
        simulation = Simulation.of(simulated)

        def slow_down() -> None:
            simulated.rate, simulated.wrong = simulated.rate / slower, simulated.wrong * slower

        asyncio.get_running_loop().call_later(15.0, slow_down)
        per_s = min(20.0, load * pods * rate / 100)
        await simulation.load(per_s, 30.0, make)
        simulation.check_empty()
        return simulation

    simulation = run_virtual(run())
    reported = simulation.pods.rate * simulation.pods.wrong
    for o in simulation.outcomes:
        own_s = LATE_FACTOR * o.tokens / reported
        pauses_s = 2 * TICK_S[1] + TOLERATED_WAIT_S + LATE_CHECK_S
        if not o.alone:
            # Without measured rates a request is not shed at the pods, until the first token comes.
            own_s += UNPROVEN_PER_POD * 200 * slower / rate if not measured else 0.0
            assert o.seconds <= LIMIT_S + own_s + pauses_s, o
        if o.kind == "refused":
            assert o.seconds == 0.0
    assert len(simulation.outcomes) == int(min(20.0, load * pods * rate / 100) * 30.0)


def test_tenants_share_by_weight_and_low_priority_does_not_starve() -> None:
    async def run() -> Simulation:
        simulation = Simulation.of(SimulatedPods(1000.0))
        one, two = Caller(tenant="one", key_id="1"), Caller(tenant="two", key_id="2", weight=2.0)
        low = Caller(tenant="low", key_id="3")
        rng = random.Random(3)
        shares = ((one, 1, 40.0), (two, 1, 40.0), (low, 0, 4.0))
        loads = [
            simulation.load(
                per_s, 60.0, lambda c=caller, p=priority: {"tokens": rng.randrange(50, 150), "caller": c, "priority": p}
            )
            for caller, priority, per_s in shares
        ]
        await asyncio.gather(*loads)
        simulation.check_empty()
        return simulation

    simulation = run_virtual(run())
    tokens: defaultdict[str, int] = defaultdict(int)
    for o in simulation.outcomes:
        tokens[o.caller.tenant] += o.tokens * (o.kind == "ok")
    assert 1.6 <= tokens["two"] / tokens["one"] <= 2.4, tokens
    assert tokens["low"] >= 0.05 * sum(tokens.values()), tokens


def test_when_the_pods_become_slower_the_last_in_order_are_shed_and_the_first_stay() -> None:
    async def run() -> None:
        pods = SimulatedPods(100.0)
        simulation = Simulation.of(pods)
        tasks = [asyncio.create_task(simulation.request(100)) for _ in range(9)]  # a second each
        await asyncio.sleep(0.1)
        assert simulation.gate.waiting
        order = list(simulation.gate._queue.in_order())
        pods.rate = 50.0  # the pods report it
        await asyncio.sleep(1.0)
        left = list(simulation.gate._queue.in_order())
        rest = [entry for entry in order if not entry.passed_at]
        assert 0 < len(left) < len(rest)
        assert left == rest[: len(left)]
        await asyncio.gather(*tasks)
        assert {"ok", "shed"} <= simulation.counts().keys()
        simulation.check_empty()

    run_virtual(run())


def test_a_pause_of_the_pods_sheds_those_that_are_due_and_not_the_whole_queue() -> None:
    async def run() -> None:
        pods = SimulatedPods(1000.0)
        simulation = Simulation.of(pods)
        load = asyncio.create_task(simulation.load(20.0, 20.0, lambda: {"tokens": 100}))  # twice the capacity
        await asyncio.sleep(10.0)
        rate, pods.rate = pods.rate, 100 / 3.0  # the next prompts take three seconds each
        await asyncio.sleep(3.0)
        pods.rate = rate
        await load
        simulation.check_empty()
        assert pods.computed >= 0.8 * 17.0 * 1000.0, simulation.counts()

    run_virtual(run())


def test_a_late_request_at_the_pods_is_shed_but_not_one_without_others_before_it() -> None:
    async def run() -> None:
        pods = SimulatedPods(10.0, wrong=100.0)
        simulation = Simulation.of(pods)
        alone = asyncio.create_task(simulation.request(500))  # 50 s
        await asyncio.sleep(0.1)
        others = [asyncio.create_task(simulation.request(10)) for _ in range(3)]
        await asyncio.gather(*others)
        assert {o.kind for o in simulation.outcomes} <= {"late", "shed"}
        assert all(LIMIT_S <= o.seconds <= LIMIT_S + 2.0 for o in simulation.outcomes)
        await alone
        assert simulation.outcomes[-1].kind == "ok"
        simulation.check_empty()

    run_virtual(run())


def test_full_decode_pods_are_asked_again_only_if_requests_end() -> None:
    async def run() -> None:
        simulation = Simulation.of(SimulatedPods(1000.0))
        gate, refusal = simulation.gate, Overloaded("no decode pod has room", retry_after_s=2.0)
        loop = asyncio.get_running_loop()

        async def no_hits() -> int:
            return 0

        async def enter() -> QueueEntry:
            return await gate.acquire(ANONYMOUS, 0, 10, 20, loop.time() + 600, no_hits)

        running = [await enter() for _ in range(3)]
        for entry in running:
            gate.on_first_token(entry)
        asks = await enter()
        with pytest.raises(Overloaded):  # nothing is known of ends
            gate.on_no_room(asks, refusal)
        gate.release(asks, 0)
        await asyncio.sleep(2.0)
        gate.release(running.pop(), 20)
        asks = [await enter() for _ in range(2)]  # type: ignore[assignment]
        pauses = [gate.on_no_room(entry, refusal) for entry in asks]  # type: ignore[attr-defined]
        assert all(0 < pause <= 1.0 for pause in pauses)
        assert not gate._pods_have_room()  # others wait in the gate, where their order can be chosen
        await asyncio.sleep(LIMIT_S)
        with pytest.raises(Overloaded):  # it would be late
            gate.on_no_room(asks[0], refusal)  # type: ignore[index]
        for entry in (*asks, *running):  # type: ignore[misc]
            gate.release(entry, 0)
        simulation.check_empty()

    run_virtual(run())


def test_a_request_is_refused_before_its_text_is_read_only_if_it_would_be_late_in_any_case() -> None:
    async def run() -> None:
        simulation = Simulation.of(SimulatedPods(10.0))
        gate, loop = simulation.gate, asyncio.get_running_loop()
        now = loop.time()
        gate.refuse_if_late(ANONYMOUS, 0, now + 600, now)  # no request waits
        tasks = [asyncio.create_task(simulation.request(30)) for _ in range(20)]  # three seconds each
        await asyncio.sleep(0.1)
        assert gate.waiting
        gate.refuse_if_late(ANONYMOUS, 1, loop.time() + 600, loop.time())  # a higher priority
        with pytest.raises(Overloaded) as refused:
            gate.refuse_if_late(ANONYMOUS, 0, loop.time() + 1.0, loop.time())
        assert refused.value.retry_after_s is not None
        await asyncio.gather(*tasks)
        simulation.check_empty()

    run_virtual(run())


TIERS = (Tier("gold", 10, 0.6), Tier("standard", 0, 0.3), Tier("batch", -10, 0.1, 64))


def tiered(loads: dict[int, float], seconds: float = 60.0) -> Simulation:
    """Runs clients of each priority, with so many times the capacity of 5 requests a second."""

    async def run() -> Simulation:
        simulation = Simulation.of(SimulatedPods(1000.0), tiers=TIERS)
        rng = random.Random(3)
        await asyncio.gather(
            *[
                simulation.load(
                    5 * load,
                    seconds,
                    lambda p=priority: {  # type: ignore[misc]
                        "tokens": rng.randrange(100, 300),
                        "priority": p,
                        "caller": Caller(tenant=str(p), key_id=str(p)),
                    },
                )
                for priority, load in loads.items()
            ]
        )
        simulation.check_empty()
        return simulation

    return run_virtual(run())


def served(simulation: Simulation, priority: int) -> list[Outcome]:
    return [o for o in simulation.outcomes if o.priority == priority and o.kind == "ok"]


def test_a_flood_of_a_low_tier_does_not_hurt_the_tiers_above() -> None:
    alone, flooded = tiered({10: 0.4, 0: 0.2}), tiered({10: 0.4, 0: 0.2, -10: 20.0})
    for priority in (10, 0):
        assert len(served(flooded, priority)) == len(served(alone, priority))
        assert max(o.seconds for o in served(flooded, priority)) <= 5.0
        assert not any(o.limited for o in served(flooded, priority))
    batch = [o for o in flooded.outcomes if o.priority == -10]
    rest = 5 * 60 * (1 - 0.6)
    assert len(served(flooded, -10)) >= 0.8 * rest  # it borrows what the others leave
    # Its answers became shorter before its requests were refused.
    first_refused = next(i for i, o in enumerate(batch) if o.kind != "ok")
    assert any(o.limited for o in batch[: first_refused + 1])
    assert {o.kind for o in batch} <= {"ok", "refused", "shed", "late"}


def test_each_tier_gets_its_share_if_all_ask_for_too_much() -> None:
    simulation = tiered({10: 2.0, 0: 2.0, -10: 2.0}, 120.0)
    tokens = {priority: sum(o.tokens for o in served(simulation, priority)) for priority in (10, 0, -10)}
    total = sum(tokens.values())
    assert total >= 0.9 * 1000 * 120
    for tier in TIERS:
        assert tokens[tier.priority] / total == pytest.approx(tier.share, abs=0.05)


async def test_a_low_tier_is_refused_with_429_though_its_tenant_has_no_other_request() -> None:
    simulation, now = Simulation.of(SimulatedPods(10.0), tiers=TIERS), asyncio.get_running_loop().time()
    gold, other = (Caller(tenant=name, key_id=name) for name in "go")
    tasks = [asyncio.create_task(simulation.request(10, gold, priority=10)) for _ in range(8)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert simulation.gate.waiting > 2
    for priority, error in ((-10, Overloaded), (5, Overloaded), (10, Unavailable)):
        with pytest.raises(error) as refused:
            simulation.gate.refuse_if_late(other, priority, now + 0.2, now)
        assert refused.value.retry_after_s is not None
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks)
    simulation.gate.stop()
