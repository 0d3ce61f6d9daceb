"""Percentiles, by one definition wherever figures are told."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed; NaN of none. values need not be sorted."""
    return percentile_of_sorted(sorted(values), share)


def percentile_of_sorted(ordered: Sequence[float], share: float) -> float:
    """The same, of values in order: for many percentiles of many values."""
    if not ordered:
        return math.nan
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]
