"""Two runs side by side: by how much B differs from A, and whether that is more than chance.

For percentiles of requests the doubt is known: with n independent requests, the percentile lies, 19 times in 20,
between the order statistics n q -+ 1.96 sqrt(n q (1 - q)) (Conover, Practical Nonparametric Statistics, 3.2). A
difference is *clear* when the intervals of A and B do not meet; with too few requests it never is. Tokens of one answer
are not independent, so itl has no such verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.report.figures import PERCENTILES

Z = 1.96
TIMES = ("ttft", "ttft_intended", "itl", "tpot", "e2e", "e2e_intended")
# Of those that each request has one value of: the columns of the records that add up to it.
PER_REQUEST = {
    "ttft": ("ttft_ms",),
    "ttft_intended": ("ttft_ms", "lag_ms"),
    "tpot": ("tpot_ms",),
    "e2e": ("e2e_ms",),
    "e2e_intended": ("e2e_ms", "lag_ms"),
}
RATES = ("answered_per_s", "output_tokens_per_s")


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One figure of both. better: 1 when more is better, -1 when less is. clear: None where there is no verdict."""

    name: str
    unit: str
    a: float | None
    b: float | None
    better: int
    significant: bool | None = None

    @property
    def change(self) -> float | None:
        """B over A, minus 1."""
        return self.b / self.a - 1 if self.a and self.b is not None else None

    @property
    def worse_by(self) -> float:
        """How much worse B is, as a share of A; 0 when it is not."""
        return max(0.0, -self.better * (self.change or 0.0))


@dataclass(frozen=True, slots=True)
class Comparison:
    """differences: settings that the runs do not share, (name, A's, B's)."""

    rows: tuple[ComparisonRow, ...]
    differences: tuple[tuple[str, Any, Any], ...]

    def worse(self, tolerance: float) -> list[ComparisonRow]:
        """Figures that are worse by more than this share, unless chance may explain it."""
        return [row for row in self.rows if row.worse_by > tolerance and row.significant is not False]


def compare_runs(a: Mapping[str, Any], b: Mapping[str, Any]) -> Comparison:
    """Of two documents (figures.document)."""
    rows = [
        ComparisonRow(name.removesuffix("_per_s").replace("_", " "), "/s", a["rates"][name], b["rates"][name], 1)
        for name in RATES
    ]
    if a["goodput"] and b["goodput"]:
        rows.append(ComparisonRow("goodput", "/s", a["goodput"]["per_s"], b["goodput"]["per_s"], 1))
        rows.append(ComparisonRow("goodput share", "", a["goodput"]["share"], b["goodput"]["share"], 1))
    rows.append(ComparisonRow("failed share", "", _failed(a), _failed(b), -1))
    for name in TIMES:
        for share_name, share in PERCENTILES.items():
            clear = None
            if name in PER_REQUEST:
                clear = _apart(_values(a, PER_REQUEST[name]), _values(b, PER_REQUEST[name]), share)
            first, second = (told["latencies_ms"][name][share_name] for told in (a, b))
            rows.append(ComparisonRow(f"{name.replace('_', ' ')} {share_name}", "ms", first, second, -1, clear))
    settings = sorted(a["config"].keys() | b["config"].keys())
    pairs = [("model", a["model"], b["model"]), ("version", a["version"], b["version"])]
    pairs += [(name, a["config"].get(name), b["config"].get(name)) for name in settings]
    return Comparison(tuple(rows), tuple(pair for pair in pairs if pair[1] != pair[2]))


def confidence_interval(ordered: Sequence[float], share: float) -> tuple[float, float] | None:
    """Where the percentile lies, 19 times in 20; None when there are too few values to say. values in order."""
    n = len(ordered)
    middle, half = n * share, Z * math.sqrt(n * share * (1 - share))
    low, high = math.floor(middle - half), math.ceil(middle + half)
    if low < 1 or high > n:
        return None
    return ordered[low - 1], ordered[high - 1]


def _apart(a: Sequence[float], b: Sequence[float], share: float) -> bool:
    first, second = confidence_interval(a, share), confidence_interval(b, share)
    if first is None or second is None:
        return False
    return first[1] < second[0] or second[1] < first[0]


def _values(told: Mapping[str, Any], columns: Sequence[str]) -> list[float]:
    records = told["records"]
    each = zip(*(records[column] for column in columns), strict=True)
    kept = zip(each, records["error"], records["aborted"], strict=True)
    return sorted(sum(values) for values, error, aborted in kept if None not in values and not error and not aborted)


def _failed(told: Mapping[str, Any]) -> float:
    return float(told["requests"]["failed"] / max(1, told["requests"]["sent"]))
