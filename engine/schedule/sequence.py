"""One sequence in the engine: its tokens, how many of them have KV, and the lease with the KV.

    0          computed               start           allocated
    | has KV   | in launched steps    | has blocks    | needs blocks          computed <= start <= allocated

A prompt chunk, a decode and a verification of drafts are one operation: a step computes KV for `num_new` tokens from
`start` on and, if it reaches `length`, samples the tokens that follow. A preemption takes the lease and all KV
(computed = 0) and keeps the tokens, so the same operation computes them again.

`start` and `length` include tokens of steps in flight; `computed` and `tokens` do not.
Drafts are in neither: KV of a wrong draft lies behind `computed` and is overwritten by later steps.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from common.block_hash import BlockHasher, matchable_blocks
from common.types import FinishReason, ValidRequest
from engine.kv.groups.grouped_blocks import require_window_groups
from engine.kv.lease import Lease
from engine.kv.tiers.file_load import FileLoad
from engine.kv.tiers.host_tier import SavedPartialBlock
from engine.models.pooling import Pooling
from engine.sampling.constraint import Constraint

if TYPE_CHECKING:
    from torch import Tensor

    from engine.adapters.packed import Adapter


class DraftTokens(NamedTuple):
    """Guesses of the tokens that follow a sequence; each assumes that all guesses before it are right."""

    tokens: tuple[int, ...]
    probs: Tensor | None = None  # float32 [len(tokens) or more, vocab] that a model drew them from; None without one


@dataclass(slots=True)
class DraftState:
    """The speculator's state of one sequence between two steps."""

    proposer_state: Any  # Made and read by the proposer
    accepted: float  # Accepted drafts; older ones have less weight
    tested: float  # Verified drafts; older ones have less weight
    probe_at: int = 0  # Number of output tokens from which the sequence drafts again, although drafts did not pay
    probe_interval: int = 0  # Output tokens between two of these tries
    waits_left: int = 0  # Empty proposals left until steps stop waiting
    hit_rate: float = 1.0  # Share of recent proposals that were not empty

    @property
    def acceptance_rate(self) -> float:
        """Share of drafts that are right if all drafts before them are right."""
        return self.accepted / self.tested


