"""The gateway's figures at regular moments of the last minutes, so that rates and percentiles of that time can be told.

A task takes a sample every PERIOD_S from the counters that exist anyway: nothing is added where tokens pass. The ring
keeps WINDOW_S; before it is full, the oldest sample is the gateway's start.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from gateway.dashboard.shape import Shape
from gateway.metrics import GatewayMetrics
from gateway.pod import Pod
from gateway.pod_activity import PodActivity

PERIOD_S = 5.0
WINDOW_S = 300.0

_log = logging.getLogger(__name__)

PodKey = tuple[str, int]  # name and generation: a restarted pod counts from zero


@dataclass(frozen=True, slots=True)
class Sample:
    """at: monotonic seconds. counts: of counters, and running and waiting, which are of the moment."""

    at: float
    counts: Mapping[str, float]
    histograms: Mapping[str, Shape]
    pods: Mapping[PodKey, PodActivity]

    def kv_used(self) -> float | None:
        """Share of all pods' blocks that is in use."""
        blocks = [pod.blocks for pod in self.pods.values()]
        total = sum(b.total for b in blocks)
        return sum(b.leased + b.quarantined for b in blocks) / total if total else None


class History:
    """pods: those that are known now; waiting: requests in the gateway's queues."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        pods: Callable[[], Iterable[Pod]],
        waiting: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._pods = pods
        self._waiting = waiting
        self._clock = clock
        self._samples: deque[Sample] = deque(maxlen=round(WINDOW_S / PERIOD_S) + 1)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to take samples."""
        self.take()
        self._task = asyncio.get_running_loop().create_task(self._forever())

    async def stop(self) -> None:
        """Takes no more. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def take(self) -> None:
        """Keeps a sample of now."""
        self._samples.append(self.now())

    @property
    def samples(self) -> tuple[Sample, ...]:
        """What is kept, the oldest first."""
        return tuple(self._samples)

    def now(self) -> Sample:
        """A sample that is not kept."""
        metrics = self._metrics
        pods = {
            (pod.info.name, pod.info.generation): pod.activity
            for pod in self._pods()
            if pod.alive and pod.info is not None and pod.activity is not None
        }
        counts = {**metrics.totals(), "waiting": float(self._waiting())}
        return Sample(self._clock(), counts, {k: Shape.from_metric(m) for k, m in metrics.latencies().items()}, pods)

    async def _forever(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                self.take()
            except Exception:
                _log.exception("a sample for the dashboard could not be taken")
