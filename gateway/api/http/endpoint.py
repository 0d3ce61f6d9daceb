"""Everything between ASGI and the handler of a POST route: the caller, headers, the JSON body, and the response.

- Authentication comes before anything else of a request is read. The caller is stored in the ASGI scope. The paths of
  health checks, the OpenAPI document and, by configuration, /metrics need no key.
- A body is bounded while it is read, and parsed strictly. The request gets its permit when the body has arrived.
- The head of a stream goes out when decode pods have reserved. An earlier error sets the HTTP status; a later error is
  an event, and [DONE] follows. While a prompt is computed, the stream gets a comment every few seconds.
- A client that disconnects cancels the handler, which aborts the request on the pods.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    PermissionDenied,
)
from common.logs import log_context
from common.tracing.tracer import TRACEPARENT, TRACESTATE, TraceContext
from gateway.admission.api_keys import Caller, client_of
from gateway.admission.key_store import KeyRing
from gateway.api.http.json import OPENAI_ERRORS, ErrorFormat, Json, encoded, error_body
from gateway.api.http.protocol import ChunkWriter, body_writer, header, parse_json_body, read_body, seconds_since_head
from gateway.serving.gateway import Gateway
from gateway.serving.request import AnswerIdentity, RequestContext

BODY_TIMEOUT_S = 30.0
SEND_GRACE_S = 5.0  #: Seconds beyond the request's deadline that sending the end of the answer may take.
REFUSALS = frozenset({429, 503})  #: Statuses of refused requests.
LOOKS_PER_PING = 4  #: How often a silent stream is looked at before a ping.
REQUEST_ID = b"x-request-id"
REQUEST_TIMEOUT = b"x-request-timeout"
SESSION_AFFINITY = b"x-session-affinity"
IDEMPOTENCY_KEY = b"idempotency-key"
MAX_AFFINITY_CHARS = 256
OPEN_PATHS = frozenset({"/", "/health", "/live", "/ready", "/version", "/openapi.json"})
OPEN_FILES = "/dashboard/page/"  #: The files of the page at /. The data that the page shows does need a key.
METRICS = "/metrics"
ADMIN_PATHS = frozenset({"/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
_CALLER = "baton.caller"
_log = logging.getLogger(__name__)


def client_request_id(scope: Scope) -> str | None:
    """Returns the client's own id for logs, if it has 1 to 128 printable ASCII characters, else None."""
    value = header(scope, REQUEST_ID)
    return value if value and len(value) <= 128 and value.isascii() and value.isprintable() else None


def _authorization(scope: Scope) -> str | None:
    """Returns the header `authorization`, or the key of Anthropic's header x-api-key in its form."""
    key = None if (given := header(scope, b"authorization")) is not None else header(scope, b"x-api-key")
    return given if key is None else f"Bearer {key}"


def parse_affinity(value: str | bytes | None) -> str:
    """Returns an affinity hint. A hint that is too long counts as none, because hints are never rejected."""
    text = value.decode("latin-1") if isinstance(value, bytes) else value or ""
    return text if len(text) <= MAX_AFFINITY_CHARS else ""


def _client_timeout(scope: Scope) -> float | None:
    """Returns the seconds that the client is willing to wait, None without a limit. Raises InvalidRequest."""
    value = header(scope, REQUEST_TIMEOUT)
    if value is None:
        return None
    with suppress(ValueError):
        if math.isfinite(seconds := float(value)) and seconds > 0:
            return seconds
    name = REQUEST_TIMEOUT.decode()
    raise InvalidRequest(f"{name} must be a positive number of seconds", field=name)


def caller_of(scope: Scope) -> Caller:
    """Returns the caller of a request that passed AuthMiddleware."""
    caller = scope[_CALLER]
    assert isinstance(caller, Caller)
    return caller


def known_caller(scope: Scope) -> Caller | None:
    """Returns the caller of a request for /metrics, None if it came without a valid key."""
    caller = scope.get(_CALLER)
    assert caller is None or isinstance(caller, Caller)
    return caller


