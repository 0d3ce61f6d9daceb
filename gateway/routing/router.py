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
from collections.abc import Coroutine, Sequence
from typing import Any

from common.block_hash import BlockHasher, matchable_blocks
from common.errors import IndexUnavailable
from common.prefix_index import Candidate, IndexReader, Reserved
from common.types import ValidRequest
from gateway.approx_index import ANY_POD, ApproxIndex
from gateway.metrics import GatewayMetrics
from gateway.pod import Pod
from gateway.pod_info import PodInfo
from gateway.pods import PodTable
from gateway.routing.inflight import InFlight
from gateway.routing.placement import Chosen, Placement
from gateway.routing.plan import Plan, Prompt
from gateway.routing.policy import CostPolicy, Home

RETURN_AGAIN_S = (0.5, 2.0, 8.0)  # a call is given up after some ms, and what it was to return would count for long
HASH_SLICE = 1024  # blocks that are hashed, in 1 to 2 ms, before other requests get a turn

_log = logging.getLogger(__name__)


class Router:
    """Makes a Plan per request, and keeps what placements of all requests share (it is their Ledger)."""

    def __init__(self, table: PodTable, metrics: GatewayMetrics, *, rng: random.Random | None = None) -> None:
        rng = rng or random.Random()
        self.inflight = InFlight()
        self.approx_index = ApproxIndex()
        self._table = table
        self._metrics = metrics
        self._policy = CostPolicy(rng)
        self._rendezvous = Home(rng)
        self._tasks: set[asyncio.Task[None]] = set()
        self._booking: dict[str, asyncio.Task[None]] = {}
        table.on_change(self._show_mode)
        table.on_forget(self.approx_index.forget)

    async def stop(self) -> None:
        """Ends what is under way in the background."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def plan(self, request: ValidRequest, affinity: str = "", layout: str | None = None) -> Plan:
        """Hashes the prompt for every layout in use, or only this, and asks who holds it. Never fails."""
        index = self._index()
        prompts: dict[str, Prompt] = {}
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
                prompt = Prompt(hashes, info.block_size, {pod: n * info.block_size for pod, n in held.items() if n})
            known = known or bool(prompt.device_hits)
            prompts[fingerprint] = prompt
        lost = index is None and not known
        self._show_mode()
        return Plan(
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
    ) -> Prompt | None:
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
        return Prompt(hashes, size, held, host)

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
        self, request_id: str, decode: Chosen, prefill: Chosen | None, hashes: Sequence[bytes]
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

    async def choose_shared(self, scope: str, request_id: str, groups: Sequence[Sequence[Candidate]]) -> list[Reserved]:
        """See IndexReader.reserve. Raises IndexUnavailable."""
        index = self._index()
        if index is None:
            raise IndexUnavailable("the prefix index is away")
        return await index.book(scope, request_id, groups)

    def only_gateway(self, scope: str) -> bool:
        """See IndexReader.alone."""
        index = self._index()
        return index is not None and index.is_only_gateway(scope)

    def book_shared(self, scope: str, request_id: str, groups: Sequence[Sequence[Candidate]]) -> None:
        """The same in the background, for groups of one."""
        booking = self._booking[request_id] = self._spawn(self._book(scope, request_id, groups))
        booking.add_done_callback(lambda _: self._booking.pop(request_id, None))

    async def _book(self, scope: str, request_id: str, groups: Sequence[Sequence[Candidate]]) -> None:
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
        for pause_s in (*RETURN_AGAIN_S, None):
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
    for end in range(HASH_SLICE, blocks, HASH_SLICE):
        hasher.extend(ids[: end * size])
        await asyncio.sleep(0)
    return hasher.extend(ids[: blocks * size])
