"""uvicorn's HTTP/1.1 protocol with bounds, bounded bodies and their JSON, and a fast way to write chunks of an answer.

uvicorn accepts header lines of any length and number, for any time. Here a connection may send MAX_HEAD_BYTES without
completing a head or a piece of a body, and may take HEAD_TIMEOUT_S for a head. `ClientLimits` bounds the connections
and the slow heads of one client.

`BodyWriter`, found in the scope's state, writes a chunk without a coroutine and without the middlewares, because an
answer has a thousand chunks. The server's `WriteBatcher` writes the chunks to the sockets.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import orjson
from starlette.types import Receive, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from common.errors import BatonError, Cancelled, InvalidRequest, Overloaded, RequestTooLarge, RequestTooSlow
from gateway.admission.api_keys import client_of
from gateway.admission.client_limits import SLOW_S, ClientLimits, SlowInput
from gateway.api.http.json import MAX_DEPTH, deeper_than, error_body
from gateway.serving.request import MAX_JSON_PARTS

MAX_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 30.0
MAX_BATCHED_WRITES = 8
_MAX_DISCARD = 128 << 20  #: Bytes of a too large body that are read and dropped before the answer.
_DISCARD_S = 10.0
_IN_STRING = re.compile(rb'[^"\\]{0,999}(?:\\.[^"\\]{0,999}){0,99}', re.DOTALL)
_TURN_STRINGS = 500  #: Strings, or parts of long strings, that are scanned before other tasks run.
_TURN_BYTES = 1 << 18  #: Bytes that are scanned before other tasks run.
_BODY = "baton.body"
_LIMITS = "baton.client_limits"
_HEAD_AT = "baton.head_at"


class WriteBatcher:
    """Writes chunks of many connections to their sockets, a few at a time.

    One message of a pod has a token for each of many streams. In paired runs on a busy machine it took less time to
    make MAX_BATCHED_WRITES chunks and then to write them than to make and write them in turns, supposedly because of
    the caches that a system call displaces. No chunk waits beyond the current turn of the event loop.

    Invariant: code that writes to a connection in another way calls `flush` first.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[asyncio.Transport, bytes]] = []
        self._due = False  #: A flush is scheduled.

    def put(self, transport: asyncio.Transport, piece: bytes) -> None:
        """Writes a chunk by the end of the current event loop turn."""
        self._pieces.append((transport, piece))
        if len(self._pieces) >= MAX_BATCHED_WRITES:
            self.flush()
        elif not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._end_of_turn)

    def flush(self) -> None:
        """Writes all waiting chunks in order, except chunks of connections that were closed meanwhile."""
        pieces, self._pieces = self._pieces, []
        for transport, piece in pieces:
            if not transport.is_closing():
                transport.write(piece)

    def _end_of_turn(self) -> None:
        self._due = False
        self.flush()


class _Http10Cycle(RequestResponseCycle):
    """Answers a client of HTTP/1.0, which knows no chunks: an answer of unknown length ends with the connection.

    A client that asks for keep-alive gets it for an answer of known length.
    """

    _raw = False  #: The body goes out without a length and without chunks.

    async def send(self, message: Any) -> None:
        if not self.response_started and message["type"] == "http.response.start":
            headers = [*message.get("headers", [])]
            names = {name.lower() for name, _ in (*self.default_headers, *headers)}
            self._raw = b"content-length" not in names
            if self._raw:
                self.keep_alive = False
                self.chunked_encoding = False  # uvicorn adds no transfer-encoding
            elif self.keep_alive and b"connection" not in names:
                message = {**message, "headers": [*headers, (b"connection", b"keep-alive")]}
        elif self._raw:
            self.expected_content_length = len(message.get("body", b""))  # uvicorn's own check always holds
        await super().send(message)


class ChunkWriter(Protocol):
    """Writes chunks of a response beside ASGI's `send`: BodyWriter, or HttpAnswer for an answer that is shared."""

    num_written: int

    @property
    def ready(self) -> bool:
        """The next chunk may be written."""

    def write(self, piece: bytes) -> bool:
        """Writes a chunk. Returns False if the next chunk has to go through `send`."""

    def write_comment(self, comment: bytes) -> None:
        """Writes an event at once, between two others."""

    def flush(self) -> None:
        """Writes waiting chunks; must be called before `send`."""


