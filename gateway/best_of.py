"""Which of a prompt's candidates are answered: those whose tokens have the highest mean log-probability."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gateway.service import Answer
from gateway.validation import Spec


def best(answers: Sequence[Answer], spec: Spec) -> list[Answer]:
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