@dataclass(init=False, repr=False, eq=False, slots=True)
class Sequence:
    """A request, or one of its n samples from the moment its prompt has been computed.

    The last step of the prompt samples n first tokens from the same logits, and `fork` makes the other children. They
    share the prompt's blocks and nothing else. The scheduler sets `arrival`, `lease`, `preemptions`, `slot` and, on
    admission, `computed`. The stepper calls `launch`, `finish_step` and `append`.
    """

    CHECKS: ClassVar[bool] = False  # Scheduler and stepper call `check` in every step; set by tests
    request: ValidRequest
    request_id: str
    priority: int
    arrival: int
    child: int  # Number among the request's n sequences; the noise of sampling depends on it
    tokens: list[int]  # Prompt and output
    prompt_len: int
    prefill_len: int  # Tokens computed in chunks before it decodes: the prompt; with `hand_off` also the given output
    hand_off: bool  # It ends after its first token, and another pod continues it
    constraint: Constraint | None  # Follows the tokens of the output; None if any token may come
    paused: bool  # Not scheduled until its reader catches up
    finish_reason: FinishReason | None  # Why the sequence ended; None while it is in the engine
    block_size: int
    lease: Lease | None
    slot: int  # Number below the scheduler's max_seqs while the sequence runs, else -1
    computed: int  # Tokens with KV in the lease's blocks
    launched: int  # Tokens that launched steps are computing
    pending: int  # Sampled tokens that only the device knows
    cached_tokens: int  # Prompt tokens that the prefix cache supplied
    host_tokens: int  # Prompt tokens in `cached_tokens` that came from host memory
    preemptions: int
    recompute_until: int  # Position up to which the tokens had KV that was lost in a preemption or with another pod
    file_load: FileLoad | None  # What was read from files before the first lease; None before it was looked up
    saved_partial: SavedPartialBlock | None  # Copy of its last, partial block in host memory while it is preempted
    num_drafted: int  # Drafts in a launched step
    draft_lag: int  # Number of newest computed tokens without KV of the draft model
    draft_state: DraftState | None  # State of the speculator; None until the speculator has seen the sequence
    next_prompt_logprob: int  # First prompt token without a returned log-probability; prompt_len if none is wanted
    pooling: Pooling | None  # How the states of the prompt become a vector; None for no vector
    pooled: Tensor | None  # Sum of the states pooled so far, after the final norm, float32 [hidden]
    next_pooled: int  # First prompt token that must still be pooled
    pooled_end: int  # End of the tokens that are pooled
    logit_ids: tuple[int, ...]  # Tokens of the logits after the prompt that the request asks for
    logits: Tensor | None  # These logits, float32 [len(logit_ids)]; set with the first token
    adapter: Adapter | None  # The adapter that changes the model for this sequence; it stays until the end
    adapter_slot: int | None  # The adapter's slot on the device; None while it has none, -1 without an adapter
    _fingerprint: str
    _hasher: BlockHasher

    def __init__(
        self,
        request: ValidRequest,
        *,
        fingerprint: str,  # Fingerprint of the KV layout; the block hashes depend on it
        block_size: int,
        lease: Lease | None = None,  # Blocks with the KV of `computed` tokens, if the KV came from another pod
        computed: int = 0,
        output: abc.Sequence[int] = (),  # Tokens that a pod has generated before; generation continues after them
        hand_off: bool = False,
        constraint: Constraint | None = None,
        pooling: Pooling | None = None,
        adapter: Adapter | None = None,  # That of `request.adapter`
        logit_ids: abc.Sequence[int] = (),
        child: int = 0,
        hashes: abc.Sequence[bytes] = (),  # Hashes of the first blocks, if the caller has computed them
    ) -> None:
        assert computed == 0 or lease is not None
        self.request, self.request_id, self.priority = request, request.request_id, request.priority
        self.child, self.hand_off, self.constraint = child, hand_off, constraint
        self.tokens = [*request.prompt_ids, *output]
        self.prompt_len = request.prompt_len
        self.prefill_len = len(self.tokens) if hand_off else self.prompt_len
        self.paused, self.finish_reason, self.slot, self.arrival = False, None, -1, 0
        self.block_size, self.lease, self.computed = block_size, lease, computed
        self.launched = self.pending = self.preemptions = 0
        self.cached_tokens = lease.cached_blocks * block_size if lease is not None else 0
        self.host_tokens = lease.host_blocks * block_size if lease is not None else 0
        self.recompute_until = len(self.tokens) - 1 if output else 0  # the newest token never had KV
        self.saved_partial = None
        self.file_load = None
        self.num_drafted, self.draft_lag, self.draft_state = 0, 0, None
        self.next_prompt_logprob = self.prompt_len if request.sampling.prompt_logprobs is None or computed else 1
        pooled = range(0) if pooling is None else pooling.tokens(self.prompt_len)
        self.pooling, self.pooled, self.next_pooled, self.pooled_end = pooling, None, pooled.start, pooled.stop
        self.logit_ids, self.logits = tuple(logit_ids), None
        assert request.adapter == ("" if adapter is None else adapter.digest)
        self.adapter, self.adapter_slot = adapter, -1 if adapter is None else None
        self._fingerprint = fingerprint
        self._hasher = BlockHasher(fingerprint, block_size, request.cache_salt, request.adapter, known=hashes)

    @property
    def wants_states(self) -> bool:
        """Whether the request asks for states or logits of its prompt."""
        return self.pooling is not None or bool(self.logit_ids)

    @property
    def blocked(self) -> bool:
        """Whether it is not scheduled now: its reader is too slow, its adapter or a mask of its constraint is late."""
        late = self.constraint is not None and self.constraint.busy
        return self.paused or late or self.adapter_slot is None

    @property
    def loads_from_files(self) -> bool:
        """Whether it waits for blocks from files before it gets a lease."""
        return self.file_load is not None and not self.file_load.done

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def length(self) -> int:
        """Number of tokens, including tokens that only the device knows."""
        return len(self.tokens) + self.pending

    @property
    def start(self) -> int:
        """First token of the next step: the tokens before it have KV when the launched steps end."""
        return self.computed + self.launched

    @property
    def remaining(self) -> int:
        """Tokens that are in no launched step yet; 1 if the sequence decodes."""
        return self.length - self.start

    @property
    def decoding(self) -> bool:
        """Whether only its newest token, an output, has no KV and is in no launched step."""
        start = self.computed + self.launched
        return start >= self.prefill_len and start == len(self.tokens) + self.pending - 1

    @property
    def reaches_limit(self) -> bool:
        """Whether the pending tokens are its last, whatever they are."""
        return self.pending > 0 and self.length >= self.max_len

    @property
    def complete_len(self) -> int:
        """Tokens with KV in all layers, including the layers of the draft model."""
        return self.computed - self.draft_lag

    @property
    def num_samples(self) -> int:
        """Number of tokens to sample from its next logits: the first tokens of all children, or one."""
        return 1 if self.num_output else self.request.sampling.n

    @property
    def forking(self) -> bool:
        """Whether the first tokens of all children are being sampled; the next step waits until the host has them."""
        return self.pending > 0 and self.num_samples > 1

    @property
    def allocated(self) -> int:
        """Tokens that fit in the lease's blocks."""
        return 0 if self.lease is None else len(self.lease.blocks) * self.block_size

    @property
    def max_len(self) -> int:
        """Largest number of tokens that it can have; the last of them never gets KV."""
        return self.prefill_len + (1 if self.hand_off else self.request.sampling.max_tokens)

    @property
    def recomputing(self) -> bool:
        """Whether KV that it lost has not been computed again yet."""
        return self.computed < self.recompute_until

    def launch(self, num_new: int, *, sample: bool, drafts: int = 0) -> None:
        """Records the launch of a step that computes num_new tokens from `start` on; with `sample` it samples the next.

        The last `drafts` of the tokens are drafts; no further step is launched while there are any.
        """
        self.launched += num_new - drafts
        self.num_drafted += drafts
        self.pending += sample

    def finish_step(self, num_new: int, *, sample: bool, drafts: int = 0) -> None:
        """Records that the oldest launched step has ended; the caller appends the tokens that it sampled."""
        self.launched -= num_new - drafts
        self.num_drafted -= drafts
        self.pending -= sample
        self.computed += num_new - drafts

    def append(self, token: int, *, after_draft: bool = False) -> None:
        """Appends a sampled token. With `after_draft` the token before it was a draft of the same step and has KV."""
        self.computed += after_draft
        assert self.computed <= len(self.tokens)
        self.tokens.append(token)

    def fork(self, child: int) -> Sequence:
        """Makes another child of the request, without output, lease and KV. This sequence must have no output yet."""
        other = Sequence(
            self.request,
            fingerprint=self._fingerprint,
            block_size=self.block_size,
            hand_off=self.hand_off,
            constraint=None if self.constraint is None else self.constraint.child(child),
            child=child,
            adapter=self.adapter,
        )
        other.adapter_slot = self.adapter_slot
        other.cached_tokens, other.host_tokens = self.cached_tokens, self.host_tokens
        other.paused, other.arrival = self.paused, self.arrival
        other.next_prompt_logprob = other.prompt_len
        return other

    def matchable_hashes(self) -> list[bytes]:
        """Returns the hashes of the blocks that a cache may supply, from the first on.

        They leave to compute: at least one token, the token before each wanted log-probability, and each token with a
        state that is pooled.
        """
        limit = matchable_blocks(len(self.tokens), self.block_size)
        if self.next_prompt_logprob < self.prompt_len:
            limit = min(limit, (self.next_prompt_logprob - 1) // self.block_size)
        if self.next_pooled < self.pooled_end:
            limit = min(limit, self.next_pooled // self.block_size)
        return self._hasher.extend(self.tokens)[:limit] if limit else []

    def publishable_hashes(self) -> list[bytes]:
        """Returns the hashes of the blocks with complete KV in all layers."""
        return self._hasher.extend(self.tokens)[: self.complete_len // self.block_size]

    def publish(self) -> None:
        """Publishes the blocks that became complete since the last call; cheap if there are none."""
        assert self.lease is not None
        if self.complete_len // self.block_size > self.lease.num_published:
            self.lease.publish(self.publishable_hashes())

    def preempt(self) -> None:
        """Gives up the lease and all KV, keeps the tokens. Results of launched steps are lost and sampled again."""
        assert self.lease is not None
        self.lease.finish("preempted")
        self.lease = None
        self.recompute_until = max(self.recompute_until, self.computed)
        # Only the tokens of the saved partial block can come back without KV of the draft model.
        self.draft_lag = min(self.draft_lag, self.computed % self.block_size)
        self.computed = self.launched = self.pending = self.num_drafted = 0
        self.preemptions += 1

    def check(self) -> None:
        """Asserts the invariants of the sequence between two steps, and between the launch and the end of a step."""
        assert min(self.computed, self.launched, self.pending, self.num_drafted) >= 0
        assert self.prompt_len <= len(self.tokens)
        assert self.start <= self.length <= self.max_len
        assert self.start + self.num_drafted < self.max_len, "the last token never gets KV"
        assert self.launched > 0 or not self.pending, "only a launched step has pending tokens"
        assert not self.num_drafted or self.pending == 1, "no step is launched after one with drafts"
        if self.lease is None:
            assert self.start == 0
            assert 0 <= self.draft_lag < self.block_size, "the lag of the saved partial block, see preempt"
            assert self.slot < 0, "a running sequence has a lease"
            return
        assert 0 <= self.draft_lag <= self.computed
        if not self.lease.finished:
            assert self.start + self.num_drafted <= self.allocated, "launched steps write to blocks of the lease"
            assert self.lease.num_published * self.block_size <= self.complete_len, "published blocks have their KV"


class BlockTables:
    """One row of block numbers for each slot; a row is updated from the lease when it is read.

    Only new blocks are copied, unless the slot has another lease or the lease has replaced blocks. Blocks behind the
    sequence's tokens were for drafts and may have been exchanged, so these are copied each time.
    """

    def __init__(self, slots: int, width: int, tails: abc.Sequence[int] = (), pad_block: int = 0) -> None:
        """`tails` has the blocks before a boundary that each window group sees, `pad_block` is that of WindowTables."""
        self.blocks = np.zeros((slots, width), dtype=np.int32)  # int32 [slots, width]
        #: The tables of the other KV groups.
        self.groups = tuple(WindowTables(slots, width, i, tail, pad_block) for i, tail in enumerate(tails))
        #: Number of first entries of each row that the device has. `row` lowers it, the copies to the device raise it.
        self.num_on_device = np.zeros(slots, dtype=np.int64)
        self._leases: list[Lease | None] = [None] * slots
        self._num_replaced = [0] * slots
        self._num_current = [0] * slots  # First entries of each row that are up to date while the lease is the same

    def row(self, seq: Sequence) -> np.ndarray:
        """Returns the blocks of a running sequence's lease, int32."""
        slot, lease = seq.slot, seq.lease
        assert lease is not None
        count = len(lease.blocks)
        row: np.ndarray = self.blocks[slot]
        if self._leases[slot] is not lease or self._num_replaced[slot] != lease.num_replaced:
            row[:count] = lease.blocks
            self._leases[slot], self._num_replaced[slot] = lease, lease.num_replaced
            self.num_on_device[slot] = 0
        elif count > self._num_current[slot]:
            row[self._num_current[slot] : count] = lease.blocks[self._num_current[slot] :]
            self.num_on_device[slot] = min(self.num_on_device[slot], self._num_current[slot])
        self._num_current[slot] = min(count, -(-seq.length // seq.block_size))
        return row[:count]


class WindowTables:
    """The block tables of one KV group with a window, as in `BlockTables`. A row has `pad_block` before the window."""

    def __init__(self, slots: int, width: int, group: int, tail: int, pad_block: int) -> None:
        self.tail, self.pad_block = tail, pad_block
        self.blocks = np.full((slots, width), pad_block, dtype=np.int32)  # int32 [slots, width]
        #: As in BlockTables; the device may have other blocks before the window, which its steps replace.
        self.num_on_device = np.zeros(slots, dtype=np.int64)
        self._group = group  # Index in GroupedLease.window_tables
        self._leases: list[Lease | None] = [None] * slots
        self._num_replaced = [0] * slots
        self._num_current = [0] * slots  # As in BlockTables
        self._first_live = [0] * slots  # First block of each row that is not `pad_block`

    def row(self, seq: Sequence) -> np.ndarray:
        """Returns the pages of a running sequence's lease in this group, int32."""
        slot, lease = seq.slot, seq.lease
        assert lease is not None
        grouped = require_window_groups(lease)
        table, first_live = grouped.window_tables[self._group], grouped.first_live[self._group]
        count = len(table)
        row: np.ndarray = self.blocks[slot]
        begin = self._num_current[slot]
        if self._leases[slot] is not lease or self._num_replaced[slot] != lease.num_replaced:
            self._leases[slot], self._num_replaced[slot] = lease, lease.num_replaced
            self._first_live[slot] = self.num_on_device[slot] = begin = 0
        if count > begin:
            row[begin:count] = table[begin:]
            self.num_on_device[slot] = min(self.num_on_device[slot], begin)
        row[min(begin, self._first_live[slot]) : first_live] = self.pad_block
        self._first_live[slot] = first_live
        self._num_current[slot] = min(count, -(-seq.length // seq.block_size))
        return row[:count]
