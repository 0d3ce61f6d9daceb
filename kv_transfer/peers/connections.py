"""Connections to pods that this pod writes to: handshake, backend connection, probe.

    connect() --> Handshake call --> backend.connect --> probe: write a random block, Probe call --> connected

Connections are made on first use, one attempt per address at a time, and kept until they break. A connection belongs to
one generation of a pod. It breaks when a write fails, when the peer's process ends or when another generation answers;
the next transfer then repeats the handshake. The agent of a broken connection is forgotten once no write to it is
pending. `pair_prober.py` sends a block over each connection that had no traffic for a while.

A failed attempt is remembered as the trouble of its pair until an attempt succeeds. Info shows troubles, and gateways
do not use a pair that has one.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import random
import select
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from common.errors import (
    BatonError,
    DeadlineExceeded,
    InvalidRequest,
    LayoutMismatch,
    TransferFailed,
    Unavailable,
    describe,
)
from common.pb import transfer_pb2
from common.process.lifecycle import host_boot_id
from common.wire import layout_from_pb, role_from_pb
from kv_transfer.backend.interface import TCP_OR_UNKNOWN
from kv_transfer.memory import MemoryKind, PeerMemory, PoolMemory
from kv_transfer.messages import PeerStats
from kv_transfer.peers.rpc_client import PeerRpcClient
from kv_transfer.transfer_thread import TransferThread

_log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
LAST_ATTEMPTS_S = 0.5  # of a pod that stops
UNREACHABLE_S = 3.0
PROBE_WRITE_S = 10.0  # UCX connects lazily: the first write can take seconds
PROBE_CALL_S = 5.0  # of a connection that passed before
PROBE_TRIES = 8
#: Max bytes of the write that measures the rate. On a GPU it takes long enough that the time between polls is little.
PROBE_BURST_BYTES: dict[MemoryKind, int] = {"DRAM": 8 << 20, "VRAM": 256 << 20}
PROBE_BURST_BLOCKS = 128
NONCE_BYTES = 16
RANDOM_BYTES = 64 << 10  # A probe block repeats so many random bytes
PROCESS_CHECK_S = 0.1
MAX_TROUBLES = 1024
PAIR_RETRY_S = 1.0  # Wait before a pair in trouble is tried again
_LISTEN = "0A"  # State of a socket in /proc/net/tcp
T = TypeVar("T")


class ProcessWatch:
    """Proof that a peer's process ended: owns a pidfd. A closed watch proves nothing.

    A pid alone proves nothing, because a peer in another container reports a pid of its own namespace. A watch
    therefore exists only if the process with that pid holds the listening socket of the peer's address. The pidfd is
    opened before that check.
    """

    def __init__(self, pidfd: int) -> None:
        self._pidfd: int | None = pidfd
        self._poll = select.poll()
        self._poll.register(pidfd, select.POLLIN)

    def ended(self) -> bool:
        """Returns whether the process has ended. Stays true until close()."""
        return bool(self._poll.poll(0))

    @property
    def closed(self) -> bool:
        return self._pidfd is None

    def close(self) -> None:
        if self._pidfd is not None:
            self._poll.unregister(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None


def watch_process(pid: int, boot_id: str, address: str) -> ProcessWatch | None:
    """Returns a watch on the process that listens at `address`; None if it is this process or not visible from here."""
    if not pid or pid == os.getpid() or boot_id != host_boot_id():
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        if _listens(pid, int(address.rpartition(":")[2])):
            return ProcessWatch(pidfd)
    except (OSError, ValueError):
        pass  # the process ended, or /proc is not readable: no proof is possible
    os.close(pidfd)
    return None


def _listens(pid: int, port: int) -> bool:
    inodes = [*_listeners(Path("/proc/net/tcp"), port), *_listeners(Path("/proc/net/tcp6"), port)]
    sockets = {f"socket:[{inode}]" for inode in inodes}
    return any(_link(fd) in sockets for fd in Path(f"/proc/{pid}/fd").iterdir())


def _link(fd: Path) -> str:
    try:
        return os.readlink(fd)
    except FileNotFoundError:  # closed since the directory was read
        return ""


def _listeners(table: Path, port: int) -> list[str]:
    rows = [line.split() for line in table.read_text().splitlines()[1:]] if table.exists() else []
    return [row[9] for row in rows if row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port]


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
    watch: ProcessWatch | None  # Detects the end of the peer's process; None where that is not possible
    accepts_commit_notifications: bool = False  # The peer takes commits as notifications and acknowledges them by one
    transport: str = ""
    transport_source: str = ""
    gb_s: float = 0.0  # Rate of the probe in 1e9 bytes per second
    #: The last block went through at this time of the connector's clock. Any thread sets it.
    block_at: float = 0.0
    #: Why the last probe has not passed; "" if it has. The event loop sets it, any thread reads it.
    trouble: str = ""
    probe_at: float = 0.0  # The next probe is not before this time
    # The transfer thread owns the fields below.
    broken: bool = False  # No new transfer may use the connection
    process_ended: bool = False  # The peer's process is proven to have ended. The sender ends its transfers then.
    in_flight: int = 0  # Posted writes
    missed_acks: int = 0  # Commit notifications in a row that were not acknowledged in time
    notifications_resume_at: float = 0.0  # No commit notification is sent before this time

    def stats(self, now: float) -> PeerStats:
        who = (self.pod, self.generation, self.address)
        age_s = max(0.0, now - self.block_at)
        return PeerStats(*who, self.transport, self.transport_source, self.gb_s, age_s, self.trouble)

    def close_watch(self) -> None:
        if self.watch is not None:
            self.watch.close()


@dataclass(slots=True)
class PairTrouble:
    """Why this pod has no connection to a peer."""

    pod: str
    generation: int  # Generation that was wanted; 0 for any
    address: str
    why: str
    since: float
    retry_at: float  # The prober tries again at this time
    tries: int = 0

    @property
    def stats(self) -> PeerStats:
        return PeerStats(self.pod, self.generation, self.address, "", "", 0.0, None, self.why)


@dataclass(eq=False)
class PeerConnector:
    """Makes and keeps connections. Owned by the event loop."""

    thread: TransferThread
    rpc: PeerRpcClient
    memory: PoolMemory
    info: Callable[[], transfer_pb2.InfoResponse]
    clock: Callable[[], float]
    allow_tcp: bool  # KV in GPU memory may travel over TCP or an unknown transport

    def __post_init__(self) -> None:
        self._connections: dict[str, PeerConnection] = {}
        self._attempts: dict[tuple[str, str], asyncio.Task[PeerConnection]] = {}  # By address and pod
        self._attached: list[PeerConnection] = []  # Connections that the backend knows. Owned by the transfer thread.
        self._probe_lock = asyncio.Lock()  # Guards this pod's probe block
        self._next_process_check = 0.0
        self.troubles: dict[str, PairTrouble] = {}  # By pod: the pairs whose last attempt failed

    @property
    def connecting(self) -> bool:
        """A handshake or probe is under way."""
        return bool(self._attempts)

    def live(self) -> list[PeerConnection]:
        """Returns the connections that new transfers may use. Any thread."""
        return [connection for connection in list(self._connections.values()) if not connection.broken]

    def stats(self) -> tuple[PeerStats, ...]:
        """Returns the live connections. Any thread."""
        now = self.clock()
        return tuple(connection.stats(now) for connection in self.live())

    def pair_stats(self) -> tuple[PeerStats, ...]:
        """Returns the live connections and the pairs in trouble, which come last. Any thread."""
        return (*self.stats(), *(trouble.stats for trouble in list(self.troubles.values())))

    async def connect(self, address: str, pod: str, timeout_s: float, generation: int | None = None) -> PeerConnection:
        """Returns a connection to `pod` that passed its probe, to `generation` if given.

        The name must come from a signed message or the index, not from the process at `address`: only `pod` accepts the
        handshake, so another process cannot relay it. Raises LayoutMismatch, Unauthenticated, Unavailable,
        DeadlineExceeded, or TransferFailed if another pod or generation answers.
        """
        connection = self._connections.get(address)
        if connection is not None and (connection.broken or connection.pod != pod):
            connection = None
        if connection is None or (generation is not None and connection.generation < generation):
            attempt = self._attempts.get((address, pod))
            if attempt is None:
                attempt = self._attempts[address, pod] = asyncio.create_task(self._establish(address, pod))
                wanted = (address, pod, generation or 0)
                attempt.add_done_callback(lambda task: self._on_connected(*wanted, task))
            try:
                connection = await asyncio.wait_for(asyncio.shield(attempt), timeout_s)
            except TimeoutError as e:
                raise DeadlineExceeded(f"the connection to {address} took longer than {timeout_s:.1f} s") from e
            except BatonError:
                raise
            except Exception as e:
                raise TransferFailed(f"connecting to {address} failed: {describe(e)}") from e
        if generation is not None and connection.generation != generation:
            found = f"{connection.pod} has generation {connection.generation}"
            raise TransferFailed(f"{found}, the transfer needs {generation}")
        return connection

    def _on_connected(self, address: str, pod: str, generation: int, task: asyncio.Task[PeerConnection]) -> None:
        del self._attempts[address, pod]
        if task.cancelled():
            return
        if (error := task.exception()) is None:
            self.troubles.pop(pod, None)
        else:
            self.record_trouble(address, pod, generation, describe(error))

    def record_trouble(self, address: str, pod: str, generation: int, why: str) -> None:
        """Records why `pod` cannot be reached. Logs a new cause."""
        now, known = self.clock(), self.troubles.pop(pod, None)
        if known is None or known.why != why:
            _log.warning("no connection to %s at %s: %s", pod, address, why)
        if known is None or (known.generation, known.address) != (generation, address):
            known = PairTrouble(pod, generation, address, why, now, now + PAIR_RETRY_S)
        known.why = why
        self.troubles[pod] = known
        if len(self.troubles) > MAX_TROUBLES:
            del self.troubles[next(iter(self.troubles))]

    def break_connection(self, connection: PeerConnection, why: str) -> None:
        """Ends the use of a connection whose probe failed. The next attempt makes another one."""
        connection.trouble = why
        self.thread.submit(partial(setattr, connection, "broken", True))
        self.record_trouble(connection.address, connection.pod, connection.generation, why)

    async def _establish(self, address: str, pod: str) -> PeerConnection:
        mine = self.info()
        answer = await self._handshake(address, pod, mine)
        if answer.info.pod != pod:
            raise TransferFailed(f"{answer.info.pod} answers at {address}, the transfer needs {pod}")
        require_compatible(mine, answer.info)
        connection = await asyncio.to_thread(_describe, address, answer)
        try:
            await self._attach(connection)
            try:
                await self.probe(connection)
            except (TransferFailed, Unavailable) as error:
                await self._stage(connection, mine, error)
                await self.probe(connection)
        except BaseException:
            self.thread.submit(lambda: self._discard(connection))
            raise
        for other in [c for c in self._connections.values() if c.broken and not c.in_flight]:
            del self._connections[other.address]
        self._connections[address] = connection
        by = f"{connection.transport} ({connection.transport_source})"
        found = (connection.pod, connection.generation, by, connection.gb_s)
        _log.info("connected to %s generation %d over %s, %.2f GB/s", *found)
        return connection

    async def _handshake(
        self, address: str, pod: str, mine: transfer_pb2.InfoResponse
    ) -> transfer_pb2.HandshakeResponse:
        """Shakes hands and retries for a while: gRPC's back-off may refuse a call to a pod that was just restarted."""
        metadata = await self.thread.run(self.thread.backend.metadata)
        request = transfer_pb2.HandshakeRequest(info=mine, agent_metadata=metadata)
        until = self.clock() + UNREACHABLE_S
        while True:
            try:
                response = transfer_pb2.HandshakeResponse
                return await self.rpc.call(address, pod, "Handshake", request, response, HANDSHAKE_S)
            except Unavailable:
                if self.clock() >= until:
                    raise
                await asyncio.sleep(0.1)

    async def _stage(
        self, connection: PeerConnection, mine: transfer_pb2.InfoResponse, error: TransferFailed | Unavailable
    ) -> None:
        """Makes writes over the connection go through host memory. Raises `error`, of direct writes, if it cannot."""
        found = await self.rpc.info(connection.address, HANDSHAKE_S)  # before memory is allocated for a dead peer
        alive = (found.pod, found.generation) == (connection.pod, connection.generation)
        staging = await self.thread.run(self.thread.backend.staging_metadata) if alive else b""
        if not staging:
            raise error
        metadata = await self.thread.run(self.thread.backend.metadata)
        request = transfer_pb2.HandshakeRequest(info=mine, agent_metadata=metadata, staging=staging)
        to, response = (connection.address, connection.pod), transfer_pb2.HandshakeResponse
        answer = await self.rpc.call(*to, "Handshake", request, response, HANDSHAKE_S)
        if not answer.staging or answer.info.generation != connection.generation:
            raise error
        _log.info("KV to %s goes through host memory: %s", connection.pod, error.message)
        await self.thread.run(partial(self.thread.backend.connect_staged, connection.agent, answer.staging))

    async def _attach(self, connection: PeerConnection) -> None:
        """Connects the backend to the new agent, after the former connection to this address is marked as broken."""
        former = self._connections.pop(connection.address, None)

        def attach() -> bool:
            if former is not None:
                former.broken = True
                replaced = former.pod == connection.pod and former.generation < connection.generation
                # A newer generation at the same address proves the end of a process that cannot be watched.
                former.process_ended |= replaced and former.watch is None
            if any(other.agent == connection.agent for other in self._attached):
                return False
            self.thread.backend.connect(connection.agent, connection.metadata, connection.memory)
            self._attached.append(connection)
            return True

        for _ in range(50):
            if await self.thread.run(attach):
                return
            await asyncio.sleep(0.02)
        raise Unavailable(f"writes over the former connection to {connection.pod} have not ended within 1 s")

    async def probe(self, connection: PeerConnection, *, keep_alive: bool = False) -> None:
        """Writes random blocks until the peer confirms one. Raises TransferFailed, Unavailable, DeadlineExceeded.

        The first probe of a connection measures rate and transport. A `keep_alive` probe is one block. Its first write
        has no time limit, because a write that is on its way cannot be recalled; the caller stops waiting.

        Several pods may share the peer's probe block, so a mismatch is retried. One probe at a time uses this pod's
        probe block. The first write is outside the lock, so a peer that accepts no writes does not delay the others.
        """
        memory, info = self.memory, self.info()
        most = 1 if keep_alive else min(PROBE_BURST_BLOCKS, PROBE_BURST_BYTES[memory.kind] // memory.block_bytes)
        burst = max(1, most)
        await self._time_probe_writes(connection, 1, None if keep_alive else PROBE_WRITE_S)
        for attempt in range(PROBE_TRIES):
            if attempt:
                await asyncio.sleep(random.uniform(0.02, 0.1) * attempt)
            async with self._probe_lock:
                nonce = os.urandom(NONCE_BYTES)
                data = _probe_block(nonce, memory.block_bytes)
                await self.thread.run(partial(memory.write_block, memory.probe_block, data))
                seconds = await self._time_probe_writes(connection, burst, PROBE_WRITE_S)
                request = transfer_pb2.ProbeRequest(
                    pod=info.pod,
                    generation=info.generation,
                    nonce=nonce,
                    digest=probe_digest(nonce, data),
                    keep_alive=keep_alive,
                )
                to, response = (connection.address, connection.pod), transfer_pb2.ProbeResponse
                limit_s = PROBE_CALL_S if keep_alive else HANDSHAKE_S
                answer = await self.rpc.call(*to, "Probe", request, response, limit_s)
            if answer.intact:
                break
        else:
            raise TransferFailed(f"the probe block did not arrive intact on {connection.pod} in {PROBE_TRIES} tries")
        if not keep_alive:
            await self._measure(connection, burst * memory.block_bytes / max(seconds, 1e-9) / 1e9)
        connection.block_at = self.clock()

    async def _measure(self, connection: PeerConnection, gb_s: float) -> None:
        """Sets rate and transport of a connection. Raises TransferFailed for a transport that is not allowed."""
        transport_of = partial(self.thread.backend.transport, connection.agent, same_host=connection.same_host)
        transport = await self.thread.run(transport_of)
        connection.gb_s = gb_s
        connection.transport, connection.transport_source = transport.name, transport.source
        if self.memory.kind == "VRAM" and transport.name in TCP_OR_UNKNOWN and not self.allow_tcp:
            by = "TCP" if transport.name == "tcp" else "an unknown transport"
            raise TransferFailed(f"KV in GPU memory would travel to {connection.pod} over {by}; allow_tcp permits that")

    async def _time_probe_writes(self, connection: PeerConnection, count: int, limit_s: float | None) -> float:
        """Times one write of `count` copies of the probe block, in seconds. Raises TransferFailed, Unavailable."""
        ended: Future[float] = Future()
        mine, theirs = [self.memory.probe_block] * count, [connection.probe_block] * count

        def post() -> None:
            started = self.clock()
            connection.in_flight += 1

            def on_ended(error: str | None) -> None:
                connection.in_flight -= 1
                if ended.cancelled():
                    return
                if error is None:
                    ended.set_result(self.clock() - started)
                else:
                    ended.set_exception(TransferFailed(f"the probe of {connection.pod} failed: {error}"))

            self.thread.write(connection.agent, mine, theirs, b"", on_ended)

        self.thread.submit(post)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(ended), limit_s)
        except TimeoutError as e:
            raise Unavailable(f"a probe write to {connection.pod} did not end within {limit_s:g} s") from e

    async def close(self) -> None:
        """Waits for the attempts, then cancels them: a peer may be connecting to us."""
        attempts = list(self._attempts.values())
        if attempts:
            await asyncio.wait(attempts, timeout=LAST_ATTEMPTS_S)
        for attempt in attempts:
            attempt.cancel()
        await asyncio.gather(*attempts, return_exceptions=True)

        def close_watches() -> None:
            for connection in self._attached:
                connection.close_watch()

        self.thread.submit(close_watches)

    # -- transfer thread ----------------------------------------------------------------------------------------------
    def _discard(self, connection: PeerConnection) -> None:
        """Drops a connection that failed to establish."""
        connection.broken = True
        if connection not in self._attached:
            connection.close_watch()

    def tick(self, now: float) -> None:
        """Forgets the agents of broken connections and checks the peers' processes."""
        for connection in [c for c in self._attached if c.broken and not c.in_flight]:
            self.thread.backend.disconnect(connection.agent)
            self._attached.remove(connection)
            connection.close_watch()
        if now < self._next_process_check:
            return
        self._next_process_check = now + PROCESS_CHECK_S
        for connection in self._attached:
            if connection.watch is not None and connection.watch.ended():
                connection.broken = connection.process_ended = True


