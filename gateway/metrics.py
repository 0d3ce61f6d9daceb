"""What the gateway counts, on a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from common.telemetry import Metrics

FAST_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 1.0)
TOKEN_BUCKETS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)


class GatewayMetrics:
    """Metrics of one gateway; exposed by /metrics."""

    def __init__(self) -> None:
        self.base = m = Metrics()
        self.requests = m.counter("requests", "Requests that ended, by endpoint and outcome", ["endpoint", "outcome"])
        self.running = m.gauge("requests_running", "Requests being served")
        self.ttft = m.histogram("ttft_seconds", "Arrival to the first token, per choice")
        self.itl = m.tally("itl_seconds", "Time between tokens, per step of a choice")
        self.e2e = m.histogram("e2e_seconds", "Arrival to the last token, per choice")
        self.queue = m.histogram("queue_seconds", "Arrival at a prefill pod to its first chunk")
        self.prompt_tokens = m.counter("prompt_tokens", "Prompt tokens of answered requests")
        self.output_tokens = m.counter("output_tokens", "Tokens generated")
        self.aborts = m.counter("aborts", "Requests ended before the pods were done", ["reason"])
        self.retries = m.counter("retries", "Further attempts after a failure", ["kind"])
        self.rejections = m.counter("rejections", "Requests refused for load or by a limit", ["by"])
        self.admission_wait = m.histogram("admission_wait_seconds", "Time in the gateway's queue, of those that waited")
        self.limits_alone = m.counter("limits_without_redis", "Requests held against this gateway's own counts")
        self.tenant_tokens = m.counter("tenant_tokens", "Tokens of requests with an API key", ["tenant", "kind"])
        self.routing = m.histogram("routing_seconds", "What routing adds to a request", ["step"], FAST_BUCKETS)
        self.predicted_hits = m.counter("prefix_hit_tokens_predicted", "Cached prompt tokens that routing expected")
        self.actual_hits = m.counter("prefix_hit_tokens_actual", "Cached prompt tokens that pods found")
        self.hit_error = m.histogram(
            "prefix_hit_error_tokens",
            "Cached prompt tokens of a request, expected and found: the difference",
            buckets=TOKEN_BUCKETS,
        )
        self.duplicates = m.counter("duplicate_tokens", "Tokens that came twice and were dropped")
        self.index_lookup = m.histogram(
            "kv_index_lookup_seconds", "Prefix index look-ups that were answered", [], FAST_BUCKETS
        )
        self._index_mode = m.gauge("kv_index_mode", "1 for how requests are routed now", ["mode"])
        self.index_mode("hash")

    def watch_queue(self, waiting: Callable[[], Iterable[tuple[tuple[str, ...], float]]]) -> None:
        """waiting: ((model,), requests in its queue) of every model."""
        self.base.sampled_gauge("admission_waiting", "Requests in the gateway's queue", waiting, ["model"])

    def hits(self, predicted: int, actual: int) -> None:
        """Cached tokens of one prompt."""
        self.predicted_hits.inc(predicted)
        self.actual_hits.inc(actual)
        self.hit_error.observe(abs(predicted - actual))

    def index_mode(self, mode: str) -> None:
        """redis (the index answers), local (this gateway's own memory) or hash (rendezvous hashing, own counts)."""
        for name in ("redis", "local", "hash"):
            self._index_mode.labels(name).set(name == mode)
