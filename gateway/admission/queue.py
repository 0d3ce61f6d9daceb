"""The waiting requests of one model: the order of their turns, and the speeds from which their waits are forecast.

All times are in seconds. The work of a prompt is the time that the fastest pod needs for it by its reported rates. A
speed of 2 means that the pods together do two seconds of work in each second.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from common.errors import BatonError
from gateway.pods.table import PodTable
from gateway.pods.view import PodView

AGING_TURNS = 4  #: Every turn with this number ignores priorities: the 4th, the 8th, and so on.
MAX_IDLE_TENANTS = 4096  #: Most tenants without a waiting request that keep their counter.
SPEED_WINDOW_S = 10.0  #: Time constant with which old measured values fade.
MIN_MEASURED_S = 1.0  #: A speed is used once it was measured for this long.
_TOKENS = 1000  #: Length of the prompt from which PodSpeed computes the work of one token.
PROVEN_DECAY = 0.9  #: Each first token lowers the proven speed to this share, unless the token proves a higher speed.


@dataclass(eq=False, slots=True)
class QueueEntry:
    """One request at the gate, from its arrival to its release."""

    tenant: str
    weight: float  #: Share of the tenant relative to the other tenants.
    priority: int  #: A higher value goes first.
    prompt_tokens: int  #: Prompt tokens that the pods have to compute.
    expected_tokens: int  #: Prompt and expected output tokens.
    arrival: int = 0  #: Number in the order of arrival at the queue.
    arrived_at: float = 0.0  #: When the request arrived at the gateway.
    latest: float = math.inf  #: When its first token is due: its deadline, or max_ttft_s after its arrival.
    forecast_s: float = 0.0  #: Forecast of the time to the first token, when the wait began; 0 if it did not wait.
    waited_from: float = 0.0  #: When the wait began.
    passed_at: float = 0.0  #: When the request passed: it went to the pods.
    pod_s: float = 0.0  #: Forecast of the time at the pods until the first token, when it passed.
    work_s: float = 0.0  #: Its work by the pods' rates when it passed.
    done_before_s: float = 0.0  #: `ProvenSpeed.done_s` when it passed.
    prompts_left: int = 1  #: Its prompts without a first token.
    alone: bool = False  #: No other request was ahead when it passed.
    answered: bool = False  #: A first token has come.
    reserved_turn: bool = False  #: It left the queue on the reserved share of its tier.
    shed: Callable[[BatonError], None] | None = None  #: Ends the request at the pods.
    late_timer: asyncio.TimerHandle | None = None  #: Calls `Gate._on_late` when the first token is due.


@dataclass(slots=True)
class _Tenant:
    """A tenant with waiting requests."""

    counter: float  #: Virtual token counter: tokens that it got, divided by its weight.
    weight: float = 1.0
    expected_tokens: int = 0  #: Expected tokens of all its waiting requests.
    prompt_tokens: int = 0  #: Prompt tokens of all its waiting requests.
    levels: dict[int, dict[QueueEntry, None]] = field(default_factory=dict)  #: Its requests by priority, oldest first.

    def oldest(self) -> QueueEntry:
        return min((next(iter(level)) for level in self.levels.values()), key=lambda entry: entry.arrival)


@dataclass(frozen=True, slots=True)
class TokensAhead:
    """Sums over the requests that have their turn before a given request."""

    expected_tokens: int
    prompt_tokens: int
    own_expected_tokens: int  #: The part of `expected_tokens` that belongs to the given request's tenant.
    requests: int = 0  #: Number of the requests.


class FairQueue:
    """A queue that is fair between tenants by tokens, respects priorities, and starves no request. Pure.

    Fairness between tenants uses virtual token counters (VTC; Sheng et al., "Fairness in Serving Large Language
    Models", OSDI 2024) with weights. A tenant's counter is the number of tokens that it got, divided by its weight. The
    next request is from the tenant with the lowest counter. A tenant that becomes active again gets no credit for the
    time without requests. When a request leaves the queue, its expected tokens are added to the counter. When it ends,
    the counter is corrected.

    The highest waiting priority goes first. Every AGING_TURNS-th turn ignores priorities and takes the tenant's oldest
    request, so each request leaves the queue after a bounded number of turns.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, _Tenant] = {}  #: Tenants with waiting requests.
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
        """Returns the tokens ahead of this request if it came now. The error is at most one request per tenant.

        All requests of higher priority are ahead, unless a turn that ignores priorities comes first. A request of equal
        priority is ahead if its tenant's counter is then below the counter at which this request has its turn.
        """
        ahead = self._tokens_ahead(entry, entry.priority)
        if not any(priority > entry.priority for tenant in self._waiting.values() for priority in tenant.levels):
            return ahead
        aged = self._tokens_ahead(entry, None)
        expected, prompt = (
            sum(getattr(t, name) for t in self._waiting.values()) / self._size
            for name in ("expected_tokens", "prompt_tokens")
        )
        aged = TokensAhead(
            int(AGING_TURNS * (aged.expected_tokens + expected)),
            int(AGING_TURNS * (aged.prompt_tokens + prompt)),
            aged.own_expected_tokens,
            AGING_TURNS * (aged.requests + 1),
        )
        return aged if aged.expected_tokens < ahead.expected_tokens else ahead

    def totals(self) -> TokensAhead:
        """Returns the sums over all waiting requests."""
        tenants = self._waiting.values()
        expected, prompt = sum(t.expected_tokens for t in tenants), sum(t.prompt_tokens for t in tenants)
        return TokensAhead(expected, prompt, 0, self._size)

    def _tokens_ahead(self, entry: QueueEntry, priority: int | None) -> TokensAhead:
        """Returns the tokens ahead of a request that has this priority. None: all turns ignore priorities."""
        own = self._waiting.get(entry.tenant)
        counter = self._counter(entry.tenant) if own is None else own.counter
        own_expected, own_prompt, own_requests = (0, 0, 0) if own is None else _tokens_from(own, priority)
        turn_counter = counter + own_expected / entry.weight
        expected, prompt, requests = float(own_expected), float(own_prompt), float(own_requests)
        for name, tenant in self._waiting.items():
            if name == entry.tenant:
                continue
            theirs, their_prompt, their_requests = _tokens_from(tenant, priority)
            if not theirs:
                continue
            higher = 0 if priority is None else _tokens_from(tenant, priority + 1)[0]
            ahead = min(theirs, max(higher, tenant.weight * max(0.0, turn_counter - tenant.counter)))
            expected += ahead
            prompt += their_prompt * ahead / theirs
            requests += their_requests * ahead / theirs
        return TokensAhead(int(expected), int(prompt), own_expected, math.ceil(requests))

    def in_order(self) -> Iterator[QueueEntry]:
        """Yields the waiting requests in the order of their turns, as if no other request came. Changes nothing.

        Counters and first arrivals of tenants only grow, so an old key in a heap is a lower bound. A key is brought up
        to date when it comes to the top. A request costs O(log n).
        """
        tenants = {name: _TurnOrder(tenant) for name, tenant in self._waiting.items()}
        by_age = [(t.counter, t.oldest().arrival, name) for name, t in self._waiting.items()]
        heapify(by_age)
        by_priority: dict[int, list[tuple[float, int, str]]] = {}
        for name, tenant in self._waiting.items():
            for priority, level in tenant.levels.items():
                by_priority.setdefault(priority, []).append((tenant.counter, next(iter(level)).arrival, name))
        for heap in by_priority.values():
            heapify(heap)
        for turn in range(self._turn + 1, self._turn + 1 + self._size):
            entry = None
            while entry is None:
                among = None if turn % AGING_TURNS == 0 else max(by_priority)
                heap = by_age if among is None else by_priority[among]
                name = heap[0][2]
                tenant_order = tenants[name]
                head = tenant_order.head(among)
                if head is None:
                    heappop(heap)
                    if not heap and among is not None:
                        del by_priority[among]
                elif (key := (tenant_order.counter, head.arrival, name)) != heap[0]:
                    heapreplace(heap, key)
                else:
                    entry = head
            tenant_order.take(entry)
            yield entry

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
        return self.newest_of_largest()

    def newest_of_largest(self) -> QueueEntry:
        """Returns the newest request of lowest priority of the tenant with the most waiting tokens for its weight."""
        tenant = max(self._waiting.values(), key=lambda tenant: tenant.expected_tokens / tenant.weight)
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


