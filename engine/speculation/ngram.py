"""Prompt look-up (Saxena 2023): the newest tokens occurred before, so what followed them then is proposed.

Each sequence has an index of its own over prompt and output: for every n the place where each n-gram ended last. The
prompt's is built with numpy and searched by bisection; n-grams that output completes go to a dictionary, which is asked
first, for the latest place is the best guess. So a token costs a few dictionary entries, however long the context. They
are made of all tokens since the last look at once: the device may be waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.sequence import Sequence as EngineSequence
from engine.speculation.proposer import Drafts

LENGTHS = (5, 3, 2)  # of n-grams, the best guess first
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd: of a polynomial hash modulo 2**64
_WORD = (1 << 64) - 1


@dataclass(slots=True)
class _Grams:
    """n-grams of one length. hashes: the prompt's, ascending; ends: the positions after them. later: the output's."""

    length: int
    hashes: np.ndarray
    ends: np.ndarray
    later: dict[int, int]


class History:
    """One sequence's tokens and the places of their n-grams."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.count = len(tokens)
        self.tokens = np.empty(max(256, 2 * self.count), dtype=np.int64)
        self.tokens[: self.count] = tokens
        self._grams = [self._index(n) for n in LENGTHS]

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens that follow."""
        if not tokens:
            return
        first, self.count = self.count, self.count + len(tokens)
        if self.count > len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.empty(self.count, dtype=np.int64)])
        self.tokens[first : self.count] = tokens
        for grams in self._grams:
            begin = max(first, grams.length)
            grams.later.update(zip(self._codes(grams.length, begin).tolist(), range(begin, self.count), strict=True))

    def match(self, most: int) -> tuple[int, np.ndarray]:
        """How many of the newest tokens occurred before, as far as is known, and what followed them then, up to `most`.

        0 and nothing when they are new. Where what followed reaches the end it goes on with itself: it is a loop.
        """
        for grams in self._grams:
            if self.count >= grams.length:
                at = self._find(grams)
                if at is not None:
                    return grams.length, self.tokens[at + np.arange(most) % (self.count - at)]
        return 0, self.tokens[:0]

    def _find(self, grams: _Grams) -> int | None:
        code, n = self._hash(grams.length), grams.length
        at = grams.later.get(code)
        if at is None:
            place = int(np.searchsorted(grams.hashes, np.uint64(code), side="right")) - 1
            if place < 0 or int(grams.hashes[place]) != code:
                return None
            at = int(grams.ends[place])
        same = np.array_equal(self.tokens[at - n : at], self.tokens[self.count - n : self.count])
        return at if same else None

    def _hash(self, length: int) -> int:
        code = 0
        for token in self.tokens[self.count - length : self.count].tolist():
            code = (code * int(FACTOR) + token + 1) & _WORD
        return code

    def _codes(self, length: int, begin: int) -> np.ndarray:
        """uint64, `_hash` of the n-grams that end right before each token from place `begin` >= length on."""
        places = max(0, self.count - begin)
        tokens = self.tokens[begin - length : self.count].astype(np.uint64) + np.uint64(1)
        codes = np.zeros(places, dtype=np.uint64)
        for offset in range(length):
            codes = codes * FACTOR + tokens[offset : offset + places]
        return codes

    def _index(self, length: int) -> _Grams:
        """n-grams that some token follows."""
        codes = self._codes(length, length)
        order = np.argsort(codes, kind="stable")
        return _Grams(length, codes[order], order + length, {})


class NgramProposer:
    """See the top of this file."""

    name = "ngram"

    def begin(self, seq: EngineSequence) -> History:
        return History(seq.tokens)

    def propose(self, seqs: Sequence[EngineSequence], kept: Sequence[Any], limits: Sequence[int]) -> Drafts:
        drafts = Drafts.empty(len(seqs), max(limits))
        for row, (seq, history, most) in enumerate(zip(seqs, kept, limits, strict=True)):
            self.observe(seq, history)
            _, found = history.match(most)
            drafts.tokens[row, : len(found)] = found
            drafts.lengths[row] = len(found)
        return drafts

    def observe(self, seq: EngineSequence, kept: Any) -> None:
        kept.extend(seq.tokens[kept.count :])

    def accept(self, seq: EngineSequence, kept: Any, drafts: int, accepted: int) -> None:
        """The history reads the sequence's tokens."""
