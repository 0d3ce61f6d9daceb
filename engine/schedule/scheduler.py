"""Decides which sequences compute how many tokens in the next step. Policy only: it touches no tensors.

    add --> waiting --admit (lease, slot)--> running --finish / abort--> out
               ^                                |
               +----------- preempt ------------+

- The order is priority, then arrival. Preempted sequences are admitted before new ones, and admission never overtakes.
- A step has decodes first, one token each, then prompt chunks. If prompts wait, decodes take at most three quarters.
- A decode without a free block preempts the last sequence behind it in order, so the first always makes progress.
  No sequence is preempted while a step in flight or a copy to the host is about to free blocks.
- If nothing can run, a blocked sequence gives up its blocks. Then only leases and pins of other pods' transfers are
  left; steps are empty until they end.
- Drafts use only the rest: tokens after the prompts' share, and blocks after one for each running sequence.

The engine's thread calls it; any thread may call `stats`. docs/design.md has the reasons.
"""

from __future__ import annotations

import functools
import heapq
from bisect import insort
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from common.errors import BatonError, InternalError, InvalidRequest
from common.types import FinishReason
from engine.kv.blocks import BlockPool
from engine.kv.eviction import Retention
from engine.kv.groups.state_slots import Snapshot
from engine.kv.lease import BlockCopy, Lease
from engine.schedule.chunks import ChunkPolicy
from engine.schedule.limits import SchedulerConfig, num_future_forks, require_fitting
from engine.schedule.outputs import SchedulerStats
from engine.schedule.sequence import DraftTokens, Sequence

if TYPE_CHECKING:
    from torch import Tensor

NO_DRAFTS: Mapping[Sequence, DraftTokens] = MappingProxyType({})
T = TypeVar("T")


class ScheduledSequence(NamedTuple):
    """One sequence in a step: the step computes its tokens start..start+num_new. A step is a list of these."""

    seq: Sequence
    start: int
    num_new: int  # Includes the drafts
    samples: bool  # The tokens reach the sequence's end, so the next token is sampled, and one more after each draft
    is_decode: bool = False  # The sequence decodes; else the tokens are a chunk of a prompt
    num_recomputed: int = 0  # New tokens that had KV before a preemption
    drafts: tuple[int, ...] = ()  # Guesses of the tokens after the newest one; the last of the `num_new` tokens
    draft_probs: Tensor | None = None  # See DraftTokens.probs
    block_copies: tuple[BlockCopy, ...] = ()  # Copies to make before anything of the step is written
    state_copies: tuple[BlockCopy, ...] = ()  # The same between slots of recurrent states
    snapshots: tuple[Snapshot, ...] = ()  # Copies of its recurrent state to make, ascending


def _priority_key(seq: Sequence) -> tuple[int, int, int]:
    """Returns the order: priority, then arrival, then child."""
    return -seq.priority, seq.arrival, seq.child


def _admission_key(seq: Sequence) -> tuple[bool, bool, int, int, int]:
    """Returns the order of admission: sequences with a lease, then preempted ones, then by _priority_key."""
    return seq.lease is None, seq.preemptions == 0, *_priority_key(seq)


