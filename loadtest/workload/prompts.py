"""Prompts that share exactly what their pieces share.

A piece is so many tokens of an endless stream that its seed alone fixes, so two pieces with one seed are equal as far
as the shorter goes, in every process. As token ids a piece has exactly its length; as text it has that many common
English words, nearly all of them one token each to the usual vocabularies.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from hashlib import shake_128

# One byte picks one: 256, all different.
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
    """The first `tokens` of the stream of this seed."""

    seed: bytes
    tokens: int

    def ids(self, low: int, high: int) -> list[int]:
        """Token ids from low to below high."""
        drawn = array("I")
        drawn.frombytes(shake_128(b"ids" + self.seed).digest(4 * self.tokens))
        if sys.byteorder == "big":
            drawn.byteswap()
        span = high - low
        return [low + x % span for x in drawn]

    def text(self) -> str:
        """Lower-case words with single spaces: JSON needs no escapes."""
        return " ".join([WORDS[x] for x in shake_128(b"words" + self.seed).digest(self.tokens)])


@dataclass(frozen=True, slots=True)
class PromptMessage:
    """role: as in chat. answer: the turn of this conversation whose real answer stands here, where it is known; the
    pieces stand in for it elsewhere.
    """

    role: str
    pieces: tuple[TextPiece, ...]
    answer: int | None = None

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. pause_s: from the answer before until this is sent; nothing for the first."""

    messages: tuple[PromptMessage, ...]
    output_tokens: int
    pause_s: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        """As asked for; a chat template and a tokenizer's taste in words are the server's."""
        return sum(message.tokens for message in self.messages)


@dataclass(frozen=True, slots=True)
class Session:
    """Turns of one user, one after the other; most workloads have one turn a session."""

    number: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """What a server said. ids: token ids where the protocol tells them."""

    text: str
    ids: tuple[int, ...] | None = None
