r"""Admission of one model's requests to its pods: at once while the pods keep up, else in fair order, or not at all.

    arrived --> passed ------------------------------------> released
            \-> waiting --> passed                               ^ exactly once for each acquire that returned
                        \-> rejected | deadline | client gone

A request passes if fewer than max_running requests run and the pods' prompt queue is shorter than TARGET_POD_QUEUE_S.
So requests wait in the gateway, where their order can still be chosen. A request is rejected on arrival if its first
token is forecast after its deadline or after max_ttft_s. Room for its KV is the decode pods' decision.

The forecast counts the prompt tokens that are not cached, at the rates that pods have measured; if requests wait for
others to end (max_running), at the rate of the queue. Without measurements only a full queue rejects. A request with
no other request before it is never rejected.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from common.errors import BatonError, DeadlineExceeded, Overloaded, Unavailable
from gateway.admission.api_keys import Caller
from gateway.admission.fair_queue import FairQueue, QueueEntry
from gateway.pods.table import PodTable
from gateway.pods.view import PodView
from gateway.telemetry.metrics import GatewayMetrics

#: Prompt queue that pods are kept at: enough to keep them busy between two reports.
TARGET_POD_QUEUE_S = 1.0

#: A request that passed this recently may not be in the pods' reports yet.
REPORT_DELAY_S = 0.1

#: No request is rejected for a shorter wait.
TOLERATED_WAIT_S = 0.5

#: Shortest and longest pause between two looks at the pods' queues while requests wait.
TICK_S = (0.01, 0.25)

#: A first token may come later than forecast by this factor: the forecast does not see the time between two reports, or
#: the running step of a pod.
FORECAST_TOLERANCE = 1.05

#: Window of the queue's measured speed, and the measured time from which it is used.
SPEED_WINDOW_S = 10.0
MIN_MEASURED_S = 1.0

MAX_RETRY_S = 60.0


class QueueForecast(Protocol):
    """Predicts how soon the pods of a model can start a prompt. Times in seconds."""

    @property
    def measured(self) -> bool:
        """At least one pod has measured its prefill rate."""

    def queue_s(self, unreported_tokens: int) -> float:
        """Returns the seconds until a pod can start one more prompt.

        Args:
            unreported_tokens: Prompt tokens that were sent to the pods and are not in their reports.
        """

    def compute_s(self, tokens: int) -> float:
        """Returns the seconds that the fastest pod takes to compute so many prompt tokens."""

    def tokens_per_s(self) -> float:
        """Returns the prompt tokens per second of all pods together."""


class PodQueueForecast:
    """The QueueForecast of the pods in a table. Without pods it forecasts no wait; then routing raises the error."""

    def __init__(self, table: PodTable, clock: Callable[[], float]) -> None:
        self._table = table
        self._clock = clock

    def _views(self) -> list[PodView]:
        """Returns the views of the pods that compute prompts."""
        pods = [
            pod
            for layout in self._table.pods_by_layout().values()
            for pod in layout
            if pod.can_compute_prompts and pod.view
        ]
        return [pod.view for pod in pods if pod.view is not None]

    @property
    def measured(self) -> bool:
        return any(view.rate_known for view in self._views())

    def queue_s(self, unreported_tokens: int) -> float:
        views, now = self._views(), self._clock()
        if not views:
            return 0.0
        best = min(views, key=lambda view: view.queue_s(now))
        return best.queue_s(now) + unreported_tokens * best.prefill_s_per_token / len(views)

    def compute_s(self, tokens: int) -> float:
        return min((view.prefill_overhead_s + tokens * view.prefill_s_per_token for view in self._views()), default=0.0)

    def tokens_per_s(self) -> float:
        return sum(1 / view.prefill_s_per_token for view in self._views())


class _QueueSpeed:
    """Measures the tokens per second that leave the queue while requests wait. Old values fade over SPEED_WINDOW_S."""

    def __init__(self) -> None:
        self._tokens = self._seconds = self._requests = 0.0
        #: When the last request left, or when requests began to wait.
        self._at = 0.0

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
        """Returns the speed, None if it was measured for less than MIN_MEASURED_S.

        The time since the last request left counts once it is longer than usual.
        """
        silence_s = self.since_last_s(now)
        if self._seconds + silence_s < MIN_MEASURED_S or not self._requests:
            return None
        usual_s = self._seconds / self._requests
        return self._tokens / (self._seconds + (silence_s if silence_s > usual_s else 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLimits:
    #: Requests that run on the pods at once; 0 for any number.
    max_running: int = 0
    #: Requests that wait.
    max_queue: int = 512
    #: Longest forecast time to the first token; 0 leaves only the requests' deadlines.
    max_ttft_s: float = 0.0


class Gate:
    """The admission queue of one model."""

    def __init__(
        self,
        limits: GateLimits,
        forecast: QueueForecast,
        metrics: GatewayMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._forecast = forecast
        self._metrics = metrics
        self._clock = clock
        self._queue = FairQueue()
        #: Resolved when the entry passes; an exception if it is evicted from the queue.
        self._waiters: dict[QueueEntry, asyncio.Future[None]] = {}
        #: Requests that passed and were not released.
        self._running = 0
        #: Times and prompt tokens of requests that passed within REPORT_DELAY_S.
        self._recently_passed: deque[tuple[float, int]] = deque()
        self._speed = _QueueSpeed()
        #: Set when a request was released.
        self._changed = asyncio.Event()
        #: Runs `_serve_queue` while requests wait.
        self._pump: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._queue)

    async def acquire(
        self,
        caller: Caller,
        priority: int,
        prompt_tokens: int,
        expected_tokens: int,
        deadline: float,
        count_hits: Callable[[], Awaitable[int]],
    ) -> QueueEntry:
        """Returns when the request may go to the pods. Give the entry to `release` when the request has ended.

        Args:
            expected_tokens: Prompt and expected output tokens.
            deadline: Time of the gate's clock.
            count_hits: Returns the prompt tokens that need no computing; called only if the request has to wait.

        Raises:
            Overloaded: The request would wait too long, and requests of its own tenant wait too.
            Unavailable: The request would wait too long behind other tenants.
            DeadlineExceeded: The deadline passed while the request waited.
        """
        entry = QueueEntry(caller.tenant, caller.weight, priority, prompt_tokens, expected_tokens)
        if self._try_pass(entry):
            return entry
        self._find_victim(entry)
        entry.prompt_tokens = max(1, prompt_tokens - await count_hits())
        if self._try_pass(entry):
            return entry
        self._require_in_time(entry, deadline)
        if (victim := self._find_victim(entry)) is not None:
            self._queue.remove(victim)
            if not (
                waiter := self._waiters[victim]
            ).done():  # else the victim's client is gone, and it leaves by itself
                waiter.set_exception(self._queue_full_error(victim))
        began = self._clock()
        self._enqueue(entry)
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock())):
                await self._waiters[entry]
        except TimeoutError as e:
            self._give_up(entry)
            self._count_rejection("deadline")
            raise DeadlineExceeded("the request's time was over before it was its turn") from e
        except BaseException:
            self._give_up(entry)
            raise
        finally:
            self._waiters.pop(entry, None)
            self._metrics.admission_wait.observe(self._clock() - began)
        return entry

    def release(self, entry: QueueEntry, used_tokens: int) -> None:
        """The request has ended, with so many prompt and output tokens."""
        self._running -= 1
        self._queue.correct_count(entry, used_tokens - entry.expected_tokens)
        self._changed.set()

    def stop(self) -> None:
        """Lets no more requests pass. Requests that wait have to be cancelled by their tasks."""
        if self._pump is not None:
            self._pump.cancel()

    # -- passing

    def _try_pass(self, entry: QueueEntry) -> bool:
        """Lets a request pass at once if no request waits and the pods have room."""
        if self._queue or not self._pods_have_room():
            return False
        self._queue.count_as_served(entry)
        self._pass(entry)
        return True

    def _pods_have_room(self) -> bool:
        """The pods' prompt queue is short enough for one more request."""
        if not self._running:
            return True
        return not self._full and self._forecast.queue_s(self._unreported_tokens()) < TARGET_POD_QUEUE_S

    @property
    def _full(self) -> bool:
        return 0 < self._limits.max_running <= self._running

    def _unreported_tokens(self) -> int:
        """Returns the prompt tokens of requests that passed too recently for the pods' reports."""
        now = self._clock()
        while self._recently_passed and now - self._recently_passed[0][0] > REPORT_DELAY_S:
            self._recently_passed.popleft()
        return sum(tokens for _, tokens in self._recently_passed)

    def _pass(self, entry: QueueEntry) -> None:
        self._running += 1
        self._recently_passed.append((self._clock(), entry.prompt_tokens))

    # -- waiting

    def _enqueue(self, entry: QueueEntry) -> None:
        if not self._queue:
            self._speed.begin(self._clock())
        self._queue.add(entry)
        self._waiters[entry] = asyncio.get_running_loop().create_future()
        if self._pump is None or self._pump.done():
            self._pump = asyncio.get_running_loop().create_task(self._serve_queue())

    def _give_up(self, entry: QueueEntry) -> None:
        """Removes a waiting request. If it has just passed, it is released."""
        waiter = self._waiters[entry]
        if self._queue.remove(entry) or not waiter.done() or waiter.cancelled() or waiter.exception() is not None:
            return
        self.release(entry, 0)

    async def _serve_queue(self) -> None:
        """Lets waiting requests pass, until the queue is empty."""
        while self._queue:
            self._changed.clear()
            while self._queue and self._pods_have_room():
                entry = self._queue.pop()
                assert entry is not None
                self._speed.on_left(entry.expected_tokens, self._clock())
                self._pass(entry)
                waiter = self._waiters[entry]
                if waiter.cancelled():
                    self.release(entry, 0)
                else:
                    waiter.set_result(None)
            excess_s = self._forecast.queue_s(self._unreported_tokens()) - TARGET_POD_QUEUE_S
            try:
                async with asyncio.timeout(min(TICK_S[1], max(TICK_S[0], excess_s))):
                    await self._changed.wait()
            except TimeoutError:
                continue

    # -- rejecting

    def _require_in_time(self, entry: QueueEntry, deadline: float) -> None:
        """Raises if the first token is forecast too late."""
        limit_s = deadline - self._clock()
        if self._limits.max_ttft_s:
            limit_s = min(limit_s, self._limits.max_ttft_s)
        wait_s = self._wait_s(entry)
        ttft_s = FORECAST_TOLERANCE * (
            wait_s + (self._forecast.compute_s(entry.prompt_tokens) if self._forecast.measured else 0.0)
        )
        if wait_s > TOLERATED_WAIT_S and ttft_s > limit_s:
            self._count_rejection("forecast")
            raise self._rejection(entry, f"the first token would take about {ttft_s:.3g} s", ttft_s - limit_s)

    def _find_victim(self, entry: QueueEntry) -> QueueEntry | None:
        """Returns the waiting request to evict so that `entry` fits, or None if the queue has room.

        Raises if the queue is full and no waiting request may be evicted for this one.
        """
        if len(self._queue) < self._limits.max_queue:
            return None
        victim = self._queue.find_victim(entry)
        if victim is None:
            raise self._queue_full_error(entry)
        return victim

    def _queue_full_error(self, entry: QueueEntry) -> BatonError:
        self._count_rejection("queue")
        return self._rejection(entry, f"{len(self._queue)} requests are waiting", self._wait_s(entry))

    def _wait_s(self, entry: QueueEntry) -> float:
        """Returns the forecast seconds until the request passes and a pod can start it. Counts only measured rates."""
        now, forecast = self._clock(), self._forecast
        pod_queue_s = forecast.queue_s(self._unreported_tokens()) if forecast.measured else 0.0
        if not self._queue:
            return pod_queue_s
        ahead, turns_s = self._queue.tokens_ahead(entry), self._speed.since_last_s(now)
        if forecast.measured:
            turns_s = max(turns_s, ahead.prompt_tokens / forecast.tokens_per_s())
        if self._full and (speed := self._speed.tokens_per_s(now)) is not None:
            turns_s = max(turns_s, ahead.expected_tokens / speed)
        return pod_queue_s + turns_s

    def _rejection(self, entry: QueueEntry, why: str, retry_s: float) -> BatonError:
        """Returns Overloaded (429) if the tenant's own requests are ahead, Unavailable (503) if only others' are."""
        retry_s = min(MAX_RETRY_S, max(1.0, retry_s))
        if self._queue.tokens_ahead(entry).own_expected_tokens or not entry.tenant:
            return Overloaded(f"too many requests at once: {why}", retry_after_s=retry_s)
        return Unavailable(f"the servers are overloaded: {why}", retry_after_s=retry_s)

    def _count_rejection(self, by: str) -> None:
        self._metrics.rejections.labels(by).inc()
