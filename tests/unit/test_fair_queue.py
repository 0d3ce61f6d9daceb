"""FairQueue: shares by weight, priorities, and no starvation."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.queue import AGING_TURNS, FairQueue, QueueEntry

COST = 100  # the largest


def entry(tenant: str, *, weight: float = 1.0, priority: int = 0, cost: int = 10) -> QueueEntry:
    return QueueEntry(tenant, weight, priority, cost, cost)


def popped(queue: FairQueue, count: int) -> list[QueueEntry]:
    return [e for e in (queue.pop() for _ in range(count)) if e is not None]


@given(
    st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=5),
    st.lists(st.integers(1, COST), min_size=1, max_size=20),
    st.randoms(use_true_random=False),
)
def test_tenants_that_always_wait_get_their_shares(weights: list[float], costs: list[int], rng: object) -> None:
    """After any number of turns two tenants differ, by weight, by at most two requests."""
    queue, got = FairQueue(), Counter[str]()
    for number, weight in enumerate(weights):
        for _ in range(3):
            queue.add(entry(str(number), weight=weight, cost=rng.choice(costs)))  # type: ignore[attr-defined]
    for _ in range(200):
        out = queue.pop()
        assert out is not None
        got[out.tenant] += out.expected_tokens
        queue.add(entry(out.tenant, weight=out.weight, cost=rng.choice(costs)))  # type: ignore[attr-defined]
    shares = [got[str(number)] / weight for number, weight in enumerate(weights)]
    assert max(shares) - min(shares) <= 2 * COST / min(weights)


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-3, 3), st.integers(1, COST)), max_size=30),
    st.lists(st.tuples(st.sampled_from("bcdef"), st.integers(4, 9), st.integers(1, COST)), min_size=1, max_size=8),
)
def test_no_request_starves_however_many_of_higher_priority_come(
    waiting: list[tuple[str, int, int]], coming: list[tuple[str, int, int]]
) -> None:
    queue = FairQueue()
    for tenant, priority, cost in waiting:
        queue.add(entry(tenant, priority=priority, cost=cost))
    victim = entry("a", priority=-9, cost=COST)
    queue.add(victim)
    # On its turns, every other tenant gets as much as stands before the victim before it is the victim's turn.
    before = sum(cost for tenant, _, cost in waiting if tenant == "a") + COST
    bound = AGING_TURNS * (len(waiting) + 1 + 6 * (before + COST))
    for turn in range(bound):
        tenant, priority, cost = coming[turn % len(coming)]
        queue.add(entry(tenant, priority=priority, cost=cost))
        if queue.pop() is victim:
            return
    raise AssertionError("the request starved")


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.sampled_from("abc"), st.integers(-2, 2), st.integers(1, COST)),
            st.tuples(st.just("pop"), st.just(""), st.just(0), st.just(0)),
            st.tuples(st.just("remove"), st.just(""), st.integers(0, 50), st.just(0)),
            st.tuples(st.just("correct"), st.sampled_from("abc"), st.just(0), st.integers(-COST, COST)),
        ),
        max_size=80,
    )
)
def test_each_added_request_leaves_the_queue_once(steps: list[tuple[str, str, int, int]]) -> None:
    queue, inside, out = FairQueue(), [], []
    for what, tenant, number, cost in steps:
        if what == "add":
            inside.append(entry(tenant, priority=number, cost=cost))
            queue.add(inside[-1])
        elif what == "pop":
            top = queue.pop()
            assert (top is None) == (not inside)
            if top is not None:
                inside.remove(top)
                out.append(top)
        elif what == "remove" and inside:
            gone = inside.pop(number % len(inside))
            assert queue.remove(gone)
            assert not queue.remove(gone)
        elif what == "correct":
            queue.correct_count(entry(tenant), cost)
        assert len(queue) == len(inside)
        assert set(queue) == set(inside)
        probe = entry("a", cost=7)
        ahead = queue.tokens_ahead(probe)
        assert 0 <= ahead.own_expected_tokens <= ahead.expected_tokens <= sum(e.expected_tokens for e in inside)
    assert len({id(e) for e in out}) == len(out)
    assert set(popped(queue, len(inside))) == set(inside)
    assert queue.pop() is None


def test_higher_priority_first_and_of_equals_the_oldest() -> None:
    queue = FairQueue()
    entries = [entry("t", priority=p) for p in (0, 2, 0, 1, 2)]
    for e in entries:
        queue.add(e)
    order = popped(queue, 3)
    assert order == [entries[1], entries[4], entries[3]]


def test_a_tenant_that_becomes_active_again_gets_no_credit() -> None:
    queue = FairQueue()
    for _ in range(50):
        queue.add(entry("busy"))
    popped(queue, 30)
    for _ in range(20):
        queue.add(entry("late"))
    got = Counter(e.tenant for e in popped(queue, 20))
    assert abs(got["busy"] - got["late"]) <= 1


def test_the_used_tokens_of_a_request_count() -> None:
    queue = FairQueue()
    for tenant in ("long", "short") * 20:
        queue.add(entry(tenant))
    got = Counter[str]()
    for _ in range(24):
        out = queue.pop()
        assert out is not None
        got[out.tenant] += 1
        queue.correct_count(out, 20 if out.tenant == "long" else 0)  # thrice as many as was thought
    assert got["short"] == 3 * got["long"]


def test_tokens_ahead_counts_own_requests_and_the_fair_part_of_others() -> None:
    queue = FairQueue()
    for _ in range(100):
        queue.add(entry("flood"))
    assert queue.tokens_ahead(entry("small")).expected_tokens == 0
    for _ in range(3):
        queue.add(entry("small"))
    ahead = queue.tokens_ahead(entry("small"))
    assert (ahead.own_expected_tokens, ahead.expected_tokens) == (30, 60)
    assert queue.tokens_ahead(entry("flood")).own_expected_tokens == 1000
    assert queue.tokens_ahead(entry("small", priority=1)).expected_tokens == 0
    for _ in range(4):
        queue.add(entry("vip", priority=5))
    assert queue.tokens_ahead(entry("new")).expected_tokens == 40


def test_the_victim_is_of_the_tenant_with_the_most_waiting_tokens() -> None:
    queue = FairQueue()
    flood = [entry("flood") for _ in range(5)]
    for e in (*flood, entry("other")):
        queue.add(e)
    assert queue.find_victim(entry("new")) is flood[-1]
    assert queue.find_victim(entry("flood")) is None
    assert queue.find_victim(entry("new", cost=50)) is None
    assert queue.find_victim(entry("new", cost=60, weight=4.0)) is flood[-1]


def test_counters_of_idle_tenants_are_bounded() -> None:
    queue = FairQueue()
    for number in range(10_000):
        queue.add(entry(str(number)))
        queue.pop()
    assert len(queue._idle_counters) <= 4096
    assert math.isfinite(queue._min_counter)


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(-1, 1), st.integers(1, COST), st.sampled_from([0.5, 1.0, 3.0])),
        max_size=40,
    ),
    st.integers(0, 6),
)
def test_the_order_looked_ahead_is_the_order_of_the_turns(
    requests: list[tuple[str, int, int, float]], served: int
) -> None:
    queue = FairQueue()
    weights: dict[str, float] = {}
    for tenant, priority, cost, weight in requests:
        weight = weights.setdefault(tenant, weight)
        queue.add(entry(tenant, priority=priority, cost=cost, weight=weight))
    popped(queue, served)
    ahead = list(queue.in_order())
    assert ahead == list(queue.in_order()), "looking changes nothing"
    assert ahead == popped(queue, len(queue))