def _tokens_from(tenant: _Tenant, priority: int | None) -> tuple[int, int, int]:
    """Returns expected tokens, prompt tokens and number of the requests of this priority or higher; None for all."""
    if priority is None or min(tenant.levels) >= priority:
        return tenant.expected_tokens, tenant.prompt_tokens, sum(map(len, tenant.levels.values()))
    entries = [entry for level, entries in tenant.levels.items() if level >= priority for entry in entries]
    return sum(e.expected_tokens for e in entries), sum(e.prompt_tokens for e in entries), len(entries)


class _TurnOrder:
    """The requests of one tenant, as `in_order` takes them one after another."""

    def __init__(self, tenant: _Tenant) -> None:
        self.counter = tenant.counter
        self._weight = tenant.weight
        self._levels = {priority: deque(level) for priority, level in tenant.levels.items()}
        entries = [entry for level in tenant.levels.values() for entry in level]
        self._by_age = deque(sorted(entries, key=lambda entry: entry.arrival) if len(self._levels) > 1 else entries)
        self._taken: set[QueueEntry] = set()

    def head(self, priority: int | None) -> QueueEntry | None:
        """Returns the next request of a priority; None: the oldest of all."""
        entries = self._by_age if priority is None else self._levels[priority]
        while entries and entries[0] in self._taken:
            entries.popleft()
        return entries[0] if entries else None

    def take(self, entry: QueueEntry) -> None:
        """Takes a request, and counts it as served."""
        self._taken.add(entry)
        self.counter += entry.expected_tokens / self._weight


