"""Prompt look-up (Saxena 2023): if the newest tokens occurred before, the tokens that followed them are proposed.

Each sequence has an index over its prompt and output: for each n, the position where each n-gram ended last.

    prompt    n-grams as sorted arrays, built with numpy, searched by bisection
    output    n-grams in a dictionary, looked up first: the latest occurrence is the best guess

A new token costs a few dictionary entries at any length of the context. The hashes of all tokens since the last look
are computed in one matrix product for all n, because the device may be waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.schedule.sequence import Sequence as EngineSequence
from engine.speculation.proposer import DraftBatch

LENGTHS = (5, 3, 2)  # The values of n, in the order they are tried: a longer match is a better guess.
MAX_LENGTH = LENGTHS[0]
FACTOR = 0x9E3779B97F4A7C15  # Factor of a polynomial hash modulo 2**64; odd.
#: uint64 [MAX_LENGTH, n-gram lengths]. The product of MAX_LENGTH tokens and this matrix is the hash of the n-gram at
#: their end, for each length.
POWERS = np.array(
    [[pow(FACTOR, MAX_LENGTH - 1 - i, 1 << 64) * (i >= MAX_LENGTH - n) for n in LENGTHS] for i in range(MAX_LENGTH)],
    dtype=np.uint64,
)


@dataclass(slots=True)
class _NgramTable:
    """The n-grams of one length in one sequence."""

    length: int
    hashes: np.ndarray  # uint64, ascending: hashes of the n-grams of the prompt.
    ends: np.ndarray  # Position after each n-gram of the prompt. Equal hashes are in the order of their positions.
    output_ends: dict[int, int]  # Position after the last occurrence of each n-gram that output completed, by its hash.


class NgramIndex:
    """The tokens of one sequence and the positions of their n-grams."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.count = len(tokens)
        # MAX_LENGTH entries without a token come first, so that every position has that many entries before it.
        self._padded = np.full(max(256, 2 * self.count) + MAX_LENGTH, -1, dtype=np.int64)
        self._padded[MAX_LENGTH : MAX_LENGTH + self.count] = tokens
        codes = self._codes(0)
        self._newest: list[int] = codes[-1].tolist()
        self._tables = [_index(n, codes[n:-1, column]) for column, n in enumerate(LENGTHS)]

    @property
    def tokens(self) -> np.ndarray:
        """The tokens of the sequence, int64 [count]."""
        return self._padded[MAX_LENGTH : MAX_LENGTH + self.count]

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens."""
        if not tokens:
            return
        first, self.count = self.count, self.count + len(tokens)
        if self.count + MAX_LENGTH > len(self._padded):
            self._padded = np.concatenate([self._padded, np.empty(self.count, dtype=np.int64)])
        self._padded[MAX_LENGTH + first : MAX_LENGTH + self.count] = tokens
        *followed, self._newest = self._codes(first).tolist()
        for table, codes in zip(self._tables, zip(*followed, strict=True), strict=True):
            begin = max(first, table.length)
            table.output_ends.update(zip(codes[begin - first :], range(begin, self.count), strict=True))

    def match(self, limit: int) -> tuple[int, np.ndarray]:
        """Returns the longest n-gram at the end that occurred before, and up to `limit` tokens that followed it.

        The n-gram is returned as its length, which is 0 if none occurred before. If the tokens that followed reach the
        end of the sequence, they repeat: the text is in a loop.
        """
        tokens = self.tokens
        for table, code in zip(self._tables, self._newest, strict=True):
            end = self._find(table, code) if self.count >= table.length else None
            if end is not None:
                return table.length, tokens[end + np.arange(limit) % (self.count - end)]
        return 0, tokens[:0]

    def _find(self, table: _NgramTable, code: int) -> int | None:
        """Returns the position after the last earlier occurrence of the newest n-gram, which has this hash."""
        end, n, tokens = table.output_ends.get(code), table.length, self.tokens
        if end is None:
            row = int(np.searchsorted(table.hashes, np.uint64(code), side="right")) - 1
            if row < 0 or int(table.hashes[row]) != code:
                return None
            end = int(table.ends[row])
        return end if np.array_equal(tokens[end - n : end], tokens[self.count - n :]) else None

    def _codes(self, first: int) -> np.ndarray:
        """Returns the hashes of the n-grams that end before positions first ... count, uint64 [positions, lengths].

        A hash is meaningless at a position with fewer than n tokens before it.
        """
        positions = np.arange(first, self.count + 1)[:, None] + np.arange(MAX_LENGTH)
        codes: np.ndarray = (self._padded[positions] + 1).astype(np.uint64) @ POWERS
        return codes


def _index(length: int, codes: np.ndarray) -> _NgramTable:
    """Returns the table of the prompt's n-grams from their hashes, by the position after them, from `length` on."""
    order = np.argsort(codes, kind="stable")
    return _NgramTable(length, codes[order], order + length, {})


class NgramProposer:
    """A proposer of the tokens that followed the newest n-gram earlier in the same sequence."""

    name = "ngram"

    def new_state(self, seq: EngineSequence) -> NgramIndex:
        return NgramIndex(seq.tokens)

    def propose(self, seqs: Sequence[EngineSequence], states: Sequence[Any], limits: Sequence[int]) -> DraftBatch:
        return DraftBatch.of([_guess(*row) for row in zip(seqs, states, limits, strict=True)], max(limits))

    def expects_drafts(self, seq: EngineSequence, state: Any) -> bool:
        return len(_guess(seq, state, 1)) > 0

    def on_verified(self, seq: EngineSequence, state: Any, drafts: int, accepted: int) -> None:
        """Does nothing: the index reads the tokens of the sequence."""


def _guess(seq: EngineSequence, index: NgramIndex, limit: int) -> np.ndarray:
    """Returns up to `limit` drafts, after the index has read the new tokens of the sequence."""
    index.extend(seq.tokens[index.count :])
    return index.match(limit)[1]