class AuthMiddleware:
    """ASGI middleware that identifies the caller, and rejects a request without a valid key."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: KeyRing,
        open_metrics: bool,
        errors_of: Callable[[str], ErrorFormat] = lambda _path: OPENAI_ERRORS,
    ) -> None:
        """`errors_of` returns the form of a path's errors."""
        self._app = app
        self._errors_of = errors_of
        self._keys = keys
        self._open_metrics = open_metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not (scope["path"] in OPEN_PATHS or scope["path"].startswith(OPEN_FILES)):
            try:
                caller = self._keys.current.identify(_authorization(scope))
                if scope["path"] in ADMIN_PATHS and not caller.admin:
                    raise PermissionDenied("this needs the key of an administrator")
                host, _ = scope.get("client") or ("", 0)
                scope[_CALLER] = caller.at(client_of(host))
            except BatonError as e:
                if scope["path"] != METRICS or not self._open_metrics:
                    response = HttpResponse(send, None, self._errors_of(scope["path"]))
                    response.request_id = client_request_id(scope)
                    await response.send_error(e)
                    return
        await self._app(scope, receive, send)


class RootPathMiddleware:
    """Removes the path of a proxy from the paths of requests. Some proxies have removed it already."""

    def __init__(self, app: ASGIApp, *, root_path: str) -> None:
        """`root_path`: begins with a slash and does not end with one."""
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        root = self._root_path
        if scope["type"] == "http" and (scope["path"] == root or scope["path"].startswith(f"{root}/")):
            scope = {**scope, "path": scope["path"][len(root) :] or "/"}
            if scope["raw_path"].startswith(root.encode()):
                scope["raw_path"] = scope["raw_path"][len(root) :] or b"/"
        await self._app(scope, receive, send)


