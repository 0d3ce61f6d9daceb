"""Prometheus metrics of one service: a registry of its own, names with the prefix baton_, an HTTP endpoint."""

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

#: Seconds. Token gaps are a few ms; first tokens take up to a minute under load. Alerts need the bounds 0.1 and 2.
LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0),
)
COUNT_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

MetricSample = tuple[tuple[str, ...], float]  #: Label values, and the value.


class MetricsServer:
    """The HTTP endpoint of Metrics.start_metrics_server; runs in its own thread."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server, self._thread = server, thread
        self.port: int = server.server_port

    def stop(self) -> None:
        """Stops the endpoint and frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@dataclass(frozen=True, slots=True)
class MetricDeclaration:
    """A metric as scrapers see it."""

    name: str  # The full name with prefix and suffix.
    kind: str  # counter, gauge or histogram.
    help: str
    labels: tuple[str, ...] = ()


class Metrics:
    """Declares and exposes metrics. Names are given without prefix and end with their unit (`_seconds`, `_bytes`)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.declarations: list[MetricDeclaration] = []
        #: By use ("cluster", "clients"): a function that returns the POSIX time at which the certificate expires.
        self.certificates: dict[str, Callable[[], float]] = {}

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        """Creates a count that only grows; its name gets the suffix `_total`."""
        self._declare(f"{name}_total", "counter", help, labels)
        return Counter(PREFIX + name, help, labels, registry=self.registry)

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
        """Creates a value that goes up and down."""
        self._declare(name, "gauge", help, labels)
        return Gauge(PREFIX + name, help, labels, registry=self.registry)

    def histogram(
        self, name: str, help: str, labels: Sequence[str] = (), buckets: Sequence[float] = LATENCY_BUCKETS
    ) -> Histogram:
        """Creates a distribution; the default buckets are seconds of latency."""
        self._declare(name, "histogram", help, labels)
        return Histogram(PREFIX + name, help, labels, registry=self.registry, buckets=buckets)

    def unlabeled_histogram(
        self, name: str, help: str, buckets: Sequence[float] = LATENCY_BUCKETS
    ) -> UnlabeledHistogram:
        """Creates a distribution without labels and locks, for one thread that observes every token."""
        self._declare(name, "histogram", help, ())
        tally = UnlabeledHistogram(PREFIX + name, help, buckets)
        self.registry.register(tally)
        return tally

    def sampled_gauge(
        self, name: str, help: str, read: Callable[[], Iterable[MetricSample]], labels: Sequence[str] = ()
    ) -> None:
        """Creates a gauge that is read when scraped. `read` returns the samples in the scraping thread."""
        self._declare(name, "gauge", help, labels)
        self.registry.register(_Sampled(lambda: GaugeMetricFamily(PREFIX + name, help, labels=labels), read))

    def sampled_counter(
        self, name: str, help: str, read: Callable[[], Iterable[MetricSample]], labels: Sequence[str] = ()
    ) -> None:
        """Creates a counter that is read when scraped. `read` returns the samples in the scraping thread."""
        self._declare(f"{name}_total", "counter", help, labels)
        self.registry.register(_Sampled(lambda: CounterMetricFamily(PREFIX + name, help, labels=labels), read))

    def _declare(self, name: str, kind: str, help: str, labels: Sequence[str]) -> None:
        self.declarations.append(MetricDeclaration(PREFIX + name, kind, help, tuple(labels)))

    def add_process_metrics(self) -> None:
        """Adds metrics of the process: CPU, memory, open files, and the memory limit."""
        process = ProcessCollector(namespace=PREFIX.rstrip("_"), registry=self.registry)
        for family in process.collect():
            end = "_total" if family.type == "counter" else ""
            self._declare(family.name.removeprefix(PREFIX) + end, family.type, family.documentation, ())
        used = "Memory in use in this process's container, or on the machine where it has no limit."
        self.sampled_gauge("host_memory_used_bytes", used, lambda: [((), memory_usage().used)])
        limit = "Memory that this process's container, or the machine, has."
        self.sampled_gauge("host_memory_limit_bytes", limit, lambda: [((), memory_usage().limit)])
        expiry = "When this process's certificates expire, in seconds since 1970, by their use."
        self.sampled_gauge("certificate_expiry_timestamp_seconds", expiry, self._expiries, ["use"])

    def add_stuck_loops(self, loops: Iterable[str]) -> Counter:
        """Adds and returns the counter of loops that got stuck (common/process/watchdog.py), by the loop's name."""
        counter = self.counter("stuck_loops", "Times that a loop of this process made no progress.", ["loop"])
        for loop in loops:
            counter.labels(loop)
        return counter

    def _expiries(self) -> list[MetricSample]:
        return [((use,), expires_at()) for use, expires_at in self.certificates.items()]

    def exposition(self, accept: str = "") -> bytes:
        """Returns all metrics: OpenMetrics (with exemplars) if the Accept header allows it, else Prometheus text."""
        encode, _ = choose_encoder(accept)
        return encode(self.registry)

    @staticmethod
    def content_type(accept: str = "") -> str:
        """Returns the content type of `exposition(accept)`."""
        return choose_encoder(accept)[1]

    def start_metrics_server(self, port: int, host: str = "127.0.0.1") -> MetricsServer:
        """Serves /metrics on host:port (port 0: any free one) in a thread. Raises ConfigError if the port is in use."""
        try:
            server, thread = start_http_server(port, host, registry=self.registry)
        except OSError as e:
            problem = f"metrics_port: cannot listen on {host}:{port}: {e.strerror}"
            raise ConfigError(problem, field="metrics_port") from e
        return MetricsServer(server, thread)


class UnlabeledHistogram(Collector):
    """A histogram without labels; `observe` costs a tenth of the time of prometheus_client's."""

    def __init__(self, name: str, help: str, buckets: Sequence[float]) -> None:
        self._name, self._help = name, help
        self._bounds = (*buckets, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts a value in its bucket; the upper bound belongs to the bucket."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def describe(self) -> Iterable[Metric]:
        return [HistogramMetricFamily(self._name, self._help)]

    def collect(self) -> Iterable[Metric]:
        buckets = list(zip(map(floatToGoString, self._bounds), accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(self._name, self._help)
        family.add_metric([], buckets, self._sum)
        return [family]


@dataclass(eq=False)
class _Sampled(Collector):
    """A metric family that is read when scraped."""

    family: Callable[[], GaugeMetricFamily | CounterMetricFamily]
    read: Callable[[], Iterable[MetricSample]]

    def describe(self) -> Iterable[Metric]:
        return [self.family()]

    def collect(self) -> Iterable[Metric]:
        family = self.family()
        for labels, value in self.read():
            family.add_metric(labels, value)
        return [family]


CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Memory of the container or the machine, in bytes."""

    used: int  # Without memory that the kernel can reclaim at once.
    limit: int
    free: int  # Still allocatable within the limit and on the machine.


def memory_usage(cgroup: Path = CGROUP) -> MemoryUsage:
    """Returns the current memory usage. Inactive file cache does not count as used, as in Kubernetes' working set."""
    import psutil

    machine = psutil.virtual_memory()
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit != "max" and int(limit) <= machine.total:
            stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
            used = max(0, int((cgroup / "memory.current").read_text()) - int(stat["inactive_file"]))
            return MemoryUsage(used, int(limit), max(0, min(int(limit) - used, machine.available)))
    except (OSError, ValueError, KeyError):
        pass  # there is no cgroup v2 with a memory limit
    return MemoryUsage(machine.total - machine.available, machine.total, machine.available)
