"""Prometheus metrics of one process: a registry of its own, names with the baton_ prefix, an HTTP endpoint.

Nothing here is global: each service makes one Metrics and hands it to its parts, tests make as many as they like.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from common.errors import ConfigError

PREFIX = "baton_"

# Seconds. Token gaps are a few ms, first tokens up to a minute under load; alerts ask for 0.1 and 2.
LATENCY_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.25,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
COUNT_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

MetricSample = tuple[tuple[str, ...], float]


class MetricsServer:
    """The HTTP endpoint that Metrics.start_metrics_server started, in its own thread."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread
        self.port: int = server.server_port

    def stop(self) -> None:
        """Stops serving and frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@dataclass(frozen=True, slots=True)
class MetricDeclaration:
    """What scrapers see: its whole name, its kind (counter, gauge or histogram), what it means, its labels."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()


class Metrics:
    """Declares and exposes metrics; names come without the prefix and with their unit (`_seconds`, `_bytes`)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.declarations: list[MetricDeclaration] = []

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        """A count that only grows; Prometheus adds `_total` to its name."""
        self._declare(f"{name}_total", "counter", help, labels)
        return Counter(PREFIX + name, help, labels, registry=self.registry)

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
        """A value that goes up and down."""
        self._declare(name, "gauge", help, labels)
        return Gauge(PREFIX + name, help, labels, registry=self.registry)

    def histogram(
        self, name: str, help: str, labels: Sequence[str] = (), buckets: Sequence[float] = LATENCY_BUCKETS
    ) -> Histogram:
        """A distribution; the default buckets are seconds of latency."""
        self._declare(name, "histogram", help, labels)
        return Histogram(PREFIX + name, help, labels, registry=self.registry, buckets=buckets)

    def unlabeled_histogram(
        self, name: str, help: str, buckets: Sequence[float] = LATENCY_BUCKETS
    ) -> UnlabeledHistogram:
        """A distribution that is observed by one thread, for every token: without labels and locks."""
        self._declare(name, "histogram", help, ())
        tally = UnlabeledHistogram(PREFIX + name, help, buckets)
        self.registry.register(tally)
        return tally

    def sampled_gauge(
        self, name: str, help: str, read: Callable[[], Iterable[MetricSample]], labels: Sequence[str] = ()
    ) -> None:
        """A gauge read only when scraped: `read` gives (label values, value) pairs, from the scraping thread."""
        self._declare(name, "gauge", help, labels)
        self._sampled(lambda: GaugeMetricFamily(PREFIX + name, help, labels=labels), read)

    def sampled_counter(
        self, name: str, help: str, read: Callable[[], Iterable[MetricSample]], labels: Sequence[str] = ()
    ) -> None:
        """A counter whose owner keeps the count: `read` gives (label values, count) pairs, from the scraping thread."""
        self._declare(f"{name}_total", "counter", help, labels)
        self._sampled(lambda: CounterMetricFamily(PREFIX + name, help, labels=labels), read)

    def _declare(self, name: str, kind: str, help: str, labels: Sequence[str]) -> None:
        self.declarations.append(MetricDeclaration(PREFIX + name, kind, help, tuple(labels)))

    def _sampled(
        self, family: Callable[[], GaugeMetricFamily | CounterMetricFamily], read: Callable[[], Iterable[MetricSample]]
    ) -> None:
        self.registry.register(_Sampled(family, read))

    def add_process_metrics(self) -> None:
        """What every process tells of itself: CPU, memory, files, and the memory that it may take."""
        process = ProcessCollector(namespace=PREFIX.rstrip("_"), registry=self.registry)
        for family in process.collect():
            end = "_total" if family.type == "counter" else ""
            self._declare(family.name.removeprefix(PREFIX) + end, family.type, family.documentation, ())
        self.sampled_gauge(
            "host_memory_used_bytes",
            "Memory in use in this process's container, or on the machine where it has no limit.",
            lambda: [((), memory_usage().used)],
        )
        self.sampled_gauge(
            "host_memory_limit_bytes",
            "Memory that this process's container, or the machine, has.",
            lambda: [((), memory_usage().limit)],
        )

    def exposition(self, accept: str = "") -> bytes:
        """All metrics, in OpenMetrics (with exemplars) for an Accept header that takes it, else in Prometheus' text."""
        encode, _ = choose_encoder(accept)
        return encode(self.registry)

    @staticmethod
    def content_type(accept: str = "") -> str:
        """That of the exposition."""
        return choose_encoder(accept)[1]

    def start_metrics_server(self, port: int, host: str = "127.0.0.1") -> MetricsServer:
        """Serves /metrics on host:port (0 picks a free one) in a thread. Raises ConfigError when the port is taken."""
        try:
            server, thread = start_http_server(port, host, registry=self.registry)
        except OSError as e:
            raise ConfigError(
                f"metrics_port: cannot listen on {host}:{port}: {e.strerror}", field="metrics_port"
            ) from e
        return MetricsServer(server, thread)


class UnlabeledHistogram(Collector):
    """A histogram whose `observe` costs a tenth of prometheus_client's."""

    def __init__(self, name: str, help: str, buckets: Sequence[float]) -> None:
        self._name = name
        self._help = help
        self._bounds = (*buckets, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts a value into its bucket; a bucket's bound belongs to it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def describe(self) -> Iterable[Metric]:
        return [HistogramMetricFamily(self._name, self._help)]

    def collect(self) -> Iterable[Metric]:
        buckets = list(zip(map(floatToGoString, self._bounds), accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(self._name, self._help)
        family.add_metric([], buckets, self._sum)
        return [family]


class _Sampled(Collector):
    """Reads its values at scrape time."""

    def __init__(
        self, family: Callable[[], GaugeMetricFamily | CounterMetricFamily], read: Callable[[], Iterable[MetricSample]]
    ) -> None:
        self._family = family
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return [self._family()]

    def collect(self) -> Iterable[Metric]:
        family = self._family()
        for labels, value in self._read():
            family.add_metric(labels, value)
        return [family]


CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Bytes. used: what cannot be given back at once. free: what may still be taken, by the limit and the machine."""

    used: int
    limit: int
    free: int


def memory_usage(cgroup: Path = CGROUP) -> MemoryUsage:
    """Of now. Files that the kernel caches do not count as used, as in Kubernetes' working set."""
    import psutil

    machine = psutil.virtual_memory()
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit != "max" and int(limit) <= machine.total:
            stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
            used = max(0, int((cgroup / "memory.current").read_text()) - int(stat["inactive_file"]))
            return MemoryUsage(used, int(limit), max(0, min(int(limit) - used, machine.available)))
    except (OSError, ValueError, KeyError):
        pass  # not in a control group of version 2 with a limit of its own
    return MemoryUsage(machine.total - machine.available, machine.total, machine.available)
