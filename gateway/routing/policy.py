"""Ranks pods for a request. Pure: the inputs are the request, the pods' views, the time and a random generator.

CostPolicy ranks by predicted seconds, at rates that the pods measure themselves:

    prefill:  queue + overhead + tokens to compute / rate * (1 + QUEUE_EXTERNALITY) + fetch (host, files, peer)
    decode:   moving the KV + output tokens * (step + the time that the sequence and its neighbours cost each other)

Computing counts more than waiting, because later requests wait for it too. So a hot prefix is computed on another pod
once the queue of its holders costs more than computing, and a block that all prompts share does not draw them all to
one pod. Near-ties are shuffled, so that gateways with equal views do not all choose the same pod.

RendezvousHash ranks pods by the prompt's first blocks, while nothing is known of the pods' caches. `offer_pulls` finds
the prefixes that a prefill pod can pull from another pod faster than it computes them.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple, Protocol

from common.types import Role
from gateway.pods.view import HOST_SPEEDUP, PodView

#: Seconds that one second of computing costs later requests. Simulations of a recorded trace with 8 and with 16 pods
#: give about the same result for 2 to 6.
QUEUE_EXTERNALITY = 4.0

TIE_RATIO, TIE_S = 1.02, 0.001  #: Costs up to the least * TIE_RATIO + TIE_S are equal.
MIN_OPTIONS, MAX_OPTIONS = 32, 64  #: A ranking has at least and at most so many options, if there are enough pods.
AFFINITY_RATIO, AFFINITY_S = 0.1, 0.005  #: The pod that an affinity prefers costs this share and these seconds less.
SAME_HARDWARE_RATIO = 1.5  #: Decode steps measured on equal machines differ by up to this factor.
EXPECTED_OUTPUT_TOKENS = 256  #: Assumed output tokens of a request that allows more.
NO_ROOM_COST_S = 1.0  #: Cost of a decode pod without free blocks; it decreases to 0 at SCARCE_FREE_SHARE of the pool.
SCARCE_FREE_SHARE = 0.1
LOAD_BOUND = 1.25  #: RendezvousHash gives a pod at most this multiple of the mean number of requests.
CONNECT_S = 0.3  #: A pull between two pods that have moved nothing yet takes this much longer.
MAX_HOLDERS = 3  #: A pull is offered only from so many pods, those with the longest prefixes.
NO_HITS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PullOffer:
    """A prefix that a prefill pod can pull from another pod in less time than computing it takes."""

    tokens: int  #: Leading prompt tokens that the pod holds after the pull.
    predicted_s: float  #: Predicted seconds of the pull.
    holder: str = ""  #: Name of the pod that holds the prefix.


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRequest:
    """One request as routing sees it. Hits are leading prompt tokens by pod name.

    prompt  0                                                      prompt_len
            |<- device_hits ->|<- host_hits ->|<- disk_hits ->|             what the pod holds now
            |<---------- inflight_hits ---------->|                         once its running prompts are computed
            |<---------- expected_hits() -------->|                         the longer of the two
    """

    prompt_len: int  #: Prompt tokens. A request that continues after a lost attempt counts its output so far as prompt.
    max_tokens: int  #: Output tokens that may still be generated.
    device_hits: Mapping[str, int] = field(default_factory=dict)  #: Tokens in device memory.
    host_hits: Mapping[str, int] = field(default_factory=dict)  #: Further tokens in host memory.
    disk_hits: Mapping[str, int] = field(default_factory=dict)  #: Further tokens on the disk.
    inflight_hits: Mapping[str, int] = field(default_factory=dict)  #: Once its prompts are computed.
    shared_tokens: int = 0  #: Leading prompt tokens that each pod with the shared tier can read there.
    pull_offers: Mapping[str, PullOffer] = field(default_factory=dict)  #: Pull offers by the name of the pulling pod.
    affinity: str = ""  #: Requests of equal affinity prefer the same pod; "" for none. A hint.
    adapter: str = ""  #: Digest of the LoRA adapter; "" for the base model.
    prefix_key: bytes = b""  #: Hash of the first blocks, for RendezvousHash; empty for a prompt without a full block.

    def expected_hits(self) -> Mapping[str, int]:
        """Returns by pod the prompt tokens that need no computing there when the request's turn comes."""
        if not self.host_hits and not self.disk_hits and not self.inflight_hits:
            return self.device_hits
        hits = dict(self.device_hits)
        for tier in (self.host_hits, self.disk_hits):
            for pod, tokens in tier.items():
                hits[pod] = hits.get(pod, 0) + tokens
        for pod, tokens in self.inflight_hits.items():
            hits[pod] = max(hits.get(pod, 0), tokens)
        return hits


