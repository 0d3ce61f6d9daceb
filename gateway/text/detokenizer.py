"""Token ids to text, one token at a time, never a broken character.

Invariant: all returned texts joined, `flush` included, equal the tokenizer's decode of all ids at once. No returned
text ends inside a character.

Two implementations: the standard library's incremental UTF-8 decoder for byte-level vocabularies, and the two offsets
of text-generation-inference (prefix and read) for all others. `tokenizers.decoders.DecodeStream` was tried: its text
was right, but without a flush it kept back the tail of 45% of random byte-level sequences, and it decodes a window
per token.
"""

from __future__ import annotations

import codecs
from typing import Protocol

from gateway.text.tokenizer import TextTokenizer

_REPLACEMENT = "\ufffd"
#: Tokens that may be held back for an incomplete character. No character takes more, so longer ones are invalid bytes.
_MAX_PENDING = 8


class Detokenizer(Protocol):
    """Detokenizer of one sequence."""

    def feed(self, token_id: int) -> str:
        """Returns the text that this token completes, "" while a character is incomplete."""

    def flush(self) -> str:
        """Returns the text held back, with U+FFFD for incomplete characters. Nothing is pending afterwards."""


def make_detokenizer(tokenizer: TextTokenizer, kept_ids: frozenset[int] = frozenset()) -> Detokenizer:
    """Returns the detokenizer that fits the vocabulary.

    Special tokens have no text, but the special tokens in `kept_ids` have their name as text.
    """
    return ByteLevelDetokenizer(tokenizer, kept_ids) if tokenizer.byte_level else WindowDetokenizer(tokenizer, kept_ids)


class ByteLevelDetokenizer:
    """Detokenizer for vocabularies of byte strings."""

    def __init__(self, tokenizer: TextTokenizer, kept_ids: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._texts = tokenizer.token_texts
        self._kept_ids = kept_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        #: No character is incomplete.
        self._clean = True

    def feed(self, token_id: int) -> str:
        if self._clean and token_id not in self._kept_ids and (text := self._texts[token_id]) is not None:
            return text
        if token_id in self._tokenizer.special_ids and token_id not in self._kept_ids:
            return ""
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        self._clean = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        self._clean = True
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Detokenizer for any vocabulary.

    It decodes a short window with and without the new tokens. The difference is the new text.
    """

    def __init__(self, tokenizer: TextTokenizer, kept_ids: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._kept_ids = kept_ids
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0

    def feed(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids:
            return self.flush() + self._tokenizer.token_bytes(token_id).decode() if token_id in self._kept_ids else ""
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
