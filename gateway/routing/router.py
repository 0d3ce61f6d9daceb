"""What is known of each prompt: its hashes, who holds them, what is in flight; and the bookings that gateways share.

Three sources, the best that is there: the index (redis); while it is away this gateway's own memory of where it sent
what (local); and for a prompt that that does not know, a home by rendezvous hashing (hash). Every request goes on with
the next one as soon as a source fails, and back to the index when that answers again. The index is a hint: a wrong
promise costs a recompute, never an error.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from common.block_hash import BlockHasher, matchable_blocks
from common.errors import IndexUnavailable
from common.types import Role, ValidRequest
from gateway.pods.info import PodInfo
from gateway.pods.pod import Pod
from gateway.pods.table import PodTable
from gateway.pods.view import DISPATCH_DELAY_S, PodView
from gateway.routing.local_index import ANY_POD, ApproxIndex, InFlightPrompts
from gateway.routing.placement import ChosenPod, Placement
from gateway.routing.policy import CostPolicy, PodOption, PullOffer, RendezvousHash, RoutingPolicy, RoutingRequest
from gateway.routing.pull_offers import offer_pulls
from gateway.telemetry.metrics import GatewayMetrics
from prefix_index.reader import IndexReader
from prefix_index.records import BookingCandidate, BookingResult

UNBOOK_RETRY_S = (0.5, 2.0, 8.0)  # a call is given up after some ms, and what it was to return would count for long
HASH_BLOCKS_PER_TURN = 1024  # blocks that are hashed, in 1 to 2 ms, before other requests get a turn

_log = logging.getLogger(__name__)


class Router:
    """Makes a Plan per request, and keeps what placements of all requests share (it is their Ledger)."""

    def __init__(self, table: PodTable, metrics: GatewayMetrics, *, rng: random.Random | None = None) -> None:
        rng = rng or random.Random()
        self.inflight = InFlightPrompts()
        self.approx_index = ApproxIndex()
        self._table = table
        self._metrics = metrics
        self._policy = CostPolicy(rng)
        self._rendezvous = RendezvousHash(rng)
        self._tasks: set[asyncio.Task[None]] = set()
        self._booking: dict[str, asyncio.Task[None]] = {}
        table.on_change(self._show_mode)
        table.on_forget(self.approx_index.forget)

    async def stop(self) -> None:
        """Ends what is under way in the background."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def plan(self, request: ValidRequest, affinity: str = "", layout: str | None = None) -> RoutingPlan:
        """Hashes the prompt for every layout in use, or only this, and asks who holds it. Never fails."""
        index = self._index()
        prompts: dict[str, HashedPrompt] = {}
        known, repeated = False, 0
        for fingerprint, pods in list(self._table.pods_by_layout().items()):
            info = pods[0].info
            assert info is not None
            if layout not in (None, fingerprint):
                continue
            hashes = await _hashes(request, info)
            names = [(p.info.name, p.info.generation) for p in pods if p.info]
            if not prompts:
                repeated = self.approx_index.lookup(hashes, [ANY_POD])[ANY_POD[0]] * info.block_size
            prompt = None if index is None else await self._lookup(index, info, hashes, names)
            if prompt is None:
                index = None
                held = self.approx_index.lookup(hashes, names)
                prompt = HashedPrompt(
                    hashes, info.block_size, {pod: n * info.block_size for pod, n in held.items() if n}
                )
            known = known or bool(prompt.device_hits)
            prompts[fingerprint] = prompt
        lost = index is None and not known
        self._show_mode()
        return RoutingPlan(
            request,
            prompts,
            table=self._table,
            ledger=self,
            policy=self._rendezvous if lost else self._policy,
            shared=index is not None,
            affinity=affinity,
            repeated_tokens=repeated,
            layout_fingerprint=layout,
        )

    async def _lookup(
        self, index: IndexReader, info: PodInfo, hashes: Sequence[bytes], pods: Sequence[tuple[str, int]]
    ) -> HashedPrompt | None:
        """What the index knows; None when it does not answer."""
        size, start = info.block_size, time.monotonic()
        try:
            found = await index.lookup_tiers(info.scope, hashes, pods)
        except IndexUnavailable:
            return None
        self._metrics.index_lookup.observe(time.monotonic() - start)
        held = {pod: tiers.device_blocks * size for pod, tiers in found.items() if tiers.device_blocks}
        host = {
            pod: (tiers.total_blocks - tiers.device_blocks) * size
            for pod, tiers in found.items()
            if tiers.total_blocks > tiers.device_blocks
        }
        return HashedPrompt(hashes, size, held, host)

    def _index(self) -> IndexReader | None:
        return self._table.index if self._table.index_up else None

    def _show_mode(self) -> None:
        index = self._index()
        local = "local" if len(self.approx_index) else "hash"
        mode = "redis" if index is not None and index.available else local
        if mode != self._metrics.current_index_mode:
            self._metrics.set_index_mode(mode)

    # -- what placements share

    def new_placement(
        self, request_id: str, decode: ChosenPod, prefill: ChosenPod | None, hashes: Sequence[bytes]
    ) -> Placement:
        """A placement that is not booked yet."""
        return Placement(
            request_id,
            decode,
            prefill,
            hashes,
            inflight=self.inflight,
            approx=self.approx_index,
            unbook=self._unbook,
        )

    async def choose_shared(
        self, scope: str, request_id: str, groups: Sequence[Sequence[BookingCandidate]]
    ) -> list[BookingResult]:
        """See IndexReader.reserve. Raises IndexUnavailable."""
        index = self._index()
        if index is None:
            raise IndexUnavailable("the prefix index is away")
        return await index.book(scope, request_id, groups)

    def only_gateway(self, scope: str) -> bool:
        """See IndexReader.alone."""
        index = self._index()
        return index is not None and index.is_only_gateway(scope)

    def book_shared(self, scope: str, request_id: str, groups: Sequence[Sequence[BookingCandidate]]) -> None:
        """The same in the background, for groups of one."""
        booking = self._booking[request_id] = self._spawn(self._book(scope, request_id, groups))
        booking.add_done_callback(lambda _: self._booking.pop(request_id, None))

    async def _book(self, scope: str, request_id: str, groups: Sequence[Sequence[BookingCandidate]]) -> None:
        try:
            await self.choose_shared(scope, request_id, groups)
        except IndexUnavailable as e:
            _log.debug("booking not shared: %s", e)

    def _unbook(self, request_id: str, pods: Sequence[Pod]) -> None:
        index = self._table.index
        if index is not None:
            self._spawn(self._unbook_shared(index, request_id, pods))

    async def _unbook_shared(self, index: IndexReader, request_id: str, pods: Sequence[Pod]) -> None:
        if (booking := self._booking.get(request_id)) is not None:
            await asyncio.wait({booking})  # else it would come after its end
        for pause_s in (*UNBOOK_RETRY_S, None):
            try:
                for pod in pods:
                    if pod.info is not None:
                        await index.unbook(pod.info.scope, pod.info.name, request_id)
                return
            except IndexUnavailable as e:
                if pause_s is None:
                    _log.debug("booking not returned, it expires: %s", e)
                    return
            await asyncio.sleep(pause_s)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _hashes(request: ValidRequest, info: PodInfo) -> list[bytes]:
    """Hashes of the prompt's blocks that a cache may supply."""
    size = info.block_size
    blocks = matchable_blocks(request.context_len, size)
    hasher, ids = BlockHasher(info.fingerprint, size, request.cache_salt), request.context_ids
    for end in range(HASH_BLOCKS_PER_TURN, blocks, HASH_BLOCKS_PER_TURN):
        hasher.extend(ids[: end * size])
        await asyncio.sleep(0)
    return hasher.extend(ids[: blocks * size])


