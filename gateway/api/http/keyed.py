"""Requests with an idempotency key over HTTP. The answer is written once, and each request with its key gets it.

    handler -> HttpResponse of the answer -> HttpAnswer -> _forward -> HttpResponse of each connection

The HttpResponse of the answer belongs to no connection, so it goes on when a client disconnects and another one reads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from starlette.types import Message, Receive, Scope

from common.errors import BatonError, DeadlineExceeded, InternalError, Unavailable
from gateway.api.http.endpoint import Endpoint, HttpResponse, caller_of, run_until_disconnect, unanswered
from gateway.api.http.json import OPENAI_ERRORS, encoded
from gateway.serving.answer_keys import digest, parse_key
from gateway.serving.request import AnswerIdentity
from gateway.serving.shared_answer import AnswerReader, SharedAnswer

REPLAYED = "idempotent-replayed"  #: Header of an answer that an earlier request computes or has computed.
READ_GRACE_S = 1.0  #: A reader waits this long after the deadline, at which the answer itself ends with an error.
MERGE_BYTES = 1 << 16  #: Waiting chunks are sent together, up to this size.

T = TypeVar("T")

_log = logging.getLogger(__name__)

Part = bytes | Message  #: A chunk of the body after which more follows, or another ASGI message.


class EndedResponse(NamedTuple):
    """What retries need of the handler's HttpResponse after its end."""

    request_id: str | None
    headers: dict[str, str]
    ping_event: bytes
    context: None = None


class HttpAnswer(SharedAnswer[Part]):
    """An answer as ASGI messages. The HttpResponse of the handler writes to it, as a ChunkWriter and by `send`."""

    ready = True
    num_written = 0

    def __init__(self) -> None:
        super().__init__()
        #: The handler's response; None before the answer is computed.
        self.source: HttpResponse | EndedResponse | None = None

    def end(self, error: BatonError | None = None) -> None:
        """Ends the answer, and drops the request: a kept answer needs the memory of its items only."""
        super().end(error)
        if isinstance(self.source, HttpResponse):
            self.source = EndedResponse(self.source.request_id, self.source.headers, self.source.ping_event)

    def write(self, piece: bytes) -> bool:
        """Adds a chunk of the body, if it is not empty. Returns True: the next chunk may be written at once."""
        if piece:
            self.add(piece, len(piece))
        return True

    def write_comment(self, comment: bytes) -> None:
        """Does nothing: each connection sends its own pings."""

    def flush(self) -> None:
        """Does nothing: no chunk waits."""

    async def send(self, message: Message) -> None:
        """Adds an ASGI message."""
        body = message.get("body", b"")
        self.add(body if body and message.get("more_body") else message, len(body))


async def serve_keyed(
    endpoint: Endpoint,
    key: str,
    scope: Scope,
    raw: list[bytes],
    receive: Receive,
    response: HttpResponse,
    deadline: float,
) -> None:
    """Answers a request with an idempotency key. It is a KeyedServer. `raw` holds the body. Raises BatonError."""
    gateway, client_id = endpoint.gateway, response.request_id
    if gateway.draining:
        raise Unavailable("the gateway is stopping", retry_after_s=1.0)

    async def compute(identity: AnswerIdentity, answer: HttpAnswer) -> None:
        answer.source = source = HttpResponse(answer.send, answer, endpoint.errors)
        source.request_id = client_id
        names = answer.client_ids
        try:
            await endpoint.answer(scope, raw, _connected, source, deadline, identity=identity, client_ids=names)
        except BatonError as e:
            if source.streaming:
                await source.send_error(e)
            raise
        except Exception as e:
            _log.exception("a request failed inside the gateway")
            error = InternalError("internal error")
            if source.streaming:
                await source.send_error(error)
            raise error from e

    content = digest(endpoint.name, raw[0])
    with gateway.answer_keys.read(caller_of(scope), parse_key(key), content, HttpAnswer, compute) as found:
        answer, reader, joined = found
        if joined:
            raw.clear()
            response.headers = {REPLAYED: "true"}
            if client_id is not None:
                reader.set_client_id(client_id)
        if endpoint.errors is not OPENAI_ERRORS:
            response.error_event = lambda error: (
                b"event: error\ndata: " + encoded(endpoint.errors.body(error, response.request_id or "")) + b"\n\n"
            )
        work = asyncio.get_running_loop().create_task(_forward(answer, reader, response, deadline))
        stuck = await run_until_disconnect(work, receive, deadline)
        if work.cancelled():
            raise unanswered(response, stuck=stuck)
        work.result()


async def _connected() -> Message:
    """The ASGI `receive` of a response without a connection. It never returns, so nothing disconnects."""
    await asyncio.Event().wait()
    raise AssertionError("the event is never set")


async def _forward(answer: HttpAnswer, reader: AnswerReader[Part], response: HttpResponse, deadline: float) -> None:
    """Sends an answer to one connection, from its first message on. Raises the answer's error, or DeadlineExceeded."""
    latest = asyncio.get_running_loop().time() + deadline - time.monotonic() + READ_GRACE_S

    async def in_time(wait: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout_at(latest):
                return await wait
        except TimeoutError as e:
            raise DeadlineExceeded("the request's time is over") from e

    def take(part: Part) -> bool:
        write = response.fast_write
        if write is None or not isinstance(part, bytes):
            return False
        write(part)
        return True

    try:
        while parts := await in_time(reader.next()):
            if not response.streaming:
                _take_over(answer, response)
            for part in _merged(parts):
                await response.forward(part)
            if response.fast_write is not None:
                await in_time(reader.relay(take))
    finally:
        if not response.streaming:  # the caller may send an error, which needs these headers
            _take_over(answer, response)


def _take_over(answer: HttpAnswer, response: HttpResponse) -> None:
    """Copies headers and pings of the answer to the response of a connection. The client's own request id stays."""
    source = answer.source
    if source is None:  # the key belongs to another request
        return
    response.request_id = response.request_id or source.request_id
    response.headers = {**source.headers, **response.headers}
    for name in ("x-request-id", *(name for name in ("request-id",) if name in source.headers)):
        response.headers[name] = response.request_id or ""
    response.ping_event, response.context = source.ping_event, source.context


def _merged(parts: Iterable[Part]) -> Iterator[Part]:
    """Yields the parts in order. Consecutive chunks are joined, up to MERGE_BYTES."""
    chunks: list[bytes] = []
    size = 0
    for part in parts:
        if chunks and (not isinstance(part, bytes) or size + len(part) > MERGE_BYTES):
            yield b"".join(chunks)
            chunks, size = [], 0
        if isinstance(part, bytes):
            chunks.append(part)
            size += len(part)
        else:
            yield part
    if chunks:
        yield b"".join(chunks)
