"""Connections to pods that we write to: handshake, NIXL connection, probe; lazily, one flight per address, cached
until they break.

A connection belongs to one generation of a pod. It breaks when a write of it fails, its process ended or another
generation answers; the next transfer then shakes hands anew. The broken one's agent is forgotten as soon as no write
to it is pending.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from common.errors import BatonError, DeadlineExceeded, InvalidRequest, LayoutMismatch, TransferFailed, Unavailable
from common.pb import transfer_pb2
from common.process.lifecycle import host_boot_id
from common.wire import layout_from_pb, role_from_pb
from kv_transfer.memory import MemoryKind, PeerMemory, PoolMemory
from kv_transfer.messages import PeerStats
from kv_transfer.peers.process_watch import ProcessWatch, watch_process
from kv_transfer.peers.rpc_client import PeerRpcClient
from kv_transfer.transfer_thread import TransferThread

_log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
UNREACHABLE_S = 3.0
PROBE_WRITE_S = 10.0  # UCX connects lazily; a first write can take seconds
PROBE_TRIES = 8
# What a rate is measured with: on a GPU long enough that the polls between do not count.
PROBE_BURST_BYTES: dict[MemoryKind, int] = {"DRAM": 8 << 20, "VRAM": 256 << 20}
PROBE_BURST_BLOCKS = 128
NONCE_BYTES = 16
PROCESS_CHECK_S = 0.1  # how often processes are looked at


T = TypeVar("T")


@dataclass(slots=True, eq=False)
class PeerConnection:
    """One generation of a peer. notes: it takes commits as notes and answers by one. `broken`, `lost`, `in_flight` and
    what follows it belong to the transfer thread. unheard: notes in a row that were not answered in time; notes_from:
    when the next one may be tried.
    """

    pod: str
    generation: int
    address: str
    agent: str
    num_blocks: int
    probe_block: int
    memory: PeerMemory
    metadata: bytes
    same_host: bool
    watch: ProcessWatch | None
    accepts_commit_notifications: bool = False
    transport: str = ""
    transport_source: str = ""
    gb_s: float = 0.0
    broken: bool = False
    process_ended: bool = False
    in_flight: int = 0
    missed_acks: int = 0
    notifications_resume_at: float = 0.0

    @property
    def stats(self) -> PeerStats:
        return PeerStats(self.pod, self.generation, self.address, self.transport, self.transport_source, self.gb_s)


class PeerConnector:
    """Owned by the event loop; on_lost(connection) is called on the transfer thread when a connection's process is
    proven gone.
    """

    def __init__(
        self,
        thread: TransferThread,
        rpc: PeerRpcClient,
        memory: PoolMemory,
        info: Callable[[], transfer_pb2.InfoResponse],
        clock: Callable[[], float],
        on_lost: Callable[[PeerConnection], None],
        *,
        allow_tcp: bool,
    ) -> None:
        self._thread = thread
        self._rpc = rpc
        self._memory = memory
        self._info = info
        self._clock = clock
        self._on_lost = on_lost
        self._allow_tcp = allow_tcp
        self._connections: dict[str, PeerConnection] = {}
        self._attempts: dict[str, asyncio.Task[PeerConnection]] = {}
        self._attached: list[PeerConnection] = []  # the transfer thread's: every agent that the backend knows
        self._probing = asyncio.Lock()  # of this pod's probe block
        self._next_look = 0.0

    @property
    def connecting(self) -> bool:
        """A handshake or probe is under way."""
        return bool(self._attempts)

    def stats(self) -> tuple[PeerStats, ...]:
        return tuple(c.stats for c in list(self._connections.values()) if not c.broken)

    async def connect(self, address: str, timeout_s: float, generation: int | None = None) -> PeerConnection:
        """A connection that a probe went through, to `generation` if given.

        Raises LayoutMismatch, Unauthenticated, Unavailable, DeadlineExceeded, TransferFailed (another generation
        lives there).
        """
        known = self._connections.get(address)
        if known is None or known.broken or (generation is not None and known.generation < generation):
            flight = self._attempts.get(address)
            if flight is None:
                flight = self._attempts[address] = asyncio.create_task(self._establish(address))
                flight.add_done_callback(lambda task: self._on_connected(address, task))
            try:
                known = await asyncio.wait_for(asyncio.shield(flight), timeout_s)
            except TimeoutError as e:
                raise DeadlineExceeded(f"{address} did not connect in time") from e
            except BatonError:
                raise
            except Exception as e:
                raise TransferFailed(f"connecting to {address} failed: {type(e).__name__}: {e}") from e
        if generation is not None and known.generation != generation:
            raise TransferFailed(f"{known.pod} is at generation {known.generation}, the transfer at {generation}")
        return known

    def _on_connected(self, address: str, task: asyncio.Task[PeerConnection]) -> None:
        del self._attempts[address]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("no connection to %s: %s", address, error)

    async def _establish(self, address: str) -> PeerConnection:
        metadata = await self._on_thread(self._thread.backend.metadata)
        mine = self._info()
        request = transfer_pb2.HandshakeRequest(info=mine, agent_metadata=metadata)
        answer = await self._handshake(address, request)
        require_compatible(mine, answer.info)
        connection = await asyncio.to_thread(self._describe, address, answer)
        try:
            await self._attach(connection)
            await self._probe(connection)
        except BaseException:
            self._thread.submit(lambda: self._discard(connection))
            raise
        for other in [c for c in self._connections.values() if c.broken and not c.in_flight]:
            del self._connections[other.address]
        self._connections[address] = connection
        _log.info(
            "connected to %s generation %d over %s (%s), %.2f GB/s",
            connection.pod,
            connection.generation,
            connection.transport,
            connection.transport_source,
            connection.gb_s,
        )
        return connection

    async def _handshake(self, address: str, request: transfer_pb2.HandshakeRequest) -> transfer_pb2.HandshakeResponse:
        """A pod that was just restarted may be refused by our channel's back-off for a moment: try for a while."""
        until = self._clock() + UNREACHABLE_S
        while True:
            try:
                return await self._rpc.call(address, "Handshake", request, transfer_pb2.HandshakeResponse, HANDSHAKE_S)
            except Unavailable:
                if self._clock() >= until:
                    raise
                await asyncio.sleep(0.1)

    def _describe(self, address: str, answer: transfer_pb2.HandshakeResponse) -> PeerConnection:
        info = answer.info
        if answer.pool_memory == "DRAM":
            kind = "DRAM"
        elif answer.pool_memory == "VRAM":
            kind = "VRAM"
        else:
            raise LayoutMismatch(f"unknown kind of memory {answer.pool_memory!r}", field="pool_memory")
        memory = PeerMemory(
            answer.pool_base,
            info.layout.block_bytes,
            max(info.num_blocks, answer.probe_block + 1),
            answer.pool_device,
            "VRAM" if kind == "VRAM" else "DRAM",
        )
        return PeerConnection(
            pod=info.pod,
            generation=info.generation,
            address=address,
            agent=agent_name(info),
            num_blocks=info.num_blocks,
            probe_block=answer.probe_block,
            memory=memory,
            metadata=answer.agent_metadata,
            same_host=info.boot_id == host_boot_id(),
            watch=watch_process(info.pid, info.boot_id, address),
            accepts_commit_notifications=answer.notes,
        )

    async def _attach(self, connection: PeerConnection) -> None:
        """Gives the backend the new agent, and takes the former one of this address away."""
        former = self._connections.pop(connection.address, None)

        def attach() -> bool:
            if former is not None:
                self.mark_broken(former)
                replaced = former.pod == connection.pod and former.generation < connection.generation
                if (
                    replaced and former.watch is None
                ):  # the same identity lives on in a newer process at the same address
                    self._mark_process_ended(former)
            if any(other.agent == connection.agent for other in self._attached):
                return False
            self._thread.backend.connect(connection.agent, connection.metadata, connection.memory)
            self._attached.append(connection)
            return True

        for _ in range(50):
            if await self._on_thread(attach):
                return
            await asyncio.sleep(0.02)
        raise Unavailable(f"writes over the former connection to {connection.pod} have not ended")

    async def _probe(self, connection: PeerConnection) -> None:
        """Writes a random block until the peer confirms it; several initiators may share the peer's probe block. One
        peer after the other, but only those that have taken a block: nobody waits for one that takes none.
        """
        await self._burst(connection, 1)
        for attempt in range(PROBE_TRIES):
            if attempt:
                await asyncio.sleep(random.uniform(0.02, 0.1) * attempt)
            async with self._probing:
                nonce = os.urandom(NONCE_BYTES)
                data = nonce + os.urandom(self._memory.block_bytes - NONCE_BYTES)
                await self._on_thread(partial(self._memory.write_block, self._memory.probe_block, data))
                most = PROBE_BURST_BYTES[self._memory.kind] // self._memory.block_bytes
                burst = max(1, min(PROBE_BURST_BLOCKS, most))
                seconds = await self._burst(connection, burst)
                request = transfer_pb2.ProbeRequest(
                    pod=self._info().pod,
                    generation=self._info().generation,
                    nonce=nonce,
                    digest=probe_digest(nonce, data),
                )
                answer = await self._rpc.call(
                    connection.address, "Probe", request, transfer_pb2.ProbeResponse, HANDSHAKE_S
                )
            if answer.intact:
                connection.gb_s = burst * self._memory.block_bytes / max(seconds, 1e-9) / 1e9
                transport = await self._on_thread(
                    lambda: self._thread.backend.transport(connection.agent, same_host=connection.same_host)
                )
                connection.transport, connection.transport_source = transport.name, transport.source
                if self._memory.kind == "VRAM" and transport.name in ("tcp", "unknown") and not self._allow_tcp:
                    by = "TCP" if transport.name == "tcp" else "an unknown transport"
                    raise TransferFailed(
                        f"device memory would travel to {connection.pod} over {by} (allow_tcp permits it)"
                    )
                return
        raise TransferFailed(f"a block written to {connection.pod} does not arrive intact")

    async def _burst(self, connection: PeerConnection, count: int) -> float:
        """Seconds that a write of `count` times the probe block took. Raises TransferFailed, Unavailable."""
        ended: Future[float] = Future()
        mine, theirs = [self._memory.probe_block] * count, [connection.probe_block] * count

        def post() -> None:
            started = self._clock()
            connection.in_flight += 1

            def on_ended(error: str | None) -> None:
                connection.in_flight -= 1
                if ended.cancelled():
                    return
                if error is None:
                    ended.set_result(self._clock() - started)
                else:
                    ended.set_exception(TransferFailed(f"the probe of {connection.pod} failed: {error}"))

            self._thread.write(connection.agent, mine, theirs, b"", on_ended)

        self._thread.submit(post)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(ended), PROBE_WRITE_S)
        except TimeoutError as e:
            raise Unavailable(f"{connection.pod} takes no bytes") from e

    # On the transfer thread.

    def mark_broken(self, connection: PeerConnection) -> None:
        """The connection is not to be used again; its agent goes once no write to it is pending."""
        connection.broken = True

    def _discard(self, connection: PeerConnection) -> None:
        """The connection came to nothing; what the backend knows of it goes like that of a retired one."""
        self.mark_broken(connection)
        if connection not in self._attached:
            _close_watch(connection)

    def tick(self, now: float) -> None:
        """Forgets broken connections' agents and looks whether peers' processes live."""
        for connection in [c for c in self._attached if c.broken and not c.in_flight]:
            self._thread.backend.disconnect(connection.agent)
            self._attached.remove(connection)
            _close_watch(connection)
        if now < self._next_look:
            return
        self._next_look = now + PROCESS_CHECK_S
        for connection in self._attached:
            if connection.watch is not None and connection.watch.ended():
                self._mark_process_ended(connection)

    def _mark_process_ended(self, connection: PeerConnection) -> None:
        connection.broken = True
        if not connection.process_ended:
            connection.process_ended = True
            self._on_lost(connection)

    async def close(self) -> None:
        flights = list(self._attempts.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
        self._thread.submit(self._close_watches)

    def _close_watches(self) -> None:
        for connection in self._attached:
            _close_watch(connection)

    async def _on_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._thread.call(function))


