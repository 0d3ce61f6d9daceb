"""The two generating routes as raw ASGI: one JSON answer, or server-sent events.

Raw, because a response object per token would cost more than the token. Headers go out with the first chunk, so what
fails before it has a status of its own; afterwards an error is an event, and the stream ends without [DONE]. A client
that goes away cancels the work, which aborts it on the pods. Chunks are merged only when the client is behind.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

import orjson
from starlette.types import Message, Receive, Scope, Send

from common.errors import BatonError, Cancelled, DeadlineExceeded, InternalError
from common.logs import bind
from gateway.body import client_affinity, client_request_id, client_timeout, read_json_body
from gateway.openai_schema import (
    ChatFormat,
    CompletionFormat,
    Format,
    Json,
    error_body,
    error_headers,
    usage_json,
)
from gateway.output import Piece
from gateway.service import Choice, Gateway, Ticket, Usage
from gateway.validation import Spec, parse_chat, parse_completion

_log = logging.getLogger(__name__)

BODY_TIMEOUT_S = 30.0
SEND_GRACE_S = 5.0  # what the end of an answer may take beyond the request's deadline

_DONE = b"data: [DONE]\n\n"


class _Response:
    """One HTTP response under way; knows whether its head is out."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.request_id: str | None = None
        self.streaming = False
        self.done = False

    async def json(self, status: int, body: Json, headers: dict[str, str] | None = None) -> None:
        """A complete JSON response."""
        raw = orjson.dumps(body)
        self.done = True
        await self._head(
            status, {"content-type": "application/json", "content-length": str(len(raw)), **(headers or {})}
        )
        await self._send({"type": "http.response.body", "body": raw})

    async def event(self, raw: bytes) -> None:
        """Bytes of the event stream, its head first."""
        if not self.streaming:
            self.streaming = True
            kind = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
            await self._head(200, {**kind, "x-accel-buffering": "no"})
        await self._send({"type": "http.response.body", "body": raw, "more_body": True})

    async def end(self) -> None:
        """Ends the event stream."""
        self.done = True
        await self._send({"type": "http.response.body", "body": b""})

    async def error(self, error: BatonError) -> None:
        """An error as a status while that is possible, as an event afterwards."""
        if self.done:
            return
        if self.streaming:
            await self.event(_event(error_body(error)))
            await self.end()
        else:
            await self.json(error.http_status, error_body(error), error_headers(error))

    async def _head(self, status: int, headers: dict[str, str]) -> None:
        if self.request_id is not None:
            headers["x-request-id"] = self.request_id
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        message: Message = {"type": "http.response.start", "status": status, "headers": raw}
        await self._send(message)


