"""Synthetic prompts with exactly controlled shared prefixes.

A prompt consists of pieces. A piece is the beginning of an endless token stream, and its seed alone determines the
stream. Two pieces with the same seed have a common prefix of the shorter length, in every process.
As token ids, a piece has exactly its length. As text, it has the same number of common English words. Nearly all of
these words are one token in the usual vocabularies.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from hashlib import shake_128

# 256 different words: one random byte selects one word.
WORDS = tuple(
    """
    the of and to in is you that it he was for on are as with his they at be this have from or one had by word but
    not what all were we when your can said there use an each which she do how their if will up other about out
    many then them these so some her would make like him into time has look two more write go see number no way
    could people my than first water been call who oil its now find long down day did get come made may part over
    new sound take only little work know place year live me back give most very after thing our just name good
    sentence man think say great where help through much before line right too mean old any same tell boy follow
    came want show also around form three small set put end does another well large must big even such because turn
    here why ask went men read need land different home us move try kind hand picture again change off play spell
    air away animal house point page letter mother answer found study still learn should world high every near add
    food between own below country plant last school father keep tree never start city earth eye light thought head
    under story saw left late run while press close night real life few north book carry state took science eat
    room friend began idea fish mountain once base hear horse cut sure watch color face wood
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True)
class TextPiece:
    """The first `tokens` tokens of the stream of `seed`."""

    seed: bytes
    tokens: int

    def ids(self, low: int, high: int) -> list[int]:
        """Returns token ids in [low, high)."""
        numbers = array("I")
        numbers.frombytes(shake_128(b"ids" + self.seed).digest(4 * self.tokens))
        if sys.byteorder == "big":
            numbers.byteswap()
        span = high - low
        return [low + x % span for x in numbers]

    def text(self) -> str:
        """Returns lower-case words with single spaces. JSON needs no escapes for them."""
        return " ".join([WORDS[x] for x in shake_128(b"words" + self.seed).digest(self.tokens)])


@dataclass(frozen=True, slots=True)
class PromptMessage:
    """One message of a prompt."""

    role: str  # Chat role: system, user or assistant.
    pieces: tuple[TextPiece, ...]
    #: The turn that produced an assistant message. The client sends the model's answer to this turn, or the pieces if
    #: it has no answer. None for other messages.
    answer: int | None = None

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation."""

    messages: tuple[PromptMessage, ...]
    output_tokens: int
    pause_s: float = 0.0  # Seconds between the previous answer and this request; 0 for the first turn.

    @property
    def prompt_tokens(self) -> int:
        """The planned length. The server's chat template and tokenizer may change it."""
        return sum(message.tokens for message in self.messages)


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation: turns of one user in order. Most workloads have one turn per session."""

    number: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """An answer of the server."""

    text: str
    ids: tuple[int, ...] | None = None  # Token ids; None if the protocol does not return them.
