"""Pipelined Redis connections for the calls that requests wait for: many calls in flight, answered in order.

For every call, redis-py takes a connection from its pool, checks that it is alive, and guards each write and read with
tasks, locks and time limits. That costs several times as much as a look-up in the server. A PipelinedConnection lets
redis-py connect (addresses, TLS, users, sentinels, cluster slots) and then takes over the transport: it writes a
command at once, and an answer resolves its future in the event loop iteration in which it arrives.

Lifecycle: connecting -> open -> closed, at the first error. There are no retries and no time limits; while no
connection is open, the caller uses the redis-py client, which has them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import hiredis
from redis._parsers import BaseParser
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError, InvalidResponse, ResponseError

from common.errors import ConfigError, describe
from common.redis.client import REDIS_FAILURES, RedisClient, connect_redis
from prefix_index.store import IndexKeys

CONNECT_S = 1.0
RETRY_S = 1.0  #: Shortest time between the starts of two connections of a scope.
_MORE = object()  #: The hiredis reader returns it while an answer is incomplete.

_log = logging.getLogger(__name__)


class _PipelineProtocol(asyncio.Protocol):
    """Calls in flight over a transport that redis-py connected.

    Invariant: `_waiting` holds the futures of the unanswered calls, in the order of their commands.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport = transport
        self._waiting: deque[asyncio.Future[Any]] = deque()
        errors = BaseParser.parse_error
        self._reader = hiredis.Reader(protocolError=InvalidResponse, replyError=errors, notEnoughData=_MORE)
        self._before = transport.get_protocol()
        transport.set_protocol(self)

    def call(self, packed: bytes) -> asyncio.Future[Any]:
        """Writes a command; the future gets its answer. Callers bound the number of calls."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        self._transport.write(packed)
        return answer

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while (answer := self._reader.gets()) is not _MORE:
                self._deliver(answer)
        except (ConnectionError, InvalidResponse) as e:
            self.end(e)

    def _deliver(self, answer: Any) -> None:
        if isinstance(answer, ConnectionError):
            raise answer
        if not self._waiting:
            raise ConnectionError("an answer without a call")
        waiting = self._waiting.popleft()
        if waiting.done():
            return  # the caller was cancelled
        if isinstance(answer, ResponseError):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(ConnectionError("connection closed by server" if exc is None else describe(exc)))
        self._before.connection_lost(exc)  # redis-py's close waits for it

    def end(self, error: Exception) -> None:
        """Fails the calls in flight and closes the transport. Idempotent."""
        self._transport.close()
        if not self.closed.done():
            self.closed.set_exception(error)
        while self._waiting:
            answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(ConnectionError("the connection was closed"))


class PipelinedConnection:
    """A connection to the server of one scope. It starts to connect, in the background, when it is created."""

    def __init__(self, url: str, scope: str, clock: Callable[[], float]) -> None:
        self._protocol: _PipelineProtocol | None = None
        self._clock = clock
        self._started_at = clock()
        self._task = asyncio.get_running_loop().create_task(self._run(url, scope), name="prefix-index-connection")

    @property
    def open(self) -> bool:
        """Calls are possible."""
        return self._protocol is not None and not self._protocol.closed.done()

    @property
    def may_reconnect(self) -> bool:
        """The connection has ended, and RETRY_S have passed since its start."""
        return self._task.done() and self._clock() - self._started_at >= RETRY_S

    async def call(self, packed: bytes) -> Any:
        """Returns the answer to a packed command. Raises REDIS_FAILURES; all but ResponseError close the connection."""
        if self._protocol is None or self._protocol.closed.done():
            raise ConnectionError("the connection is closed")
        return await self._protocol.call(packed)

    def close(self) -> None:
        """Closes the connection; calls in flight fail. Idempotent."""
        self._protocol = None
        self._task.cancel()

    async def wait_closed(self) -> None:
        """Returns once the connection is closed."""
        await asyncio.wait({self._task})

    async def _run(self, url: str, scope: str) -> None:
        client: RedisClient | None = None
        protocol: _PipelineProtocol | None = None
        try:
            client = connect_redis(url, timeout_s=CONNECT_S, no_read_timeout=True)
            async with asyncio.timeout(CONNECT_S):
                connection = await _connection(client, scope)
            writer = connection._writer
            assert writer is not None  # the connection is open
            protocol = self._protocol = _PipelineProtocol(writer.transport)  # type: ignore[arg-type]
            await protocol.closed
        except (*REDIS_FAILURES, ConfigError) as e:
            _log.info("the pipelined connection to the prefix index ended: %s", describe(e, limit_s=CONNECT_S))
        finally:
            self._protocol = None
            if protocol is not None:
                protocol.end(ConnectionError("the connection was closed"))
            if client is not None:
                await client.aclose()


async def _connection(client: RedisClient, scope: str) -> AbstractConnection:
    """Returns a connected connection to the server of the scope; it ends with the client."""
    connection: AbstractConnection
    if not isinstance(client, RedisCluster):
        connection = await client.connection_pool.get_connection()  # type: ignore[no-untyped-call]
        return connection
    await client.initialize()
    node = client.get_node_from_key(IndexKeys(scope).pods)
    if node is None:
        raise ConnectionError("no node of the cluster has the scope")
    connection = node.acquire_connection()
    await connection.connect()  # type: ignore[no-untyped-call]
    return connection


class PipelinedConnections:
    """The pipelined connections of a reader, one per scope in use."""

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._clock = clock
        self._connections: dict[str, PipelinedConnection] = {}

    def get(self, scope: str) -> PipelinedConnection | None:
        """Returns the scope's open connection. Without one, starts to connect in the background and returns None."""
        connection = self._connections.get(scope)
        if connection is None or connection.may_reconnect:
            connection = self._connections[scope] = PipelinedConnection(self._url, scope, self._clock)
        return connection if connection.open else None

    def close_other_scopes(self, scopes: Collection[str]) -> None:
        """Closes the connections of all scopes but these."""
        for scope in self._connections.keys() - set(scopes):
            self._connections.pop(scope).close()

    def close_all(self) -> None:
        """Closes all connections: after one failure, the addresses of the others may be outdated too."""
        for connection in self._connections.values():
            connection.close()

    async def close(self) -> None:
        """Closes all connections and waits until they are closed."""
        connections, self._connections = list(self._connections.values()), {}
        for connection in connections:
            connection.close()
        for connection in connections:
            await connection.wait_closed()
