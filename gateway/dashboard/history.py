"""The gateway's metrics at regular moments of the last minutes, from which rates and percentiles are computed.

A task takes a sample of the existing counters every PERIOD_S, so the token path has no extra work. The ring keeps
WINDOW_S. Before it is full, the oldest sample is from the gateway's start.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from prometheus_client.core import Metric

from gateway.pods.info import DraftCounts, PeerTraffic, PodActivity
from gateway.pods.pod import Pod
from gateway.serving.gateway import Gateway
from gateway.telemetry.metrics import GatewayMetrics

PERIOD_S = 5.0
WINDOW_S = 300.0

_log = logging.getLogger(__name__)
PodKey = tuple[str, int]  #: Name and generation of a pod: a restarted pod counts from zero.


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """The state of a histogram at one moment."""

    bounds: tuple[float, ...] = ()  #: Upper bounds of the buckets; the last one is infinite.
    counts: tuple[float, ...] = ()  #: Observations up to each bound.
    total: float = 0.0  #: Sum of all observations.

    @classmethod
    def from_metric(cls, metric: Metric) -> Self:
        """Returns the snapshot of a collected histogram without labels."""
        bounds, counts, total = [], [], 0.0
        for sample in metric.samples:
            if sample.name.endswith("_bucket"):
                bounds.append(float(sample.labels["le"]))
                counts.append(sample.value)
            elif sample.name.endswith("_sum"):
                total = sample.value
        return cls(tuple(bounds), tuple(counts), total)

    def difference(self, before: HistogramSnapshot) -> HistogramSnapshot:
        """Returns the observations made after `before`, an earlier snapshot of the same histogram or an empty one."""
        if not before.counts:
            return self
        counts = tuple(now - then for now, then in zip(self.counts, before.counts, strict=True))
        return HistogramSnapshot(self.bounds, counts, self.total - before.total)

    @property
    def count(self) -> float:
        return self.counts[-1] if self.counts else 0.0

    def quantile(self, q: float) -> float | None:
        """Returns a quantile as PromQL's histogram_quantile: linear, at most the last finite bound; None if empty."""
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
        """Returns count, mean and percentiles; None if there are no observations."""
        if not self.count:
            return None
        quantiles = {f"p{percent}": self.quantile(percent / 100) for percent in (50, 90, 99)}
        return {"count": int(self.count), "mean": self.total / self.count, **quantiles}


_EMPTY = HistogramSnapshot()


@dataclass(frozen=True, slots=True)
class MetricsSample:
    """The metrics at one moment."""

    at: float  #: Time of the sample, time.monotonic().
    counts: Mapping[str, float]  #: Values of counters, and the current numbers of running and waiting requests.
    histograms: Mapping[str, HistogramSnapshot]  #: Latency histograms by name.
    pods: Mapping[PodKey, PodActivity]  #: Activity of the pods that answer.

    def kv_used(self) -> float | None:
        """Returns the share of the blocks of all pods that is in use; None without pods."""
        blocks = [pod.blocks for pod in self.pods.values()]
        total = sum(b.total for b in blocks)
        return sum(b.leased + b.quarantined for b in blocks) / total if total else None


