"""One sequence as the engine runs it: its tokens, how many of them have KV, and the lease that holds the KV.

Invariant: computed <= start <= allocated <= max_len. Prefill, chunk, decode and verify are the same operation on it: a
step computes KV for `num_new` tokens from `start` on, and where it reaches the end (`length`), samples what follows.
A preemption takes lease and KV away (computed = 0) and leaves the tokens: the same arithmetic computes them again.

The host may plan a step before it has seen the last one's result: `launched` tokens are being computed, and `pending`
sampled tokens exist on the device alone. start and length count them, computed and tokens do not.

A step may verify drafts, guesses of the tokens that follow the newest: `drafted` of them are in it, and nobody counts
them. Those that turn out right are appended like any token, and `accept` says that they have KV; what the step wrote
for the others lies beyond `computed`, where later steps write again.

A request for n sequences is one until its prompt is computed: the step that ends it samples n first tokens from the
same logits, and `fork` makes the other children, which share the prompt's blocks and have nothing else in common.
"""

from __future__ import annotations

from collections import abc
from typing import TYPE_CHECKING

from common.block_hash import BlockHasher, matchable_blocks
from common.types import FinishReason, ValidRequest
from engine.kv.blocks import Lease
from engine.kv.host_tier import SavedPartialBlock
from engine.sampling.constraint import Constraint

if TYPE_CHECKING:
    from torch import Tensor

    from engine.schedule.drafts import DraftState