class PodOption(NamedTuple):
    """A pod, and its predicted cost for one request."""

    view: PodView
    cost_s: float
    missing_tokens: int  #: Prompt tokens that the pod would have to compute, or the KV of which has to move there.
    hit_tokens: int  #: Prompt tokens that are expected to need no computing there.
    load_units: int  #: What the request adds to the pod's load: prompt tokens of a prefill, one sequence of a decode.
    unit_cost_s: float  #: Seconds by which each load unit of other requests raises the cost.
    pull_offer: PullOffer | None = None  #: The prefix that the pod has to pull first for these hits.


class RoutingPolicy(Protocol):
    """Ranks pods. Pods that are too small for the request are left out."""

    uses_shared_bookings: bool  #: Bookings of other gateways may change the order, so the index chooses.

    def rank_prefill_pods(self, request: RoutingRequest, views: Sequence[PodView], now: float) -> list[PodOption]:
        """Returns options to compute the prompt, best first."""

    def rank_decode_pods(self, request: RoutingRequest, views: Sequence[PodView], now: float) -> list[PodOption]:
        """Returns options to decode, best first."""


class CostPolicy:
    """Ranks pods by the predicted seconds that the request costs there."""

    uses_shared_bookings = True

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def rank_prefill_pods(self, request: RoutingRequest, views: Sequence[PodView], now: float) -> list[PodOption]:
        """Ranks by seconds until the first token, plus the seconds that later requests lose."""
        length, hits, worth = request.prompt_len, request.expected_hits(), 1 + QUEUE_EXTERNALITY
        scored = [
            (
                view.queue_s(now)
                + view.prefill_overhead_s
                + (new if (new := length - hits.get(view.name, 0)) > 0 else 1) * view.prefill_s_per_token * worth,
                view,
            )
            for view in views
            if view.max_request_tokens >= length
        ]
        if request.adapter:
            scored = [(cost + view.adapter_s(request.adapter) * worth, view) for cost, view in scored]
        offers = request.pull_offers
        if request.host_hits or request.disk_hits or offers:
            scored = [(cost + _fetch_s(request, view, hits), view) for cost, view in scored]
        read: dict[str, int] = {}  # Tokens that a pod has after a read from the shared tier
        if request.shared_tokens:
            for i, (cost, view) in enumerate(scored):
                saved_s = shared_read_saving_s(request, hits.get(view.name, 0), view)
                saved_s += min(0.0, _fetch_s(request, view, hits)) if view.name in offers else 0.0
                if saved_s > 0:
                    scored[i], read[view.name] = (cost - saved_s, view), request.shared_tokens
        # Among equal costs a pod that holds the prefix comes before one that has to fetch it.
        ranked = self._rank(request, scored, prefer=hits if offers or read else NO_HITS)
        offers = {name: offer for name, offer in offers.items() if name not in read} if read else offers
        hits = {**hits, **read} if read else hits
        return [
            make_option(
                request, hits, view, cost, unit_cost_s=view.prefill_s_per_token, pull_offer=offers.get(view.name)
            )
            for cost, view in ranked
        ]

    def rank_decode_pods(self, request: RoutingRequest, views: Sequence[PodView], now: float) -> list[PodOption]:
        """Ranks by seconds of moving KV and decoding, plus the seconds that the other sequences lose."""
        need = request.prompt_len + request.max_tokens
        output, hits = min(request.max_tokens, EXPECTED_OUTPUT_TOKENS), request.expected_hits()
        mean_step = _mean_step(views)
        scored = [
            (_decode_s(request, hits, view, output, _step(view, mean_step), now), view)
            for view in views
            if view.max_request_tokens >= need
        ]
        if request.adapter:
            scored = [(cost + view.adapter_s(request.adapter), view) for cost, view in scored]
        # A whole answer takes so long that moving a conversation's KV is within the tie. So its holder comes first.
        ranked = self._rank(request, scored, prefer=hits)
        return [
            make_option(request, hits, view, cost, unit_cost_s=view.prefill_s_per_token)
            if view.role is Role.BOTH
            else make_option(
                request, hits, view, cost, load_units=1, unit_cost_s=2 * output * _step(view, mean_step)[1]
            )
            for cost, view in ranked
        ]

    def _rank(
        self, request: RoutingRequest, scored: list[tuple[float, PodView]], prefer: Mapping[str, int]
    ) -> list[tuple[float, PodView]]:
        """Returns the near-ties in random order, pods with more tokens in `prefer` first, then the next best pods."""
        if len(scored) < 2:
            return scored
        if request.affinity:
            scored = _prefer_by_affinity(request.affinity, scored)
        limit = min(scored, key=_cost)[0] * TIE_RATIO + TIE_S
        ties = [pair for pair in scored if pair[0] <= limit]
        if len(ties) > MAX_OPTIONS:
            preferred = max(
                (pair for pair in ties if prefer.get(pair[1].name)), key=lambda pair: prefer[pair[1].name], default=None
            )
            sample = self._rng.sample(ties, MAX_OPTIONS)
            return sample if preferred is None else [preferred, *(pair for pair in sample if pair is not preferred)]
        self._rng.shuffle(ties)
        if prefer:
            ties.sort(key=lambda pair: prefer.get(pair[1].name, 0), reverse=True)
        if len(ties) < MIN_OPTIONS and len(ties) < len(scored):
            others = [pair for pair in scored if pair[0] > limit]
            ties += heapq.nsmallest(MIN_OPTIONS - len(ties), others, key=_cost)
        return ties


