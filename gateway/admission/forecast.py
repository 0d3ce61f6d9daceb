"""Forecasts of how long a request would wait: for the pods' prompt queues, and in the gate's own queue.

Times are seconds. Only rates that pods have measured count.
"""

from __future__ import annotations

import time

from gateway.pods.table import PodTable
from gateway.pods.view import PodView

SPEED_WINDOW_S = 10.0  #: Window of the queue's measured speed.
MIN_MEASURED_S = 1.0  #: Measured time from which the speed is used.


class QueueForecast:
    """Predicts how soon the pods in a table can start a prompt; without pods, at once: routing then fails."""

    def __init__(self, table: PodTable) -> None:
        self._table = table

    def _views(self) -> list[PodView]:
        """Returns the views of the pods that compute prompts."""
        pods = (pod for layout in self._table.pods_by_layout().values() for pod in layout)
        return [pod.view for pod in pods if pod.can_compute_prompts and pod.view is not None]

    @property
    def measured(self) -> bool:
        """At least one pod has measured its prefill rate."""
        return any(view.rate_known for view in self._views())

    def queue_s(self, unreported_tokens: int) -> float:
        """Returns the seconds until a pod can start one more prompt. Pods have not reported `unreported_tokens` yet."""
        views, now = self._views(), time.monotonic()
        if not views:
            return 0.0
        best = min(views, key=lambda view: view.queue_s(now))
        return best.queue_s(now) + unreported_tokens * best.prefill_s_per_token / len(views)

    def compute_s(self, tokens: int) -> float:
        """Returns the seconds that the fastest pod takes to compute so many prompt tokens."""
        return min((view.prefill_overhead_s + tokens * view.prefill_s_per_token for view in self._views()), default=0.0)

    def tokens_per_s(self) -> float:
        """Returns the prompt tokens per second of all pods together."""
        return sum(1 / view.prefill_s_per_token for view in self._views())


class QueueSpeed:
    """Measures the tokens per second that leave the queue while requests wait. Old values fade over SPEED_WINDOW_S."""

    def __init__(self) -> None:
        self._tokens = self._seconds = self._requests = 0.0
        self._at = 0.0  # when the last request left, or when requests began to wait

    def begin(self, now: float) -> None:
        """The first request begins to wait."""
        self._at = now

    def on_left(self, tokens: int, now: float) -> None:
        """A request of so many expected tokens left the queue."""
        passed_s = now - self._at
        keep = 1 / (1 + passed_s / SPEED_WINDOW_S)
        self._tokens = self._tokens * keep + tokens
        self._seconds = self._seconds * keep + passed_s
        self._requests = self._requests * keep + 1
        self._at = now

    def since_last_s(self, now: float) -> float:
        """Returns the seconds since a request left, while requests wait."""
        return now - self._at

    def tokens_per_s(self, now: float) -> float | None:
        """Returns the speed, None if measured for less than MIN_MEASURED_S. A longer silence than usual lowers it."""
        silence_s = self.since_last_s(now)
        if self._seconds + silence_s < MIN_MEASURED_S or not self._requests:
            return None
        usual_s = self._seconds / self._requests
        return self._tokens / (self._seconds + (silence_s if silence_s > usual_s else 0.0))
