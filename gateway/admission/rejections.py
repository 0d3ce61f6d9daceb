"""The requests that a gate refuses: how long they would wait, whether that is too long, and the error for the client.

Two sources predict a wait: the rates that the pods report, and the speed at which first tokens came. The longer wait
counts, so a wrong rate of one pod does not let many requests in. See `queue.py` for the units of work and speed.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import BatonError, Overloaded, Unavailable
from common.settings.tiers import Tier, tier_of
from gateway.admission.queue import FairQueue, PodSpeed, QueueEntry
from gateway.admission.tiers import TierQueue
from gateway.telemetry.metrics import GatewayMetrics

TOLERATED_WAIT_S = 0.5  #: No request is rejected for a shorter wait.
MAX_RETRY_S = 60.0  #: Largest Retry-After.
ERROR_WEIGHT = 1 / 16  #: Weight of the newest error in the mean error of forecasts.
ERROR_RANGE = (0.25, 4.0)  #: An error is cut to this range, so that one request does not change the mean much.
TOLERANCE_RANGE = (1.05, 2.0)  #: Range of `ForecastError.tolerance`.


@dataclass(frozen=True, slots=True)
class WaitOutlook:
    """The values from which a wait is forecast, at one moment."""

    now: float
    pods: PodSpeed
    pod_queue_s: float  #: Seconds until a pod can start one more prompt; 0 if nothing is measured.
    left_s: float  #: Work that is left of the requests without a first token.
    speed: float | None  #: Work per second of the first tokens that came while requests waited; None if unknown.
    since_turn_s: float  #: Seconds since a request left the queue; 0 if no request waits.
    #: Expected tokens per second that leave the queue; None unless requests wait until others end.
    turn_tokens_per_s: float | None

    def wait_s(self, expected_tokens: float, work_s: float) -> float:
        """Returns the seconds until a pod can start a request. The arguments are sums over the queue ahead of it."""
        turns_s = self.since_turn_s
        if self.pods.measured and self.pods.speed > 0:
            turns_s = max(turns_s, work_s / self.pods.speed)
        if self.turn_tokens_per_s:
            turns_s = max(turns_s, expected_tokens / self.turn_tokens_per_s)
        wait_s = self.pod_queue_s + turns_s
        return wait_s if not self.speed else max(wait_s, (self.left_s + work_s) / self.speed)

    def compute_s(self, prompt_tokens: int) -> float:
        """Returns the seconds of computing a prompt; 0 if no rate is measured."""
        return self.pods.work_s(1, prompt_tokens) if self.pods.measured else 0.0


class ForecastError:
    """Measures how much later first tokens come than forecast: mean and mean deviation of actual / forecast. Pure."""

    def __init__(self) -> None:
        self._mean, self._deviation = 1.0, 0.0

    def add(self, forecast_s: float, actual_s: float) -> None:
        """Records one request."""
        low, high = ERROR_RANGE
        ratio = min(high, max(low, actual_s / max(forecast_s, 1e-3)))
        self._deviation += ERROR_WEIGHT * (abs(ratio - self._mean) - self._deviation)
        self._mean += ERROR_WEIGHT * (ratio - self._mean)

    @property
    def tolerance(self) -> float:
        """The factor by which a forecast is made longer before it is compared with the time limit."""
        low, high = TOLERANCE_RANGE
        return min(high, max(low, self._mean + self._deviation))


class Rejections:
    """Decides which requests of one gate would be late, and makes the errors of refused requests."""

    def __init__(self, tiers: tuple[Tier, ...], queue: FairQueue | TierQueue, metrics: GatewayMetrics) -> None:
        """`tiers`: the highest first, () without tiers. `queue`: the waiting requests."""
        self._tiers = tiers
        self._queue = queue
        self._metrics = metrics
        self._error = ForecastError()

    def wait_s(self, entry: QueueEntry, outlook: WaitOutlook) -> float:
        """Returns the forecast of the seconds until a pod can start a request that comes now."""
        if not self._queue:
            return outlook.wait_s(0, 0.0)
        ahead = self._queue.tokens_ahead(entry)
        return outlook.wait_s(ahead.expected_tokens, outlook.pods.work_s(ahead.requests, ahead.prompt_tokens))

    def require_in_time(self, entry: QueueEntry, outlook: WaitOutlook, *, own: bool) -> float:
        """Returns the forecast of the seconds to the first token. Raises if it would be late.

        `own`: the time of the request's own prompt counts too.
        """
        tolerance, left_s = self._error.tolerance, entry.latest - outlook.now
        wait_s = self.wait_s(entry, outlook)
        first_s = wait_s + (outlook.compute_s(entry.prompt_tokens) if own else 0.0)
        if wait_s > TOLERATED_WAIT_S and tolerance * first_s > left_s:
            self._metrics.rejections.labels("forecast").inc()
            raise self._late_error(entry, tolerance * first_s, left_s)
        return first_s

    def queue_full(self, entry: QueueEntry, outlook: WaitOutlook) -> BatonError:
        """Counts a request for which the queue has no place. Returns its error."""
        self._metrics.rejections.labels("queue").inc()
        return self._error_of(entry, f"{len(self._queue)} requests are waiting", self.wait_s(entry, outlook))

    def shed_waiting(self, entry: QueueEntry, now: float, first_s: float, left_s: float) -> BatonError:
        """Counts a waiting request that has `left_s` seconds and would need `first_s` to its first token.

        Returns its error.
        """
        self._count_late(entry, now)
        return self._late_error(entry, first_s, left_s)

    def shed_at_pods(self, entry: QueueEntry, now: float) -> BatonError:
        """Counts a request that the pods have had for too long without a first token. Returns its error."""
        self._count_late(entry, now)
        return self._error_of(entry, f"no first token came in {now - entry.arrived_at:.3g} s", 1.0)

    def on_first_token(self, entry: QueueEntry, now: float) -> None:
        """Compares the forecast of a request that has waited with the time that it took."""
        self._error.add(entry.forecast_s, now - entry.waited_from)

    def _count_late(self, entry: QueueEntry, now: float) -> None:
        """Counts a shed request, and records the error of its forecast."""
        self._metrics.rejections.labels("late").inc()
        if entry.forecast_s > TOLERATED_WAIT_S:
            self._error.add(entry.forecast_s, max(entry.forecast_s, now - entry.waited_from))

    def _late_error(self, entry: QueueEntry, first_s: float, left_s: float) -> BatonError:
        """Returns the error of a request that has `left_s` seconds, but would get its first token after `first_s`."""
        return self._error_of(entry, f"the first token would take about {first_s:.3g} s", first_s - left_s)

    def _error_of(self, entry: QueueEntry, why: str, retry_s: float) -> BatonError:
        """Returns Overloaded (429) if requests of the same tenant are ahead, else Unavailable (503).

        A request below the highest tier gets Overloaded too: others may be served when this one is not.
        """
        retry_s = min(MAX_RETRY_S, max(1.0, retry_s))
        if self._tiers:
            tier = self._tiers[tier_of(self._tiers, entry.priority)]
            self._metrics.tier_rejections.labels(tier.name).inc()
            if tier is not self._tiers[0]:
                return Overloaded(f"the tier {tier.name} has no capacity left: {why}", retry_after_s=retry_s)
        if not entry.tenant or self._queue.tokens_ahead(entry).own_expected_tokens:
            return Overloaded(f"too many requests at once: {why}", retry_after_s=retry_s)
        return Unavailable(f"the servers are overloaded: {why}", retry_after_s=retry_s)
