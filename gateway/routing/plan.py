"""One request's choices: what was known of its prompt when it arrived, and the pods as they are at each attempt."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from common.errors import IndexUnavailable
from common.prefix_index import Candidate, Reserved
from common.types import Role, ValidRequest
from gateway.pod import Pod
from gateway.pod_info import PodInfo
from gateway.pods import PodTable
from gateway.routing.demand import Demand, Pull
from gateway.routing.inflight import InFlight
from gateway.routing.placement import Chosen, Placement
from gateway.routing.policy import Option, Policy
from gateway.routing.pulls import pulls
from gateway.routing.view import DISPATCH_S, PodView

KEY_BLOCKS = 4  # blocks whose hash is a prompt's home without an index


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt under one layout. held, host: tokens by pod name, as in Demand."""

    hashes: Sequence[bytes] = ()
    block_size: int = 1
    device_hits: Mapping[str, int] = field(default_factory=dict)
    host_hits: Mapping[str, int] = field(default_factory=dict)

    @property
    def prefix_key(self) -> bytes:
        """Hash of the first blocks; empty for a prompt without a full block."""
        return self.hashes[min(len(self.hashes), KEY_BLOCKS) - 1] if self.hashes else b""


class Ledger(Protocol):
    """Bookings that all gateways share."""

    inflight: InFlight

    def new_placement(
        self, request_id: str, decode: Chosen, prefill: Chosen | None, hashes: Sequence[bytes]
    ) -> Placement:
        """A placement that is not booked yet."""

    async def choose_shared(self, scope: str, request_id: str, groups: Sequence[Sequence[Candidate]]) -> list[Reserved]:
        """See IndexReader.reserve. Raises IndexUnavailable."""

    def only_gateway(self, scope: str) -> bool:
        """Only this gateway books, so what it knows itself is all there is to know."""

    def book_shared(self, scope: str, request_id: str, groups: Sequence[Sequence[Candidate]]) -> None:
        """The same in the background, for groups of one."""


class Plan:
    """See the top of this file. affinity: what the client wants to stay together. shared: the index answered.

    repeated: tokens at the prompt's start with which an earlier prompt of this gateway began. layout: fingerprint of
    the only pods that will do.
    """

    def __init__(
        self,
        request: ValidRequest,
        prompts: Mapping[str, Prompt],
        *,
        table: PodTable,
        ledger: Ledger,
        policy: Policy,
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
        best: tuple[Prompt, str, list[Option], list[Option]] | None = None
        for fingerprint in self._table.pods_by_layout():
            if self._layout not in (None, fingerprint):
                continue
            prompt = self._prompts.get(fingerprint, Prompt())
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
            _note_others(group, answer)
        return placement

    def _options(
        self, fingerprint: str, prompt: Prompt, avoid: Collection[str], tried: Collection[str], now: float
    ) -> tuple[list[Option], list[Option]]:
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
        self, fingerprint: str, prompt: Prompt, promises: Mapping[str, int], able: Sequence[PodView]
    ) -> dict[str, Pull]:
        """What prefill pods could fetch from any pod of their layout."""
        pods = self._table.pods_by_layout().get(fingerprint, [])
        holders = [pod.view for pod in pods if pod.view is not None]
        info = pods[0].info if pods else None
        return {} if info is None else pulls(prompt.device_hits, promises, able, holders, info.block_bytes)

    def find_holder(self, name: str) -> PodInfo | None:
        """The pod of this name, if it is still there."""
        pods = (pod for found in self._table.pods_by_layout().values() for pod in found)
        return next((pod.info for pod in pods if pod.info is not None and pod.info.name == name), None)

    def _routing_request(self, prompt: Prompt) -> Demand:
        soon = self._bookings.inflight.match_blocks(prompt.hashes)
        return Demand(
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


def _pair(pods: Mapping[str, Pod], options: Sequence[Option]) -> tuple[Chosen, Chosen | None]:
    decode, *prefill = [Chosen(pods[option.view.address], option) for option in options]
    return decode, prefill[0] if prefill else None


def _candidate(option: Option, now: float) -> Candidate:
    """Its cost without what was booked since its report: the index knows that better."""
    view = option.view
    if view.role is Role.DECODE:
        known = view.decode_bookings.unreported_count + view.foreign_sequences
    else:
        known = view.prefill_bookings.unreported_booked + view.foreign_tokens
    return Candidate(
        view.name,
        option.cost_s - known * option.unit_cost_s,
        option.unit_cost_s,
        option.load_units,
        now - view.reported_at + DISPATCH_S,
    )


def _note_others(options: Sequence[Option], answer: Reserved) -> None:
    """What other gateways booked on these pods counts until their next reports."""
    for option, booked in zip(options, answer.booked, strict=True):
        view = option.view
        if view.role is Role.DECODE:
            view.foreign_sequences = max(0, booked - view.decode_bookings.unreported_count)
        else:
            view.foreign_tokens = max(0, booked - view.prefill_bookings.unreported_booked)