class BodyWriter:
    """Writes chunks of one answer's body, after its head and first chunks went through ASGI's `send`."""

    __slots__ = ("_batcher", "_cycle", "num_written")

    def __init__(self, cycle: RequestResponseCycle, batcher: WriteBatcher) -> None:
        self._cycle = cycle
        self._batcher = batcher
        self.num_written = 0  #: Chunks that `write` took.

    @property
    def ready(self) -> bool:
        """The head was sent, the length of the body is open, and the client reads fast enough."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (cycle.disconnected or cycle.flow.write_paused)

    def write(self, piece: bytes) -> bool:
        """Writes a chunk; b"" writes nothing. Returns False if the next chunk has to go through `send`."""
        cycle = self._cycle
        if cycle.disconnected:
            return False
        if piece:
            self.num_written += 1
            self._batcher.put(cycle.transport, b"%x\r\n%b\r\n" % (len(piece), piece))
        return not cycle.flow.write_paused

    def write_comment(self, comment: bytes) -> None:
        """Writes an event at once, between two others. Has no effect while the client reads too slowly."""
        cycle = self._cycle
        if cycle.disconnected or cycle.flow.write_paused or cycle.response_complete:
            return
        chunk = b"%x\r\n%b\r\n" % (len(comment), comment) if cycle.chunked_encoding else comment
        self._batcher.put(cycle.transport, chunk)

    @property
    def request_arrived(self) -> bool:
        """The whole body of the request has arrived."""
        return not self._cycle.more_body

    def flush(self) -> None:
        """Writes waiting chunks; must be called before `send`."""
        self._batcher.flush()


def body_writer(scope: Scope) -> BodyWriter | None:
    """Returns the writer of a request that came through BoundedHttpProtocol, else None."""
    writer = scope.get("state", {}).get(_BODY)
    assert writer is None or isinstance(writer, BodyWriter)
    return writer


def seconds_since_head(scope: Scope) -> float:
    """Returns the seconds since the head of a request was complete."""
    now = time.monotonic()
    return now - float(scope.get("state", {}).get(_HEAD_AT, now))


def client_limits(scope: Scope) -> ClientLimits | None:
    """Returns the server's bounds on clients, None for a request that did not come through BoundedHttpProtocol."""
    limits = scope.get("state", {}).get(_LIMITS)
    assert limits is None or isinstance(limits, ClientLimits)
    return limits


def header(scope: Scope, name: bytes) -> str | None:
    """Returns a request header by its lower-case name, None if it is absent."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


async def read_body(scope: Scope, receive: Receive, limit: int, timeout_s: float, key_id: str = "") -> bytes:
    """Reads the body of a request, which has no permit yet.

    Raises RequestTooLarge for more than `limit` bytes, Cancelled if the client disconnects, and RequestTooSlow after
    `timeout_s`, or earlier if this is the oldest of too many slow bodies of the client address or the key `key_id`.
    """
    loop = asyncio.get_running_loop()
    latest = loop.time() + timeout_s

    def end() -> None:
        if not timeout.expired():
            timeout.reschedule(loop.time())

    try:
        async with asyncio.timeout_at(latest) as timeout:
            with _counted_if_slow(scope, key_id, end):
                return await _read(scope, receive, limit)
    except TimeoutError as e:
        if (timeout.when() or latest) < latest:
            raise RequestTooSlow("this client sends too many requests slowly, and this is the oldest of them") from e
        raise RequestTooSlow(f"the request body did not arrive within {timeout_s:.3g} s") from e


@contextmanager
def _counted_if_slow(scope: Scope, key_id: str, end: Callable[[], None]) -> Iterator[None]:
    """Counts the body as slow from SLOW_S until the block ends. ClientLimits calls `end` to end the body early."""
    limits, writer = client_limits(scope), body_writer(scope)
    if limits is None or (writer is not None and writer.request_arrived):  # almost every body arrives with its head
        yield
        return
    counted: list[SlowInput] = []

    def count() -> None:
        host, _ = scope.get("client") or ("", 0)
        counted.append(SlowInput((client_of(host), *([f"key {key_id}"] if key_id else [])), end))
        limits.add_slow(counted[0])

    timer = asyncio.get_running_loop().call_later(SLOW_S, count)
    try:
        yield
    finally:
        timer.cancel()
        for slow in counted:
            limits.remove_slow(slow)


async def _read(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Reads the body. A body that is too large is dropped while it is read."""
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdecimal() and int(declared) > limit:
        await _discard(receive)
        raise _too_large(limit)
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client disconnected")
        part = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(part)
        if size > limit:
            parts.clear()
            if more:
                await _discard(receive)
            raise _too_large(limit)
        parts.append(part)
    return b"".join(parts)


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(f"the request body is larger than {limit} bytes")


