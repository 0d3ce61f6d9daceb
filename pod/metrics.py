"""Metrics of a pod: step times, batch sizes, tokens, KV blocks, transfers, outcomes; and their form on the wire.

To add a metric: declare it in PodMetrics, or in an add_..._metrics function if it is read at each scrape, and add its
row to the table in docs/operations.md. tests/integration/test_metric_names.py compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from common.pb import transfer_pb2
from common.telemetry import COUNT_BUCKETS, Metrics, MetricSample
from common.types import PodLoad, PoolCounts
from engine.config import MAX_DRAFTS
from engine.engine import Engine
from engine.kv.host_tier import HostTierStats
from engine.schedule.outputs import SequenceOutput, StepResult
from engine.schedule.scheduler import SchedulerStats
from engine.speculation.stats import SpeculationStats
from kv_transfer.messages import PairStats, PeerStats, TransferReport, TransferStats
from pod.gpu import GpuReading

#: Seconds. KV is pushed during the prefill, so the wait at its end is a few milliseconds.
HAND_OFF_BUCKETS = (
    0.0005,
    0.001,
    0.002,
    0.003,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    5.0,
    30.0,
)


class PodMetrics:
    """Metrics of one pod, for any role.

    Args (read at each scrape):
        blocks: KV blocks by state.
        tokens: prompt tokens computed, by reason.
        speculation: statistics of speculative decoding; None without it.
        peers: connections that this pod writes over.
    """

    def __init__(
        self,
        blocks: Callable[[], PoolCounts],
        tokens: Callable[[], Iterable[MetricSample]],
        speculation: Callable[[], SpeculationStats | None],
        peers: Callable[[], Iterable[PeerStats]],
    ) -> None:
        self.metrics = Metrics()
        m = self.metrics
        m.add_process_metrics()
        self.generated_tokens = 0
        self._step_seconds = m.histogram("step_seconds", "Seconds of one engine step.", ["kind"])
        self._batch_size = m.histogram("batch_size", "Sequences in one engine step.", buckets=COUNT_BUCKETS)
        m.sampled_counter("generated_tokens", "Tokens sampled on this pod.", lambda: [((), self.generated_tokens)])
        self._ended = m.counter("sequences_ended", "Sequences that ended on this pod, by reason.", ["outcome"])
        self._cached_tokens = m.counter(
            "prefix_hit_tokens", "Prompt tokens found in this pod's prefix cache, by tier.", ["tier"]
        )
        self.reserved = m.counter("reserve", "Outcomes of Reserve.", ["outcome"])
        self._decided = m.counter(
            "local_prefill_decisions", "Who computes a prompt, local or remote, and why.", ["outcome", "reason"]
        )
        self._pulls = m.counter(
            "pulls", "Hints that another pod holds a prefix, and what came of it.", ["outcome", "reason"]
        )
        self.pulls_asked = m.counter("pulls_asked", "Pulls that a holder was asked for.")
        self.pulled_blocks = m.counter("pulled_blocks", "KV blocks that came from other pods' caches.")
        self._pull_seconds = m.histogram("pull_seconds", "Seconds of pulls that succeeded.")
        self._pull_predicted = m.histogram("pull_predicted_seconds", "Seconds that routing expected of the same pulls.")
        self.lent_blocks = m.counter("lent_blocks", "KV blocks held for other pods that asked for them.")
        self._hand_offs = m.counter("hand_offs", "KV hand-offs that this pod completed as the sender.", ["transport"])
        self._transfer_bytes = m.counter("transfer_bytes", "KV bytes pushed.", ["transport"])
        self._transfer_seconds = m.histogram("transfer_seconds", "Seconds from the first push to the commit.")
        self._exposed_seconds = m.histogram(
            "exposed_hand_off_seconds", "Seconds from the last chunk to the commit.", buckets=HAND_OFF_BUCKETS
        )
        m.sampled_gauge(
            "transfer_probe_bytes_per_second",
            "What the probe of a connection moved, by what carried it.",
            lambda: [((p.pod, p.transport, p.transport_source), p.gb_s * 1e9) for p in peers()],
            ["peer", "transport", "source"],
        )
        self._drafts = m.counter(
            "speculation_tokens", "Drafts verified, by proposer, place and outcome.", ["proposer", "place", "outcome"]
        )
        self._acceptance = m.histogram(
            "speculation_acceptance_length",
            "Tokens of one sequence's step with drafts.",
            ["proposer"],
            buckets=tuple(range(1, MAX_DRAFTS + 2)),
        )
        m.sampled_counter(
            "speculation_failures",
            "Failures of the proposer, which cost its drafts.",
            lambda: _failed(speculation()),
            ["proposer"],
        )
        m.sampled_gauge(
            "speculation_useless",
            "1 while drafts are made and none was right of late.",
            lambda: _useless(speculation()),
            ["proposer"],
        )
        self._speculation = speculation
        self.intact = m.gauge("kv_pool_intact", "1 while free + cached + leased + quarantined is the pool.")
        self.intact.set(1)
        m.sampled_gauge("kv_blocks", "KV blocks by state.", lambda: _by_state(blocks()), ["state"])
        m.sampled_counter("prompt_tokens_computed", "Prompt tokens computed, by reason.", tokens, ["reason"])

    def set_pod_info(self, role: str, model: str, version: str) -> None:
        """Sets role, model and version of this pod."""
        info = self.metrics.gauge("pod_info", "1; who this pod is.", ["role", "model", "version"])
        info.labels(role, model, version).set(1)

    def add_work_metrics(self, load: Callable[[], PodLoad], engine: Engine) -> None:
        """Declares metrics of waiting and running work and of lack of memory. They are read at each scrape."""
        m = self.metrics
        m.sampled_gauge("queued_prompt_tokens", "Prompt tokens that wait for computing.", lambda: _queued(load()))
        m.sampled_gauge(
            "sequences",
            "Sequences that run, wait in the engine, or whose KV is still to come.",
            lambda: _sequences(load()),
            ["state"],
        )
        m.sampled_counter(
            "preemptions",
            "Sequences that lost their KV because others needed the room.",
            lambda: [((), engine.scheduler.stats().preemptions)],
        )
        m.sampled_counter(
            "out_of_memory",
            "Engine steps that failed for want of memory.",
            lambda: [((), engine.counters.out_of_memory)],
        )
        m.gauge("kv_block_bytes", "Bytes of one KV block.").set(engine.layout.block_bytes)

    def add_transfer_metrics(self, stats: Callable[[], TransferStats]) -> None:
        """Declares metrics of transfers in both directions. They are read at each scrape."""
        m = self.metrics
        m.sampled_gauge(
            "transfers_open",
            "Transfers under way, by direction.",
            lambda: _open(stats()),
            ["direction"],
        )
        m.sampled_counter(
            "transfers_received",
            "Transfers that this pod received whole.",
            lambda: [((), stats().received_transfers)],
        )
        m.sampled_counter(
            "transfers_failed",
            "Transfers out of this pod that ended by an error.",
            lambda: [((), stats().failed_transfers)],
        )
        m.sampled_counter(
            "transfer_messages_dropped",
            "Messages of peers that did not fit, by reason.",
            lambda: [((reason,), count) for reason, count in stats().dropped.items()],
            ["reason"],
        )

    def add_pair_metrics(self, pairs: Callable[[], Iterable[PairStats]]) -> None:
        """Declares metrics of this pod's traffic with every other pod. They are read at each scrape."""
        m = self.metrics
        counters: tuple[tuple[str, str, Callable[[PairStats], float]], ...] = (
            ("pair_hand_offs", "Hand-offs completed to another pod.", lambda p: p.transfers),
            ("pair_pulls", "Pulls served to another pod.", lambda p: p.pulls),
            ("pair_blocks", "KV blocks moved to another pod.", lambda p: p.blocks),
            ("pair_bytes", "KV bytes moved to another pod.", lambda p: p.bytes),
            ("pair_busy_seconds", "Seconds in which KV was on its way to another pod.", lambda p: p.busy_s),
            ("pair_exposed_seconds", "Seconds from last chunks to commits, by receiver.", lambda p: p.exposed_s),
            ("pair_failures", "Transfers to another pod that failed.", lambda p: p.failures),
        )
        for name, help_text, read in counters:
            m.sampled_counter(name, help_text, lambda read=read: [((p.pod,), read(p)) for p in pairs()], ["peer"])  # type: ignore[misc]
        m.sampled_gauge(
            "pair_bytes_per_second",
            "Rate of KV written to another pod, lately; before any, of the probe.",
            lambda: [((p.pod, p.transport), p.gb_s * 1e9) for p in pairs()],
            ["peer", "transport"],
        )

    def count_pull(self, outcome: str, reason: str) -> None:
        """Counts a pull hint. outcome: done, skipped, refused or failed."""
        self._pulls.labels(outcome, reason).inc()

    def observe_pull(self, seconds: float, *, predicted_s: float) -> None:
        """Records a pull that succeeded. predicted_s: the seconds that routing expected."""
        self._pull_seconds.observe(seconds)
        self._pull_predicted.observe(predicted_s)

    def count_decision(self, *, local: bool, reason: str) -> None:
        """Counts an admitted request. local: this pod computes its prompt."""
        outcome = "local" if local else "remote"
        self.reserved.labels(outcome).inc()
        self._decided.labels(outcome, reason).inc()

    def observe_step(self, result: StepResult) -> None:
        """Counts one engine step. Engine thread."""
        if result.seconds:
            prompt, decode = result.num_prompt_tokens + result.num_recomputed_tokens, result.num_decode_tokens
            kind = "mixed" if prompt and decode else "prefill" if prompt else "decode"
            self._step_seconds.labels(kind).observe(result.seconds)
            self._batch_size.observe(len(result.outputs))
        for output in result.outputs:
            self.generated_tokens += len(output.tokens)
            if output.num_drafts:
                self._count_drafts(output)
            if output.ended:
                self._ended.labels("handed_off" if output.finish_reason is None else str(output.finish_reason)).inc()
                self._cached_tokens.labels("device").inc(output.seq.cached_tokens - output.seq.host_tokens)
                self._cached_tokens.labels("host").inc(output.seq.host_tokens)

    def _count_drafts(self, output: SequenceOutput) -> None:
        stats = self._speculation()
        assert stats is not None
        for place in range(output.num_drafts):
            outcome = "accepted" if place < output.num_accepted else "rejected"
            self._drafts.labels(stats.proposer, str(place + 1), outcome).inc()
        self._acceptance.labels(stats.proposer).observe(1 + output.num_accepted)

    def observe_hand_off(self, report: TransferReport, seconds: float, exemplar: dict[str, str] | None = None) -> None:
        """Counts one completed hand-off.

        Args:
            seconds: time since its first push.
            exemplar: labels with its trace id.
        """
        self._hand_offs.labels(report.transport).inc()
        self._transfer_bytes.labels(report.transport).inc(report.bytes)
        self._transfer_seconds.observe(seconds, exemplar)
        self._exposed_seconds.observe(report.exposed_s, exemplar)