PREFIX_KEY_BLOCKS = 4  # blocks whose hash is a prompt's home without an index


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """A prompt under one layout. held, host: tokens by pod name, as in Demand."""

    hashes: Sequence[bytes] = ()
    block_size: int = 1
    device_hits: Mapping[str, int] = field(default_factory=dict)
    host_hits: Mapping[str, int] = field(default_factory=dict)

    @property
    def prefix_key(self) -> bytes:
        """Hash of the first blocks; empty for a prompt without a full block."""
        return self.hashes[min(len(self.hashes), PREFIX_KEY_BLOCKS) - 1] if self.hashes else b""


class SharedBookings(Protocol):
    """Bookings that all gateways share."""

    inflight: InFlightPrompts

    def new_placement(
        self, request_id: str, decode: ChosenPod, prefill: ChosenPod | None, hashes: Sequence[bytes]
    ) -> Placement:
        """A placement that is not booked yet."""

    async def choose_shared(
        self, scope: str, request_id: str, groups: Sequence[Sequence[BookingCandidate]]
    ) -> list[BookingResult]:
        """See IndexReader.reserve. Raises IndexUnavailable."""

    def only_gateway(self, scope: str) -> bool:
        """Only this gateway books, so what it knows itself is all there is to know."""

    def book_shared(self, scope: str, request_id: str, groups: Sequence[Sequence[BookingCandidate]]) -> None:
        """The same in the background, for groups of one."""