class RendezvousHash:
    """Sends prompts with equal first blocks to the same pod, unless it has more than its share of requests.

    Rendezvous hashing with bounded load (Mirrokni et al., "Consistent Hashing with Bounded Loads").
    """

    uses_shared_bookings = False

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def rank_prefill_pods(self, request: RoutingRequest, views: Sequence[PodView], now: float) -> list[PodOption]:
        """The load of a pod is the number of prompts that this gateway booked there."""
        fit = [view for view in views if view.max_request_tokens >= request.prompt_len]
        return self._rank(request, [(len(view.prefill_bookings), view) for view in fit])

    def rank_decode_pods(self, request: RoutingRequest, views: Sequence[PodView], now: float) -> list[PodOption]:
        """The load of a pod is the number of sequences that this gateway booked there."""
        fit = [view for view in views if view.max_request_tokens >= request.prompt_len + request.max_tokens]
        return self._rank(request, [(len(view.decode_bookings), view) for view in fit])

    def _rank(self, request: RoutingRequest, loads: list[tuple[int, PodView]]) -> list[PodOption]:
        if not loads:
            return []
        total, least = sum(load for load, _ in loads), min(load for load, _ in loads)
        bound = max(least, int(LOAD_BOUND * (total + 1) / len(loads)))
        key = request.affinity.encode() or request.prefix_key
        hits = request.expected_hits()
        self._rng.shuffle(loads)
        if key:
            loads.sort(key=lambda pair: (pair[0] > bound, -rendezvous_weight(key, pair[1].name)))
        else:
            loads.sort(key=_cost)
        return [make_option(request, hits, view) for _, view in loads]


def rendezvous_weight(key: bytes, pod: str) -> int:
    """Returns the weight of a key on a pod; the pod with the highest weight gets the key. Equal in every process."""
    digest = hashlib.blake2b(pod.encode(), key=key[:64], digest_size=8).digest()
    return int.from_bytes(digest, "big")