class RequestIdMiddleware:
    """ASGI middleware that gives every answer an x-request-id: the client's own, or a new one if no route set it.

    Most bytes of a stream do not pass through it, see BodyWriter.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                if not any(name.lower() == REQUEST_ID for name, _ in headers):
                    value = client_request_id(scope) or secrets.token_hex(12)
                    message = {**message, "headers": [*headers, (REQUEST_ID, value.encode())]}
            await send(message)

        await self._app(scope, receive, send_with_id)


DONE = b"data: [DONE]\n\n"  #: The last event of OpenAI's streams.
PING = b": ping\n\n"  #: A comment, which readers of server-sent events skip.


def sse_event(body: Json) -> bytes:
    """Returns one server-sent event."""
    try:
        text = orjson.dumps(body)
    except TypeError:  # half a surrogate pair
        text = encoded(body)
    return b"data: " + text + b"\n\n"


class HttpResponse:
    """One HTTP response in progress."""

    def __init__(
        self, send: Send, writer: ChunkWriter | None, errors: ErrorFormat = OPENAI_ERRORS, *, ping_s: float = 0.0
    ) -> None:
        """`ping_s`: seconds without an event after which an open stream gets `ping_event`; 0: never."""
        self._asgi_send = send
        self._writer = writer  #: The fast way to write body chunks, None if the connection has none.
        self._ping_s = ping_s
        self._ping_timer: asyncio.TimerHandle | None = None
        self._num_sent = 0  #: Messages that went through `send`.
        self._errors = errors
        self.request_id: str | None = None
        self.headers: dict[str, str] = {}  #: Further headers of every answer.
        self.streaming = False  #: The head of an event stream was sent.
        self.done = False  #: The response is complete.
        self.context: RequestContext | None = None  #: The request's context, once it has one.
        self.ping_event = PING  #: Shows that a silent stream is alive.
        #: Encodes the error that ends a stream.
        self.error_event: Callable[[BatonError], bytes] = lambda error: sse_event(error_body(error)) + DONE

    async def send_json(self, status: int, body: Json, headers: dict[str, str] | None = None) -> None:
        """Sends a complete JSON response."""
        raw = encoded(body)
        self.done = True
        shape = {"content-type": "application/json", "content-length": str(len(raw))}
        await self._head(status, {**shape, **(headers or {})})
        await self._send({"type": "http.response.body", "body": raw})

    async def open_stream(self) -> None:
        """Sends the head of the event stream. From now on `ping_event` follows each `ping_s` without an event."""
        if self.streaming:
            return
        self.streaming = True
        stream_headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        await self._head(200, {**stream_headers, "x-accel-buffering": "no"})
        if self._ping_s and self._writer is not None:
            self._await_silence(self._writer)

    async def send_event(self, raw: bytes) -> None:
        """Sends bytes of the event stream, and before the first ones its head."""
        await self.open_stream()
        await self._send({"type": "http.response.body", "body": raw, "more_body": True})

    async def forward(self, message: bytes | Message) -> None:
        """Sends what another response wrote: a chunk of an event stream, or any other message."""
        if isinstance(message, bytes):
            await self._send({"type": "http.response.body", "body": message, "more_body": True})
            return
        if message["type"] == "http.response.start":
            ours = {name.lower().encode(): value.encode("latin-1") for name, value in self.headers.items()}
            theirs = [(name, value) for name, value in message["headers"] if name not in ours]
            self.streaming = any(name == b"content-type" and b"event-stream" in value for name, value in theirs)
            message = {**message, "headers": [*theirs, *ours.items()]}
            if self.streaming and self._ping_s and self._writer is not None:
                self._await_silence(self._writer)
        else:
            self.done = not message.get("more_body", False)
        await self._send(message)

    @property
    def fast_write(self) -> Callable[[bytes], bool] | None:
        """BodyWriter.write, which writes bytes of the stream at once; None: the caller must use `send_event`."""
        writer = self._writer
        return writer.write if self.streaming and writer is not None and writer.ready else None

    async def end(self) -> None:
        """Ends the event stream."""
        self.done = True
        await self._send({"type": "http.response.body", "body": b""})

    def close(self) -> None:
        """Stops the timer of a stream. Idempotent."""
        if self._ping_timer is not None:
            self._ping_timer.cancel()

    def _await_silence(self, writer: ChunkWriter) -> None:
        """Starts a timer that sends a ping after `ping_s` of silence. It looks at counts, so an event costs one count.

        It looks LOOKS_PER_PING times in `ping_s`, so a ping is late by one of these parts at most.
        """
        pause_s, silent, seen = self._ping_s / LOOKS_PER_PING, 0, (self._num_sent, writer.num_written)

        def look() -> None:
            nonlocal silent, seen
            if self.done:
                return
            count = self._num_sent, writer.num_written
            silent = silent + 1 if count == seen else 0
            if silent == LOOKS_PER_PING:
                writer.write_comment(self.ping_event)
                silent, count = 0, (self._num_sent, writer.num_written)
            seen = count
            self._ping_timer = asyncio.get_running_loop().call_later(pause_s, look)

        self._ping_timer = asyncio.get_running_loop().call_later(pause_s, look)

    async def send_error(self, error: BatonError) -> None:
        """Sends an error: as a status before the head was sent, as an event of the stream afterwards."""
        if self.done:
            return
        if self.streaming:
            await self.send_event(self.error_event(error))
            await self.end()
        else:
            errors, request_id = self._errors, self.request_id or secrets.token_hex(12)
            self.request_id = request_id
            headers = errors.headers(error, request_id)
            await self.send_json(errors.status(error), errors.body(error, request_id), headers)

    async def _send(self, message: Message) -> None:
        self._num_sent += 1
        if self._writer is not None:
            self._writer.flush()
        await self._asgi_send(message)

    async def _head(self, status: int, headers: dict[str, str]) -> None:
        headers.update(self.headers)
        if self.request_id is not None:
            headers["x-request-id"] = self.request_id
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


RequestHandler = Callable[[Any, HttpResponse, RequestContext], Coroutine[Any, Any, None]]
#: Answers a request with an idempotency key: api/http/keyed.py, which has its arguments.
KeyedServer = Callable[["Endpoint", str, Scope, list[bytes], Receive, HttpResponse, float], Coroutine[Any, Any, None]]


class Endpoint:
    """An ASGI application for one POST route."""

    def __init__(
        self,
        gateway: Gateway,
        name: str,
        handler: RequestHandler,
        errors: ErrorFormat = OPENAI_ERRORS,
        *,
        serve_keyed: KeyedServer | None = None,
    ) -> None:
        """`serve_keyed` answers requests with an idempotency key; None: the route ignores keys."""
        self.gateway = gateway
        self.name = name  #: The endpoint's name in metrics and timelines.
        self.errors = errors
        self._handler = handler  #: Answers the parsed body, or raises BatonError.
        self._serve_keyed = serve_keyed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = HttpResponse(send, body_writer(scope), self.errors, ping_s=self.gateway.settings.ping_s)
        response.request_id = client_request_id(scope)
        try:
            deadline = time.monotonic() + self._time_limit(scope)
            raw, error = await self._receive_body(scope, receive, caller_of(scope), deadline)
            key = None if self._serve_keyed is None or error is not None else header(scope, IDEMPOTENCY_KEY)
            body = [raw]
            del raw
            if key is None or self._serve_keyed is None:
                await self.answer(scope, body, receive, response, deadline, error=error)
            else:
                await self._serve_keyed(self, key, scope, body, receive, response, deadline)
        except BatonError as e:
            if e.http_status >= 500:
                _log.warning("request failed: %s: %s", e.kind, e)
            await response.send_error(e)
            if e.http_status in REFUSALS:
                stage = "arrival" if response.context is None else response.context.stage
                self.gateway.metrics.refusal.labels(stage).observe(seconds_since_head(scope))
        except Exception:
            _log.exception("a request failed inside the gateway")
            await response.send_error(InternalError("internal error"))
        finally:
            response.close()

    async def answer(
        self,
        scope: Scope,
        raw: list[bytes],
        receive: Receive,
        response: HttpResponse,
        deadline: float,
        *,
        error: BatonError | None = None,
        identity: AnswerIdentity | None = None,
        client_ids: Collection[str] = (),
    ) -> None:
        """Answers a request. Raises BatonError.

        Args:
            raw: The body, which is taken out of the list: it has up to max_body_bytes, and an answer takes minutes.
            error: Why there is no body. It is raised here, so that the request is counted and logged like all others.
        """
        client_id, affinity = response.request_id, parse_affinity(header(scope, SESSION_AFFINITY))
        traceparent = header(scope, TRACEPARENT.encode())
        span = TraceContext.parse(traceparent, header(scope, TRACESTATE.encode())) if traceparent else None
        left, caller = deadline - time.monotonic(), caller_of(scope)
        with self.gateway.admit(
            self.name, client_id, left, caller=caller, affinity=affinity, client_span=span
        ) as context:
            context.identity, context.client_ids = identity, client_ids
            response.headers, response.context = context.response_headers, context
            response.request_id = client_id or context.id
            trace_id = context.timeline.trace_id
            with log_context(request_id=context.id, **({} if trace_id is None else {"trace_id": trace_id})):
                if error is not None:
                    raise error
                body = await parse_json_body(scope, raw.pop(), self.gateway.max_json_parts)
                await self._admitted(body, receive, response, context)

    def _time_limit(self, scope: Scope) -> float:
        """Returns the seconds that the request may take. Raises InvalidRequest."""
        most, wanted = self.gateway.settings.request_timeout_s, _client_timeout(scope)
        return most if wanted is None else min(most, wanted)

    async def _receive_body(
        self, scope: Scope, receive: Receive, caller: Caller, deadline: float
    ) -> tuple[bytes, BatonError | None]:
        """Returns the body, or the error of a body that is refused."""
        left = deadline - time.monotonic()
        try:
            if left <= 0:  # otherwise the read would end with an error about a slow body
                raise DeadlineExceeded("the request's time is over")
            limit = self.gateway.settings.max_body_bytes
            return await read_body(scope, receive, limit, min(BODY_TIMEOUT_S, left), caller.key_id), None
        except BatonError as e:
            return b"", e

    async def _admitted(self, body: Any, receive: Receive, response: HttpResponse, context: RequestContext) -> None:
        if context.deadline <= time.monotonic():
            raise DeadlineExceeded("the request's time is over")
        work = asyncio.get_running_loop().create_task(self._handler(body, response, context))
        context.set_task(work)
        stuck = await run_until_disconnect(work, receive, context.deadline)
        if not work.cancelled():
            work.result()
        elif context.abort_error is not None:
            raise context.abort_error
        else:
            raise unanswered(response, stuck=stuck)


async def run_until_disconnect(work: asyncio.Task[None], receive: Receive, deadline: float) -> bool:
    """Waits for `work`. Cancels it if the client disconnects first, or SEND_GRACE_S after the deadline.

    Returns True in the last case: `send` has no deadline, so a client that neither reads nor disconnects blocks it.
    """
    disconnected = asyncio.get_running_loop().create_task(_wait_for_disconnect(receive))
    try:
        left = deadline + SEND_GRACE_S - time.monotonic()
        await asyncio.wait({work, disconnected}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        stuck = not work.done() and not disconnected.done()
        if not work.done():
            work.cancel()
            await asyncio.wait({work})
    finally:
        disconnected.cancel()
        if not work.done():  # this task was cancelled; the caller releases the request once its work has ended
            work.cancel()
            await asyncio.wait({work})
    return stuck


def unanswered(response: HttpResponse, *, stuck: bool) -> BatonError:
    """Returns the error of a request whose work `run_until_disconnect` has cancelled."""
    if not stuck:
        return Cancelled("the client disconnected")
    response.done = response.streaming  # a client that does not read gets no error event
    return DeadlineExceeded("the request's time is over")


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
