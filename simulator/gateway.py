"""A gateway of the simulated cluster: the real routing policy over simulated pods.

The gateway knows only as much as a real one: a pod's load is as old as the last poll, a dead pod is noticed by a failed
call or by a poll, and the index that says which blocks pods hold may be late, unreachable or wrong.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from common.block_hash import matchable_blocks
from common.errors import IndexUnavailable
from common.types import Role
from gateway.pods.view import DISPATCH_DELAY_S, PodView, fill_in_from_peers
from gateway.routing.local_index import ApproxIndex, InFlightPrompts
from gateway.routing.policy import PodOption, PullOffer, RendezvousHash, RoutingPolicy, RoutingRequest
from gateway.routing.pull_offers import offer_pulls
from prefix_index.records import BookingCandidate
from simulator.decode_pod import DecodeSequence
from simulator.index import SimIndex
from simulator.pod import SimulatedPod
from simulator.policies import INFORMED, make_policy
from simulator.request import Route, SimulatedRequest

#: A computed prompt counts as in flight until the pod's next batch has reached the index.
INFLIGHT_LINGER_S = 0.2

#: Blocks that the prefix key covers.
PREFIX_KEY_BLOCKS = 4

#: Pause before a request is routed again.
RETRY_PAUSE_S = 0.05

#: Pause before a request looks for pods again while there are none, and how often it does.
NO_PODS_PAUSE_S = 1.0
MAX_ATTEMPTS = 5


@dataclass(slots=True)
class _KnownPod:
    """One pod as this gateway knows it, which may be out of date."""

    pod: SimulatedPod
    view: PodView
    generation: int
    alive: bool = True


class SimulatedGateway:
    """Routes requests over the simulated pods with the policy of the real gateway, or one to compare with."""

    def __init__(
        self,
        index: SimIndex,
        pods: Sequence[SimulatedPod],
        *,
        policy: str,
        seed: int,
        block_size: int,
        overhead_s: float,
        pull: bool = False,
    ) -> None:
        """
        Args:
            policy: One of simulator.policies.POLICIES.
            overhead_s: Seconds from the routing of a request until its pods see it.
            pull: Prefill pods pull prefixes from other pods.
        """
        self._clock = index.clock
        self._reader = index.reader()
        self._approx = ApproxIndex(clock=index.clock.time)
        self._block_size = block_size
        self._overhead_s = overhead_s
        self._pull = pull
        rng = random.Random(seed)
        self._policy = make_policy(policy, rng)
        self._informed = policy in INFORMED
        self._rendezvous: RoutingPolicy = RendezvousHash(rng)
        self._inflight = InFlightPrompts()
        self._known = {pod.name: _KnownPod(pod, _view(pod), pod.generation) for pod in pods}
        self._decodes = any(pod.role is Role.DECODE for pod in pods)
        self._usable: dict[Role, list[PodView]] = {}
        self._generations: list[tuple[str, int]] = []
        self._refresh()

    def poll(self) -> None:
        """Reads the load and the generation of every pod."""
        now, changed = self._clock.now, False
        for known in self._known.values():
            pod = known.pod
            if pod.alive != known.alive or (pod.alive and pod.generation != known.generation):
                changed = True
                known.alive = pod.alive
                if pod.alive and pod.generation != known.generation:
                    known.view, known.generation = _view(pod), pod.generation
            if pod.alive:
                known.view.apply_report(pod.process.load(), now)
        if changed:
            self._refresh()
        for views in self._usable.values():
            fill_in_from_peers(views)

    def _refresh(self) -> None:
        alive = [known for known in self._known.values() if known.alive]
        self._usable = {role: [k.view for k in alive if k.pod.role is role] for role in (Role.PREFILL, Role.DECODE)}
        self._generations = [(k.pod.name, k.generation) for k in alive]

    def route(self, request: SimulatedRequest) -> None:
        """Chooses the pods, reserves on the decode pod and books; the pods see the request overhead_s later."""
        routing_request, policy = self._routing_request(request)
        now = self._clock.now
        prefills = policy.rank_prefill_pods(routing_request, self._usable[Role.PREFILL], now)
        if not prefills:
            self._refuse_or_wait(request)
            return
        decode: SimulatedPod | None = None
        decode_view: PodView | None = None
        sequence: DecodeSequence | None = None
        if self._decodes:
            options = policy.rank_decode_pods(routing_request, self._usable[Role.DECODE], now)
            reserved = self._reserve(request, options)
            if reserved is None:
                self._refuse_or_wait(request)
                return
            decode, decode_view, sequence = reserved
        option = self._book(request, policy, prefills)
        prefill = self._known[option.view.name].pod
        option.view.prefill_bookings.add(request.request_id, option.missing_tokens, now)
        self._inflight.add(request.request_id, option.view.name, request.block_hashes)
        offer = option.pull_offer
        holder = self._known[offer.holder].pod if offer else None
        route = Route(prefill, option.view, decode, decode_view, sequence, option.hit_tokens, holder, offer)
        self._clock.call_after(self._overhead_s, lambda: self._send(request, route))

    def _routing_request(self, request: SimulatedRequest) -> tuple[RoutingRequest, RoutingPolicy]:
        """Looks up the prompt's hits. Returns rendezvous hashing as the policy if no source knows the prompt."""
        size = self._block_size
        usable = request.block_hashes[: matchable_blocks(request.prompt_len, size)]
        key = usable[min(len(usable), PREFIX_KEY_BLOCKS) - 1] if usable else b""
        policy, affinity = self._policy, ""
        try:
            hits = self._reader.lookup(usable, self._generations)
        except IndexUnavailable:
            hits = self._approx.lookup(usable, self._generations)
            affinity = key.hex()
            if self._informed and not any(hits.values()):
                policy = self._rendezvous
        inflight = self._inflight.match_blocks(usable)
        routing_request = RoutingRequest(
            prompt_len=request.prompt_len,
            max_tokens=request.output_len,
            device_hits={pod: blocks * size for pod, blocks in hits.items() if blocks},
            inflight_hits={pod: blocks * size for pod, blocks in inflight.items()},
            affinity=affinity,
            prefix_key=key,
        )
        if self._pull and routing_request.device_hits:
            routing_request = replace(routing_request, pull_offers=self._offer_pulls(routing_request))
        return routing_request, policy

    def _offer_pulls(self, request: RoutingRequest) -> dict[str, PullOffer]:
        """Returns the prefixes that prefill pods could pull, from prefill or decode pods."""
        pods = [known for known in self._known.values() if known.alive]
        rates = pods[0].pod.rates
        pair_rates = {known.pod.name: rates.link_byte_s for known in pods}
        for known in pods:
            known.view.pulls, known.view.pair_rates = known.pod.role is Role.PREFILL, pair_rates
            known.view.pull_s = rates.link_latency_s
        pullers, holders = self._usable[Role.PREFILL], [known.view for known in pods]
        block_bytes = int(rates.kv_bytes * self._block_size)
        return offer_pulls(request.device_hits, request.expected_hits(), pullers, holders, block_bytes)

    def _book(self, request: SimulatedRequest, policy: RoutingPolicy, options: Sequence[PodOption]) -> PodOption:
        """Returns the option to use: the atomic choice in the index if the policy counts what other gateways booked."""
        offered = options if policy.uses_shared_bookings else options[:1]
        now = self._clock.now
        candidates = [
            BookingCandidate(
                o.view.name,
                # The index adds the bookings of all gateways since the report, including this gateway.
                o.cost_s - (o.view.prefill_bookings.unreported_booked + o.view.foreign_tokens) * o.unit_cost_s,
                o.unit_cost_s,
                o.load_units,
                now - o.view.reported_at + DISPATCH_DELAY_S,
            )
            for o in offered
        ]
        try:
            reserved = self._reader.reserve(request.request_id, candidates)
        except IndexUnavailable:
            return offered[0]
        for option, booked in zip(offered, reserved.booked, strict=True):
            option.view.foreign_tokens = max(0, booked - option.view.prefill_bookings.unreported_booked)
        return offered[reserved.chosen]

    def _unbook(self, request: SimulatedRequest, route: Route) -> None:
        """Ends the booking on the prefill pod. While the index is unreachable, the booking stays until it expires."""
        with suppress(IndexUnavailable):
            self._reader.unbook(route.prefill.name, request.request_id)

    def _reserve(
        self, request: SimulatedRequest, options: Sequence[PodOption]
    ) -> tuple[SimulatedPod, PodView, DecodeSequence] | None:
        """Reserves on the first decode pod that has room; None if no pod has."""
        for option in options:
            pod = self._known[option.view.name].pod
            if not pod.alive:
                self._mark_lost(pod)
                continue
            sequence = pod.decode.reserve(
                request.prompt_len, request.output_len, request.block_hashes, request.on_decoded
            )
            if sequence is not None:
                option.view.decode_bookings.add(request.request_id, request.prompt_len, self._clock.now)
                return pod, option.view, sequence
        return None

    def _send(self, request: SimulatedRequest, route: Route) -> None:
        """Starts the attempt, or another one if a pod of the route has died."""
        decode = route.decode
        if route.prefill.alive and (decode is None or decode.alive):
            request.start(route)
            return
        request.outcome.attempts += 1
        self.release_bookings(request, route)
        if decode is not None and route.sequence is not None and decode.alive:
            decode.decode.cancel(route.sequence)
        for pod in (route.prefill, decode):
            if pod is not None and not pod.alive:
                self._mark_lost(pod)
        self.retry(request)

    def _mark_lost(self, pod: SimulatedPod) -> None:
        """Marks a pod as lost after a failed call. It is not used until a poll finds it alive."""
        known_pod = self._known[pod.name]
        if known_pod.alive:
            known_pod.alive = False
            self._refresh()

    def retry(self, request: SimulatedRequest) -> None:
        """Routes a request again after one of its pods died."""
        for known in self._known.values():
            if known.alive and not known.pod.alive:
                self._mark_lost(known.pod)
        self._clock.call_after(RETRY_PAUSE_S, lambda: self.route(request))

    def _refuse_or_wait(self, request: SimulatedRequest) -> None:
        """Refuses while all decode pods are full (429). While there are no pods at all, the request waits."""
        request.outcome.attempts += 1
        if self._usable[Role.PREFILL] or request.outcome.attempts >= MAX_ATTEMPTS:
            request.refuse()
        else:
            self._clock.call_after(NO_PODS_PAUSE_S, lambda: self.route(request))

    def progress(self, request: SimulatedRequest, route: Route, tokens_left: int) -> None:
        """Shrinks the booking: a chunk is computed."""
        route.prefill_view.prefill_bookings.shrink(request.request_id, tokens_left)

    def first_token(self, request: SimulatedRequest, route: Route) -> None:
        """Ends the booking on the prefill pod: the prompt is computed."""
        route.prefill_view.prefill_bookings.remove(request.request_id)
        self._unbook(request, route)
        for pod in (route.prefill, route.decode):
            if pod is not None:
                self._approx.record(pod.name, pod.generation, request.block_hashes)
        self._clock.call_after(INFLIGHT_LINGER_S, lambda: self._inflight.remove(request.request_id))

    def release_bookings(self, request: SimulatedRequest, route: Route) -> None:
        """Returns all bookings of an attempt that has ended."""
        route.prefill_view.prefill_bookings.remove(request.request_id)
        if route.decode_view is not None:
            route.decode_view.decode_bookings.remove(request.request_id)
        if request.outcome.ttft_s is None:
            self._inflight.remove(request.request_id)
            self._unbook(request, route)


def _view(pod: SimulatedPod) -> PodView:
    shape = pod.shape
    return PodView(
        pod.name,
        block_size=shape.block_size,
        max_request_tokens=shape.capacity,
        num_blocks=shape.num_blocks,
        role=pod.role,
    )
