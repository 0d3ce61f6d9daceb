"""A proposer that knows the answers, and is wrong at places that are the same every time; drafts whatever they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.schedule.sequence import Sequence as EngineSequence
from engine.speculation.proposer import DraftBatch


class Guesses:
    """answers: output of each request; about one draft in `wrong` is wrong, whoever asks and when."""

    name = "guesses"

    def __init__(self, answers: Mapping[str, Sequence[int]], *, vocab: int, wrong: int = 4) -> None:
        self.answers = answers
        self._vocab, self._wrong = vocab, wrong

    def new_state(self, seq: EngineSequence) -> None:
        """It knows all."""

    def propose(self, seqs: Sequence[EngineSequence], kept: Sequence[Any], limits: Sequence[int]) -> DraftBatch:
        drafts = DraftBatch.empty(len(seqs), max(limits))
        for row, (seq, most) in enumerate(zip(seqs, limits, strict=True)):
            first = seq.num_output
            for i, token in enumerate(self.answers[seq.request_id][first : first + most]):
                bad = (3 * seq.prompt_len + 5 * (first + i)) % 11 % self._wrong == 0
                drafts.tokens[row, i] = (token + bad) % self._vocab
                drafts.lengths[row] = i + 1
        return drafts

    def expects_drafts(self, seq: EngineSequence, kept: Any) -> bool:
        """Nothing is new to it."""
        return True

    def on_verified(self, seq: EngineSequence, kept: Any, drafts: int, accepted: int) -> None:
        """Nothing to learn."""