class GenerateEndpoint:
    """An ASGI application for POST of one of the two routes."""

    def __init__(self, gateway: Gateway, name: str) -> None:
        self._gateway = gateway
        self._name = name
        self._chat = name == "chat"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = _Response(send)
        response.request_id = client_id = client_request_id(scope)
        try:
            timeout_s, affinity = client_timeout(scope), client_affinity(scope)
            with self._gateway.admit(self._name, client_id, timeout_s, affinity=affinity) as ticket:
                response.request_id = client_id or ticket.id
                with bind(request_id=ticket.id):
                    await self._admitted(scope, receive, response, ticket)
        except BatonError as e:
            if e.http_status >= 500:
                _log.warning("request failed: %s: %s", e.kind, e)
            await response.error(e)
        except Exception:
            _log.exception("request failed by our fault")
            await response.error(InternalError("internal error"))

    async def _admitted(self, scope: Scope, receive: Receive, response: _Response, ticket: Ticket) -> None:
        left = ticket.deadline - time.monotonic()
        body = await read_json_body(scope, receive, self._gateway.settings.max_body_bytes, min(BODY_TIMEOUT_S, left))
        loop = asyncio.get_running_loop()
        work = loop.create_task(self._serve(body, response, ticket))
        ticket.serve_by(work)
        gone = loop.create_task(_disconnected(receive))
        try:
            # A client that neither reads nor leaves would block the sending, which has no deadline of its own.
            left = ticket.deadline + SEND_GRACE_S - time.monotonic()
            await asyncio.wait({work, gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            stuck = not work.done() and not gone.done()
            if not work.done():
                work.cancel()
                await asyncio.wait({work})
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
        if not work.cancelled():
            work.result()
        elif ticket.ended_with is not None:
            raise ticket.ended_with
        elif stuck:
            response.done = response.streaming  # no error event either for a client that does not read
            raise DeadlineExceeded("the request's time is over")
        else:
            raise Cancelled("the client went away")

    async def _serve(self, body: Any, response: _Response, ticket: Ticket) -> None:
        gateway = self._gateway
        spec: Spec
        if self._chat:
            chat = parse_chat(body)
            spec, choices = chat.spec, await gateway.chat(ticket, chat)
        else:
            completion = parse_completion(body)
            spec, choices = completion.spec, await gateway.completion(ticket, completion)
        make: Callable[..., Format] = ChatFormat if self._chat else CompletionFormat
        form = make(ticket.id, spec.model, gateway.tokenizer, logprobs=spec.logprobs is not None)
        if spec.stream:
            await _stream(choices, spec, form, response)
        else:
            answers = await _gather([choice.collect() for choice in choices])
            await response.json(200, form.answer(answers, _total(choices)))
        ticket.timeline.note(
            prompt_tokens=_total(choices).prompt,
            output_tokens=_total(choices).completion,
            cached_tokens=_total(choices).cached,
        )


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _gather(works: Sequence[Any]) -> list[Any]:
    """All results; the first failure cancels the rest and is raised."""
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except* BatonError as e:
        raise _first(e) from e
    return [task.result() for task in tasks]


def _first(group: BaseExceptionGroup[BatonError]) -> BatonError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, BatonError)
    return error


async def _stream(choices: Sequence[Choice], spec: Spec, form: Format, response: _Response) -> None:
    opened: set[int] = set()
    async with aclosing(_merged(choices)) as pieces:
        async for index, piece in pieces:
            chunks = form.chunks(index, piece)
            if index not in opened:
                opened.add(index)
                opening = form.opening(index)
                chunks = [opening, *chunks] if opening else chunks
            if not chunks:
                continue
            if spec.continuous_usage:
                for chunk in chunks:
                    chunk["usage"] = usage_json(choices[index].usage)
            elif spec.include_usage:
                for chunk in chunks:
                    chunk["usage"] = None
            await response.event(b"".join([_event(chunk) for chunk in chunks]))
    tail = b""
    if spec.include_usage:
        tail = _event({**form.usage_chunk(), "usage": usage_json(_total(choices))})
    await response.event(tail + _DONE)
    await response.end()


async def _merged(choices: Sequence[Choice]) -> AsyncGenerator[tuple[int, Piece], None]:
    """The pieces of all choices as they come."""
    if len(choices) == 1:
        async with aclosing(choices[0].pieces()) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    # One slot: a choice whose piece is not taken yet waits, and its next piece merges what came meanwhile.
    queue: asyncio.Queue[tuple[int, Piece | BaseException | None]] = asyncio.Queue(maxsize=1)
    tasks = [asyncio.create_task(_pump(i, choice, queue)) for i, choice in enumerate(choices)]
    try:
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(index: int, choice: Choice, queue: asyncio.Queue[tuple[int, Piece | BaseException | None]]) -> None:
    try:
        async with aclosing(choice.pieces()) as pieces:
            async for piece in pieces:
                await queue.put((index, piece))
        await queue.put((index, None))
    except Exception as e:
        with suppress(asyncio.CancelledError):
            await queue.put((index, e))


def _total(choices: Sequence[Choice]) -> Usage:
    return sum((choice.usage for choice in choices), Usage())


def _event(body: Json) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