def make_option(
    request: RoutingRequest,
    expected_hits: Mapping[str, int],
    view: PodView,
    cost_s: float = 0.0,
    *,
    load_units: int | None = None,
    unit_cost_s: float = 0.0,
    pull_offer: PullOffer | None = None,
) -> PodOption:
    """Returns the option of a pod. `load_units` is by default the number of prompt tokens to compute."""
    hits = max(expected_hits.get(view.name, 0), pull_offer.tokens if pull_offer else 0)
    hit_tokens = min(hits, request.prompt_len - 1)  # the last prompt token is always computed
    missing = request.prompt_len - hit_tokens
    return PodOption(
        view, cost_s, missing, hit_tokens, missing if load_units is None else load_units, unit_cost_s, pull_offer
    )


def _fetch_s(request: RoutingRequest, view: PodView, expected_hits: Mapping[str, int]) -> float:
    """Returns what fetching adds to a pod's cost: seconds from its host memory and disk, or a pull less its saving."""
    used = expected_hits.get(view.name, 0)
    left = max(0, request.prompt_len - 1 - request.device_hits.get(view.name, 0))
    from_host = min(request.host_hits.get(view.name, 0), left)
    host_s = from_host * view.prefill_s_per_token / HOST_SPEEDUP
    if from_disk := min(request.disk_hits.get(view.name, 0), left - from_host):
        # A pod computes what it would read more slowly.
        reads = view.disk_s_per_token < view.prefill_s_per_token
        worth = view.disk_s_per_token if reads else view.prefill_s_per_token * (1 + QUEUE_EXTERNALITY)
        host_s += from_disk * worth
    offer = request.pull_offers.get(view.name)
    if offer is None:
        return host_s
    return min(host_s, offer.predicted_s - (offer.tokens - used) * view.prefill_s_per_token * (1 + QUEUE_EXTERNALITY))


def shared_read_saving_s(request: RoutingRequest, held: int, view: PodView) -> float:
    """Returns by how much a read from the shared tier lowers the cost of a pod that has `held` tokens of the prompt.

    0 if the pod has no shared tier, or would compute faster than it reads.
    """
    tokens = min(request.shared_tokens, request.prompt_len - 1) - held
    if tokens <= 0 or not view.shares_cache or view.shared_s_per_token >= view.prefill_s_per_token:
        return 0.0
    return tokens * (view.prefill_s_per_token * (1 + QUEUE_EXTERNALITY) - view.shared_s_per_token)


def _mean_step(views: Sequence[PodView]) -> tuple[float, float]:
    """Returns the mean step_s and step_slope_s of the pods."""
    count = max(1, len(views))
    return sum(view.step_s for view in views) / count, sum(view.step_slope_s for view in views) / count


def _step(view: PodView, mean_step: tuple[float, float]) -> tuple[float, float]:
    """Returns the step_s and step_slope_s to assume for a pod: the mean, unless it is slow or clearly other hardware.

    Equal machines measure different steps, because they ran different batches. Over a whole answer that difference
    would outweigh the KV that one of them holds. A small true difference shows up as load: a slower pod keeps its
    sequences longer.
    """
    own, mean = view.step_s + view.step_slope_s, mean_step[0] + mean_step[1]
    same = not view.slowness.slow and mean <= own * SAME_HARDWARE_RATIO and own <= mean * SAME_HARDWARE_RATIO
    return mean_step if same else (view.step_s, view.step_slope_s)


