"""The fleet planner's decisions: within their limits, calm under constant load, and none without data."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.types import PodLoad, Role
from fleet.decision import ActionKind, DemandReading, FleetAction, FleetDecider, FleetLimits, FleetReading, PodReading
from fleet.forecast import RateForecast

PROMPT, OUTPUT = 4000, 300
PREFILL = PodLoad(prefill_rate=40_000.0, free_blocks=1000)
DECODE = PodLoad(step_s=0.006, step_slope_s=0.0004, free_blocks=1000)
LIMITS = FleetLimits(start_s=20.0)


class Fleet:
    """A fleet that does at once what the planner says. Its load reports show no queue."""

    def __init__(self, limits: FleetLimits, prefill: int = 1, decode: int = 1, seed: int = 0) -> None:
        self.decider, self.limits = FleetDecider(limits), limits
        self.roles = {f"p{i}": Role.PREFILL for i in range(prefill)} | {f"d{i}": Role.DECODE for i in range(decode)}
        self.rng = random.Random(seed)
        self.now = self.arrivals = 0.0
        self.taken: list[FleetAction] = []
        self.queued = 0

    def count(self, role: Role) -> int:
        return list(self.roles.values()).count(role)

    def reading(self) -> FleetReading:
        served = self.arrivals
        pods = tuple(
            PodReading(
                name,
                role,
                replace(PREFILL, queued_tokens=self.queued) if role is Role.PREFILL else DECODE,
                0.5,
                num_blocks=3000,
                block_size=16,
            )
            for name, role in self.roles.items()
        )
        tokens = (served * PROMPT, served * PROMPT, served * OUTPUT)
        return FleetReading(self.now, pods, DemandReading(self.arrivals, *tokens, served, served, 0, 0.5))

    def step(self, rate: float, *, exact: bool = False, seconds: float = 5.0) -> list[FleetAction]:
        self.now += seconds
        expected = rate * seconds
        chance = self.rng.gauss(0.0, math.sqrt(expected))
        self.arrivals += expected if exact else max(0, round(expected + chance))
        actions = self.decider.decide(self.reading())
        for action in actions:
            self.apply(action)
        self.taken += [action for action in actions if action.kind is not ActionKind.HOLD]
        return actions

    def apply(self, action: FleetAction) -> None:
        if action.kind is ActionKind.ADD:
            assert action.role is not None
            self.roles |= {f"{action.role[0]}{len(self.taken)}-{i}": action.role for i in range(action.number)}
        elif action.kind is ActionKind.REMOVE:
            del self.roles[action.pod]
        elif action.kind is ActionKind.SWITCH:
            assert action.role is not None
            self.roles[action.pod] = action.role


@given(
    rates=st.lists(st.floats(0, 500), min_size=3, max_size=40),
    bounds=st.tuples(st.integers(1, 3), st.integers(1, 8), st.integers(1, 3), st.integers(1, 8)),
    room=st.integers(0, 10),
    queued=st.integers(0, 10**7),
)
@settings(max_examples=60, deadline=None)
def test_the_fleet_stays_within_its_limits(
    rates: list[float], bounds: tuple[int, int, int, int], room: int, queued: int
) -> None:
    low_p, more_p, low_d, more_d = bounds
    limits = FleetLimits(
        min_prefill=low_p,
        max_prefill=low_p + more_p,
        min_decode=low_d,
        max_decode=low_d + more_d,
        max_pods=low_p + low_d + room,
        calm_s=20.0,
        cooldown_s=5.0,
    )
    fleet = Fleet(limits, low_p, low_d)
    fleet.queued = queued
    for rate in rates:
        fleet.step(rate, exact=True)
        assert low_p <= fleet.count(Role.PREFILL) <= low_p + more_p
        assert low_d <= fleet.count(Role.DECODE) <= low_d + more_d
        assert len(fleet.roles) <= limits.max_pods


@example(rate=3.0, seed=0)
@given(rate=st.floats(0.2, 60), seed=st.integers(0, 1000))
@settings(max_examples=8, deadline=None)
def test_a_constant_load_never_oscillates(rate: float, seed: int) -> None:
    fleet = Fleet(LIMITS, seed=seed)
    for _ in range(120):  # ten minutes
        fleet.step(rate)
    for role in (Role.PREFILL, Role.DECODE):
        mine = [action.kind for action in fleet.taken if action.role is role]
        # Chance may ask for one pod more; a pod that was removed is never asked for again.
        assert ActionKind.ADD not in mine[mine.index(ActionKind.REMOVE) :] if ActionKind.REMOVE in mine else True


DAMAGE = {
    "no gateway": lambda r: replace(r, demand=None),
    "old demand": lambda r: replace(r, demand=replace(r.demand, age_s=60.0)),
    "old pod": lambda r: replace(r, pods=(replace(r.pods[0], age_s=60.0), *r.pods[1:])),
    "unmeasured": lambda r: replace(r, pods=tuple(replace(pod, load=PodLoad()) for pod in r.pods)),
    "no decode pod": lambda r: replace(r, pods=tuple(p for p in r.pods if p.role is Role.PREFILL)),
    "not a number": lambda r: replace(r, demand=replace(r.demand, arrivals=float("nan"))),
    "counters went back": lambda r: replace(r, demand=replace(r.demand, arrivals=0.0)),
    "role both": lambda r: replace(r, pods=(replace(r.pods[0], role=Role.BOTH), *r.pods[1:])),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_nothing_is_done_without_all_data(damage: str) -> None:
    fleet = Fleet(LIMITS)
    for _ in range(10):
        fleet.step(2.0, exact=True)
    fleet.now, fleet.arrivals = fleet.now + 5, fleet.arrivals + 1000
    [action] = fleet.decider.decide(DAMAGE[damage](fleet.reading()))
    assert action.kind is ActionKind.HOLD
    assert action.why


def test_the_first_readings_decide_nothing() -> None:
    fleet = Fleet(LIMITS)
    kinds = [fleet.step(50.0, exact=True)[0].kind for _ in range(4)]
    assert kinds[0] is ActionKind.HOLD
    assert kinds[-1] is ActionKind.ADD or fleet.taken


def test_a_backlog_adds_pods_although_the_rate_is_served() -> None:
    """The planner sees queues: dynamo#10528 kept its pods while prompts waited for minutes."""
    fleet = Fleet(LIMITS)
    for _ in range(6):
        fleet.step(2.0, exact=True)
    assert not fleet.taken
    fleet.queued = 4_000_000
    fleet.step(2.0, exact=True)
    assert fleet.taken[-1].kind is ActionKind.ADD
    assert fleet.taken[-1].role is Role.PREFILL


