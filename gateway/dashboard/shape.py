"""A histogram as it stood at one moment. The difference of two is the distribution of what came between them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from prometheus_client.core import Metric


@dataclass(frozen=True, slots=True)
class Shape:
    """bounds: upper ones of the buckets, the last infinite; counts: observations up to each; total: their sum."""

    bounds: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()
    total: float = 0.0

    @classmethod
    def from_metric(cls, metric: Metric) -> Self:
        """Of a collected histogram without labels."""
        bounds, counts, total = [], [], 0.0
        for sample in metric.samples:
            if sample.name.endswith("_bucket"):
                bounds.append(float(sample.labels["le"]))
                counts.append(sample.value)
            elif sample.name.endswith("_sum"):
                total = sample.value
        return cls(tuple(bounds), tuple(counts), total)

    def difference(self, before: Shape) -> Shape:
        """What was observed after `before`, which is an earlier state of the same histogram, or empty."""
        if not before.counts:
            return self
        counts = tuple(now - then for now, then in zip(self.counts, before.counts, strict=True))
        return Shape(self.bounds, counts, self.total - before.total)

    @property
    def count(self) -> float:
        return self.counts[-1] if self.counts else 0.0

    def quantile(self, q: float) -> float | None:
        """As PromQL's histogram_quantile: linear inside a bucket, the last finite bound beyond it. None when empty."""
        if not self.count:
            return None
        rank = q * self.count
        at = bisect_left(self.counts, rank)
        if math.isinf(self.bounds[at]):
            return self.bounds[at - 1] if at else None
        below, start = (self.counts[at - 1], self.bounds[at - 1]) if at else (0.0, 0.0)
        inside = self.counts[at] - below
        return start + (self.bounds[at] - start) * ((rank - below) / inside if inside else 1.0)

    def as_json(self) -> Mapping[str, float | None] | None:
        """count, mean and percentiles; None when nothing was observed."""
        if not self.count:
            return None
        quantiles = {f"p{percent}": self.quantile(percent / 100) for percent in (50, 90, 99)}
        return {"count": int(self.count), "mean": self.total / self.count, **quantiles}
