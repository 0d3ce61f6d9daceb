"""A TCP proxy before Redis that forwards, goes silent or hangs up; clients may connect by TLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class TcpProxy:
    """Forwards its port to 127.0.0.1:target."""

    def __init__(self, target: int, tls: ssl.SSLContext | None = None) -> None:
        self.port = 0
        self._target = target
        self._tls = tls
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._pipes: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self.hang_up()
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*self._pipes, return_exceptions=True)

    def silence(self) -> None:
        """Stops forwarding in both directions; connections stay open, as if the route were lost."""
        self._open.clear()

    def heal(self) -> None:
        """Forwards again, first the bytes that were held back."""
        self._open.set()

    def hang_up(self) -> None:
        """Closes all connections; accepts new ones."""
        for pipe in self._pipes:
            pipe.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pipes.add(task)
        there: asyncio.StreamWriter | None = None
        try:
            back, there = await asyncio.open_connection("127.0.0.1", self._target)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pipe(reader, there))
                group.create_task(self._pipe(back, writer))
        except (OSError, asyncio.CancelledError, ExceptionGroup):
            pass  # a broken or cut connection ends both ways
        finally:
            self._pipes.discard(task)
            for end in (writer, there):
                if end is not None:
                    end.close()

    async def _pipe(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            await self._open.wait()
            sink.write(data)
            await sink.drain()
        with suppress(OSError):
            sink.close()


@asynccontextmanager
async def tcp_proxy(target: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[TcpProxy]:
    """A running proxy."""
    proxy = TcpProxy(target, tls)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
