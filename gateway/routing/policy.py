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
from types import MappingProxyType
from typing import NamedTuple, Protocol

from common.types import Role
from gateway.routing.demand import Demand, Pull
from gateway.routing.view import HOST_SPEEDUP, PodView

# What a second of computing costs those that come after it, in seconds: by simulation of a recorded trace, where 2 to 6
# are about as good, for 8 pods and for 16.
OTHERS = 4.0
TIE_RATIO, TIE_S = 1.02, 0.001  # costs within this are equal
MIN_OPTIONS, MAX_OPTIONS = 32, 64  # what is offered to the atomic choice
AFFINITY_RATIO, AFFINITY_S = 0.1, 0.005  # the preferred pod seems cheaper by this
SAME_STEP = 1.5  # decode steps of equal machines are measured this far apart
EXPECTED_OUTPUT = 256  # tokens of an answer whose length nobody knows
FULL_COST_S = 1.0  # a decode pod without room is a last resort
LOW_FREE = 0.1  # share of a pool below which room is scarce
LOAD_BOUND = 1.25
NOTHING: Mapping[str, int] = MappingProxyType({})


class Option(NamedTuple):
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
    pull_offer: Pull | None = None


class Policy(Protocol):
    """Both methods return the usable ones of `views` as options, the best first; none when none is large enough."""

    #: Other gateways' bookings may change the order: the index makes the choice among the options.
    uses_shared_bookings: bool

    def rank_prefill_pods(self, demand: Demand, views: Sequence[PodView], now: float) -> list[Option]: ...

    def rank_decode_pods(self, demand: Demand, views: Sequence[PodView], now: float) -> list[Option]: ...


class CostPolicy:
    """Ranks pods by the estimated seconds that the request costs there."""

    uses_shared_bookings = True

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def rank_prefill_pods(self, demand: Demand, views: Sequence[PodView], now: float) -> list[Option]:
        """The least seconds until the first token."""
        length, promises, worth = demand.prompt_len, demand.expected_hits(), 1 + OTHERS
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
            demand, scored, promises if demand.pull_offers else NOTHING
        )  # a pull is cheap, but not for nothing
        return [
            make_option(
                demand, promises, view, cost, unit_s=view.prefill_s_per_token, pull=demand.pull_offers.get(view.name)
            )
            for cost, view in best
        ]

    def rank_decode_pods(self, demand: Demand, views: Sequence[PodView], now: float) -> list[Option]:
        """The least seconds of moving KV there and decoding, for this sequence and by it for those beside it."""
        need = demand.prompt_len + demand.max_tokens
        output, promises = min(demand.max_tokens, EXPECTED_OUTPUT), demand.expected_hits()
        usual = _usual_step(views)
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
        self, demand: Demand, scored: list[tuple[float, PodView]], held: Mapping[str, int] = NOTHING
    ) -> list[tuple[float, PodView]]:
        """Near-ties first, in any order but for those that hold more (held), then the next best until there are
        enough.
        """
        if len(scored) < 2:
            return scored
        if demand.affinity:
            scored = _favour(demand.affinity, scored)
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


class Home:
    """Sends prompts with the same first blocks to the same pod, unless the pod has more than its share of requests."""

    uses_shared_bookings = False

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def rank_prefill_pods(self, demand: Demand, views: Sequence[PodView], now: float) -> list[Option]:
        """By the prompts that this gateway sent to each."""
        fit = [view for view in views if view.max_request_tokens >= demand.prompt_len]
        return self._order(demand, [(len(view.prefill_bookings), view) for view in fit])

    def rank_decode_pods(self, demand: Demand, views: Sequence[PodView], now: float) -> list[Option]:
        """By the sequences that this gateway sent to each."""
        fit = [view for view in views if view.max_request_tokens >= demand.prompt_len + demand.max_tokens]
        return self._order(demand, [(len(view.decode_bookings), view) for view in fit])

    def _order(self, demand: Demand, loads: list[tuple[int, PodView]]) -> list[Option]:
        if not loads:
            return []
        total, least = sum(load for load, _ in loads), min(load for load, _ in loads)
        bound = max(least, int(LOAD_BOUND * (total + 1) / len(loads)))
        key = demand.affinity.encode() or demand.prefix_key
        promises = demand.expected_hits()
        self._rng.shuffle(loads)
        if key:
            loads.sort(key=lambda pair: (pair[0] > bound, -weight(key, pair[1].name)))
        else:
            loads.sort(key=lambda pair: pair[0])
        return [make_option(demand, promises, view) for _, view in loads]


def weight(key: bytes, pod: str) -> int:
    """How much a key is a pod's: the highest of all has it (rendezvous hashing). The same in every process."""
    digest = hashlib.blake2b(pod.encode(), key=key[:64], digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _fetch_s(demand: Demand, view: PodView, promises: Mapping[str, int]) -> float:
    """Seconds that fetching adds to a pod's cost: from its host memory, or from a peer where that saves time."""
    used = promises.get(view.name, 0)
    from_host = min(
        demand.host_hits.get(view.name, 0), max(0, demand.prompt_len - 1 - demand.device_hits.get(view.name, 0))
    )
    host_s = from_host * view.prefill_s_per_token / HOST_SPEEDUP
    pull = demand.pull_offers.get(view.name)
    if pull is None:
        return host_s
    return min(host_s, pull.predicted_s - (pull.tokens - used) * view.prefill_s_per_token * (1 + OTHERS))


def _usual_step(views: Sequence[PodView]) -> tuple[float, float]:
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
    return usual if mean <= own * SAME_STEP and own <= mean * SAME_STEP else (view.step_s, view.step_slope_s)


def _decode_s(
    demand: Demand,
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
        cost += view.queue_s(now) + view.prefill_overhead_s + max(1, new) * view.prefill_s_per_token * (1 + OTHERS)
    elif new > 0:
        cost += new * view.transfer_s_per_token
    room = view.free_blocks() - (max(0, new) + output) // view.block_size
    scarce = LOW_FREE * view.num_blocks
    return cost if room >= scarce else cost + FULL_COST_S * min(1.0, 1 - room / scarce)


def _favour(affinity: str, scored: list[tuple[float, PodView]]) -> list[tuple[float, PodView]]:
    """The same, with the pod that this affinity prefers a little cheaper."""
    key = hashlib.blake2b(affinity.encode(), digest_size=16).digest()
    preferred = max(scored, key=lambda pair: weight(key, pair[1].name))[1]
    return [(cost * (1 - AFFINITY_RATIO) - AFFINITY_S if view is preferred else cost, view) for cost, view in scored]


def make_option(
    demand: Demand,
    promises: Mapping[str, int],
    view: PodView,
    cost: float = 0.0,
    *,
    units: int | None = None,
    unit_s: float = 0.0,
    pull: Pull | None = None,
) -> Option:
    """Returns the option of a pod at a cost. `units` is by default the number of tokens that are left to compute."""
    held = min(max(promises.get(view.name, 0), pull.tokens if pull else 0), demand.prompt_len - 1)
    left = demand.prompt_len - held
    return Option(view, cost, left, held, left if units is None else units, unit_s, pull)


def _cost(pair: tuple[float, PodView]) -> float:
    return pair[0]
