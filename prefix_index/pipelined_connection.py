"""A connection for the calls that requests wait for: many are on their way at once, and answers come in their order.

redis-py's client takes a connection out of its pool for every call, looks whether it still lives, and guards each write
and each read by tasks, locks and time limits: several times what the server takes for a look-up. A line has redis-py
set one connection up, which knows addresses, TLS, users, sentinels and the slots of a cluster, and then takes over its
transport: a command is written at once, and an answer wakes its caller in the turn of the event loop in which it came.

Lifecycle: connecting -> open -> closed, at the first sign of trouble. A line asks nobody else, tries nothing again and
knows no time limit; while there is none its user goes by the client, which does all that.
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

from common.errors import ConfigError
from common.redis.client import REDIS_FAILURES, RedisClient, connect_redis
from prefix_index.store import IndexKeys

CONNECT_S = 1.0
RETRY_S = 1.0  # from the start of a line that ended to that of the next one

_MORE = object()  # what the reader gives while an answer is incomplete

_log = logging.getLogger(__name__)


class _PipelineProtocol(asyncio.Protocol):
    """What is on its way over a transport that somebody else connected.

    Invariant: `_waiting` are the calls without an answer, in the order in which they were written.
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
        """The answer to come. How much waits to be written is for callers to bound."""
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
            raise ConnectionError("an answer that nobody asked for")
        waiting = self._waiting.popleft()
        if waiting.done():
            return  # its caller has gone
        if isinstance(answer, ResponseError):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(ConnectionError(f"the connection ended: {exc or 'by the server'}"))
        self._before.connection_lost(exc)  # who closes the connection waits for that

    def end(self, error: Exception) -> None:
        """What is on its way fails, and nothing else will be written. Idempotent."""
        self._transport.close()
        if not self.closed.done():
            self.closed.set_exception(error)
        while self._waiting:
            answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(ConnectionError("the line was closed"))


class PipelinedConnection:
    """To the server that keeps one scope; connects from its making on, in the background. clock: seconds."""

    def __init__(self, url: str, scope: str, clock: Callable[[], float]) -> None:
        self._calls: _PipelineProtocol | None = None
        self._clock = clock
        self._began = clock()
        self._task = asyncio.get_running_loop().create_task(self._run(url, scope), name="prefix-index-line")

    @property
    def open(self) -> bool:
        """It takes calls."""
        return self._calls is not None and not self._calls.closed.done()

    @property
    def may_reconnect(self) -> bool:
        """It has ended, and it is time for another one."""
        return self._task.done() and self._clock() - self._began >= RETRY_S

    async def call(self, packed: bytes) -> Any:
        """The answer to a packed command. Raises what FAILURES names; after any but a ResponseError it is closed."""
        if self._calls is None or self._calls.closed.done():
            raise ConnectionError("the line is closed")
        return await self._calls.call(packed)

    def close(self) -> None:
        """No more calls; those on their way fail. Idempotent."""
        self._calls = None
        self._task.cancel()

    async def wait_closed(self) -> None:
        """Returns once it has closed."""
        await asyncio.wait({self._task})

    async def _run(self, url: str, scope: str) -> None:
        client: RedisClient | None = None
        calls: _PipelineProtocol | None = None
        try:
            client = connect_redis(url, timeout_s=CONNECT_S, patient=True)
            async with asyncio.timeout(CONNECT_S):
                connection = await _connection(client, scope)
            writer = connection._writer
            assert writer is not None  # it is connected
            calls = self._calls = _PipelineProtocol(writer.transport)  # type: ignore[arg-type]
            await calls.closed
        except (*REDIS_FAILURES, ConfigError) as e:
            _log.info("the line to the prefix index ends: %s: %s", type(e).__name__, e)
        finally:
            self._calls = None
            if calls is not None:
                calls.end(ConnectionError("the line was closed"))
            if client is not None:
                await client.aclose()


async def _connection(client: RedisClient, scope: str) -> AbstractConnection:
    """Connected; it ends with the client."""
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
    """One line per scope in use."""

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._clock = clock
        self._lines: dict[str, PipelinedConnection] = {}

    def get(self, scope: str) -> PipelinedConnection | None:
        """The scope's line if it is open. If there is none, one connects in the background."""
        line = self._lines.get(scope)
        if line is None or line.may_reconnect:
            line = self._lines[scope] = PipelinedConnection(self._url, scope, self._clock)
        return line if line.open else None

    def close_other_scopes(self, scopes: Collection[str]) -> None:
        """Closes those of other scopes."""
        for scope in self._lines.keys() - set(scopes):
            self._lines.pop(scope).close()

    def close_all(self) -> None:
        """Closes all: what is wrong with one server may be wrong with another's address too."""
        for line in self._lines.values():
            line.close()

    async def close(self) -> None:
        """Closes all, and waits for it."""
        lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            line.close()
        for line in lines:
            await line.wait_closed()
