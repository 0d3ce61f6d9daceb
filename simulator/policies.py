"""The routing policies that a simulation can compare: the gateway's own and three simple ones."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence

from common.types import Role
from gateway.pods.view import PodView
from gateway.routing.policy import MIN_OPTIONS, CostPolicy, PodOption, RoutingPolicy, RoutingRequest, make_option


class _FittingPods:
    """A policy that ranks the pods that are large enough for the request."""

    uses_shared_bookings = False

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def rank_prefill_pods(self, request: RoutingRequest, views: Sequence[PodView], now: float) -> list[PodOption]:
        return self._rank(request, [v for v in views if v.max_request_tokens >= request.prompt_len], Role.PREFILL, now)

    def rank_decode_pods(self, request: RoutingRequest, views: Sequence[PodView], now: float) -> list[PodOption]:
        need = request.prompt_len + request.max_tokens
        return self._rank(request, [v for v in views if v.max_request_tokens >= need], Role.DECODE, now)

    def _rank(self, request: RoutingRequest, views: list[PodView], role: Role, now: float) -> list[PodOption]:
        """Returns options for the best of the pods, best first."""
        raise NotImplementedError


class RoundRobin(_FittingPods):
    """Sends each request to the next pod."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._turns = {Role.PREFILL: rng.randrange(1 << 16), Role.DECODE: rng.randrange(1 << 16)}

    def _rank(self, request: RoutingRequest, views: list[PodView], role: Role, now: float) -> list[PodOption]:
        if not views:
            return []
        turn = self._turns[role] % len(views)
        self._turns[role] += 1
        hits = request.expected_hits()
        return [make_option(request, hits, view) for view in (views[turn:] + views[:turn])[:MIN_OPTIONS]]


class LeastLoaded(_FittingPods):
    """Prefers the shortest queue and the fewest sequences; cached prefixes do not count."""

    uses_shared_bookings = True

    def _rank(self, request: RoutingRequest, views: list[PodView], role: Role, now: float) -> list[PodOption]:
        self._rng.shuffle(views)
        hits = request.expected_hits()
        if role is Role.DECODE:
            views = heapq.nsmallest(MIN_OPTIONS, views, key=PodView.num_sequences)
            loads = [(view, float(view.num_sequences())) for view in views]
            return [make_option(request, hits, view, n, load_units=1, unit_cost_s=1.0) for view, n in loads]
        views = heapq.nsmallest(MIN_OPTIONS, views, key=lambda view: view.queue_s(now))
        return [make_option(request, hits, v, v.queue_s(now), unit_cost_s=v.prefill_s_per_token) for v in views]


class PrefixOnly(_FittingPods):
    """Prefers the longest cached prefix; the load does not count."""

    def _rank(self, request: RoutingRequest, views: list[PodView], role: Role, now: float) -> list[PodOption]:
        self._rng.shuffle(views)
        hits = request.expected_hits()
        best = heapq.nlargest(MIN_OPTIONS, views, key=lambda view: hits.get(view.name, 0))
        return [make_option(request, hits, view) for view in best]


POLICIES: dict[str, Callable[[random.Random], RoutingPolicy]] = {
    "cost": CostPolicy,
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix_only": PrefixOnly,
}
# They need to know which pods hold a prompt. Without an index, rendezvous hashing replaces them for unknown prompts.
INFORMED = ("cost", "prefix_only")
