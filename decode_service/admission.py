"""Whether a decode pod takes a request now, and who computes its prompt. Decides at once, never waits for a step.

remote: blocks for the prompt plus one per sequence are leased here, so KV that is computed has a home; one growth block
        per running sequence stays free. Refused while a sequence without blocks waits (preempted, or a local prompt):
        it comes first, and would starve if every block that comes back were leased here.
local:  this pod computes the prompt (aggregated pods always; decode pods when the uncached rest is short); the
        scheduler leases when it admits the prompt, and the queue for that is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.block_hash import block_hashes, matchable_blocks
from common.types import Role, ValidRequest
from engine.block_pool import Lease
from pod.runtime import PodRuntime


@dataclass(frozen=True, slots=True)
class Room:
    """There is room. lease holds the prompt's blocks, None when this pod computes the prompt itself."""

    lease: Lease | None
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class NoRoom:
    """There is none now; reason is one sentence for a person. passing: there will be once the host has copies."""

    reason: str
    passing: bool = False


class Admission:
    """The policy of Reserve for one pod."""

    def __init__(self, pod: PodRuntime) -> None:
        config = pod.config
        self._pod = pod
        self._always_local = config.role is Role.BOTH
        self._local_tokens = config.local_prefill_tokens
        max_seqs = pod.engine.scheduler.config.max_seqs
        self._max_held = max_seqs + max(1, max_seqs // 2)

    def decide(self, request: ValidRequest, *, held: int, remote_only: bool) -> Room | NoRoom:
        """Room (blocks leased) or NoRoom. held: sequences that this pod reserved or runs already."""
        if held and held + request.sampling.n > self._max_held:
            return NoRoom(f"{held} sequences are reserved or running already")
        layout, pool = self._pod.engine.layout, self._pod.engine.pool
        size = layout.block_size
        matchable = matchable_blocks(request.prompt_len, size)
        hashes = block_hashes(
            request.prompt_ids[: matchable * size],
            fingerprint=layout.fingerprint,
            block_size=size,
            salt=request.cache_salt,
        )
        if not remote_only:
            cached = 0 if request.sampling.prompt_logprobs is not None else pool.match(hashes) * size
            if self._always_local or request.prompt_len - cached <= self._local_tokens:
                return Room(None, cached)
        scheduler = self._pod.engine.scheduler
        if scheduler.waits_for_blocks:
            return NoRoom("requests that came before wait for KV blocks")
        lease = pool.lease(
            hashes, self._pod.limits.first_blocks(request), keep_free=scheduler.stats().running, host=True
        )
        if lease is None:
            return NoRoom("the KV pool is full", passing=pool.copying())
        return Room(lease, lease.cached_blocks * size)
