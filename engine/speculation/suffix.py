"""What other requests said after the same words (SuffixDecoding, Oliaro et al. 2024, with bounded counts).

One table per pod, shared by its sequences: for suffixes of some lengths the token that followed most, by a majority
vote (Boyer and Moore 1981): a vote for it counts up, one for another token down, and at zero the other takes over. A
guess is the vote of the longest suffix that is known, and is taken for said to guess the next one, while the votes are
clear. A sequence's own prompt and output are asked too (ngram.py): whoever knows the longer suffix drafts.

The table has two generations. Votes go to the young one; when that is full, the old one is dropped and the young one
takes its place, so memory is bounded and what nobody has said for long is forgotten. What tenants with different cache
salts say does not mix: from how fast an answer comes nobody learns what others asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.schedule.sequence import Sequence as EngineSequence
from engine.speculation.ngram import NgramIndex
from engine.speculation.proposer import DraftBatch

LENGTHS = (12, 6, 3)  # of suffixes, the best guess first
MAX_SUFFIXES = 1 << 18  # of a generation; about 170 bytes each
MAX_VOTES = 15
MIN_VOTES = 2  # votes of a shortest suffix before it is believed; longer ones need one


class SuffixTable:
    """Votes by suffix: candidate token * (MOST_VOTES + 1) + votes."""

    def __init__(self, most: int = MAX_SUFFIXES) -> None:
        self._most = most
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def learn(self, salt: str, tokens: Sequence[int], first: int) -> None:
        """tokens[first:] were said, each after all tokens before it."""
        for place in range(first, len(tokens)):
            for length in LENGTHS:
                if length <= place:
                    self._vote(_key(salt, tokens[place - length : place]), tokens[place])
        if len(self._young) > self._most:
            self._old, self._young = self._young, {}

    def predict(self, salt: str, tail: Sequence[int], most: int) -> tuple[int, list[int]]:
        """Length of the suffix that the first guess is from, 0 for none, and up to `most` guesses."""
        said, known = list(tail[-LENGTHS[0] :]), 0
        start = len(said)
        while len(said) - start < most:
            length, token = self._next(salt, said)
            if not length:
                break
            known = known or length
            said.append(token)
        return known, said[start:]

    def _next(self, salt: str, said: list[int]) -> tuple[int, int]:
        for length in LENGTHS:
            if length <= len(said):
                key = _key(salt, said[-length:])
                voted = self._young.get(key) or self._old.get(key)
                if voted is not None:
                    token, votes = divmod(voted, MAX_VOTES + 1)
                    if votes >= (MIN_VOTES if length == LENGTHS[-1] else 1):
                        return length, token
        return 0, -1

    def _vote(self, key: int, token: int) -> None:
        voted = self._young.get(key)
        if voted is None:
            voted = self._old.get(key, token * (MAX_VOTES + 1))
        candidate, votes = divmod(voted, MAX_VOTES + 1)
        if candidate == token:
            votes = min(votes + 1, MAX_VOTES)
        elif votes > 1:
            votes -= 1
        else:
            candidate, votes = token, 1
        self._young[key] = candidate * (MAX_VOTES + 1) + votes


def _key(salt: str, suffix: Sequence[int]) -> int:
    """Within this process only; that two suffixes share a key costs a wrong guess."""
    return hash((salt, *suffix))


@dataclass(slots=True)
class _SuffixState:
    """A sequence's own history; learnt: its tokens that the table knows."""

    history: NgramIndex
    learnt: int


class SuffixProposer:
    """See the top of this file."""

    name = "suffix"

    def __init__(self, most: int = MAX_SUFFIXES) -> None:
        self.table = SuffixTable(most)

    def new_state(self, seq: EngineSequence) -> _SuffixState:
        own = _SuffixState(NgramIndex(seq.tokens), seq.prompt_len)
        self._learn(seq, own)
        return own

    def propose(self, seqs: Sequence[EngineSequence], kept: Sequence[Any], limits: Sequence[int]) -> DraftBatch:
        drafts = DraftBatch.empty(len(seqs), max(limits))
        for row, (seq, own, most) in enumerate(zip(seqs, kept, limits, strict=True)):
            self._note(seq, own)
            known, found = own.history.match(most)
            shared, guesses = self.table.predict(seq.request.cache_salt, seq.tokens[-LENGTHS[0] :], most)
            if shared > known:
                drafts.tokens[row, : len(guesses)] = guesses
                drafts.lengths[row] = len(guesses)
            else:
                drafts.tokens[row, : len(found)] = found
                drafts.lengths[row] = len(found)
        return drafts

    def expects_drafts(self, seq: EngineSequence, kept: Any) -> bool:
        self._note(seq, kept)
        shared, _ = self.table.predict(seq.request.cache_salt, seq.tokens[-LENGTHS[0] :], 1)
        return bool(shared or kept.history.match(1)[0])

    def on_verified(self, seq: EngineSequence, kept: Any, drafts: int, accepted: int) -> None:
        self._learn(seq, kept)

    def _note(self, seq: EngineSequence, own: _SuffixState) -> None:
        self._learn(seq, own)
        own.history.extend(seq.tokens[own.history.count :])

    def _learn(self, seq: EngineSequence, own: _SuffixState) -> None:
        """The output that is new, in the context of the prompt's end."""
        count = len(seq.tokens)
        if own.learnt < count:
            first = max(0, own.learnt - LENGTHS[0])
            self.table.learn(seq.request.cache_salt, seq.tokens[first:], own.learnt - first)
            own.learnt = count