class QueueForecast:
    """Predicts how soon the pods of a table can start one more prompt. Without pods: at once, so that routing fails."""

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

    @property
    def num_pods(self) -> int:
        """Number of pods that compute prompts."""
        return len(self._views())

    def queue_s(self, unreported_tokens: int) -> float:
        """Returns the seconds until a pod can start one more prompt.

        `unreported_tokens`: prompt tokens that went to the pods and are not in their reports yet.
        """
        views, now = self._views(), time.monotonic()
        if not views:
            return 0.0
        best = min(views, key=lambda view: view.queue_s(now))
        return best.queue_s(now) + unreported_tokens * best.prefill_s_per_token / len(views)

    def compute_s(self, tokens: int) -> float:
        """Returns the seconds in which the fastest pod computes a prompt of this length."""
        return min((view.prefill_overhead_s + tokens * view.prefill_s_per_token for view in self._views()), default=0.0)

    def tokens_per_s(self) -> float:
        """Returns the prompt tokens per second of all pods together."""
        return sum(1 / view.prefill_s_per_token for view in self._views())


@dataclass(frozen=True, slots=True)
class PodSpeed:
    """The reported rates of the pods at one moment, in terms of work."""

    pods: int  #: Number of pods that compute prompts.
    measured: bool  #: A pod has measured its rate; otherwise all values are assumptions.
    request_s: float  #: Work of a request beyond its tokens.
    token_s: float  #: Work of a prompt token.
    speed: float  #: Work per second of all pods together.

    @classmethod
    def of(cls, forecast: QueueForecast) -> PodSpeed:
        """Reads the rates from a forecast."""
        request_s = forecast.compute_s(0)
        token_s = (forecast.compute_s(_TOKENS) - request_s) / _TOKENS
        return cls(forecast.num_pods, forecast.measured, request_s, token_s, forecast.tokens_per_s() * token_s)

    def work_s(self, requests: int, tokens: int) -> float:
        """Returns the work of several requests that have `tokens` prompt tokens together."""
        return requests * self.request_s + tokens * self.token_s


class BusySpeed:
    """Measures an amount per second, only in times with something to do. Old values fade. Pure."""

    def __init__(self) -> None:
        self._amount = self._seconds = self._events = 0.0
        self._at = 0.0  #: When an amount was last added, or `begin` was called.

    def begin(self, now: float) -> None:
        """Called when there is something to do again. The time before does not count."""
        self._at = now

    def on_done(self, amount: float, now: float) -> None:
        """Adds an amount that was just done."""
        passed_s = max(0.0, now - self._at)
        keep = 1 / (1 + passed_s / SPEED_WINDOW_S)
        self._amount = self._amount * keep + amount
        self._seconds = self._seconds * keep + passed_s
        self._events = self._events * keep + 1
        self._at = now

    def since_last_s(self, now: float) -> float:
        """Returns the seconds since an amount was added. Call it only while there is something to do."""
        return now - self._at

    def per_s(self, now: float) -> float | None:
        """Returns the amount per second; None before MIN_MEASURED_S. A silence longer than usual lowers it."""
        silence_s = self.since_last_s(now)
        if self._seconds + silence_s < MIN_MEASURED_S or not self._events:
            return None
        usual_s = self._seconds / self._events
        return self._amount / (self._seconds + (silence_s if silence_s > usual_s else 0.0))


class ProvenSpeed:
    """The highest speed that recent first tokens prove. Pure.

    The first token of a request proves a speed: the work of all first tokens that came while the request was at the
    pods, divided by that time. A step with many prompts gives many first tokens at once, so the highest proof counts
    and not the mean.
    """

    def __init__(self) -> None:
        self.done_s = 0.0  #: Work of all first tokens so far.
        self.speed: float | None = None  #: Work per second, None before the first proof.

    def on_first_token(self, work_s: float, done_before_s: float, seconds: float) -> None:
        """Records a first token.

        Args:
            work_s: work of its request.
            done_before_s: `done_s` when the request went to the pods.
            seconds: time since then.
        """
        self.done_s += work_s
        proof = (self.done_s - done_before_s) / max(seconds, 1e-3)
        self.speed = max(proof, PROVEN_DECAY * (self.speed or 0.0))
