"""The real prefix index under the simulated cluster: common/index_pod.py and index_reader.py, shipped Lua, a server.

Commands are sent when the virtual clock says so, and no virtual time goes by until they are answered. Leases and other
lives of keys are the server's and hence real: a run must not keep a pod silent for longer than they last. Bookings age
by the server's clock too, by which all of a run is an instant: the server is told of them, and the choice among
candidates is MemoryLedger's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from common.breaker import Breaker
from common.errors import IndexUnavailable
from common.index_pod import BATCH_S, HEARTBEAT_S, PodIndex
from common.index_reader import IndexReader
from common.index_records import Candidate, PodLoad, PodRecord, Reserved
from common.types import Role
from simulator.clock import Clock
from simulator.memory_ledger import MemoryLedger

_SCOPE = "51aa51aa"
_TIMEOUT_S = 5.0  # real seconds: the simulation waits for its index however busy the machine is


class ValkeyBackend:
    """scope: 8 hex digits, of this run alone. away: gateways are not answered; pods still publish."""

    def __init__(self, clock: Clock, url: str, scope: str = _SCOPE) -> None:
        self.away = False
        self.scope = scope
        self.ledger = MemoryLedger(clock.time)
        self._clock = clock
        self._url = url

    def publisher(self, pod: str, generation: int, block_size: int, num_blocks: int) -> ValkeyPublisher:
        record = PodRecord(
            pod=pod,
            generation=generation,
            address=f"{pod}:1",
            role=Role.PREFILL,
            model="sim",
            scope=self.scope,
            fingerprint=self.scope * 4,
            block_size=block_size,
            max_model_len=block_size * num_blocks,
            num_blocks=num_blocks,
        )
        return ValkeyPublisher(self._clock, self._url, record)

    def reader(self) -> ValkeyReader:
        return ValkeyReader(self, self._clock, self._url)


class _SteppedPodIndex(PodIndex):
    """PodIndex without its task: the caller says when it joins, beats and flushes."""

    async def join(self) -> None:
        """Registers and sends a snapshot; changes count from then on."""
        self._loop = asyncio.get_running_loop()
        await self._register()
        await self._send_snapshot()

    async def beat(self) -> None:
        await self._heartbeat()

    async def flush(self) -> None:
        """Sends what has changed."""
        while self._changes.stale or self._changes:
            await (self._send_snapshot() if self._changes.stale else self._send_batch())

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()


class ValkeyPublisher:
    """One pod's PodIndex in virtual time. A failure ends the run: the server is part of the test bench."""

    def __init__(self, clock: Clock, url: str, record: PodRecord) -> None:
        self._clock = clock
        self._url = url
        self._record = record
        self._index: _SteppedPodIndex | None = None
        self._flushing = False
        self._joined = False

    def start(self, snapshot: Callable[[], list[bytes]], load: Callable[[], PodLoad]) -> None:
        self._index = _SteppedPodIndex(self._url, self._record, snapshot, load)
        self._clock.at(self._clock.now, self._join)

    async def stop(self) -> None:
        index, self._index = self._index, None
        if index is not None:
            await index.close()

    def stored(self, hashes: list[bytes]) -> None:
        if self._index is not None and self._joined:
            self._index.stored(hashes)
            self._due()

    def evicted(self, hashes: list[bytes]) -> None:
        if self._index is not None and self._joined:
            self._index.evicted(hashes)
            self._due()

    def _due(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._clock.after(BATCH_S, self._flush)

    async def _join(self) -> None:
        if self._index is not None:
            await self._index.join()
            self._joined = True
            self._clock.after(HEARTBEAT_S, self._beat)

    async def _beat(self) -> None:
        if self._index is not None:
            await self._index.beat()
            self._clock.after(HEARTBEAT_S, self._beat)

    async def _flush(self) -> None:
        self._flushing = False
        if self._index is not None:
            await self._index.flush()


class ValkeyReader:
    """One gateway's IndexReader; its kept answers age by the virtual clock."""

    def __init__(self, backend: ValkeyBackend, clock: Clock, url: str) -> None:
        self.calls = 0
        self.seconds = 0.0
        self._backend = backend
        self._clock = clock
        breaker = Breaker(clock=clock.time)
        self._reader = IndexReader(url, timeout_s=_TIMEOUT_S, breaker=breaker, clock=clock.time)

    async def lookup(self, chain: Sequence[bytes], pods: Sequence[tuple[str, int]]) -> dict[str, int]:
        self._require()
        began = time.perf_counter()
        found = await self._reader.lookup(self._backend.scope, chain, pods)
        self.calls += 1
        self.seconds += time.perf_counter() - began
        return found

    async def reserve(self, request_id: str, candidates: Sequence[Candidate]) -> Reserved:
        self._require()
        reserved = self._backend.ledger.reserve(request_id, candidates)
        await self._reader.reserve(self._backend.scope, request_id, [[candidates[reserved.chosen]]])
        return reserved

    async def unbook(self, pod: str, request_id: str) -> None:
        self._require()
        self._backend.ledger.unbook(pod, request_id)
        await self._reader.unbook(self._backend.scope, pod, request_id)

    def time(self) -> float:
        return self._clock.now

    def _require(self) -> None:
        if self._backend.away:
            raise IndexUnavailable("the prefix index is away")

    async def poll(self) -> None:
        if not self._backend.away:
            await self._reader.pods()

    async def close(self) -> None:
        await self._reader.close()
