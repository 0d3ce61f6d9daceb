"""Connections to pods that this pod writes to: handshake, backend connection, probe.

    connect() --> Handshake call --> backend.connect --> probe: write a random block, Probe call --> connected

Connections are made on first use, one attempt per address at a time, and kept until they break. A connection belongs to
one generation of a pod. It breaks when a write fails, when the peer's process ends or when another generation answers;
the next transfer then repeats the handshake. The agent of a broken connection is forgotten once no write to it is
pending.
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
#: UCX connects lazily: the first write can take seconds.
PROBE_WRITE_S = 10.0
PROBE_TRIES = 8
#: Most bytes of the write that measures the rate. On a GPU it takes long enough that the time between polls is little.
PROBE_BURST_BYTES: dict[MemoryKind, int] = {"DRAM": 8 << 20, "VRAM": 256 << 20}
PROBE_BURST_BLOCKS = 128
NONCE_BYTES = 16
PROCESS_CHECK_S = 0.1
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class PeerConnection:
    """A connection to one generation of a peer."""

    pod: str
    generation: int
    address: str
    agent: str
    num_blocks: int
    probe_block: int
    memory: PeerMemory
    metadata: bytes
    same_host: bool
    #: Detects the end of the peer's process; None where that is not possible.
    watch: ProcessWatch | None
    #: The peer takes commits as notifications and acknowledges them by one.
    accepts_commit_notifications: bool = False
    transport: str = ""
    transport_source: str = ""
    #: Rate of the probe in 1e9 bytes per second.
    gb_s: float = 0.0
    # The transfer thread owns the fields below.
    #: No new transfer may use the connection.
    broken: bool = False
    #: The peer's process is proven to have ended.
    process_ended: bool = False
    #: Posted writes.
    in_flight: int = 0
    #: Commit notifications in a row that were not acknowledged in time.
    missed_acks: int = 0
    #: No commit notification is sent before this time.
    notifications_resume_at: float = 0.0

    @property
    def stats(self) -> PeerStats:
        return PeerStats(self.pod, self.generation, self.address, self.transport, self.transport_source, self.gb_s)


class PeerConnector:
    """Makes and keeps connections. Owned by the event loop.

    Args:
        on_lost: called on the transfer thread when the process of a connection is proven to have ended.
        allow_tcp: KV in GPU memory may travel over TCP or an unknown transport.
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
        #: Connections that the backend knows. Owned by the transfer thread.
        self._attached: list[PeerConnection] = []
        #: Guards this pod's probe block.
        self._probe_lock = asyncio.Lock()
        self._next_process_check = 0.0

    @property
    def connecting(self) -> bool:
        """A handshake or probe is under way."""
        return bool(self._attempts)

    def stats(self) -> tuple[PeerStats, ...]:
        return tuple(c.stats for c in list(self._connections.values()) if not c.broken)

    async def connect(self, address: str, timeout_s: float, generation: int | None = None) -> PeerConnection:
        """Returns a connection that passed its probe, to `generation` if given.

        Raises LayoutMismatch, Unauthenticated, Unavailable, DeadlineExceeded, or TransferFailed if another generation
        answers.
        """
        connection = self._connections.get(address)
        if connection is None or connection.broken or (generation is not None and connection.generation < generation):
            attempt = self._attempts.get(address)
            if attempt is None:
                attempt = self._attempts[address] = asyncio.create_task(self._establish(address))
                attempt.add_done_callback(lambda task: self._on_connected(address, task))
            try:
                connection = await asyncio.wait_for(asyncio.shield(attempt), timeout_s)
            except TimeoutError as e:
                raise DeadlineExceeded(f"the connection to {address} took longer than {timeout_s:.1f} s") from e
            except BatonError:
                raise
            except Exception as e:
                raise TransferFailed(f"connecting to {address} failed: {type(e).__name__}: {e}") from e
        if generation is not None and connection.generation != generation:
            raise TransferFailed(
                f"{connection.pod} has generation {connection.generation}, the transfer needs {generation}"
            )
        return connection

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
        """Shakes hands and retries for a while: gRPC's back-off may refuse a call to a pod that was just restarted."""
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
            raise LayoutMismatch(
                f"invalid pool_memory {answer.pool_memory!r}: expected DRAM or VRAM", field="pool_memory"
            )
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
        """Connects the backend to the new agent, after the former connection to this address is marked as broken."""
        former = self._connections.pop(connection.address, None)

        def attach() -> bool:
            if former is not None:
                self.mark_broken(former)
                replaced = former.pod == connection.pod and former.generation < connection.generation
                # A newer generation at the same address proves the end of a process that cannot be watched.
                if replaced and former.watch is None:
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
        raise Unavailable(f"writes over the former connection to {connection.pod} have not ended within 1 s")

    async def _probe(self, connection: PeerConnection) -> None:
        """Writes random blocks until the peer confirms one, and measures the rate. Raises TransferFailed, Unavailable.

        Several pods may share the peer's probe block, so a mismatch is retried. One probe at a time uses this pod's
        probe block. The first write is outside the lock, so a peer that accepts no writes does not delay the others.
        """
        await self._time_probe_writes(connection, 1)
        for attempt in range(PROBE_TRIES):
            if attempt:
                await asyncio.sleep(random.uniform(0.02, 0.1) * attempt)
            async with self._probe_lock:
                nonce = os.urandom(NONCE_BYTES)
                data = nonce + os.urandom(self._memory.block_bytes - NONCE_BYTES)
                await self._on_thread(partial(self._memory.write_block, self._memory.probe_block, data))
                most = PROBE_BURST_BYTES[self._memory.kind] // self._memory.block_bytes
                burst = max(1, min(PROBE_BURST_BLOCKS, most))
                seconds = await self._time_probe_writes(connection, burst)
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
                        f"KV in GPU memory would travel to {connection.pod} over {by}; allow_tcp permits that"
                    )
                return
        raise TransferFailed(f"the probe block did not arrive intact on {connection.pod} in {PROBE_TRIES} tries")

    async def _time_probe_writes(self, connection: PeerConnection, count: int) -> float:
        """Times one write of `count` copies of the probe block, in seconds. Raises TransferFailed, Unavailable."""
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
            raise Unavailable(f"a probe write to {connection.pod} did not end within {PROBE_WRITE_S:g} s") from e

    # -- transfer thread ----------------------------------------------------------------------------------------------
    def mark_broken(self, connection: PeerConnection) -> None:
        """Ends the use of the connection. Its agent is forgotten once no write to it is pending."""
        connection.broken = True

    def _discard(self, connection: PeerConnection) -> None:
        """Drops a connection that failed to establish."""
        self.mark_broken(connection)
        if connection not in self._attached:
            _close_watch(connection)

    def tick(self, now: float) -> None:
        """Forgets the agents of broken connections and checks the peers' processes."""
        for connection in [c for c in self._attached if c.broken and not c.in_flight]:
            self._thread.backend.disconnect(connection.agent)
            self._attached.remove(connection)
            _close_watch(connection)
        if now < self._next_process_check:
            return
        self._next_process_check = now + PROCESS_CHECK_S
        for connection in self._attached:
            if connection.watch is not None and connection.watch.ended():
                self._mark_process_ended(connection)

    def _mark_process_ended(self, connection: PeerConnection) -> None:
        connection.broken = True
        if not connection.process_ended:
            connection.process_ended = True
            self._on_lost(connection)

    async def close(self) -> None:
        attempts = list(self._attempts.values())
        for attempt in attempts:
            attempt.cancel()
        await asyncio.gather(*attempts, return_exceptions=True)
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
    """Returns BLAKE2b-128 of a probe block, keyed with the nonce at its start."""
    return hashlib.blake2b(block, digest_size=16, key=nonce).digest()


