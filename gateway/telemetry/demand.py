"""The demand of this gateway, from its metrics, for the fleet planner."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.telemetry.metrics import GatewayMetrics
from prefix_index.demand import DemandRecord

#: First tokens within this time are in time. It is a bucket of the histogram, and the bound of the alert BatonTtftHigh.
IN_TIME_S = 2.0


@dataclass(frozen=True)
class DemandSampler:
    """Reads the metrics of a gateway."""

    metrics: GatewayMetrics
    models: int  #: Number of served models.
    waiting: Callable[[], int]  #: Returns the number of requests in the gateway's queues.
    started_ms: int = field(default_factory=lambda: int(time.time() * 1000))

    def record(self, number: int) -> DemandRecord:
        """Returns the demand now."""
        totals, ttft = self.metrics.totals(), self.metrics.latencies()["ttft"].samples
        served = sum(sample.value for sample in ttft if sample.name.endswith("_count"))
        in_time = sum(
            sample.value
            for sample in ttft
            if sample.name.endswith("_bucket") and float(sample.labels["le"]) == IN_TIME_S
        )
        routed = totals["routed_tokens"]
        return DemandRecord(
            number=number,
            started_ms=self.started_ms,
            models=self.models,
            arrivals=totals["requests"] + totals["running"],
            prompt_tokens=routed,
            uncached_tokens=max(0.0, routed - totals["actual_hits"]),
            output_tokens=totals["output_tokens"],
            served=served,
            in_time=in_time,
            waiting=self.waiting(),
        )
