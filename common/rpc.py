"""gRPC channels, a server with health and reflection, and errors that cross a call.

A servicer raises BatonError. The interceptor ends the call with the error's status code and puts the whole error into
the trailing metadata, from which error_from_rpc builds the same error at the caller; clients of other languages find it
as google.rpc details. Any other exception of a servicer is logged with its traceback and becomes INTERNAL.

Lifecycle of RpcServer: add services -> start -> set_serving(True) -> set_serving(False) -> stop.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, NoReturn, Self, TypeVar, cast

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.errors import (
    MAX_TEXT_CHARS,
    BatonError,
    ConfigError,
    DeadlineExceeded,
    InternalError,
    Unavailable,
    describe,
    error_from_grpc_status,
    public_name,
    timed_out,
)
from common.pb import types_pb2
from common.settings.kinds import host_port
from common.tls import SERVER_NAME, Pems, TlsFiles
from common.tracing.tracer import TRACEPARENT, TRACESTATE, TraceContext
from common.wire import error_from_pb, error_to_pb

ERROR_KEY = "baton-error-bin"
STATUS_KEY = "grpc-status-details-bin"
MAX_MESSAGE_BYTES = 64 << 20
_MAX_ERROR_CHARS, _MAX_FIELD_CHARS = 500, 200  #: A message is sent three times; trailers hold 8 KiB.

_log = logging.getLogger(__name__)
_Servicer = TypeVar("_Servicer")

_COMMON_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # the timeout that pings really use; 60 s by default
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
CALLER_DISCONNECTED = grpc.aio.InternalError  #: Sending raises it after the caller cancelled or timed out.
LIVENESS_SERVICE = "live"  #: Health service name for liveness probes. It is SERVING from start to stop.
_CHANNEL_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
_SERVER_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),  # a second server on the same port is a mistake, not a load balancer
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)


def open_channel(address: str, tls: TlsFiles | None = None) -> grpc.aio.Channel:
    """Opens a channel to host:port. Calls to a dead or frozen peer fail within 15 s; it reconnects within 2 s.

    With `tls` both ends prove themselves by certificates. Without it the connection is plain.
    """
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    return cast("grpc.aio.Channel", _TlsChannel(address, tls))


class _TlsChannel:
    """A channel for services that opens a new connection, for later calls, when the certificates have changed.

    Calls in progress, like a token stream, stay on the connection on which they began.
    """

    def __init__(self, address: str, tls: TlsFiles) -> None:
        self._address, self._tls = address, tls
        self._pems: Pems | None = None
        self._channels: list[grpc.aio.Channel] = []
        self.newest()

    def newest(self) -> grpc.aio.Channel:
        """Returns the channel with the current certificates."""
        if (pems := self._tls.pems()) is not self._pems:
            options = (*_CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", SERVER_NAME))
            credentials = grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)
            made = grpc.aio.secure_channel(self._address, credentials, options=options)
            self._channels.append(made)
            self._pems = pems
        return self._channels[-1]

    def __getattr__(self, name: str) -> Any:
        """Methods that make calls follow the certificates; all others are those of the newest channel."""
        if name not in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            return getattr(self.newest(), name)

        def method(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            channel = self.newest()
            begin = getattr(channel, name)(*args, **kwargs)

            def call(*call_args: Any, **call_kwargs: Any) -> Any:
                nonlocal channel, begin
                if (newest := self.newest()) is not channel:
                    channel, begin = newest, getattr(newest, name)(*args, **kwargs)
                return begin(*call_args, **call_kwargs)

            return call

        return method

    async def close(self, grace: float | None = None) -> None:
        """Closes all connections."""
        await asyncio.gather(*(channel.close(grace) for channel in self._channels))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _server_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """Returns the credentials of one server. With authorities it refuses clients without a certificate of these."""
    given = tls.pems()

    def configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca)

    def changed() -> grpc.ServerCertificateConfiguration | None:  # called for every handshake
        nonlocal given
        if (now := tls.pems()) is given:
            return None
        given = now
        return configuration(now)

    fetch: Any = changed  # None means no change, which the type in the stub lacks
    return grpc.dynamic_ssl_server_credentials(configuration(given), fetch, given.ca is not None)


def connection_hint(details: str) -> str:
    """Returns why a connection may have failed, if one end uses TLS and the other does not; otherwise ""."""
    if "failed to connect" not in details:
        return ""
    if "WRONG_VERSION_NUMBER" in details:
        return "the peer does not use TLS: it has no tls_dir, or it is of a previous version (upgrade it)"
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return (
            "this process's ca.pem does not verify the peer's certificate: do both have certificates of one authority?"
        )
    if "Socket closed" in details or "reset by peer" in details:
        return (
            "the peer ended the connection at its start: does it use TLS, which needs a certificate of its authority "
            "here (tls_dir, made by `baton certs DIR`)?"
        )
    return ""


def trace_context_of(metadata: Mapping[str, str | bytes]) -> TraceContext | None:
    """Returns the caller's trace context; None if the metadata has no valid traceparent."""
    traceparent, state = metadata.get(TRACEPARENT), metadata.get(TRACESTATE)
    if not isinstance(traceparent, str):
        return None
    return TraceContext.parse(traceparent, state if isinstance(state, str) else None)


