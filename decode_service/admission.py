"""Whether a decode pod takes a request now, and who computes its prompt. Decides at once, never waits for a step.

remote: blocks for the prompt plus one per sequence are leased here, so KV that is computed has a home; one growth block
        per running sequence stays free. Refused while a sequence without blocks waits (preempted, or a local prompt):
        it comes first, and would starve if every block that comes back were leased here.
local:  this pod computes the prompt: aggregated pods always, decode pods a short rest (local_prefill.py). A decode pod
        leases here as well, so the blocks that made the rest short cannot be evicted before its turn comes; on an
        aggregated pod the scheduler leases when it admits the prompt. The queue is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.block_hash import hash_blocks, matchable_blocks
from common.types import RemotePrefillCost, Role, ValidRequest
from decode_service.local_prefill import DecodePodState, LocalPrefillPolicy, PrefillDecision, PrefillReason
from engine.kv.blocks import Lease
from pod.runtime import PodRuntime


@dataclass(frozen=True, slots=True)
class Admitted:
    """There is room. lease holds the prompt's blocks, None when the scheduler is to take them. hashes: of the blocks
    that a cache may supply.
    """

    lease: Lease | None
    cached_tokens: int
    decision: PrefillDecision
    hashes: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class Rejected:
    """There is none now; reason is one sentence for a person. passing: there will be once the host has copies."""

    reason: str
    temporary: bool = False


class Admission:
    """The policy of Reserve for one pod."""

    def __init__(self, pod: PodRuntime) -> None:
        config = pod.config
        self._pod = pod
        self._always_local = config.role is Role.BOTH
        self._local = LocalPrefillPolicy(config.local_prefill)
        max_seqs = pod.engine.scheduler.config.max_seqs
        self._max_sequences = max_seqs + max(1, max_seqs // 2)

    def decide(
        self,
        request: ValidRequest,
        *,
        num_sequences: int,
        queued_tokens: int,
        remote_cost: RemotePrefillCost | None,
        remote_only: bool,
    ) -> Admitted | Rejected:
        """Room (blocks leased) or NoRoom. held: sequences that this pod reserved or runs already; queued_tokens: of
        prompts that it computes; there: what another pod would take for this one, None while not known.
        """
        if num_sequences and num_sequences + request.sampling.n > self._max_sequences:
            return Rejected(f"{num_sequences} sequences are reserved or running already")
        layout, pool = self._pod.engine.layout, self._pod.engine.pool
        size = layout.block_size
        matchable = matchable_blocks(request.context_len, size)
        hashes = hash_blocks(
            request.context_ids[: matchable * size],
            fingerprint=layout.fingerprint,
            block_size=size,
            salt=request.cache_salt,
        )
        scored = request.sampling.prompt_logprobs is not None  # such a prompt takes nothing from the cache
        if self._always_local and not remote_only:
            return Admitted(
                None, 0 if scored else pool.match_prefix(hashes) * size, PrefillDecision(True, PrefillReason.AGGREGATED)
            )
        scheduler = self._pod.engine.scheduler
        if scheduler.waits_for_blocks:
            return Rejected("requests that came before wait for KV blocks")
        stats, rates = scheduler.stats(), self._pod.rates
        blocks = self._pod.limits.initial_blocks(request)
        lease = pool.lease(hashes, blocks, keep_free=stats.running, host=True)
        if lease is None:
            return Rejected("the KV pool is full", temporary=pool.copies_pending())
        cached = lease.cached_blocks * size
        step_s, slope_s = rates.decode_fit()
        config = scheduler.config
        state = DecodePodState(
            running=stats.running,
            queued_tokens=queued_tokens,
            chunk_tokens=config.local_chunk_tokens or config.chunk_tokens,
            step_s=step_s + stats.running * slope_s,
            chunk_s=rates.chunk_s,
        )
        usable = 0 if scored else cached
        decision = self._local.decide(request.context_len - usable, usable, state, remote_cost, remote_only=remote_only)
        if decision.local and cached > usable:
            lease.finish("all of it is computed")
            lease = pool.lease([], blocks, keep_free=stats.running)
            if lease is None:
                return Rejected("the KV pool is full", temporary=pool.copies_pending())
            cached = 0
        return Admitted(lease, cached, decision, hashes)
