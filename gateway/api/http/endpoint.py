"""Authentication, and a POST route as raw ASGI: a permit, a JSON body, a handler, one JSON answer or an event stream.

The caller is found before anything else of the request is read, and stored in the ASGI scope. The paths of health
checks, the OpenAPI document and, by configuration, /metrics need no key.

The response head goes out with the first chunk. An error before it has a status of its own; a later error is an event
that ends the stream. A client that disconnects cancels the handler, which aborts the request on the pods.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import BatonError, Cancelled, DeadlineExceeded, InternalError, PermissionDenied
from common.logs import log_context
from gateway.admission.api_keys import Caller
from gateway.admission.key_ring import KeyRing
from gateway.api.http.body import (
    client_affinity,
    client_request_id,
    client_timeout,
    client_trace,
    header,
    read_json_body,
)
from gateway.api.http.errors import error_body, error_headers
from gateway.api.http.json_value import Json
from gateway.api.http.protocol import BodyWriter, body_writer
from gateway.serving.gateway import Gateway
from gateway.serving.request import RequestContext

_log = logging.getLogger(__name__)

BODY_TIMEOUT_S = 30.0
#: Seconds beyond the request's deadline that sending the end of the answer may take.
SEND_GRACE_S = 5.0
OPEN_PATHS = frozenset({"/", "/health", "/live", "/ready", "/version", "/openapi.json"})
#: The files of the page at /. The data that the page shows does need a key.
OPEN_FILES = "/dashboard/page/"
METRICS = "/metrics"
ADMIN_PATHS = frozenset({"/reset_prefix_cache"})
_CALLER = "baton.caller"

Refusal = Callable[[BatonError], ASGIApp]


def caller_of(scope: Scope) -> Caller:
    """Returns the caller of a request that passed AuthMiddleware."""
    caller = scope[_CALLER]
    assert isinstance(caller, Caller)
    return caller


class AuthMiddleware:
    """ASGI middleware that identifies the caller, and rejects a request without a valid key."""

    def __init__(self, app: ASGIApp, *, keys: KeyRing, refuse: Refusal, open_metrics: bool) -> None:
        """
        Args:
            refuse: Returns an application that answers with an error.
            open_metrics: /metrics needs no key.
        """
        self._app = app
        self._keys = keys
        self._refuse = refuse
        self._open = OPEN_PATHS | {METRICS} if open_metrics else OPEN_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_open(scope["path"]):
            try:
                caller = self._keys.current.identify(header(scope, b"authorization"))
                if scope["path"] in ADMIN_PATHS and not caller.admin:
                    raise PermissionDenied("this needs the key of an administrator")
            except BatonError as e:
                await self._refuse(e)(scope, receive, send)
                return
            scope[_CALLER] = caller
        await self._app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in self._open or path.startswith(OPEN_FILES)


def sse_event(body: Json) -> bytes:
    """Returns one server-sent event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


def _error_event(error: BatonError) -> bytes:
    return sse_event(error_body(error))


