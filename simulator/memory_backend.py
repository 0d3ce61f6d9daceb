"""The index in memory as pods and gateways see it: publishers in virtual time, readers with the gateway's own cache."""

from __future__ import annotations

import time
from collections.abc import Sequence

from common.errors import IndexUnavailable
from common.index_cache import LookupCache
from common.index_records import Candidate, Held, Reserved
from simulator.clock import Clock
from simulator.memory_index import MemoryIndex
from simulator.memory_ledger import MemoryLedger
from simulator.memory_publisher import MemoryPublisher

_SCOPE = "sim"


class MemoryBackend:
    """lag_s: what a change takes to reach the index beyond the publisher's batching. away: nobody is answered."""

    def __init__(self, clock: Clock, *, lag_s: float = 0.0) -> None:
        self.away = False
        self.index = MemoryIndex(clock.time)
        self.ledger = MemoryLedger(clock.time)
        self._clock = clock
        self._lag_s = lag_s

    def there(self) -> MemoryIndex | None:
        """The index, None while it is away."""
        return None if self.away else self.index

    def publisher(self, pod: str, generation: int, block_size: int, num_blocks: int) -> MemoryPublisher:
        return MemoryPublisher(self._clock, self.there, pod, generation, lag_s=self._lag_s)

    def reader(self) -> MemoryReader:
        return MemoryReader(self, self._clock)


class MemoryReader:
    """One gateway's look-ups, answered from LookupCache where common/index_reader.py would."""

    def __init__(self, backend: MemoryBackend, clock: Clock) -> None:
        self.calls = 0
        self.seconds = 0.0
        self._backend = backend
        self._cache = LookupCache(clock.time)
        self._clock = clock

    async def lookup(self, chain: Sequence[bytes], pods: Sequence[tuple[str, int]]) -> dict[str, int]:
        if not chain:
            return {}
        began = time.perf_counter()
        kept = self._cache.get(_SCOPE, chain[-1], pods)
        if kept is None:
            found = self._there().lookup(chain, pods)
            answer = {pod: blocks for (pod, _), blocks in found.items()}
            matched = {pod: Held(blocks, blocks) for pod, blocks in found.items()}
            self._cache.put(_SCOPE, chain[-1], len(chain), pods, matched, self._clock.now)
        else:
            answer = {pod[0]: kept[pod].blocks for pod in pods if pod in kept}
        self.calls += 1
        self.seconds += time.perf_counter() - began
        return answer

    async def reserve(self, request_id: str, candidates: Sequence[Candidate]) -> Reserved:
        self._there()
        reserved = self._backend.ledger.reserve(request_id, candidates)
        self._cache.forget(candidates[reserved.chosen].pod)
        return reserved

    async def unbook(self, pod: str, request_id: str) -> None:
        self._there()
        self._backend.ledger.unbook(pod, request_id)

    def time(self) -> float:
        return self._clock.now

    def _there(self) -> MemoryIndex:
        index = self._backend.there()
        if index is None:
            raise IndexUnavailable("the prefix index is away")
        return index

    async def poll(self) -> None:
        """Slots are a matter of Redis alone."""

    async def close(self) -> None:
        """Nothing to close."""
