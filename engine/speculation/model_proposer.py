"""A proposer that draws its drafts from a draft model (Leviathan et al. 2023) or an EAGLE head (Li et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.schedule.sequence import Sequence as EngineSequence
from engine.speculation.draft_loop import DraftLoop
from engine.speculation.proposer import DraftBatch


class ModelProposer:
    """reserve(seq, end): room for `end` tokens in the sequence's lease as far as the pool can spare it; tokens for
    which there is room. What no verify step uses is given back by whoever reserved it.
    """

    def __init__(self, loop: DraftLoop, reserve: Callable[[EngineSequence, int], int]) -> None:
        self.name = loop.name
        self._loop, self._reserve = loop, reserve

    def new_state(self, seq: EngineSequence) -> None:
        """All it keeps is in the sequence's blocks."""

    def catch_up(self, seqs: Sequence[EngineSequence]) -> None:
        """Computes what the draft model has not of these sequences, all of whose tokens are known."""
        self._loop.catch_up(seqs)

    def propose(self, seqs: Sequence[EngineSequence], kept: Sequence[Any], limits: Sequence[int]) -> DraftBatch:
        drafts = DraftBatch.empty(len(seqs), max(limits))
        steps = [self._room(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]
        rows = [row for row, count in enumerate(steps) if count > 0]
        if not rows:
            return drafts
        drawn = self._loop.run([seqs[row] for row in rows], [steps[row] for row in rows])
        drafts.tokens[rows, : drawn.tokens.shape[1]] = drawn.tokens
        drafts.lengths[rows] = drawn.lengths
        probs = drawn.probs
        if probs is not None and len(rows) < len(seqs):
            probs = probs.new_zeros(len(seqs), *probs.shape[1:]).index_copy_(0, probs.new_tensor(rows).long(), probs)
        return DraftBatch(drafts.tokens, drafts.lengths, probs)

    def _room(self, seq: EngineSequence, limit: int) -> int:
        """Drafts of the sequence; their tokens and the newest one have room in its lease, which nobody else reads."""
        assert seq.lease is not None
        most = min(limit, seq.max_len - seq.length - 1)
        if most <= 0 or seq.lease.cow_index == seq.start // seq.block_size:
            return 0
        return max(0, min(most, self._reserve(seq, seq.start + 1 + most) - seq.start - 1))

    def expects_drafts(self, seq: EngineSequence, kept: Any) -> bool:
        """Its model follows in the steps themselves, or by `keep_up`, and always has drafts."""
        return True

    def on_verified(self, seq: EngineSequence, kept: Any, drafts: int, accepted: int) -> None:
        """The step that verified the drafts has computed their layers."""
