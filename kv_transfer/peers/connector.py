"""Makes and keeps the connections to pods that this pod writes to.

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
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from common.errors import BatonError, DeadlineExceeded, TransferFailed, Unavailable, describe
from common.pb import transfer_pb2
from kv_transfer.messages import PeerStats
from kv_transfer.peers.connection import (
    HANDSHAKE_S,
    PairTrouble,
    PeerConnection,
    describe_connection,
    require_compatible,
)
from kv_transfer.peers.connection_probe import ConnectionProbe
from kv_transfer.peers.rpc_client import PeerRpcClient
from kv_transfer.transfer_thread import TransferThread

_log = logging.getLogger(__name__)

LAST_ATTEMPTS_S = 0.5  #: A pod that stops waits so long for its attempts to connect.
UNREACHABLE_S = 3.0  #: A handshake with a pod that cannot be reached is tried again for so long.
PROCESS_CHECK_S = 0.1  #: Time between two checks of the peers' processes.
MAX_TROUBLES = 1024
PAIR_RETRY_S = 1.0  #: Wait before a pair in trouble is tried again.


@dataclass(eq=False)
class PeerConnector:
    """Makes and keeps connections. Owned by the event loop."""

    thread: TransferThread
    rpc: PeerRpcClient
    info: Callable[[], transfer_pb2.InfoResponse]
    clock: Callable[[], float]
    probe: ConnectionProbe

    def __post_init__(self) -> None:
        self._connections: dict[str, PeerConnection] = {}
        self._attempts: dict[tuple[str, str], asyncio.Task[PeerConnection]] = {}  #: By address and pod.
        self._attached: list[PeerConnection] = []  #: Connections that the backend knows. Owned by the transfer thread.
        self._next_process_check = 0.0
        self.troubles: dict[str, PairTrouble] = {}  #: By pod: the pairs whose last attempt failed.

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

    def want(self, pod: str) -> None:
        """Keeps the trouble of a pair from being forgotten, because `pod` still exists: gateways would use the pair."""
        if (trouble := self.troubles.get(pod)) is not None:
            trouble.wanted_at = self.clock()

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
        connection = await asyncio.to_thread(describe_connection, address, answer)
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
