"""A gateway of the simulated cluster, with the real routing policy, and the requests that it routes to simulated pods.

The gateway knows only as much as a real one: the load is as old as the last poll, a failed call or a poll notices a
dead pod, and the index may be late, unreachable or wrong. A request takes the steps of gateway/dispatch/attempt.py:

    reserve on a decode pod -> prefill, each chunk's KV is sent when it is computed -> first token -> decode -> end

Without decode pods a request ends with its first token. If one of its pods dies, the request is routed again: with the
whole prompt, followed by the tokens that were generated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from common.block_hash import matchable_blocks
from common.errors import IndexUnavailable
from common.types import Role
from gateway.pods.fitness import compare_speeds
from gateway.pods.view import DISPATCH_DELAY_S, PodView, fill_in_from_peers, fit_views
from gateway.routing.local_index import ApproxIndex, InFlightPrompts
from gateway.routing.policy import PodOption, PullOffer, RendezvousHash, RoutingPolicy, RoutingRequest, offer_pulls
from loadtest.workload.trace import WorkloadRequest
from prefix_index.store import BookingCandidate
from simulator.clock import VirtualClock
from simulator.index import SimIndex
from simulator.pod import DecodeSequence, PromptSequence, SimulatedPod
from simulator.policies import INFORMED, POLICIES
from simulator.spec import ClusterSpec, RequestOutcome

INFLIGHT_LINGER_S = 0.2  # A computed prompt counts as in flight until the pod's next batch has reached the index.
PREFIX_KEY_BLOCKS = 4  # Blocks that the prefix key covers.
RETRY_PAUSE_S = 0.05  # Pause before a request is routed again.
NO_PODS_PAUSE_S = 1.0  # Pause before a request looks for pods again while there are none.
MAX_ATTEMPTS = 5  # Attempts after which a request without pods is refused.


@dataclass(frozen=True, slots=True)
class DecodeSlot:
    """A decode pod and the reservation on it."""

    pod: SimulatedPod
    view: PodView
    sequence: DecodeSequence


@dataclass(frozen=True, slots=True)
class Route:
    """The pods of one attempt."""

    prefill: SimulatedPod
    prefill_view: PodView
    decode: DecodeSlot | None  # None in a cluster without decode pods.
    expected_hit_tokens: int  # Prompt tokens that the prefill pod is expected to hold, after a pull if there is one.
    holder: SimulatedPod | None = None  # The pod to pull a prefix from first.
    pull: PullOffer | None = None


@dataclass(slots=True)
class _KnownPod:
    """One pod as this gateway knows it, which may be out of date."""

    pod: SimulatedPod
    view: PodView
    generation: int
    alive: bool = True
    leaving: bool = False


class SimulatedGateway:
    """Routes requests over the simulated pods with the policy of the real gateway, or one to compare with."""

    def __init__(self, index: SimIndex, pods: Sequence[SimulatedPod], spec: ClusterSpec, seed: int) -> None:
        self._clock = index.clock
        self._reader = index.reader()
        self._approx = ApproxIndex(clock=index.clock.time)
        self._spec = spec
        rng = random.Random(seed)
        self._policy = POLICIES[spec.policy](rng)
        self._informed = spec.policy in INFORMED
        self._rendezvous: RoutingPolicy = RendezvousHash(rng)
        self._inflight = InFlightPrompts()
        self._known = {pod.name: _KnownPod(pod, _view(pod), pod.generation) for pod in pods}
        self._usable: dict[Role, list[PodView]] = {}
        self._generations: list[tuple[str, int]] = []
        self._refresh()

    def poll(self) -> None:
        """Reads the load and the generation of every pod."""
        now, changed = self._clock.now, False
        for known in self._known.values():
            pod = known.pod
            restarted = pod.alive and pod.generation != known.generation
            changed |= restarted or pod.alive != known.alive
            known.alive = pod.alive
            if restarted:
                known.view, known.generation = _view(pod), pod.generation
            if pod.alive:
                known.view.apply_report(pod.process.load(), now)
        if changed:
            self._refresh()
        for views in self._usable.values():
            fill_in_from_peers(views)
            compare_speeds(views, now)

    def add_pod(self, pod: SimulatedPod) -> None:
        """Uses a pod from now on, in its present role."""
        self._known[pod.name] = _KnownPod(pod, _view(pod), pod.generation)
        self._refresh()

    def remove_pod(self, pod: SimulatedPod) -> None:
        """Gives a pod that leaves no more requests."""
        if (known := self._known.get(pod.name)) is not None:
            known.leaving = True
            self._refresh()

    def _refresh(self) -> None:
        alive = [known for known in self._known.values() if known.alive and not known.leaving]
        self._usable = {role: [k.view for k in alive if k.pod.role is role] for role in (Role.PREFILL, Role.DECODE)}
        self._generations = [(k.pod.name, k.generation) for k in alive]

    def route(self, request: SimulatedRequest) -> None:
        """Chooses the pods, reserves on the decode pod and books; the pods see the request overhead_s later."""
        routing_request, policy = self._routing_request(request)
        now = self._clock.now
        prefills = policy.rank_prefill_pods(routing_request, fit_views(self._usable[Role.PREFILL], now), now)
        decode: DecodeSlot | None = None
        if prefills and self._spec.decode:
            options = policy.rank_decode_pods(routing_request, fit_views(self._usable[Role.DECODE], now), now)
            decode = self._reserve(request, options)
        if not prefills or (decode is None and self._spec.decode):
            self._refuse_or_wait(request)
            return
        option = self._book(request, policy, prefills)
        prefill = self._known[option.view.name].pod
        option.view.prefill_bookings.add(request.request_id, option.missing_tokens, now)
        option.view.on_sent(request.request_id, now)
        self._inflight.add(request.request_id, option.view.name, request.block_hashes)
        offer = option.pull_offer
        holder = self._known[offer.holder].pod if offer else None
        route = Route(prefill, option.view, decode, option.hit_tokens, holder, offer)
        self._clock.call_after(self._spec.overhead_s, lambda: self._send(request, route))

    def _routing_request(self, request: SimulatedRequest) -> tuple[RoutingRequest, RoutingPolicy]:
        """Looks up the prompt's hits. Returns rendezvous hashing as the policy if no source knows the prompt."""
        size = self._spec.block_size
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
        if self._spec.pull and routing_request.device_hits:
            routing_request = replace(routing_request, pull_offers=self._offer_pulls(routing_request))
        return routing_request, policy

    def _offer_pulls(self, request: RoutingRequest) -> dict[str, PullOffer]:
        """Returns the prefixes that prefill pods could pull, from prefill or decode pods."""
        rates, pullers = self._spec.rates, self._usable[Role.PREFILL]
        holders = [*pullers, *self._usable[Role.DECODE]]
        pair_rates = {view.name: rates.link_byte_s for view in holders}
        for view in holders:
            view.pulls, view.pair_rates, view.pull_s = view.role is Role.PREFILL, pair_rates, rates.link_latency_s
        block_bytes = int(rates.kv_bytes * self._spec.block_size)
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

    def _reserve(self, request: SimulatedRequest, options: Sequence[PodOption]) -> DecodeSlot | None:
        """Reserves on the first decode pod that has room; None if no pod has."""
        for option in options:
            pod = self._known[option.view.name].pod
            if not pod.alive:
                self._mark_lost(pod)
                continue
            sequence = pod.decode.reserve(request.prompt_len, request.output_len, request.block_hashes, request.end)
            if sequence is not None:
                option.view.decode_bookings.add(request.request_id, request.prompt_len, self._clock.now)
                option.view.on_sent(request.request_id, self._clock.now)
                return DecodeSlot(pod, option.view, sequence)
        return None

    def _send(self, request: SimulatedRequest, route: Route) -> None:
        """Starts the attempt, or another one if a pod of the route has died."""
        decode = route.decode
        if route.prefill.alive and (decode is None or decode.pod.alive):
            request.start(route)
            return
        request.outcome.attempts += 1
        self.release_bookings(request, route)
        if decode is not None:
            decode.pod.decode.cancel(decode.sequence)
        self.retry(request)

    def _mark_lost(self, pod: SimulatedPod) -> None:
        """Marks a pod as lost after a failed call. It is not used until a poll finds it alive."""
        self._known[pod.name].alive = False
        self._refresh()

    def retry(self, request: SimulatedRequest) -> None:
        """Routes a request again after one of its pods died."""
        for known in self._known.values():
            known.alive = known.alive and known.pod.alive
        self._refresh()
        self._clock.call_after(RETRY_PAUSE_S, lambda: self.route(request))

    def _refuse_or_wait(self, request: SimulatedRequest) -> None:
        """Refuses while all decode pods are full (429). While there are no pods at all, the request waits."""
        request.outcome.attempts += 1
        if self._usable[Role.PREFILL] or request.outcome.attempts >= MAX_ATTEMPTS:
            request.refuse()
        else:
            self._clock.call_after(NO_PODS_PAUSE_S, lambda: self.route(request))

    def first_token(self, request: SimulatedRequest, route: Route) -> None:
        """Ends the booking on the prefill pod: the prompt is computed."""
        route.prefill_view.prefill_bookings.remove(request.request_id)
        route.prefill_view.on_end(request.request_id, success=True)
        self._unbook(request, route)
        for pod in (route.prefill,) if route.decode is None else (route.prefill, route.decode.pod):
            self._approx.record(pod.name, pod.generation, request.block_hashes)
        self._clock.call_after(INFLIGHT_LINGER_S, lambda: self._inflight.remove(request.request_id))

    def release_bookings(self, request: SimulatedRequest, route: Route) -> None:
        """Returns all bookings of an attempt that has ended."""
        now, decode = self._clock.now, route.decode
        used = [(route.prefill_view, route.prefill)] + ([] if decode is None else [(decode.view, decode.pod)])
        for view, pod in used:
            if not pod.alive:
                view.breaker.on_failure(request.request_id, now)
            view.on_end(request.request_id, success=view is not route.prefill_view and request.outcome.done)
        route.prefill_view.prefill_bookings.remove(request.request_id)
        if route.decode is not None:
            route.decode.view.decode_bookings.remove(request.request_id)
        if request.outcome.ttft_s is None:
            self._inflight.remove(request.request_id)
            self._unbook(request, route)