async def _discard(receive: Receive) -> None:
    """Reads and drops the rest of the body, bounded, so that the client sees the answer and not a connection reset."""
    seen, more = 0, True
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            while more and seen < _MAX_DISCARD:
                message = await receive()
                seen += len(message.get("body", b""))
                more = message.get("more_body", False)  # a disconnect has none


async def parse_json_body(scope: Scope, raw: bytes, max_parts: Callable[[], int]) -> Any:
    """Parses a request body.

    Raises RequestTooLarge if arrays, objects, members and entries are more than MAX_JSON_PARTS and `max_parts()`, and
    InvalidRequest for a text that is not JSON or is deeper than MAX_DEPTH.
    """
    if (encoding := header(scope, b"content-encoding") or "identity").lower() != "identity":
        text = f"the request body has the content-encoding {encoding[:60]!r}, which is not supported; send plain JSON"
        raise InvalidRequest(text, field="content-encoding")
    if not raw.strip():
        raise InvalidRequest("the request body is empty; a JSON object is expected")
    if count_parts(raw) > MAX_JSON_PARTS:
        await _require_max_parts(raw, max_parts())
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as e:
        raise InvalidRequest(f"the request body is not valid JSON: {e.msg} at position {e.pos}") from e
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and deeper_than(body, MAX_DEPTH):
        raise InvalidRequest(f"the request body is nested deeper than {MAX_DEPTH} levels")
    return body


def count_parts(raw: bytes) -> int:
    """Returns an upper bound of the number of parts; it is exact for a text without strings."""
    return len(raw) - len(raw.translate(None, b"[{:,"))


