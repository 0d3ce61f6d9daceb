"""The metrics of a gateway, on a registry of their own.

To add a metric: declare it in `GatewayMetrics.__init__` with a help text, record it where the event happens, and add a
row to the table in docs/operations.md. tests/integration/test_metric_names.py compares the table with the code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder

from common.errors import SERVER_FAULTS
from common.telemetry import LATENCY_BUCKETS, Metrics, UnlabeledHistogram

_FAST_US = (50, 100, 150, 200, 300, 400, 500, 600, 800, 1000, 1200, 1500, 2000, 2500, 5000, 10_000, 25_000, 50_000)
FAST_BUCKETS = (*(us / 1e6 for us in _FAST_US), 0.1, 1.0)
_REFUSAL_MS = (1, 2, 3, 4, 5, 7, 10, 15, 20, 25, 30, 35, 40, 45, 50, 60, 75, 100, 150, 250, 500)
REFUSAL_BUCKETS = (*(ms / 1e3 for ms in _REFUSAL_MS), 1.0, 5.0, 15.0, 60.0)
TOKEN_BUCKETS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)

MAX_ADAPTER_LABELS = 64  #: Names of adapters that have samples of their own.

INTERNAL_OUTCOME = "internal"  #: Outcome of a request that an unexpected exception ended.
SERVER_FAULT_OUTCOMES = frozenset({INTERNAL_OUTCOME, *SERVER_FAULTS})  #: Outcomes that are the server's fault.


class GatewayMetrics:
    """The metrics of one gateway, served by /metrics."""

    def __init__(self) -> None:
        self.base = m = Metrics()
        m.add_process_metrics()
        self.requests = m.counter("requests", "Requests that ended, by endpoint and outcome", ["endpoint", "outcome"])
        self.running = m.gauge("requests_running", "Requests being served")
        self.ttft = m.histogram("ttft_seconds", "Arrival to the first token, per choice")
        self.itl = m.unlabeled_histogram("itl_seconds", "Time between tokens, per step of a choice")
        self.e2e = m.histogram("e2e_seconds", "Arrival to the last token, per choice")
        self.prefill_queue = m.histogram("queue_seconds", "Arrival at a prefill pod to its first chunk")
        self.prompt_tokens = m.counter("prompt_tokens", "Prompt tokens of answered requests")
        self.output_tokens = m.counter("output_tokens", "Tokens of all answers, as clients got them")
        self.aborts = m.counter("aborts", "Requests ended before the pods were done", ["reason"])
        self.retries = m.counter("retries", "Further attempts after a failure", ["kind"])
        self.resumptions = m.counter(
            "resumed_sequences", "Answers that had begun when their attempt failed, by what came of them", ["outcome"]
        )
        for outcome in ("resumed", "failed"):  # an alert must see the first failure: a new series has no increase
            self.resumptions.labels(outcome)
        self.stalled = m.counter(
            "stalled_attempts", "Attempts that were given up because a pod made no progress", ["role"]
        )
        for role in ("prefill", "decode"):
            self.stalled.labels(role)
        self.stuck_loops = m.add_stuck_loops(["event_loop"])
        self.rejections = m.counter("rejections", "Requests refused for load or by a limit", ["by"])
        self.tier_rejections = m.counter("tier_rejections", "Requests that the gate refused, by tier", ["tier"])
        self.shortened = m.counter("tier_shortened", "Requests with a shorter answer, because of overload", ["tier"])
        self.refusal = m.histogram(
            "refusal_seconds", "Head of a request to its sent refusal (429, 503)", ["stage"], REFUSAL_BUCKETS
        )
        self.admission_wait = m.histogram("admission_wait_seconds", "Time in the gateway's queue, of those that waited")
        self.limits_without_redis = m.counter(
            "limits_without_redis", "Requests checked against this gateway's own counts"
        )
        self.keyed_requests = m.counter(
            "keyed_requests", "Requests with an idempotency key, by where their answer came from", ["outcome"]
        )
        self.local_keys = m.counter("local_idempotency_keys", "Idempotency keys that Redis did not check")
        self.tenant_tokens = m.counter("tenant_tokens", "Tokens of requests with an API key", ["tenant", "kind"])
        self._adapter_requests = m.counter("adapter_requests", "Requests with a LoRA adapter, by its name", ["adapter"])
        self._adapters = set[str]()
        self.routing = m.histogram("routing_seconds", "What routing adds to a request", ["step"], FAST_BUCKETS)
        self.predicted_hits = m.counter("prefix_hit_tokens_predicted", "Cached prompt tokens that routing expected")
        self.actual_hits = m.counter("prefix_hit_tokens_actual", "Cached prompt tokens that pods found")
        self.lookup_tokens = m.counter("prefix_lookup_tokens", "Prompt tokens of requests with counted hits")
        self.repeated = m.counter(
            "prefix_repeated_tokens",
            "Leading prompt tokens seen before by this gateway: the most a cache could hit",
        )
        self.hit_error = m.histogram(
            "prefix_hit_error_tokens",
            "Difference of expected and found cached prompt tokens of a request",
            buckets=TOKEN_BUCKETS,
        )
        self.duplicates = m.counter("duplicate_tokens", "Tokens that came twice and were dropped")
        self.index_lookup = m.histogram(
            "kv_index_lookup_seconds", "Prefix index look-ups that were answered", [], FAST_BUCKETS
        )
        self._index_mode = m.gauge("kv_index_mode", "1 for the current source of hits", ["mode"])
        # Only for the dashboard: pods export the times of their hand-offs.
        self.exposed_hand_off = UnlabeledHistogram(
            "exposed", "Seconds from a prompt's last chunk to its commit", LATENCY_BUCKETS
        )
        self.set_index_mode("hash")

    def count_adapter(self, name: str) -> None:
        """Counts a request with an adapter. The first MAX_ADAPTER_LABELS names are labels, later ones are "other"."""
        if name not in self._adapters and len(self._adapters) < MAX_ADAPTER_LABELS:
            self._adapters.add(name)
        self._adapter_requests.labels(name if name in self._adapters else "other").inc()

    def watch_queue(self, waiting: Callable[[], Iterable[tuple[tuple[str, ...], float]]]) -> None:
        """Exports the queue lengths: `waiting` returns ((model,), requests in its queue) for every model."""
        self.base.sampled_gauge("admission_waiting", "Requests in the gateway's queue", waiting, ["model"])

    def watch_tiers(self, waiting: Callable[[], Iterable[tuple[tuple[str, ...], float]]]) -> None:
        """Exports the queue lengths of tiers: `waiting` returns ((model, tier), requests) for every combination."""
        self.base.sampled_gauge("tier_waiting", "Requests in the gateway's queue by tier", waiting, ["model", "tier"])

    def watch_ready(self, ready: Callable[[], bool]) -> None:
        """Exports the readiness: `ready` returns whether requests can be answered."""
        self.base.sampled_gauge("gateway_ready", "1 while requests can be answered", lambda: [((), float(ready()))])

    def watch_pods(self, pods: Callable[[], Iterable[tuple[tuple[str, ...], float]]]) -> None:
        """Exports the numbers of pods: `pods` returns ((model, role, state), number of pods) for every combination."""
        self.base.sampled_gauge(
            "pods", "Pods known to this gateway by model, role and state", pods, ["model", "role", "state"]
        )

    def watch_fitness(
        self,
        breakers: Callable[[], Iterable[tuple[tuple[str, ...], float]]],
        slow: Callable[[], Iterable[tuple[tuple[str, ...], float]]],
    ) -> None:
        """Exports numbers of pods: `breakers` by (model, role, state of the breaker), `slow` by (model, role)."""
        labels = ["model", "role"]
        self.base.sampled_gauge("pod_breakers", "Pods by the state of their breaker", breakers, [*labels, "state"])
        self.base.sampled_gauge("slow_pods", "Pods that are much slower than their peers", slow, labels)

    def set_index_mode(self, mode: str) -> None:
        """Sets the source of hits: redis (the prefix index), local (this gateway's memory) or hash (rendezvous)."""
        self.current_index_mode = mode
        for name in ("redis", "local", "hash"):
            self._index_mode.labels(name).set(name == mode)

    def exposition(self, accept: str, may_see: Callable[[str], bool]) -> bytes:
        """Returns the metrics in the format that the Accept header asks for, as Metrics.exposition.

        Samples with the label `tenant` are left out unless `may_see` allows their tenant.
        """
        encode, _ = choose_encoder(accept)
        return encode(_VisibleMetrics(self.base.registry, may_see))

    def totals(self) -> Mapping[str, float]:
        """Returns the counters of the dashboard, and the number of running requests."""
        ended = _values(self.requests)
        return {
            "requests": sum(value for _, value in ended),
            "failed": sum(value for labels, value in ended if labels["outcome"] in SERVER_FAULT_OUTCOMES),
            "running": next(iter(self.running.collect())).samples[0].value,
            "prompt_tokens": _total(self.prompt_tokens),
            "output_tokens": _total(self.output_tokens),
            "routed_tokens": _total(self.lookup_tokens),
            "predicted_hits": _total(self.predicted_hits),
            "actual_hits": _total(self.actual_hits),
            "rejections": _total(self.rejections),
            "retries": _total(self.retries),
        }

    def latencies(self) -> Mapping[str, Metric]:
        """Returns the histograms of the dashboard."""
        histograms = {
            "ttft": self.ttft,
            "itl": self.itl,
            "e2e": self.e2e,
            "queue": self.prefill_queue,
            "exposed": self.exposed_hand_off,
        }
        return {name: next(iter(histogram.collect())) for name, histogram in histograms.items()}


class _VisibleMetrics(CollectorRegistry):
    """The metrics of a registry, without the samples of tenants that the caller may not see."""

    def __init__(self, registry: CollectorRegistry, may_see: Callable[[str], bool]) -> None:
        super().__init__()
        self._of, self._may_see = registry, may_see

    def collect(self) -> Iterable[Metric]:
        for family in self._of.collect():
            family.samples = [
                s for s in family.samples if "tenant" not in s.labels or self._may_see(s.labels["tenant"])
            ]
            yield family


def _values(counter: Counter) -> list[tuple[Mapping[str, str], float]]:
    samples = [sample for metric in counter.collect() for sample in metric.samples]
    return [(sample.labels, sample.value) for sample in samples if sample.name.endswith("_total")]


def _total(counter: Counter) -> float:
    return sum(value for _, value in _values(counter))
