"""How reads from a peer travel, and how fast: found out once per connection, before the first pull that reads, and anew
where nothing was read for a while.

Writes say nothing about it: UCX may write over NVLink and send what is read through host memory and TCP. So the peer's
probe block is read until its digest, which the peer compares, is right, and then often enough to tell the rate.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from common.errors import BatonError, DeadlineExceeded, TransferFailed
from common.pb import transfer_pb2
from kv_transfer.connector import (
    HANDSHAKE_S,
    NONCE_BYTES,
    PROBE_BURST_BLOCKS,
    PROBE_BURST_BYTES,
    PROBE_TRIES,
    Connection,
    Connector,
    probe_digest,
)
from kv_transfer.memory import PoolMemory
from kv_transfer.messages import ReadWay
from kv_transfer.peer_rpc import PeerRpc
from kv_transfer.transfer_thread import TransferThread

_log = logging.getLogger(__name__)

MEASURE_S = 0.02  # of reading at once for a rate, where that is not more than a probe may move
DIRECT = ("cuda_ipc", "rdma")  # between GPUs without a detour through host memory
TCP_GBPS = 4.0  # about the most that TCP moves from GPU to GPU: what is slower and not known to be direct may be it

T = TypeVar("T")


class ReadProbe:
    """Owned by the event loop."""

    def __init__(
        self,
        thread: TransferThread,
        rpc: PeerRpc,
        memory: PoolMemory,
        info: Callable[[], transfer_pb2.InfoResponse],
        clock: Callable[[], float],
        connector: Connector,
        *,
        allow_tcp: bool,
    ) -> None:
        self._thread = thread
        self._rpc = rpc
        self._memory = memory
        self._info = info
        self._clock = clock
        self._connector = connector
        self._allow_tcp = allow_tcp
        self._flights: dict[Connection, asyncio.Task[ReadWay]] = {}

    @property
    def under_way(self) -> bool:
        """Something is being found out."""
        return bool(self._flights)

    async def way(self, connection: Connection, timeout_s: float, read_gbps: Callable[[], float]) -> ReadWay:
        """What is known of reads over this connection; read_gbps: of late, 0 where that is too long ago to count.

        Raises DeadlineExceeded, Unavailable and TransferFailed: reads do not work.
        """
        known = connection.reads
        if known is not None and (known.refused or read_gbps()):
            return known
        flight = self._flights.get(connection)
        if flight is None:
            flight = self._flights[connection] = asyncio.create_task(self._measure(connection))
            flight.add_done_callback(lambda task: self._landed(connection, task))
        try:
            return await asyncio.wait_for(asyncio.shield(flight), timeout_s)
        except TimeoutError as e:
            raise DeadlineExceeded(f"{connection.pod} could not be read in time") from e
        except BatonError:
            raise
        except Exception as e:
            raise TransferFailed(f"reading from {connection.pod} failed: {type(e).__name__}: {e}") from e

    def _landed(self, connection: Connection, task: asyncio.Task[ReadWay]) -> None:
        del self._flights[connection]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("nothing can be read from %s: %s", connection.pod, error)

    async def _measure(self, connection: Connection) -> ReadWay:
        async with self._connector.probing:
            await self._prove(connection)
            most = min(PROBE_BURST_BLOCKS, PROBE_BURST_BYTES[self._memory.kind] // self._memory.block_bytes)
            count, seconds = 1, await self._connector.burst(connection, 1, reads=True)
            while count < most and seconds < MEASURE_S:
                count = min(most, max(2 * count, int(count * MEASURE_S / max(seconds, 1e-9))))
                seconds = await self._connector.burst(connection, count, reads=True)
        gbps = count * self._memory.block_bytes / max(seconds, 1e-9) / 1e9
        found = await self._on_thread(
            lambda: self._thread.backend.transport(connection.agent, same_host=connection.same_host, reads=True)
        )
        refused = self._refusal(found.name, gbps)
        way = ReadWay(found.name, found.source, gbps, self._clock(), refused)
        first, connection.reads = connection.reads is None, way
        said = f"over {way.transport} ({way.source}), {way.gbps:.2f} GB/s"
        if refused:
            _log.warning(
                "reads from %s would come %s, refused as %s (--allow-tcp permits it): it is asked to push instead",
                connection.pod, said, refused,
            )  # fmt: skip
        elif first:
            _log.info("reads from %s come %s", connection.pod, said)
        return way

    def _refusal(self, transport: str, gbps: float) -> str:
        """As for writes: TCP is for those that allow it, and so is a way of which nobody can say that it is not TCP."""
        if self._memory.kind == "DRAM" or self._allow_tcp or transport in DIRECT:
            return ""
        if transport == "tcp":
            return "TCP"
        return "no faster than TCP" if gbps < TCP_GBPS else ""

    async def _prove(self, connection: Connection) -> None:
        """Reads the peer's probe block until the peer confirms it; others may be writing there."""
        await self._ask(connection, os.urandom(NONCE_BYTES), b"")  # from now on it polls often
        for attempt in range(PROBE_TRIES):
            if attempt:
                await asyncio.sleep(random.uniform(0.02, 0.1) * attempt)
            blank = partial(self._memory.write_block, self._memory.probe_block, os.urandom(self._memory.block_bytes))
            await self._on_thread(blank)
            await self._connector.burst(connection, 1, reads=True)
            block = await self._on_thread(lambda: self._memory.read_block(self._memory.probe_block))
            nonce = block[:NONCE_BYTES]
            if await self._ask(connection, nonce, probe_digest(nonce, block)):
                return
        raise TransferFailed(f"a block read from {connection.pod} does not arrive intact")

    async def _ask(self, connection: Connection, nonce: bytes, digest: bytes) -> bool:
        """Whether the peer's probe block is the one with this digest."""
        info = self._info()
        request = transfer_pb2.ProbeRequest(pod=info.pod, generation=info.generation, nonce=nonce, digest=digest)
        answer = await self._rpc.call(connection.address, "Probe", request, transfer_pb2.ProbeResponse, HANDSHAKE_S)
        return answer.intact

    async def close(self) -> None:
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)

    async def _on_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._thread.call(function))
