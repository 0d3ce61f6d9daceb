"""Which complete answers a request gets: all, those of best_of's candidates with the highest mean log-probability, or
those that a beam search found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gateway.beam_choice import beam_answers
from gateway.choice import Answer, Choice
from gateway.gather import gather
from gateway.validation import Spec


async def answers_of(choices: Sequence[Choice], spec: Spec) -> list[Answer]:
    """n complete answers for each prompt. Raises BatonError."""
    if spec.beam_search is not None:
        return [a for answers in await gather([beam_answers(c, spec.beam_search) for c in choices]) for a in answers]
    return _best(await gather([choice.collect() for choice in choices]), spec)


def _best(answers: Sequence[Answer], spec: Spec) -> list[Answer]:
    """The n best of each prompt's best_of answers, best first; all of them, in order, where there is nothing to choose.

    Ties go to the earlier one. All tokens that were generated count, those of a stop string too.
    """
    if spec.candidates == spec.n:
        return list(answers)
    chosen: list[Answer] = []
    for first in range(0, len(answers), spec.candidates):
        chosen += sorted(answers[first : first + spec.candidates], key=_mean, reverse=True)[: spec.n]
    return chosen


def _mean(answer: Answer) -> float:
    known = [token.logprob for token in answer.tokens if token.logprob is not None]
    return sum(known) / len(known) if known else -math.inf
