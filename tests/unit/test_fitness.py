"""The breaker of a pod, its speed against its peers, and what routing makes of both."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.types import PodLoad, Role
from gateway.pods.fitness import (
    MAX_OPEN_S,
    MAX_SUCCESSES,
    OPEN_S,
    PROBE_S,
    SLOW_S,
    UNFIT_PROBE_S,
    Breaker,
    BreakerState,
    compare_speeds,
)
from gateway.pods.view import PodView, fit_views
from gateway.routing.policy import CostPolicy, RoutingRequest


def failing(breaker: Breaker, number: int = 4, at: float = 100.0) -> list[bool]:
    return [breaker.on_failure(f"r{i}", at) for i in range(number)]


def test_a_breaker_opens_after_some_failures_in_a_row_and_closes_with_a_probe() -> None:
    breaker = Breaker()
    assert failing(breaker) == [False, False, False, True]
    assert breaker.state(100.0) is BreakerState.OPEN
    assert not breaker.allows(100.0 + 0.9 * OPEN_S)
    now = 100.0 + OPEN_S
    assert breaker.state(now) is BreakerState.HALF_OPEN
    assert breaker.allows(now)
    breaker.on_sent("probe", now)
    assert not breaker.allows(now)  # one at a time
    breaker.on_success("old")  # sent before it opened: it tells nothing new
    assert breaker.state(now) is BreakerState.HALF_OPEN
    breaker.on_success("probe")
    assert breaker.state(now) is BreakerState.CLOSED
    assert breaker.allows(now)


def test_a_failed_probe_doubles_the_pause_up_to_a_bound() -> None:
    breaker, now, pauses = Breaker(), 100.0, []
    failing(breaker)
    for number in range(8):
        began = now
        while not breaker.allows(now):
            now += 0.5
        pauses.append(now - began)
        breaker.on_sent(f"p{number}", now)
        breaker.on_failure(f"p{number}", now)
    assert pauses[:4] == [OPEN_S, 2 * OPEN_S, 4 * OPEN_S, 8 * OPEN_S]
    assert pauses[-1] == MAX_OPEN_S


def test_a_probe_without_an_outcome_does_not_keep_the_breaker_open_for_ever() -> None:
    breaker = Breaker()
    failing(breaker)
    now = 100.0 + OPEN_S
    breaker.on_sent("probe", now)
    assert not breaker.allows(now + 0.9 * PROBE_S)
    assert breaker.allows(now + PROBE_S)
    breaker.on_end("probe")  # its client left
    assert breaker.allows(now)


def test_failures_of_the_last_resort_do_not_lengthen_the_pause() -> None:
    breaker = Breaker()
    failing(breaker)
    for number in range(20):  # all pods fail, so the open ones get requests too
        breaker.on_sent(f"r{number}", 101.0)
    half_open = 100.0 + OPEN_S
    for number in range(20, 40):
        breaker.on_sent(f"r{number}", half_open)
    for number in range(40):
        breaker.on_failure(f"r{number}", half_open)
    assert not breaker.allows(half_open + 1.9 * OPEN_S)
    assert breaker.allows(half_open + 2 * OPEN_S)


def test_few_failures_among_many_successes_and_doubtful_ones_do_not_open_it() -> None:
    breaker = Breaker()
    for i in range(200):
        breaker.on_success(f"r{i}")
    assert not any(failing(breaker, MAX_SUCCESSES - 1))
    assert any(failing(breaker, 2))  # a pod that was fine for hours is found, too
    doubtful = Breaker()
    for i in range(100):  # every second hand-off fails, and another pod may be to blame
        assert not doubtful.on_failure(f"f{i}", 100.0, 0.5)
        doubtful.on_success(f"s{i}")


class BreakerMachine(RuleBasedStateMachine):
    """Any order of calls: the breaker always lets a request through after a bounded time."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker, self.now, self.number, self.running = Breaker(), 0.0, 0, list[str]()

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def send(self) -> None:
        self.number += 1
        self.running.append(f"r{self.number}")
        self.breaker.on_sent(self.running[-1], self.now)

    @rule(index=st.integers(0, 20), outcome=st.sampled_from(("success", "failure", "none")))
    def end(self, index: int, outcome: str) -> None:
        if self.running:
            request = self.running.pop(index % len(self.running))
            if outcome == "success":
                self.breaker.on_success(request)
            elif outcome == "failure":
                opened = self.breaker.on_failure(request, self.now)
                assert not opened or not self.breaker.allows(self.now)
            self.breaker.on_end(request)

    @invariant()
    def lets_a_request_through_in_time(self) -> None:
        assert self.breaker.allows(self.now + MAX_OPEN_S + PROBE_S)
        if self.breaker.state(self.now) is BreakerState.CLOSED:
            assert self.breaker.allows(self.now)


