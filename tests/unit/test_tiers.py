"""Priority tiers: shares of the turns, borrowing, victims, forecasts, and the settings that name tiers."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.errors import ConfigError
from common.settings.gateway import GatewayConfig
from common.settings.tiers import Tier, parse_tiers, tier_of
from gateway.admission.queue import QueueEntry
from gateway.admission.tiers import (
    CALM_S,
    CALM_WAIT_S,
    MAX_DEBT,
    SHORTEN_WAIT_S,
    ShortAnswers,
    TierCredits,
    TierQueue,
)

COST = 100  # the largest
GOLD, STANDARD, BATCH = TIERS = (Tier("gold", 10, 0.5), Tier("standard", 0, 0.3), Tier("batch", -10, 0.1, 64))


def entry(priority: int, *, tenant: str = "a", cost: int = 10) -> QueueEntry:
    return QueueEntry(tenant, 1.0, priority, cost, cost)


def queue_of(*priorities: int, tiers: tuple[Tier, ...] = TIERS) -> TierQueue:
    queue = TierQueue(tiers)
    for priority in priorities:
        queue.add(entry(priority))
    return queue


def test_a_request_belongs_to_the_highest_tier_that_its_priority_reaches() -> None:
    assert [tier_of(TIERS, priority) for priority in (99, 10, 9, 0, -1, -10, -99)] == [0, 0, 1, 1, 2, 2, 2]


def test_tiers_are_read_from_settings() -> None:
    config = GatewayConfig(tier=("batch:-10:0.1:64", "gold:10:0.5", "standard:0:0.3"), secret="x" * 8)
    assert config.tiers() == TIERS
    for texts, what in (
        (("a:1:0.7", "b:2:0.7"), "add up to 1.4"),
        (("a:1:0.5", "a:2:0.5"), "the name a"),
        (("a:0:0.5", "b:0:0.5"), "the priority 0"),
    ):
        with pytest.raises(ConfigError, match=what) as wrong:
            parse_tiers(texts)
        assert wrong.value.field == "tier"
    for text in ("gold", "gold:1", "gold:1:2", "Gold:1:0.5", "gold:1:0.5:0"):
        with pytest.raises(ConfigError, match="NAME:PRIORITY:SHARE"):
            GatewayConfig.load(file=None, env={}, flags={"tier": text})


shares = st.lists(st.integers(0, 10), min_size=2, max_size=4).filter(lambda parts: sum(parts) > 0)


@settings(max_examples=40, deadline=None)
@given(shares, st.lists(st.integers(1, COST), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_a_tier_that_always_waits_gets_its_share_of_every_prefix(
    parts: list[int], costs: list[int], rng: object
) -> None:
    """Whichever of the other tiers wait, and whenever."""
    tiers = tuple(Tier(f"t{i}", -i, part / sum(parts)) for i, part in enumerate(parts))
    queue, got, total = TierQueue(tiers), Counter[int](), 0
    steady = rng.randrange(len(tiers))  # type: ignore[attr-defined]
    for turn in range(80):
        for i in range(len(tiers)):
            if i == steady or rng.random() < 0.5:  # type: ignore[attr-defined]
                queue.add(entry(-i, cost=rng.choice(costs)))  # type: ignore[attr-defined]
        out = queue.pop()
        assert out is not None, turn
        got[-out.priority] += out.expected_tokens
        total += out.expected_tokens
        assert got[steady] >= tiers[steady].share * total - 2 * len(tiers) * COST


@given(st.sampled_from((10, 0, -10)), st.integers(1, 30))
def test_a_tier_alone_borrows_everything_and_gives_it_back_at_once(borrower: int, count: int) -> None:
    queue = queue_of(*[borrower] * (count + 20))
    assert all((out := queue.pop()) is not None and out.priority == borrower for _ in range(count))
    other = 10 if borrower != 10 else 0
    for _ in range(20):
        queue.add(entry(other))
    turns = [out.priority for _ in range(10) if (out := queue.pop()) is not None]
    # The tier that comes back gets its share at once: no more waits than one turn of the borrower.
    assert other in turns[:2]
    assert turns.count(other) >= int(10 * TIERS[tier_of(TIERS, other)].share) - 1


def test_capacity_that_no_tier_has_reserved_goes_to_the_highest_tier_that_waits() -> None:
    queue = queue_of(*[10] * 200, *[0] * 200, *[-10] * 200)
    turns = Counter(out.priority for _ in range(200) if (out := queue.pop()) is not None)
    assert turns[10] == pytest.approx(120, abs=3)  # its half, and the tenth that is left
    assert turns[0] == pytest.approx(60, abs=3)
    assert turns[-10] == pytest.approx(20, abs=3)


def test_a_tier_without_a_share_gets_only_what_others_leave() -> None:
    queue = queue_of(0, 0, -10, -10, tiers=(Tier("a", 0, 0.5), Tier("b", -10, 0.0)))
    assert [out.priority for _ in range(4) if (out := queue.pop()) is not None] == [0, 0, -10, -10]


def test_long_answers_of_a_reserved_turn_cost_later_turns() -> None:
    queue = queue_of(*[10] * 50, *[0] * 50, tiers=(Tier("a", 10, 0.5), Tier("b", 0, 0.5)))
    gold = queue.pop()
    assert gold is not None
    assert gold.priority == 10
    queue.correct_count(gold, 100)
    later = [out.priority for _ in range(10) if (out := queue.pop()) is not None]
    assert later.count(10) < 5


def test_a_correction_takes_back_no_debt_of_a_large_turn() -> None:
    credits = TierCredits([0.1, 0.8])
    credits.on_turn(0, 10 * MAX_DEBT, [0, 1], reserved=True)
    debt = credits.values[0]
    for tokens in (1, 5, -1):
        credits.correct(0, tokens)
    assert credits.values[0] == debt + 1
    credits.correct(1, 100 * MAX_DEBT)
    assert credits.values[1] == -MAX_DEBT


@given(st.lists(st.tuples(st.sampled_from((11, 10, 3, 0, -10, -11)), st.sampled_from("ab"), st.integers(1, COST))))
def test_the_order_is_that_of_the_turns(requests: list[tuple[int, str, int]]) -> None:
    queue = TierQueue(TIERS)
    for priority, tenant, cost in requests:
        queue.add(entry(priority, tenant=tenant, cost=cost))
    expected = list(queue.in_order())
    assert [queue.pop() for _ in requests] == expected
    assert queue.pop() is None


@given(
    st.lists(st.tuples(st.sampled_from((10, 0, -10)), st.integers(1, COST)), min_size=1, max_size=40),
    st.sampled_from((10, 0, -10)),
)
def test_the_forecast_of_the_tokens_ahead_is_near_those_that_go_first(
    requests: list[tuple[int, int]], priority: int
) -> None:
    queue = TierQueue(TIERS)
    for each, cost in requests:
        queue.add(entry(each, cost=cost))
    mine = entry(priority, cost=1)
    forecast = queue.tokens_ahead(mine)
    queue.add(mine)
    first = sum(e.expected_tokens for e in itertools.takewhile(lambda e: e is not mine, queue.in_order()))
    total = sum(cost for _, cost in requests)
    assert 0 <= forecast.expected_tokens <= total
    assert forecast.requests <= len(requests)
    share = TIERS[tier_of(TIERS, priority)].share
    # Each tier may be ahead or behind of its share by two requests.
    assert abs(forecast.expected_tokens - first) <= 2 * len(TIERS) * COST / share + 0.5 * total


def test_a_full_queue_loses_a_request_of_the_lowest_tier_above_its_share_of_places() -> None:
    queue = queue_of(*[10] * 6, *[-10] * 4)
    victim = queue.find_victim(entry(10, tenant="b"))
    assert victim is not None
    assert victim.priority == -10
    queue = queue_of(*[10] * 9, -10)  # one in ten is the share of batch
    assert queue.find_victim(entry(-10, tenant="a")) is None  # its share is full, and no tenant has more
    kept = queue.find_victim(entry(10, tenant="b"))
    assert kept is not None
    assert kept.priority == 10
    queue = queue_of(*[10] * 10)
    back = queue.find_victim(entry(-10))  # batch has less than its share, gold more
    assert back is not None
    assert back.priority == 10


class QueueMachine(RuleBasedStateMachine):
    """Requests come, leave and have their turns in any order; each leaves once."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.model = TierQueue(TIERS), dict[QueueEntry, None]()

    @rule(priority=st.sampled_from((20, 10, 5, 0, -10, -20)), tenant=st.sampled_from("abc"), cost=st.integers(1, COST))
    def add(self, priority: int, tenant: str, cost: int) -> None:
        new = entry(priority, tenant=tenant, cost=cost)
        self.queue.add(new)
        self.model[new] = None

    @rule(index=st.integers(0, 50))
    def remove(self, index: int) -> None:
        if self.model:
            gone = list(self.model)[index % len(self.model)]
            del self.model[gone]
            assert self.queue.remove(gone)
            assert not self.queue.remove(gone)

    @rule(actual=st.integers(-COST, 2000))
    def pop(self, actual: int) -> None:
        expected = next(self.queue.in_order(), None)
        out = self.queue.pop()
        assert out is expected
        if out is not None:
            del self.model[out]
            self.queue.correct_count(out, actual)

    @rule(priority=st.sampled_from((10, 0, -10)))
    def evict(self, priority: int) -> None:
        if self.model and (victim := self.queue.find_victim(entry(priority))) is not None:
            assert victim in self.model

    @invariant()
    def holds(self) -> None:
        assert len(self.queue) == len(self.model)
        assert set(self.queue) == set(self.model)
        assert sum(n for _, n in self.queue.waiting_by_tier()) == len(self.model)
        assert set(self.queue.in_order()) == set(self.model)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_a_tier_is_overloaded_from_a_long_forecast_until_a_calm_time() -> None:
    answers = ShortAnswers()
    assert not answers.update(0.9 * SHORTEN_WAIT_S, 0.0)
    assert answers.update(SHORTEN_WAIT_S, 1.0)
    assert answers.update(0.0, 1.1)
    assert answers.update(CALM_WAIT_S, 5.0)  # not calm yet
    assert answers.update(0.0, 4.9 + CALM_S)
    assert not answers.update(0.0, 5.0 + CALM_S)
