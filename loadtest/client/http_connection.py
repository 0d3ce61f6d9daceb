"""An HTTP/1.1 connection that records the arrival time of bytes first and parses them later.

Thousands of streams share one event loop. Parsing on arrival would delay the arrival times of other streams, so a
connection only stores the time and the bytes. On Linux the kernel supplies the time (TimestampedReader, not
with TLS). Elsewhere it is the time of data_received(). One ParseQueue for all connections parses when no more bytes
arrive, in slices of 0.1 ms. The loop polls its sockets between two slices.

    connected -> start(exchange) -> exchange.ended() -> idle -> start(next) ... -> closed by either side

An exchange ends exactly once: with ended() or with lost().
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import httptools

SO_TIMESTAMPNS = 35  # From asm-generic/socket.h; the ancillary message has the same number.
READ_BYTES = 1 << 14
SLICE_S, MAX_WAIT_S = 100e-6, 5e-3
CLOCK_READINGS, MAX_READING_S = 5, 20e-6
MAX_AGE_S = 5.0  # An older stamp means that the wall clock was changed.
_TIMESPEC = struct.Struct("@ll")


class TimestampedReader:
    """Reads a TCP connection with the kernel's arrival time of the bytes (SO_TIMESTAMPNS, Linux).

    Calls `received(at, data)` for each read. `at` is in time.perf_counter() seconds, `data` is None at the end. Bytes
    of one read share the arrival time of the last byte. The kernel takes the time in the interrupt; a time that the
    process takes is late if the process or the machine is busy.

    The reader replaces the reading side of an asyncio transport: it pauses the transport for good and watches a
    duplicate of the socket's descriptor. The transport still writes.
    """

    def __init__(self, transport: Any, received: Callable[[float, bytes | None], None]) -> None:
        transport.pause_reading()
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._received = received
        self._loop.add_reader(self._socket.fileno(), self._readable)

    def close(self) -> None:
        """Stops reading. Idempotent."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _readable(self) -> None:
        try:
            data, ancillary, _, _ = self._socket.recvmsg(READ_BYTES, 64)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # connection reset
            data, ancillary = b"", []
        now, wall = _clocks()
        if not data:
            self.close()
            self._received(now, None)
            return
        for level, kind, stamp in ancillary:
            if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS:
                seconds, nanoseconds = _TIMESPEC.unpack(stamp)
                age = wall - seconds - nanoseconds * 1e-9
                now -= age if 0.0 < age < MAX_AGE_S else 0.0
        self._received(now, data)


def _clocks() -> tuple[float, float]:
    """Returns time.perf_counter() and time.time() of one moment. Reads again after an interruption."""
    for _ in range(CLOCK_READINGS):
        before, wall, after = time.perf_counter(), time.time(), time.perf_counter()
        if after - before < MAX_READING_S:
            break
    return (before + after) / 2, wall


class HttpExchange(Protocol):
    """Receives the parsed response of one request. `at` is the arrival time of the bytes (time.perf_counter())."""

    def headers(self, status: int, at: float) -> None: ...  # The status line and the headers are complete.
    def body(self, data: bytes, at: float) -> None: ...  # Called with each part of the body.
    def ended(self, at: float) -> None: ...  # The response is complete.
    def lost(self, why: str, at: float) -> None: ...  # The connection failed before the response was complete.


class ParseQueue:
    """Parses the received bytes of all connections in order of arrival.

    The tokens of one engine step arrive in a burst. While each loop iteration brings new bytes, parsing waits, but at
    most MAX_WAIT_S. Then one slice is parsed per loop iteration until the queue is empty.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[HttpConnection] = deque()
        self._scheduled = False
        self._new_bytes = False
        self._wait_until = 0.0

    def add(self, connection: HttpConnection) -> None:
        """Queues one `connection.parse()` call."""
        self._waiting.append(connection)
        self._new_bytes = True
        if not self._scheduled:
            self._scheduled = True
            self._wait_until = time.perf_counter() + MAX_WAIT_S
            self._loop.call_soon(self._parse_slice)

    def _parse_slice(self) -> None:
        waiting, now = self._waiting, time.perf_counter()
        if self._new_bytes and now < self._wait_until:
            self._new_bytes = False
        else:
            while waiting and time.perf_counter() < now + SLICE_S:
                waiting.popleft().parse()
        if waiting:
            self._loop.call_soon(self._parse_slice)
        else:
            self._scheduled = False


class HttpConnection(asyncio.Protocol):
    """One connection with at most one exchange at a time."""

    def __init__(self, parse_queue: ParseQueue) -> None:
        self._parse_queue = parse_queue
        self._transport: Any = None
        self._arrived: deque[tuple[float, bytes | None]] = deque()
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: HttpExchange | None = None
        self._reader: TimestampedReader | None = None
        self._parsed_at = 0.0
        self._complete = self._keep = False
        self.open = False
        self.reused = False  # An earlier exchange has ended on this connection. The server may be closing it as idle.
        self.began = False  # The first byte of the current response was parsed.

    @property
    def idle(self) -> bool:
        """Whether `start` may be called."""
        return self.open and self._exchange is None

    def start(self, exchange: HttpExchange, request: bytes) -> None:
        """Sends a request. The connection must be idle."""
        assert self.idle
        self._exchange, self._complete, self.began = exchange, False, False
        self._transport.write(request)

    def close(self) -> None:
        """Closes the connection at once. The current exchange gets no call."""
        self.open, self._exchange = False, None
        if self._reader is not None:
            self._reader.close()
        self._transport.abort()

    def connection_made(self, transport: Any) -> None:
        self._transport, self.open = transport, True

    def use_kernel_timestamps(self) -> None:
        """Switches to the kernel's arrival times. Allowed only without TLS and before the first `start`."""
        self._reader = TimestampedReader(self._transport, self._received)

    def _received(self, at: float, data: bytes | None) -> None:
        self._arrived.append((at, data))
        self._parse_queue.add(self)
        if data is None:
            self.open = False
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Stores bytes with the current time. Not called while a TimestampedReader reads."""
        self._received(time.perf_counter(), data)

    def eof_received(self) -> None:
        """Returns None, so the transport closes and connection_lost follows."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Queues the end of the connection behind the bytes that arrived before."""
        if self._reader is not None:
            self._reader.close()
        self._received(time.perf_counter(), None)

    def parse(self) -> None:
        """Parses the oldest stored bytes."""
        self._parsed_at, data = self._arrived.popleft()
        if data is None:
            if self._exchange is not None:
                self._fail("the server closed the connection")
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            self._transport.abort()
            if self._exchange is not None:
                self._fail(f"not HTTP: {e}")
        if self._complete and self._exchange is not None:
            exchange, self._exchange = self._exchange, None
            self._complete, self.reused = False, True
            if not self._keep:
                self.open = False
                self._transport.close()
            exchange.ended(self._parsed_at)

    def _fail(self, why: str) -> None:
        exchange, self._exchange, self.open = self._exchange, None, False
        assert exchange is not None
        exchange.lost(why, self._parsed_at)

    # Called by httptools.

    def on_message_begin(self) -> None:
        self.began = True

    def on_headers_complete(self) -> None:
        if self._exchange is not None:
            self._exchange.headers(self._parser.get_status_code(), self._parsed_at)

    def on_body(self, data: bytes) -> None:
        if self._exchange is not None:
            self._exchange.body(data, self._parsed_at)

    def on_message_complete(self) -> None:
        """Stores the end of the response. parse() handles it after the parser has returned and can take more bytes."""
        self._complete, self._keep = True, self._parser.should_keep_alive()
