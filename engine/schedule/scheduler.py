"""Which sequences compute how many tokens in the next step. Pure policy: sequences and a block pool in, a Batch out.

A sequence is waiting or running until `finish` or `abort` takes it out. Running sequences have a lease; of the waiting
ones only those that came with one (their KV arrived from another pod) and found all slots taken. Roles are restrictions
of this policy that follow from what is added: a prefill pod adds prompts that hand off, a decode pod sequences whose
prompt is computed, an aggregated pod everything. Used by the engine's thread; `stats` and the counts by any thread.

A step: decodes first, one token each (of three quarters of the budget, if prompts want some); then prompt chunks under
the rest of the token budget, at least half of it for the oldest and the rest for the shortest, so that neither starves
the other, and prompts of one length come one after another. A step in which nothing decodes keeps no decode waiting and
has a budget of its own, the prompt budget, and one with a single prompt twice that. A prompt that fills the token
budget alone does not share more than that with others: their first tokens would wait for each other, and nothing is
gained, as large steps are no faster. What another pod goes on with ends in a chunk within the token budget, so that
little KV is left to move after the first token. Rank is priority, then arrival.

Nothing waits in a circle. A decode without room for its next token preempts the lowest-ranked lease holder below it, so
the first in rank always goes on; without one below it, it keeps its blocks and waits. Preempted sequences are admitted
before new ones, and admission never overtakes. If nothing can run, a paused sequence gives its blocks up. What then
still holds blocks are leases and holds outside, which end by themselves: the batch is empty, and the next may not be.

With a host tier a sequence may be admitted to blocks that are still on their way from the host. It waits for them as
one that holds its blocks already, and others pass. The same way a preempted one gets back what it had computed. Nobody
is preempted while copies alone will make room.

The children of a request are sequences like any other from the step on that computed their prompt: they take slots,
grow, are preempted and end one by one. One that shares the prompt's last block gets its own before it writes there.

A batch may be planned while the one before it runs (see Sequence). A sequence that ends with the token that is being
sampled is left out; nobody is preempted while the step in flight is about to give blocks back.

Drafts are verified with what is left: of the budget once every decode has its token and prompts keep their share, of
the blocks once every running sequence could have one more. Nobody is preempted for them.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from common.errors import BatonError, ConfigError, InternalError, InvalidRequest
from common.types import MAX_N, FinishReason
from engine.kv.blocks import BlockCopy, BlockPool, Lease
from engine.schedule.chunks import ChunkPolicy
from engine.schedule.drafts import DraftTokens
from engine.schedule.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor

NO_DRAFTS: Mapping[Sequence, DraftTokens] = MappingProxyType({})

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """chunk_tokens: tokens of one step; prompt_step_tokens: of one in which nothing decodes (None: the same), twice that
    where a prompt is alone; local_chunk_tokens: prompt tokens of one in which something decodes (0: what is left); max_seqs:
    sequences that run at once; max_model_len: tokens of a sequence.
    """

    chunk_tokens: int
    prompt_step_tokens: int | None = None
    local_chunk_tokens: int = 0
    max_seqs: int
    max_model_len: int

    def __post_init__(self) -> None:
        for field, value in (
            ("chunk_tokens", self.chunk_tokens),
            ("max_seqs", self.max_seqs),
            ("max_model_len", self.max_model_len),
        ):
            if value < 1:
                raise ConfigError(f"{field} must be at least 1, not {value}", field=field)
        if self.prompt_step_tokens is not None and self.prompt_step_tokens < self.chunk_tokens:
            raise ConfigError(
                f"prompt_step_tokens {self.prompt_step_tokens} is less than chunk_tokens {self.chunk_tokens}",
                field="prompt_step_tokens",
            )

    @property
    def max_step_tokens(self) -> int:
        """Of any step."""
        return self.chunk_tokens if self.prompt_step_tokens is None else 2 * self.prompt_step_tokens


class ScheduledSequence(NamedTuple):
    """seq computes num_new tokens from `start` on; sample: they reach the end of its tokens, so the next is sampled.

    decode: one token of a sequence that decodes, not a part of a prompt. recomputed: tokens of these that had KV before
    a preemption. drafts: guesses of the tokens after the newest, the last of num_new; what follows each is sampled too.
    probs: what they were drawn from, see Chain. copy: done before anything of the step is written.
    """

    seq: Sequence
    start: int
    num_new: int
    samples: bool
    is_decode: bool = False
    num_recomputed: int = 0
    drafts: tuple[int, ...] = ()
    draft_probs: Tensor | None = None
    block_copy: BlockCopy | None = None


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step's work; decodes first. Empty when nothing can run now. lost: sequences whose blocks came back from the
    host damaged, with the error; they have ended.
    """

    scheduled: list[ScheduledSequence]
    failed: abc.Sequence[tuple[Sequence, BatonError]] = ()

    @property
    def num_tokens(self) -> int:
        return sum(item.num_new for item in self.scheduled)


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """queued_tokens: prompt tokens (recomputed ones too) of waiting and running sequences that are not computed yet.

    preempted_waiting: preempted sequences that wait for blocks. preemptions, recomputed_tokens: since the start, as are
    resumed and recomputed: preempted sequences that got back all KV that they had, or not all of it.
    """

    running: int
    waiting: int
    num_preempted: int
    queued_tokens: int
    preemptions: int
    recomputed_tokens: int
    fully_restored: int = 0
    partly_recomputed: int = 0