class RoutingPlan:
    """See the top of this file. affinity: what the client wants to stay together. shared: the index answered.

    repeated: tokens at the prompt's start with which an earlier prompt of this gateway began. layout: fingerprint of
    the only pods that will do.
    """

    def __init__(
        self,
        request: ValidRequest,
        prompts: Mapping[str, HashedPrompt],
        *,
        table: PodTable,
        ledger: SharedBookings,
        policy: RoutingPolicy,
        shared: bool,
        affinity: str,
        repeated_tokens: int = 0,
        layout_fingerprint: str | None = None,
    ) -> None:
        self.request = request
        self.repeated_tokens = repeated_tokens
        self._prompts = prompts
        self._table = table
        self._bookings = ledger
        self._policy = policy
        self._index_answered = shared
        self._affinity = affinity
        self._layout = layout_fingerprint

    @property
    def expected_hit_tokens(self) -> int:
        """Prompt tokens that need no computing on the pod that has most of them, or will have once it is free."""
        most = max(
            (max(self._routing_request(p).expected_hits().values(), default=0) for p in self._prompts.values()),
            default=0,
        )
        return min(most, self.request.context_len - 1)

    async def place(self, request_id: str, avoid: Collection[str], tried: Collection[str]) -> Placement | None:
        """Chooses a pair (or one pod that does both) and books it; None when no pod is left for this request.

        avoid: addresses that are used only when there are no others; tried: decode pods that are not asked again.
        """
        now = time.monotonic()
        best: tuple[HashedPrompt, str, list[PodOption], list[PodOption]] | None = None
        for fingerprint in self._table.pods_by_layout():
            if self._layout not in (None, fingerprint):
                continue
            prompt = self._prompts.get(fingerprint, HashedPrompt())
            decodes, prefills = self._options(fingerprint, prompt, avoid, tried, now)
            if decodes and (best is None or decodes[0].cost_s < best[2][0].cost_s):
                best = prompt, fingerprint[:8], decodes, prefills
        if best is None:
            return None
        prompt, scope, *sides = best
        groups = [options for options in sides if options]
        settled = (
            not self._policy.uses_shared_bookings
            or all(len(options) == 1 for options in groups)
            or self._bookings.only_gateway(scope)
        )
        groups = [options[:1] for options in groups] if settled else groups
        pods = {option.view.address: self._table.pods[option.view.address] for group in groups for option in group}
        placement = self._bookings.new_placement(
            request_id, *_pair(pods, [group[0] for group in groups]), prompt.hashes
        )
        candidates = [[_candidate(option, now) for option in options] for options in groups]
        placement.book()
        if not self._index_answered:
            return placement
        if settled:
            self._bookings.book_shared(scope, request_id, candidates)
            return placement
        try:
            answers = await self._bookings.choose_shared(scope, request_id, candidates)
        except IndexUnavailable:
            return placement
        except BaseException:
            placement.release()
            raise
        if any(answer.chosen for answer in answers):
            chosen = [group[answer.chosen] for group, answer in zip(groups, answers, strict=True)]
            placement.rebook(*_pair(pods, chosen))
        for group, answer in zip(groups, answers, strict=True):
            _record_foreign_bookings(group, answer)
        return placement

    def _options(
        self, fingerprint: str, prompt: HashedPrompt, avoid: Collection[str], tried: Collection[str], now: float
    ) -> tuple[list[PodOption], list[PodOption]]:
        """Decode pods of one layout and one role, and prefill pods for them; none of either when one is missing."""
        demand = self._routing_request(prompt)
        here = [p for p in self._table.decode_pods() if p.info and p.info.fingerprint == fingerprint]
        decodes = self._policy.rank_decode_pods(demand, _views([p for p in here if p.address not in tried], avoid), now)
        if not decodes or decodes[0].view.role is Role.BOTH:
            return [option for option in decodes if option.view.role is Role.BOTH], []
        able = _views(self._table.prefill_pods(fingerprint), avoid)
        if self._index_answered and prompt.device_hits and self.request.sampling.prompt_logprobs is None:
            offers = self._offer_pulls(fingerprint, prompt, demand.expected_hits(), able)
            demand = replace(demand, pull_offers=offers) if offers else demand
        prefills = self._policy.rank_prefill_pods(demand, able, now)
        return ([option for option in decodes if option.view.role is Role.DECODE] if prefills else []), prefills

    def _offer_pulls(
        self, fingerprint: str, prompt: HashedPrompt, promises: Mapping[str, int], able: Sequence[PodView]
    ) -> dict[str, PullOffer]:
        """What prefill pods could fetch from any pod of their layout."""
        pods = self._table.pods_by_layout().get(fingerprint, [])
        holders = [pod.view for pod in pods if pod.view is not None]
        info = pods[0].info if pods else None
        return {} if info is None else offer_pulls(prompt.device_hits, promises, able, holders, info.block_bytes)

    def find_holder(self, name: str) -> PodInfo | None:
        """The pod of this name, if it is still there."""
        pods = (pod for found in self._table.pods_by_layout().values() for pod in found)
        return next((pod.info for pod in pods if pod.info is not None and pod.info.name == name), None)

    def _routing_request(self, prompt: HashedPrompt) -> RoutingRequest:
        soon = self._bookings.inflight.match_blocks(prompt.hashes)
        return RoutingRequest(
            prompt_len=self.request.context_len,
            max_tokens=self.request.sampling.max_tokens - len(self.request.output_ids),
            device_hits=prompt.device_hits,
            host_hits=prompt.host_hits,
            inflight_hits={pod: blocks * prompt.block_size for pod, blocks in soon.items()},
            affinity=self._affinity or ("" if self._index_answered else prompt.prefix_key.hex()),
            prefix_key=prompt.prefix_key,
        )