def _close_watch(connection: PeerConnection) -> None:
    if connection.watch is not None:
        connection.watch.close()


def probe_digest(nonce: bytes, block: bytes) -> bytes:
    """BLAKE2b-128 of a probe block, keyed with the bytes at its start."""
    return hashlib.blake2b(block, digest_size=16, key=nonce).digest()


def agent_name(info: transfer_pb2.InfoResponse) -> str:
    """role-pod-generation: a name that no process ever had before."""
    return f"{role_from_pb(info.role).value}-{info.pod}-{info.generation}"


def require_compatible(mine: transfer_pb2.InfoResponse, theirs: transfer_pb2.InfoResponse) -> None:
    """Raises LayoutMismatch that names the first field in which the peer differs, InvalidRequest for no pod at all."""
    if not theirs.pod or not theirs.generation:
        raise InvalidRequest("the peer does not say who it is", field="info")
    if mine.protocol_version != theirs.protocol_version:
        raise LayoutMismatch(
            f"protocol versions differ: {mine.protocol_version} here, {theirs.protocol_version} there",
            field="protocol_version",
        )
    layout, other = layout_from_pb(mine.layout), layout_from_pb(theirs.layout)
    layout.require_equal(other)
    if mine.layout.block_bytes != theirs.layout.block_bytes:
        raise LayoutMismatch(
            f"KV layouts differ in block_bytes: {mine.layout.block_bytes} here, {theirs.layout.block_bytes} there",
            field="block_bytes",
        )
    if mine.fingerprint != theirs.fingerprint:
        raise LayoutMismatch("KV fingerprints differ although every field is equal", field="fingerprint")
