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
import itertools
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from common.errors import BatonError, DeadlineExceeded, Overloaded, Unavailable
from gateway.admission.api_keys import Caller
from gateway.admission.forecast import QueueForecast, QueueSpeed
from gateway.telemetry.metrics import GatewayMetrics

TARGET_POD_QUEUE_S = 1.0  #: Prompt queue that pods are kept at: enough to keep them busy between two reports.
REPORT_DELAY_S = 0.1  #: A request that passed this recently may not be in the pods' reports yet.
TOLERATED_WAIT_S = 0.5  #: No request is rejected for a shorter wait.
TICK_S = (0.01, 0.25)  #: Shortest and longest pause between two looks at the pods' queues while requests wait.

#: A first token may come this much later than forecast, which sees neither the time between reports nor a running step.
FORECAST_TOLERANCE = 1.05
MAX_RETRY_S = 60.0
AGING_TURNS = 4  #: Every so many turns of the queue, priorities are ignored.
MAX_IDLE_TENANTS = 4096  #: Max idle tenants with a counter.


@dataclass(eq=False, slots=True)
class QueueEntry:
    """One request."""

    tenant: str
    weight: float  # share of the tenant relative to the others
    priority: int  # higher goes first
    prompt_tokens: int  # prompt tokens to compute
    expected_tokens: int  # prompt and expected output tokens
    arrival: int = 0  # order of arrival


@dataclass(slots=True)
class _Tenant:
    """A tenant with waiting requests."""

    counter: float  #: Virtual token counter.
    weight: float = 1.0
    expected_tokens: int = 0  #: Tokens of all its waiting requests.
    prompt_tokens: int = 0
    levels: dict[int, dict[QueueEntry, None]] = field(default_factory=dict)  #: By priority, oldest first.

    def oldest(self) -> QueueEntry:
        return min((next(iter(level)) for level in self.levels.values()), key=lambda entry: entry.arrival)


@dataclass(frozen=True, slots=True)
class TokensAhead:
    """Tokens of the requests that would be served before a new one."""

    expected_tokens: int
    prompt_tokens: int
    own_expected_tokens: int  # those of `expected_tokens` that belong to the same tenant


