"""Drafts from the output of other requests (SuffixDecoding, Oliaro et al. 2024, with bounded counts).

One table per pod is shared by its sequences. For suffixes of some lengths it keeps the most frequent next token by
majority vote (Boyer and Moore 1981): a vote for the candidate counts up, a vote for another token counts down, and at
zero the other token replaces it. Drafts come from the longest known suffix, one token after the other while the votes
are clear. The sequence's own n-grams (ngram.py) are used instead where they match a longer suffix.

The table has two generations. Votes go to the young one. When it is full, the old one is dropped and the young one
takes its place, so memory is bounded and unused suffixes are forgotten. Requests with different cache salts have
separate entries: the speed of an answer reveals nothing about other tenants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.schedule.sequence import Sequence as EngineSequence
from engine.speculation.ngram import NgramIndex
from engine.speculation.proposer import DraftBatch

LENGTHS = (12, 6, 3)  # Lengths of suffixes in tokens, in the order they are tried.
MAX_SUFFIXES = 1 << 18  # Max suffixes of a generation, about 170 bytes each.
MAX_VOTES = 15  # Max votes of a candidate.
MIN_VOTES = 2  # Votes that a suffix of the shortest length needs before it is used. A longer suffix needs one vote.


class SuffixTable:
    """The most frequent next token of each suffix."""

    def __init__(self, max_suffixes: int = MAX_SUFFIXES) -> None:
        self._max_suffixes = max_suffixes
        # Maps the key of a suffix to candidate token * (MAX_VOTES + 1) + votes.
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def learn(self, salt: str, tokens: Sequence[int], first: int) -> None:
        """Counts each token of tokens[first:] as the next token of the suffixes that end before it."""
        for end in range(first, len(tokens)):
            for length in LENGTHS:
                if length <= end:
                    self._vote(_key(salt, tokens[end - length : end]), tokens[end])
        if len(self._young) > self._max_suffixes:
            self._old, self._young = self._young, {}

    def predict(self, salt: str, tail: Sequence[int], limit: int) -> tuple[int, list[int]]:
        """Returns up to `limit` drafts, after the length of the suffix that gave the first one; 0 if none is known."""
        context, first_length = list(tail[-LENGTHS[0] :]), 0
        start = len(context)
        while len(context) - start < limit:
            length, token = self._next(salt, context)
            if not length:
                break
            first_length = first_length or length
            context.append(token)
        return first_length, context[start:]

    def _next(self, salt: str, context: list[int]) -> tuple[int, int]:
        """Returns the length of the longest known suffix and its candidate; 0 and -1 if no suffix is known."""
        for length in LENGTHS:
            if length <= len(context):
                key = _key(salt, context[-length:])
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
    """Returns the key of a suffix, valid in this process only. A collision costs a wrong draft."""
    return hash((salt, *suffix))


@dataclass(slots=True)
class _SuffixState:
    """The state of one sequence."""

    index: NgramIndex  # The n-grams of the sequence's own tokens.
    num_learnt: int  # Number of the sequence's tokens that the table has counted.


class SuffixProposer:
    """A proposer that uses the shared table, or the sequence itself if that matches a longer suffix."""

    name = "suffix"

    def __init__(self, max_suffixes: int = MAX_SUFFIXES) -> None:
        self.table = SuffixTable(max_suffixes)

    def new_state(self, seq: EngineSequence) -> _SuffixState:
        state = _SuffixState(NgramIndex(seq.tokens), seq.prompt_len)
        self._learn(seq, state)
        return state

    def propose(self, seqs: Sequence[EngineSequence], states: Sequence[Any], limits: Sequence[int]) -> DraftBatch:
        return DraftBatch.of([self._guess(*row) for row in zip(seqs, states, limits, strict=True)], max(limits))

    def expects_drafts(self, seq: EngineSequence, state: Any) -> bool:
        return len(self._guess(seq, state, 1)) > 0

    def on_verified(self, seq: EngineSequence, state: Any, drafts: int, accepted: int) -> None:
        self._learn(seq, state)

    def _guess(self, seq: EngineSequence, state: _SuffixState, limit: int) -> Sequence[int] | np.ndarray:
        """Returns up to `limit` drafts, after table and index have read the new tokens of the sequence."""
        self._learn(seq, state)
        state.index.extend(seq.tokens[state.index.count :])
        own_length, own_guess = state.index.match(limit)
        shared_length, shared_guess = self.table.predict(seq.request.cache_salt, seq.tokens[-LENGTHS[0] :], limit)
        return shared_guess if shared_length > own_length else own_guess

    def _learn(self, seq: EngineSequence, state: _SuffixState) -> None:
        """Adds the new output to the table. Its first tokens follow the end of the prompt."""
        count = len(seq.tokens)
        if state.num_learnt < count:
            first = max(0, state.num_learnt - LENGTHS[0])
            self.table.learn(seq.request.cache_salt, seq.tokens[first:], state.num_learnt - first)
            state.num_learnt = count
