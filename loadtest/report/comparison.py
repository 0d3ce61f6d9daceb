"""Compares two runs: the difference of each figure, and whether it is significant.

The 95% confidence interval of the q-quantile of n independent requests lies between the order statistics
n q -+ 1.96 sqrt(n q (1 - q)) (Conover, Practical Nonparametric Statistics, 3.2). A difference is significant if the
intervals of A and B do not overlap. With too few requests there is no interval and no difference is significant.
Token gaps of one answer are not independent, so itl has no test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.report.figures import PERCENTILES

Z = 1.96
TIMES = ("ttft", "ttft_intended", "itl", "tpot", "e2e", "e2e_intended")
#: Latencies with one value per request: the columns of the records that add up to it.
PER_REQUEST = {
    "ttft": ("ttft_ms",),
    "ttft_intended": ("ttft_ms", "lag_ms"),
    "tpot": ("tpot_ms",),
    "e2e": ("e2e_ms",),
    "e2e_intended": ("e2e_ms", "lag_ms"),
}


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One figure of both runs."""

    name: str
    unit: str
    a: float | None
    b: float | None
    better: int  # 1 if higher values are better, -1 if lower values are.
    significant: bool | None = None  # None for a figure without a test.

    @property
    def change(self) -> float | None:
        """B / A - 1; None if a value is missing or A is 0."""
        return self.b / self.a - 1 if self.a and self.b is not None else None

    @property
    def worse_by(self) -> float:
        """Share of A by which B is worse; 0 if B is not worse."""
        return max(0.0, -self.better * (self.change or 0.0))

    @property
    def negligible(self) -> bool:
        """Whether the difference is below 0.5% or may be chance."""
        return self.significant is False or abs(self.change or 0.0) < 0.005

    @property
    def verdict(self) -> str:
        """Whether the difference is significant, in a word; "" without a test."""
        return {None: "", True: "yes", False: "no"}[self.significant]


@dataclass(frozen=True, slots=True)
class Comparison:
    """All figures of two runs and their different settings."""

    rows: tuple[ComparisonRow, ...]
    differences: tuple[tuple[str, Any, Any], ...]  # (setting, value of A, value of B) if the values differ.

    def worse(self, tolerance: float) -> list[ComparisonRow]:
        """Returns the figures that are significantly worse, by more than `tolerance`."""
        return [row for row in self.rows if row.worse_by > tolerance and row.significant is not False]


def compare_runs(a: Mapping[str, Any], b: Mapping[str, Any]) -> Comparison:
    """Compares the documents of two runs (figures.build_document)."""
    names = {"answered_per_s": "answered", "output_tokens_per_s": "output tokens"}
    rows = [ComparisonRow(label, "/s", a["rates"][name], b["rates"][name], 1) for name, label in names.items()]
    if a["goodput"] and b["goodput"]:
        rows.append(ComparisonRow("goodput", "/s", a["goodput"]["per_s"], b["goodput"]["per_s"], 1))
        rows.append(ComparisonRow("goodput share", "", a["goodput"]["share"], b["goodput"]["share"], 1))
    rows.append(ComparisonRow("failed share", "", _failed(a), _failed(b), -1))
    for name in TIMES:
        for share_name, share in PERCENTILES.items():
            significant = None
            if name in PER_REQUEST:
                significant = _disjoint(_values(a, PER_REQUEST[name]), _values(b, PER_REQUEST[name]), share)
            first, second = (document["latencies_ms"][name][share_name] for document in (a, b))
            rows.append(ComparisonRow(f"{name.replace('_', ' ')} {share_name}", "ms", first, second, -1, significant))
    settings = sorted(a["config"].keys() | b["config"].keys())
    pairs = [("model", a["model"], b["model"]), ("version", a["version"], b["version"])]
    pairs += [(name, a["config"].get(name), b["config"].get(name)) for name in settings]
    return Comparison(tuple(rows), tuple(pair for pair in pairs if pair[1] != pair[2]))


def confidence_interval(ordered: Sequence[float], share: float) -> tuple[float, float] | None:
    """Returns the 95% confidence interval of a quantile of sorted values; None for too few values."""
    n = len(ordered)
    middle, half = n * share, Z * math.sqrt(n * share * (1 - share))
    low, high = math.floor(middle - half), math.ceil(middle + half)
    return (ordered[low - 1], ordered[high - 1]) if low >= 1 and high <= n else None


def _disjoint(a: Sequence[float], b: Sequence[float], share: float) -> bool:
    first, second = confidence_interval(a, share), confidence_interval(b, share)
    return first is not None and second is not None and (first[1] < second[0] or second[1] < first[0])


def _values(document: Mapping[str, Any], columns: Sequence[str]) -> list[float]:
    records = document["records"]
    each = zip(*(records[column] for column in columns), strict=True)
    kept = zip(each, records["error"], records["aborted"], strict=True)
    return sorted(sum(values) for values, error, aborted in kept if None not in values and not error and not aborted)


def _failed(document: Mapping[str, Any]) -> float:
    return float(document["requests"]["failed"] / max(1, document["requests"]["sent"]))
