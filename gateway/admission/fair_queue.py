"""A queue of requests that is fair between tenants by tokens, respects priorities, and starves no request. Pure.

Fairness between tenants uses virtual token counters (VTC; Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024) with weights. A tenant's counter is the number of tokens that it got, divided by its weight. The next request
is from the tenant with the lowest counter. A tenant that becomes active again gets no credit for the time before.
Expected tokens are counted when a request leaves the queue, and corrected when the request ends.

The highest waiting priority goes first. Every AGING_TURNS-th turn ignores priorities and takes the tenant's oldest
request, so each request leaves the queue after a bounded number of turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

AGING_TURNS = 4

#: Tenants without waiting requests the counters of which are kept.
MAX_IDLE_TENANTS = 4096


@dataclass(eq=False, slots=True)
class QueueEntry:
    """One request."""

    tenant: str
    #: Share of the tenant relative to the others.
    weight: float
    #: Higher goes first.
    priority: int
    #: Prompt tokens to compute.
    prompt_tokens: int
    #: Prompt and expected output tokens.
    expected_tokens: int
    #: Order of arrival.
    arrival: int = 0


@dataclass(slots=True)
class _Tenant:
    """A tenant with waiting requests."""

    #: Virtual token counter.
    counter: float
    weight: float = 1.0
    #: Tokens of all its waiting requests.
    expected_tokens: int = 0
    prompt_tokens: int = 0
    #: Waiting requests by priority, oldest first.
    levels: dict[int, dict[QueueEntry, None]] = field(default_factory=dict)

    def oldest(self) -> QueueEntry:
        return min((next(iter(level)) for level in self.levels.values()), key=lambda entry: entry.arrival)


@dataclass(frozen=True, slots=True)
class TokensAhead:
    """Tokens of the requests that would be served before a new one."""

    expected_tokens: int
    prompt_tokens: int
    #: Those of `expected_tokens` that belong to the same tenant.
    own_expected_tokens: int


class FairQueue:
    def __init__(self) -> None:
        #: Tenants with waiting requests.
        self._waiting: dict[str, _Tenant] = {}
        #: Counters of the other tenants.
        self._idle_counters: dict[str, float] = {}
        self._arrivals = itertools.count(1)
        self._turn = 0
        #: Lowest counter of the waiting tenants at the last turn; it never decreases.
        self._min_counter = 0.0
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
        """Adds `tokens` to the count of a served request, which may be negative: actual minus expected tokens."""
        tenant = self._waiting.get(entry.tenant)
        if tenant is not None:
            tenant.counter += tokens / entry.weight
        else:
            self._remember(
                entry.tenant, self._idle_counters.get(entry.tenant, self._min_counter) + tokens / entry.weight
            )

    def tokens_ahead(self, entry: QueueEntry) -> TokensAhead:
        """Returns what would be served before this request if it came now; exact up to one request per tenant.

        All requests of higher priority are ahead. Those of equal priority are ahead until their tenant's counter passes
        the counter at which this request has its turn.
        """
        own = self._waiting.get(entry.tenant)
        counter = self._counter(entry.tenant) if own is None else own.counter
        own_expected, own_prompt = _tokens_from(own, entry.priority) if own is not None else (0, 0)
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
        lowest = min(tenant.levels)
        return next(reversed(tenant.levels[lowest]))

    def _counter(self, tenant: str) -> float:
        """Returns the counter of a tenant that becomes active again: its old one, raised to the lowest active counter.

        This is the counter lift of VTC, section 4.
        """
        floor = min((t.counter for t in self._waiting.values()), default=self._min_counter)
        return max(self._idle_counters.get(tenant, floor), floor)

    def _remember(self, tenant: str, counter: float) -> None:
        self._idle_counters[tenant] = counter
        if len(self._idle_counters) > MAX_IDLE_TENANTS:
            self._idle_counters = {name: c for name, c in self._idle_counters.items() if c > self._min_counter}
            while len(self._idle_counters) > MAX_IDLE_TENANTS:
                self._idle_counters.pop(next(iter(self._idle_counters)))


def _tokens_from(tenant: _Tenant, priority: int) -> tuple[int, int]:
    """Returns the expected and the prompt tokens that wait with this priority or a higher one."""
    if min(tenant.levels) >= priority:
        return tenant.expected_tokens, tenant.prompt_tokens
    entries = [entry for level, entries in tenant.levels.items() if level >= priority for entry in entries]
    return sum(entry.expected_tokens for entry in entries), sum(entry.prompt_tokens for entry in entries)
