"""What is asked: sessions of a recorded trace, or made ones, always the same for the same seed.

Lengths, pauses and contents are drawn from streams of their own, so that changing one of them leaves the others alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

from common.errors import ConfigError
from loadtest.workload.lengths import LengthDistribution
from loadtest.workload.prompts import PromptMessage, Session, TextPiece, Turn
from loadtest.workload.trace import WorkloadRequest, WorkloadTrace, synthetic_block_hash

ONE = LengthDistribution(1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticWorkload:
    """Made sessions. The first `prefix_tokens` of a prompt are one of `prefixes` system prompts, shared by all who drew
    the same; every turn adds a user's message to the whole conversation before it. pause_s: mean of the time that a
    user takes over an answer, exponential.
    """

    seed: int
    input_tokens: LengthDistribution
    output_tokens: LengthDistribution
    prefix_tokens: int = 0
    prefixes: int = 1
    turns: LengthDistribution = ONE
    pause_s: float = 0.0

    def sessions(self, kind: str = "run") -> Iterator[Session]:
        """Endless. kind: sessions of another kind share no content with these, system prompts included."""
        lengths, pauses = random.Random(f"{self.seed} lengths {kind}"), random.Random(f"{self.seed} pauses {kind}")
        for number in count():
            system: tuple[PromptMessage, ...] = ()
            if self.prefix_tokens:
                chosen = lengths.randrange(self.prefixes)
                system = (
                    PromptMessage(
                        "system",
                        (TextPiece(synthetic_block_hash(self.seed, kind, "system", chosen), self.prefix_tokens),),
                    ),
                )
            history, turns = system, []
            for turn in range(self.turns.draw(lengths)):
                asked = TextPiece(
                    synthetic_block_hash(self.seed, kind, number, "user", turn), self.input_tokens.draw(lengths)
                )
                history = (*history, PromptMessage("user", (asked,)))
                output = self.output_tokens.draw(lengths)
                pause = pauses.expovariate(1 / self.pause_s) if turn and self.pause_s else 0.0
                turns.append(Turn(history, output, pause))
                stand_in = TextPiece(synthetic_block_hash(self.seed, kind, number, "answer", turn), output)
                history = (*history, PromptMessage("assistant", (stand_in,), answer=turn))
            yield Session(number, tuple(turns))


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """A trace's requests, one session each. length_scale: of prompts, answers and the blocks that prompts share."""

    trace: WorkloadTrace
    seed: int
    length_scale: float = 1.0

    def sessions(self) -> Iterator[Session]:
        """As many as the trace has, in its order."""
        block = max(1, round(self.trace.block_size * self.length_scale))
        salt = str(self.seed).encode()
        for number, request in enumerate(self.trace.requests):
            pieces = [TextPiece(salt + link, block) for link in request.block_hashes]
            rest = request.prompt_len - len(request.block_hashes) * self.trace.block_size
            own = request.partial_block_hash or synthetic_block_hash(self.trace.name, number, "tail")
            if rest or not pieces:
                pieces.append(TextPiece(salt + own, max(1, round(rest * self.length_scale))))
            output = max(1, round(request.output_len * self.length_scale))
            yield Session(number, (Turn((PromptMessage("user", tuple(pieces)),), output),))


def fit_trace(
    trace: WorkloadTrace, *, length_scale: float, most_input: int | None, most_output: int | None
) -> WorkloadTrace:
    """The requests whose prompts, once scaled, have at most most_input tokens; answers cut to most_output.

    Raises ConfigError when none is left.
    """

    def fits(r: WorkloadRequest) -> bool:
        return most_input is None or r.prompt_len * length_scale <= most_input

    kept = [r for r in trace.requests if fits(r)]
    if most_output is not None:
        most = max(1, int(most_output / length_scale))
        kept = [replace(r, output_len=min(r.output_len, most)) for r in kept]
    if not kept:
        raise ConfigError(f"--max-input-tokens: no request of {trace.name} is that short", field="max-input-tokens")
    return replace(trace, requests=tuple(kept))
