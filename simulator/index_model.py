"""The prefix index as gateways and pods see it, in memory on a virtual clock, in place of Redis and its Lua scripts.

A test replays random calls against these models and against the scripts in a real server, and compares the answers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from prefix_index.reader import BOOKING_TTL_S
from prefix_index.records import BookingCandidate, BookingResult
from prefix_index.store import HELD_TTL_S, LEASE_MS, STORED_HASH_BYTES

LEASE_S = LEASE_MS / 1e3


@dataclass(slots=True)
class _Entry:
    """One registered pod."""

    generation: int
    lease_until: float
    set_until: float  # The set and its number expire at this time unless the pod renews them.
    own: set[bytes] = field(default_factory=set)  # 8-byte names of the blocks that the pod holds.
    number: int | None = None  # Number of the last batch; None before the first snapshot.


class IndexModel:
    """The pods of one scope and the blocks that each one holds.

    Invariant, as in Redis: only the registered generation with a live lease changes its set or is credited in a
    look-up.
    """

    def __init__(self, time: Callable[[], float]) -> None:
        self._time = time  # Returns seconds of any clock.
        self._pods: dict[str, _Entry] = {}

    def register(self, pod: str, generation: int) -> bool:
        """Registers a generation and forgets the blocks of an earlier one. Returns False if a later one is known."""
        now = self._time()
        entry = self._pods.get(pod)
        if entry is not None and entry.generation > generation:
            return False
        if entry is None or entry.generation != generation:
            entry = self._pods[pod] = _Entry(generation, 0.0, now + HELD_TTL_S)
        entry.lease_until = now + LEASE_S
        return True

    def heartbeat(self, pod: str, generation: int) -> int:
        """Renews the lease. Returns the pod's number of blocks, or -1 if the pod has to register (again)."""
        entry = self._pods.get(pod)
        now = self._time()
        if entry is None or entry.generation != generation or entry.number is None or not self._fresh(entry):
            return -1
        entry.lease_until, entry.set_until = now + LEASE_S, now + HELD_TTL_S
        return len(entry.own)

    def apply(self, pod: str, generation: int, number: int, stored: Iterable[bytes], evicted: Iterable[bytes]) -> str:
        """Applies one numbered batch.

        Returns 'ok', 'duplicate', 'gap' (the pod has to send a snapshot) or 'fenced' (it has to register again).
        """
        entry = self._live(pod, generation)
        if entry is None:
            return "fenced"
        if not self._fresh(entry) or entry.number is None or number > entry.number + 1:
            return "gap"
        if number <= entry.number:
            return "duplicate"
        entry.own.difference_update(h[:STORED_HASH_BYTES] for h in evicted)
        entry.own.update(h[:STORED_HASH_BYTES] for h in stored)
        entry.number, entry.set_until = number, self._time() + HELD_TTL_S
        return "ok"

    def snapshot(self, pod: str, generation: int, number: int, held: Collection[bytes]) -> str:
        """Replaces a pod's blocks. Returns 'ok', 'gap' (a newer batch was applied) or 'fenced'."""
        entry = self._live(pod, generation)
        if entry is None:
            return "fenced"
        if self._fresh(entry) and entry.number is not None and entry.number >= number:
            return "gap"
        entry.own = {h[:STORED_HASH_BYTES] for h in held}
        entry.number, entry.set_until = number, self._time() + HELD_TTL_S
        return "ok"

    def expire(self, pod: str) -> None:
        """Ends the pod's lease now."""
        if pod in self._pods:
            self._pods[pod].lease_until = self._time()

    def leave(self, pod: str, generation: int) -> None:
        """Forgets a pod. Has no effect for another generation than the registered one."""
        entry = self._pods.get(pod)
        if entry is not None and entry.generation == generation:
            del self._pods[pod]

    def lookup(self, chain: Sequence[bytes], pods: Sequence[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Returns how many blocks from the start of the chain each (pod, generation) holds.

        Pods that hold none are left out.
        """
        matched: dict[tuple[str, int], int] = {}
        if not chain:
            return matched
        names = [h[:STORED_HASH_BYTES] for h in chain]
        first_name, now = names[0], self._time()
        for pod, generation in pods:
            entry = self._pods.get(pod)
            if entry is None or first_name not in entry.own or entry.generation != generation:
                continue
            if now < entry.lease_until and now < entry.set_until:
                matched[pod, generation] = _matched(names, entry.own)
        return matched

    def _live(self, pod: str, generation: int) -> _Entry | None:
        entry = self._pods.get(pod)
        live = entry is not None and entry.generation == generation and self._time() < entry.lease_until
        return entry if live else None

    def _fresh(self, entry: _Entry) -> bool:
        return self._time() < entry.set_until

    def size(self) -> int:
        """Returns the number of blocks of all pods."""
        return sum(len(entry.own) for entry in self._pods.values())


def _matched(names: Sequence[bytes], own: set[bytes]) -> int:
    """Returns how many leading names are in `own`, which holds the first.

    Doubles the position until a name is missing, then bisects: a pod that holds a block holds all blocks before it.
    """
    low, high, length = 1, 2, len(names)
    while high <= length and names[high - 1] in own:
        low, high = high, 2 * high
    high = min(high, length + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if names[middle - 1] in own:
            low = middle
        else:
            high = middle
    return low


class BookingModel:
    """The bookings that all gateways share, by pod, oldest first; prefix_index/lua/reserve.lua in memory."""

    def __init__(self, time: Callable[[], float]) -> None:
        self._time = time  # Returns seconds of any clock.
        self._booked: dict[str, OrderedDict[str, tuple[float, int]]] = {}

    def reserve(self, request_id: str, candidates: Sequence[BookingCandidate]) -> BookingResult:
        """Books the request on the cheapest candidate, recent bookings included; on the first of equal ones."""
        now = self._time()
        units = [self._since(c.pod, now - min(c.age_s, BOOKING_TTL_S), request_id) for c in candidates]
        # Costs are rounded as they are on the way to Redis, so that equal costs stay equal.
        costs = [
            round(c.cost_s, 9) + booked * round(c.cost_per_unit_s, 12)
            for c, booked in zip(candidates, units, strict=True)
        ]
        chosen = costs.index(min(costs))
        bookings = self._booked.setdefault(candidates[chosen].pod, OrderedDict())
        while bookings and next(iter(bookings.values()))[0] <= now - BOOKING_TTL_S:
            bookings.popitem(last=False)
        bookings[request_id] = now, candidates[chosen].units
        bookings.move_to_end(request_id)
        return BookingResult(chosen, tuple(units))

    def unbook(self, pod: str, request_id: str) -> None:
        """Ends a booking. Has no effect if there is none."""
        self._booked.get(pod, OrderedDict()).pop(request_id, None)

    def _since(self, pod: str, since: float, but: str) -> int:
        """Units that other requests than `but` booked on a pod after a time."""
        total = 0
        for request_id, (at, units) in reversed(self._booked.get(pod, OrderedDict()).items()):
            if at <= since:
                break
            if request_id != but:
                total += units
        return total
