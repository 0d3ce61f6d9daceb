"""offer_pulls: the prefixes that prefill pods could pull from other pods."""

from __future__ import annotations

import random

import pytest

from common.types import PodLoad
from gateway.pods.view import PodView
from gateway.routing.policy import CONNECT_S, CostPolicy, PullOffer, RoutingRequest, offer_pulls

BLOCK_BYTES = 1 << 20
SIZE = 16


def view(name: str, *, rate: float = 1_000.0, pulls: bool = True, **pair_rates: float) -> PodView:
    made = PodView(name, block_size=SIZE, max_request_tokens=100_000, num_blocks=10_000)
    made.apply_report(PodLoad(free_blocks=10_000, prefill_rate=rate, pull_s=0.01), 0.0)
    made.pulls, made.pair_rates = pulls, pair_rates
    return made


def test_a_pull_costs_its_latency_and_the_missing_bytes_at_the_pairs_rate() -> None:
    holder, lacking = view("h", p=1e9), view("p")
    found = offer_pulls({"h": 1600, "p": 800}, {"h": 1600, "p": 800}, [holder, lacking], [holder, lacking], BLOCK_BYTES)
    assert found == {"p": PullOffer(1600, pytest.approx(0.01 + 50 * BLOCK_BYTES / 1e9), "h")}


@pytest.mark.parametrize(("held", "pages"), [(0, 100 + 8 + 64), (1440, 10 + 8 + 10), (1552, 3 + 3 + 3)])
def test_the_pages_at_the_end_of_each_window_move_too(held: int, pages: int) -> None:
    holder, lacking = view("h", p=1e9), view("p", rate=10.0)
    hits = {"h": 1600, "p": held}
    found = offer_pulls(hits, hits, [lacking], [holder], BLOCK_BYTES, window_tails=(8, 64))
    assert found["p"].predicted_s == pytest.approx(0.01 + pages * BLOCK_BYTES / 1e9)


def test_the_state_at_the_end_of_a_prefix_moves_too() -> None:
    holder, lacking = view("h", p=1e9), view("p", rate=10.0)
    hits = {"h": 1600}
    found = offer_pulls(hits, hits, [lacking], [holder], BLOCK_BYTES, state_pages=196)
    assert found["p"].predicted_s == pytest.approx(0.01 + (100 + 196) * BLOCK_BYTES / 1e9)


def test_no_pull_is_offered_if_computing_is_faster() -> None:
    holder, lacking = view("h", p=1e9), view("p", rate=100_000.0)
    assert offer_pulls({"h": 1600}, {"h": 1600}, [lacking], [holder], BLOCK_BYTES) == {}


def test_pods_that_cannot_pull_or_will_have_the_prefix_get_no_offer() -> None:
    holder = view("h", p=1e9, q=1e9)
    pods = [view("p", pulls=False), view("q")]
    assert offer_pulls({"h": 1600}, {"h": 1600, "q": 1600}, pods, [holder], BLOCK_BYTES) == {}
    assert offer_pulls({}, {}, pods, [holder], BLOCK_BYTES) == {}


def test_the_offer_names_the_holder_that_saves_most() -> None:
    far, near = view("far", p=2e7), view("near", p=1e9)
    held = {"far": 1600, "near": 1440}
    assert offer_pulls(held, held, [view("p")], [far, near], BLOCK_BYTES)["p"].holder == "near"


def test_an_unknown_pair_has_the_mean_rate_and_connects_first() -> None:
    holder, lacking = view("h", other=1e9), view("p")
    seconds = offer_pulls({"h": 1600}, {"h": 1600}, [lacking], [holder], BLOCK_BYTES)["p"].predicted_s
    assert seconds == pytest.approx(0.01 + CONNECT_S + 100 * BLOCK_BYTES / 1e9)
    assert offer_pulls({"h": 1600}, {"h": 1600}, [lacking], [view("h")], BLOCK_BYTES) == {}  # no rate is known


def test_tokens_of_a_pulled_prefix_are_not_booked() -> None:
    holder, idle = view("h", p=1e9), view("p")
    holder.prefill_bookings.add("queue", 50_000, 1.0)
    held = {"h": 1600}
    found = offer_pulls(held, held, [holder, idle], [holder, idle], BLOCK_BYTES)
    request = RoutingRequest(prompt_len=1700, max_tokens=8, device_hits=held, pull_offers=found)
    best = CostPolicy(random.Random(0)).rank_prefill_pods(request, [holder, idle], 1.0)[0]
    assert (best.view.name, best.missing_tokens, best.hit_tokens, best.pull_offer) == ("p", 100, 1600, found["p"])


def test_a_pod_that_pulls_less_goes_first_among_near_ties() -> None:
    holder = view("h", p=1e9, q=1e9)
    holder.prefill_bookings.add("queue", 50_000, 1.0)
    some, none = view("p"), view("q")
    held = {"h": 64, "p": 48}
    found = offer_pulls(held, held, [some, none], [holder, some, none], 1000)
    assert set(found) == {"p", "q"}
    policy = CostPolicy(random.Random(0))
    request = RoutingRequest(prompt_len=100, max_tokens=8, device_hits=held, pull_offers=found)
    assert {policy.rank_prefill_pods(request, [none, some], 1.0)[0].view.name for _ in range(20)} == {"p"}
