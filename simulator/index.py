"""The simulated prefix index and its clients: one publisher per pod process, one reader per gateway."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.errors import IndexUnavailable
from prefix_index.lookup_cache import LookupCache
from prefix_index.publisher import BATCH_S, HEARTBEAT_S
from prefix_index.records import BookingCandidate, BookingResult, PrefixHits
from prefix_index.store import STORED_HASH_BYTES
from simulator.clock import VirtualClock
from simulator.index_model import BookingModel, IndexModel

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
        self._number += 1
        self._held.update(stored)
        self._held.difference_update(evicted)
        number = self._number
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
        """Returns how many blocks from the start of the chain each pod holds; pods without any may be left out.

        Raises IndexUnavailable.
        """
        if not chain:
            return {}
        kept = self._cache.get(_SCOPE, chain[-1], pods)
        if kept is not None:
            return {
                name: kept[name, generation].total_blocks for name, generation in pods if (name, generation) in kept
            }
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
