"""How soon the pods of one model could begin with a prompt, by what routing knows of their queues and rates.

Pods of one role and layout are taken together: the best of them is what a request would get. Only a forecast: a pod
that has not measured its rate is taken to be as its peers, or as fast as routing's first guess, and `measured` says
which. A guess may order requests; none is refused for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gateway.pods import PodTable
from gateway.routing.view import PodView


class Outlook(Protocol):
    """What a gate asks. Times in seconds."""

    @property
    def measured(self) -> bool:
        """Some pod has told how fast it computes prompts."""

    def queue_s(self, launched: int) -> float:
        """Until a pod is free for one more prompt, when `launched` prompt tokens are on the way that none knows of."""

    def compute_s(self, tokens: int) -> float:
        """What the fastest pod needs for so many prompt tokens."""

    def tokens_per_s(self) -> float:
        """Prompt tokens per second of all pods together."""


class PodOutlook:
    """Of a table's pods."""

    def __init__(self, table: PodTable, clock: Callable[[], float]) -> None:
        self._table = table
        self._clock = clock

    def _views(self) -> list[PodView]:
        """Of pods that compute prompts."""
        pods = [
            pod
            for layout in self._table.pods_by_layout().values()
            for pod in layout
            if pod.can_compute_prompts and pod.view
        ]
        return [pod.view for pod in pods if pod.view is not None]

    @property
    def measured(self) -> bool:
        """See Outlook."""
        return any(view.rate_known for view in self._views())

    def queue_s(self, launched: int) -> float:
        """See Outlook; 0 while there are no pods, which is for routing to say."""
        views, now = self._views(), self._clock()
        if not views:
            return 0.0
        best = min(views, key=lambda view: view.queue_s(now))
        return best.queue_s(now) + launched * best.prefill_s_per_token / len(views)

    def compute_s(self, tokens: int) -> float:
        """See Outlook."""
        return min((view.prefill_overhead_s + tokens * view.prefill_s_per_token for view in self._views()), default=0.0)

    def tokens_per_s(self) -> float:
        """See Outlook."""
        return sum(1 / view.prefill_s_per_token for view in self._views())
