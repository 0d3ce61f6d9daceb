"""The simulated prefix index: its state on a virtual clock, one publisher per pod process, one reader per gateway.

A test replays random calls against the models and against the Lua scripts in a real server, and compares the answers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from common.errors import IndexUnavailable
from prefix_index.lookup_cache import LookupCache
from prefix_index.publisher import BATCH_S, HEARTBEAT_S
from prefix_index.reader import BOOKING_TTL_S
from prefix_index.store import HELD_TTL_S, LEASE_MS, STORED_HASH_BYTES, BookingCandidate, BookingResult, PrefixHits
from simulator.clock import VirtualClock

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

    Invariant, as in Redis: only a registered generation with a live lease changes its set or counts in a look-up.
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
        entry, now = self._pods.get(pod), self._time()
        if entry is None or entry.generation != generation or entry.number is None or not self._fresh(entry):
            return -1
        entry.lease_until, entry.set_until = now + LEASE_S, now + HELD_TTL_S
        return len(entry.own)

    def apply(self, pod: str, generation: int, number: int, stored: Iterable[bytes], evicted: Iterable[bytes]) -> str:
        """Applies a numbered batch. Returns 'ok', 'duplicate', 'gap' (send a snapshot) or 'fenced' (register again)."""
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
        if pod in self._pods:
            self._pods[pod].lease_until = self._time()

    def leave(self, pod: str, generation: int) -> None:
        """Forgets a pod. Has no effect for another generation than the registered one."""
        if pod in self._pods and self._pods[pod].generation == generation:
            del self._pods[pod]

    def lookup(self, chain: Sequence[bytes], pods: Sequence[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Returns how many blocks from the start of the chain each (pod, generation) holds, if it holds any."""
        names, now = [h[:STORED_HASH_BYTES] for h in chain], self._time()
        matched: dict[tuple[str, int], int] = {}
        for pod, generation in pods if names else ():
            entry = self._pods.get(pod)
            if entry is None or names[0] not in entry.own or entry.generation != generation:
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
    """The bookings that all gateways share, by pod, oldest first; prefix_index/lua/book.lua in memory."""

    def __init__(self, time: Callable[[], float]) -> None:
        self._time = time  # Returns seconds of any clock.
        self._booked: dict[str, OrderedDict[str, tuple[float, int]]] = {}

    def reserve(self, request_id: str, candidates: Sequence[BookingCandidate]) -> BookingResult:
        """Books the request on the cheapest candidate, recent bookings included; on the first of equal ones."""
        now = self._time()
        units = [self._since(c.pod, now - min(c.age_s, BOOKING_TTL_S), request_id) for c in candidates]
        booked = zip(candidates, units, strict=True)
        # Costs are rounded as they are on the way to Redis, so that equal costs stay equal.
        costs = [round(c.cost_s, 9) + n * round(c.cost_per_unit_s, 12) for c, n in booked]
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


_SCOPE = "sim"
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 5.0
FAILED = ("gap", "fenced")  # Answers to a batch after which the pod has to register again.


class SimIndex:
    """The index of one simulated cluster."""

    def __init__(self, clock: VirtualClock, *, lag_s: float = 0.0) -> None:
        self.clock = clock
        self.lag_s = lag_s  # Delay of a change on its way to the index, on top of the publisher's batching.
        self.unreachable = False  # True while the index answers neither pods nor gateways.
        self.blocks = IndexModel(clock.time)
        self.bookings = BookingModel(clock.time)

    def publisher(self, pod: str, generation: int) -> SimPublisher:
        return SimPublisher(self, pod, generation)

    def reader(self) -> SimReader:
        return SimReader(self)