def _queued(load: PodLoad) -> list[MetricSample]:
    return [((), load.queued_tokens)]


def _sequences(load: PodLoad) -> list[MetricSample]:
    return [(("running",), load.running), (("waiting",), load.waiting), (("reserved",), load.reserved)]


def _open(stats: TransferStats) -> list[MetricSample]:
    return [(("out",), stats.open_outgoing), (("in",), stats.open_incoming)]


def _failed(stats: SpeculationStats | None) -> list[MetricSample]:
    return [] if stats is None else [((stats.proposer,), stats.failures)]


def _useless(stats: SpeculationStats | None) -> list[MetricSample]:
    return [] if stats is None else [((stats.proposer,), float(stats.is_useless))]


def _by_state(counts: PoolCounts) -> list[MetricSample]:
    return [
        (("free",), counts.free),
        (("cached",), counts.cached),
        (("leased",), counts.leased),
        (("quarantined",), counts.quarantined),
    ]


def activity_to_pb(
    generated_tokens: int, preemptions: int, drafts: SpeculationStats | None, gpu: GpuReading | None
) -> transfer_pb2.Activity:
    """Converts to the answer of Info.

    Args:
        drafts: None without speculative decoding.
        gpu: None if unknown.
    """
    activity = transfer_pb2.Activity(generated_tokens=generated_tokens, preemptions=preemptions)
    if drafts is not None:
        activity.drafts.CopyFrom(
            transfer_pb2.Drafts(
                proposer=drafts.proposer,
                chains=drafts.chains,
                proposed=drafts.proposed,
                accepted=drafts.accepted,
                useless=drafts.is_useless,
            )
        )
    if gpu is not None:
        activity.gpu.CopyFrom(
            transfer_pb2.Gpu(utilization=gpu.utilization, memory_used=gpu.memory_used, memory_total=gpu.memory_total)
        )
    return activity


