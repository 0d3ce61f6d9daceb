"""The waiting requests of several priority tiers: which tier has the next turn, and which one is overloaded. Pure.

    capacity --+-- tier gold      share 0.5 --+-- tenant a   weight 1        a fair queue of tenants in each tier
               |                              '-- tenant b   weight 2
               +-- tier standard  share 0.3
               '-- tier batch     share 0.1      the rest, 0.1, goes to the highest tier that waits

A turn is *reserved* or *borrowed*. The highest waiting tier with enough credit has a reserved turn and pays for it.
If no waiting tier has credit, the highest waiting tier borrows: it gets the turn and pays nothing. After each turn
every waiting tier gets its share of the turn's tokens as credit. A tier without waiting requests has no use for its
share, so the others have it. It gets its share back with its first waiting request, because it has no debt.

Bound: while a tier waits, it gets at least its share of all tokens, less two of the largest requests for each tier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from common.settings.tiers import Tier, tier_of
from gateway.admission.queue import FairQueue, QueueEntry, TokensAhead

MAX_DEBT = 1 << 15  #: Tokens that a tier owes at most after its answers were longer than expected.
SHORTEN_WAIT_S = 1.0  #: A tier is overloaded once its new requests would wait this long, ...
CALM_WAIT_S, CALM_S = 0.25, 5.0  #: ... and until they would wait less than this for so many seconds.


class TierCredits:
    """The tokens that each tier may take before the tiers above it."""

    def __init__(self, shares: Sequence[float], values: Sequence[float] | None = None) -> None:
        self.shares = tuple(shares)
        self.values = [0.0] * len(shares) if values is None else list(values)

    def copy(self) -> TierCredits:
        return TierCredits(self.shares, self.values)

    def next_turn(self, waiting: Sequence[int]) -> tuple[int, bool]:
        """Returns the tier that has the next turn, and whether the turn is reserved. `waiting`: highest tier first."""
        for tier in waiting:
            if self.shares[tier] and self.values[tier] >= 0:
                return tier, True
        return waiting[0], False

    def on_turn(self, tier: int, tokens: float, waiting: Sequence[int], *, reserved: bool) -> None:
        """Counts a turn. `waiting`: the tiers that waited before it."""
        for other in waiting:
            self.values[other] += self.shares[other] * tokens
        if reserved:
            self.values[tier] -= tokens

    def correct(self, tier: int, tokens: float) -> None:
        """Adds the tokens that an answer has more than expected; may be negative.

        MAX_DEBT bounds what corrections add. A debt of large turns may be higher, and stays.
        """
        value = self.values[tier]
        if tokens > 0:
            self.values[tier] = min(value, max(-MAX_DEBT, value - tokens))
        else:
            self.values[tier] = max(value, min(MAX_DEBT, value - tokens))

    def on_empty(self, tier: int) -> None:
        """The tier has no waiting request any more: it keeps no credit for the time without requests."""
        self.values[tier] = min(0.0, self.values[tier])


class TierQueue:
    """The waiting requests of all tiers. It has the methods of FairQueue, which orders the requests of one tier."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tuple(tiers)
        self._queues = [FairQueue() for _ in tiers]
        self._credits = TierCredits([tier.share for tier in tiers])

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __iter__(self) -> Iterator[QueueEntry]:
        return (entry for queue in self._queues for entry in queue)

    def waiting_by_tier(self) -> list[tuple[str, int]]:
        """Returns the name of each tier and the number of its waiting requests."""
        return [(tier.name, len(queue)) for tier, queue in zip(self._tiers, self._queues, strict=True)]

    def _index(self, entry: QueueEntry) -> int:
        return tier_of(self._tiers, entry.priority)

    def _waiting(self) -> list[int]:
        return [i for i, queue in enumerate(self._queues) if queue]

    def add(self, entry: QueueEntry) -> None:
        """Adds a waiting request."""
        self._queues[self._index(entry)].add(entry)

    def remove(self, entry: QueueEntry) -> bool:
        """Removes a waiting request without counting it as served. Returns False if it does not wait."""
        tier = self._index(entry)
        removed = self._queues[tier].remove(entry)
        if not self._queues[tier]:
            self._credits.on_empty(tier)
        return removed

    def pop(self) -> QueueEntry | None:
        """Removes and returns the next request, and counts it as served."""
        waiting = self._waiting()
        if not waiting:
            return None
        tier, reserved = self._credits.next_turn(waiting)
        entry = self._queues[tier].pop()
        assert entry is not None
        entry.reserved_turn = reserved
        self._credits.on_turn(tier, entry.expected_tokens, waiting, reserved=reserved)
        if not self._queues[tier]:
            self._credits.on_empty(tier)
        return entry

    def count_as_served(self, entry: QueueEntry) -> None:
        """Counts a request that was served without waiting. No tier waited, so no share was touched."""
        self._queues[self._index(entry)].count_as_served(entry)

    def correct_count(self, entry: QueueEntry, tokens: int) -> None:
        """Adds `tokens` (actual minus expected, may be negative) to the count of a served request."""
        tier = self._index(entry)
        self._queues[tier].correct_count(entry, tokens)
        if entry.reserved_turn and self._queues[tier]:
            self._credits.correct(tier, tokens)

    def tokens_ahead(self, entry: QueueEntry) -> TokensAhead:
        """Returns the tokens ahead of this request if it came now. It is an estimate between tiers.

        Ahead are the requests of its own tier as in FairQueue, all requests of higher tiers, and those of lower tiers
        that have their reserved turns meanwhile. The share of its own tier bounds the sum.
        """
        tier = self._index(entry)
        own, share = self._queues[tier].tokens_ahead(entry), self._tiers[tier].share
        totals = [queue.totals() for queue in self._queues]
        before = own.expected_tokens + sum(total.expected_tokens for total in totals[:tier])
        lower = list(zip(self._tiers, totals, strict=True))[tier + 1 :]
        lower_shares = sum(each.share for each, total in lower if total.requests)
        after = before / max(1e-9, 1 - lower_shares)  # all tokens until its turn, if lower tiers use their shares
        parts = [float(total.expected_tokens) for total in totals[:tier]] + [0.0]
        parts += [min(float(total.expected_tokens), each.share * after) for each, total in lower]
        others = sum(parts)
        if share:
            others = min(others, own.expected_tokens * (1 / share - 1))
        used = [
            others / sum(parts) * part / total.expected_tokens if part else 0.0
            for part, total in zip(parts, totals, strict=True)
        ]
        return TokensAhead(
            own.expected_tokens + int(others),
            own.prompt_tokens + int(sum(u * total.prompt_tokens for u, total in zip(used, totals, strict=True))),
            own.own_expected_tokens,
            own.requests + int(sum(u * total.requests for u, total in zip(used, totals, strict=True))),
        )

    def in_order(self) -> Iterator[QueueEntry]:
        """Yields the waiting requests in the order of their turns, as if no other request came. Changes nothing."""
        orders = {i: self._queues[i].in_order() for i in self._waiting()}
        heads = {i: next(order) for i, order in orders.items()}
        credits = self._credits.copy()
        while heads:
            waiting = sorted(heads)
            tier, reserved = credits.next_turn(waiting)
            entry = heads.pop(tier)
            credits.on_turn(tier, entry.expected_tokens, waiting, reserved=reserved)
            if (head := next(orders[tier], None)) is None:
                credits.on_empty(tier)
            else:
                heads[tier] = head
            yield entry

    def find_victim(self, entry: QueueEntry) -> QueueEntry | None:
        """Returns the waiting request to evict so that `entry` fits; None if it has to go itself.

        A tier keeps its share of the places. The lowest tier with more than that loses a request: a lower tier than
        that of `entry`, or a higher one if the tier of `entry` has less than its share. Else FairQueue decides.
        """
        own, places = self._index(entry), len(self)
        below = len(self._queues[own]) < self._tiers[own].share * places
        for tier in reversed(range(len(self._tiers))):
            queue = self._queues[tier]
            if tier == own or not queue or len(queue) <= self._tiers[tier].share * places:
                continue
            if tier > own or below:
                return queue.newest_of_largest()
        return self._queues[own].find_victim(entry) if self._queues[own] else None


class ShortAnswers:
    """Says whether one tier is overloaded, by the waits that are forecast for its new requests."""

    def __init__(self) -> None:
        self._active = False
        self._last_wait_at = float("-inf")  #: When a forecast was last at least CALM_WAIT_S.

    def update(self, wait_s: float, now: float) -> bool:
        """Returns whether the tier is overloaded, after a forecast of `wait_s` at the time `now`."""
        if wait_s >= CALM_WAIT_S:
            self._last_wait_at = now
        if wait_s >= SHORTEN_WAIT_S:
            self._active = True
        elif now - self._last_wait_at >= CALM_S:
            self._active = False
        return self._active
