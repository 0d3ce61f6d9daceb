"""Looks up who holds a prompt, and places the attempts of a request on pods.

Hits come from the best source that answers:

    redis   the prefix index
    local   ApproxIndex, this gateway's memory of its own prompts, while the index is away
    hash    rendezvous hashing, for a prompt that `local` does not know

A source that fails is replaced by the next one at once, and used again once it answers. All of them are hints: a wrong
hit costs a recomputation, never an error.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from common.block_hash import BlockHasher, matchable_blocks
from common.errors import IndexUnavailable
from common.types import Role, ValidRequest
from gateway.pods.info import PodInfo
from gateway.pods.pod import Pod
from gateway.pods.table import PodTable
from gateway.pods.view import DISPATCH_DELAY_S, PodView, fit_views
from gateway.routing.local_index import ANY_POD, ApproxIndex, InFlightPrompts
from gateway.routing.placement import ChosenPod, Placement
from gateway.routing.policy import (
    CostPolicy,
    PodOption,
    PullOffer,
    RendezvousHash,
    RoutingPolicy,
    RoutingRequest,
    offer_pulls,
)
from gateway.telemetry.metrics import GatewayMetrics
from prefix_index.reader import IndexReader
from prefix_index.store import BookingCandidate, BookingResult

PREFIX_KEY_BLOCKS = 4  #: Blocks at the start of a prompt that its prefix key covers.
HASH_BLOCKS_PER_TURN = 1024  #: Blocks hashed, in 1 to 2 ms, before other requests get a turn of the event loop.
#: Pauses before an unbooking that failed is retried. An index call fails after a few ms, but a booking that stays
#: would count on its pod until it expires.
UNBOOK_RETRY_S = (0.5, 2.0, 8.0)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """Block hashes of a prompt under one KV layout, and its hits in prompt tokens by pod name."""

    hashes: Sequence[bytes] = ()
    block_size: int = 1
    device_hits: Mapping[str, int] = field(default_factory=dict)
    host_hits: Mapping[str, int] = field(default_factory=dict)  #: Further tokens in host memory.
    disk_hits: Mapping[str, int] = field(default_factory=dict)  #: Further tokens on the disk.

    @property
    def prefix_key(self) -> bytes:
        """Hash of the first blocks; empty for a prompt without a full block."""
        return self.hashes[min(len(self.hashes), PREFIX_KEY_BLOCKS) - 1] if self.hashes else b""


class Router:
    """Plans the requests of one model. Their attempts share its prompts in flight, bookings and background tasks."""

    def __init__(self, table: PodTable, metrics: GatewayMetrics, *, rng: random.Random | None = None) -> None:
        rng = rng or random.Random()
        self.inflight = InFlightPrompts()
        self.approx_index = ApproxIndex()
        self._table = table
        self.metrics = metrics
        self._policy = CostPolicy(rng)
        self._rendezvous = RendezvousHash(rng)
        self._tasks: set[asyncio.Task[None]] = set()
        self._booking: dict[str, asyncio.Task[None]] = {}  #: Background bookings by request id.
        table.on_change(self._show_mode)
        table.on_forget(self.approx_index.forget)

    async def stop(self) -> None:
        """Cancels the background tasks: Prefill calls that still run, and calls to the index."""
        while tasks := list(self._tasks):  # an attempt that ends starts a call to the index
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # -- look-up

    async def plan(
        self, request: ValidRequest, affinity: str = "", layout_fingerprint: str | None = None
    ) -> RoutingPlan:
        """Hashes the prompt and looks up its hits, for one KV layout or (None) for all in use. Never fails.

        Requests of equal `affinity` prefer the same pods.
        """
        index = self._index()
        prompts: dict[str, HashedPrompt] = {}
        any_hits, repeated_tokens = False, 0
        for fingerprint, pods in list(self._table.pods_by_layout().items()):
            info = pods[0].info
            assert info is not None
            if layout_fingerprint not in (None, fingerprint):
                continue
            hashes = await _hash_blocks(request, info)
            generations = [(p.info.name, p.info.generation) for p in pods if p.info]
            if not prompts:
                repeated_tokens = self.approx_index.lookup(hashes, [ANY_POD])[ANY_POD[0]] * info.block_size
            prompt = None if index is None else await self._lookup(index, info, hashes, generations)
            if prompt is None:
                index = None
                blocks = self.approx_index.lookup(hashes, generations)
                device_hits = {pod: n * info.block_size for pod, n in blocks.items() if n}
                prompt = HashedPrompt(hashes, info.block_size, device_hits)
            any_hits = any_hits or bool(prompt.device_hits)
            prompts[fingerprint] = prompt
        self._show_mode()
        return RoutingPlan(
            request=request,
            prompts=prompts,
            table=self._table,
            router=self,
            policy=self._rendezvous if index is None and not any_hits else self._policy,
            index_answered=index is not None,
            affinity=affinity,
            repeated_tokens=repeated_tokens,
            layout_fingerprint=layout_fingerprint,
        )

    async def _lookup(
        self, index: IndexReader, info: PodInfo, hashes: Sequence[bytes], generations: Sequence[tuple[str, int]]
    ) -> HashedPrompt | None:
        """Looks a prompt up in the prefix index. Returns None if the index does not answer."""
        size, start = info.block_size, time.monotonic()
        try:
            found = await index.lookup_tiers(info.scope, hashes, generations)
        except IndexUnavailable:
            return None
        self.metrics.index_lookup.observe(time.monotonic() - start)
        device_hits = {pod: hits.device_blocks * size for pod, hits in found.items() if hits.device_blocks}
        host_hits = {
            pod: tokens * size
            for pod, hits in found.items()
            if (tokens := hits.total_blocks - hits.device_blocks - hits.disk_blocks)
        }
        disk_hits = {pod: hits.disk_blocks * size for pod, hits in found.items() if hits.disk_blocks}
        return HashedPrompt(hashes, size, device_hits, host_hits, disk_hits)

    def _index(self) -> IndexReader | None:
        return self._table.index if self._table.index_up else None

    def _show_mode(self) -> None:
        """Sets the metric of the current source of hits."""
        index, local = self._index(), "local" if len(self.approx_index) else "hash"
        mode = "redis" if index is not None and index.available else local
        if mode != self.metrics.current_index_mode:
            self.metrics.set_index_mode(mode)

    # -- placements and the bookings that gateways share

    def only_gateway(self, scope: str) -> bool:
        """No other gateway books in this scope, so the bookings of this one are all there are."""
        index = self._index()
        return index is not None and index.is_only_gateway(scope)

    async def choose_shared(
        self, scope: str, request_id: str, groups: Sequence[Sequence[BookingCandidate]]
    ) -> list[BookingResult]:
        """Chooses and books one candidate of each group, atomically among gateways. Raises IndexUnavailable."""
        index = self._index()
        if index is None:
            raise IndexUnavailable("the prefix index is away")
        return await index.book(scope, request_id, groups)

    def book_shared(self, scope: str, request_id: str, groups: Sequence[Sequence[BookingCandidate]]) -> None:
        """Books groups of one candidate each, in the background."""
        booking = self._booking[request_id] = self.spawn(self._book(scope, request_id, groups))
        booking.add_done_callback(lambda _: self._booking.pop(request_id, None))

    async def _book(self, scope: str, request_id: str, groups: Sequence[Sequence[BookingCandidate]]) -> None:
        try:
            await self.choose_shared(scope, request_id, groups)
        except IndexUnavailable as e:
            _log.debug("booking not shared: %s", e)

    def unbook_shared(self, request_id: str, pods: Sequence[Pod]) -> None:
        """Ends the bookings of a request on these pods in the index, in the background."""
        index = self._table.index
        if index is not None:
            self.spawn(self._unbook(index, request_id, pods))

    async def _unbook(self, index: IndexReader, request_id: str, pods: Sequence[Pod]) -> None:
        if (booking := self._booking.get(request_id)) is not None:
            await asyncio.wait({booking})  # a booking after its unbooking would stay
        for pause_s in (*UNBOOK_RETRY_S, None):
            try:
                for pod in pods:
                    if pod.info is not None:
                        await index.unbook(pod.info.scope, pod.info.name, request_id)
                return
            except IndexUnavailable as e:
                if pause_s is None:
                    _log.debug("booking not ended in the index, it will expire: %s", e)
                    return
            await asyncio.sleep(pause_s)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a background task that may outlive its request."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background work of a request failed", exc_info=error)


async def _hash_blocks(request: ValidRequest, info: PodInfo) -> list[bytes]:
    """Returns the hashes of the prompt's blocks that a cache may supply."""
    size = info.block_size
    blocks = matchable_blocks(request.context_len, size)
    hasher, ids = BlockHasher(info.fingerprint, size, request.cache_salt, request.adapter), request.context_ids
    for end in range(HASH_BLOCKS_PER_TURN, blocks, HASH_BLOCKS_PER_TURN):
        hasher.extend(ids[: end * size])
        await asyncio.sleep(0)
    return hasher.extend(ids[: blocks * size])


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingPlan:
    """A request and its hits. Each of its attempts is placed by `place`."""

    request: ValidRequest
    prompts: Mapping[str, HashedPrompt]  #: The hashed prompt by layout fingerprint.
    table: PodTable
    router: Router
    policy: RoutingPolicy
    index_answered: bool  #: The hits are from the prefix index, so bookings are shared too.
    affinity: str
    repeated_tokens: int  #: Leading prompt tokens that an earlier prompt of this gateway began with.
    layout_fingerprint: str | None

    @property
    def expected_hit_tokens(self) -> int:
        """Prompt tokens that need no computing on the best pod, once the pod is free."""
        hits = (self._routing_request(prompt).expected_hits().values() for prompt in self.prompts.values())
        return min(max(chain.from_iterable(hits), default=0), self.request.context_len - 1)

    async def place(self, request_id: str, avoided: Collection[str], tried: Collection[str]) -> Placement | None:
        """Chooses and books a decode and a prefill pod, or one pod of role both; None if no pod is left.

        Decode pods at addresses in `tried` are not used again, pods in `avoided` only if there are no others.
        """
        now = time.monotonic()
        # The pods that are left may be too small for the request, or unable to exchange KV. Then any pod is used.
        best = self._best_layout(avoided, tried, now) or self._best_layout(avoided, tried, now, last_resort=True)
        if best is None:
            return None
        prompt, scope, *sides = best
        groups = [options for options in sides if options]
        # The first options are final if bookings of other gateways cannot change the order.
        settled = (
            not self.policy.uses_shared_bookings
            or all(len(options) == 1 for options in groups)
            or self.router.only_gateway(scope)
        )
        groups = [options[:1] for options in groups] if settled else groups
        pods = {option.view.address: self.table.pods[option.view.address] for group in groups for option in group}
        router, (decode, prefill) = self.router, _chosen_pods(pods, [group[0] for group in groups])
        state = router.inflight, router.approx_index, router.unbook_shared
        placement = Placement(request_id, decode, prefill, prompt.hashes, *state)
        candidates = [[_candidate(option, now) for option in options] for options in groups]
        placement.book()
        if not self.index_answered:
            return placement
        if settled:
            self.router.book_shared(scope, request_id, candidates)
            return placement
        try:
            results = await self.router.choose_shared(scope, request_id, candidates)
        except IndexUnavailable:
            return placement
        except BaseException:
            placement.release()
            raise
        if any(result.chosen for result in results):
            chosen = [group[result.chosen] for group, result in zip(groups, results, strict=True)]
            placement.rebook(*_chosen_pods(pods, chosen))
        for group, result in zip(groups, results, strict=True):
            _record_foreign_bookings(group, result)
        return placement

    def _best_layout(
        self, avoided: Collection[str], tried: Collection[str], now: float, *, last_resort: bool = False
    ) -> tuple[HashedPrompt, str, list[PodOption], list[PodOption]] | None:
        """Returns the hashed prompt, the scope and the ranked decode and prefill pods of the best layout; None: no pod.

        A layout whose best pods are fit and not avoided comes before a cheaper one.
        """
        best: tuple[HashedPrompt, str, list[PodOption], list[PodOption]] | None = None
        best_rank = (0, 0.0)
        for fingerprint in self.table.pods_by_layout():
            if self.layout_fingerprint not in (None, fingerprint):
                continue
            prompt = self.prompts.get(fingerprint, HashedPrompt())
            decodes, prefills = self._rank_pods(fingerprint, prompt, avoided, tried, now, last_resort=last_resort)
            firsts = [options[0].view for options in (decodes, prefills) if options]
            unfit = sum(view.address in avoided or not view.takes_requests(now) for view in firsts)
            if decodes and (best is None or (unfit, decodes[0].cost_s) < best_rank):
                best, best_rank = (prompt, fingerprint[:8], decodes, prefills), (unfit, decodes[0].cost_s)
        return best

    def _rank_pods(
        self,
        fingerprint: str,
        prompt: HashedPrompt,
        avoided: Collection[str],
        tried: Collection[str],
        now: float,
        *,
        last_resort: bool,
    ) -> tuple[list[PodOption], list[PodOption]]:
        """Returns the ranked decode and prefill pods of a layout, or pods of role both and none. Both may be empty.

        `last_resort`: avoided and unfit pods too.
        """
        request = self._routing_request(prompt)
        of_layout = [p for p in self.table.decode_pods() if p.info and p.info.fingerprint == fingerprint]
        untried = _views([p for p in of_layout if p.address not in tried], avoided, now, last_resort=last_resort)
        decodes = self.policy.rank_decode_pods(request, untried, now)
        if not decodes or decodes[0].view.role is Role.BOTH:
            return [option for option in decodes if option.view.role is Role.BOTH], []
        prefill_views = _views(self.table.prefill_pods(fingerprint), avoided, now, last_resort=last_resort)
        if self.index_answered and prompt.device_hits and self.request.sampling.prompt_logprobs is None:
            offers = self._offer_pulls(fingerprint, prompt, request.expected_hits(), prefill_views)
            request = replace(request, pull_offers=offers) if offers else request
        prefills = self.policy.rank_prefill_pods(request, prefill_views, now)
        decodes = [option for option in decodes if option.view.role is Role.DECODE] if prefills else []
        if any(option.view.pair_troubles for option in prefills):
            return self._without_troubled_pairs(decodes, prefills)
        return decodes, prefills

    def _without_troubled_pairs(
        self, decodes: list[PodOption], prefills: list[PodOption]
    ) -> tuple[list[PodOption], list[PodOption]]:
        """Returns options of which each prefill pod can send KV to each decode pod: all, or those of one decode pod."""
        pods = self.table.pods
        reachable = [
            [p for p in prefills if not pods[p.view.address].trouble_to(pods[decode.view.address])]
            for decode in decodes
        ]
        if all(len(senders) == len(prefills) for senders in reachable):
            return decodes, prefills
        usable = ((decode, senders) for decode, senders in zip(decodes, reachable, strict=True) if senders)
        return next((([decode], senders) for decode, senders in usable), ([], prefills))

    def _offer_pulls(
        self, fingerprint: str, prompt: HashedPrompt, expected_hits: Mapping[str, int], pullers: Sequence[PodView]
    ) -> dict[str, PullOffer]:
        """Returns what prefill pods could pull from any pod of their layout."""
        pods = self.table.pods_by_layout().get(fingerprint, [])
        holders = [pod.view for pod in pods if pod.view is not None]
        info = pods[0].info if pods else None
        if info is None:
            return {}
        ends = info.window_tails, info.state_pages
        return offer_pulls(prompt.device_hits, expected_hits, pullers, holders, info.block_bytes, *ends)

    def find_holder(self, name: str) -> PodInfo | None:
        """Returns the pod of this name if it is still usable."""
        pods = (pod for found in self.table.pods_by_layout().values() for pod in found)
        return next((pod.info for pod in pods if pod.info is not None and pod.info.name == name), None)

    def _shared_tokens(self, prompt: HashedPrompt) -> int:
        """Returns how many leading prompt tokens the shared tier has.

        A pod with the shared tier writes all that it computes, so these are the tokens of the pod with most hits.
        What only the shared tier has is worth the same to all pods, so routing need not know it.
        """
        tiers = (prompt.device_hits, prompt.host_hits, prompt.disk_hits)
        if not any(tiers):
            return 0
        names = [pod.info.name for pod in self.table.pods.values() if pod.info and pod.view and pod.view.shares_cache]
        return max((sum(tier.get(name, 0) for tier in tiers) for name in names), default=0)

    def _routing_request(self, prompt: HashedPrompt) -> RoutingRequest:
        inflight = self.router.inflight.match_blocks(prompt.hashes)
        return RoutingRequest(
            prompt_len=self.request.context_len,
            max_tokens=self.request.sampling.max_tokens - len(self.request.output_ids),
            device_hits=prompt.device_hits,
            host_hits=prompt.host_hits,
            disk_hits=prompt.disk_hits,
            inflight_hits={pod: blocks * prompt.block_size for pod, blocks in inflight.items()},
            shared_tokens=self._shared_tokens(prompt),
            affinity=self.affinity or ("" if self.index_answered else prompt.prefix_key.hex()),
            adapter=self.request.adapter,
            prefix_key=prompt.prefix_key,
        )


