"""One sequence in the engine: its tokens, how many of them have KV, and the lease with the KV.

    0          computed               start           allocated
    | has KV   | in launched steps    | has blocks    | needs blocks          computed <= start <= allocated

A prompt chunk, a decode and a verification of drafts are one operation: a step computes KV for `num_new` tokens from
`start` on and, if it reaches `length`, samples the tokens that follow. A preemption takes the lease and all KV
(computed = 0) and keeps the tokens, so the same operation computes them again.

`start` and `length` include tokens of steps that the host has not seen the result of; `computed` and `tokens` do not.
Drafts are in neither: KV of a wrong draft lies behind `computed` and is overwritten by later steps.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from common.block_hash import BlockHasher, matchable_blocks
from common.types import FinishReason, ValidRequest
from engine.kv.blocks import Lease
from engine.kv.host_tier import SavedPartialBlock
from engine.sampling.constraint import Constraint

if TYPE_CHECKING:
    from torch import Tensor

    from engine.schedule.drafts import DraftState


@dataclass(init=False, repr=False, eq=False, slots=True)
class Sequence:
    """A request, or one of its n samples from the moment its prompt has been computed.

    A request for n sequences is one sequence until its prompt is computed. The last step of the prompt samples n first
    tokens from the same logits, and `fork` makes the other children. They share the prompt's blocks and nothing else.

    The scheduler sets `arrival`, `lease`, `preemptions`, `slot` and, on admission, `computed`. The stepper calls
    `launch`, `finish_step` and `append`.
    """

    CHECKS: ClassVar[bool] = False  # Scheduler and stepper call `check` in every step; set by tests

    request: ValidRequest
    request_id: str
    priority: int
    arrival: int
    child: int  # Number among the request's n sequences; the noise of sampling depends on it
    tokens: list[int]  # Prompt and output
    prompt_len: int
    #: Tokens computed in chunks before the sequence decodes: the prompt; with `hand_off` also the given output.
    prefill_len: int
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
    #: Position up to which the tokens had KV that was lost in a preemption or with another pod.
    recompute_until: int
    saved_partial: SavedPartialBlock | None  # Copy of its last, partial block in host memory while it is preempted

    num_drafted: int  # Drafts in a launched step
    draft_lag: int  # Newest of the computed tokens that have no KV of the draft model
    draft_state: DraftState | None  # State of the speculator; None until the speculator has seen the sequence

    #: First prompt token without a returned log-probability; prompt_len if none is wanted.
    next_prompt_logprob: int
    wants_embedding: bool
    #: Hidden state of the last prompt token before the LM head; on the device, set with the first token.
    embedding: Tensor | None

    _fingerprint: str
    _hasher: BlockHasher

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
        """Makes a sequence.

        Args:
            fingerprint: Fingerprint of the KV layout; the block hashes depend on it.
            lease: Blocks with the KV of `computed` tokens, if the KV came from another pod.
            output: Tokens that this pod or another has generated before; generation continues after them.
            wants_embedding: The request asks for `embedding`.
            hashes: Hashes of lead blocks, if the caller has computed them.
        """
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
        self.num_drafted, self.draft_lag, self.draft_state = 0, 0, None
        self.next_prompt_logprob = self.prompt_len if request.sampling.prompt_logprobs is None or computed else 1
        self.wants_embedding, self.embedding = wants_embedding, None
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
        """Whether its next step is one token.

        Then all tokens but the newest have KV or are being computed, and the newest is an output.
        """
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
        """Records the launch of a step that computes num_new tokens from `start` on.

        With `sample` it samples the next one.

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
            constraint=None if self.constraint is None else self.constraint.copy(),
            child=child,
        )
        other.cached_tokens, other.host_tokens = self.cached_tokens, self.host_tokens
        other.paused, other.arrival = self.paused, self.arrival
        other.next_prompt_logprob = other.prompt_len
        return other

    def matchable_hashes(self) -> list[bytes]:
        """Returns the hashes of the lead blocks that a cache may supply.

        At least one token is left to compute, and so is the token before each one with a wanted log-probability.
        """
        limit = matchable_blocks(len(self.tokens), self.block_size)
        if self.next_prompt_logprob < self.prompt_len:
            limit = min(limit, (self.next_prompt_logprob - 1) // self.block_size)
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
        assert 0 <= self.draft_lag <= self.computed
        if self.lease is None:
            assert self.start == 0
            assert self.slot < 0, "a running sequence has a lease"
        elif not self.lease.finished:
            assert self.start + self.num_drafted <= self.allocated, "launched steps write to blocks of the lease"
            assert self.lease.num_published * self.block_size <= self.complete_len, "published blocks have their KV"