class SimPublisher:
    """Publishes one pod process's blocks; the protocol of prefix_index/publisher.py.

    Invariant: batches are numbered without gaps and arrive in order. After a failure, or an answer that is not 'ok',
    the pod registers and sends a snapshot; changes before that need not be kept.
    """

    def __init__(self, index: SimIndex, pod: str, generation: int) -> None:
        self._index = index
        self._clock = index.clock
        self._pod = pod
        self._generation = generation
        self._snapshot: Callable[[], list[bytes]] = list
        self._pending: dict[bytes, bool] = {}
        self._held: set[bytes] = set()
        self._number = 0
        self._in_step = False  # Registered and with a snapshot in the index, so batches may follow.
        self._flushing = False
        self._stopped = False
        self._backoff_s = _MIN_BACKOFF_S

    def start(self, snapshot: Callable[[], list[bytes]]) -> None:
        """Registers and sends a snapshot (all blocks of the pod), then heartbeats and batches until stop()."""
        self._snapshot = snapshot
        self._clock.call_at(self._clock.now, self._join)

    def stop(self) -> None:
        """Stops sending: the process has died."""
        self._stopped = True

    def stored(self, hashes: list[bytes]) -> None:
        self._enqueue(hashes, True)

    def evicted(self, hashes: list[bytes]) -> None:
        self._enqueue(hashes, False)

    def _enqueue(self, hashes: list[bytes], held: bool) -> None:
        if not self._in_step or self._stopped:
            return
        for h in hashes:
            self._pending[h[:STORED_HASH_BYTES]] = held
        if not self._flushing:
            self._flushing = True
            self._clock.call_after(BATCH_S, self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._stopped or not self._in_step:
            return
        changes, self._pending = self._pending, {}
        stored = [h for h, held in changes.items() if held and h not in self._held]
        evicted = [h for h, held in changes.items() if not held and h in self._held]
        if not stored and not evicted:
            return
        self._number = number = self._number + 1
        self._held.update(stored)
        self._held.difference_update(evicted)
        self._clock.call_after(self._index.lag_s, lambda: self._deliver(number, stored, evicted))

    def _deliver(self, number: int, stored: list[bytes], evicted: list[bytes]) -> None:
        if self._stopped or not self._in_step:
            return
        blocks = self._index.blocks
        if self._index.unreachable or blocks.apply(self._pod, self._generation, number, stored, evicted) in FAILED:
            self._fall_out()

    def _beat(self) -> None:
        if self._stopped or not self._in_step:
            return
        if self._index.unreachable or self._index.blocks.heartbeat(self._pod, self._generation) < 0:
            self._fall_out()
        else:
            self._clock.call_after(HEARTBEAT_S, self._beat)

    def _fall_out(self) -> None:
        self._in_step = False
        self._pending.clear()
        self._clock.call_after(self._backoff_s, self._join)
        self._backoff_s = min(2 * self._backoff_s, _MAX_BACKOFF_S)

    def _join(self) -> None:
        if self._stopped or self._in_step:
            return
        if self._index.unreachable:
            self._fall_out()
            return
        blocks = self._index.blocks
        if not blocks.register(self._pod, self._generation):
            return  # replaced by a newer process of this name, for good
        held = {h[:STORED_HASH_BYTES] for h in self._snapshot()}
        self._number += 1
        if blocks.snapshot(self._pod, self._generation, self._number, held) != "ok":
            self._fall_out()
            return
        self._held, self._in_step, self._backoff_s = held, True, _MIN_BACKOFF_S
        self._clock.call_after(HEARTBEAT_S, self._beat)


class SimReader:
    """One gateway's look-ups and bookings; keeps answers for as long as prefix_index/reader.py does."""

    def __init__(self, index: SimIndex) -> None:
        self._index = index
        self._cache = LookupCache(index.clock.time)

    def lookup(self, chain: Sequence[bytes], pods: Sequence[tuple[str, int]]) -> dict[str, int]:
        """Returns how many blocks from the start of the chain each pod holds, if any. Raises IndexUnavailable."""
        if not chain:
            return {}
        if (kept := self._cache.get(_SCOPE, chain[-1], pods)) is not None:
            return {pod[0]: kept[pod].total_blocks for pod in pods if pod in kept}
        self._require()
        held_blocks = self._index.blocks.lookup(chain, pods)
        matched = {pod: PrefixHits(blocks, blocks) for pod, blocks in held_blocks.items()}
        self._cache.put(_SCOPE, chain[-1], len(chain), pods, matched, self._index.clock.now)
        return {pod: blocks for (pod, _), blocks in held_blocks.items()}

    def reserve(self, request_id: str, candidates: Sequence[BookingCandidate]) -> BookingResult:
        """Books a request on the cheapest candidate, atomically among gateways. Raises IndexUnavailable."""
        self._require()
        reserved = self._index.bookings.reserve(request_id, candidates)
        self._cache.invalidate_pod(candidates[reserved.chosen].pod)
        return reserved

    def unbook(self, pod: str, request_id: str) -> None:
        """Ends a booking. Raises IndexUnavailable."""
        self._require()
        self._index.bookings.unbook(pod, request_id)

    def _require(self) -> None:
        if self._index.unreachable:
            raise IndexUnavailable("the prefix index is unreachable")
