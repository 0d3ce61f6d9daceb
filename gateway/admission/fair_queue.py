"""Requests that wait, and who is next: fair between tenants by tokens, by priority, and nobody starves.

Each tenant has a counter of the tokens that it got, divided by its weight; the next request is of the tenant that is
behind, and a tenant that comes back is not given what it did not use: virtual token counters (Sheng et al., "Fairness
in Serving Large Language Models", OSDI 2024), with weights. Tokens are counted when a request leaves the queue, as
estimated, and corrected when it ends.

Among waiting requests the highest priority goes first. Every AGING_TURNS-th turn ignores priorities, and takes the
tenant's oldest request: so one that waits is out after a bounded number of turns, however many of higher priority keep
coming. Pure: neither time nor an event loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

AGING_TURNS = 4
MAX_IDLE_TENANTS = 4096  # whose counters are remembered


@dataclass(eq=False, slots=True)
class QueueEntry:
    """One request. work: prompt tokens; cost: tokens that it will probably take, prompt and answer."""

    tenant: str
    weight: float
    priority: int
    prompt_tokens: int
    expected_tokens: int
    arrival: int = 0  # order of arrival


@dataclass(slots=True)
class _Tenant:
    counter: float
    weight: float = 1.0
    expected_tokens: int = 0
    prompt_tokens: int = 0
    levels: dict[int, dict[QueueEntry, None]] = field(default_factory=dict)

    def oldest(self) -> QueueEntry:
        return min((next(iter(level)) for level in self.levels.values()), key=lambda entry: entry.arrival)


@dataclass(frozen=True, slots=True)
class TokensAhead:
    """What would be served before a new request. own: of the same tenant; the rest is others'."""

    expected_tokens: int
    prompt_tokens: int
    own_expected_tokens: int


class FairQueue:
    """See the top of this file."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Tenant] = {}
        self._idle_counters: dict[str, float] = {}  # counters of tenants of whom nobody waits
        self._numbers = itertools.count(1)
        self._turn = 0
        self._min_counter = 0.0  # counter of the tenant that was served last, the least of those waiting
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[QueueEntry]:
        return (e for tenant in self._waiting.values() for level in tenant.levels.values() for e in level)

    def add(self, entry: QueueEntry) -> None:
        """The request waits from now on."""
        tenant = self._waiting.get(entry.tenant)
        if tenant is None:
            tenant = self._waiting[entry.tenant] = _Tenant(self._counter(entry.tenant))
            self._idle_counters.pop(entry.tenant, None)
        entry.arrival = next(self._numbers)
        tenant.weight = entry.weight
        tenant.expected_tokens += entry.expected_tokens
        tenant.prompt_tokens += entry.prompt_tokens
        tenant.levels.setdefault(entry.priority, {})[entry] = None
        self._size += 1

    def remove(self, entry: QueueEntry) -> bool:
        """It waits no more, and was not served; False when it did not wait."""
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
        """The next request, which counts as served."""
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
        """It was served without waiting."""
        self._idle_counters[entry.tenant] = self._counter(entry.tenant)
        self.correct_count(entry, entry.expected_tokens)

    def correct_count(self, entry: QueueEntry, tokens: int) -> None:
        """The tenant got so many tokens more than was counted for a request that was served (or less, below 0)."""
        tenant = self._waiting.get(entry.tenant)
        if tenant is not None:
            tenant.counter += tokens / entry.weight
        else:
            self._remember(
                entry.tenant, self._idle_counters.get(entry.tenant, self._min_counter) + tokens / entry.weight
            )

    def tokens_ahead(self, entry: QueueEntry) -> TokensAhead:
        """What would be served before this request if it came now, up to one request per tenant."""
        mine = self._waiting.get(entry.tenant)
        counter = self._counter(entry.tenant) if mine is None else mine.counter
        own_cost, own_work = _above(mine, entry.priority) if mine is not None else (0, 0)
        turn = counter + own_cost / entry.weight  # the counter at which its turn comes
        cost, work = float(own_cost), float(own_work)
        for name, tenant in self._waiting.items():
            theirs, their_work = _above(tenant, entry.priority)
            if name == entry.tenant or not theirs:
                continue
            higher, _ = _above(tenant, entry.priority + 1)
            part = min(theirs, max(higher, tenant.weight * max(0.0, turn - tenant.counter)))
            cost += part
            work += their_work * part / theirs
        return TokensAhead(int(cost), int(work), own_cost)

    def find_victim(self, entry: QueueEntry) -> QueueEntry | None:
        """Who has to go so that `entry` finds room: the newest of the tenant that waits with most for its weight.

        None when that is the tenant of `entry`.
        """
        mine = self._waiting.get(entry.tenant)
        least = ((mine.expected_tokens if mine is not None else 0) + entry.expected_tokens) / entry.weight
        name, tenant = max(self._waiting.items(), key=lambda item: item[1].expected_tokens / item[1].weight)
        if name == entry.tenant or tenant.expected_tokens / tenant.weight <= least:
            return None
        lowest = min(tenant.levels)
        return next(reversed(tenant.levels[lowest]))

    def _counter(self, tenant: str) -> float:
        """Of a tenant of whom nobody waits: what it had, but not less than those that wait have."""
        floor = min((t.counter for t in self._waiting.values()), default=self._min_counter)
        return max(self._idle_counters.get(tenant, floor), floor)

    def _remember(self, tenant: str, counter: float) -> None:
        self._idle_counters[tenant] = counter
        if len(self._idle_counters) > MAX_IDLE_TENANTS:
            self._idle_counters = {name: c for name, c in self._idle_counters.items() if c > self._min_counter}
            while len(self._idle_counters) > MAX_IDLE_TENANTS:
                self._idle_counters.pop(next(iter(self._idle_counters)))


def _above(tenant: _Tenant, priority: int) -> tuple[int, int]:
    """Cost and work of what waits with this priority or a higher one."""
    if min(tenant.levels) >= priority:
        return tenant.expected_tokens, tenant.prompt_tokens
    entries = [entry for level, entries in tenant.levels.items() if level >= priority for entry in entries]
    return sum(entry.expected_tokens for entry in entries), sum(entry.prompt_tokens for entry in entries)
