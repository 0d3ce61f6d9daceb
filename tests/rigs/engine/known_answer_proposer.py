"""A proposer that knows the answers and is wrong at fixed positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.schedule.sequence import Sequence as EngineSequence
from engine.speculation.proposer import DraftBatch


class Guesses:
    """Proposes the tokens of `answers` (by request id); about one draft in `wrong` is wrong, always the same ones."""

    name = "guesses"

    def __init__(self, answers: Mapping[str, Sequence[int]], *, vocab: int, wrong: int = 4) -> None:
        self.answers = answers
        self._vocab, self._wrong = vocab, wrong

    def new_state(self, seq: EngineSequence) -> None:
        """Keeps no state."""

    def propose(self, seqs: Sequence[EngineSequence], states: Sequence[Any], limits: Sequence[int]) -> DraftBatch:
        drafts = DraftBatch.empty(len(seqs), max(limits))
        for row, (seq, limit) in enumerate(zip(seqs, limits, strict=True)):
            first = seq.num_output
            for i, token in enumerate(self.answers[seq.request_id][first : first + limit]):
                is_wrong = (3 * seq.prompt_len + 5 * (first + i)) % 11 % self._wrong == 0
                drafts.tokens[row, i] = (token + is_wrong) % self._vocab
                drafts.lengths[row] = i + 1
        return drafts

    def expects_drafts(self, seq: EngineSequence, state: Any) -> bool:
        """Always True."""
        return True

    def on_verified(self, seq: EngineSequence, state: Any, drafts: int, accepted: int) -> None:
        """Does nothing."""
