r"""Admission of one model's requests to its pods: at once while the pods keep up, else in fair order, or not at all.

    arrived --> passed --> first token --------------------> released
            \-> waiting --> passed                               ^ exactly once for each acquire that returned
                        \-> rejected | shed | deadline | client gone

A request passes if fewer than max_running requests run, the pods' prompt queue is shorter than TARGET_POD_QUEUE_S, and
the work without a first token is small for the proven speed. So requests wait in the gateway, where their order can
still be chosen. The decode pods decide whether there is room for its KV.

A request is rejected on arrival if the forecast says that its first token will be late: after its deadline or after
max_ttft_s. While it waits, the forecast is made again, and a late request is shed at once. At the pods, a request
without a first token after max_ttft_s is shed too, unless its own prompt takes that long. A request without other
requests ahead is never rejected. See docs/admission.md.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from common.errors import BatonError, DeadlineExceeded, Overloaded
from common.settings.tiers import Tier, tier_of
from gateway.admission.api_keys import Caller
from gateway.admission.queue import BusySpeed, FairQueue, PodSpeed, ProvenSpeed, QueueEntry, QueueForecast
from gateway.admission.rejections import TOLERATED_WAIT_S, Rejections, WaitOutlook
from gateway.admission.tiers import ShortAnswers, TierQueue
from gateway.telemetry.metrics import GatewayMetrics

_log = logging.getLogger(__name__)

TARGET_POD_QUEUE_S = 1.0  #: Length of the pods' prompt queue that the gate keeps, so that pods are always busy.
REPORT_DELAY_S = 0.1  #: A request that passed this recently may not be in the pods' reports yet.
TICK_S = (0.01, 0.25)  #: Shortest and longest pause between two looks at the pods' queues while requests wait.
SHED_SHARE = 0.05  #: Forecasts of waiting requests take at most this share of the time.

#: Requests without a first token that each pod may have: the first number before a speed is proven, the second always.
UNPROVEN_PER_POD, LEAST_PER_POD = 8, 2
#: Work without a first token, in seconds at the proven speed. It is above TARGET_POD_QUEUE_S, so the speed can grow.
PROVEN_AHEAD_S = 2.0
NO_ROOM_S = 10.0  #: For this time after a refusal by all decode pods, only as many requests pass as end in a second.
NO_ROOM_PAUSE_S = (0.1, 1.0)  #: Shortest and longest pause before full decode pods are asked again.
LATE_FACTOR = 2.0  #: A late request is shed once it has been at the pods for this times its own work.
LATE_CHECK_S = 1.0  #: Longest pause before the next look at a late request that is not shed yet.


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLimits:
    """The settings of a gate."""

    max_running: int = 0  #: Most requests that run on the pods at once; 0 for any number.
    max_queue: int = 2048  #: Most requests that wait. It bounds the memory; the forecast bounds the time.
    max_ttft_s: float = 0.0  #: Longest time to the first token, forecast or real. 0: only deadlines of requests count.
    tiers: tuple[Tier, ...] = ()  #: The highest first; () for one queue with all requests.


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
        self._queue: FairQueue | TierQueue = TierQueue(limits.tiers) if limits.tiers else FairQueue()
        self._rejections = Rejections(limits.tiers, self._queue, metrics)
        self._short_answers = {tier: ShortAnswers() for tier in limits.tiers if tier.max_tokens is not None}
        self._waiters: dict[QueueEntry, asyncio.Future[None]] = {}  #: Set when the entry passes or is evicted.
        self._running = 0  #: Requests that passed and were not released.
        self._outstanding: dict[QueueEntry, None] = {}  #: Running requests without a first token, oldest first.
        self._outstanding_s = 0.0  #: Work of the outstanding requests.
        self._without_room: dict[QueueEntry, None] = {}  #: The outstanding ones that all decode pods refused.
        self._recently_passed: deque[tuple[float, int]] = deque()  #: Time and prompt tokens, for REPORT_DELAY_S.
        self._turns = BusySpeed()  #: Expected tokens per second that leave the queue, while requests wait.
        self._first_tokens = BusySpeed()  #: Work per second of first tokens, while requests wait.
        self._ends = BusySpeed()  #: Answered requests per second that end, while requests run.
        self._proven = ProvenSpeed()
        self._pods: PodSpeed | None = None  #: The rates as they were at `_pods_read_at`.
        self._pods_read_at = -math.inf
        self._measured = False  #: The speeds were measured in work by measured rates, not by assumed ones.
        self._refused_at = -math.inf  #: When all decode pods refused a request.
        self._next_shed_at = -math.inf  #: When waiting requests get their next forecast.
        self._changed = asyncio.Event()  #: Set when a request was released, or got its first token.
        self._pump: asyncio.Task[None] | None = None  #: Runs `_serve_queue` while requests wait.

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._queue)

    @property
    def waiting_by_tier(self) -> list[tuple[str, int]]:
        """The name of each tier and the number of its waiting requests; empty without tiers."""
        return self._queue.waiting_by_tier() if isinstance(self._queue, TierQueue) else []

    def tier(self, priority: int) -> Tier | None:
        """Returns the tier of requests of this priority; None without tiers."""
        tiers = self._limits.tiers
        return tiers[tier_of(tiers, priority)] if tiers else None

    def answer_limit(self, caller: Caller, priority: int) -> int | None:
        """Returns the longest answer of a request that comes now, in tokens, because its tier is overloaded.

        None if the tier is not overloaded, or its answers are never shortened.
        """
        tier = self.tier(priority)
        if tier is None or tier.max_tokens is None:
            return None
        now = self._clock()
        wait_s = 0.0
        if self._queue or not self._pods_have_room():
            entry = self._entry(caller, priority, 0, 0, math.inf, None)
            wait_s = self._rejections.wait_s(entry, self._outlook())
        return tier.max_tokens if self._short_answers[tier].update(wait_s, now) else None

    def count_shortened(self, priority: int) -> None:
        """Counts a request that got a shorter answer than it asked for."""
        if (tier := self.tier(priority)) is not None:
            self._metrics.shortened.labels(tier.name).inc()

    async def acquire(
        self,
        caller: Caller,
        priority: int,
        prompt_tokens: int,
        expected_tokens: int,
        deadline: float,
        count_hits: Callable[[], Awaitable[int]],
        *,
        arrived_at: float | None = None,
        prompts: int = 1,
        on_wait: Callable[[], None] = lambda: None,
        shed: Callable[[BatonError], None] | None = None,
    ) -> QueueEntry:
        """Waits until the request may go to the pods. Give the returned entry to `release` when the request has ended.

        Args:
            expected_tokens: Prompt and expected output tokens.
            deadline: Time of the gate's clock.
            count_hits: Returns the prompt tokens that need no computing; called only if the request has to wait.
            arrived_at: When the request arrived at the gateway, in the gate's clock; default: now.
            prompts: Number of its prompts. `on_first_token` is called once for each.
            on_wait: Called when the request begins to wait.
            shed: Ends the request with an error if it waits too long at the pods; called at most once.

        Raises:
            Overloaded: The request would wait too long, and requests of its own tenant or of higher tiers wait too.
            Unavailable: The request would wait too long behind other tenants.
            DeadlineExceeded: The deadline passed while the request waited.
        """
        entry = self._entry(caller, priority, prompt_tokens, expected_tokens, deadline, arrived_at)
        entry.prompts_left, entry.shed = prompts, shed
        if self._try_pass(entry):
            return entry
        self._rejections.require_in_time(entry, self._outlook(), own=False)  # these raise before hits are looked up
        self._find_victim(entry)
        entry.prompt_tokens = max(1, prompt_tokens - await count_hits())
        if self._try_pass(entry):
            return entry
        entry.forecast_s = self._rejections.require_in_time(entry, self._outlook(), own=True)
        if (victim := self._find_victim(entry)) is not None:
            self._end_wait(victim, self._rejections.queue_full(victim, self._outlook()))
        now = entry.waited_from = self._clock()
        if not self._queue:
            self._turns.begin(now)
            self._first_tokens.begin(now)
        self._queue.add(entry)
        on_wait()
        self._waiters[entry] = asyncio.get_running_loop().create_future()
        if self._pump is None or self._pump.done():
            self._pump = asyncio.get_running_loop().create_task(self._serve_queue())
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock())):
                await self._waiters[entry]
        except TimeoutError as e:
            self._give_up(entry)
            self._metrics.rejections.labels("deadline").inc()
            raise DeadlineExceeded("the request's time is over") from e
        except BaseException:
            self._give_up(entry)
            raise
        finally:
            self._waiters.pop(entry, None)
            self._metrics.admission_wait.observe(self._clock() - entry.waited_from)
        return entry

    def refuse_if_late(self, caller: Caller, priority: int, deadline: float, arrived_at: float) -> None:
        """Raises the error of `acquire` if even a request without a prompt would be late. Cheap if no request waits."""
        if self._queue:
            entry = self._entry(caller, priority, 0, 0, deadline, arrived_at)
            self._rejections.require_in_time(entry, self._outlook(), own=False)

    def on_first_token(self, entry: QueueEntry) -> None:
        """Called when one of the request's prompts has its first token."""
        if entry.late_timer is not None:
            entry.late_timer.cancel()
        entry.answered = True
        entry.prompts_left -= 1
        if entry.prompts_left <= 0:
            self._leave_outstanding(entry, done=True)

    def on_no_room(self, entry: QueueEntry, error: Overloaded) -> float:
        """Called when all decode pods are full and refused a request with `error`. Returns the pause before a retry.

        Raises `error` if no answered request has ended lately, or if the request would not get room in time.
        """
        now = self._refused_at = self._clock()
        ends_per_s = self._ends.per_s(now)
        if entry not in self._outstanding or not ends_per_s:
            raise error
        self._without_room.setdefault(entry)
        others = itertools.takewhile(lambda waiting: waiting is not entry, self._without_room)
        before = sum(waiting.priority >= entry.priority for waiting in others)
        left_s, wait_s = entry.latest - now, (before + 1) / ends_per_s
        if wait_s > left_s:
            self._metrics.rejections.labels("late").inc()
            raise Overloaded(error.message, retry_after_s=max(error.retry_after_s or 0.0, wait_s - left_s)) from error
        low, high = NO_ROOM_PAUSE_S
        return min(high, max(low, wait_s / 2))

    def release(self, entry: QueueEntry, used_tokens: int) -> None:
        """Called when the request has ended. `used_tokens`: its prompt and output tokens; 0 if it was not answered."""
        if entry.late_timer is not None:
            entry.late_timer.cancel()
        entry.shed = None  # it may refer to the request
        self._leave_outstanding(entry, done=used_tokens > 0)
        self._running -= 1
        if used_tokens:
            self._ends.on_done(1, self._clock())
        self._queue.correct_count(entry, used_tokens - entry.expected_tokens)
        self._changed.set()

    def stop(self) -> None:
        """Lets no more requests pass. The caller cancels the tasks of waiting requests."""
        if self._pump is not None:
            self._pump.cancel()

    def _entry(
        self,
        caller: Caller,
        priority: int,
        prompt_tokens: int,
        expected_tokens: int,
        deadline: float,
        arrived_at: float | None,
    ) -> QueueEntry:
        entry = QueueEntry(caller.tenant, caller.weight, priority, prompt_tokens, expected_tokens)
        entry.arrived_at = self._clock() if arrived_at is None else arrived_at
        entry.latest = min(deadline, entry.arrived_at + (self._limits.max_ttft_s or math.inf))
        return entry

    # -- passing

    def _try_pass(self, entry: QueueEntry) -> bool:
        """Lets a request pass at once if no request waits and the pods have room."""
        if self._queue or not self._pods_have_room():
            return False
        self._queue.count_as_served(entry)
        self._pass(entry)
        return True

    def _pods_have_room(self) -> bool:
        """Returns whether the pods can take one more request, because few requests wait there for a first token."""
        if not self._outstanding:
            return not self._full
        if self._full or not self._few_outstanding():
            return False
        now, pods = self._clock(), self._pod_speed()
        factor = self._slowness(self._speed(now, pods), pods)
        return factor * self._forecast.queue_s(self._unreported_tokens()) < TARGET_POD_QUEUE_S

    def _few_outstanding(self) -> bool:
        """Returns whether the outstanding requests are few for the proven speed."""
        count, least = len(self._outstanding), LEAST_PER_POD * max(1, self._pod_speed().pods)
        now, proven = self._clock(), self._proven.speed
        if now - self._refused_at < NO_ROOM_S:
            return count < max(least, TARGET_POD_QUEUE_S * (self._ends.per_s(now) or 0.0))
        if proven is None:
            return count < UNPROVEN_PER_POD // LEAST_PER_POD * least
        return count < least or self._outstanding_s < PROVEN_AHEAD_S * proven

    def _slowness(self, speed: float | None, pods: PodSpeed) -> float:
        """Returns the factor by which the pods are slower than their reported rates.

        It is the larger of two: by the speed of first tokens, and by how late the second oldest first token is.
        """
        factor = pods.speed / speed if speed and pods.measured else 1.0
        oldest = list(itertools.islice(self._outstanding, 2))
        judged = oldest[-1]  # the second oldest, because a single request may be slow for reasons of its own
        return max(factor, (self._clock() - judged.passed_at) / max(judged.pod_s, TOLERATED_WAIT_S))

    def _speed(self, now: float, pods: PodSpeed) -> float | None:
        """Returns the work per second of first tokens while requests wait, by the present rates; None while unknown."""
        if pods.measured != self._measured:  # the work was computed with other rates
            self._measured = pods.measured
            self._first_tokens, self._proven.speed = BusySpeed(), None
            self._first_tokens.begin(now)
        return self._first_tokens.per_s(now) if self._queue else None

    def _pod_speed(self) -> PodSpeed:
        """Returns the reported rates, read at most every TICK_S[0], because many requests ask under overload."""
        now = self._clock()
        if self._pods is None or now - self._pods_read_at > TICK_S[0]:
            self._pods, self._pods_read_at = PodSpeed.of(self._forecast), now
        return self._pods

    @property
    def _full(self) -> bool:
        return 0 < self._limits.max_running <= self._running

    def _unreported_tokens(self) -> int:
        """Returns the prompt tokens of requests that passed within REPORT_DELAY_S, so no report has them."""
        now = self._clock()
        while self._recently_passed and now - self._recently_passed[0][0] > REPORT_DELAY_S:
            self._recently_passed.popleft()
        return sum(tokens for _, tokens in self._recently_passed)

    def _pass(self, entry: QueueEntry) -> None:
        now = entry.passed_at = self._clock()
        pods, queue_s = self._pod_speed(), self._forecast.queue_s(self._unreported_tokens())
        entry.work_s = pods.work_s(1, entry.prompt_tokens)
        entry.pod_s = queue_s + entry.work_s
        entry.done_before_s = self._proven.done_s
        entry.alone = not (self._outstanding or self._queue) and queue_s <= TOLERATED_WAIT_S
        if not self._running:
            self._ends.begin(now)
        self._running += 1
        self._outstanding[entry] = None
        self._outstanding_s += entry.work_s
        self._recently_passed.append((now, entry.prompt_tokens))
        if entry.shed is not None and self._limits.max_ttft_s:
            loop = asyncio.get_running_loop()
            entry.late_timer = loop.call_later(max(0.0, entry.latest - now), self._on_late, entry)

    def _leave_outstanding(self, entry: QueueEntry, *, done: bool) -> None:
        """Ends the wait of a request for its first tokens. `done`: all have come. Later calls have no effect."""
        if entry not in self._outstanding:
            return
        del self._outstanding[entry]
        self._without_room.pop(entry, None)
        self._outstanding_s = self._outstanding_s - entry.work_s if self._outstanding else 0.0
        if done:
            now = self._clock()
            self._proven.on_first_token(entry.work_s, entry.done_before_s, now - entry.passed_at)
            if self._queue:
                self._first_tokens.on_done(entry.work_s, now)
            if entry.forecast_s > TOLERATED_WAIT_S:
                self._rejections.on_first_token(entry, now)
        self._changed.set()

    def _on_late(self, entry: QueueEntry) -> None:
        """Called when a first token is due at the pods. Sheds the request if the pods had time to compute it."""
        if entry not in self._outstanding or entry.answered or entry.alone or entry.shed is None:
            return
        now, pods = self._clock(), self._pod_speed()
        own_s = LATE_FACTOR * pods.work_s(1, entry.prompt_tokens) if pods.measured else math.inf
        left_s = entry.passed_at + TOLERATED_WAIT_S + own_s - now
        if left_s > 0:
            loop = asyncio.get_running_loop()
            entry.late_timer = loop.call_later(min(LATE_CHECK_S, left_s), self._on_late, entry)
            return
        entry.shed(self._rejections.shed_at_pods(entry, now))

    # -- waiting

    def _give_up(self, entry: QueueEntry) -> None:
        """Ends the wait of a request whose client or time is gone. A request that has just passed is released."""
        waiter = self._waiters[entry]
        if not self._queue.remove(entry) and waiter.done() and not waiter.cancelled() and waiter.exception() is None:
            self.release(entry, 0)

    def _end_wait(self, entry: QueueEntry, error: BatonError) -> None:
        """Removes a waiting request, and raises the error in its `acquire`."""
        self._queue.remove(entry)
        waiter = self._waiters[entry]
        if not waiter.done():  # else its client is gone, and it leaves by itself
            waiter.set_exception(error)

    async def _serve_queue(self) -> None:
        """Lets waiting requests pass and sheds late ones, until the queue is empty."""
        while self._queue:
            self._changed.clear()
            pause_s = TICK_S[1]
            try:
                self._admit()
                if self._queue and self._clock() >= self._next_shed_at:
                    self._shed_late()
                pause_s = self._forecast.queue_s(self._unreported_tokens()) - TARGET_POD_QUEUE_S
            except Exception:
                _log.exception("the queue could not be served, trying again")
            with suppress(TimeoutError):
                async with asyncio.timeout(min(TICK_S[1], max(TICK_S[0], pause_s))):
                    await self._changed.wait()

    def _admit(self) -> None:
        """Lets waiting requests pass while the pods have room."""
        while self._queue and self._pods_have_room():
            entry = self._queue.pop()
            assert entry is not None
            self._turns.on_done(entry.expected_tokens, self._clock())
            self._pass(entry)
            waiter = self._waiters[entry]
            if waiter.cancelled():
                self.release(entry, 0)
            else:
                waiter.set_result(None)

    def _shed_late(self) -> None:
        """Makes the forecast of each waiting request again, and sheds the requests that would be late.

        For the requests with the next turns only the pods' queue counts, so a pause of the pods does not empty the
        queue. A request that is shed does not count for the requests behind it.
        """
        began, outlook = time.perf_counter(), self._outlook()
        kept = LEAST_PER_POD * max(1, outlook.pods.pods)
        place, expected_tokens, work_s = 0, 0, 0.0
        for entry in self._queue.in_order():
            if place < kept:  # `acquire` ends it at its deadline
                wait_s, latest = outlook.pod_queue_s, entry.arrived_at + (self._limits.max_ttft_s or math.inf)
            else:
                wait_s, latest = outlook.wait_s(expected_tokens, work_s), entry.latest
            first_s, left_s = wait_s + outlook.compute_s(entry.prompt_tokens), latest - outlook.now
            if first_s > left_s and (wait_s > TOLERATED_WAIT_S or left_s < TOLERATED_WAIT_S):
                self._end_wait(entry, self._rejections.shed_waiting(entry, outlook.now, first_s, left_s))
                continue
            place += 1
            expected_tokens += entry.expected_tokens
            work_s += outlook.pods.work_s(1, entry.prompt_tokens)
        self._next_shed_at = self._clock() + max(TICK_S[1], (time.perf_counter() - began) / SHED_SHARE)

    def _outlook(self) -> WaitOutlook:
        """Returns the values from which waits are forecast now."""
        now, forecast = self._clock(), self._forecast
        pods = self._pod_speed()
        speed = self._speed(now, pods)
        done_s = 0.0 if not speed else speed * self._first_tokens.since_last_s(now)
        turns_s = self._turns.per_s(now) if self._full or self._without_room else None
        return WaitOutlook(
            now,
            pods,
            forecast.queue_s(self._unreported_tokens()) if pods.measured else 0.0,
            max(0.0, self._outstanding_s - done_s),
            speed,
            self._turns.since_last_s(now) if self._queue else 0.0,
            turns_s if self._queue else None,
        )

    def _find_victim(self, entry: QueueEntry) -> QueueEntry | None:
        """Returns the waiting request to evict so that `entry` fits; None if the queue has room.

        Raises the error of a full queue if no request may be evicted for this one.
        """
        if len(self._queue) < self._limits.max_queue:
            return None
        victim = self._queue.find_victim(entry)
        if victim is None:
            raise self._rejections.queue_full(entry, self._outlook())
        return victim