def add_host_tier_metrics(
    metrics: Metrics,
    host: Callable[[], HostTierStats | None],
    scheduler: Callable[[], SchedulerStats],
    block_bytes: int,
    *,
    damaged_transfers: Callable[[], int],
) -> None:
    """Declares metrics of the host tier, of preemptions and of damage.

    Args:
        host: returns None without a host tier.
    """

    def blocks() -> list[MetricSample]:
        stats = host()
        return [] if stats is None else [(("used",), stats.used), (("free",), stats.host_blocks - stats.used)]

    def moved() -> list[MetricSample]:
        stats = host()
        if stats is None:
            return []
        return [(("to_host",), stats.saved * block_bytes), (("to_device",), stats.loaded * block_bytes)]

    def dropped() -> list[MetricSample]:
        stats = host()
        return [] if stats is None else [((), stats.dropped)]

    def preempted() -> list[MetricSample]:
        stats = scheduler()
        return [(("resumed",), stats.fully_restored), (("recomputed",), stats.partly_recomputed)]

    def damaged() -> list[MetricSample]:
        stats = host()
        return [(("transfer",), damaged_transfers()), (("host",), 0 if stats is None else stats.damaged)]

    metrics.sampled_gauge("host_blocks", "KV blocks in host memory, and room for more.", blocks, ["state"])
    metrics.sampled_counter("host_moved_bytes", "KV bytes copied to host memory and back.", moved, ["direction"])
    metrics.sampled_counter("host_forgotten_blocks", "KV blocks that host memory had no room for any more.", dropped)
    metrics.sampled_counter(
        "preempted_sequences",
        "Preempted sequences that went on, with all the KV that they had or not.",
        preempted,
        ["outcome"],
    )
    metrics.sampled_counter(
        "damaged_kv", "Batches of KV blocks that failed their checksums (with --checksums).", damaged, ["where"]
    )