def _decode_s(
    request: RoutingRequest,
    expected_hits: Mapping[str, int],
    view: PodView,
    output: int,
    step: tuple[float, float],
    now: float,
) -> float:
    """Returns the predicted cost of `output` tokens on a decode pod, and of the prompt's KV or its computing there."""
    step_s, slope_s = step
    missing = request.prompt_len - expected_hits.get(view.name, 0)
    # Each of the n sequences slows the new one by slope_s a step, and the new one slows each of them by as much.
    cost = output * (step_s + (2 * view.num_sequences() + 1) * slope_s)
    if view.role is Role.BOTH:
        cost += view.queue_s(now) + view.prefill_overhead_s
        cost += max(1, missing) * view.prefill_s_per_token * (1 + QUEUE_EXTERNALITY)
        cost -= shared_read_saving_s(request, request.prompt_len - missing, view)
    elif missing > 0:
        cost += missing * view.transfer_s_per_token
    room = view.free_blocks() - (max(0, missing) + output) // view.block_size
    scarce = SCARCE_FREE_SHARE * view.num_blocks
    return cost if room >= scarce else cost + NO_ROOM_COST_S * min(1.0, 1 - room / scarce)


def _prefer_by_affinity(affinity: str, scored: list[tuple[float, PodView]]) -> list[tuple[float, PodView]]:
    """Returns `scored` with a lower cost for the pod that this affinity prefers."""
    key = hashlib.blake2b(affinity.encode(), digest_size=16).digest()
    preferred = max(scored, key=lambda pair: rendezvous_weight(key, pair[1].name))[1]
    return [(cost * (1 - AFFINITY_RATIO) - AFFINITY_S if view is preferred else cost, view) for cost, view in scored]


def _cost(pair: tuple[float, PodView]) -> float:
    return pair[0]


def offer_pulls(
    device_hits: Mapping[str, int],
    expected_hits: Mapping[str, int],
    pullers: Sequence[PodView],
    holders: Sequence[PodView],
    block_bytes: int,
    window_tails: Sequence[int] = (),
    state_pages: int = 0,
) -> dict[str, PullOffer]:
    """Returns pull offers by the puller's name, for pullers that save time. Only `device_hits` can be pulled.

    A pull takes the puller's measured latency, and the missing bytes at the measured rate of the two pods. A pair that
    has moved nothing yet is assumed to have the mean rate of the known pairs, and to need CONNECT_S for the connection.
    With KV groups `block_bytes` are those of a page; the missing pages at the end of each window move too. A recurrent
    state takes `state_pages` blocks.
    """
    holding = [view for view in holders if device_hits.get(view.name)]
    best = sorted(holding, key=lambda view: device_hits[view.name], reverse=True)[:MAX_HOLDERS]
    if not best:
        return {}
    longest = device_hits[best[0].name]
    lacking = [view for view in pullers if view.pulls and expected_hits.get(view.name, 0) < longest]
    if not lacking:
        return {}
    ends = window_tails, state_pages
    rates = [rate for view in (*best, *lacking) for rate in view.pair_rates.values()]
    mean_rate = fmean(rates) if rates else 0.0
    return {
        view.name: offer
        for view in lacking
        if (offer := _best_offer(device_hits, expected_hits, view, best, block_bytes, ends, mean_rate)) is not None
    }


def _best_offer(
    device_hits: Mapping[str, int],
    expected_hits: Mapping[str, int],
    puller: PodView,
    holders: Sequence[PodView],
    block_bytes: int,
    ends: tuple[Sequence[int], int],  # `window_tails` and `state_pages`
    mean_rate: float,
) -> PullOffer | None:
    """Returns the pull that saves the most time; None if no pull saves any."""
    used, best, best_saving_s = expected_hits.get(puller.name, 0), None, 0.0
    for holder in holders:
        tokens = device_hits[holder.name]
        missing = tokens - used
        if holder is puller or missing <= 0 or puller.name in holder.pair_troubles:
            continue
        known_rate = holder.pair_rates.get(puller.name) or puller.pair_rates.get(holder.name)
        rate, connect_s = (known_rate, 0.0) if known_rate else (mean_rate, CONNECT_S)
        if rate <= 0:
            continue
        blocks = missing / puller.block_size
        pages = blocks + sum(min(tail, blocks) for tail in ends[0]) + ends[1]
        pull_s = puller.pull_s + connect_s + pages * block_bytes / rate
        saving_s = missing * puller.prefill_s_per_token - pull_s
        if saving_s > best_saving_s:
            best, best_saving_s = PullOffer(tokens, pull_s, holder.name), saving_s
    return best
