"""Sessions of a load test: synthetic or from a recorded trace. Equal seeds give equal sessions.

Lengths, pauses and contents have separate random streams. A change of one setting does not change the others.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

from common.errors import ConfigError
from loadtest.workload.lengths import ONE, LengthDistribution
from loadtest.workload.prompts import PromptMessage, Session, TextPiece, Turn
from loadtest.workload.trace import WorkloadTrace, synthetic_block_hash


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