def remaining_s(context: grpc.aio.ServicerContext[Any, Any], default: float) -> float:
    """Returns the seconds until the caller's deadline, never negative; `default` if the caller set none."""
    left = context.time_remaining()
    return default if left is None else max(0.0, left)


def timeout_until(deadline: float) -> float:
    """Returns the gRPC timeout in seconds until `deadline` (time.monotonic()). Raises DeadlineExceeded if past."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded("the request's time is over")
    return left


def _trailer(error: grpc.aio.AioRpcError) -> Iterable[tuple[str, str | bytes]]:
    return cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())


def error_from_rpc(error: grpc.aio.AioRpcError) -> BatonError:
    """Returns the BatonError in the trailers of a failed call; without one, an error by the gRPC status code."""
    for key, value in _trailer(error):
        if key == ERROR_KEY and isinstance(value, bytes):
            return error_from_pb(types_pb2.Error.FromString(value))
    code, details = error.code().name, error.details() or error.code().name
    if hint := connection_hint(details):
        details = f"{details}; {hint}"
    if code == "CANCELLED":  # by the peer: a local cancel raises CancelledError
        return Unavailable(f"the peer ended the call: {details}")
    return error_from_grpc_status(code, details)


_CONNECT_CAUSE = re.compile(
    r"failed to connect to all addresses.*?(?:connect|recvmsg): ?([A-Z][a-z ]+?) \(\d+\)", re.DOTALL
)


@describe.register
def _(error: grpc.aio.AioRpcError, *, limit_s: float | None = None) -> str:
    """Returns the error that the peer reported, or why it could not be reached."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not any(k == ERROR_KEY for k, _ in _trailer(error)):
        return timed_out(limit_s)
    if refused := _CONNECT_CAUSE.search(error.details() or ""):
        return refused[1].lower()
    return " ".join(error_from_rpc(error).message.split())[:MAX_TEXT_CHARS]


@contextmanager
def translate_rpc_errors() -> Iterator[None]:
    """Turns an AioRpcError inside the block into its BatonError."""
    try:
        yield
    except grpc.aio.AioRpcError as e:
        raise error_from_rpc(e) from e


