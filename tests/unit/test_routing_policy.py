"""Properties of the routing policies, over random pods and requests, and of PodView, Bookings and InFlightPrompts."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.types import PodLoad, Role
from gateway.pods.view import Bookings, PodView, fill_in_from_peers
from gateway.routing.local_index import InFlightPrompts
from gateway.routing.policy import (
    AFFINITY_RATIO,
    AFFINITY_S,
    MAX_OPTIONS,
    QUEUE_EXTERNALITY,
    TIE_RATIO,
    TIE_S,
    CostPolicy,
    PodOption,
    PullOffer,
    RendezvousHash,
    RoutingRequest,
)
from simulator.policies import POLICIES
from tests.rigs.engine.comparisons import shared

NOW = 100.0


def view(name: str, *, capacity: int = 100_000, role: Role = Role.PREFILL, **load: float) -> PodView:
    pod = PodView(name, block_size=16, max_request_tokens=capacity, num_blocks=6_000, role=role)
    pod.apply_report(PodLoad(**{"prefill_rate": 1000.0, "free_blocks": 5_000, **load}), NOW)  # type: ignore[arg-type]
    return pod


def cost_of(pod: PodView, request: RoutingRequest) -> float:
    """Returns the cost by the formula of the module docstring."""
    expected_hits = max(
        request.device_hits.get(pod.name, 0) + request.host_hits.get(pod.name, 0),
        request.inflight_hits.get(pod.name, 0),
    )
    return (
        pod.queue_s(NOW)
        + max(1, request.prompt_len - expected_hits) * (1 + QUEUE_EXTERNALITY) * pod.prefill_s_per_token
    )


pods = st.lists(
    st.tuples(st.integers(0, 20_000), st.sampled_from([200.0, 1000.0, 8000.0]), st.sampled_from([300, 4_000, 100_000])),
    min_size=1,
    max_size=12,
)


@given(pods, st.integers(1, 5_000), st.data())
def test_the_first_option_is_a_near_tie_of_the_cheapest_pod_that_is_large_enough(
    shapes: list[tuple[int, float, int]], length: int, data: st.DataObject
) -> None:
    views = [
        view(f"p{i}", capacity=capacity, queued_tokens=queued, prefill_rate=rate)
        for i, (queued, rate, capacity) in enumerate(shapes)
    ]
    some = st.dictionaries(st.sampled_from([v.name for v in views]), st.integers(0, length - 1))
    request = RoutingRequest(
        prompt_len=length, max_tokens=8, device_hits=data.draw(some), inflight_hits=data.draw(some)
    )
    options = CostPolicy(random.Random(0)).rank_prefill_pods(request, views, NOW)
    fit = [v for v in views if v.max_request_tokens >= length]
    assert {option.view for option in options} <= set(fit)
    assert len({option.view.name for option in options}) == len(options) == min(len(fit), len(options))
    if not fit:
        assert options == []
        return
    least = min(cost_of(v, request) for v in fit)
    assert options[0].cost_s <= least * TIE_RATIO + TIE_S + 1e-9
    assert all(option.missing_tokens + option.hit_tokens == length and option.missing_tokens >= 1 for option in options)
    assert [o.cost_s for o in options] == pytest.approx([cost_of(o.view, request) for o in options])


@given(st.integers(1, 4_000), st.integers(0, 4_000), st.integers(0, 20_000), st.integers(1, 5_000))
def test_more_hits_never_raise_the_cost_and_a_longer_queue_never_lowers_it(
    length: int, held: int, queued: int, more: int
) -> None:
    def cost(queued_tokens: int, tokens: int, **others: dict[str, int]) -> float:
        request = RoutingRequest(prompt_len=length, max_tokens=8, device_hits={"p": tokens}, **others)  # type: ignore[arg-type]
        return (
            CostPolicy(random.Random(0))
            .rank_prefill_pods(request, [view("p", queued_tokens=queued_tokens)], NOW)[0]
            .cost_s
        )

    base = cost(queued, held)
    assert cost(queued, held + more) <= base
    assert cost(queued + more, held) > base
    assert cost(queued, held, inflight_hits={"p": held + more}) <= base
    assert cost(queued, held, host_hits={"p": more}) <= base
    on_disk = cost(queued, held, disk_hits={"p": more})
    assert cost(queued, held, host_hits={"p": more}) <= on_disk <= base


def test_the_disk_counts_at_its_measured_rate_and_a_slow_one_not_at_all() -> None:
    def cost(disk_rate: float, **hits: dict[str, int]) -> float:
        request = RoutingRequest(prompt_len=2_001, max_tokens=8, **hits)  # type: ignore[arg-type]
        pods = [view("p", prefill_rate=1_000.0, disk_rate=disk_rate)]
        return CostPolicy(random.Random(0)).rank_prefill_pods(request, pods, NOW)[0].cost_s

    computed = cost(0.0)
    assert cost(10_000.0, disk_hits={"p": 2_000}) == pytest.approx(0.2 + 0.001 * (1 + QUEUE_EXTERNALITY))
    assert cost(500.0, disk_hits={"p": 2_000}) == pytest.approx(computed), "the pod computes what it reads more slowly"
    assert cost(0.0, disk_hits={"p": 2_000}) < computed


def test_a_read_from_the_shared_tier_counts_at_its_measured_rate_beyond_what_the_pod_has() -> None:
    def option(held: int = 0, **load: Any) -> PodOption:
        request = RoutingRequest(prompt_len=2_001, max_tokens=8, device_hits={"p": held}, shared_tokens=2_000)
        pods = [view("p", prefill_rate=1_000.0, **load)]
        return CostPolicy(random.Random(0)).rank_prefill_pods(request, pods, NOW)[0]

    one = 0.001 * (1 + QUEUE_EXTERNALITY)
    computed = option()
    assert computed.cost_s == pytest.approx(2_001 * one), "a pod without the tier"
    fast = option(shared_cache=True, shared_rate=10_000.0)
    assert fast.cost_s == pytest.approx(0.2 + one)
    assert (fast.hit_tokens, fast.load_units) == (2_000, 1)
    assert option(1_500, shared_cache=True, shared_rate=10_000.0).cost_s == pytest.approx(0.05 + one)
    slow = option(shared_cache=True, shared_rate=500.0)
    assert (slow.cost_s, slow.load_units) == (computed.cost_s, 2_001), "the pod computes what it reads more slowly"
    assert fast.cost_s < option(shared_cache=True).cost_s < computed.cost_s


def test_an_unmeasured_pod_reads_the_shared_tier_as_fast_as_its_peers() -> None:
    measured, new = view("a", shared_cache=True, shared_rate=5_000.0), view("b", shared_cache=True)
    fill_in_from_peers([measured, new])
    assert new.shared_s_per_token == measured.shared_s_per_token == 1 / 5_000.0


def test_a_busy_holder_loses_its_prompts_to_a_pod_that_reads_them() -> None:
    def chosen(queued: int, **load: Any) -> str:
        request = RoutingRequest(prompt_len=2_001, max_tokens=8, device_hits={"holder": 2_000}, shared_tokens=2_000)
        pods = [view(name, prefill_rate=1_000.0, queued_tokens=tokens, **load) for name, tokens in queues(queued)]
        return CostPolicy(random.Random(0)).rank_prefill_pods(request, pods, NOW)[0].view.name

    def queues(queued: int) -> list[tuple[str, int]]:
        return [("holder", queued), ("other", 0)]

    assert chosen(1_000) == "holder"
    assert chosen(1_000, shared_cache=True, shared_rate=10_000.0) == "other"
    assert chosen(0, shared_cache=True, shared_rate=10_000.0) == "holder"


def test_the_faster_of_a_pull_and_a_read_is_planned() -> None:
    def offer(shared_rate: float) -> PullOffer | None:
        request = RoutingRequest(
            prompt_len=2_001, max_tokens=8, shared_tokens=2_000, pull_offers={"p": PullOffer(2_000, 0.1, "holder")}
        )
        pods = [view("p", prefill_rate=1_000.0, shared_cache=True, shared_rate=shared_rate)]
        return CostPolicy(random.Random(0)).rank_prefill_pods(request, pods, NOW)[0].pull_offer

    assert offer(40_000.0) is None
    assert offer(10_000.0) is not None


@pytest.mark.parametrize("side", ["prefill", "decode"])
@given(st.text(min_size=1, max_size=20), st.lists(st.integers(0, 30_000), min_size=2, max_size=8))
def test_affinity_decides_among_near_ties_only(side: str, affinity: str, queues: list[int]) -> None:
    role = Role.PREFILL if side == "prefill" else Role.BOTH
    views = [view(f"p{i}", role=role, queued_tokens=queued) for i, queued in enumerate(queues)]
    request = RoutingRequest(prompt_len=500, max_tokens=8, affinity=affinity)
    policy = CostPolicy(random.Random(len(affinity)))
    choose = policy.rank_prefill_pods if side == "prefill" else policy.rank_decode_pods
    chosen = choose(request, views, NOW)[0].view
    plain = {o.view.name: o.cost_s for o in choose(replace(request, affinity=""), views, NOW)}
    slack = TIE_RATIO / (1 - AFFINITY_RATIO)
    assert plain[chosen.name] <= min(plain.values()) * slack + (AFFINITY_S + TIE_S) * slack + 1e-9
    for pod in views:
        pod.apply_report(PodLoad(prefill_rate=1000.0, free_blocks=5_000), NOW)
    assert len({choose(request, views, NOW)[0].view.name for _ in range(10)}) == 1


def test_affinities_are_spread_over_pods() -> None:
    views = [view(f"p{i}") for i in range(4)]
    policy = CostPolicy(random.Random(1))
    request = RoutingRequest(prompt_len=500, max_tokens=8)
    homes = Counter(
        policy.rank_prefill_pods(replace(request, affinity=f"s{i}"), views, NOW)[0].view.name for i in range(400)
    )
    assert min(homes.values()) > 60


@given(st.integers(1, 9), st.integers(1, 64))
def test_equal_requests_of_one_gateway_are_spread_evenly(num_pods: int, burst: int) -> None:
    views = [view(f"p{i}") for i in range(num_pods)]
    policy = CostPolicy(random.Random(burst))
    for i in range(burst):
        option = policy.rank_prefill_pods(RoutingRequest(prompt_len=900, max_tokens=8), views, NOW)[0]
        option.view.prefill_bookings.add(str(i), option.missing_tokens, NOW)
    assert max(len(v.prefill_bookings) for v in views) - min(len(v.prefill_bookings) for v in views) <= 1


def test_a_hot_prefix_is_computed_on_other_pods_once_its_holder_has_a_long_queue() -> None:
    views = {f"p{i}": view(f"p{i}") for i in range(4)}
    held, got = {"p0": 300}, Counter[str]()
    policy = CostPolicy(random.Random(2))
    for i in range(400):  # 6,000 tokens a second or more, for pods of 1,000 each
        now = NOW + i / 60
        option = policy.rank_prefill_pods(
            RoutingRequest(prompt_len=400, max_tokens=8, device_hits=held), list(views.values()), now
        )[0]
        queued = option.view.queue_s(now) * 1000 + option.missing_tokens
        option.view.apply_report(PodLoad(prefill_rate=1000.0, free_blocks=5_000, queued_tokens=int(queued)), now)
        held[option.view.name] = 300
        got[option.view.name] += 1
    assert min(got[name] for name in views) > 50
    queues = [v.queue_s(NOW + 400 / 60) for v in views.values()]
    assert max(queues) - min(queues) < 0.3 * (1 + QUEUE_EXTERNALITY)  # at most the worth of computing the prefix again


@pytest.mark.parametrize("name", POLICIES)
def test_a_common_first_block_draws_all_prompts_to_one_pod_only_with_prefix_only(name: str) -> None:
    views = [view(f"p{i}") for i in range(4)]
    policy = POLICIES[name](random.Random(3))
    for i in range(80):
        option = policy.rank_prefill_pods(
            RoutingRequest(prompt_len=900, max_tokens=8, device_hits={"p2": 16}), views, NOW
        )[0]
        option.view.prefill_bookings.add(str(i), option.missing_tokens, NOW)
    most = max(len(v.prefill_bookings) for v in views)
    assert most == 80 if name == "prefix_only" else most <= 22


def test_a_pull_is_used_if_it_is_faster_than_computing() -> None:
    views = [view("p0"), view("p1")]
    policy = CostPolicy(random.Random(4))

    def best(pull: PullOffer) -> PodOption:
        return policy.rank_prefill_pods(
            RoutingRequest(prompt_len=2_000, max_tokens=8, pull_offers={"p1": pull}), views, NOW
        )[0]

    assert best(PullOffer(1_500, 0.05)).view.name == "p1"
    slow = {
        policy.rank_prefill_pods(
            RoutingRequest(prompt_len=2_000, max_tokens=8, pull_offers={"p1": PullOffer(1_500, 60.0)}), views, NOW
        )[0].cost_s
    }
    assert slow == {cost_of(views[0], RoutingRequest(prompt_len=2_000, max_tokens=8))}


# ---- decode


@pytest.mark.parametrize("pods", [2, 200])
def test_a_conversation_stays_with_its_kv_while_costs_are_near_ties(pods: int) -> None:
    """Decoding 256 tokens takes seconds, moving the KV milliseconds. Within a near-tie the holder goes first."""
    policy = CostPolicy(random.Random(6))
    views = [view(f"d{i}", role=Role.DECODE) for i in range(pods)]
    for v in views:
        v.apply_report(PodLoad(free_blocks=1000, step_s=0.01, step_slope_s=1e-4, transfer_rate=1e6), NOW)
    request = RoutingRequest(prompt_len=500, max_tokens=256, device_hits={"d1": 480})
    assert {policy.rank_decode_pods(request, views, NOW)[0].view.name for _ in range(20)} == {"d1"}
    views[1].apply_report(
        PodLoad(running=60, free_blocks=1000, step_s=0.01, step_slope_s=1e-4, transfer_rate=1e6), NOW + 1
    )
    assert policy.rank_decode_pods(request, views, NOW + 1)[0].view.name != "d1"


def test_decode_pods_without_room_are_a_last_resort() -> None:
    policy = CostPolicy(random.Random(5))
    full, busy = (
        view("d0", role=Role.DECODE, free_blocks=2),
        view("d1", role=Role.DECODE, free_blocks=4_000, running=50),
    )
    request = RoutingRequest(prompt_len=1_000, max_tokens=64)
    assert [o.view.name for o in policy.rank_decode_pods(request, [full, busy], NOW)] == ["d1", "d0"]
    busy.apply_report(PodLoad(free_blocks=3, running=50), NOW)
    assert policy.rank_decode_pods(request, [full, busy], NOW)[0].view is full


def test_a_cached_prefix_is_weighed_against_the_number_of_sequences() -> None:
    policy = CostPolicy(random.Random(6))
    a, b = (view(name, role=Role.DECODE, step_s=0.01, step_slope_s=0.001, transfer_rate=1e5) for name in ("a", "b"))
    request = RoutingRequest(prompt_len=50_000, max_tokens=100, device_hits={"a": 49_000})
    assert policy.rank_decode_pods(request, [a, b], NOW)[0].view is a
    for i in range(3):  # 0.49 s of moving saved, 0.2 s lost by each neighbour
        a.decode_bookings.add(str(i), 1_000, NOW)
    assert policy.rank_decode_pods(request, [a, b], NOW)[0].view is b


def test_a_pod_that_has_not_decoded_yet_is_as_fast_as_its_peers() -> None:
    policy = CostPolicy(random.Random(6))
    holds = view("a", role=Role.DECODE, step_s=0.05, step_slope_s=0.01, transfer_rate=1e5)
    new = view("b", role=Role.DECODE)
    fill_in_from_peers([holds, new])
    request = RoutingRequest(prompt_len=600, max_tokens=4, device_hits={"a": 592})
    assert {policy.rank_decode_pods(request, [holds, new], NOW)[0].view.name for _ in range(20)} == {"a"}
    new.apply_report(PodLoad(free_blocks=4_000, step_s=0.01, step_slope_s=0.001), NOW)
    fill_in_from_peers([holds, new])
    assert policy.rank_decode_pods(request, [holds, new], NOW)[0].view is new


def test_small_differences_of_measured_steps_do_not_outweigh_cached_kv() -> None:
    policy = CostPolicy(random.Random(6))
    holds = view("a", role=Role.DECODE, step_s=0.03, step_slope_s=0.002, transfer_rate=1e5)
    faster = view("b", role=Role.DECODE, step_s=0.02, step_slope_s=0.002, transfer_rate=1e5)
    request = RoutingRequest(prompt_len=600, max_tokens=256, device_hits={"a": 592})
    costs = {option.view.name: option.cost_s for option in policy.rank_decode_pods(request, [holds, faster], NOW)}
    assert costs["b"] - costs["a"] == pytest.approx(592 / 1e5)


def test_a_pod_of_role_both_costs_its_prompt_queue() -> None:
    policy = CostPolicy(random.Random(7))
    a, b = view("a", role=Role.BOTH, queued_tokens=9_000), view("b", role=Role.BOTH, running=20)
    option = policy.rank_decode_pods(RoutingRequest(prompt_len=500, max_tokens=8), [a, b], NOW)[0]
    assert (option.view, option.load_units) == (b, 500)


# ---- other policies


def test_round_robin_takes_turns_and_least_loaded_the_shortest_queue() -> None:
    views = [view(f"p{i}", queued_tokens=900 * (i != 1)) for i in range(3)]
    request = RoutingRequest(prompt_len=100, max_tokens=8, device_hits={"p0": 90})
    turns = POLICIES["round_robin"](random.Random(8))
    assert len({turns.rank_prefill_pods(request, views, NOW)[0].view.name for _ in range(3)}) == 3
    least = POLICIES["least_loaded"](random.Random(8))
    assert {least.rank_prefill_pods(request, views, NOW)[0].view.name for _ in range(9)} == {"p1"}


@given(st.lists(st.binary(min_size=16, max_size=16), min_size=20, max_size=60), st.integers(2, 7))
def test_rendezvous_hashing_is_equal_in_all_gateways_and_bounds_the_load(keys: list[bytes], num_pods: int) -> None:
    views = [view(f"p{i}") for i in range(num_pods)]
    first, second = RendezvousHash(random.Random(1)), RendezvousHash(random.Random(2))
    for i, key in enumerate(keys):
        request = RoutingRequest(prompt_len=100, max_tokens=8, prefix_key=key)
        option = first.rank_prefill_pods(request, views, NOW)[0]
        assert option.view is second.rank_prefill_pods(request, views, NOW)[0].view
        option.view.prefill_bookings.add(str(i), 100, NOW)
        assert len(option.view.prefill_bookings) <= 1.25 * (i + 1) / num_pods + 1


def test_a_ranking_of_a_thousand_equal_pods_has_at_most_max_options() -> None:
    views = [view(f"p{i}") for i in range(1000)]
    policy = CostPolicy(random.Random(9))
    offers = [
        {o.view.name for o in policy.rank_prefill_pods(RoutingRequest(prompt_len=9, max_tokens=1), views, NOW)}
        for _ in range(2)
    ]
    assert [len(offer) for offer in offers] == [MAX_OPTIONS] * 2
    assert offers[0] != offers[1]


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_returns_options_for_all_of_a_thousand_pods(name: str) -> None:
    views = [view(f"p{i}", queued_tokens=i) for i in range(1000)]
    policy, request = (
        POLICIES[name](random.Random(9)),
        RoutingRequest(prompt_len=9, max_tokens=1, device_hits={"p7": 8}),
    )
    for side in (policy.rank_prefill_pods, policy.rank_decode_pods):
        assert 1 <= len(side(request, views, NOW)) <= MAX_OPTIONS + 1  # a sample, and the pod with the most hits


# ---- views, bookings and prompts in flight


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 4), st.integers(0, 99)),
            st.tuples(st.just("shrink"), st.integers(0, 4), st.integers(0, 99)),
            st.tuples(st.just("remove"), st.integers(0, 4), st.just(0)),
            st.tuples(st.just("mark"), st.integers(0, 30), st.just(0)),
        ),
        max_size=40,
    )
)
def test_bookings_are_the_sums_of_the_open_entries(steps: list[tuple[str, int, int]]) -> None:
    bookings, model, since = Bookings(), dict[int, tuple[int, int, float]](), float("-inf")
    for now, (what, key, tokens) in enumerate(steps):
        if what == "add":
            bookings.add(str(key), tokens, now)
            model[key] = (tokens, tokens, now)
        elif what == "shrink":
            bookings.shrink(str(key), tokens)
            if key in model and tokens < model[key][0]:
                model[key] = (tokens, *model[key][1:])
        elif what == "remove":
            bookings.remove(str(key))
            model.pop(key, None)
        else:
            since = key
            bookings.mark_reported(since)
        fresh = [entry for entry in model.values() if entry[2] >= since]
        assert bookings.tokens == sum(left for left, _, _ in model.values())
        assert bookings.unreported_tokens == sum(left for left, _, _ in fresh)
        assert bookings.unreported_booked == sum(booked for _, booked, _ in fresh)
        assert (bookings.unreported_count, len(bookings)) == (len(fresh), len(model))


def test_queue_s_is_the_report_minus_computed_plus_booked_tokens() -> None:
    pod = PodView("p", block_size=16, max_request_tokens=10_000, num_blocks=1_000)
    pod.prefill_bookings.add("a", 500, 1.0)
    pod.apply_report(PodLoad(queued_tokens=500, prefill_rate=1000.0), 2.0)
    assert pod.queue_s(2.0) == pytest.approx(0.5)
    assert pod.queue_s(2.4) == pytest.approx(0.1)
    pod.prefill_bookings.add("b", 300, 2.5)
    assert pod.queue_s(3.0) == pytest.approx(0.3)
    pod.prefill_bookings.shrink("b", 100)
    assert pod.queue_s(3.0) == pytest.approx(0.1)
    pod.apply_report(PodLoad(queued_tokens=900, prefill_rate=1000.0), 1.5)  # an older report that arrives later
    assert pod.queue_s(3.0) == pytest.approx(0.1)
    pod.prefill_bookings.remove("b")
    assert pod.queue_s(3.0) == 0.0


# Chains that share prefixes: a path in a tree, each hash names the path to it.
paths = st.lists(st.integers(0, 1), min_size=1, max_size=14)


def chain(path: list[int]) -> list[bytes]:
    return ["".join(map(str, path[: i + 1])).encode() for i in range(len(path))]


@given(st.lists(st.tuples(st.integers(0, 3), paths), max_size=12), st.sets(st.integers(0, 11)), paths)
def test_match_blocks_finds_the_longest_common_prefix_per_pod(
    prompts: list[tuple[int, list[int]]], done: set[int], path: list[int]
) -> None:
    inflight, model = InFlightPrompts(), dict[int, tuple[int, list[int]]]()
    for i, (pod, other) in enumerate(prompts):
        inflight.add(str(i), f"p{pod}", chain(other))
        model[i] = (pod, other)
    for i in done:
        inflight.remove(str(i))
        model.pop(i, None)
    expected: dict[str, int] = {}
    for pod, other in model.values():
        if same := shared(path, other):
            expected[f"p{pod}"] = max(expected.get(f"p{pod}", 0), same)
    assert inflight.match_blocks(chain(path)) == expected
    for i in range(len(prompts)):
        inflight.remove(str(i))
    assert (len(inflight), inflight.match_blocks(chain(path))) == (0, {})
