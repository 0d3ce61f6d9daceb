"""Beam search: finds the likeliest answers instead of sampling them.

The module holds the search alone; `expand` computes the log-probabilities. Scores and ends follow transformers
(generation/utils.py, `_beam_search`): a hypothesis scores log-probability / length ** length_penalty, its stop token
included, and a candidate that ends is kept only if it is among the best `width` of its step.

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
    """Parameters of one beam search."""

    width: int
    length_penalty: float = 1.0
    #: When the search ends once it has `width` hypotheses. True: at once. False: when no live beam scores better at its
    #: current length. "never": when no live beam could score better at any length.
    early_stopping: EarlyStopping = False

    def score(self, logprob: float, length: int) -> float:
        """Returns the score by which hypotheses are ranked."""
        return logprob / math.pow(length, self.length_penalty)


@dataclass(frozen=True, slots=True)
class Beam:
    """A complete answer, or the beginning of one."""

    tokens: tuple[Token, ...] = ()
    logprob: float = 0.0  # sum of the tokens' log-probabilities
    finish: FinishReason | None = None  # why the beam ended; None while it is live

    def extended(self, choice: TokenLogprob, top: tuple[TokenLogprob, ...], finish: FinishReason | None) -> Beam:
        """Returns the beam with one more token. `top` holds the alternatives that are reported with that token."""
        token = Token(len(self.tokens), choice.token, choice.logprob, top)
        return Beam((*self.tokens, token), self.logprob + choice.logprob, finish)


Expand = Callable[[Sequence[Beam]], Awaitable[Sequence[Sequence[TokenLogprob]]]]
"""Returns, for each beam, its likeliest next tokens, best first: at least `width` plus the number of stop tokens."""


async def beam_search(
    expand: Expand,
    params: BeamSearchParams,
    *,
    max_tokens: int,
    min_tokens: int = 0,
    stops: Collection[int] = (),
    num_top: int = 0,
) -> list[Beam]:
    """Returns `width` hypotheses, best first; fewer only if the vocabulary is too small. Raises what `expand` raises.

    Args:
        max_tokens: Longest answer, at least 1.
        min_tokens: No token of `stops` is taken before this many tokens.
        num_top: Alternatives kept per token.
    """
    live, hypotheses = [Beam()], list[Beam]()
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
        hypotheses += [beam.extended(c, top, FinishReason.STOP) for _, beam, c, top in best if c.token in ends]
        if length == max_tokens:
            hypotheses += [
                beam.extended(c, top, FinishReason.LENGTH) for _, beam, c, top in best if c.token not in ends
            ]
        hypotheses = _ranked(hypotheses, params)
        continuing = [candidate for candidate in candidates if candidate[2].token not in ends][: params.width]
        live = [beam.extended(choice, top, None) for _, beam, choice, top in continuing]
        if not live or (len(hypotheses) == params.width and _enough(live[0], hypotheses[-1], params, max_tokens)):
            break
    return hypotheses


def _ranked(hypotheses: Sequence[Beam], params: BeamSearchParams) -> list[Beam]:
    def score(beam: Beam) -> float:
        return params.score(beam.logprob, len(beam.tokens))

    return sorted(hypotheses, key=score, reverse=True)[: params.width]


def _enough(live: Beam, worst: Beam, params: BeamSearchParams, max_tokens: int) -> bool:
    """Returns whether the search may end.

    It may if the best live beam cannot displace the worst hypothesis, or `early_stopping` says not to wait for it.
    """
    if params.early_stopping is True:
        return True
    longest = params.early_stopping == "never" and params.length_penalty > 0
    reachable = params.score(live.logprob, max_tokens if longest else len(live.tokens))
    return reachable <= params.score(worst.logprob, len(worst.tokens))