def _views(pods: Sequence[Pod], avoided: Collection[str], now: float, *, last_resort: bool) -> Sequence[PodView]:
    """Returns the views of the pods that are fit and not avoided, or of others if there are none.

    `last_resort`: of all pods.
    """
    views = [pod.view for pod in pods if pod.view is not None]
    if last_resort:
        return views
    if avoided:
        views = [view for view in views if view.address not in avoided] or views
    return fit_views(views, now)


def _chosen_pods(pods: Mapping[str, Pod], options: Sequence[PodOption]) -> tuple[ChosenPod, ChosenPod | None]:
    """Returns the decode pod and the prefill pod of one or two options."""
    decode, *prefill = [ChosenPod(pods[option.view.address], option) for option in options]
    return decode, prefill[0] if prefill else None


def _candidate(option: PodOption, now: float) -> BookingCandidate:
    """Converts an option for the index. Bookings since the pod's report are taken out: the index adds everyone's."""
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


def _record_foreign_bookings(options: Sequence[PodOption], result: BookingResult) -> None:
    """Counts what other gateways booked on these pods; it counts until the pods' next reports."""
    for option, booked in zip(options, result.booked, strict=True):
        view = option.view
        if view.role is Role.DECODE:
            view.foreign_sequences = max(0, booked - view.decode_bookings.unreported_count)
        else:
            view.foreign_tokens = max(0, booked - view.prefill_bookings.unreported_booked)
