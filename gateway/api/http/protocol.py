"""uvicorn's HTTP/1.1 protocol with bounds on what a stranger may send before there is a request to refuse.

uvicorn keeps header lines of any length and number, for as long as they take to come. Here a connection may send
MAX_HEAD_BYTES without completing a head or a piece of a body, and may take HEAD_TIMEOUT_S for a head.

And a way to write a piece of an answer that is neither a coroutine nor led through the middlewares: `BodyWriter`, for
what comes a thousand times in an answer. It is in the scope's state. Its pieces go out by the server's `WriteBatcher`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from common.errors import BatonError, InvalidRequest, RequestTooSlow
from gateway.api.http.errors import error_body

MAX_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 30.0
MAX_BATCHED_WRITES = 8
_BODY = "baton.body"


class WriteBatcher:
    """Pieces of the answers of many connections on their way to the sockets, a few at a time.

    One message of a pod has a token for each of many streams. Making BURST pieces and then writing them took less time
    than making and writing by turns, in pairs of runs on a busy machine (supposedly for what a system call does to
    caches). No piece waits longer than until the turn of the event loop is over.

    Invariant: whoever writes to a connection by another way calls `flush` before.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[asyncio.Transport, bytes]] = []
        self._due = False  # a flush is on the loop's list

    def put(self, transport: asyncio.Transport, piece: bytes) -> None:
        """Writes a piece, soon."""
        self._pieces.append((transport, piece))
        if len(self._pieces) >= MAX_BATCHED_WRITES:
            self.flush()
        elif not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._end_of_turn)

    def flush(self) -> None:
        """Writes all that waits, in order; nothing to a connection that was closed meanwhile."""
        pieces, self._pieces = self._pieces, []
        for transport, piece in pieces:
            if not transport.is_closing():
                transport.write(piece)

    def _end_of_turn(self) -> None:
        self._due = False
        self.flush()


class BodyWriter:
    """Writes pieces of one answer's body, behind a head and pieces that went through ASGI's `send`."""

    __slots__ = ("_batcher", "_cycle")

    def __init__(self, cycle: RequestResponseCycle, batcher: WriteBatcher) -> None:
        self._cycle = cycle
        self._batcher = batcher

    @property
    def ready(self) -> bool:
        """The head is out, and the client takes what is sent."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (cycle.disconnected or cycle.flow.write_paused)

    def write(self, piece: bytes) -> bool:
        """Writes a piece, b"" is none. False: no longer ready, so the next one has to go through `send`."""
        cycle = self._cycle
        if cycle.disconnected:
            return False
        if piece:
            self._batcher.put(cycle.transport, b"%x\r\n%b\r\n" % (len(piece), piece))
        return not cycle.flow.write_paused

    def flush(self) -> None:
        """Has to come before anything that goes through `send`."""
        self._batcher.flush()


def body_writer(scope: Scope) -> BodyWriter | None:
    """Of a request that came through BoundedHttp."""
    writer = scope.get("state", {}).get(_BODY)
    assert writer is None or isinstance(writer, BodyWriter)
    return writer


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. What it refuses has OpenAI's shape, and ends the connection; requests that were complete before
    are answered first.

    `cycle` is of the newest request. Where a client sends requests without waiting for answers, `_answering` is the one
    whose turn it is.
    """

    _head_bytes = 0  # since a head or a piece of a body was complete; trailers count as well
    _head_timer: asyncio.TimerHandle | None = None
    _answering: RequestResponseCycle | None = None
    _input_closed = False  # nothing that still comes counts

    def __init__(self, *args: Any, batcher: WriteBatcher, **kwargs: Any) -> None:
        """outbox: the server's; the rest is uvicorn's."""
        super().__init__(*args, **kwargs)
        self._batcher = batcher

    def connection_made(self, transport: Any) -> None:
        """The first head must come in time, too."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """No more timer, and who is being answered has gone; uvicorn tells the newest request alone."""
        self._stop_timer()
        super().connection_lost(exc)
        answering = self._answering
        if answering is not None and not answering.response_complete:
            answering.disconnected = True
            answering.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Counts, then parses; the parser's callbacks below reset the count."""
        if self._input_closed:
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and not (self._input_closed or self.transport.is_closing()):
            text = f"the request's head is larger than {MAX_HEAD_BYTES} bytes"
            self._refuse(InvalidRequest(text), 431)

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        """A head is complete."""
        self._head_bytes = 0
        self._stop_timer()
        super().on_headers_complete()
        if self.cycle is not None:  # its application begins with a later turn of the loop
            self.scope["state"][_BODY] = BodyWriter(self.cycle, self._batcher)
            if not self.pipeline:
                self._answering = self.cycle

    def on_response_complete(self) -> None:
        """An answer is out: the next in line."""
        self._answering = self.pipeline[-1][0] if self.pipeline else None
        if self._head_timer is not None:  # what is missing of a head may be read now only
            self._stop_timer()
            self._await_head()
        super().on_response_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of a body is here; its length is bounded by who reads it."""
        self._head_bytes = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP."""
        self._refuse(InvalidRequest(msg))

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._too_slow)

    def _too_slow(self) -> None:
        self._head_timer = None
        if self.pipeline:  # reading may rest while requests are in line
            self._await_head()
            return
        self._refuse(RequestTooSlow(f"the request's head did not arrive within {HEAD_TIMEOUT_S:g} s"))

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, error: BatonError, status: int | None = None) -> None:
        self._stop_timer()
        self._input_closed = True
        if self.pipeline and self.pipeline[0][0].more_body:  # it is refused without a word
            self.pipeline.popleft()
        last = self.pipeline[0][0] if self.pipeline else self._answering
        if last is not None and not last.more_body:
            last.keep_alive = False
            return
        if last is None or not last.response_started:  # not into the middle of an answer
            body = orjson.dumps(error_body(error))
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status or error.http_status] + head.encode() + body)
        self.transport.close()