class FairQueue:
    """A queue that is fair between tenants by tokens, respects priorities, and starves no request. Pure.

    Fairness between tenants uses virtual token counters (VTC; Sheng et al., "Fairness in Serving Large Language
    Models", OSDI 2024) with weights. A tenant's counter is the number of tokens that it got, divided by its weight. The
    next request is from the tenant with the lowest counter. A tenant that becomes active again gets no credit for the
    time before. Expected tokens are counted when a request leaves the queue, and corrected when the request ends.

    The highest waiting priority goes first. Every AGING_TURNS-th turn ignores priorities and takes the tenant's oldest
    request, so each request leaves the queue after a bounded number of turns.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, _Tenant] = {}  # tenants with waiting requests
        self._idle_counters: dict[str, float] = {}  #: Counters of the other tenants.
        self._arrivals = itertools.count(1)
        self._turn = 0
        self._min_counter = 0.0  #: Lowest counter of the waiting tenants at the last turn; it never decreases.
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[QueueEntry]:
        return (e for tenant in self._waiting.values() for level in tenant.levels.values() for e in level)

    def add(self, entry: QueueEntry) -> None:
        """Adds a waiting request."""
        tenant = self._waiting.get(entry.tenant)
        if tenant is None:
            tenant = self._waiting[entry.tenant] = _Tenant(self._counter(entry.tenant))
            self._idle_counters.pop(entry.tenant, None)
        entry.arrival = next(self._arrivals)
        tenant.weight = entry.weight
        tenant.expected_tokens += entry.expected_tokens
        tenant.prompt_tokens += entry.prompt_tokens
        tenant.levels.setdefault(entry.priority, {})[entry] = None
        self._size += 1

    def remove(self, entry: QueueEntry) -> bool:
        """Removes a waiting request without counting it as served. Returns False if it does not wait."""
        tenant = self._waiting.get(entry.tenant)
        level = tenant.levels.get(entry.priority) if tenant is not None else None
        if tenant is None or level is None or entry not in level:
            return False
        del level[entry]
        if not level:
            del tenant.levels[entry.priority]
        tenant.expected_tokens -= entry.expected_tokens
        tenant.prompt_tokens -= entry.prompt_tokens
        self._size -= 1
        if not tenant.levels:
            del self._waiting[entry.tenant]
            self._remember(entry.tenant, tenant.counter)
        return True

    def pop(self) -> QueueEntry | None:
        """Removes and returns the next request, and counts it as served."""
        if not self._waiting:
            return None
        self._turn += 1
        if self._turn % AGING_TURNS == 0:
            tenant = min(self._waiting.values(), key=lambda t: (t.counter, t.oldest().arrival))
            entry = tenant.oldest()
        else:
            top = max(priority for t in self._waiting.values() for priority in t.levels)
            rivals = [t for t in self._waiting.values() if top in t.levels]
            tenant = min(rivals, key=lambda t: (t.counter, next(iter(t.levels[top])).arrival))
            entry = next(iter(tenant.levels[top]))
        self._min_counter = max(self._min_counter, min(t.counter for t in self._waiting.values()))
        tenant.counter += entry.expected_tokens / tenant.weight
        self.remove(entry)
        return entry

    def count_as_served(self, entry: QueueEntry) -> None:
        """Counts a request that was served without waiting."""
        self._idle_counters[entry.tenant] = self._counter(entry.tenant)
        self.correct_count(entry, entry.expected_tokens)

    def correct_count(self, entry: QueueEntry, tokens: int) -> None:
        """Adds `tokens` (actual minus expected, may be negative) to the count of a served request."""
        tenant = self._waiting.get(entry.tenant)
        if tenant is not None:
            tenant.counter += tokens / entry.weight
        else:
            counter = self._idle_counters.get(entry.tenant, self._min_counter)
            self._remember(entry.tenant, counter + tokens / entry.weight)

    def tokens_ahead(self, entry: QueueEntry) -> TokensAhead:
        """Returns what would be served before this request if it came now; exact up to one request per tenant.

        All requests of higher priority are ahead. Those of equal priority are ahead until their tenant's counter passes
        the counter at which this request has its turn.
        """
        own = self._waiting.get(entry.tenant)
        counter = self._counter(entry.tenant) if own is None else own.counter
        own_expected, own_prompt = (0, 0) if own is None else _tokens_from(own, entry.priority)
        turn_counter = counter + own_expected / entry.weight
        expected, prompt = float(own_expected), float(own_prompt)
        for name, tenant in self._waiting.items():
            theirs, their_prompt = _tokens_from(tenant, entry.priority)
            if name == entry.tenant or not theirs:
                continue
            higher, _ = _tokens_from(tenant, entry.priority + 1)
            ahead = min(theirs, max(higher, tenant.weight * max(0.0, turn_counter - tenant.counter)))
            expected += ahead
            prompt += their_prompt * ahead / theirs
        return TokensAhead(int(expected), int(prompt), own_expected)

    def find_victim(self, entry: QueueEntry) -> QueueEntry | None:
        """Returns the waiting request to evict so that `entry` fits.

        That is the newest request of lowest priority of the tenant with the most waiting tokens for its weight. Returns
        None if no tenant would have more than the tenant of `entry`.
        """
        own = self._waiting.get(entry.tenant)
        own_share = ((own.expected_tokens if own is not None else 0) + entry.expected_tokens) / entry.weight
        name, tenant = max(self._waiting.items(), key=lambda item: item[1].expected_tokens / item[1].weight)
        if name == entry.tenant or tenant.expected_tokens / tenant.weight <= own_share:
            return None
        return next(reversed(tenant.levels[min(tenant.levels)]))

    def _counter(self, tenant: str) -> float:
        """Returns the counter of a tenant that becomes active again, lifted to the lowest active (VTC, section 4)."""
        floor = min((t.counter for t in self._waiting.values()), default=self._min_counter)
        return max(self._idle_counters.get(tenant, floor), floor)

    def _remember(self, tenant: str, counter: float) -> None:
        self._idle_counters[tenant] = counter
        if len(self._idle_counters) > MAX_IDLE_TENANTS:
            self._idle_counters = {name: c for name, c in self._idle_counters.items() if c > self._min_counter}
            for name in list(self._idle_counters)[:-MAX_IDLE_TENANTS]:
                del self._idle_counters[name]


def _tokens_from(tenant: _Tenant, priority: int) -> tuple[int, int]:
    """Returns the expected and the prompt tokens that wait with this priority or a higher one."""
    if min(tenant.levels) >= priority:
        return tenant.expected_tokens, tenant.prompt_tokens
    entries = [entry for level, entries in tenant.levels.items() if level >= priority for entry in entries]
    return sum(entry.expected_tokens for entry in entries), sum(entry.prompt_tokens for entry in entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLimits:
    max_running: int = 0  # requests that run on the pods at once; 0 for any number
    max_queue: int = 512  # requests that wait
    max_ttft_s: float = 0.0  # longest forecast time to the first token; 0 leaves only the requests' deadlines


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
        self._waiters: dict[QueueEntry, asyncio.Future[None]] = {}  #: Set when the entry passes or is evicted.
        self._running = 0  # requests that passed and were not released
        self._recently_passed: deque[tuple[float, int]] = deque()  #: Times and tokens of the last REPORT_DELAY_S.
        self._speed = QueueSpeed()
        self._changed = asyncio.Event()  # set when a request was released
        self._pump: asyncio.Task[None] | None = None  # runs `_serve_queue` while requests wait

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
        self._find_victim(entry)  # raises before the hits are looked up, if `entry` cannot wait
        entry.prompt_tokens = max(1, prompt_tokens - await count_hits())
        if self._try_pass(entry):
            return entry
        self._require_in_time(entry, deadline)
        if (victim := self._find_victim(entry)) is not None:
            self._queue.remove(victim)
            waiter = self._waiters[victim]
            if not waiter.done():  # else the victim's client is gone, and it leaves by itself
                waiter.set_exception(self._queue_full_error(victim))
        began = self._clock()
        if not self._queue:
            self._speed.begin(began)
        self._queue.add(entry)
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

    def _give_up(self, entry: QueueEntry) -> None:
        """Removes a waiting request. If it has just passed, it is released."""
        waiter = self._waiters[entry]
        if not self._queue.remove(entry) and waiter.done() and not waiter.cancelled() and waiter.exception() is None:
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
            with suppress(TimeoutError):
                async with asyncio.timeout(min(TICK_S[1], max(TICK_S[0], excess_s))):
                    await self._changed.wait()

    # -- rejecting

    def _require_in_time(self, entry: QueueEntry, deadline: float) -> None:
        """Raises if the first token is forecast too late."""
        limit_s = min(deadline - self._clock(), self._limits.max_ttft_s or math.inf)
        wait_s = self._wait_s(entry)
        compute_s = self._forecast.compute_s(entry.prompt_tokens) if self._forecast.measured else 0.0
        ttft_s = FORECAST_TOLERANCE * (wait_s + compute_s)
        if wait_s > TOLERATED_WAIT_S and ttft_s > limit_s:
            self._metrics.rejections.labels("forecast").inc()
            raise self._rejection(entry, f"the first token would take about {ttft_s:.3g} s", ttft_s - limit_s)

    def _find_victim(self, entry: QueueEntry) -> QueueEntry | None:
        """Returns the request to evict so that `entry` fits, None if there is room. Raises if none may be evicted."""
        if len(self._queue) < self._limits.max_queue:
            return None
        victim = self._queue.find_victim(entry)
        if victim is None:
            raise self._queue_full_error(entry)
        return victim

    def _queue_full_error(self, entry: QueueEntry) -> BatonError:
        self._metrics.rejections.labels("queue").inc()
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
