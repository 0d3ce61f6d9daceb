"""Limits of the digits of a number in generated JSON, so that no number goes on for ever.

A JSON schema cannot say how many digits a number has, and llguidance has no option for it. So these limits take tokens
out of a grammar's mask. Every double is still possible in its shortest form, and every integer of
128 bits. The answer still matches the schema: a limit applies only where the grammar allows something else than digits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from common.grammar.matcher import MatcherTokenizer

#: Digits before the point. JavaScript writes up to 21, integers of 128 bits have 39.
MAX_WHOLE = 40
#: Digits behind the point. The shortest form of a double has 17, JavaScript writes up to 5 zeros before them.
MAX_FRACTION = 24
MAX_EXPONENT = 3  #: Doubles end at e+308 and e-324.

NOWHERE, WHOLE, FRACTION, EXPONENT = range(4)
_LIMITS = {WHOLE: MAX_WHOLE, FRACTION: MAX_FRACTION, EXPONENT: MAX_EXPONENT}
_DIGITS = frozenset(b"0123456789")
_IN_NUMBERS = frozenset(b"0123456789.eE+-")
#: First bytes of tokens that cannot follow a digit of a JSON number. If one is allowed, the digits are part of a text.
_TEXT = frozenset(b'"abcdfghijklmnopqrstuvwxyzABCDFGHIJKLMNOPQRSTUVWXYZ')


class NumberTail(NamedTuple):
    """The number at the end of an output."""

    part: int  # NOWHERE (there is none), WHOLE, FRACTION or EXPONENT
    digits: int  # digits of that part so far


NO_NUMBER = NumberTail(NOWHERE, 0)


class DigitLimits:
    """The limits for one tokenizer. Immutable after its construction, any thread."""

    def __init__(self, tokenizer: MatcherTokenizer, num_words: int) -> None:
        """`num_words` is the size of a mask, in words of 32 tokens."""
        self._texts, lengths = tokenizer.texts, np.array(tokenizer.lengths, dtype=np.int64)
        self._ends = np.cumsum(lengths)
        starts, codes = self._ends - lengths, np.frombuffer(self._texts, dtype=np.uint8)
        run = np.zeros(len(lengths), dtype=np.int64)  # digits that each token begins with
        alive = np.flatnonzero(lengths)
        self._text_tokens = _packed(alive[np.isin(codes[starts[alive]], [*_TEXT])], num_words)
        while len(alive):
            alive = alive[np.isin(codes[starts[alive] + run[alive]], [*_DIGITS])]
            run[alive] += 1
            alive = alive[run[alive] < lengths[alive]]
        self._longest = int(run.max(initial=0))
        #: Masks of the tokens that begin with more than 0, 1, 2, ... digits.
        self._beyond = [_packed(np.flatnonzero(run > room), num_words) for room in range(self._longest)]

    def after(self, tail: NumberTail, token: int) -> NumberTail:
        """Returns the number at the end of an output after this token."""
        end = int(self._ends[token]) if token < len(self._ends) else 0
        text = self._texts[int(self._ends[token - 1]) if token else 0 : end]
        if text and text[-1] not in _IN_NUMBERS:
            return NO_NUMBER
        part, digits = tail
        for code in text:
            if code in _DIGITS:
                part, digits = (part, digits + 1) if part != NOWHERE else (WHOLE, 1)
            elif code == ord(".") and part == WHOLE:
                part, digits = FRACTION, 0
            elif code in b"eE" and part in (WHOLE, FRACTION):
                part, digits = EXPONENT, 0
            elif not (code in b"+-" and part == EXPONENT and digits == 0):
                part, digits = NO_NUMBER
        return NumberTail(part, digits)

    def limited(self, mask: np.ndarray, tail: NumberTail, *, may_end: bool) -> np.ndarray:
        """Returns a mask without the tokens that exceed a limit. `may_end`: the output may end here."""
        if tail.part == NOWHERE:
            return mask
        room = max(0, _LIMITS[tail.part] - tail.digits)
        if room >= self._longest or (mask & self._text_tokens).any():
            return mask
        rest: np.ndarray = mask & ~self._beyond[room]
        return rest if may_end or rest.any() else mask


def _packed(tokens: np.ndarray, num_words: int) -> np.ndarray:
    bits = np.zeros(num_words * 32, dtype=bool)
    bits[tokens[tokens < len(bits)]] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


@lru_cache(maxsize=8)
def digit_limits(tokenizer: MatcherTokenizer, num_words: int) -> DigitLimits:
    """Returns the limits for a tokenizer. Cached."""
    return DigitLimits(tokenizer, num_words)