def _priority_key(seq: Sequence) -> tuple[int, int, int]:
    return -seq.priority, seq.arrival, seq.child


def _admission_key(seq: Sequence) -> tuple[bool, bool, int, int, int]:
    """Order of admission: whoever holds blocks already, then whoever lost them, then rank."""
    return seq.lease is None, seq.preemptions == 0, *_priority_key(seq)


def _num_future_forks(seq: Sequence) -> int:
    """Children that the sequence still stands for beside itself and that will want blocks of their own here."""
    return 0 if seq.hand_off or seq.request.sampling.max_tokens == 1 else seq.num_samples - 1


class Scheduler:
    """See the top of this file."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.config = config
        self._pool = pool
        self._by_request: dict[str, dict[int, Sequence]] = {}  # by request and child
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._slots = list(range(config.max_seqs))  # free ones, a heap
        self._arrivals = 0
        self._preemptions = 0
        self._fully_restored = self._partly_recomputed = 0
        self._recomputed_tokens = 0
        self._failed: list[tuple[Sequence, BatonError]] = []
        self._policy = ChunkPolicy(config.chunk_tokens, config.prompt_step_tokens, pool.block_size)
        self._reserved_for_drafts: list[Sequence] = []  # leases with room for drafts, until the next batch

    def add(self, seq: Sequence) -> None:
        """Take a sequence in. Raises InvalidRequest naming the field when it can never run here.

        A sequence that comes with a lease has KV for `computed` tokens, and room for its prompt at least.
        """
        limit, prompt_len, max_len = self.config.max_model_len, seq.prompt_len, seq.max_len
        if prompt_len == 0:
            raise InvalidRequest("the prompt is empty", field="prompt")
        if prompt_len >= limit:
            raise InvalidRequest(f"{prompt_len} prompt tokens leave no room in a context of {limit}", field="prompt")
        if max_len > limit:
            raise InvalidRequest(
                f"{prompt_len} prompt tokens and {max_len - prompt_len} new ones exceed a context of {limit}",
                field="max_tokens",
            )
        if self._num_blocks(max_len - 1) > self._pool.num_blocks:
            raise InvalidRequest(
                f"{max_len} tokens never fit in {self._pool.num_blocks} blocks of {self._pool.block_size}",
                field="prompt" if self._num_blocks(prompt_len) > self._pool.num_blocks else "max_tokens",
            )
        if not 1 <= seq.request.sampling.n <= MAX_N:
            raise InvalidRequest(f"n is {seq.request.sampling.n}, outside 1 to {MAX_N}", field="n")
        if self._num_blocks(prompt_len) + _num_future_forks(seq) > self._pool.num_blocks:
            raise InvalidRequest(
                f"{seq.num_samples} sequences of {prompt_len} prompt tokens never fit in {self._pool.num_blocks} blocks "
                f"of {self._pool.block_size}",
                field="n",
            )
        if seq.child in self._by_request.get(seq.request_id, ()):
            raise InvalidRequest(f"request {seq.request_id} is running already", field="request_id")
        if seq.lease is not None and seq.allocated < prompt_len:
            raise InternalError(f"a lease of {seq.allocated} tokens for a prompt of {prompt_len}")
        self._arrivals += 1
        seq.arrival = self._arrivals
        self._enqueue(seq)

    def fork(self, seq: Sequence, other: Sequence) -> None:
        """Take in another child of a sequence whose prompt has just been computed; it shares the prompt's blocks."""
        assert seq.lease is not None
        other.lease = seq.lease.fork(self._num_blocks(seq.prompt_len))
        other.computed = seq.prompt_len
        self._enqueue(other)

    def sequences_of(self, request_id: str) -> list[Sequence]:
        """The request's sequences that are waiting or running: one until its prompt is computed."""
        return list(self._by_request.get(request_id, {}).values())

    def request_ids(self) -> list[str]:
        """Of all sequences that are waiting or running."""
        return list(self._by_request)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Take a sequence out; idempotent, the first reason stays. Its lease stays the engine's to finish."""
        family = self._by_request.get(seq.request_id, {})
        if family.get(seq.child) is not seq:
            return
        del family[seq.child]
        if not family:
            del self._by_request[seq.request_id]
        self._dequeue(seq)
        self._drop_partial_block(seq)
        seq.finish_reason = reason

    def abort(self, request_id: str, child: int | None = None) -> list[Sequence]:
        """Take a request's sequences, or one child, out wherever they are; those that were here (still).

        A child that does not exist yet cannot be taken out, nor can the sequence that stands for it.
        """
        found = [seq for seq in self.sequences_of(request_id) if child in (None, seq.child)]
        if child is not None:
            found = [seq for seq in found if seq.num_samples == 1]
        for seq in found:
            self.finish(seq, FinishReason.ABORT)
        return found

    @property
    def has_work(self) -> bool:
        """Some sequence wants to run; the next batch may be empty all the same, while blocks are held outside."""
        return any(not seq.paused for seq in (*self._running, *self._waiting))

    @property
    def waits_for_blocks(self) -> bool:
        """A sequence that came before, preempted or new, has no blocks yet: nobody outside should lease any."""
        return any(seq.lease is None and not seq.paused for seq in tuple(self._waiting))

    def stats(self) -> SchedulerStats:
        running, waiting = tuple(self._running), tuple(self._waiting)
        return SchedulerStats(
            running=len(running),
            waiting=len(waiting),
            num_preempted=sum(seq.preemptions > 0 and seq.lease is None for seq in waiting),
            queued_tokens=sum(seq.remaining for seq in (*running, *waiting) if not seq.decoding),
            preemptions=self._preemptions,
            recomputed_tokens=self._recomputed_tokens,
            fully_restored=self._fully_restored,
            partly_recomputed=self._partly_recomputed,
        )

    def reserve_for_drafts(self, seq: Sequence, end: int) -> int:
        """Room for `end` tokens of one of `drafters`, as far as the pool can spare it; tokens that there is room for.

        The next schedule gives back what it does not use.
        """
        self._extend(seq, end, keep_free=self._num_growing())
        self._reserved_for_drafts.append(seq)
        return seq.allocated

    def draft_candidates(self) -> list[Sequence]:
        """Running sequences that decode next and whose tokens are all known; those that came with their blocks have
        begun to run.
        """
        self._admit(new=False)
        return [seq for seq in self._running if seq.decoding and not (seq.paused or seq.launched or seq.pending)]

    def schedule(self, drafts: Mapping[Sequence, DraftTokens] = NO_DRAFTS) -> ScheduledBatch:
        """The next step's work; leases blocks for it. Every item must be computed or launched before the next call.

        drafts: of `drafters`; as many of them as fit are verified.
        """
        items = self._schedule_once(drafts)
        while not items and any(not seq.paused for seq in self._waiting) and not self._blocks_will_be_freed():
            paused = [seq for seq in self._lease_holders() if seq.paused]
            if not paused:
                break
            self._preempt(max(paused, key=_priority_key))
            items = self._schedule_once(drafts)
        self._trim_unused_draft_blocks(items)
        lost, self._failed = self._failed, []
        return ScheduledBatch(items, lost)

    def _trim_unused_draft_blocks(self, items: list[ScheduledSequence]) -> None:
        """Room that was reserved for drafts which are not verified now."""
        if self._reserved_for_drafts:
            used = {item.seq for item in items if item.drafts}
            for seq in self._reserved_for_drafts:
                if seq.lease is not None and not seq.lease.finished and seq not in used:
                    seq.lease.trim(self._num_blocks(len(seq.tokens)))
            self._reserved_for_drafts = []

    def _num_growing(self) -> int:
        """Running sequences that may want a block each."""
        return sum(not seq.hand_off for seq in self._running)

    def _schedule_once(self, drafts: Mapping[Sequence, DraftTokens]) -> list[ScheduledSequence]:
        self._admit(new=False)
        items = self._schedule_decodes()
        self._admit(new=True)
        if drafts:
            items = self._with_drafts(items, drafts)
        return items + self._schedule_chunks(self._prompt_token_limit(items))

    def _prompt_token_limit(self, decodes: list[ScheduledSequence]) -> int:
        """Tokens of the step that its prompts may have."""
        config = self.config
        if decodes or config.prompt_step_tokens is None:
            left = config.chunk_tokens - sum(item.num_new for item in decodes)
            return min(left, config.local_chunk_tokens) if decodes and config.local_chunk_tokens else left
        prompts = sum(not (seq.paused or seq.decoding) for seq in self._running)
        alone = prompts == 1 and all(seq.paused for seq in self._waiting)
        return config.max_step_tokens if alone else config.prompt_step_tokens

    def _admit(self, *, new: bool) -> None:
        """Move waiting sequences into free slots, in turn; without `new` only those that hold their blocks already."""
        turn = 0
        while turn < len(self._waiting) and len(self._running) < self.config.max_seqs:
            seq = self._waiting[turn]
            if seq.paused:
                turn += 1
                continue
            if seq.lease is None:
                if not new:
                    return
                del self._waiting[turn]
                leased = self._allocate(seq)
                insort(self._waiting, seq, key=_admission_key)
                if not leased:
                    return
                turn = self._waiting.index(seq)
            assert seq.lease is not None
            if seq.lease.host_loading:
                turn += 1
                continue
            if not self._finish_host_load(seq, seq.lease):
                continue
            self._waiting.remove(seq)
            seq.slot = heapq.heappop(self._slots)
            insort(self._running, seq, key=_priority_key)

    def _finish_host_load(self, seq: Sequence, lease: Lease) -> bool:
        """All that the lease got from the host is there; False, and the sequence has ended, when it is damaged."""
        self._drop_partial_block(seq)
        if lease.host_load is None:
            return True
        error = lease.finish_host_load()
        if error is not None:
            self._failed.append((seq, error))
            self.finish(seq, FinishReason.ERROR)
            return False
        seq.publish()
        return True

    def _drop_partial_block(self, seq: Sequence) -> None:
        if seq.saved_partial is not None:
            self._pool.drop_partial_block(seq.saved_partial)
            seq.saved_partial = None

    def _enqueue(self, seq: Sequence) -> None:
        self._by_request.setdefault(seq.request_id, {})[seq.child] = seq
        insort(self._waiting, seq, key=_admission_key)

    def _dequeue(self, seq: Sequence) -> None:
        """Of the running or the waiting sequences."""
        if seq.slot < 0:
            self._waiting.remove(seq)
        else:
            self._running.remove(seq)
            heapq.heappush(self._slots, seq.slot)
            seq.slot = -1

    def _allocate(self, seq: Sequence) -> bool:
        """Lease blocks for all known tokens, and leave one for the growth of each sequence that runs or comes of it."""
        growing = sum(
            1 + _num_future_forks(other) for other in self._running if not other.hand_off
        ) + _num_future_forks(seq)
        lease = self._pool.lease(
            seq.matchable_hashes(),
            self._num_blocks(len(seq.tokens)),
            keep_free=growing,
            host=True,
            saved_partial=seq.saved_partial,
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
            self._fully_restored += not seq.recomputing
            self._partly_recomputed += seq.recomputing
        return True

    def _schedule_decodes(self) -> list[ScheduledSequence]:
        limit = self.config.chunk_tokens
        prompt_share = (limit + 2) // 4
        if len(self._running) > limit - prompt_share and self._has_prompts():
            limit -= prompt_share
        items: list[ScheduledSequence] = []
        for seq in tuple(self._running):
            if len(items) == limit:
                break
            # One that was preempted by an earlier one of this loop has nothing computed, so it does not decode.
            if seq.paused or not seq.decoding or seq.reaches_limit or seq.num_drafted or seq.forking:
                continue
            start = seq.start
            lease = seq.lease
            assert lease is not None
            copy = None
            if lease.cow_index == start // self._pool.block_size:
                copy = self._allocate_or_preempt(seq, lease.copy_on_write)
                if copy is None:
                    continue
            if start < seq.allocated or self._allocate_or_preempt(seq, lease.grow):
                items.append(ScheduledSequence(seq, start, 1, samples=True, is_decode=True, block_copy=copy))
        return items

    def _with_drafts(
        self, items: list[ScheduledSequence], drafts: Mapping[Sequence, DraftTokens]
    ) -> list[ScheduledSequence]:
        """The decodes, with drafts of those that have some."""
        budget = self.config.chunk_tokens
        spare = budget - len(items) - ((budget + 2) // 4 if self._has_prompts() else 0)
        growing = self._num_growing()
        drafted: list[ScheduledSequence] = []
        for item in items:
            seq, chain = item.seq, drafts.get(item.seq)
            # The token after the last draft is sampled too, and the newest of all never gets KV.
            most = min(spare, seq.max_len - seq.length - 1)
            if chain is None or most <= 0:
                drafted.append(item)
                continue
            end = item.start + 1 + min(most, len(chain.tokens))
            if end > seq.allocated:
                self._extend(seq, end, keep_free=growing)
            wanted = chain.tokens[: min(end, seq.allocated) - item.start - 1]
            spare -= len(wanted)
            drafted.append(
                ScheduledSequence(
                    seq,
                    item.start,
                    1 + len(wanted),
                    samples=True,
                    is_decode=True,
                    drafts=wanted,
                    draft_probs=chain.probs if wanted else None,
                    block_copy=item.block_copy,
                )
            )
        return drafted

    def _extend(self, seq: Sequence, end: int, *, keep_free: int) -> None:
        """Room for `end` tokens, if the pool can spare it."""
        assert seq.lease is not None
        missing = self._num_blocks(end) - len(seq.lease.blocks)
        if missing > 0 and self._pool.num_available() - missing >= keep_free:
            seq.lease.grow(missing)

    def _has_prompts(self) -> bool:
        return any(not (s.paused or s.decoding) for s in self._running) or any(not s.paused for s in self._waiting)

    def _allocate_or_preempt(self, seq: Sequence, ask: Callable[[], T | None]) -> T | None:
        """What a decode asks of the pool, at the cost of those below it; nothing when it has to wait."""
        while not (granted := ask()):
            victim = None if self._blocks_will_be_freed() else self._victim(seq)
            if victim is None:
                return None
            self._preempt(victim)
        return granted

    def _blocks_will_be_freed(self) -> bool:
        """The end of a step in flight frees some: those given up meanwhile, or of a sequence that ends with it. Or the
        end of copies to the host does.
        """
        return (
            self._pool.num_deferred() > 0
            or self._pool.copies_pending()
            or any(seq.reaches_limit for seq in self._running)
        )

    def _victim(self, seq: Sequence) -> Sequence | None:
        """The lowest in rank below seq, else the lowest of those that do not run: paused, or waiting for a slot."""
        holders = self._lease_holders()
        below = [other for other in holders if _priority_key(other) > _priority_key(seq)]
        stuck = [other for other in holders if other is not seq and (other.paused or other in self._waiting)]
        return max(below or stuck, key=_priority_key, default=None)

    def _lease_holders(self) -> list[Sequence]:
        return self._running + [seq for seq in self._waiting if seq.lease is not None]

    def _preempt(self, seq: Sequence) -> None:
        self._dequeue(seq)
        assert seq.lease is not None
        if seq.lease.host_load is None:  # else what it had is in the host still
            self._drop_partial_block(seq)
            seq.saved_partial = self._pool.save_partial_block(seq.lease, seq.computed)
        seq.preempt()
        self._preemptions += 1
        insort(self._waiting, seq, key=_admission_key)

    def _schedule_chunks(self, budget: int) -> list[ScheduledSequence]:
        prompts = [seq for seq in self._running if not (seq.paused or seq.decoding)]
        if not prompts or budget <= 0:
            return []
        for seq in prompts:
            self._rematch_prefix(seq)
        return [self._chunk(seq, count) for seq, count in self._policy.split(prompts, budget).items()]

    def _chunk(self, seq: Sequence, num_new: int) -> ScheduledSequence:
        start = seq.start
        end = start + num_new
        assert end <= seq.allocated
        recomputed = max(0, min(end, seq.recompute_until) - start)
        self._recomputed_tokens += recomputed
        return ScheduledSequence(seq, start, num_new, samples=end == seq.length, num_recomputed=recomputed)

    def _rematch_prefix(self, seq: Sequence) -> None:
        """A prompt that has not started may find blocks that others published since its admission."""
        lease = seq.lease
        assert lease is not None
        if seq.start == lease.cached_blocks * self._pool.block_size:
            cached = lease.rematch(seq.matchable_hashes())
            if cached * self._pool.block_size > seq.computed:
                self._start_from(seq, cached)

    def _start_from(self, seq: Sequence, cached_blocks: int) -> None:
        seq.computed = cached_blocks * self._pool.block_size
        if seq.preemptions == 0:
            assert seq.lease is not None
            seq.cached_tokens = seq.computed
            seq.host_tokens = seq.lease.host_blocks * self._pool.block_size

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)
