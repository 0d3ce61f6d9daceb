"""What a pod counts of its host tier, of preemptions, and of damaged blocks; all of it is read when scraped."""

from __future__ import annotations

from collections.abc import Callable

from common.telemetry import Metrics, Sample
from engine.block_pool import HostStats
from engine.scheduler import SchedulerStats


def add_host_metrics(
    metrics: Metrics,
    host: Callable[[], HostStats | None],
    scheduler: Callable[[], SchedulerStats],
    block_bytes: int,
    *,
    damaged_transfers: Callable[[], int],
) -> None:
    """Declares them. host: None where the pod has no host tier."""

    def blocks() -> list[Sample]:
        stats = host()
        return [] if stats is None else [(("used",), stats.used), (("free",), stats.host_blocks - stats.used)]

    def moved() -> list[Sample]:
        stats = host()
        if stats is None:
            return []
        return [(("to_host",), stats.saved * block_bytes), (("to_device",), stats.loaded * block_bytes)]

    def forgotten() -> list[Sample]:
        stats = host()
        return [] if stats is None else [((), stats.dropped)]

    def preempted() -> list[Sample]:
        stats = scheduler()
        return [(("resumed",), stats.fully_restored), (("recomputed",), stats.partly_recomputed)]

    def damaged() -> list[Sample]:
        stats = host()
        return [(("transfer",), damaged_transfers()), (("host",), 0 if stats is None else stats.damaged)]

    metrics.sampled_gauge("host_blocks", "KV blocks in host memory, and room for more.", blocks, ["state"])
    metrics.sampled_counter("host_moved_bytes", "KV bytes copied to host memory and back.", moved, ["direction"])
    metrics.sampled_counter("host_forgotten_blocks", "KV blocks that host memory had no room for any more.", forgotten)
    metrics.sampled_counter(
        "preempted_sequences",
        "Preempted sequences that went on, with all the KV that they had or not.",
        preempted,
        ["outcome"],
    )
    metrics.sampled_counter(
        "damaged_kv", "Batches of KV blocks that failed their checksums (with --checksums).", damaged, ["where"]
    )
