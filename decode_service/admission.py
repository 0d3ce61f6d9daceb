"""Admission of a decode pod: whether it takes a request now, and which pod computes the prompt. Never waits for a step.

remote: the prompt's blocks and one more per sequence are leased at once, so computed KV always has a place. One growth
        block per running sequence stays free. Refused while a sequence without blocks waits (preempted, or a local
        prompt), because new leases would starve it.
local:  this pod computes the prompt: aggregated pods always, decode pods a short uncached rest (local_prefill.py). A
        decode pod leases blocks too, so that the cached blocks are not evicted before the prompt's turn. On an
        aggregated pod the scheduler leases when it admits the prompt. The queue is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.types import RemotePrefillCost, Role, ValidRequest
from decode_service.local_prefill import DecodePodState, LocalPrefillPolicy, PrefillDecision, PrefillReason
from engine.kv.blocks import Lease
from engine.schedule.scheduler import SchedulerStats
from pod.runtime import PodRuntime


@dataclass(frozen=True, slots=True)
class Admitted:
    """The pod takes the request."""

    lease: Lease | None  # Blocks for the prompt; None where the scheduler leases them
    cached_tokens: int
    decision: PrefillDecision
    hashes: Sequence[bytes] = ()  # Hashes of the full blocks that a cache may supply


@dataclass(frozen=True, slots=True)
class Rejected:
    """The pod does not take the request now."""

    reason: str  # One sentence for a person
    temporary: bool = False  # Blocks become free once copies to host memory have ended: worth another try at once


class Admission:
    """Decides Reserve for one pod."""

    def __init__(self, pod: PodRuntime) -> None:
        config = pod.config
        self._pod = pod
        self._always_local = config.role is Role.BOTH
        self._local = LocalPrefillPolicy(config.local_prefill)
        max_seqs = pod.engine.scheduler.config.max_seqs
        self._max_sequences = max_seqs + max(1, max_seqs // 2)

    def decide(
        self, request: ValidRequest, remote_cost: RemotePrefillCost | None, *, remote_only: bool
    ) -> Admitted | Rejected:
        """Leases the blocks of an admitted request.

        Args:
            remote_cost: time that a prefill pod would take for this prompt; None while unknown.
            remote_only: this pod must not compute the prompt.
        """
        num_sequences = self._pod.requests.num_sequences
        if num_sequences and num_sequences + request.sampling.n > self._max_sequences:
            return Rejected(f"{num_sequences} sequences are reserved or running already")
        pool, scheduler = self._pod.engine.pool, self._pod.engine.scheduler
        block_size = pool.block_size
        hashes = self._pod.prompt_hashes(request)
        # With prompt_logprobs every prompt token is computed, and none is taken from the cache.
        scored = request.sampling.prompt_logprobs is not None
        if self._always_local and not remote_only:
            cached = 0 if scored else pool.match_prefix(hashes) * block_size
            return Admitted(None, cached, PrefillDecision(True, PrefillReason.AGGREGATED))
        if scheduler.waits_for_blocks:
            return Rejected("earlier requests wait for KV blocks")
        stats, blocks = scheduler.stats(), self._pod.limits.initial_blocks(request)
        lease = pool.lease(hashes, blocks, keep_free=stats.running, host=True)
        if lease is None:
            return Rejected("the KV pool is full", temporary=pool.copies_pending())
        cached = lease.cached_blocks * block_size
        usable = 0 if scored else cached
        decision = self._local.decide(
            request.context_len - usable, usable, self._state(stats), remote_cost, remote_only=remote_only
        )
        if decision.local and cached > usable:
            lease.finish("the whole prompt is computed")
            lease = pool.lease([], blocks, keep_free=stats.running)
            if lease is None:
                return Rejected("the KV pool is full", temporary=pool.copies_pending())
            cached = 0
        return Admitted(lease, cached, decision, hashes)

    def _state(self, stats: SchedulerStats) -> DecodePodState:
        config, rates = self._pod.engine.scheduler.config, self._pod.rates
        step_s, slope_s = rates.decode_fit()
        return DecodePodState(
            running=stats.running,
            queued_tokens=self._pod.requests.queued_tokens,
            chunk_tokens=config.local_chunk_tokens or config.chunk_tokens,
            step_s=step_s + stats.running * slope_s,
            chunk_s=rates.chunk_s,
        )