def _views(pods: Sequence[Pod], avoid: Collection[str]) -> list[PodView]:
    """Of the pods that did not fail this request; of all when there are no others."""
    views = [pod.view for pod in pods if pod.view is not None]
    if not avoid:
        return views
    return [view for view in views if view.address not in avoid] or views


def _pair(pods: Mapping[str, Pod], options: Sequence[PodOption]) -> tuple[ChosenPod, ChosenPod | None]:
    decode, *prefill = [ChosenPod(pods[option.view.address], option) for option in options]
    return decode, prefill[0] if prefill else None


def _candidate(option: PodOption, now: float) -> BookingCandidate:
    """Its cost without what was booked since its report: the index knows that better."""
    view = option.view
    if view.role is Role.DECODE:
        known = view.decode_bookings.unreported_count + view.foreign_sequences
    else:
        known = view.prefill_bookings.unreported_booked + view.foreign_tokens
    return BookingCandidate(
        view.name,
        option.cost_s - known * option.unit_cost_s,
        option.unit_cost_s,
        option.load_units,
        now - view.reported_at + DISPATCH_DELAY_S,
    )


def _record_foreign_bookings(options: Sequence[PodOption], answer: BookingResult) -> None:
    """What other gateways booked on these pods counts until their next reports."""
    for option, booked in zip(options, answer.booked, strict=True):
        view = option.view
        if view.role is Role.DECODE:
            view.foreign_sequences = max(0, booked - view.decode_bookings.unreported_count)
        else:
            view.foreign_tokens = max(0, booked - view.prefill_bookings.unreported_booked)