async def _require_max_parts(raw: bytes, max_parts: int) -> None:
    """Raises RequestTooLarge for more than `max_parts` parts.

    Parsing a million parts takes half a second, during which the event loop waits, in whichever thread it runs. So the
    parts outside of strings are counted first, with turns for other tasks. In valid JSON each string is a part, so too
    many strings end the count as well.
    """
    at, turned, parts, strings, inside = 0, 0, 0, 0, False
    for step in itertools.count(1):
        if inside:
            match = _IN_STRING.match(raw, at)
            assert match is not None, "the pattern also matches an empty text"
            inside = match.end() > at and raw[match.end() : match.end() + 1] != b'"'
            at = match.end() + (not inside)
        else:
            quote = raw.find(b'"', at)
            parts += count_parts(raw[at:quote] if quote >= 0 else raw[at:])
            strings += 1
            if max(parts, strings) > max_parts:
                text = f"the request body has more than {max_parts} arrays, objects, members and entries"
                raise RequestTooLarge(text)
            at, inside = quote + 1, True
            if quote < 0:
                return
        if step % _TURN_STRINGS == 0 or at - turned > _TURN_BYTES:
            turned = at
            await asyncio.sleep(0)


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection with bounds on unfinished requests.

    An error for a broken request has OpenAI's shape and ends the connection, after the requests that were complete
    before it are answered. A client may send requests without waiting for answers (pipelining): `cycle` belongs to the
    newest request, `_answering` to the one that is answered now.
    """

    _head_bytes = 0  #: Bytes received since a head or a piece of a body was complete; trailers count too.
    _head_timer: asyncio.TimerHandle | None = None
    _answering: RequestResponseCycle | None = None
    _input_closed = False  #: Further input is ignored.
    _client = ""  #: The client address.
    _counted = False  #: `_limits` counts the connection.
    _slow_head: SlowInput | None = None

    def __init__(self, *args: Any, batcher: WriteBatcher, limits: ClientLimits, **kwargs: Any) -> None:
        """`batcher` is the server's batcher of writes, `limits` its bounds on clients. The rest is uvicorn's."""
        super().__init__(*args, **kwargs)
        self._batcher = batcher
        self._limits = limits

    def connection_made(self, transport: Any) -> None:
        """Counts the connection; one beyond the client's bound gets an error and is closed."""
        super().connection_made(transport)
        self._client = client_of(self.client[0]) if self.client else ""
        self._counted = self._limits.connect(self._client)
        if self._counted:
            self._await_head()
        else:
            self._refuse(Overloaded("this client has too many open connections; close some, or use them again"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timer and notifies the request that is being answered; uvicorn notifies only the newest one."""
        self._stop_timer()
        if self._counted:
            self._limits.disconnect(self._client)
        super().connection_lost(exc)
        if (answering := self._answering) is not None and not answering.response_complete:
            answering.disconnected = True
            answering.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Counts the bytes, then parses; the parser's callbacks below reset the count."""
        if self._input_closed:
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._answering is None and not self.transport.is_closing():
            self._await_head()  # input that begins no head also stops uvicorn's timer of idle connections
        if self._head_bytes > MAX_HEAD_BYTES and not (self._input_closed or self.transport.is_closing()):
            text = f"the request's head is larger than {MAX_HEAD_BYTES} bytes"
            self._refuse(InvalidRequest(text), 431)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        self._stop_timer()
        super().on_headers_complete()
        if self.cycle is not None:  # its application starts in a later turn of the loop
            if self.scope["http_version"] == "1.0":
                self.cycle.__class__ = _Http10Cycle  # uvicorn has no other way to choose the class
                self.cycle.keep_alive = self.parser.should_keep_alive()
            state = self.scope["state"]
            state[_BODY], state[_LIMITS] = BodyWriter(self.cycle, self._batcher), self._limits
            state[_HEAD_AT] = time.monotonic()
            if not self.pipeline:
                self._answering = self.cycle

    def on_response_complete(self) -> None:
        """Called when an answer is complete; then the next pipelined request is answered."""
        self._answering = self.pipeline[-1][0] if self.pipeline else None
        if self._head_timer is not None:  # uvicorn may resume reading the rest of a head only now
            self._stop_timer()
            self._await_head()
        super().on_response_complete()

    def on_body(self, body: bytes) -> None:
        """Called when a piece of a body has arrived. The reader of the body bounds its length."""
        self._head_bytes = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:  # input that is not HTTP
        self._refuse(InvalidRequest(msg))

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(min(SLOW_S, HEAD_TIMEOUT_S), self._on_slow_head)

    def _on_slow_head(self) -> None:
        self._head_timer = None
        if self.pipeline:  # reading may pause while pipelined requests wait
            self._await_head()
            return
        self._head_timer = self.loop.call_later(max(0.0, HEAD_TIMEOUT_S - SLOW_S), self._too_slow)
        self._slow_head = SlowInput((self._client,), self._end_slow_head)
        self._limits.add_slow(self._slow_head)

    def _too_slow(self) -> None:
        self._stop_timer()
        if self.pipeline:
            self._await_head()
            return
        self._refuse(RequestTooSlow(f"the request's head did not arrive within {HEAD_TIMEOUT_S:g} s"))

    def _end_slow_head(self) -> None:
        self._refuse(RequestTooSlow("this client sends too many requests slowly, and this is the oldest of them"))

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        if self._slow_head is not None:
            self._limits.remove_slow(self._slow_head)
            self._slow_head = None

    def _refuse(self, error: BatonError, status: int | None = None) -> None:
        """Closes the input and sends an error, unless an earlier request is still being answered."""
        self._stop_timer()
        self._input_closed = True
        if self.pipeline and self.pipeline[0][0].more_body:  # an incomplete pipelined request gets no answer
            self.pipeline.popleft()
        last = self.pipeline[0][0] if self.pipeline else self._answering
        if last is not None and not last.more_body:
            last.keep_alive = False
            return
        if last is None or not last.response_started:  # an error must not be written into an answer
            body = orjson.dumps(error_body(error))
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status or error.http_status] + head.encode() + body)
        self.transport.close()
