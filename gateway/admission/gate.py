"""Lets requests of one model through to its pods: at once while these keep up, in fair order otherwise, or not at all.

A request goes through when fewer than max_running are out and the pods' prompt queue is shorter than AHEAD_S; so what
must wait, waits here, where order can still be chosen. Whether it may wait is decided when it comes: if the first token
is forecast later than its deadline, or than max_ttft_s, it is refused before anything is computed for it. Whether there
is room for its KV is the decode pods' to say.

The forecast counts what is left to compute, without what pods have cached, at the rates that pods measured; where
requests wait for others to end (max_running), at the rate at which these ended. What nobody has measured delays nobody:
then a request is refused only when the queue is full. And one that no other request is in the way of never is.

out -> through -> left                              (what enter returns is given back by exactly one leave)
    -> waiting -> through | refused | its time over | its client gone
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

TARGET_POD_QUEUE_S = 1.0  # of prompts that pods may have in their queues: enough to keep them busy between two reports
REPORT_DELAY_S = 0.1  # a request that went through so lately may not be counted on a pod yet
TOLERATED_WAIT_S = 0.5  # nobody is refused for a wait as short as this
TICK_S = (0.01, 0.25)  # how often the pods' queues are looked at while requests wait
FORECAST_TOLERANCE = (
    1.05  # a first token may come so much later than forecast: between two reports of a pod, in another's step
)
SPEED_WINDOW_S = 10.0  # over which the speed of the queue is measured
MIN_MEASURED_S = 1.0  # from which on it is believed
MAX_RETRY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLimits:
    """max_running: requests at pods at once, 0: any number. max_queue: that wait. max_ttft_s 0: deadlines count."""

    max_running: int = 0
    max_queue: int = 512
    max_ttft_s: float = 0.0


class _QueueSpeed:
    """Tokens per second that leave the queue while requests wait; what is older than RATE_S counts less and less."""

    def __init__(self) -> None:
        self._tokens = self._seconds = self._leavings = 0.0
        self._at = 0.0  # of the last leaving, or when requests began to wait

    def begin(self, now: float) -> None:
        """The first request waits."""
        self._at = now

    def left(self, tokens: int, now: float) -> None:
        """A request left the queue."""
        passed = now - self._at
        keep = 1 / (1 + passed / SPEED_WINDOW_S)
        self._tokens = self._tokens * keep + tokens
        self._seconds = self._seconds * keep + passed
        self._leavings = self._leavings * keep + 1
        self._at = now

    def since_last_s(self, now: float) -> float:
        """Seconds since a request left, while requests wait."""
        return now - self._at

    def per_s(self, now: float) -> float | None:
        """None while not measured. A silence counts once it is longer than usual."""
        silence = self.since_last_s(now)
        if self._seconds + silence < MIN_MEASURED_S or not self._leavings:
            return None
        usual = self._seconds / self._leavings
        return self._tokens / (self._seconds + (silence if silence > usual else 0.0))


class Gate:
    """One model's. held: how many prompt tokens of a request need no computing, asked of those that have to wait."""

    def __init__(
        self,
        limits: GateLimits,
        outlook: QueueForecast,
        metrics: GatewayMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._forecast = outlook
        self._metrics = metrics
        self._clock = clock
        self._queue = FairQueue()
        self._waiters: dict[QueueEntry, asyncio.Future[None]] = {}
        self._running = 0
        self._recently_passed: deque[tuple[float, int]] = deque()
        self._speed = _QueueSpeed()
        self._changed = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    async def acquire(
        self, caller: Caller, priority: int, work: int, cost: int, deadline: float, held: Callable[[], Awaitable[int]]
    ) -> QueueEntry:
        """Returns when the request may go to the pods; give it back to leave.

        work: prompt tokens, cost: those that it will probably take with its answer. deadline: of the gate's clock.
        Raises Overloaded when it would wait too long behind its own tenant's requests, Unavailable when behind others',
        DeadlineExceeded when its time ends while it waits.
        """
        entry = QueueEntry(caller.tenant, caller.weight, priority, work, cost)
        if self._try_pass(entry):
            return entry
        self._require_room(entry)
        entry.prompt_tokens = max(1, work - await held())
        if self._try_pass(entry):
            return entry
        self._require_in_time(entry, deadline)
        if (spare := self._require_room(entry)) is not None:
            self._queue.remove(spare)
            if not (place := self._waiters[spare]).done():  # else its client has gone, and it is about to leave itself
                place.set_exception(self._queue_full_error(spare))
        began = self._clock()
        self._wait(entry)
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

    def release(self, entry: QueueEntry, used: int) -> None:
        """The request has ended and took `used` tokens."""
        self._running -= 1
        self._queue.correct_count(entry, used - entry.expected_tokens)
        self._changed.set()

    def stop(self) -> None:
        """Nobody is let through any more; those that wait are told by their own ends."""
        if self._pump is not None:
            self._pump.cancel()

    # -- who goes through

    def _try_pass(self, entry: QueueEntry) -> bool:
        """Lets it through at once if nobody waits and the pods want one more."""
        if self._queue or not self._pods_have_room():
            return False
        self._queue.count_as_served(entry)
        self._pass(entry)
        return True

    def _pods_have_room(self) -> bool:
        """The pods want one more."""
        if not self._running:
            return True
        return not self._full and self._forecast.queue_s(self._unreported_tokens()) < TARGET_POD_QUEUE_S

    @property
    def _full(self) -> bool:
        return 0 < self._limits.max_running <= self._running

    def _unreported_tokens(self) -> int:
        now = self._clock()
        while self._recently_passed and now - self._recently_passed[0][0] > REPORT_DELAY_S:
            self._recently_passed.popleft()
        return sum(work for _, work in self._recently_passed)

    def _pass(self, entry: QueueEntry) -> None:
        self._running += 1
        self._recently_passed.append((self._clock(), entry.prompt_tokens))

    def _wait(self, entry: QueueEntry) -> None:
        if not self._queue:
            self._speed.begin(self._clock())
        self._queue.add(entry)
        self._waiters[entry] = asyncio.get_running_loop().create_future()
        if self._pump is None or self._pump.done():
            self._pump = asyncio.get_running_loop().create_task(self._serve_queue())

    def _give_up(self, entry: QueueEntry) -> None:
        """It will not go through; if it just was let through, its place is given back."""
        place = self._waiters[entry]
        if self._queue.remove(entry) or not place.done() or place.cancelled() or place.exception() is not None:
            return
        self.release(entry, 0)

    async def _serve_queue(self) -> None:
        """Runs while requests wait."""
        while self._queue:
            self._changed.clear()
            while self._queue and self._pods_have_room():
                entry = self._queue.pop()
                assert entry is not None
                self._speed.left(entry.expected_tokens, self._clock())
                self._pass(entry)
                place = self._waiters[entry]
                if place.cancelled():
                    self.release(entry, 0)
                else:
                    place.set_result(None)
            ahead_s = self._forecast.queue_s(self._unreported_tokens()) - TARGET_POD_QUEUE_S
            try:
                async with asyncio.timeout(min(TICK_S[1], max(TICK_S[0], ahead_s))):
                    await self._changed.wait()
            except TimeoutError:
                continue

    # -- who may wait

    def _require_in_time(self, entry: QueueEntry, deadline: float) -> None:
        """Raises when the request's first token is forecast too late, or there is no room to wait."""
        limit_s = deadline - self._clock()
        if self._limits.max_ttft_s:
            limit_s = min(limit_s, self._limits.max_ttft_s)
        wait_s = self._wait_s(entry)
        first_s = FORECAST_TOLERANCE * (
            wait_s + (self._forecast.compute_s(entry.prompt_tokens) if self._forecast.measured else 0.0)
        )
        if wait_s > TOLERATED_WAIT_S and first_s > limit_s:
            self._count_rejection("forecast")
            raise self._refusal(entry, f"the first token would take about {first_s:.3g} s", first_s - limit_s)

    def _require_room(self, entry: QueueEntry) -> QueueEntry | None:
        """Who has to leave the queue for this one, None: nobody. Raises when it is full, and nobody has."""
        if len(self._queue) < self._limits.max_queue:
            return None
        spare = self._queue.find_victim(entry)
        if spare is None:
            raise self._queue_full_error(entry)
        return spare

    def _queue_full_error(self, entry: QueueEntry) -> BatonError:
        self._count_rejection("queue")
        return self._refusal(entry, f"{len(self._queue)} requests are waiting", self._wait_s(entry))

    def _wait_s(self, entry: QueueEntry) -> float:
        """Seconds until it would be this request's turn, and a pod ready for it; only what is measured counts."""
        now, outlook = self._clock(), self._forecast
        wait_s = outlook.queue_s(self._unreported_tokens()) if outlook.measured else 0.0
        if not self._queue:
            return wait_s
        ahead, turns_s = self._queue.tokens_ahead(entry), self._speed.since_last_s(now)
        if outlook.measured:
            turns_s = max(turns_s, ahead.prompt_tokens / outlook.tokens_per_s())
        if self._full and (speed := self._speed.per_s(now)) is not None:
            turns_s = max(turns_s, ahead.expected_tokens / speed)
        return wait_s + turns_s

    def _refusal(self, entry: QueueEntry, why: str, retry_s: float) -> BatonError:
        """Whose fault it is decides: a tenant with requests of its own in the queue has to slow down."""
        retry_s = min(MAX_RETRY_S, max(1.0, retry_s))
        if self._queue.tokens_ahead(entry).own_expected_tokens or not entry.tenant:
            return Overloaded(f"too many requests at once: {why}", retry_after_s=retry_s)
        return Unavailable(f"the servers are overloaded: {why}", retry_after_s=retry_s)

    def _count_rejection(self, by: str) -> None:
        self._metrics.rejections.labels(by).inc()


class QueueForecast(Protocol):
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


class PodQueueForecast:
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
