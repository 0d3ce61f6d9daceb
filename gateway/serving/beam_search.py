"""Beam search: the likeliest answers are looked for instead of drawn.

The search itself, whoever computes the log-probabilities. Scores and ends are those of transformers
(generation/utils.py, `_beam_search`): a hypothesis counts log-probability / length ** length_penalty, its stop token
included, and of the candidates of a step those that end are kept only if they are among the best `width`.

Invariant: at most `width` live beams, all of one length, best first; at most `width` hypotheses, best first.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from common.types import FinishReason, Token, TokenLogprob

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """early_stopping: when to end once `width` hypotheses are there. True: at once. False: when no live beam is better
    by its present length. "never": when no live beam could become better at any length.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def score(self, logprob: float, length: int) -> float:
        """What hypotheses are ranked by."""
        return logprob / math.pow(length, self.length_penalty)


@dataclass(frozen=True, slots=True)
class Beam:
    """An answer, or the beginning of one. logprob: the sum of its tokens'. finish: None while it is live."""

    tokens: tuple[Token, ...] = ()
    logprob: float = 0.0
    finish: FinishReason | None = None

    def extended(self, choice: TokenLogprob, top: tuple[TokenLogprob, ...], finish: FinishReason | None) -> Beam:
        """One token longer. top: what is shown as that token's alternatives."""
        token = Token(len(self.tokens), choice.token, choice.logprob, top)
        return Beam((*self.tokens, token), self.logprob + choice.logprob, finish)


Expand = Callable[[Sequence[Beam]], Awaitable[Sequence[Sequence[TokenLogprob]]]]
"""For each of these beams the likeliest next tokens, best first: at least width + the number of stop tokens."""


async def beam_search(
    expand: Expand,
    params: BeamSearchParams,
    *,
    max_tokens: int,
    min_tokens: int = 0,
    stops: Collection[int] = (),
    num_top: int = 0,
) -> list[Beam]:
    """`width` hypotheses (fewer only if the vocabulary is that small), best first.

    max_tokens: at least 1. min_tokens: tokens before which none of stops comes. num_top: alternatives kept per token.
    Raises what expand raises.
    """
    live, found = [Beam()], list[Beam]()
    for length in range(1, max_tokens + 1):
        tops = await expand(live)
        ends = stops if length > min_tokens else ()
        candidates = [
            (beam.logprob + choice.logprob, beam, choice, tuple(top[:num_top]))
            for beam, top in zip(live, tops, strict=True)
            for choice in top
            if choice.token in ends or choice.token not in stops
        ]
        candidates.sort(key=lambda candidate: candidate[0], reverse=True)
        best = candidates[: params.width]
        found += [beam.extended(c, top, FinishReason.STOP) for _, beam, c, top in best if c.token in ends]
        if length == max_tokens:
            found += [beam.extended(c, top, FinishReason.LENGTH) for _, beam, c, top in best if c.token not in ends]
        found = _ranked(found, params)
        going_on = [candidate for candidate in candidates if candidate[2].token not in ends][: params.width]
        live = [beam.extended(choice, top, None) for _, beam, choice, top in going_on]
        if not live or (len(found) == params.width and _enough(live[0], found[-1], params, max_tokens)):
            break
    return found


def _ranked(found: Sequence[Beam], params: BeamSearchParams) -> list[Beam]:
    def score(beam: Beam) -> float:
        return params.score(beam.logprob, len(beam.tokens))

    return sorted(found, key=score, reverse=True)[: params.width]


def _enough(live: Beam, worst: Beam, params: BeamSearchParams, max_tokens: int) -> bool:
    """The best live beam cannot displace the worst hypothesis, or need not."""
    if params.early_stopping is True:
        return True
    longest = params.early_stopping == "never" and params.length_penalty > 0
    reachable = params.score(live.logprob, max_tokens if longest else len(live.tokens))
    return reachable <= params.score(worst.logprob, len(worst.tokens))