def test_a_pod_that_is_too_many_in_one_role_changes_to_the_other() -> None:
    fleet = Fleet(LIMITS, prefill=1, decode=8)
    for _ in range(8):
        fleet.step(14.0, exact=True)
    assert fleet.taken[0].kind is ActionKind.SWITCH
    assert fleet.taken[0].role is Role.PREFILL
    assert fleet.taken[0].pod.startswith("d")


def test_a_step_is_known_within_ten_seconds() -> None:
    forecast, now = RateForecast(), 0.0
    for _ in range(24):
        now += 5.0
        forecast.add(now, 5.0, 20.0)
    for _ in range(2):
        now += 5.0
        forecast.add(now, 5.0, 80.0)
    assert forecast.at(now) == pytest.approx(16.0)


def test_the_season_is_expected_before_it_comes() -> None:
    forecast, now = RateForecast(season_s=960.0), 0.0
    while now < 960.0 * 2:
        now += 5.0
        forecast.add(now, 5.0, 5.0 * (30.0 if now % 960.0 > 480.0 else 2.0))
    while now % 960.0 < 470.0:
        now += 5.0
        forecast.add(now, 5.0, 10.0)
    assert forecast.at(now) < 15.0
    assert forecast.at(now + 30.0) == pytest.approx(30.0, rel=0.2)


def empty_role_actions(fleet: Fleet, seconds: float) -> list[FleetAction]:
    """Returns the actions of so many seconds, none of which is carried out."""
    taken = []
    for _ in range(int(seconds / 5)):
        fleet.now += 5
        taken += [action for action in fleet.decider.decide(fleet.reading()) if action.kind is not ActionKind.HOLD]
    return taken


def test_a_role_without_a_pod_gets_its_least_number_after_a_while() -> None:
    limits = replace(LIMITS, min_decode=2)
    fleet = Fleet(limits, prefill=1, decode=0)
    assert empty_role_actions(fleet, limits.stale_s) == []  # pods that lost Redis come back by themselves
    action = empty_role_actions(fleet, 5.0)[0]
    assert (action.kind, action.role, action.number) == (ActionKind.ADD, Role.DECODE, 2)
    fleet.apply(action)
    assert fleet.count(Role.DECODE) == 2
    assert all("no pod" not in action.why for action in fleet.decider.decide(fleet.reading()))


def test_both_roles_start_from_nothing_within_the_limits() -> None:
    fleet = Fleet(replace(LIMITS, max_pods=1), prefill=0, decode=0)
    actions = empty_role_actions(fleet, 15.0)
    assert [(a.kind, a.role, a.number) for a in actions] == [(ActionKind.ADD, Role.PREFILL, 1)]


@pytest.mark.parametrize(("decode", "expected"), [(1, None), (2, ActionKind.SWITCH)])
def test_without_a_scale_adapter_a_pod_of_the_other_role_changes(decode: int, expected: ActionKind | None) -> None:
    fleet = Fleet(replace(LIMITS, scales=False), prefill=0, decode=decode)
    actions = empty_role_actions(fleet, 15.0)
    assert [action.kind for action in actions] == ([] if expected is None else [expected])
    if actions:
        assert actions[0].role is Role.PREFILL
        assert actions[0].pod.startswith("d")


def test_a_role_that_is_empty_for_a_moment_starts_nothing() -> None:
    fleet = Fleet(LIMITS)
    for _ in range(10):
        fleet.step(5.0)
    roles, fleet.roles = fleet.roles, {}
    assert empty_role_actions(fleet, 5.0) == []
    fleet.roles = roles
    assert empty_role_actions(fleet, 5.0) == []
    fleet.roles = {}
    assert empty_role_actions(fleet, 10.0) == []
