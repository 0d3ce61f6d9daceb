"""Finds the stalled requests of a pod: requests that wait for the pod while it makes no progress.

    call Info every 0.5 s --> suspicion: no answer, a stuck loop, or no step although sequences run
                                |
                                |  the suspicion lasts, and the request gets no message for a bound
                                v
                              the request is stalled: its attempt fails, and it continues on other pods

Tokens cost nothing here: only while the gateway suspects a pod, it compares the progress of the pod's requests, once
per call of Info.
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
    """The reason why a pod may make no progress."""

    SILENT = "it does not answer"
    STUCK = "one of its loops is stuck"
    NO_STEP = "its engine ends no step"


class StallSink(Protocol):
    """A request that waits for a pod. The methods must not block."""

    def progress(self, suspicion: Suspicion, *, queued: bool) -> int | None:
        """Returns a number that changes with each message of the pod.

        Returns None if the request waits for something else, so this suspicion does not stall it.
        `queued`: sequences wait in the pod's queue. A request without a message may be one of them.
        """

    def on_stalled(self, error: BatonError) -> None:
        """Called when the request is stalled."""


class StallFinder:
    """Decides which requests of one pod are stalled. Pure: the caller gives the time."""

    def __init__(self, period_s: float) -> None:
        """`period_s`: longest time between two ticks, if the gateway itself is not frozen."""
        self._clock = TickClock(period_s)
        self._steps: tuple[int, int] | None = None  #: Generation and number of steps in the last answer to Info.
        self._waits: dict[StallSink, tuple[int, float]] = {}  #: A request's last progress, and the seconds since.

    def suspect(
        self, info: PodInfo | None, activity: PodActivity | None, load: PodLoad | None, *, answered: bool
    ) -> Suspicion | None:
        """Returns the suspicion after a call of Info; None if the pod makes progress. `answered`: the pod answered."""
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
        """Returns the stalled requests. A request is returned again after each further bound.

        Args:
            now: time.monotonic().
            bound_s: seconds without a message after which a request is stalled; 0 for never.
            sinks: returns the requests of the pod. Called only during a suspicion.
            queued: sequences wait in the pod's queue.
        """
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
