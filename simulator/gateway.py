"""A gateway of the simulated cluster: the real policy and its bookkeeping over views that reports and polls refresh.

It knows only what a gateway can know: reports are as old as the last poll, a dead pod is noticed by a failed call or
by the poll, and what pods hold comes from the index, which may be late, away or wrong.
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

LINGER_S = 0.2  # a computed prompt stays predicted until the pod's batch has reached the index
KEY_BLOCKS = 4
RETRY_S = 0.05
MAX_TRIES = 5


@dataclass(slots=True)
class _KnownPod:
    """One pod as this gateway knows it."""

    member: SimulatedPod
    view: PodView
    generation: int
    alive: bool = True


class SimulatedGateway:
    """One gateway. overhead_s: what it adds to a request before a pod sees it."""

    def __init__(
        self,
        index: SimIndex,
        members: Sequence[SimulatedPod],
        *,
        policy: str,
        seed: int,
        block_size: int,
        overhead_s: float,
        pull: bool = False,
    ) -> None:
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
        self._known = {member.name: _KnownPod(member, _view(member), member.generation) for member in members}
        self._decodes = any(member.role is Role.DECODE for member in members)
        self._usable: dict[Role, list[PodView]] = {}
        self._pairs: list[tuple[str, int]] = []
        self._refresh()

    def poll(self) -> None:
        """Reads the load and the generation of every pod."""
        now, changed = self._clock.now, False
        for known in self._known.values():
            member = known.member
            if member.alive != known.alive or (member.alive and member.generation != known.generation):
                changed = True
                known.alive = member.alive
                if member.alive and member.generation != known.generation:
                    known.view, known.generation = _view(member), member.generation
            if member.alive:
                known.view.apply_report(member.pod.load(), now)
        if changed:
            self._refresh()
        for views in self._usable.values():
            fill_in_from_peers(views)

    def _refresh(self) -> None:
        alive = [known for known in self._known.values() if known.alive]
        self._usable = {role: [k.view for k in alive if k.member.role is role] for role in (Role.PREFILL, Role.DECODE)}
        self._pairs = [(k.member.name, k.generation) for k in alive]

    def route(self, flight: SimulatedRequest) -> None:
        """Chooses, reserves and books; the pods see it overhead_s later."""
        demand, policy = self._demand(flight)
        now = self._clock.now
        prefills = policy.rank_prefill_pods(demand, self._usable[Role.PREFILL], now)
        if not prefills:
            self._refuse_or_wait(flight)
            return
        decode: SimulatedPod | None = None
        decode_view: PodView | None = None
        answer: DecodeSequence | None = None
        if self._decodes:
            found = self._reserve(flight, policy.rank_decode_pods(demand, self._usable[Role.DECODE], now))
            if found is None:
                self._refuse_or_wait(flight)
                return
            decode, decode_view, answer = found
        option = self._book(flight, policy, prefills)
        member = self._known[option.view.name].member
        option.view.prefill_bookings.add(flight.request_id, option.missing_tokens, now)
        self._inflight.add(flight.request_id, option.view.name, flight.block_hashes)
        holder = self._known[option.pull_offer.holder].member if option.pull_offer else None
        choice = Route(member, option.view, decode, decode_view, answer, option.hit_tokens, holder, option.pull_offer)
        self._clock.call_after(self._overhead_s, lambda: self._send(flight, choice))

    def _demand(self, flight: SimulatedRequest) -> tuple[RoutingRequest, RoutingPolicy]:
        """What is known of the prompt, and the policy for that: the home of its first blocks when nothing is."""
        size = self._block_size
        usable = flight.block_hashes[: matchable_blocks(flight.prompt_len, size)]
        key = usable[min(len(usable), KEY_BLOCKS) - 1] if usable else b""
        policy, affinity = self._policy, ""
        try:
            found = self._reader.lookup(usable, self._pairs)
        except IndexUnavailable:
            found = self._approx.lookup(usable, self._pairs)
            affinity = key.hex()
            if self._informed and not any(found.values()):
                policy = self._rendezvous
        soon = self._inflight.match_blocks(usable)
        demand = RoutingRequest(
            prompt_len=flight.prompt_len,
            max_tokens=flight.output_len,
            device_hits={pod: blocks * size for pod, blocks in found.items() if blocks},
            inflight_hits={pod: blocks * size for pod, blocks in soon.items()},
            affinity=affinity,
            prefix_key=key,
        )
        if self._pull and demand.device_hits:
            demand = replace(demand, pull_offers=self._pulls(demand))
        return demand, policy

    def _pulls(self, demand: RoutingRequest) -> dict[str, PullOffer]:
        """What prefill pods could fetch from any pod."""
        pods = [known for known in self._known.values() if known.alive]
        rates = pods[0].member.rates
        pair_rates = {known.member.name: rates.link_byte_s for known in pods}
        for known in pods:
            known.view.pulls, known.view.pair_rates = known.member.role is Role.PREFILL, pair_rates
            known.view.pull_s = rates.link_latency_s
        able, holders = self._usable[Role.PREFILL], [known.view for known in pods]
        return offer_pulls(
            demand.device_hits, demand.expected_hits(), able, holders, int(rates.kv_bytes * self._block_size)
        )

    def _book(self, flight: SimulatedRequest, policy: RoutingPolicy, options: Sequence[PodOption]) -> PodOption:
        """The option to take: the atomic choice among gateways, where the policy heeds what others booked."""
        offered = options if policy.uses_shared_bookings else options[:1]
        now = self._clock.now
        candidates = [
            BookingCandidate(
                o.view.name,
                # The ledger adds what everybody booked since the report, this gateway included.
                o.cost_s - (o.view.prefill_bookings.unreported_booked + o.view.foreign_tokens) * o.unit_cost_s,
                o.unit_cost_s,
                o.load_units,
                now - o.view.reported_at + DISPATCH_DELAY_S,
            )
            for o in offered
        ]
        try:
            reserved = self._reader.reserve(flight.request_id, candidates)
        except IndexUnavailable:
            return offered[0]
        for option, booked in zip(offered, reserved.booked, strict=True):
            option.view.foreign_tokens = max(0, booked - option.view.prefill_bookings.unreported_booked)
        return offered[reserved.chosen]

    def _unbook(self, flight: SimulatedRequest, choice: Route) -> None:
        """Ends the booking on the prefill pod; while the index is away, the booking stays until it expires."""
        with suppress(IndexUnavailable):
            self._reader.unbook(choice.prefill.name, flight.request_id)

    def _reserve(
        self, flight: SimulatedRequest, options: Sequence[PodOption]
    ) -> tuple[SimulatedPod, PodView, DecodeSequence] | None:
        """The first decode pod with room."""
        for option in options:
            member = self._known[option.view.name].member
            if not member.alive:
                self._mark_lost(member)
                continue
            answer = member.decode.reserve(flight.prompt_len, flight.output_len, flight.block_hashes, flight.on_decoded)
            if answer is not None:
                option.view.decode_bookings.add(flight.request_id, flight.prompt_len, self._clock.now)
                return member, option.view, answer
        return None

    def _send(self, flight: SimulatedRequest, choice: Route) -> None:
        decode = choice.decode
        if choice.prefill.alive and (decode is None or decode.alive):
            flight.start(choice)
            return
        flight.outcome.attempts += 1
        self.release_bookings(flight, choice)
        if decode is not None and choice.answer is not None and decode.alive:
            decode.decode.cancel(choice.answer)
        for member in (choice.prefill, decode):
            if member is not None and not member.alive:
                self._mark_lost(member)
        self.retry(flight)

    def _mark_lost(self, member: SimulatedPod) -> None:
        """A call failed: it is not used until a poll finds it again."""
        known = self._known[member.name]
        if known.alive:
            known.alive = False
            self._refresh()

    def retry(self, flight: SimulatedRequest) -> None:
        """Routes a request anew after a pod died under it."""
        for known in self._known.values():
            if known.alive and not known.member.alive:
                self._mark_lost(known.member)
        self._clock.call_after(RETRY_S, lambda: self.route(flight))

    def _refuse_or_wait(self, flight: SimulatedRequest) -> None:
        """429 while all decode pods are full; while there are no pods at all it waits for some."""
        flight.outcome.attempts += 1
        if self._usable[Role.PREFILL] or flight.outcome.attempts >= MAX_TRIES:
            flight.refuse()
        else:
            self._clock.call_after(1.0, lambda: self.route(flight))

    def progress(self, flight: SimulatedRequest, choice: Route, left: int) -> None:
        """A chunk is done."""
        choice.prefill_view.prefill_bookings.shrink(flight.request_id, left)

    def first_token(self, flight: SimulatedRequest, choice: Route) -> None:
        """Its prompt is computed."""
        choice.prefill_view.prefill_bookings.remove(flight.request_id)
        self._unbook(flight, choice)
        for member in (choice.prefill, choice.decode):
            if member is not None:
                self._approx.record(member.name, member.generation, flight.block_hashes)
        self._clock.call_after(LINGER_S, lambda: self._inflight.remove(flight.request_id))

    def release_bookings(self, flight: SimulatedRequest, choice: Route) -> None:
        """The attempt is over, however it ended."""
        choice.prefill_view.prefill_bookings.remove(flight.request_id)
        if choice.decode_view is not None:
            choice.decode_view.decode_bookings.remove(flight.request_id)
        if flight.outcome.ttft_s is None:
            self._inflight.remove(flight.request_id)
            self._unbook(flight, choice)


def _view(member: SimulatedPod) -> PodView:
    shape = member.shape
    return PodView(
        member.name,
        block_size=shape.block_size,
        max_request_tokens=shape.capacity,
        num_blocks=shape.num_blocks,
        role=member.role,
    )