def agent_name(info: transfer_pb2.InfoResponse) -> str:
    """Returns role-pod-generation: unique over all processes, because a generation is never reused."""
    return f"{role_from_pb(info.role).value}-{info.pod}-{info.generation}"


def require_compatible(mine: transfer_pb2.InfoResponse, theirs: transfer_pb2.InfoResponse) -> None:
    """Raises LayoutMismatch with the first field that differs, or InvalidRequest if the peer has no identity."""
    if not theirs.pod or not theirs.generation:
        raise InvalidRequest("the peer's info has no pod name or generation", field="info")
    if mine.protocol_version != theirs.protocol_version:
        raise LayoutMismatch(
            f"protocol versions differ: {mine.protocol_version} on this pod, {theirs.protocol_version} on {theirs.pod}",
            field="protocol_version",
        )
    layout, other = layout_from_pb(mine.layout), layout_from_pb(theirs.layout)
    layout.require_equal(other)
    if mine.layout.block_bytes != theirs.layout.block_bytes:
        raise LayoutMismatch(
            f"KV layouts differ in block_bytes: {mine.layout.block_bytes} on this pod, {theirs.layout.block_bytes} on "
            f"{theirs.pod}",
            field="block_bytes",
        )
    if mine.fingerprint != theirs.fingerprint:
        raise LayoutMismatch("KV fingerprints differ although every field is equal", field="fingerprint")
