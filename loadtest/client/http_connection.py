"""One HTTP/1.1 connection that notes when bytes come, and reads them later.

Thousands of streams share one loop, and a note is only worth something if it tells when the bytes were there. On Linux
the kernel tells (timestamped_reader.py; not through TLS); elsewhere it is made as soon as the loop gets to it. So whoever
receives does nothing but note; a Pump, which all connections share, parses when nothing comes any more, in slices
of a tenth of a millisecond, between which the loop looks at its sockets again.

Lifecycle: connected -> start(an exchange) -> its ended(), then idle and ready for the next -> closed by either side. An
exchange always ends, and once: with its answer, or with what became of the connection.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any, Protocol

import httptools

from loadtest.client.timestamped_reader import TimestampedReader

SLICE_S = 100e-6
PATIENCE_S = 5e-3


class HttpExchange(Protocol):
    """One request's answer as it is parsed. at: when the bytes came."""

    def headers(self, status: int, at: float) -> None:
        """The status line and the headers are complete."""

    def body(self, data: bytes, at: float) -> None:
        """More of the body."""

    def ended(self, at: float) -> None:
        """The answer is complete."""

    def lost(self, why: str, at: float) -> None:
        """No more will come, and the answer is not complete."""


class ParseQueue:
    """Parses what connections hold, in the order of arrival.

    The tokens of one engine step come all at once: while the loop finds bytes at each turn, noting them goes first,
    for up to PATIENCE_S; then, and where bytes never cease, a slice is parsed at each turn until all is.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[HttpConnection] = deque()
        self._scheduled = False
        self._news = False
        self._patient_until = 0.0

    def add(self, connection: HttpConnection) -> None:
        """The connection has something to parse, once for each call."""
        self._waiting.append(connection)
        self._news = True
        if not self._scheduled:
            self._scheduled = True
            self._patient_until = time.perf_counter() + PATIENCE_S
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        waiting, now = self._waiting, time.perf_counter()
        if self._news and now < self._patient_until:
            self._news = False
        else:
            end = now + SLICE_S
            while waiting:
                waiting.popleft().parse()
                if time.perf_counter() >= end:
                    break
        if waiting:
            self._loop.call_soon(self._turn)
        else:
            self._scheduled = False


class HttpConnection(asyncio.Protocol):
    """See above. reused: an exchange has ended on it before, so the server may just be closing it."""

    def __init__(self, pump: ParseQueue) -> None:
        self._pump = pump
        self._transport: Any = None
        self._arrived: deque[tuple[float, bytes | None]] = deque()
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: HttpExchange | None = None
        self._reader: TimestampedReader | None = None
        self._now = 0.0
        self._complete = self._keep = False
        self.open = False
        self.reused = False
        self.began = False  # the answer to the current exchange has begun

    @property
    def idle(self) -> bool:
        """May take an exchange."""
        return self.open and self._exchange is None

    def start(self, exchange: HttpExchange, request: bytes) -> None:
        """Sends a request; the connection must be idle."""
        assert self.idle
        self._exchange, self._complete, self.began = exchange, False, False
        self._transport.write(request)

    def close(self) -> None:
        """Hangs up at once; an exchange under way is told nothing."""
        self.open, self._exchange = False, None
        if self._reader is not None:
            self._reader.close()
        self._transport.abort()

    # -- asyncio.Protocol

    def connection_made(self, transport: Any) -> None:
        """Nothing was sent yet."""
        self._transport, self.open = transport, True

    def use_kernel_timestamps(self) -> None:
        """From now on the kernel tells when bytes came: for a connection without TLS, made and not used yet."""
        self._reader = TimestampedReader(self._transport, self._note)

    def _note(self, at: float, data: bytes | None) -> None:
        self._arrived.append((at, data))
        self._pump.add(self)
        if data is None:
            self.open = False
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Notes, where the kernel does not."""
        self._note(time.perf_counter(), data)

    def eof_received(self) -> None:
        """The server hung up; connection_lost follows."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Comes after what arrived before it."""
        if self._reader is not None:
            self._reader.close()
        self._note(time.perf_counter(), None)

    # -- the pump

    def parse(self) -> None:
        """Parses what arrived first of what is not parsed yet."""
        self._now, data = self._arrived.popleft()
        if data is None:
            if self._exchange is not None:
                self._lose("the server closed the connection")
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            self._transport.abort()
            if self._exchange is not None:
                self._lose(f"not HTTP: {e}")
        if self._complete and self._exchange is not None:
            exchange, self._exchange = self._exchange, None
            self._complete, self.reused = False, True
            if not self._keep:
                self.open = False
                self._transport.close()
            exchange.ended(self._now)

    def _lose(self, why: str) -> None:
        exchange, self._exchange, self.open = self._exchange, None, False
        assert exchange is not None
        exchange.lost(why, self._now)

    # -- httptools

    def on_message_begin(self) -> None:
        """The first byte of an answer."""
        self.began = True

    def on_headers_complete(self) -> None:
        """The body follows."""
        if self._exchange is not None:
            self._exchange.headers(self._parser.get_status_code(), self._now)

    def on_body(self, data: bytes) -> None:
        """A chunk, or a part of one."""
        if self._exchange is not None:
            self._exchange.body(data, self._now)

    def on_message_complete(self) -> None:
        """Acted upon when the parser has returned: it may be fed again only then, and has forgotten this answer."""
        self._complete, self._keep = True, self._parser.should_keep_alive()
