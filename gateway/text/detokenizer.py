"""Token ids to text, one token at a time, never a broken character.

Invariant: the pieces joined, flush included, equal the tokenizer's decode of all ids at once; a piece never ends inside
a character.

`tokenizers.decoders.DecodeStream` was tried first: on random ids of a byte-level vocabulary it never differed from the
full decode but kept the tail back in 45% of the sequences for want of a flush, and it decodes a window per token. So
byte-level vocabularies, whose decode is "join the bytes, read them as UTF-8", are read by the standard library's
incremental UTF-8 decoder, and others by the two offsets that text-generation-inference introduced (prefix and read).
"""

from __future__ import annotations

import codecs
from typing import Protocol

from gateway.text.tokenizer import TextTokenizer

_REPLACEMENT = "\ufffd"
_MAX_PENDING = 8  # tokens; no character takes more, so a longer wait is for bytes that will never be valid


class Detokenizer(Protocol):
    """Of one sequence."""

    def feed(self, token_id: int) -> str:
        """Text that this token completes; "" while a character is incomplete."""

    def flush(self) -> str:
        """What was kept back, with U+FFFD for what cannot be completed; afterwards nothing is pending."""


def make_detokenizer(tokenizer: TextTokenizer, keep: frozenset[int] = frozenset()) -> Detokenizer:
    """The detokenizer that fits the vocabulary. Special tokens have no text, but those in `keep` have their name."""
    return ByteLevelDetokenizer(tokenizer, keep) if tokenizer.byte_level else WindowDetokenizer(tokenizer, keep)


class ByteLevelDetokenizer:
    """For vocabularies whose tokens are byte strings."""

    def __init__(self, tokenizer: TextTokenizer, keep: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._texts = tokenizer.token_texts
        self._keep = keep
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._clean = True  # no character is incomplete

    def feed(self, token_id: int) -> str:
        if self._clean and token_id not in self._keep and (text := self._texts[token_id]) is not None:
            return text
        if token_id in self._tokenizer.special_ids and token_id not in self._keep:
            return ""
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        self._clean = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        self._clean = True
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any vocabulary: decodes a short window twice, with and without the new tokens, and sends the difference."""

    def __init__(self, tokenizer: TextTokenizer, keep: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._keep = keep
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0

    def feed(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids:
            return self.flush() + self._tokenizer.token_bytes(token_id).decode() if token_id in self._keep else ""
        self._ids.append(token_id)
        return self._advance(force=len(self._ids) - self._read > _MAX_PENDING)

    def flush(self) -> str:
        return self._advance(force=True)

    def _advance(self, *, force: bool) -> str:
        window = self._ids[self._prefix :]
        before = self._tokenizer.decode(window[: self._read - self._prefix])
        after = self._tokenizer.decode(window)
        if not force and (len(after) <= len(before) or after.endswith(_REPLACEMENT)):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return after[len(before) :]
