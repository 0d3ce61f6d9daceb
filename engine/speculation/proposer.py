"""The interface between decoding and the proposers of drafts.

A proposer sees sequences with all tokens known to the host. It may keep a state of its own for each sequence:
`new_state` makes the state, a preemption keeps it, and it ends with the sequence. Draft i + 1 is a guess for the case
that draft i is right. A wrong draft costs time and never changes the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from engine.schedule.sequence import Sequence as EngineSequence

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """The drafts of B sequences, up to K of each."""

    tokens: np.ndarray  # int64 [B, K]; the first lengths[row] tokens of a row are its drafts.
    lengths: np.ndarray  # int64 [B], the number of drafts of each sequence.
    #: float32 [B, K, vocab] on the device, the distribution that each draft was drawn from. None for drafts that were
    #: not drawn, and for coupled acceptance, which needs no distribution.
    probs: Tensor | None = None

    @classmethod
    def empty(cls, rows: int, max_drafts: int) -> DraftBatch:
        """Returns a batch of `rows` sequences that have no drafts yet."""
        return cls(np.zeros((rows, max_drafts), dtype=np.int64), np.zeros(rows, dtype=np.int64))

    @classmethod
    def of(cls, guesses: Sequence[Sequence[int] | np.ndarray], max_drafts: int) -> DraftBatch:
        """Returns a batch with these drafts of each sequence."""
        drafts = cls.empty(len(guesses), max_drafts)
        for row, guess in enumerate(guesses):
            drafts.tokens[row, : len(guess)] = guess
            drafts.lengths[row] = len(guess)
        return drafts


class Proposer(Protocol):
    """A source of drafts."""

    name: str  # Name of the proposer in metric labels.

    def new_state(self, seq: EngineSequence) -> Any:
        """Returns the state of one sequence. Called once, before the first proposal for the sequence."""

    def propose(self, seqs: Sequence[EngineSequence], states: Sequence[Any], limits: Sequence[int]) -> DraftBatch:
        """Returns up to limits[i] >= 1 drafts for each sequence; none if there is no good guess.

        Every draft is a token id of the vocabulary. `states` are the results of `new_state`.
        """

    def expects_drafts(self, seq: EngineSequence, state: Any) -> bool:
        """Returns whether drafts are likely once the next token is known, which the device computes during the call."""

    def on_verified(self, seq: EngineSequence, state: Any, drafts: int, accepted: int) -> None:
        """Records that a step verified `drafts` drafts, and appended the accepted drafts and one more token."""
