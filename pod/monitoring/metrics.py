"""Metrics of a pod: step times, batch sizes, tokens, KV blocks, transfers, outcomes; and their form on the wire.

To add a metric: declare it in PodMetrics and add its row to the table in docs/operations.md.
tests/integration/test_metric_names.py compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import TypeVar

from common.pb import transfer_pb2
from common.settings.engine import MAX_DRAFTS
from common.telemetry import COUNT_BUCKETS, Metrics, MetricSample
from common.types import PodLoad, Role
from engine.engine import Engine
from engine.kv.tiers.file_tier import FileTier, FileTierStats
from engine.schedule.outputs import SequenceOutput, StepResult
from engine.speculation.speculator import SpeculationStats
from kv_transfer.messages import TransferReport
from kv_transfer.node import TransferNode
from pod.adapters import PodAdapters
from pod.monitoring.gpu import GpuReading
from pod.monitoring.watch import LOOPS
from pod.role import RoleSwitchReport

#: Seconds. KV is pushed during the prefill, so the wait at its end is a few milliseconds.
HAND_OFF_BUCKETS = tuple(
    ms / 1000 for ms in (0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 100, 250, 500, 1000, 5000, 30000)
)

Read = Callable[[], Iterable[MetricSample]]
_T = TypeVar("_T")


class PodMetrics:
    """Metrics of one pod, for any role. computed_tokens: prompt tokens computed, by reason."""

    def __init__(
        self,
        engine: Engine,
        node: TransferNode,
        load: Callable[[], PodLoad],
        computed_tokens: Mapping[str, int],
        adapters: PodAdapters,
    ) -> None:
        m = self.metrics = Metrics()
        m.add_process_metrics()
        self.stuck_loops = m.add_stuck_loops(LOOPS)
        self.generated_tokens = 0
        self._pod_info = m.gauge("pod_info", "1; who this pod is.", ["role", "model", "version"])
        self._role_switches = m.counter("role_switches", "Changes of the pod's role.", ["former", "role"])
        text = "Seconds from the last request of the former role until the pod was ready in the new one."
        self._role_ready_seconds = m.histogram("role_ready_seconds", text)
        self._engine = engine
        self._step_seconds = m.histogram("step_seconds", "Seconds of one engine step.", ["kind"])
        self._batch_size = m.histogram("batch_size", "Sequences in one engine step.", buckets=COUNT_BUCKETS)
        self._ended = m.counter("sequences_ended", "Sequences that ended on this pod, by reason.", ["outcome"])
        text = "Prompt tokens found in this pod's prefix cache, by tier."
        self._cached_tokens = m.counter("prefix_hit_tokens", text, ["tier"])
        self.reserved = m.counter("reserve", "Outcomes of Reserve.", ["outcome"])
        text, labels = "Who computes a prompt, local or remote, and why.", ["outcome", "reason"]
        self.decided = m.counter("local_prefill_decisions", text, labels)
        self.pulls = m.counter("pulls", "Hints that another pod holds a prefix, and what came of it.", labels)
        self.pulls_asked = m.counter("pulls_asked", "Pulls that a holder was asked for.")
        self.pulled_blocks = m.counter("pulled_blocks", "KV blocks that came from other pods' caches.")
        self.pull_seconds = m.histogram("pull_seconds", "Seconds of pulls that succeeded.")
        self.pull_predicted = m.histogram("pull_predicted_seconds", "Seconds that routing expected of the same pulls.")
        self.warm_up_blocks = m.gauge("warm_up_blocks", "KV blocks that the pod pulled before it was ready.")
        self.lent_blocks = m.counter("lent_blocks", "KV blocks held for other pods that asked for them.")
        self._hand_offs = m.counter("hand_offs", "KV hand-offs that this pod completed as the sender.", ["transport"])
        self._transfer_bytes = m.counter("transfer_bytes", "KV bytes pushed.", ["transport"])
        self._transfer_seconds = m.histogram("transfer_seconds", "Seconds from the first push to the commit.")
        text = "Seconds from the last chunk to the commit."
        self._exposed_seconds = m.histogram("exposed_hand_off_seconds", text, buckets=HAND_OFF_BUCKETS)
        text, labels = "Drafts verified, by proposer, place and outcome.", ["proposer", "place", "outcome"]
        self._drafts = m.counter("speculation_tokens", text, labels)
        text, lengths = "Tokens of one sequence's step with drafts.", tuple(range(1, MAX_DRAFTS + 2))
        self._acceptance = m.histogram("speculation_acceptance_length", text, ["proposer"], buckets=lengths)
        self.intact = m.gauge("kv_pool_intact", "1 while free + cached + leased + quarantined is the pool.")
        self.intact.set(1)
        m.gauge("kv_block_bytes", "Bytes of one KV block.").set(engine.layout.block_bytes)
        m.sampled_counter("generated_tokens", "Tokens sampled on this pod.", _one(lambda: self.generated_tokens))
        computed = _by(lambda: computed_tokens, dict)
        m.sampled_counter("prompt_tokens_computed", "Prompt tokens computed, by reason.", computed, ["reason"])
        self.index_registered: Callable[[], bool | None] = lambda: None  #: None without a prefix index.
        text = "1 while the prefix index has this pod and all of its blocks."
        m.sampled_gauge("index_registered", text, _one(lambda: self.index_registered()))  # noqa: PLW0108 - it is set later
        self._add_work_metrics(load)
        self._add_speculation_metrics()
        self._add_host_tier_metrics(lambda: node.stats().damaged_transfers)
        self._add_file_tier_metrics()
        self._add_transfer_metrics(node)
        text = "LoRA adapters: with a name, retired (kept for running requests), and on the device."
        m.sampled_gauge("adapters", text, _by(adapters.counts, dict), ["state"])
        text = "LoRA adapters read from files, by outcome."
        m.sampled_counter("adapter_loads", text, _by(lambda: adapters.loads, dict), ["outcome"])
        text = "Copies of LoRA adapters to the device."
        m.sampled_counter("adapter_copies", text, _one(lambda: engine.warm_adapters()[1]))

    def set_pod_info(self, role: str, model: str, version: str) -> None:
        """Sets role, model and version of this pod."""
        self._pod_info.clear()
        self._pod_info.labels(role, model, version).set(1)

    def observe_role_switch(self, report: RoleSwitchReport, role: Role, model: str, version: str) -> None:
        """Records a change of the role to `role`."""
        self.set_pod_info(role.value, model, version)
        if report.former is not role:
            self._role_switches.labels(report.former.value, role.value).inc()
            self._role_ready_seconds.observe(report.ready_s)

    # -- metrics that are read at each scrape -------------------------------------------------------------------------
    def _add_work_metrics(self, load: Callable[[], PodLoad]) -> None:
        engine, counter, gauge = self._engine, self.metrics.sampled_counter, self.metrics.sampled_gauge
        stats = engine.scheduler.stats
        gauge("kv_blocks", "KV blocks by state.", _by(engine.pool.counts, asdict), ["state"])
        states = _by(engine.pool.state_counts, asdict)
        gauge("recurrent_states", "Slots for recurrent states by state.", states, ["state"])
        gauge("queued_prompt_tokens", "Prompt tokens that wait for computing.", _one(lambda: load().queued_tokens))
        sequences = _by(load, lambda s: {"running": s.running, "waiting": s.waiting, "reserved": s.reserved})
        gauge("sequences", "Sequences that run, wait in the engine, or wait for KV.", sequences, ["state"])
        text = "Sequences that lost their KV because others needed the room."
        counter("preemptions", text, _one(lambda: stats().preemptions))
        resumed = _by(stats, lambda s: {"resumed": s.fully_restored, "recomputed": s.partly_recomputed})
        text = "Preempted sequences that went on, with all the KV that they had or not."
        counter("preempted_sequences", text, resumed, ["outcome"])
        text = "Engine steps that failed for want of memory."
        counter("out_of_memory", text, _one(lambda: engine.counters.out_of_memory))

    def _add_speculation_metrics(self) -> None:
        failures = _by(self.speculation, lambda stats: {stats.proposer: stats.failures})
        text = "Failures of the proposer, which cost its drafts."
        self.metrics.sampled_counter("speculation_failures", text, failures, ["proposer"])
        useless = _by(self.speculation, lambda stats: {stats.proposer: stats.is_useless})
        text = "1 while drafts are made and none was right of late."
        self.metrics.sampled_gauge("speculation_useless", text, useless, ["proposer"])

    def speculation(self) -> SpeculationStats | None:
        """Returns the counts of drafts; None without speculative decoding."""
        speculator = self._engine.speculator
        return None if speculator is None else speculator.stats

    def _add_host_tier_metrics(self, damaged_transfers: Callable[[], int]) -> None:
        host, size = self._engine.pool.host_stats, self._engine.layout.block_bytes
        counter = self.metrics.sampled_counter
        blocks = _by(host, lambda stats: {"used": stats.used, "free": stats.host_blocks - stats.used})
        self.metrics.sampled_gauge("host_blocks", "KV blocks in host memory, and room for more.", blocks, ["state"])
        tier, text = self._engine.pool.host_tier, "1 while blocks are copied to host memory, 0 after a failure."
        self.metrics.sampled_gauge("host_tier_working", text, _one(lambda: None if tier is None else not tier.closed))
        moved = _by(host, lambda stats: {"to_host": stats.saved * size, "to_device": stats.loaded * size})
        counter("host_moved_bytes", "KV bytes copied to host memory and back.", moved, ["direction"])
        dropped = _one(lambda: None if (stats := host()) is None else stats.dropped)
        counter("host_forgotten_blocks", "KV blocks that host memory had no room for any more.", dropped)

        def damaged() -> dict[str, float]:
            stats = host()
            return {"transfer": damaged_transfers(), "host": 0 if stats is None else stats.damaged}

        text = "Batches of KV blocks that failed their checksums (with --checksums)."
        counter("damaged_kv", text, _by(damaged, dict), ["where"])

    def _add_file_tier_metrics(self) -> None:
        config, pool = self._engine.config, self._engine.pool
        tiers: dict[str, FileTier | None] = {"disk": pool.disk_tier, "shared": pool.shared_tier}
        configured = {"disk": config.disk_cache is not None, "shared": config.shared_cache is not None}
        for name, tier in tiers.items():
            self._add_metrics_of(name, tier, configured=configured[name])
        codec, text = self._engine.layout.disk_codec, "KV blocks that were read for prompts and decoded, so not exact."

        def decoded() -> list[tuple[tuple[str, ...], float]]:
            return [((name, codec), tier.stats().decoded) for name, tier in tiers.items() if codec and tier is not None]

        self.metrics.sampled_counter("decoded_blocks", text, decoded, ["tier", "codec"])
        found = _one(lambda: None if (tier := pool.disk_tier) is None else tier.stats().restored)
        text = "KV blocks that the pod found on the disk when it started."
        self.metrics.sampled_gauge("disk_restored_blocks", text, found)
        searches = _by(
            lambda: None if (tier := pool.shared_tier) is None else tier.stats(),
            lambda now: {"found": now.searches - now.absent, "absent": now.absent},
        )
        text = "Prompts for which the pod looked into the shared tier, by whether it has the next block."
        self.metrics.sampled_counter("shared_searches", text, searches, ["outcome"])

    def _add_metrics_of(self, name: str, tier: FileTier | None, *, configured: bool) -> None:
        """Adds the metrics that the disk tier and the shared tier both have."""
        size = self._engine.layout.block_bytes
        stored = size if tier is None else tier.store.content_bytes
        counter, gauge = self.metrics.sampled_counter, self.metrics.sampled_gauge

        def stats() -> FileTierStats | None:
            return None if tier is None else tier.stats()

        text = "1 while blocks are written to files and read from them; 0 after a failure, and while a pause lasts."
        works = None if not configured else (lambda: False) if tier is None else (lambda: tier.working)
        gauge(f"{name}_tier_working", text, _one(lambda: None if works is None else works()))
        blocks = _by(stats, lambda now: {"blocks": now.blocks * stored, "files": now.size, "limit": now.max_size})
        text = "KV blocks in files that this pod knows, size of all files, and its limit."
        gauge(f"{name}_tier_bytes", text, blocks, ["of"])
        moved = _by(stats, lambda now: {f"to_{name}": now.written * stored, "to_host": now.loaded * size})
        counter(f"{name}_moved_bytes", "KV bytes written to files and read back.", moved, ["direction"])
        lost = _by(stats, lambda now: {"computed": now.computed, "late": now.late, "damaged": now.damaged})
        text = "Prompts whose blocks in files were not used, or only in part, by reason."
        counter(f"{name}_loads_given_up", text, lost, ["reason"])
        text = "Reads and writes that failed, or did not end in time."
        counter(f"{name}_tier_failures", text, _one(lambda: None if (now := stats()) is None else now.failures))
        rate = _one(lambda: tier.read_rate if tier is not None else None)
        gauge(f"{name}_read_bytes_per_second", "Rate of the last loads from files; 0 before the first one.", rate)

    def _add_transfer_metrics(self, node: TransferNode) -> None:
        stats, counter, gauge = node.stats, self.metrics.sampled_counter, self.metrics.sampled_gauge
        gauge(
            "transfer_probe_bytes_per_second",
            "What the probe of a connection moved, by what carried it.",
            lambda: [((p.pod, p.transport, p.transport_source), p.gb_s * 1e9) for p in stats().peers],
            ["peer", "transport", "source"],
        )
        transfers = _by(stats, lambda now: {"out": now.open_outgoing, "in": now.open_incoming})
        gauge("transfers_open", "Transfers under way, by direction.", transfers, ["direction"])
        text = "Transfers that this pod received whole."
        counter("transfers_received", text, _one(lambda: stats().received_transfers))
        text = "Transfers out of this pod that ended by an error."
        counter("transfers_failed", text, _one(lambda: stats().failed_transfers))
        text = "Messages of peers that did not fit, by reason."
        counter("transfer_messages_dropped", text, _by(stats, lambda now: now.dropped), ["reason"])

        def pairs(value: Callable[[transfer_pb2.Pair], float]) -> Read:
            return _by(node.pair_stats, lambda pairs: {pair.pod: value(pair) for pair in pairs})

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
            "pair_usable",
            "1 while KV can be sent to another pod, 0 while a test block does not arrive.",
            lambda: [((p.pod,), not p.trouble) for p in node.pair_stats() if p.transport or p.trouble],
            ["peer"],
        )
        gauge(
            "pair_block_age_seconds",
            "Seconds since a block last went to another pod, in a transfer or a test.",
            lambda: [((p.pod,), p.block_age_s) for p in node.pair_stats() if p.HasField("block_age_s")],
            ["peer"],
        )
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
            steps=self._engine.counters.steps,
            gpu=None if gpu is None else transfer_pb2.Gpu(**asdict(gpu)),
        )
        if (stats := self.speculation()) is not None:
            drafts = activity.drafts
            drafts.proposer, drafts.useless, drafts.chains = stats.proposer, stats.is_useless, stats.chains
            drafts.proposed, drafts.accepted = stats.proposed, stats.accepted
        return activity


def _one(read: Callable[[], float | None]) -> Read:
    """Returns the reader of a metric without labels. `read` returns None for no value."""
    return lambda: [] if (value := read()) is None else [((), value)]


def _by(read: Callable[[], _T | None], values: Callable[[_T], Mapping[str, float]]) -> Read:
    """Returns the reader of a metric with one label: `values` by label of what `read` returns, none of None."""
    return lambda: [] if (now := read()) is None else [((label,), value) for label, value in values(now).items()]
