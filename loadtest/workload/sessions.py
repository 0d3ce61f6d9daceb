"""Sessions of a load test: lengths, prompts with controlled shared prefixes, and conversations or traces of them.

A prompt consists of pieces. A piece is the beginning of an endless token stream, and its seed alone determines the
stream. Two pieces with the same seed have a common prefix of the shorter length, in every process.
As token ids, a piece has exactly its length. As text, it has the same number of common English words. Nearly all of
these words are one token in the usual vocabularies.

Equal seeds give equal sessions. Lengths, pauses and contents have separate random streams, so that a change of one
setting does not change the others.
"""

from __future__ import annotations

import math
import random
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import shake_128
from itertools import count

from common.errors import ConfigError
from loadtest.workload.trace import WorkloadTrace, synthetic_block_hash

MAX_TOKENS = 10_000_000
SIGMA = 0.8  # Of the logarithm. The 90th percentile is 2.8 times the median, similar to recorded traces.
_TEXT = re.compile(r"(~?)(\d+)(?::(\d+))?")


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """A distribution of token counts: uniform, or log-normal if `around` is set."""

    low: int  # The lowest count, or the median if `around` is set.
    high: int  # The highest count (inclusive). Ignored if `around` is set.
    around: bool = False

    def draw(self, rng: random.Random) -> int:
        """Draws a count of at least 1."""
        if self.around:
            return min(MAX_TOKENS, max(1, round(rng.lognormvariate(math.log(self.low), SIGMA))))
        return rng.randint(self.low, self.high)

    @classmethod
    def parse(cls, flag: str, text: str) -> LengthDistribution:
        """Parses `512`, `128:1024` or `~512`. Raises ConfigError that names the flag."""
        match = _TEXT.fullmatch(text.strip())
        if match is None or (match[1] and match[3]):
            raise ConfigError(f"--{flag}: {text!r} is not a length like 512, 128:1024 or ~512", field=flag)
        low, high = int(match[2]), int(match[3] or match[2])
        if not 1 <= low <= high <= MAX_TOKENS:
            fault = f"invalid length {text!r}: expected 1 <= low <= high <= {MAX_TOKENS}"
            raise ConfigError(f"--{flag}: {fault}", field=flag)
        return cls(low, high, bool(match[1]))

    def __str__(self) -> str:
        if self.around:
            return f"~{self.low}"
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


ONE = LengthDistribution(1, 1)


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
        raw, span = shake_128(b"ids" + self.seed).digest(4 * self.tokens), high - low
        return [low + x % span for x in struct.unpack(f"<{self.tokens}I", raw)]

    def text(self) -> str:
        """Returns lower-case words with single spaces. JSON needs no escapes for them."""
        return " ".join([WORDS[x] for x in shake_128(b"words" + self.seed).digest(self.tokens)])


@dataclass(frozen=True, slots=True)
class PromptMessage:
    role: str  # Chat role: system, user or assistant.
    pieces: tuple[TextPiece, ...]
    answer: int | None = None  # Turn with the answer that replaces the pieces, if the client has it.

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
    text: str
    ids: tuple[int, ...] | None = None  # Token ids; None if the protocol does not return them.


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticWorkload:
    """Synthetic conversations. A prompt is a system prompt, the conversation so far and a new user message."""

    seed: int
    input_tokens: LengthDistribution  # Length of each user message.
    output_tokens: LengthDistribution
    prefix_tokens: int = 0  # Length of the system prompts; 0 for none.
    prefixes: int = 1  # Number of different system prompts. Each session draws one of them.
    turns: LengthDistribution = ONE
    pause_s: float = 0.0  # Mean think time between an answer and the next turn (exponential).

    def sessions(self, kind: str = "run") -> Iterator[Session]:
        """Yields sessions without end. Sessions of different kinds share no content, not even system prompts."""
        lengths, pauses = random.Random(f"{self.seed} lengths {kind}"), random.Random(f"{self.seed} pauses {kind}")
        for number in count():
            system: tuple[PromptMessage, ...] = ()
            if self.prefix_tokens:
                chosen = lengths.randrange(self.prefixes)
                seed = synthetic_block_hash(self.seed, kind, "system", chosen)
                system = (PromptMessage("system", (TextPiece(seed, self.prefix_tokens),)),)
            history, turns = system, []
            for turn in range(self.turns.draw(lengths)):
                seed = synthetic_block_hash(self.seed, kind, number, "user", turn)
                question = TextPiece(seed, self.input_tokens.draw(lengths))
                history = (*history, PromptMessage("user", (question,)))
                output = self.output_tokens.draw(lengths)
                pause = pauses.expovariate(1 / self.pause_s) if turn and self.pause_s else 0.0
                turns.append(Turn(history, output, pause))
                placeholder = TextPiece(synthetic_block_hash(self.seed, kind, number, "answer", turn), output)
                history = (*history, PromptMessage("assistant", (placeholder,), answer=turn))
            yield Session(number, tuple(turns))


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """The requests of a trace, one session each."""

    trace: WorkloadTrace
    seed: int
    length_scale: float = 1.0  # Factor on the lengths of prompts, answers and shared blocks.

    def sessions(self) -> Iterator[Session]:
        """Yields one session for each request of the trace, in order."""
        block = max(1, round(self.trace.block_size * self.length_scale))
        salt = str(self.seed).encode()
        for number, request in enumerate(self.trace.requests):
            pieces = [TextPiece(salt + block_hash, block) for block_hash in request.block_hashes]
            partial = request.prompt_len - len(request.block_hashes) * self.trace.block_size
            partial_seed = request.partial_block_hash or synthetic_block_hash(self.trace.name, number, "tail")
            if partial or not pieces:
                pieces.append(TextPiece(salt + partial_seed, max(1, round(partial * self.length_scale))))
            output = max(1, round(request.output_len * self.length_scale))
            yield Session(number, (Turn((PromptMessage("user", tuple(pieces)),), output),))


def fit_trace(
    trace: WorkloadTrace, *, length_scale: float, max_input: int | None, max_output: int | None
) -> WorkloadTrace:
    """Returns the requests with scaled prompts of at most max_input tokens. Cuts answers to max_output.

    Raises ConfigError if no request is left.
    """
    kept = [r for r in trace.requests if max_input is None or r.prompt_len * length_scale <= max_input]
    if max_output is not None:
        most = max(1, int(max_output / length_scale))
        kept = [replace(r, output_len=min(r.output_len, most)) for r in kept]
    if not kept:
        raise ConfigError(f"--max-input-tokens: no request of {trace.name} is that short", field="max-input-tokens")
    return replace(trace, requests=tuple(kept))