class RpcServer:
    """A gRPC server on host:port (port 0: any free) with reflection, and health per service and LIVENESS_SERVICE."""

    def __init__(
        self,
        host: str,
        port: int,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        *,
        tls: TlsFiles | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
        options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        """With `tls` that has authorities the server refuses clients without a certificate of these.

        `interceptors` are called inside the one that turns errors into statuses, so they may raise BatonError.
        `options` are further ones of gRPC.
        """
        self._host, self._port, self._tls, self._interceptors = host, port, tls, interceptors
        self._options = (*_SERVER_OPTIONS, ("grpc.max_receive_message_length", max_message_bytes), *options)
        self._adders: list[Callable[[grpc.aio.Server], None]] = []
        self._names: list[str] = []
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # absent from the stubs
        self._server: grpc.aio.Server | None = None
        self._credentials: grpc.ServerCredentials | None = None  # kept as long as the server, which calls into them
        self._tasks: set[asyncio.Task[None]] = set()

    def add_servicer(
        self, add_fn: Callable[[_Servicer, grpc.aio.Server], None], servicer: _Servicer, full_service_name: str
    ) -> None:
        """Registers a servicer: (add_XServicer_to_server, servicer, "baton.v1.X"). Call it before start."""
        self._adders.append(lambda server: add_fn(servicer, server))
        self._names.append(full_service_name)

    async def start(self) -> int:
        """Binds and serves; returns the port. Health is NOT_SERVING until set_serving(True). Raises ConfigError."""
        server = grpc.aio.server(interceptors=[_ErrorInterceptor(), *self._interceptors], options=self._options)
        for add in self._adders:
            add(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._health.set(LIVENESS_SERVICE, health_pb2.HealthCheckResponse.SERVING)
        address = host_port(self._host, self._port)
        try:
            if self._tls is None:
                port = server.add_insecure_port(address)
            else:
                self._credentials = _server_credentials(self._tls)
                port = server.add_secure_port(address, self._credentials)
            if not port:
                raise RuntimeError("the address cannot be bound")
        except RuntimeError as e:
            raise ConfigError(f"port: cannot listen on {address}: {e}", field="port") from e
        await server.start()
        self._server = server
        return port

    def set_serving(self, serving: bool) -> None:
        """Sets the health of every service and of the whole server, in the next iteration of the event loop."""
        states = health_pb2.HealthCheckResponse
        status = states.SERVING if serving else states.NOT_SERVING
        task = asyncio.get_running_loop().create_task(self._set_health(status))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _set_health(self, status: int) -> None:
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, waits at most grace_s seconds for running ones, then cancels them. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            await self._health.enter_graceful_shutdown()
            await server.stop(grace_s)


class _ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not subscriptable at run time
    """Wraps every asynchronous handler, unary or streaming, so that its errors become gRPC statuses."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        shape = "_".join("stream" if x else "unary" for x in (handler.request_streaming, handler.response_streaming))
        return getattr(grpc, f"{shape}_rpc_method_handler")(
            _wrap(getattr(handler, shape), handler_call_details.method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _wrap(behavior: Any, method: str) -> Any:
    """Wraps a coroutine function or async generator function: its errors become gRPC statuses."""

    async def call(request: Any, context: Any) -> Any:
        try:
            return await behavior(request, context)
        except Exception as e:
            await _fail(e, context, method)

    async def stream(request: Any, context: Any) -> Any:
        try:
            async with aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response
        except Exception as e:
            await _fail(e, context, method)

    if inspect.isasyncgenfunction(behavior):
        return stream
    if inspect.iscoroutinefunction(behavior):
        return call
    return behavior


async def _fail(error: Exception, context: Any, method: str) -> NoReturn:
    """Ends the call with the status of `error`. Always raises; CancelledError if the caller has disconnected."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, CALLER_DISCONNECTED):
        raise asyncio.CancelledError from error
    if not isinstance(error, BatonError):
        _log.error("unexpected error in %s", method, exc_info=error)
        error = InternalError(f"unexpected {public_name(error)} in {method}")
    pb = error_to_pb(error)
    pb.message = pb.message[:_MAX_ERROR_CHARS]
    code = grpc.StatusCode[error.grpc_code]
    trailer = ((ERROR_KEY, pb.SerializeToString()), (STATUS_KEY, _details(code, pb).SerializeToString()))
    try:
        await context.abort(code, pb.message, trailing_metadata=trailer)
    except CALLER_DISCONNECTED as e:
        raise asyncio.CancelledError from e
    raise AssertionError("abort returned")


def _details(code: grpc.StatusCode, error: types_pb2.Error) -> status_pb2.Status:
    """Returns the error as google.rpc details: its kind, the wrong field, the retry time."""
    number: int = code.value[0]
    status = status_pb2.Status(code=number, message=error.message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.kind, domain="baton"))
    if error.field and code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field[:_MAX_FIELD_CHARS])
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(int(error.retry_after_s * 1000))
        status.details.add().Pack(retry)
    return status
