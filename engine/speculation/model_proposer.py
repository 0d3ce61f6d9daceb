"""Drafts from a draft model (Leviathan et al. 2023) or an EAGLE head (Li et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.schedule.sequence import Sequence as EngineSequence
from engine.speculation.draft_loop import DraftLoop
from engine.speculation.proposer import DraftBatch


class ModelProposer:
    """A proposer over a `DraftLoop`. It keeps no state: the KV of the drafts lies in the blocks.

    Args:
        loop: draws the drafts.
        reserve: `reserve(seq, end)` extends the lease of the sequence to `end` tokens as far as the pool has spare
            blocks, and returns the number of tokens that fit. The scheduler takes unused blocks back.
    """

    def __init__(self, loop: DraftLoop, reserve: Callable[[EngineSequence, int], int]) -> None:
        self.name = loop.name
        self._loop, self._reserve = loop, reserve

    def new_state(self, seq: EngineSequence) -> None:
        """Returns None: there is no state."""

    def catch_up(self, seqs: Sequence[EngineSequence]) -> None:
        """Computes the missing KV of the draft model. The host must know all tokens of the sequences."""
        self._loop.catch_up(seqs)

    def propose(self, seqs: Sequence[EngineSequence], states: Sequence[Any], limits: Sequence[int]) -> DraftBatch:
        drafts = DraftBatch.empty(len(seqs), max(limits))
        num_drafts = [self._num_drafts(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]
        rows = [row for row, count in enumerate(num_drafts) if count > 0]
        if not rows:
            return drafts
        drawn = self._loop.run([seqs[row] for row in rows], [num_drafts[row] for row in rows])
        drafts.tokens[rows, : drawn.tokens.shape[1]] = drawn.tokens
        drafts.lengths[rows] = drawn.lengths
        probs = drawn.probs
        if probs is not None and len(rows) < len(seqs):
            probs = probs.new_zeros(len(seqs), *probs.shape[1:]).index_copy_(0, probs.new_tensor(rows).long(), probs)
        return DraftBatch(drafts.tokens, drafts.lengths, probs)

    def _num_drafts(self, seq: EngineSequence, limit: int) -> int:
        """Returns how many drafts fit in the lease after the newest token, in blocks that no other sequence reads."""
        assert seq.lease is not None
        most = min(limit, seq.max_len - seq.length - 1)
        if most <= 0 or seq.lease.cow_index == seq.start // seq.block_size:
            return 0
        return max(0, min(most, self._reserve(seq, seq.start + 1 + most) - seq.start - 1))

    def expects_drafts(self, seq: EngineSequence, state: Any) -> bool:
        """Returns True: a model always has drafts."""
        return True

    def on_verified(self, seq: EngineSequence, state: Any, drafts: int, accepted: int) -> None:
        """Does nothing: the verify step has computed the layers of the draft model."""
