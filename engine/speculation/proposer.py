"""The seam between decoding and whatever guesses tokens.

A proposer sees sequences whose tokens are all known to the host. It may keep something of each, which `begin` makes and
which lives as long as the sequence does, through preemptions too: nobody tells a proposer that a sequence is over.
Proposals are chains: draft i + 1 is a guess for the case that draft i is right. Wrong ones cost time, never an answer.
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
    """tokens: int64 [B, K], of which each row's first lengths[row] count; lengths: int64 [B].

    probs: float32 [B, K, vocab] on the device, what each draft was drawn from; None where nothing was drawn. Drafts
    that were drawn with the noise of their positions, as coupled acceptance wants them, need none.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    probs: Tensor | None = None

    @classmethod
    def empty(cls, rows: int, most: int) -> DraftBatch:
        return cls(np.zeros((rows, most), dtype=np.int64), np.zeros(rows, dtype=np.int64))


class Proposer(Protocol):
    """name: in metrics."""

    name: str

    def new_state(self, seq: EngineSequence) -> Any:
        """What the proposer keeps of a sequence; called once, before its first proposal."""

    def propose(self, seqs: Sequence[EngineSequence], kept: Sequence[Any], limits: Sequence[int]) -> DraftBatch:
        """Up to limits[i] >= 1 drafts for each sequence, none where there is no good guess.

        kept: what `begin` made of each. All token ids are in the vocabulary, as those of the sequences are.
        """

    def expects_drafts(self, seq: EngineSequence, kept: Any) -> bool:
        """Now and then, while the device computes the next token: there is time for what `propose` wants of those
        before it. Whether they lead to expect that there will be drafts once it is known.
        """

    def on_verified(self, seq: EngineSequence, kept: Any, drafts: int, accepted: int) -> None:
        """A step has verified so many drafts, and appended the accepted ones and the token after them."""
