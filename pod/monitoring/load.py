"""The load of a pod and its measured rates, from which routing predicts when the pod can serve one more request."""

from __future__ import annotations

from typing import Any

from common.types import PodLoad
from engine.engine import Engine
from pod.monitoring.rates import PodRates
from pod.requests import RequestRegistry
from pod.services import Embedder


def measure_load(
    engine: Engine, rates: PodRates, requests: RequestRegistry[Any], embedder: Embedder, *, draining: bool
) -> PodLoad:
    """Returns the load at this moment. `requests`: those of the service of the pod's role."""
    stats, pool = engine.scheduler.stats(), engine.pool
    prefill_rate, prefill_overhead_s = rates.prefill_fit()
    step_s, step_slope_s = rates.decode_fit()
    transfer_rate, hand_off_s = rates.transfer_fit()
    return PodLoad(
        queued_tokens=embedder.requests.queued_tokens + requests.queued_tokens,
        running=stats.running,
        waiting=stats.waiting,
        reserved=max(0, requests.num_sequences - stats.running - stats.waiting),
        free_blocks=pool.blocks_that_fit(pool.num_available()),
        draining=draining,
        prefill_rate=prefill_rate,
        prefill_overhead_s=prefill_overhead_s,
        step_s=step_s,
        step_slope_s=step_slope_s,
        transfer_rate=transfer_rate,
        hand_off_s=hand_off_s,
        pull_s=rates.pull_s(),
        disk_rate=pool.tokens_per_s_of(pool.disk_tier),
        shared_cache=pool.shared_tier is not None and pool.shared_tier.working,
        shared_rate=pool.tokens_per_s_of(pool.shared_tier),
    )
