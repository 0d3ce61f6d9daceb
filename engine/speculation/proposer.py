"""The interface between decoding and everything that proposes drafts.

A proposer sees sequences with all tokens known to the host. It may keep a state of its own for each sequence:
`new_state` makes it, a preemption keeps it, and it is dropped with the sequence. Draft i + 1 is a guess for the case
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
    """Drafts of B sequences, up to K of each."""

    #: int64 [B, K]; the first lengths[row] tokens of a row are its drafts.
    tokens: np.ndarray
    #: int64 [B]
    lengths: np.ndarray
    #: float32 [B, K, vocab] on the device, the distribution that each draft was drawn from. None for drafts that were
    #: not drawn, and for coupled acceptance, which needs no distribution.
    probs: Tensor | None = None

    @classmethod
    def empty(cls, rows: int, max_drafts: int) -> DraftBatch:
        """No drafts of `rows` sequences."""
        return cls(np.zeros((rows, max_drafts), dtype=np.int64), np.zeros(rows, dtype=np.int64))


class Proposer(Protocol):
    """Proposes drafts."""

    #: Label of the metrics.
    name: str

    def new_state(self, seq: EngineSequence) -> Any:
        """State of one sequence. Called once, before the first proposal for it."""

    def propose(self, seqs: Sequence[EngineSequence], states: Sequence[Any], limits: Sequence[int]) -> DraftBatch:
        """Up to limits[i] >= 1 drafts for each sequence, none where there is no good guess.

        Every draft is a token id of the vocabulary.

        Args:
            states: what `new_state` returned for each sequence.
        """

    def expects_drafts(self, seq: EngineSequence, state: Any) -> bool:
        """Whether drafts are likely once the next token is known.

        Called now and then while the device computes that token, so there is time to read the tokens before it.
        """

    def on_verified(self, seq: EngineSequence, state: Any, drafts: int, accepted: int) -> None:
        """A step verified `drafts` drafts of the sequence, and appended the accepted ones and one more token."""