def _view(pod: SimulatedPod) -> PodView:
    size, blocks = pod.shape.block_size, pod.shape.num_blocks
    return PodView(pod.name, block_size=size, max_request_tokens=size * blocks, num_blocks=blocks, role=pod.role)


class SimulatedRequest:
    """Ends exactly once: with outcome.done or outcome.refused, and a call of `on_end`."""

    def __init__(
        self,
        clock: VirtualClock,
        gateway: SimulatedGateway,
        request_id: str,
        request: WorkloadRequest,
        block_size: int,
        on_end: Callable[[SimulatedRequest], None],
    ) -> None:
        self.request_id = request_id
        self.block_hashes = request.block_hashes
        self.prompt_len = request.prompt_len
        self.output_len = request.output_len
        self.outcome = RequestOutcome(request.arrival_s, request.prompt_len, request.output_len)
        self._clock = clock
        self._gateway = gateway
        self._block_size = block_size
        self._on_end = on_end
        self._route: Route | None = None  # The pods of the current attempt, None between attempts.
        self._prompt: PromptSequence | None = None
        self._sent = 0  # Prompt tokens with KV on the decode pod or on the way there.
        self._first_token_at: float | None = None
        self._resumed_tokens = 0  # Output tokens from attempts that lost their decode pod; now part of the prompt.

    def start(self, route: Route) -> None:
        self._route = route
        self.outcome.attempts += 1
        self.outcome.expected_hit_tokens = route.expected_hit_tokens
        route.prefill.prompts += 1
        route.prefill.on_lost[self.request_id] = self._on_pod_lost
        if route.decode is not None:
            route.decode.pod.on_lost[self.request_id] = self._on_pod_lost
            self._sent = route.decode.sequence.cached_blocks * self._block_size
        prompt = self._prompt = PromptSequence(
            f"{self.request_id}.{self.outcome.attempts}",
            self.prompt_len,
            self.block_hashes,
            self._block_size,
            on_chunk=self._on_chunk,
            on_first_token=self._on_first_token,
        )
        if route.pull is not None and route.holder is not None and route.holder.alive:
            self._pull(route, prompt, route.holder, route.pull.tokens // self._block_size)
        else:
            route.prefill.prefill.add(prompt)

    def _pull(self, route: Route, prompt: PromptSequence, holder: SimulatedPod, blocks: int) -> None:
        """Sends the blocks that the holder really has, then queues the prompt on the prefill pod."""
        held = list(self.block_hashes[: holder.process.pool.match_prefix(self.block_hashes[:blocks])])
        missing = max(0, len(held) - route.prefill.process.pool.match_prefix(held))
        sent_at = holder.send_kv(missing * self._block_size)

        def on_pulled() -> None:
            if self._route is route:  # otherwise a pod died meanwhile
                route.prefill.prefill.add_prefix(held)
                route.prefill.prefill.add(prompt)

        self._clock.call_at(sent_at + holder.rates.link_latency_s, on_pulled)

    def _on_chunk(self, prompt: PromptSequence) -> None:
        route = self._route
        assert route is not None
        route.prefill_view.prefill_bookings.shrink(self.request_id, prompt.remaining)
        if route.decode is not None and prompt.remaining:
            self._send_kv(route, prompt.computed)

    def _send_kv(self, route: Route, computed: int) -> float:
        """Queues the KV up to token `computed` on the prefill pod's link. Returns when it is sent."""
        new, self._sent = max(0, computed - self._sent), max(self._sent, computed)
        return route.prefill.send_kv(new)

    def _on_first_token(self, prompt: PromptSequence) -> None:
        route, now = self._route, self._clock.now
        assert route is not None
        self.outcome.hit_tokens = prompt.cached_tokens
        if self._first_token_at is None:
            self._first_token_at = now
            self.outcome.ttft_s = now - self.outcome.arrival_s
        self._gateway.first_token(self, route)
        if (decode := route.decode) is None:
            route.prefill.prefill.release(prompt)
            self.end()
            return

        prefill = route.prefill.prefill  # of now: the pod may have another role later

        def on_handed_off() -> None:
            """Starts decoding: the decode pod has all KV of the prompt."""
            prefill.release(prompt)
            if self._route is route:  # otherwise a pod died meanwhile
                route.prefill.on_lost.pop(self.request_id, None)
                decode.pod.decode.join(decode.sequence)

        arrival = self._send_kv(route, self.prompt_len) + route.prefill.rates.link_latency_s
        self._clock.call_at(arrival, on_handed_off)

    def refuse(self) -> None:
        """Ends the request without an answer: no pod takes it."""
        self.outcome.refused = True
        self._on_end(self)

    def _on_pod_lost(self, pod: SimulatedPod) -> None:
        """Ends the attempt, because one of its pods has died, and starts another."""
        route, prompt = self._route, self._prompt
        assert route is not None
        self._release()
        if pod is not route.prefill and prompt is not None:
            route.prefill.prefill.cancel(prompt)
        if (decode := route.decode) is not None:
            if pod is decode.pod:
                self._resume(pod.decode.progress(decode.sequence))
            else:
                decode.pod.decode.cancel(decode.sequence)
        self._gateway.retry(self)

    def _resume(self, decoded: int) -> None:
        """Moves the tokens that the dead decode pod generated from the output to the prompt."""
        from_prefill = self._first_token_at is not None and self._resumed_tokens == 0
        generated = min(self.output_len - 1, decoded + from_prefill)
        self._resumed_tokens += generated
        self.prompt_len += generated
        self.output_len -= generated

    def _release(self) -> None:
        """Leaves the pods and returns the bookings. Idempotent."""
        route, self._route, self._prompt = self._route, None, None
        if route is None:
            return
        route.prefill.on_lost.pop(self.request_id, None)
        if route.decode is not None:
            route.decode.pod.on_lost.pop(self.request_id, None)
        self._gateway.release_bookings(self, route)

    def end(self) -> None:
        """Ends the request after its last token."""
        self.outcome.done = True
        self._release()
        assert self._first_token_at is not None
        gaps, seconds = self.outcome.output_len - 1, self._clock.now - self._first_token_at
        if gaps and seconds:
            self.outcome.mean_itl_s = seconds / gaps
        self._on_end(self)