class Scheduler:
    """The waiting and the running sequences, and the policy that plans each step."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.config = config
        self._pool = pool
        self._chunks = ChunkPolicy(config.chunk_tokens, config.prompt_step_tokens, pool.block_size)
        self._by_request: dict[str, dict[int, Sequence]] = {}  # All sequences, by request id and child
        self._running: list[Sequence] = []  # Sequences with a slot, in order of _priority_key
        self._waiting: list[Sequence] = []  # Sequences without a slot, in the order of admission
        self._slots = list(range(config.max_seqs))  # Free slots, a heap
        self._reserved_for_drafts: list[Sequence] = []  # Their leases grew for drafts since the last step
        self._failed: list[tuple[Sequence, BatonError]] = []
        self._arrivals, self._stats = 0, SchedulerStats()

    # -- sequences come and go ----------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Adds a sequence. Raises InvalidRequest with the name of the field if it can never run here.

        A lease that it brings must have room for the prompt, with KV for the first `computed` tokens.
        """
        require_fitting(seq, self.config, self._pool)
        if seq.child in self._by_request.get(seq.request_id, ()):
            raise InvalidRequest(f"request {seq.request_id} is already in the engine", field="request_id")
        if seq.lease is not None and seq.allocated < seq.prompt_len:
            raise InternalError(f"the lease has room for {seq.allocated} tokens, the prompt has {seq.prompt_len}")
        self._arrivals += 1
        seq.arrival = self._arrivals
        self._enqueue(seq)

    def fork(self, seq: Sequence, other: Sequence) -> None:
        """Adds `other`, a child of `seq`, after the prompt has been computed; both share the prompt's blocks."""
        assert seq.lease is not None
        other.lease = seq.lease.fork(self._num_blocks(seq.prompt_len))
        other.computed = seq.prompt_len
        if not other.lease.is_complete:
            other.preempt()
        self._enqueue(other)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Removes a sequence. Idempotent, the first reason stays. The engine finishes the lease later."""
        children = self._by_request.get(seq.request_id, {})
        if children.get(seq.child) is not seq:
            return
        del children[seq.child]
        if not children:
            del self._by_request[seq.request_id]
        self._dequeue(seq)
        self._drop_partial_block(seq)
        seq.finish_reason = reason
        if seq.constraint is not None:
            seq.constraint.close()

    def stall(self, seq: Sequence) -> None:
        """Preempts a sequence with a late mask. It runs again when it is no longer `blocked`."""
        self._preempt(seq)

    def abort(self, request_id: str, child: int | None = None) -> list[Sequence]:
        """Removes the sequences of a request, or one child, and returns the removed ones.

        A child cannot be aborted before the prompt is computed, when one sequence stands for all children.
        """
        seqs = self.sequences_of(request_id)
        aborted = [seq for seq in seqs if child is None or (seq.child == child and seq.num_samples == 1)]
        for seq in aborted:
            self.finish(seq, FinishReason.ABORT)
        return aborted

    def sequences_of(self, request_id: str) -> list[Sequence]:
        """Returns the sequences of a request; it has one until its prompt is computed."""
        return list(self._by_request.get(request_id, {}).values())

    def request_ids(self) -> list[str]:
        """Returns the ids of all requests with waiting or running sequences."""
        return list(self._by_request)

    @property
    def queues(self) -> tuple[list[Sequence], list[Sequence]]:
        """The running and the waiting sequences, each in order."""
        return self._running, self._waiting

    @property
    def has_work(self) -> bool:
        """Whether a sequence wants to run. The next step may be empty while blocks are leased or pinned elsewhere."""
        return any(not seq.paused for seq in (*self._running, *self._waiting))

    @property
    def waits_for_blocks(self) -> bool:
        """Whether a sequence waits for blocks; new requests from other pods should not lease any before it has them."""
        return any(seq.lease is None and not (seq.blocked or seq.loads_from_files) for seq in tuple(self._waiting))

    def stats(self) -> SchedulerStats:
        running, waiting = tuple(self._running), tuple(self._waiting)
        stats = replace(self._stats, running=len(running), waiting=len(waiting))
        stats.num_preempted = sum(seq.preemptions > 0 and seq.lease is None for seq in waiting)
        stats.queued_tokens = sum(seq.remaining for seq in (*running, *waiting) if not seq.decoding)
        return stats

    # -- the plan of a step -------------------------------------------------------------------------------------------

    def schedule(self, drafts: Mapping[Sequence, DraftTokens] = NO_DRAFTS) -> list[ScheduledSequence]:
        """Plans the next step and allocates its blocks; decodes come first. Empty if nothing can run now.

        The caller launches the step before the next call. `drafts` has the proposed drafts of draft candidates; as many
        as fit are verified.
        """
        while True:
            self._admit(new=False)  # sequences that have their blocks
            decodes = self._schedule_decodes()  # one token each, by preemption if blocks run out
            self._admit(new=True)  # new sequences, if slots and blocks are left
            if drafts:
                self._add_drafts(decodes, drafts)  # if tokens and blocks are left
            scheduled = self._add_chunks(decodes, self._prompt_token_limit(decodes))  # the other tokens
            if scheduled or not self._preempt_paused():
                break
        self._trim_unused_draft_blocks(scheduled)
        if __debug__ and Sequence.CHECKS:
            for seq in (*self._running, *self._waiting):
                seq.check()
        return scheduled

    def take_failed(self) -> list[tuple[Sequence, BatonError]]:
        """Returns, once, the sequences that `schedule` has ended with an error: the host gave back damaged blocks."""
        failed, self._failed = self._failed, []
        return failed

    def draft_candidates(self) -> list[Sequence]:
        """Admits sequences with a lease; returns those that decode next and have all tokens on the host."""
        self._admit(new=False)
        return [seq for seq in self._running if seq.decoding and not (seq.blocked or seq.launched or seq.pending)]

    def reserve_for_drafts(self, seq: Sequence, end: int) -> int:
        """Grows the lease of a draft candidate towards `end` tokens if the pool can spare the blocks.

        Returns the tokens that fit. The next `schedule` releases the blocks that it does not use.
        """
        self._extend(seq, end, keep_free=self._num_growing())
        self._reserved_for_drafts.append(seq)
        return seq.allocated

    def _admit(self, *, new: bool) -> None:
        """Moves waiting sequences into free slots, in order; without `new` only sequences that have a lease."""
        for seq in tuple(self._waiting):
            if len(self._running) == self.config.max_seqs:
                return
            if seq.blocked:
                continue
            if seq.lease is None and new and self._waits_for_files(seq):
                continue
            if seq.lease is None and not (new and self._allocate(seq)):
                return
            assert seq.lease is not None
            if seq.lease.host_loading:
                self._waiting.remove(seq)
                insort(self._waiting, seq, key=_admission_key)  # with a lease it comes earlier
            elif self._finish_host_load(seq, seq.lease):
                self._waiting.remove(seq)
                seq.slot = heapq.heappop(self._slots)
                insort(self._running, seq, key=_priority_key)

    def _schedule_decodes(self) -> list[ScheduledSequence]:
        """Returns the decodes of the step in order, one token each. A decode without a block preempts."""
        limit = self.config.chunk_tokens
        if len(self._running) > limit - self._prompt_share and self._has_prompts():
            limit -= self._prompt_share
        block_size = self._pool.block_size
        decodes: list[ScheduledSequence] = []
        for seq in tuple(self._running):
            if len(decodes) == limit:
                break
            # A sequence that this loop has preempted has no KV, so it is not `decoding`.
            if seq.blocked or not seq.decoding or seq.reaches_limit or seq.num_drafted or seq.forking:
                continue
            start, lease = seq.start, seq.lease
            copies: tuple[BlockCopy, ...] = ()
            assert lease is not None
            if lease.cow_index == start // block_size:
                copies = self._allocate_or_preempt(seq, lease.copy_on_write) or ()
                if not copies:
                    continue
            if (start < seq.allocated or self._allocate_or_preempt(seq, lease.grow)) and (
                self._pool.pages_per_block == 1
                or self._allocate_or_preempt(seq, functools.partial(lease.cover, start, start + 1))
            ):
                decodes.append(ScheduledSequence(seq, start, 1, samples=True, is_decode=True, block_copies=copies))
        return decodes

    def _add_drafts(self, decodes: list[ScheduledSequence], drafts: Mapping[Sequence, DraftTokens]) -> None:
        """Adds drafts to the decodes that have some, as far as tokens and blocks are left."""
        spare = self.config.chunk_tokens - len(decodes) - (self._prompt_share if self._has_prompts() else 0)
        growing = self._num_growing()
        for index, entry in enumerate(decodes):
            seq, proposed = entry.seq, drafts.get(entry.seq)
            # One token is sampled after the last draft, and the last token of a sequence never gets KV.
            limit = min(spare, seq.max_len - seq.length - 1)
            if proposed is None or limit <= 0:
                continue
            end = entry.start + 1 + min(limit, len(proposed.tokens))
            if end > seq.allocated:
                self._extend(seq, end, keep_free=growing)
            verified = proposed.tokens[: min(end, seq.allocated) - entry.start - 1]
            assert seq.lease is not None
            if verified and seq.lease.cover(entry.start, entry.start + 1 + len(verified)):
                spare -= len(verified)
                decodes[index] = entry._replace(num_new=1 + len(verified), drafts=verified, draft_probs=proposed.probs)

    def _prompt_token_limit(self, decodes: list[ScheduledSequence]) -> int:
        """Returns the step's limit of prompt tokens."""
        config = self.config
        if decodes or config.prompt_step_tokens is None:
            spare = config.chunk_tokens - sum(entry.num_new for entry in decodes)
            return min(spare, config.local_chunk_tokens) if decodes and config.local_chunk_tokens else spare
        prompts = sum(not (seq.blocked or seq.decoding) for seq in self._running)
        alone = prompts == 1 and all(seq.blocked for seq in self._waiting)
        return config.max_step_tokens if alone else config.prompt_step_tokens

    def _add_chunks(self, decodes: list[ScheduledSequence], limit: int) -> list[ScheduledSequence]:
        """Returns the step: the decodes, and then prompt chunks of `limit` tokens together."""
        prompts = [seq for seq in self._running if not (seq.blocked or seq.decoding)]
        if not prompts or limit <= 0:
            return decodes
        for seq in prompts:
            lease, size = seq.lease, self._pool.block_size
            assert lease is not None
            if seq.start == lease.cached_blocks * size:  # not started: blocks may be published since its admission
                cached = lease.rematch(seq.matchable_hashes())
                if cached * size > seq.computed:
                    self._start_from(seq, cached)
        scheduled = decodes.copy()
        has_groups = self._pool.pages_per_block > 1
        for seq, wanted in self._chunks.split(prompts, limit).items():
            num_new = self._cover_chunk(seq, wanted, scheduled) if has_groups else wanted
            if not num_new:
                continue
            start, end = seq.start, seq.start + num_new
            assert end <= seq.allocated
            recomputed = max(0, min(end, seq.recompute_until) - start)
            self._stats.recomputed_tokens += recomputed
            samples = end == seq.length
            scheduled.append(ScheduledSequence(seq, start, num_new, samples=samples, num_recomputed=recomputed))
        return scheduled

    def _cover_chunk(self, seq: Sequence, num_new: int, scheduled: list[ScheduledSequence]) -> int:
        """Allocates the pages of KV groups with windows for a chunk; returns its length, less if pages are short.

        Without pages for one block it preempts the last sequence behind `seq` that is not in the step. Returns 0 if
        there is none, or if pages will be freed without that.
        """
        start, size = seq.start, self._pool.block_size
        in_step = {entry.seq for entry in scheduled}
        one_block = size - start % size
        while (lease := seq.lease) is not None:  # an earlier chunk of the step may have preempted it
            if lease.cover(start, start + num_new):
                return num_new
            if num_new > one_block:
                num_new = one_block + max(0, num_new // 2 - one_block) // size * size
                continue
            if seq.launched or self._blocks_will_be_freed() or not (victim := self._victim(seq, in_step)):
                return 0
            self._preempt(victim)
        return 0

    def _trim_unused_draft_blocks(self, scheduled: list[ScheduledSequence]) -> None:
        """Releases the blocks that were reserved for drafts which this step does not verify."""
        if self._reserved_for_drafts:
            used = {entry.seq for entry in scheduled if entry.drafts}
            for seq in self._reserved_for_drafts:
                if seq.lease is not None and not seq.lease.finished and seq not in used:
                    seq.lease.trim(self._num_blocks(len(seq.tokens)))
            self._reserved_for_drafts = []

    @property
    def _prompt_share(self) -> int:
        """Tokens of a step that decodes and drafts leave to waiting prompts."""
        return (self.config.chunk_tokens + 2) // 4

    def _has_prompts(self) -> bool:
        return any(not (seq.blocked or seq.decoding) for seq in self._running) or any(
            not seq.blocked for seq in self._waiting
        )

    # -- blocks -------------------------------------------------------------------------------------------------------

    def _waits_for_files(self, seq: Sequence) -> bool:
        """Returns whether the sequence waits until its cached prefix is in the host; starts the load if need be."""
        if self._pool.disk_tier is None and self._pool.shared_tier is None:
            return False
        if seq.file_load is None:
            seq.file_load = self._pool.load_from_files(seq.matchable_hashes())
        return seq.loads_from_files

    def _allocate(self, seq: Sequence) -> bool:
        """Leases blocks for all tokens of the sequence, and leaves one block for each sequence that may grow."""
        growing = sum(1 + num_future_forks(other) for other in self._running if not other.hand_off)
        lease = self._pool.lease(
            seq.matchable_hashes(),
            self._num_blocks(len(seq.tokens)),
            keep_free=growing + num_future_forks(seq),
            host=True,
            saved_partial=seq.saved_partial,
            retention=Retention.of(seq.request),
        )
        if lease is None:
            return False
        seq.lease = lease
        self._start_from(seq, lease.cached_blocks)
        if lease.restored_partial:
            assert seq.saved_partial is not None
            seq.computed = seq.saved_partial.computed
        else:
            seq.draft_lag = 0
        if seq.preemptions:
            self._stats.fully_restored += not seq.recomputing
            self._stats.partly_recomputed += seq.recomputing
        return True

    def _start_from(self, seq: Sequence, cached_blocks: int) -> None:
        seq.computed = cached_blocks * self._pool.block_size
        if seq.preemptions == 0:
            assert seq.lease is not None
            seq.cached_tokens = seq.computed
            seq.host_tokens = seq.lease.host_blocks * self._pool.block_size

    def _finish_host_load(self, seq: Sequence, lease: Lease) -> bool:
        """Completes the copy of blocks from the host; if they are damaged, ends the sequence and returns False."""
        self._drop_partial_block(seq)
        if lease.host_error is not None:
            self._failed.append((seq, lease.host_error))
            self.finish(seq, FinishReason.ERROR)
            return False
        if lease.host_load is not None:
            lease.host_load = None
            seq.publish()
        return True

    def _extend(self, seq: Sequence, end: int, *, keep_free: int) -> None:
        """Grows the lease to `end` tokens if `keep_free` blocks stay available."""
        assert seq.lease is not None
        missing = self._num_blocks(end) - len(seq.lease.blocks)
        if missing > 0 and self._pool.num_available() - missing >= keep_free * self._pool.pages_per_block:
            seq.lease.grow(missing)

    def _num_growing(self) -> int:
        """Returns the number of running sequences that may need one more block."""
        return sum(not seq.hand_off for seq in self._running)

    def _allocate_or_preempt(self, seq: Sequence, allocate: Callable[[], T | None]) -> T | None:
        """Calls `allocate`, and preempts sequences until it succeeds; None if the decode has to wait."""
        while not (granted := allocate()):
            victim = None if self._blocks_will_be_freed() else self._victim(seq)
            if victim is None:
                return None
            self._preempt(victim)
        return granted

    def _blocks_will_be_freed(self) -> bool:
        """Returns whether blocks become available when a step in flight or a copy to the host ends."""
        pool = self._pool
        return pool.num_deferred() > 0 or pool.copies_pending() or any(seq.reaches_limit for seq in self._running)

    def _victim(self, seq: Sequence, kept: Collection[Sequence] = ()) -> Sequence | None:
        """Returns the last sequence behind `seq` in order, else the last one that is paused or waits for a slot.

        It is none of `kept`.
        """
        holders = [other for other in self._sequences_with_lease() if other not in kept]
        below = [other for other in holders if _priority_key(other) > _priority_key(seq)]
        stopped = [other for other in holders if other is not seq and (other.blocked or other in self._waiting)]
        return max(below or stopped, key=_priority_key, default=None)

    def _preempt_paused(self) -> bool:
        """Preempts the last paused sequence in order, if a sequence waits and no blocks will be freed without that."""
        if all(seq.blocked or seq.loads_from_files for seq in self._waiting) or self._blocks_will_be_freed():
            return False
        paused = [seq for seq in self._sequences_with_lease() if seq.blocked]
        if paused:
            self._preempt(max(paused, key=_priority_key))
        return bool(paused)

    def _sequences_with_lease(self) -> list[Sequence]:
        return self._running + [seq for seq in self._waiting if seq.lease is not None]

    def _preempt(self, seq: Sequence) -> None:
        self._dequeue(seq)
        assert seq.lease is not None
        if seq.lease.host_load is None:  # else its blocks are still in the host
            self._drop_partial_block(seq)
            seq.saved_partial = self._pool.save_partial_block(seq.lease, seq.computed)
        seq.preempt()
        self._stats.preemptions += 1
        insort(self._waiting, seq, key=_admission_key)

    def _drop_partial_block(self, seq: Sequence) -> None:
        if seq.saved_partial is not None:
            self._pool.drop_partial_block(seq.saved_partial)
            seq.saved_partial = None

    def _enqueue(self, seq: Sequence) -> None:
        self._by_request.setdefault(seq.request_id, {})[seq.child] = seq
        insort(self._waiting, seq, key=_admission_key)

    def _dequeue(self, seq: Sequence) -> None:
        """Removes the sequence from the running or the waiting ones."""
        if seq.slot < 0:
            self._waiting.remove(seq)
        else:
            self._running.remove(seq)
            heapq.heappush(self._slots, seq.slot)
            seq.slot = -1

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)
