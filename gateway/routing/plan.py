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
    held: Mapping[str, int] = field(default_factory=dict)
    host: Mapping[str, int] = field(default_factory=dict)

    @property
    def key(self) -> bytes:
        """Hash of the first blocks; empty for a prompt without a full block."""
        return self.hashes[min(len(self.hashes), KEY_BLOCKS) - 1] if self.hashes else b""


class Ledger(Protocol):
    """Bookings that all gateways share."""

    inflight: InFlight

    def place(self, request_id: str, decode: Chosen, prefill: Chosen | None, hashes: Sequence[bytes]) -> Placement:
        """A placement that is not booked yet."""

    async def reserve(self, scope: str, request_id: str, groups: Sequence[Sequence[Candidate]]) -> list[Reserved]:
        """See IndexReader.reserve. Raises IndexUnavailable."""

    def alone(self, scope: str) -> bool:
        """Only this gateway books, so what it knows itself is all there is to know."""

    def book(self, scope: str, request_id: str, groups: Sequence[Sequence[Candidate]]) -> None:
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
        repeated: int = 0,
        layout: str | None = None,
    ) -> None:
        self.request = request
        self.repeated = repeated
        self._prompts = prompts
        self._table = table
        self._ledger = ledger
        self._policy = policy
        self._shared = shared
        self._affinity = affinity
        self._layout = layout

    @property
    def held(self) -> int:
        """Prompt tokens that need no computing on the pod that has most of them, or will have once it is free."""
        most = max((max(self._demand(p).promises().values(), default=0) for p in self._prompts.values()), default=0)
        return min(most, self.request.context_len - 1)

    async def place(self, request_id: str, avoid: Collection[str], tried: Collection[str]) -> Placement | None:
        """Chooses a pair (or one pod that does both) and books it; None when no pod is left for this request.

        avoid: addresses that are used only when there are no others; tried: decode pods that are not asked again.
        """
        now = time.monotonic()
        best: tuple[Prompt, str, list[Option], list[Option]] | None = None
        for fingerprint in self._table.layouts():
            if self._layout not in (None, fingerprint):
                continue
            prompt = self._prompts.get(fingerprint, Prompt())
            decodes, prefills = self._options(fingerprint, prompt, avoid, tried, now)
            if decodes and (best is None or decodes[0].cost < best[2][0].cost):
                best = prompt, fingerprint[:8], decodes, prefills
        if best is None:
            return None
        prompt, scope, *sides = best
        groups = [options for options in sides if options]
        settled = not self._policy.shares or all(len(options) == 1 for options in groups) or self._ledger.alone(scope)
        groups = [options[:1] for options in groups] if settled else groups
        pods = {option.view.address: self._table.pods[option.view.address] for group in groups for option in group}
        placement = self._ledger.place(request_id, *_pair(pods, [group[0] for group in groups]), prompt.hashes)
        candidates = [[_candidate(option, now) for option in options] for options in groups]
        placement.book()
        if not self._shared:
            return placement
        if settled:
            self._ledger.book(scope, request_id, candidates)
            return placement
        try:
            answers = await self._ledger.reserve(scope, request_id, candidates)
        except IndexUnavailable:
            return placement
        except BaseException:
            placement.end()
            raise
        if any(answer.chosen for answer in answers):
            chosen = [group[answer.chosen] for group, answer in zip(groups, answers, strict=True)]
            placement.move(*_pair(pods, chosen))
        for group, answer in zip(groups, answers, strict=True):
            _note_others(group, answer)
        return placement

    def _options(
        self, fingerprint: str, prompt: Prompt, avoid: Collection[str], tried: Collection[str], now: float
    ) -> tuple[list[Option], list[Option]]:
        """Decode pods of one layout and one role, and prefill pods for them; none of either when one is missing."""
        demand = self._demand(prompt)
        here = [p for p in self._table.decodes() if p.info and p.info.fingerprint == fingerprint]
        decodes = self._policy.decode(demand, _views([p for p in here if p.address not in tried], avoid), now)
        if not decodes or decodes[0].view.role is Role.BOTH:
            return [option for option in decodes if option.view.role is Role.BOTH], []
        able = _views(self._table.prefills(fingerprint), avoid)
        if self._shared and prompt.held and self.request.sampling.prompt_logprobs is None:
            offers = self._pulls(fingerprint, prompt, demand.promises(), able)
            demand = replace(demand, pull=offers) if offers else demand
        prefills = self._policy.prefill(demand, able, now)
        return ([option for option in decodes if option.view.role is Role.DECODE] if prefills else []), prefills

    def _pulls(
        self, fingerprint: str, prompt: Prompt, promises: Mapping[str, int], able: Sequence[PodView]
    ) -> dict[str, Pull]:
        """What prefill pods could fetch from any pod of their layout."""
        pods = self._table.layouts().get(fingerprint, [])
        holders = [pod.view for pod in pods if pod.view is not None]
        info = pods[0].info if pods else None
        return {} if info is None else pulls(prompt.held, promises, able, holders, info.block_bytes)

    def holder(self, name: str) -> PodInfo | None:
        """The pod of this name, if it is still there."""
        pods = (pod for found in self._table.layouts().values() for pod in found)
        return next((pod.info for pod in pods if pod.info is not None and pod.info.name == name), None)

    def _demand(self, prompt: Prompt) -> Demand:
        soon = self._ledger.inflight.match(prompt.hashes)
        return Demand(
            prompt_len=self.request.context_len,
            max_tokens=self.request.sampling.max_tokens - len(self.request.output_ids),
            held=prompt.held,
            host=prompt.host,
            soon={pod: blocks * prompt.block_size for pod, blocks in soon.items()},
            affinity=self._affinity or ("" if self._shared else prompt.key.hex()),
            key=prompt.key,
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
        known = view.decoding.fresh_count + view.foreign_count
    else:
        known = view.prefilling.fresh_booked + view.foreign
    return Candidate(
        view.name, option.cost - known * option.unit_s, option.unit_s, option.units, now - view.load_at + DISPATCH_S
    )


def _note_others(options: Sequence[Option], answer: Reserved) -> None:
    """What other gateways booked on these pods counts until their next reports."""
    for option, booked in zip(options, answer.booked, strict=True):
        view = option.view
        if view.role is Role.DECODE:
            view.foreign_count = max(0, booked - view.decoding.fresh_count)
        else:
            view.foreign = max(0, booked - view.prefilling.fresh_booked)
