"""Admission of a decode pod: whether it takes a request now, and which pod computes the prompt. Never waits for a step.

remote: the prompt's blocks and one more per sequence are leased at once, so computed KV always has a place. One growth
        block per running sequence stays free. Refused while a sequence without blocks waits (preempted, or a local
        prompt), because new leases would starve it.
local:  this pod computes the prompt: aggregated pods always, decode pods a short uncached rest (LocalPrefillPolicy). A
        decode pod leases blocks too, so that the cached blocks are not evicted before the prompt's turn. On an
        aggregated pod the scheduler leases when it admits the prompt. The queue is bounded.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.kv_groups import PageOrder
from common.types import RemotePrefillCost, Role, ValidRequest
from engine.kv.eviction import Retention
from engine.kv.lease import Lease
from engine.kv.tiers.file_load import NO_LOAD, FileLoad
from engine.schedule.outputs import SchedulerStats
from pod.runtime import PodRuntime

MAX_LOCAL_STEPS = 4
HashPrompt = Callable[[], Sequence[bytes]]  # Returns the hashes of the full blocks that a cache may supply


class PrefillReason(enum.StrEnum):
    """Reason of a decision; label of a metric. "Local" means this pod computes, "remote" a prefill pod."""

    AGGREGATED = "aggregated"  # Local: the pod has both roles
    CHEAPER = "cheaper"  # Local or remote, by the predicted costs
    THRESHOLD = "threshold"  # Local or remote, by the length of the uncached rest
    OFF = "off"  # Remote: the setting is "off"
    REMOTE_ONLY = "asked"  # Remote: the request has remote_only
    NOTHING_CACHED = "nothing_cached"  # Remote: the cache holds no token of the prompt
    TOO_LONG = "too_long"  # Remote: the uncached rest takes more than MAX_LOCAL_STEPS steps
    UNKNOWN = "unknown"  # Remote: a time has not been measured yet


@dataclass(frozen=True, slots=True)
class DecodePodState:
    """This pod at the time of the decision."""

    running: int  # Decoding sequences
    queued_tokens: int  # Tokens of local prompts that are not computed yet
    chunk_tokens: int  # Max prompt tokens of a step
    step_s: float  # Seconds of a step without a chunk
    chunk_s: Callable[[int], float]  # Seconds that a chunk of this many tokens adds to a step; 0 while unknown


@dataclass(frozen=True, slots=True)
class PrefillDecision:
    """Which pod computes the prompt."""

    local: bool  # This pod computes it
    reason: PrefillReason
    local_s: float = 0.0  # Predicted cost of local prefill; 0 where no costs were compared


@dataclass(frozen=True, slots=True)
class LocalPrefillPolicy:
    """The local_prefill setting: a decode pod computes the uncached rest of a prompt if that costs less. Pure.

        local cost:  queued local prompts + own steps + the delay that these add to every decoding sequence
        remote cost: queue of the prefill pod + computing + end of the hand-off

    All times are measured: steps with and without a chunk by this pod, queue and rate of the prefill pod by the
    gateway, ends of hand-offs by the prefill pod. One second of delay of another sequence counts like one second of
    waiting, so a busy decode pod leaves prompts to prefill pods. A prefill pod on the same processor delays these
    sequences too; then the earlier first token decides. In mode "auto", a prompt without a cached
    token goes to a prefill pod at any cost, and so does a rest of more than MAX_LOCAL_STEPS steps: a wrong estimate
    never makes a decode pod compute whole prompts.
    """

    mode: str  # "off", "auto", or a number: an uncached rest of at most this many tokens is computed locally

    def decide(
        self,
        uncached: int,
        cached: int,
        state: DecodePodState,
        remote_cost: RemotePrefillCost | None,
        *,
        remote_only: bool,
    ) -> PrefillDecision:
        """Decides which pod computes the prompt.

        Args:
            uncached: prompt tokens that this pod would compute.
            cached: prompt tokens that its cache holds.
        """
        if self.mode == "off":
            return PrefillDecision(False, PrefillReason.OFF)
        if remote_only:
            return PrefillDecision(False, PrefillReason.REMOTE_ONLY)
        if self.mode != "auto":
            return PrefillDecision(uncached <= int(self.mode), PrefillReason.THRESHOLD)
        if not cached:
            return PrefillDecision(False, PrefillReason.NOTHING_CACHED)
        if uncached > MAX_LOCAL_STEPS * state.chunk_tokens:
            return PrefillDecision(False, PrefillReason.TOO_LONG)
        if remote_cost is None or (local_s := _local_cost_s(uncached, state, remote_cost)) is None:
            return PrefillDecision(False, PrefillReason.UNKNOWN)
        return PrefillDecision(local_s <= remote_cost.seconds, PrefillReason.CHEAPER, local_s)


def _local_cost_s(uncached: int, state: DecodePodState, remote_cost: RemotePrefillCost) -> float | None:
    """Returns the predicted cost of local prefill in seconds; None if no pod has measured the time of a chunk."""

    def chunk_delay_s(tokens: int) -> float:
        chunk, rate = min(tokens, state.chunk_tokens), remote_cost.tokens_per_s
        return state.chunk_s(chunk) or (chunk / rate if rate > 0 else 0.0)

    delay_s = chunk_delay_s(uncached)
    if delay_s <= 0:
        return None
    own_steps = math.ceil(uncached / state.chunk_tokens)
    steps_ahead = math.ceil(state.queued_tokens / state.chunk_tokens)
    step_s = state.step_s if state.running else 0.0
    waiting_s = own_steps * (step_s + delay_s) + steps_ahead * (step_s + chunk_delay_s(state.queued_tokens))
    if remote_cost.same_processor:
        return waiting_s
    # The chunks of this prompt delay every running sequence.
    return waiting_s + state.running * own_steps * delay_s


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
    #: Blocks or a slot for a state become free once copies to host memory, or steps, have ended: it is worth another
    #: try at once.
    temporary: bool = False


class Admission:
    """Decides Reserve for one pod."""

    def __init__(self, pod: PodRuntime) -> None:
        config = pod.config
        self._pod = pod
        self._local = LocalPrefillPolicy(config.local_prefill)
        max_seqs = pod.engine.scheduler.config.max_seqs
        self._max_sequences = max_seqs + max(1, max_seqs // 2)

    def load_from_files(
        self, request: ValidRequest, hash_prompt: HashPrompt, remote_cost: RemotePrefillCost | None
    ) -> FileLoad:
        """Starts to read what the file tiers have of the prompt, if that is faster than a prefill pod computes it.

        An aggregated pod's scheduler does this itself. `hash_prompt` as in `decide`.
        """
        pod = self._pod
        pool = pod.engine.pool
        scored = request.sampling.prompt_logprobs is not None
        without = pool.disk_tier is None and pool.shared_tier is None
        if without or scored or pod.role.current is Role.BOTH:
            return NO_LOAD
        rate = 0.0 if remote_cost is None else remote_cost.tokens_per_s
        return pool.load_from_files(hash_prompt(), (lambda tokens: tokens / rate) if rate > 0 else None)

    def decide(
        self,
        request: ValidRequest,
        hash_prompt: HashPrompt,
        remote_cost: RemotePrefillCost | None,
        *,
        remote_only: bool,
    ) -> Admitted | Rejected:
        """Leases the blocks of an admitted request.

        Args:
            hash_prompt: returns PodRuntime.prompt_hashes of the request, which it computes once.
            remote_cost: time that a prefill pod would take for this prompt; None while unknown.
            remote_only: this pod must not compute the prompt.
        """
        num_sequences = self._pod.requests.num_sequences
        if num_sequences and num_sequences + request.sampling.n > self._max_sequences:
            return Rejected(f"{num_sequences} sequences are reserved or running already")
        pool, scheduler, layout = self._pod.engine.pool, self._pod.engine.scheduler, self._pod.engine.layout
        block_size = pool.block_size
        hashes = hash_prompt()
        # With prompt_logprobs every prompt token is computed, and none is taken from the cache.
        scored = request.sampling.prompt_logprobs is not None
        if self._pod.role.current is Role.BOTH and not remote_only:
            cached = 0 if scored else pool.match_prefix(hashes) * block_size
            return Admitted(None, cached, PrefillDecision(True, PrefillReason.AGGREGATED))
        if scheduler.waits_for_blocks:
            return Rejected("earlier requests wait for KV blocks")
        stats, blocks = scheduler.stats(), self._pod.limits.initial_blocks(request)
        kept = Retention.of(request)
        lease = pool.lease(hashes, blocks, keep_free=stats.running, host=True, retention=kept)
        if lease is None:
            return Rejected(pool.shortage(), temporary=pool.copies_pending())
        cached = lease.cached_blocks * block_size
        usable = 0 if scored else cached
        uncached, state = request.context_len - usable, self._state(stats)
        decision = self._local.decide(uncached, usable, state, remote_cost, remote_only=remote_only)
        if decision.local and cached > usable:
            lease.finish("the whole prompt is computed")
            lease = pool.lease([], blocks, keep_free=stats.running, retention=kept)
            if lease is None:
                return Rejected(pool.shortage(), temporary=pool.copies_pending())
            cached = 0
        if not decision.local and not lease.cover_transfer(PageOrder.of_prompt(layout, request.context_len)):
            lease.finish("no pages for the windows, or no slot for the state")
            if layout.state_pages:
                return Rejected("steps in flight use every free slot for a recurrent state", temporary=True)
            return Rejected("the KV pool is full")
        return Admitted(lease, lease.cached_blocks * block_size, decision, hashes)

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
