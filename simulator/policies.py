"""The routing policies that a simulation can compare: the gateway's own and three simple ones."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence

from gateway.pods.view import PodView
from gateway.routing.policy import MIN_OPTIONS, CostPolicy, PodOption, RoutingPolicy, RoutingRequest, make_option


class RoundRobin:
    """Sends each request to the next pod."""

    uses_shared_bookings = False

    def __init__(self, rng: random.Random) -> None:
        self._turns = {"prefill": rng.randrange(1 << 16), "decode": rng.randrange(1 << 16)}

    def rank_prefill_pods(self, request: RoutingRequest, views: Sequence[PodView], now: float) -> list[PodOption]:
        """Returns the pods in their order, from the next one on."""
        return self._next("prefill", request, [v for v in views if v.max_request_tokens >= request.prompt_len])

    def rank_decode_pods(self, request: RoutingRequest, views: Sequence[PodView], now: float) -> list[PodOption]:
        """Returns the pods in their order, from the next one on."""
        return self._next(
            "decode", request, [v for v in views if v.max_request_tokens >= request.prompt_len + request.max_tokens]
        )

    def _next(self, side: str, request: RoutingRequest, views: list[PodView]) -> list[PodOption]:
        if not views:
            return []
        turn = self._turns[side] % len(views)
        self._turns[side] += 1
        hits = request.expected_hits()
        return [make_option(request, hits, view) for view in (views[turn:] + views[:turn])[:MIN_OPTIONS]]


class LeastLoaded:
    """Prefers the shortest queue and the fewest sequences; cached prefixes do not count."""

    uses_shared_bookings = True

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def rank_prefill_pods(self, request: RoutingRequest, views: Sequence[PodView], now: float) -> list[PodOption]:
        """Returns the pods by their queues in seconds."""
        fit = [view for view in views if view.max_request_tokens >= request.prompt_len]
        return self._order(request, [(view.queue_s(now), view, None, view.prefill_s_per_token) for view in fit])

    def rank_decode_pods(self, request: RoutingRequest, views: Sequence[PodView], now: float) -> list[PodOption]:
        """Returns the pods by their numbers of sequences."""
        fit = [view for view in views if view.max_request_tokens >= request.prompt_len + request.max_tokens]
        return self._order(request, [(float(view.num_sequences()), view, 1, 1.0) for view in fit])

    def _order(
        self, request: RoutingRequest, scored: list[tuple[float, PodView, int | None, float]]
    ) -> list[PodOption]:
        hits = request.expected_hits()
        self._rng.shuffle(scored)
        best = heapq.nsmallest(MIN_OPTIONS, scored, key=lambda entry: entry[0])
        return [
            make_option(request, hits, view, cost, load_units=units, unit_cost_s=unit_cost_s)
            for cost, view, units, unit_cost_s in best
        ]


class PrefixOnly:
    """Prefers the longest cached prefix; the load does not count."""

    uses_shared_bookings = False

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def rank_prefill_pods(self, request: RoutingRequest, views: Sequence[PodView], now: float) -> list[PodOption]:
        """Returns the pods by the length of the prefix that they hold."""
        return self._order(request, [view for view in views if view.max_request_tokens >= request.prompt_len])

    def rank_decode_pods(self, request: RoutingRequest, views: Sequence[PodView], now: float) -> list[PodOption]:
        """Returns the pods by the length of the prefix that they hold."""
        need = request.prompt_len + request.max_tokens
        return self._order(request, [view for view in views if view.max_request_tokens >= need])

    def _order(self, request: RoutingRequest, views: list[PodView]) -> list[PodOption]:
        self._rng.shuffle(views)
        hits = request.expected_hits()
        best = heapq.nlargest(MIN_OPTIONS, views, key=lambda view: hits.get(view.name, 0))
        return [make_option(request, hits, view) for view in best]


_POLICIES: dict[str, Callable[[random.Random], RoutingPolicy]] = {
    "cost": CostPolicy,
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix_only": PrefixOnly,
}
POLICIES = tuple(_POLICIES)

#: Policies that need to know which pods hold a prompt. Without an index, rendezvous hashing replaces them for prompts
#: that the gateway does not know itself.
INFORMED = ("cost", "prefix_only")


def make_policy(name: str, rng: random.Random) -> RoutingPolicy:
    """Returns a new policy; `name` is one of POLICIES."""
    return _POLICIES[name](rng)
