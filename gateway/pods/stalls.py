"""Finds the requests that wait for a pod that makes no progress.

    Info every 0.5 s --> suspicion: no answer, a stuck loop, or no step although sequences run
                           |  a bound without news for a request, and the suspicion lasts
                           v
                         the request is stalled: its attempt fails and continues on other pods

Nothing is done per token. While a pod is suspected, the progress of its requests is compared once per answer to Info.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Protocol

from common.errors import BatonError
from common.process.watchdog import STEP_FACTOR, TickClock
from common.types import PodLoad
from gateway.pods.info import PodActivity, PodInfo
from gateway.pods.view import PodView


class Suspicion(enum.Enum):
    """Why a pod may make no progress."""

    SILENT = "it does not answer"
    STUCK = "one of its loops is stuck"
    NO_STEP = "its engine ends no step"


class StallSink(Protocol):
    """A request that waits for a pod. The methods must not block."""

    def progress(self, suspicion: Suspicion, *, queued: bool) -> int | None:
        """Returns a number that changes with each message of the pod; None if the request cannot be stalled by this.

        `queued`: some sequences wait in the pod's queue, so a request without news may be one of them.
        """

    def on_stalled(self, error: BatonError) -> None:
        """The pod made no progress for the bound."""


class StallFinder:
    """Decides for one pod which requests are stalled. The caller gives the time."""

    def __init__(self, period_s: float) -> None:
        """`period_s`: longest time between two ticks of a gateway that is not frozen."""
        self._clock = TickClock(period_s)
        self._steps: tuple[int, int] | None = None  # generation and steps of the last answer
        self._waits: dict[StallSink, tuple[int, float]] = {}  # last progress, and counted seconds since

    def suspect(
        self, info: PodInfo | None, activity: PodActivity | None, load: PodLoad | None, *, answered: bool
    ) -> Suspicion | None:
        """Returns what the pod's last answer to Info says. `answered`: the last call was answered."""
        if not answered:
            return Suspicion.SILENT
        before, self._steps = self._steps, None
        if info is None or activity is None:
            return None
        if activity.steps is not None:
            self._steps = info.generation, activity.steps
        if info.stuck:
            return Suspicion.STUCK
        runs = load is not None and load.running > 0
        return Suspicion.NO_STEP if runs and self._steps is not None and self._steps == before else None

    def tick(
        self,
        now: float,
        suspicion: Suspicion | None,
        bound_s: float,
        sinks: Callable[[], Iterable[StallSink]],
        *,
        queued: bool = False,
    ) -> list[StallSink]:
        """Returns the requests without news for `bound_s`; each again after another bound. 0 is no bound."""
        elapsed_s = self._clock.tick(now)
        if suspicion is None or bound_s <= 0:
            self._waits = {}
            return []
        before, self._waits = self._waits, {}
        stalled = []
        for sink in sinks():
            if (progress := sink.progress(suspicion, queued=queued)) is None:
                continue
            known = before.get(sink)
            waited_s = known[1] + elapsed_s if known is not None and known[0] == progress else 0.0
            if waited_s >= bound_s:
                stalled.append(sink)
            else:
                self._waits[sink] = progress, waited_s
        return stalled


def stall_bound_s(stuck_s: float, view: PodView | None, activity: PodActivity | None) -> float:
    """Returns the seconds without progress after which a request is stalled; 0 for never."""
    if stuck_s <= 0:
        return 0.0
    step_s = 0.0 if view is None else view.step_s + view.step_slope_s * view.num_sequences()
    return max(stuck_s, STEP_FACTOR * step_s, 0.0 if activity is None else activity.step_bound_s)
