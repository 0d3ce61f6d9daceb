"""Comparisons of samples: a chi-square test, and the length of a common prefix."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TypeVar

K = TypeVar("K")


def chi_square_p(counts: Mapping[K, int], expected: Mapping[K, float]) -> float:
    """p-value of the chi-square test (Wilson and Hilferty 1931); keys with fewer than 8 expected counts are pooled."""
    total = sum(counts.values())
    statistic, cells, rare_seen, rare_due = 0.0, 0, 0, 0.0
    for key, chance in expected.items():
        due = chance * total
        if due < 8:
            rare_seen, rare_due = rare_seen + counts.get(key, 0), rare_due + due
            continue
        statistic, cells = statistic + (counts.get(key, 0) - due) ** 2 / due, cells + 1
    if rare_due >= 1:
        statistic, cells = statistic + (rare_seen - rare_due) ** 2 / rare_due, cells + 1
    freedom = cells - 1
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


def shared(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the common prefix of two sequences."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