@dataclass(frozen=True, slots=True)
class MetricsWindow:
    """The time between two samples. A pod that appeared in between counts from its own start."""

    start: MetricsSample
    end: MetricsSample

    @property
    def seconds(self) -> float:
        return max(self.end.at - self.start.at, 1e-9)

    def count(self, name: str) -> float:
        """Returns the growth of a counter."""
        return self.end.counts.get(name, 0.0) - self.start.counts.get(name, 0.0)

    def rate(self, name: str) -> float:
        """Returns the growth of a counter per second."""
        return self.count(name) / self.seconds

    def histogram(self, name: str) -> HistogramSnapshot:
        """Returns the observations of the window."""
        return self.end.histograms.get(name, _EMPTY).difference(self.start.histograms.get(name, _EMPTY))

    def pod_rate(self, key: PodKey, count: str) -> float:
        """Returns a pod's tokens per second. `count`: "prefilled" or "generated"."""
        return max(0, self._growth(key, count)) / self.seconds if key in self.end.pods else 0.0

    def preemptions(self, key: PodKey) -> int:
        return self._growth(key, "preemptions")

    def _growth(self, key: PodKey, count: str) -> int:
        before, after = (getattr(sample.pods.get(key), count, 0) for sample in (self.start, self.end))
        return int(after - before)

    def drafts(self, key: PodKey) -> DraftCounts | None:
        """Returns the draft counts of the window, None for a pod without speculative decoding."""
        before, after = self.start.pods.get(key), self.end.pods.get(key)
        if after is None or after.drafts is None:
            return None
        now, then = after.drafts, None if before is None else before.drafts
        if then is None:
            return now
        grown = (now.chains - then.chains, now.proposed - then.proposed, now.accepted - then.accepted)
        return DraftCounts(now.proposer, *grown, now.useless)

    def links(self) -> Iterator[tuple[str, PeerTraffic]]:
        """Yields the sending pod and its KV traffic to another pod in the window. A new connection counts from zero."""
        for key, after in self.end.pods.items():
            before = self.start.pods.get(key)
            then = {} if before is None else {(link.pod, link.transport): link for link in before.links}
            for link in after.links:
                was = then.get((link.pod, link.transport))
                if was is not None and was.bytes <= link.bytes:
                    grown = link.bytes - was.bytes, max(0.0, link.busy_s - was.busy_s)
                    yield key[0], PeerTraffic(link.pod, link.transport, *grown, link.gb_s)
                else:
                    yield key[0], link


class MetricsHistory:
    """A ring of samples of `metrics`, the known pods (`pods`) and the number of queued requests (`waiting`)."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        pods: Callable[[], Iterable[Pod]],
        waiting: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._pods, self._waiting, self._clock = pods, waiting, clock
        self._samples: deque[MetricsSample] = deque(maxlen=round(WINDOW_S / PERIOD_S) + 1)
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def of_gateway(cls, gateway: Gateway) -> Self:
        """Returns the history of a gateway's metrics, queues and pods."""
        return cls(
            gateway.metrics,
            lambda: [pod for model in gateway.models for pod in model.pod_table.pods.values()],
            lambda: sum(model.gate.waiting for model in gateway.models),
        )

    async def start(self) -> None:
        """Starts to take samples."""
        self.take()
        self._task = asyncio.get_running_loop().create_task(self._forever())

    async def stop(self) -> None:
        """Stops taking samples. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def take(self) -> None:
        """Takes a sample and keeps it."""
        self._samples.append(self.now())

    @property
    def samples(self) -> tuple[MetricsSample, ...]:
        """The kept samples, oldest first."""
        return tuple(self._samples)

    def now(self) -> MetricsSample:
        """Returns a sample without keeping it."""
        metrics = self._metrics
        pods = {
            (pod.info.name, pod.info.generation): pod.activity
            for pod in self._pods()
            if pod.alive and pod.info is not None and pod.activity is not None
        }
        counts = {**metrics.totals(), "waiting": float(self._waiting())}
        latencies = {name: HistogramSnapshot.from_metric(metric) for name, metric in metrics.latencies().items()}
        return MetricsSample(self._clock(), counts, latencies, pods)

    async def _forever(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                self.take()
            except Exception:
                _log.exception("a sample for the dashboard could not be taken")


def speculation_json(drafts: DraftCounts) -> dict[str, Any]:
    """Returns draft counts as JSON."""
    return {
        "proposer": drafts.proposer,
        # Mean number of tokens per step with drafts, the model's own token included; None without these steps.
        "acceptance_length": 1 + drafts.accepted / drafts.chains if drafts.chains else None,
        "accepted": drafts.accepted,
        "proposed": drafts.proposed,
        "useless": drafts.useless,
    }


def link_json(source: str, link: PeerTraffic) -> dict[str, Any]:
    """Returns the traffic between two pods as JSON."""
    return {
        "from": source,
        "to": link.pod,
        "transport": link.transport,
        "bytes": link.bytes,
        "busy_s": link.busy_s,
        "gb_per_s": link.bytes / link.busy_s / 1e9 if link.busy_s else link.gb_s or None,
    }
