"""Objectives as typed, `ttft=2s,itl=50ms`, and percentiles."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from common.errors import ConfigError

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_TIME = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(s|ms|us)")


def parse_slo(text: str, names: Sequence[str]) -> dict[str, float]:
    """Returns seconds by name for the objectives in the text. Raises ConfigError."""
    expected = ", ".join(f"{name}=TIME" for name in names[:-1]) + f" and {names[-1]}=TIME"
    objectives: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        time = _TIME.fullmatch(value)
        if not equals or name not in names or name in objectives:
            raise ConfigError(f"--slo: {part.strip()!r} is not one of {expected}", field="slo")
        if time is None or float(time[1]) == 0:
            raise ConfigError(f"--slo: {value!r} is not a time like 2s or 50ms", field="slo")
        objectives[name] = float(time[1]) * _UNITS[time[2]]
    return objectives


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least `share` of the values do not exceed; NaN for no values."""
    return percentile_of_sorted(sorted(values), share)


def percentile_of_sorted(ordered: Sequence[float], share: float) -> float:
    """Returns the same as `percentile`, for sorted values."""
    if not ordered:
        return math.nan
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]
