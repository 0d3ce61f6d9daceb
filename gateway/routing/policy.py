"""Ranks the pods for a request, best first. Pure: a demand, the pods' views, the time and a source of chance.

CostPolicy estimates seconds. For a prefill: the queue + tokens left to compute / the pod's rate + a pull. For decoding:
moving the KV + what the sequence and its neighbours cost each other. Pods measure all of these rates themselves.
A second of computing counts more than a second of waiting, since later requests wait for it too. So a shared prefix is
computed again on another pod once the queue at its holders costs more than the computing does, and a block that heads
every prompt does not draw all prompts to one pod. Near-ties are shuffled, so that gateways with equal views do not all
choose the same pod.

Home ranks pods without knowledge of what they hold: rendezvous hashing of the prompt's first blocks with bounded load
(Mirrokni et al., "Consistent Hashing with Bounded Loads").
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol

from common.types import Role
from gateway.pods.view import HOST_SPEEDUP, PodView

# What a second of computing costs those that come after it, in seconds: by simulation of a recorded trace, where 2 to 6
# are about as good, for 8 pods and for 16.
QUEUE_EXTERNALITY = 4.0
TIE_RATIO, TIE_S = 1.02, 0.001  # costs within this are equal
MIN_OPTIONS, MAX_OPTIONS = 32, 64  # what is offered to the atomic choice
AFFINITY_RATIO, AFFINITY_S = 0.1, 0.005  # the preferred pod seems cheaper by this
SAME_HARDWARE_RATIO = 1.5  # decode steps of equal machines are measured this far apart
EXPECTED_OUTPUT_TOKENS = 256  # tokens of an answer whose length nobody knows
NO_ROOM_COST_S = 1.0  # a decode pod without room is a last resort
SCARCE_FREE_SHARE = 0.1  # share of a pool below which room is scarce
LOAD_BOUND = 1.25
NO_HITS: Mapping[str, int] = MappingProxyType({})


class PodOption(NamedTuple):
    """A pod and what it would cost, in seconds.

    tokens: prompt tokens that it would have to compute, or whose KV would have to move there. held: prompt tokens that
    are promised. units: what the request adds to the pod's load, tokens to compute or one sequence; unit_s: what each
    unit that others add costs this request. pull: what the pod has to fetch from a peer for that.
    """

    view: PodView
    cost_s: float
    missing_tokens: int
    hit_tokens: int
    load_units: int
    unit_cost_s: float
    pull_offer: PullOffer | None = None


class RoutingPolicy(Protocol):
    """Both methods return the usable ones of `views` as options, the best first; none when none is large enough."""

    #: Other gateways' bookings may change the order: the index makes the choice among the options.
    uses_shared_bookings: bool

    def rank_prefill_pods(self, demand: RoutingRequest, views: Sequence[PodView], now: float) -> list[PodOption]: ...

    def rank_decode_pods(self, demand: RoutingRequest, views: Sequence[PodView], now: float) -> list[PodOption]: ...


class CostPolicy:
    """Ranks pods by the estimated seconds that the request costs there."""

    uses_shared_bookings = True

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def rank_prefill_pods(self, demand: RoutingRequest, views: Sequence[PodView], now: float) -> list[PodOption]:
        """The least seconds until the first token."""
        length, promises, worth = demand.prompt_len, demand.expected_hits(), 1 + QUEUE_EXTERNALITY
        scored = [
            (
                view.queue_s(now)
                + view.prefill_overhead_s
                + (left if (left := length - promises.get(view.name, 0)) > 0 else 1) * view.prefill_s_per_token * worth,
                view,
            )
            for view in views
            if view.max_request_tokens >= length
        ]
        if demand.host_hits or demand.pull_offers:
            scored = [(cost + _fetch_s(demand, view, promises), view) for cost, view in scored]
        best = self._best(
            demand, scored, promises if demand.pull_offers else NO_HITS
        )  # a pull is cheap, but not for nothing
        return [
            make_option(
                demand, promises, view, cost, unit_s=view.prefill_s_per_token, pull=demand.pull_offers.get(view.name)
            )
            for cost, view in best
        ]

    def rank_decode_pods(self, demand: RoutingRequest, views: Sequence[PodView], now: float) -> list[PodOption]:
        """The least seconds of moving KV there and decoding, for this sequence and by it for those beside it."""
        need = demand.prompt_len + demand.max_tokens
        output, promises = min(demand.max_tokens, EXPECTED_OUTPUT_TOKENS), demand.expected_hits()
        usual = _mean_step(views)
        scored = [
            (_decode_s(demand, promises, view, output, _step(view, usual), now), view)
            for view in views
            if view.max_request_tokens >= need
        ]
        # Ties of whole answers are longer than moving a conversation takes: where its KV is, it stays.
        best = self._best(demand, scored, promises)
        return [
            make_option(demand, promises, view, cost, unit_s=view.prefill_s_per_token)
            if view.role is Role.BOTH
            else make_option(demand, promises, view, cost, units=1, unit_s=2 * output * _step(view, usual)[1])
            for cost, view in best
        ]

    def _best(
        self, demand: RoutingRequest, scored: list[tuple[float, PodView]], held: Mapping[str, int] = NO_HITS
    ) -> list[tuple[float, PodView]]:
        """Near-ties first, in any order but for those that hold more (held), then the next best until there are
        enough.
        """
        if len(scored) < 2:
            return scored
        if demand.affinity:
            scored = _prefer_by_affinity(demand.affinity, scored)
        limit = min(scored, key=_cost)[0] * TIE_RATIO + TIE_S
        ties = [pair for pair in scored if pair[0] <= limit]
        if len(ties) > MAX_OPTIONS:
            most = max(
                (pair for pair in ties if held.get(pair[1].name)), key=lambda pair: held[pair[1].name], default=None
            )
            sample = self._rng.sample(ties, MAX_OPTIONS)
            return sample if most is None else [most, *(pair for pair in sample if pair is not most)]
        self._rng.shuffle(ties)
        if held:
            ties.sort(key=lambda pair: held.get(pair[1].name, 0), reverse=True)
        if len(ties) < MIN_OPTIONS and len(ties) < len(scored):
            rest = [pair for pair in scored if pair[0] > limit]
            ties += heapq.nsmallest(MIN_OPTIONS - len(ties), rest, key=_cost)
        return ties


class RendezvousHash:
    """Sends prompts with the same first blocks to the same pod, unless the pod has more than its share of requests."""

    uses_shared_bookings = False

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def rank_prefill_pods(self, demand: RoutingRequest, views: Sequence[PodView], now: float) -> list[PodOption]:
        """By the prompts that this gateway sent to each."""
        fit = [view for view in views if view.max_request_tokens >= demand.prompt_len]
        return self._order(demand, [(len(view.prefill_bookings), view) for view in fit])

    def rank_decode_pods(self, demand: RoutingRequest, views: Sequence[PodView], now: float) -> list[PodOption]:
        """By the sequences that this gateway sent to each."""
        fit = [view for view in views if view.max_request_tokens >= demand.prompt_len + demand.max_tokens]
        return self._order(demand, [(len(view.decode_bookings), view) for view in fit])

    def _order(self, demand: RoutingRequest, loads: list[tuple[int, PodView]]) -> list[PodOption]:
        if not loads:
            return []
        total, least = sum(load for load, _ in loads), min(load for load, _ in loads)
        bound = max(least, int(LOAD_BOUND * (total + 1) / len(loads)))
        key = demand.affinity.encode() or demand.prefix_key
        promises = demand.expected_hits()
        self._rng.shuffle(loads)
        if key:
            loads.sort(key=lambda pair: (pair[0] > bound, -rendezvous_weight(key, pair[1].name)))
        else:
            loads.sort(key=lambda pair: pair[0])
        return [make_option(demand, promises, view) for _, view in loads]


def rendezvous_weight(key: bytes, pod: str) -> int:
    """How much a key is a pod's: the highest of all has it (rendezvous hashing). The same in every process."""
    digest = hashlib.blake2b(pod.encode(), key=key[:64], digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _fetch_s(demand: RoutingRequest, view: PodView, promises: Mapping[str, int]) -> float:
    """Seconds that fetching adds to a pod's cost: from its host memory, or from a peer where that saves time."""
    used = promises.get(view.name, 0)
    from_host = min(
        demand.host_hits.get(view.name, 0), max(0, demand.prompt_len - 1 - demand.device_hits.get(view.name, 0))
    )
    host_s = from_host * view.prefill_s_per_token / HOST_SPEEDUP
    pull = demand.pull_offers.get(view.name)
    if pull is None:
        return host_s
    return min(host_s, pull.predicted_s - (pull.tokens - used) * view.prefill_s_per_token * (1 + QUEUE_EXTERNALITY))


def _mean_step(views: Sequence[PodView]) -> tuple[float, float]:
    """step_s and slope_s of the pods in the mean."""
    count = max(1, len(views))
    return sum(view.step_s for view in views) / count, sum(view.step_slope_s for view in views) / count


def _step(view: PodView, usual: tuple[float, float]) -> tuple[float, float]:
    """step_s and slope_s to reckon with: the usual ones, unless this pod is clearly another machine.

    Equal machines measure unlike steps, since they ran unlike batches, and over a whole answer that would outweigh the
    KV that one of them holds. What is left out of small true differences comes back as load: who is slower keeps its
    sequences for longer.
    """
    own, mean = view.step_s + view.step_slope_s, usual[0] + usual[1]
    return (
        usual
        if mean <= own * SAME_HARDWARE_RATIO and own <= mean * SAME_HARDWARE_RATIO
        else (view.step_s, view.step_slope_s)
    )


def _decode_s(
    demand: RoutingRequest,
    promises: Mapping[str, int],
    view: PodView,
    output: int,
    step: tuple[float, float],
    now: float,
) -> float:
    step_s, slope_s = step
    new = demand.prompt_len - promises.get(view.name, 0)
    # It slows down each of those beside it as much as each of them slows it down.
    cost = output * (step_s + (2 * view.num_sequences() + 1) * slope_s)
    if view.role is Role.BOTH:
        cost += (
            view.queue_s(now)
            + view.prefill_overhead_s
            + max(1, new) * view.prefill_s_per_token * (1 + QUEUE_EXTERNALITY)
        )
    elif new > 0:
        cost += new * view.transfer_s_per_token
    room = view.free_blocks() - (max(0, new) + output) // view.block_size
    scarce = SCARCE_FREE_SHARE * view.num_blocks
    return cost if room >= scarce else cost + NO_ROOM_COST_S * min(1.0, 1 - room / scarce)


def _prefer_by_affinity(affinity: str, scored: list[tuple[float, PodView]]) -> list[tuple[float, PodView]]:
    """The same, with the pod that this affinity prefers a little cheaper."""
    key = hashlib.blake2b(affinity.encode(), digest_size=16).digest()
    preferred = max(scored, key=lambda pair: rendezvous_weight(key, pair[1].name))[1]
    return [(cost * (1 - AFFINITY_RATIO) - AFFINITY_S if view is preferred else cost, view) for cost, view in scored]


def make_option(
    demand: RoutingRequest,
    promises: Mapping[str, int],
    view: PodView,
    cost: float = 0.0,
    *,
    units: int | None = None,
    unit_s: float = 0.0,
    pull: PullOffer | None = None,
) -> PodOption:
    """Returns the option of a pod at a cost. `units` is by default the number of tokens that are left to compute."""
    held = min(max(promises.get(view.name, 0), pull.tokens if pull else 0), demand.prompt_len - 1)
    left = demand.prompt_len - held
    return PodOption(view, cost, left, held, left if units is None else units, unit_s, pull)


def _cost(pair: tuple[float, PodView]) -> float:
    return pair[0]


@dataclass(frozen=True, slots=True)
class PullOffer:
    """A pod could hold the prompt's first `tokens` tokens after pulling what it lacks from `holder` for `seconds`."""

    tokens: int
    predicted_s: float
    holder: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRequest:
    """Lengths in tokens, where the output so far of a request that goes on counts as prompt; what pods have of the
    prompt, by pod name, in prompt tokens from its start.

    held: in device memory, as the index says. host: further tokens, in the pod's host memory. soon: once the prompts
    that the pod computes now are done. pull: what it could fetch from a peer in less time than computing it takes.
    affinity: what the client wants to stay together (a hint). key: hash of the first blocks, the prompt's home while
    nobody knows what pods hold.
    """

    prompt_len: int
    max_tokens: int
    device_hits: Mapping[str, int] = field(default_factory=dict)
    host_hits: Mapping[str, int] = field(default_factory=dict)
    inflight_hits: Mapping[str, int] = field(default_factory=dict)
    pull_offers: Mapping[str, PullOffer] = field(default_factory=dict)
    affinity: str = ""
    prefix_key: bytes = b""

    def expected_hits(self) -> Mapping[str, int]:
        """Prompt tokens by pod that need no computing there when the request's turn comes."""
        if not self.host_hits and not self.inflight_hits:
            return self.device_hits
        promises = dict(self.device_hits)
        for pod, tokens in self.host_hits.items():
            promises[pod] = promises.get(pod, 0) + tokens
        for pod, tokens in self.inflight_hits.items():
            promises[pod] = max(promises.get(pod, 0), tokens)
        return promises
