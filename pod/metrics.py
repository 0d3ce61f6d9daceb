"""Metrics of a pod: step times, batch sizes, tokens, KV blocks, transfers, outcomes; and their form on the wire.

To add a metric: declare it in PodMetrics and add its row to the table in docs/operations.md.
tests/integration/test_metric_names.py compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict

from common.pb import transfer_pb2
from common.settings.configs import MAX_DRAFTS
from common.telemetry import COUNT_BUCKETS, Metrics, MetricSample
from common.types import PodLoad
from engine.engine import Engine
from engine.schedule.outputs import SequenceOutput, StepResult
from engine.speculation.stats import SpeculationStats
from kv_transfer.messages import TransferReport
from kv_transfer.node import TransferNode
from pod.gpu import GpuReading

#: Seconds. KV is pushed during the prefill, so the wait at its end is a few milliseconds.
HAND_OFF_BUCKETS = tuple(
    ms / 1000 for ms in (0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 100, 250, 500, 1000, 5000, 30000)
)

Read = Callable[[], Iterable[MetricSample]]


class PodMetrics:
    """Metrics of one pod, for any role.

    Args:
        load: this pod's load, read at each scrape.
        computed_tokens: prompt tokens computed, by reason.
    """

    def __init__(
        self, engine: Engine, node: TransferNode, load: Callable[[], PodLoad], computed_tokens: Mapping[str, int]
    ) -> None:
        m = self.metrics = Metrics()
        m.add_process_metrics()
        self.generated_tokens = 0
        self._engine = engine
        self._step_seconds = m.histogram("step_seconds", "Seconds of one engine step.", ["kind"])
        self._batch_size = m.histogram("batch_size", "Sequences in one engine step.", buckets=COUNT_BUCKETS)
        self._ended = m.counter("sequences_ended", "Sequences that ended on this pod, by reason.", ["outcome"])
        self._cached_tokens = m.counter(
            "prefix_hit_tokens", "Prompt tokens found in this pod's prefix cache, by tier.", ["tier"]
        )
        self.reserved = m.counter("reserve", "Outcomes of Reserve.", ["outcome"])
        self.decided = m.counter(
            "local_prefill_decisions", "Who computes a prompt, local or remote, and why.", ["outcome", "reason"]
        )
        self.pulls = m.counter(
            "pulls", "Hints that another pod holds a prefix, and what came of it.", ["outcome", "reason"]
        )
        self.pulls_asked = m.counter("pulls_asked", "Pulls that a holder was asked for.")
        self.pulled_blocks = m.counter("pulled_blocks", "KV blocks that came from other pods' caches.")
        self.pull_seconds = m.histogram("pull_seconds", "Seconds of pulls that succeeded.")
        self.pull_predicted = m.histogram("pull_predicted_seconds", "Seconds that routing expected of the same pulls.")
        self.lent_blocks = m.counter("lent_blocks", "KV blocks held for other pods that asked for them.")
        self._hand_offs = m.counter("hand_offs", "KV hand-offs that this pod completed as the sender.", ["transport"])
        self._transfer_bytes = m.counter("transfer_bytes", "KV bytes pushed.", ["transport"])
        self._transfer_seconds = m.histogram("transfer_seconds", "Seconds from the first push to the commit.")
        self._exposed_seconds = m.histogram(
            "exposed_hand_off_seconds", "Seconds from the last chunk to the commit.", buckets=HAND_OFF_BUCKETS
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
        self.intact = m.gauge("kv_pool_intact", "1 while free + cached + leased + quarantined is the pool.")
        self.intact.set(1)
        m.gauge("kv_block_bytes", "Bytes of one KV block.").set(engine.layout.block_bytes)
        m.sampled_counter("generated_tokens", "Tokens sampled on this pod.", _one(lambda: self.generated_tokens))
        m.sampled_counter(
            "prompt_tokens_computed", "Prompt tokens computed, by reason.", _by(lambda: computed_tokens), ["reason"]
        )
        self._add_work_metrics(load)
        self._add_speculation_metrics()
        self._add_host_tier_metrics(lambda: node.stats().damaged_transfers)
        self._add_transfer_metrics(node)

    def set_pod_info(self, role: str, model: str, version: str) -> None:
        """Sets role, model and version of this pod."""
        info = self.metrics.gauge("pod_info", "1; who this pod is.", ["role", "model", "version"])
        info.labels(role, model, version).set(1)

    # -- metrics that are read at each scrape -------------------------------------------------------------------------

    def _add_work_metrics(self, load: Callable[[], PodLoad]) -> None:
        engine, counter, gauge = self._engine, self.metrics.sampled_counter, self.metrics.sampled_gauge

        def sequences() -> dict[str, float]:
            now = load()
            return {"running": now.running, "waiting": now.waiting, "reserved": now.reserved}

        def resumed() -> dict[str, float]:
            stats = engine.scheduler.stats()
            return {"resumed": stats.fully_restored, "recomputed": stats.partly_recomputed}

        gauge("kv_blocks", "KV blocks by state.", _by(lambda: asdict(engine.pool.counts())), ["state"])
        gauge("queued_prompt_tokens", "Prompt tokens that wait for computing.", _one(lambda: load().queued_tokens))
        gauge(
            "sequences",
            "Sequences that run, wait in the engine, or whose KV is still to come.",
            _by(sequences),
            ["state"],
        )
        counter(
            "preemptions",
            "Sequences that lost their KV because others needed the room.",
            _one(lambda: engine.scheduler.stats().preemptions),
        )
        counter(
            "preempted_sequences",
            "Preempted sequences that went on, with all the KV that they had or not.",
            _by(resumed),
            ["outcome"],
        )
        counter(
            "out_of_memory", "Engine steps that failed for want of memory.", _one(lambda: engine.counters.out_of_memory)
        )

    def _add_speculation_metrics(self) -> None:
        def read(value: Callable[[SpeculationStats], float]) -> Read:
            return lambda: [] if (stats := self.speculation()) is None else [((stats.proposer,), value(stats))]

        self.metrics.sampled_counter(
            "speculation_failures",
            "Failures of the proposer, which cost its drafts.",
            read(lambda stats: stats.failures),
            ["proposer"],
        )
        self.metrics.sampled_gauge(
            "speculation_useless",
            "1 while drafts are made and none was right of late.",
            read(lambda stats: stats.is_useless),
            ["proposer"],
        )

    def speculation(self) -> SpeculationStats | None:
        """Returns the counts of drafts; None without speculative decoding."""
        speculator = self._engine.speculator
        return None if speculator is None else speculator.stats

    def _add_host_tier_metrics(self, damaged_transfers: Callable[[], int]) -> None:
        host, block_bytes = self._engine.pool.host_stats, self._engine.layout.block_bytes
        counter = self.metrics.sampled_counter

        def blocks() -> dict[str, float]:
            stats = host()
            return {} if stats is None else {"used": stats.used, "free": stats.host_blocks - stats.used}

        def moved() -> dict[str, float]:
            stats = host()
            if stats is None:
                return {}
            return {"to_host": stats.saved * block_bytes, "to_device": stats.loaded * block_bytes}

        def damaged() -> dict[str, float]:
            stats = host()
            return {"transfer": damaged_transfers(), "host": 0 if stats is None else stats.damaged}

        def dropped() -> list[MetricSample]:
            stats = host()
            return [] if stats is None else [((), stats.dropped)]

        self.metrics.sampled_gauge(
            "host_blocks", "KV blocks in host memory, and room for more.", _by(blocks), ["state"]
        )
        counter("host_moved_bytes", "KV bytes copied to host memory and back.", _by(moved), ["direction"])
        counter("host_forgotten_blocks", "KV blocks that host memory had no room for any more.", dropped)
        counter(
            "damaged_kv",
            "Batches of KV blocks that failed their checksums (with --checksums).",
            _by(damaged),
            ["where"],
        )

    def _add_transfer_metrics(self, node: TransferNode) -> None:
        stats, counter, gauge = node.stats, self.metrics.sampled_counter, self.metrics.sampled_gauge

        def transfers() -> dict[str, float]:
            now = stats()
            return {"out": now.open_outgoing, "in": now.open_incoming}

        def pairs(value: Callable[[transfer_pb2.Pair], float]) -> Read:
            return lambda: [((pair.pod,), value(pair)) for pair in node.pair_stats()]

        gauge(
            "transfer_probe_bytes_per_second",
            "What the probe of a connection moved, by what carried it.",
            lambda: [((p.pod, p.transport, p.transport_source), p.gb_s * 1e9) for p in stats().peers],
            ["peer", "transport", "source"],
        )
        gauge("transfers_open", "Transfers under way, by direction.", _by(transfers), ["direction"])
        counter(
            "transfers_received", "Transfers that this pod received whole.", _one(lambda: stats().received_transfers)
        )
        counter(
            "transfers_failed",
            "Transfers out of this pod that ended by an error.",
            _one(lambda: stats().failed_transfers),
        )
        counter(
            "transfer_messages_dropped",
            "Messages of peers that did not fit, by reason.",
            _by(lambda: stats().dropped),
            ["reason"],
        )
        counters: tuple[tuple[str, str, Callable[[transfer_pb2.Pair], float]], ...] = (
            ("pair_hand_offs", "Hand-offs completed to another pod.", lambda p: p.transfers),
            ("pair_pulls", "Pulls served to another pod.", lambda p: p.pulls),
            ("pair_blocks", "KV blocks moved to another pod.", lambda p: p.blocks),
            ("pair_bytes", "KV bytes moved to another pod.", lambda p: p.bytes),
            ("pair_busy_seconds", "Seconds in which KV was on its way to another pod.", lambda p: p.busy_s),
            ("pair_exposed_seconds", "Seconds from last chunks to commits, by receiver.", lambda p: p.exposed_s),
            ("pair_failures", "Transfers to another pod that failed.", lambda p: p.failures),
        )
        for name, help_text, value in counters:
            counter(name, help_text, pairs(value), ["peer"])
        gauge(
            "pair_bytes_per_second",
            "Rate of KV written to another pod, lately; before any, of the probe.",
            lambda: [((p.pod, p.transport), p.gb_s * 1e9) for p in node.pair_stats()],
            ["peer", "transport"],
        )

    # -- metrics that are counted -------------------------------------------------------------------------------------

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
        stats = self.speculation()
        assert stats is not None
        for place in range(output.num_drafts):
            outcome = "accepted" if place < output.num_accepted else "rejected"
            self._drafts.labels(stats.proposer, str(place + 1), outcome).inc()
        self._acceptance.labels(stats.proposer).observe(1 + output.num_accepted)

    def observe_hand_off(self, report: TransferReport, seconds: float, exemplar: dict[str, str] | None) -> None:
        """Counts a completed hand-off, `seconds` after its first push. exemplar: labels with its trace id."""
        self._hand_offs.labels(report.transport).inc()
        self._transfer_bytes.labels(report.transport).inc(report.bytes)
        self._transfer_seconds.observe(seconds, exemplar)
        self._exposed_seconds.observe(report.exposed_s, exemplar)

    def activity(self, gpu: GpuReading | None) -> transfer_pb2.Activity:
        """Returns the part of Info that dashboards show. gpu: None if unknown."""
        activity = transfer_pb2.Activity(
            generated_tokens=self.generated_tokens,
            preemptions=self._engine.scheduler.stats().preemptions,
            gpu=None if gpu is None else transfer_pb2.Gpu(**asdict(gpu)),
        )
        if (stats := self.speculation()) is not None:
            activity.drafts.proposer, activity.drafts.useless = stats.proposer, stats.is_useless
            activity.drafts.chains, activity.drafts.proposed = stats.chains, stats.proposed
            activity.drafts.accepted = stats.accepted
        return activity


def _one(read: Callable[[], float]) -> Read:
    """Returns the reader of a metric without labels."""
    return lambda: [((), read())]


def _by(read: Callable[[], Mapping[str, float]]) -> Read:
    """Returns the reader of a metric with one label. `read` returns the values by label."""
    return lambda: [((label,), value) for label, value in read().items()]
