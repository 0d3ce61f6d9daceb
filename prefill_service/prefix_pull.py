"""Pulls a prompt's prefix from another pod into this pod's cache, before the engine sees the prompt.

    hint -> cheaper than computing? -> lease blocks -> pull -> publish -> the prompt finds them in the cache

A pull is made if it takes less time than computing the same tokens, by this pod's measurements of both. A prompt waits
for a pull no longer than computing would take, so a failed pull makes it at most about twice as late. The lease ends
when the blocks are published, so waiting prompts hold no blocks. The blocks of a failed pull stay pinned until the
writer has stopped. Prompts that want the same blocks at the same time share one pull. Event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from common.errors import BatonError, DeadlineExceeded
from common.kv_groups import PageOrder
from common.pb import prefill_pb2
from common.types import ValidRequest
from kv_transfer.messages import PullResult, WantedBlocks
from pod.monitoring.rates import PodRates
from pod.requests import retry_while
from pod.runtime import PodRuntime

_log = logging.getLogger(__name__)

MIN_TIME_S, MAX_TIME_S = 0.05, 10.0  # Bounds of a pull's time limit.
UNKNOWN_TIME_S = 0.5  # Largest time limit of a pull before a full prefill step was measured
SMALL_STEP_FACTOR = 4.0  # Small steps underestimate the time of computing: their estimate is multiplied by this


def pull_time_limit_s(rates: PodRates, tokens: int) -> float:
    """Returns the seconds that a pull of `tokens` tokens may take: as long as computing them."""
    if compute_s := rates.prefill_s(tokens):
        return min(MAX_TIME_S, max(MIN_TIME_S, compute_s))
    estimate_s = rates.prefill_estimate_s(tokens)
    return min(UNKNOWN_TIME_S, max(MIN_TIME_S, SMALL_STEP_FACTOR * estimate_s)) if estimate_s else UNKNOWN_TIME_S


class PrefixPuller:
    """Pulls of one prefill pod."""

    def __init__(self, pod: PodRuntime) -> None:
        self._pod = pod
        self._pulls: dict[bytes, asyncio.Task[bool]] = {}  # Running pulls by the hash of the last wanted block

    async def pull(self, request: ValidRequest, hint: prefill_pb2.PullHint, deadline_s: float) -> bool:
        """Pulls what `hint` offers and returns whether a holder was asked. Raises only CancelledError."""
        metrics = self._pod.metrics
        if not self._pod.config.pulls_prefixes:
            metrics.pulls.labels("skipped", "off").inc()
            return False
        hashes = self._pod.prompt_hashes(request, hint.blocks)
        if not hashes or request.sampling.prompt_logprobs is not None:
            metrics.pulls.labels("skipped", "useless").inc()
            return False
        task = self._pulls.get(hashes[-1])
        if task is None:
            work = self._pull_accounted(request.request_id, hashes, hint, deadline_s)
            task = self._pulls[hashes[-1]] = asyncio.get_running_loop().create_task(work)
            task.add_done_callback(lambda _: self._pulls.pop(hashes[-1]))
        else:
            metrics.pulls.labels("skipped", "shared").inc()
        return await asyncio.shield(task)

    async def _pull_accounted(
        self, request_id: str, hashes: list[bytes], hint: prefill_pb2.PullHint, deadline_s: float
    ) -> bool:
        """Pulls once and counts it in the metrics. Returns whether the holder was asked."""
        began, metrics = time.monotonic(), self._pod.metrics
        try:
            outcome, reason = await self._pull(request_id, hashes, hint, deadline_s)
        except BatonError as e:
            outcome, reason = "failed", e.kind
            _log.info("pull from %s failed: %s", hint.pod, e, extra={"request_id": request_id})
        except Exception:
            outcome, reason = "failed", "internal_error"
            _log.exception("pull from %s failed", hint.pod, extra={"request_id": request_id})
        metrics.pulls.labels(outcome, reason).inc()
        if outcome == "done":
            metrics.pull_seconds.observe(time.monotonic() - began)
            metrics.pull_predicted.observe(hint.seconds)
        return outcome != "skipped"

    async def _pull(
        self, request_id: str, hashes: list[bytes], hint: prefill_pb2.PullHint, deadline_s: float
    ) -> tuple[str, str]:
        """Returns the outcome and its reason. Raises BatonError.

        A holder may have the blocks of the whole prefix, but window pages or a state of shorter ones only. It then
        tells the longest of these, which is pulled if that is still worth it.
        """
        pool = self._pod.engine.pool
        cached = pool.match_prefix(hashes)
        if cached == len(hashes):
            return "skipped", "held"
        limit_s = self._worthwhile_s(len(hashes) - cached, hint)
        if not limit_s:
            return "skipped", "dear"
        if self._pod.engine.scheduler.waits_for_blocks:
            return "skipped", "no_room"
        until = time.monotonic() + min(deadline_s, limit_s)
        outcome, reason, held = await self._ask_holder(request_id, hashes, hint, until)
        if outcome != "refused" or not cached < held < len(hashes) or not self._worthwhile_s(held - cached, hint):
            return outcome, reason
        outcome, reason, _ = await self._ask_holder(request_id, hashes[:held], hint, until)
        return outcome, "part" if outcome == "done" else reason

    def _worthwhile_s(self, num_blocks: int, hint: prefill_pb2.PullHint) -> float:
        """Returns the most seconds that a pull of blocks may take; 0 if computing them is predicted to be faster."""
        rates, tokens = self._pod.rates, num_blocks * self._pod.engine.pool.block_size
        limit_s = pull_time_limit_s(rates, tokens)
        return limit_s if hint.seconds < (rates.prefill_s(tokens) or limit_s) else 0.0

    async def _ask_holder(
        self, request_id: str, hashes: Sequence[bytes], hint: prefill_pb2.PullHint, until: float
    ) -> tuple[str, str, int]:
        """Pulls a prefix in one call to the holder, until a time of time.monotonic().

        Returns the outcome, its reason, and the blocks that a holder that sends nothing would send. Raises BatonError.
        """
        pod, pool = self._pod, self._pod.engine.pool
        lease = await retry_while(
            lambda: pool.lease(hashes, len(hashes), keep_free=pod.engine.scheduler.stats().running, host=True),
            lambda lease: lease is None and pool.copies_pending(),
        )
        if lease is None:
            return "skipped", "no_room", 0
        try:
            if lease.cached_blocks == len(hashes):
                return "skipped", "held", 0
            order = PageOrder.of_prefix(pod.engine.layout, len(hashes))
            if not lease.cover_transfer(order):
                return "skipped", "no_room", 0
            first = lease.cached_blocks  # `cover_transfer` takes blocks without a snapshot of their state
            asked, pin = time.monotonic(), lease.pin_for_write(first, len(hashes) - first, order)
            wanted = WantedBlocks(
                request_id=request_id,
                hashes=hashes,
                first_block=order.first_page(first),
                blocks=pin.blocks,
                pin=pin,
                timeout_s=max(0.0, until - asked),
            )
            pod.metrics.pulls_asked.inc()
            try:
                got = await pod.transfer_node.pull(hint.address, hint.pod, wanted)
            except DeadlineExceeded:
                pod.rates.observe_pull(time.monotonic() - asked, 0.0)
                raise
            await retry_while(lambda: lease.host_loading, bool)  # copies from host memory, started by pool.lease
            lease.publish_pulled(hashes, order, wanted.first_block + got.blocks)
            if not got.blocks:
                return "refused", got.reason, got.held
            self._observe(got, time.monotonic() - asked)
            return "done", "all" if got.blocks == len(pin.blocks) else "part", 0
        finally:
            lease.finish("pulled")

    def _observe(self, got: PullResult, seconds: float) -> None:
        moved = got.blocks * self._pod.engine.layout.all_ranks_bytes
        self._pod.rates.observe_pull(seconds, moved / (got.gb_s * 1e9) if got.gb_s > 0 else 0.0)
        self._pod.metrics.pulled_blocks.inc(got.blocks)