def _describe(address: str, answer: transfer_pb2.HandshakeResponse) -> PeerConnection:
    """Returns the connection that a handshake describes. It blocks while it looks for the peer's process."""
    info = answer.info
    if answer.pool_memory not in ("DRAM", "VRAM"):
        raise LayoutMismatch(f"invalid pool_memory {answer.pool_memory!r}: expected DRAM or VRAM", field="pool_memory")
    kind: MemoryKind = "VRAM" if answer.pool_memory == "VRAM" else "DRAM"
    total = max(info.num_blocks, answer.probe_block + 1)
    return PeerConnection(
        pod=info.pod,
        generation=info.generation,
        address=address,
        agent=agent_name(info),
        num_blocks=info.num_blocks,
        probe_block=answer.probe_block,
        memory=PeerMemory(answer.pool_base, info.layout.block_bytes, total, answer.pool_device, kind),
        metadata=answer.agent_metadata,
        same_host=info.boot_id == host_boot_id(),
        watch=watch_process(info.pid, info.boot_id, address),
        accepts_commit_notifications=answer.notes,
    )


def _probe_block(nonce: bytes, block_bytes: int) -> bytes:
    """Returns a block that begins with the nonce and repeats RANDOM_BYTES random bytes."""
    piece = os.urandom(min(block_bytes, RANDOM_BYTES))
    return (nonce + piece * (1 + block_bytes // len(piece)))[:block_bytes]


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
    if (own := mine.protocol_version) != (other := theirs.protocol_version):
        differ = f"protocol versions differ: {own} on this pod, {other} on {theirs.pod}"
        raise LayoutMismatch(differ, field="protocol_version")
    layout_from_pb(mine.layout).require_equal(layout_from_pb(theirs.layout))
    if (own := mine.layout.block_bytes) != (other := theirs.layout.block_bytes):
        differ = f"KV layouts differ in block_bytes: {own} on this pod, {other} on {theirs.pod}"
        raise LayoutMismatch(differ, field="block_bytes")
    if mine.fingerprint != theirs.fingerprint:
        raise LayoutMismatch("KV fingerprints differ although every field is equal", field="fingerprint")