class Sequence:
    """tokens: prompt and output. computed: tokens whose KV exists in the lease's blocks. child: its number among the
    request's n sequences; the noise that it is sampled with depends on it.

    cached_tokens: prompt tokens that the prefix cache supplied, host_tokens of them from host memory. parked: where its
    partial last block is while it is preempted. hand_off: ends after its first token, another pod goes
    on. paused: not scheduled until its reader catches up. finish: why it ended, None while it lives. slot: its own
    number below the scheduler's max_seqs while it runs. constraint: follows the output's tokens, None where any token
    may come. given: tokens that are computed in chunks before it decodes: the prompt, and of one that is handed off the
    output that it came with too. scored: the first prompt token whose log-probability is still to be told; prompt_len
    when none is. embeds: `state` is wanted, the last prompt token's state before the head, which is on the device with
    the first token. The scheduler sets `arrival`, `lease`, `preemptions`, `slot` and, on admission, `computed`; the
    stepper calls `launch`, `settle` and `accept`. lagging: how many of the last computed tokens lack KV of a draft
    model that follows in its own time. drafting: what the speculator knows of it, None before it saw it.
    """

    __slots__ = (
        "_fingerprint",
        "_hasher",
        "_recompute_until",
        "arrival",
        "block_size",
        "cached_tokens",
        "child",
        "computed",
        "constraint",
        "draft_lag",
        "draft_state",
        "embedding",
        "finish_reason",
        "hand_off",
        "host_tokens",
        "launched",
        "lease",
        "next_prompt_logprob",
        "num_drafted",
        "paused",
        "pending",
        "preemptions",
        "prefill_len",
        "priority",
        "prompt_len",
        "request",
        "request_id",
        "saved_partial",
        "slot",
        "tokens",
        "wants_embedding",
    )

    def __init__(
        self,
        request: ValidRequest,
        *,
        fingerprint: str,
        block_size: int,
        lease: Lease | None = None,
        computed: int = 0,
        output: abc.Sequence[int] = (),
        hand_off: bool = False,
        constraint: Constraint | None = None,
        wants_embedding: bool = False,
        child: int = 0,
        hashes: abc.Sequence[bytes] = (),
    ) -> None:
        """output: tokens that were generated before, by this pod or another; the next one follows them as if it had
        been here all the time. hashes: of the lead blocks, where they are known already.
        """
        assert computed == 0 or lease is not None
        self.request = request
        self.child = child
        self.request_id = request.request_id
        self.priority = request.priority
        self.prompt_len = request.prompt_len
        self.tokens = [*request.prompt_ids, *output]
        self.block_size = block_size
        self.lease = lease
        self.computed = computed
        self.launched = 0
        self.draft_lag = 0
        self.pending = 0
        self.num_drafted = 0
        self.draft_state: DraftState | None = None
        self.slot = -1
        self.cached_tokens = lease.cached_blocks * block_size if lease is not None else 0
        self.host_tokens = lease.host_blocks * block_size if lease is not None else 0
        self.hand_off = hand_off
        self.prefill_len = len(self.tokens) if hand_off else self.prompt_len
        self.constraint = constraint
        self.next_prompt_logprob = self.prompt_len if request.sampling.prompt_logprobs is None or computed else 1
        self.wants_embedding = wants_embedding
        self.embedding: Tensor | None = None
        self.finish_reason: FinishReason | None = None
        self.paused = False
        self.saved_partial: SavedPartialBlock | None = None
        self.preemptions = 0
        self.arrival = 0
        self._recompute_until = len(self.tokens) - 1 if output else 0  # the newest token never had KV
        self._fingerprint = fingerprint
        self._hasher = BlockHasher(fingerprint, block_size, request.cache_salt, known=hashes)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def length(self) -> int:
        """Tokens, with those that only the device knows."""
        return len(self.tokens) + self.pending

    @property
    def start(self) -> int:
        """Where the next step goes on: tokens that have KV once the launched steps end."""
        return self.computed + self.launched

    @property
    def remaining(self) -> int:
        """Tokens that no step has been launched for; 1 for a sequence that decodes."""
        return self.length - self.start

    @property
    def decoding(self) -> bool:
        """All but the newest token have KV or are being computed, and the newest is an output."""
        start = self.computed + self.launched
        return start >= self.prefill_len and start == len(self.tokens) + self.pending - 1

    @property
    def reaches_limit(self) -> bool:
        """It ends with the tokens that are pending, whatever they are."""
        return self.pending > 0 and self.length >= self.max_len

    @property
    def complete_len(self) -> int:
        """Tokens that have KV in all layers, those of a draft model included."""
        return self.computed - self.draft_lag

    @property
    def num_samples(self) -> int:
        """Tokens that are sampled from its next logits: the first ones of all children, while it stands for all."""
        return 1 if self.num_output else self.request.sampling.n

    @property
    def forking(self) -> bool:
        """The first tokens of all children are being sampled; nothing follows before the host knows them."""
        return self.pending > 0 and self.num_samples > 1

    @property
    def allocated(self) -> int:
        """Tokens for which the lease has room."""
        return 0 if self.lease is None else len(self.lease.blocks) * self.block_size

    @property
    def max_len(self) -> int:
        """Tokens at its longest; the last of them never gets KV."""
        return self.prefill_len + (1 if self.hand_off else self.request.sampling.max_tokens)

    @property
    def recompute_until(self) -> int:
        """KV below this token existed once; it was lost to a preemption, or with another pod."""
        return self._recompute_until

    @property
    def recomputing(self) -> bool:
        """It lost KV, and has not yet caught up."""
        return self.computed < self._recompute_until

    def launch(self, num_new: int, *, sample: bool, drafts: int = 0) -> None:
        """A step computes num_new tokens from `start` on and, with sample, what follows them; the last `drafts` of
        them are guesses. No other step is launched while there are any.
        """
        self.launched += num_new - drafts
        self.num_drafted += drafts
        self.pending += sample

    def finish_step(self, num_new: int, *, sample: bool, drafts: int = 0) -> None:
        """The oldest launched step has ended; what it sampled is the caller's to append."""
        self.launched -= num_new - drafts
        self.num_drafted -= drafts
        self.pending -= sample
        self.computed += num_new - drafts

    def accept_draft(self) -> None:
        """The newest token was a draft of the step that was settled last: it has KV."""
        self.computed += 1
        assert self.computed <= len(self.tokens)

    def append(self, token: int) -> None:
        """The token that was sampled after the last one."""
        self.tokens.append(token)

    def fork(self, child: int) -> Sequence:
        """Another child of the same request, without output, lease and KV. For a sequence without output."""
        other = Sequence(
            self.request,
            fingerprint=self._fingerprint,
            block_size=self.block_size,
            hand_off=self.hand_off,
            constraint=None if self.constraint is None else self.constraint.copy(),
            child=child,
        )
        other.cached_tokens, other.host_tokens = self.cached_tokens, self.host_tokens
        other.paused, other.arrival = self.paused, self.arrival
        other.next_prompt_logprob = other.prompt_len
        return other

    def matchable_hashes(self) -> list[bytes]:
        """Hashes of the blocks that a cache may supply: at least one token is left to compute, and the one before each
        that is to be scored.
        """
        limit = matchable_blocks(len(self.tokens), self.block_size)
        if self.next_prompt_logprob < self.prompt_len:
            limit = min(limit, (self.next_prompt_logprob - 1) // self.block_size)
        return self._hasher.extend(self.tokens)[:limit] if limit else []

    def publishable_hashes(self) -> list[bytes]:
        """Hashes of the blocks whose KV is complete."""
        return self._hasher.extend(self.tokens)[: self.complete_len // self.block_size]

    def publish(self) -> None:
        """Publish what became complete since the last call; cheap when nothing did."""
        assert self.lease is not None
        if self.complete_len // self.block_size > self.lease.num_published:
            self.lease.publish(self.publishable_hashes())

    def preempt(self) -> None:
        """Give blocks and KV up, keep the tokens. What launched steps do for it is lost, and sampled again."""
        assert self.lease is not None
        self.lease.finish("preempted")
        self.lease = None
        self._recompute_until = max(self._recompute_until, self.computed)
        self.draft_lag = min(self.draft_lag, self.computed % self.block_size)  # of the last block, if it comes back
        self.computed = self.launched = self.pending = self.num_drafted = 0
        self.preemptions += 1
