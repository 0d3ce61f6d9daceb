"""Prompt look-up (Saxena 2023): the newest tokens occurred before, so what followed them then is proposed.

Each sequence has an index of its own over prompt and output: for every n the place where each n-gram ended last. The
prompt's is built with numpy and searched by bisection; n-grams that output completes go to a dictionary, which is asked
first, for the latest place is the best guess. So a token costs a few dictionary entries, however long the context. They
are made of all tokens since the last look at once, for all n in one product: the device may be waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.schedule.sequence import Sequence as EngineSequence
from engine.speculation.proposer import DraftBatch

LENGTHS = (5, 3, 2)  # of n-grams, the best guess first
MAX_LENGTH = LENGTHS[0]
FACTOR = 0x9E3779B97F4A7C15  # odd: of a polynomial hash modulo 2**64
# The codes of the n-grams at the end of LONGEST tokens are these times that, a column for each n.
POWERS = np.array(
    [[pow(FACTOR, MAX_LENGTH - 1 - i, 1 << 64) * (i >= MAX_LENGTH - n) for n in LENGTHS] for i in range(MAX_LENGTH)],
    dtype=np.uint64,
)


@dataclass(slots=True)
class _NgramTable:
    """n-grams of one length. hashes: the prompt's, ascending; ends: the positions after them. later: the output's."""

    length: int
    hashes: np.ndarray
    ends: np.ndarray
    later: dict[int, int]


class NgramIndex:
    """One sequence's tokens and the places of their n-grams."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.count = len(tokens)
        # LONGEST places of no token come first, so that every place has as many before it.
        self._padded = np.full(max(256, 2 * self.count) + MAX_LENGTH, -1, dtype=np.int64)
        self._padded[MAX_LENGTH : MAX_LENGTH + self.count] = tokens
        codes = self._codes(0)
        self._newest: list[int] = codes[-1].tolist()
        self._grams = [_index(n, codes[n:-1, column]) for column, n in enumerate(LENGTHS)]

    @property
    def tokens(self) -> np.ndarray:
        """int64 [count]"""
        return self._padded[MAX_LENGTH : MAX_LENGTH + self.count]

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens that follow."""
        if not tokens:
            return
        first, self.count = self.count, self.count + len(tokens)
        if self.count + MAX_LENGTH > len(self._padded):
            self._padded = np.concatenate([self._padded, np.empty(self.count, dtype=np.int64)])
        self._padded[MAX_LENGTH + first : MAX_LENGTH + self.count] = tokens
        *followed, self._newest = self._codes(first).tolist()
        for grams, codes in zip(self._grams, zip(*followed, strict=True), strict=True):
            begin = max(first, grams.length)
            grams.later.update(zip(codes[begin - first :], range(begin, self.count), strict=True))

    def match(self, most: int) -> tuple[int, np.ndarray]:
        """How many of the newest tokens occurred before, as far as is known, and what followed them then, up to `most`.

        0 and nothing when they are new. Where what followed reaches the end it goes on with itself: it is a loop.
        """
        tokens = self.tokens
        for grams, code in zip(self._grams, self._newest, strict=True):
            at = self._find(grams, code) if self.count >= grams.length else None
            if at is not None:
                return grams.length, tokens[at + np.arange(most) % (self.count - at)]
        return 0, tokens[:0]

    def _find(self, grams: _NgramTable, code: int) -> int | None:
        at, n, tokens = grams.later.get(code), grams.length, self.tokens
        if at is None:
            place = int(np.searchsorted(grams.hashes, np.uint64(code), side="right")) - 1
            if place < 0 or int(grams.hashes[place]) != code:
                return None
            at = int(grams.ends[place])
        return at if np.array_equal(tokens[at - n : at], tokens[self.count - n :]) else None

    def _codes(self, first: int) -> np.ndarray:
        """uint64 [count - first + 1, lengths]: the n-grams right before each place from `first` on, the end included.

        Of a place with fewer than n tokens before it the code means nothing.
        """
        places = np.arange(first, self.count + 1)[:, None] + np.arange(MAX_LENGTH)
        codes: np.ndarray = (self._padded[places] + 1).astype(np.uint64) @ POWERS
        return codes


def _index(length: int, codes: np.ndarray) -> _NgramTable:
    """codes: of n-grams that some token follows, from place `length` on."""
    order = np.argsort(codes, kind="stable")
    return _NgramTable(length, codes[order], order + length, {})


class NgramProposer:
    """See the top of this file."""

    name = "ngram"

    def new_state(self, seq: EngineSequence) -> NgramIndex:
        return NgramIndex(seq.tokens)

    def propose(self, seqs: Sequence[EngineSequence], kept: Sequence[Any], limits: Sequence[int]) -> DraftBatch:
        drafts = DraftBatch.empty(len(seqs), max(limits))
        for row, (seq, history, most) in enumerate(zip(seqs, kept, limits, strict=True)):
            history.extend(seq.tokens[history.count :])
            _, found = history.match(most)
            drafts.tokens[row, : len(found)] = found
            drafts.lengths[row] = len(found)
        return drafts

    def expects_drafts(self, seq: EngineSequence, kept: Any) -> bool:
        kept.extend(seq.tokens[kept.count :])
        return bool(kept.match(1)[0])

    def on_verified(self, seq: EngineSequence, kept: Any, drafts: int, accepted: int) -> None:
        """The history reads the sequence's tokens."""