class HttpResponse:
    """One HTTP response in progress."""

    def __init__(self, send: Send, writer: BodyWriter | None) -> None:
        """
        Args:
            writer: The fast way to write body chunks, None if the connection has none.
        """
        self._asgi_send = send
        self._writer = writer
        self.request_id: str | None = None
        #: Further headers of every answer.
        self.headers: dict[str, str] = {}
        #: The head of an event stream was sent.
        self.streaming = False
        #: The response is complete.
        self.done = False
        #: Encodes the error that ends a stream.
        self.error_event: Callable[[BatonError], bytes] = _error_event

    async def send_json(self, status: int, body: Json, headers: dict[str, str] | None = None) -> None:
        """Sends a complete JSON response."""
        raw = orjson.dumps(body)
        self.done = True
        await self._head(
            status, {"content-type": "application/json", "content-length": str(len(raw)), **(headers or {})}
        )
        await self._send({"type": "http.response.body", "body": raw})

    async def send_event(self, raw: bytes) -> None:
        """Sends bytes of the event stream, and before the first ones its head."""
        if not self.streaming:
            self.streaming = True
            stream_headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
            await self._head(200, {**stream_headers, "x-accel-buffering": "no"})
        await self._send({"type": "http.response.body", "body": raw, "more_body": True})

    @property
    def fast_write(self) -> Callable[[bytes], bool] | None:
        """A function that writes further bytes of the stream at once, or None.

        The function is BodyWriter.write. With None the caller must use `send_event`.
        """
        writer = self._writer
        return writer.write if self.streaming and writer is not None and writer.ready else None

    async def end(self) -> None:
        """Ends the event stream."""
        self.done = True
        await self._send({"type": "http.response.body", "body": b""})

    async def send_error(self, error: BatonError) -> None:
        """Sends an error: as a status before the head was sent, as an event of the stream afterwards."""
        if self.done:
            return
        if self.streaming:
            await self.send_event(self.error_event(error))
            await self.end()
        else:
            await self.send_json(error.http_status, error_body(error), error_headers(error))

    async def _send(self, message: Message) -> None:
        if self._writer is not None:
            self._writer.flush()
        await self._asgi_send(message)

    async def _head(self, status: int, headers: dict[str, str]) -> None:
        headers.update(self.headers)
        if self.request_id is not None:
            headers["x-request-id"] = self.request_id
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        message: Message = {"type": "http.response.start", "status": status, "headers": raw}
        await self._send(message)


RequestHandler = Callable[[Any, HttpResponse, RequestContext], Coroutine[Any, Any, None]]


class Endpoint:
    """An ASGI application for one POST route."""

    def __init__(self, gateway: Gateway, name: str, handler: RequestHandler) -> None:
        """
        Args:
            name: The endpoint's name in metrics and timelines.
            handler: Answers the parsed body, or raises BatonError.
        """
        self._gateway = gateway
        self._name = name
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = HttpResponse(send, body_writer(scope))
        response.request_id = client_id = client_request_id(scope)
        try:
            timeout_s, affinity = client_timeout(scope), client_affinity(scope)
            with self._gateway.admit(
                self._name,
                client_id,
                timeout_s,
                caller=caller_of(scope),
                affinity=affinity,
                client_span=client_trace(scope),
            ) as context:
                response.headers = context.response_headers
                response.request_id = client_id or context.id
                trace_id = context.timeline.trace_id
                with log_context(request_id=context.id, **({} if trace_id is None else {"trace_id": trace_id})):
                    await self._admitted(scope, receive, response, context)
        except BatonError as e:
            if e.http_status >= 500:
                _log.warning("request failed: %s: %s", e.kind, e)
            await response.send_error(e)
        except Exception:
            _log.exception("request failed by our fault")
            await response.send_error(InternalError("internal error"))

    async def _admitted(self, scope: Scope, receive: Receive, response: HttpResponse, context: RequestContext) -> None:
        left = context.deadline - time.monotonic()
        if left <= 0:  # a timeout while reading the body would blame the body
            raise DeadlineExceeded("the request's time is over")
        limits = self._gateway.settings.max_body_bytes, min(BODY_TIMEOUT_S, left), self._gateway.max_json_parts
        body = await read_json_body(scope, receive, *limits)
        loop = asyncio.get_running_loop()
        work = loop.create_task(self._handler(body, response, context))
        context.set_task(work)
        disconnected = loop.create_task(_wait_for_disconnect(receive))
        try:
            # `send` has no deadline: a client that neither reads nor disconnects would block it for ever.
            left = context.deadline + SEND_GRACE_S - time.monotonic()
            await asyncio.wait({work, disconnected}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            stuck = not work.done() and not disconnected.done()
            if not work.done():
                work.cancel()
                await asyncio.wait({work})
        finally:
            disconnected.cancel()
            if not work.done():
                work.cancel()
        if not work.cancelled():
            work.result()
        elif context.abort_error is not None:
            raise context.abort_error
        elif stuck:
            response.done = response.streaming  # a client that does not read gets no error event
            raise DeadlineExceeded("the request's time is over")
        else:
            raise Cancelled("the client disconnected")


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