TestBreakerMachine = BreakerMachine.TestCase
TestBreakerMachine.settings = settings(max_examples=50, deadline=None)


def pod(
    name: str, *, rate: float = 1000.0, step_s: float = 0.01, role: Role = Role.PREFILL, card: str = "H"
) -> PodView:
    view = PodView(name, block_size=16, max_request_tokens=1 << 20, num_blocks=1 << 16, role=role, card=card)
    prefill, decode = (rate, 0.0) if role is Role.PREFILL else (0.0, step_s)
    view.apply_report(PodLoad(prefill_rate=prefill, step_s=decode, free_blocks=1 << 16), 0.0)
    return view


def compare(views: list[PodView], seconds: float, start: float = 0.0) -> list[str]:
    """Compares twice a second. Returns the names of pods whose state changed."""
    return [v.name for i in range(int(2 * seconds) + 1) for v in compare_speeds(views, start + i / 2)]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_pod_slower_than_its_peers_is_found_after_a_time_and_normal_again_with_hysteresis(role: Role) -> None:
    def speed(view: PodView, factor: float) -> None:
        rate, step_s = (1000.0 / factor, 0.0) if role is Role.PREFILL else (0.0, 0.01 * factor)
        view.apply_report(PodLoad(prefill_rate=rate, step_s=step_s), 0.0)

    views = [pod(f"p{i}", role=role) for i in range(3)]
    speed(views[0], 2.5)
    assert compare(views, 0.8 * SLOW_S) == []
    assert compare(views, 0.5 * SLOW_S, start=0.8 * SLOW_S) == ["p0"]
    assert views[0].slowness.slow
    assert not views[0].slowness.unfit
    speed(views[0], 1.7)  # between both bounds
    assert compare(views, 3 * SLOW_S, start=100.0) == []
    speed(views[0], 1.2)
    assert compare(views, 2 * SLOW_S, start=200.0) == ["p0"]
    assert not views[0].slowness.slow


def test_pods_of_other_cards_and_too_few_peers_are_not_compared() -> None:
    assert compare([pod("a", rate=100.0), pod("b")], 3 * SLOW_S) == []
    assert compare([pod("a", rate=100.0, card="L4"), pod("b"), pod("c"), pod("d")], 3 * SLOW_S) == []


def test_an_unfit_pod_is_the_last_resort_but_gets_a_request_now_and_then() -> None:
    views = [pod("a", rate=100.0), pod("b"), pod("c")]
    compare(views, 2 * SLOW_S)
    assert views[0].slowness.unfit
    now = 50.0
    assert [v.name for v in fit_views(views, now)] == ["a", "b", "c"]  # its rate must be measured again
    views[0].on_sent("r", now)
    assert [v.name for v in fit_views(views, now)] == ["b", "c"]
    assert [v.name for v in fit_views(views[:1], now)] == ["a"]
    assert [v.name for v in fit_views(views, now + UNFIT_PROBE_S)] == ["a", "b", "c"]


def test_a_slow_decode_pod_costs_its_own_steps() -> None:
    views = [pod("a", role=Role.DECODE, step_s=0.025), pod("b", role=Role.DECODE), pod("c", role=Role.DECODE)]
    compare(views, 2 * SLOW_S)
    options = CostPolicy(random.Random(1)).rank_decode_pods(RoutingRequest(prompt_len=10, max_tokens=100), views, 50.0)
    cost = {option.view.name: option.cost_s for option in options}
    assert options[-1].view.name == "a"
    assert cost["a"] > 2 * cost["b"]


def test_a_pod_with_an_open_breaker_is_the_last_resort() -> None:
    views = [pod("a"), pod("b")]
    failing(views[0].breaker)
    assert [v.name for v in fit_views(views, 100.0)] == ["b"]
    failing(views[1].breaker)
    assert [v.name for v in fit_views(views, 100.0)] == ["a", "b"]
