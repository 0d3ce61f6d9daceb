"""Bounds on what clients of the gRPC API hold open: calls for each client address, and connections of all together.

HTTP/1.1 carries one request on a connection, so a gRPC call counts like a connection of HTTP. gRPC itself has no bound
on the connections of one address. Connections without a call are closed.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any
from urllib.parse import unquote

import grpc

from common.errors import Overloaded
from gateway.admission.api_keys import client_of
from gateway.admission.client_limits import ClientLimits

IDLE_S = 75  #: A connection without a call is closed after this time, as HTTP's keep-alive.
HEALTH_CHECK = "/grpc.health.v1.Health/Check"  #: Not counted: a probe may come from the address of a busy client.


def connection_options(calls: ClientLimits, connections: int) -> tuple[tuple[str, int], ...]:
    """Returns the options of a server. `connections` bounds those of all clients together."""
    return (
        ("grpc.max_concurrent_streams", calls.max_connections),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.max_connection_idle_ms", IDLE_S * 1000),
    )


def client_of_peer(peer: str) -> str:
    """Returns the client of a peer like ipv4:1.2.3.4:5 or ipv6:[::1]:5."""
    host, _, _ = unquote(peer).partition(":")[2].rpartition(":")
    return client_of(host.strip("[]"))


class CallLimit(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not subscriptable at run time
    """Refuses the calls of a client address beyond its bound. `limits` counts calls as connections."""

    def __init__(self, limits: ClientLimits) -> None:
        self._limits = limits
        self._counted: dict[str, Any] = {}  #: Handlers by method.

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or method == HEALTH_CHECK:
            return handler
        if method not in self._counted:  # handlers are registered once, so there is one entry for each method
            self._counted[method] = self._count(handler)
        return self._counted[method]

    def _count(self, handler: Any) -> Any:
        shape = "_".join("stream" if x else "unary" for x in (handler.request_streaming, handler.response_streaming))
        behavior = getattr(handler, shape)

        async def call(request: Any, context: Any) -> Any:
            with self._place(context):
                return await behavior(request, context)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            with self._place(context):
                async with aclosing(behavior(request, context)) as responses:
                    async for response in responses:
                        yield response

        return getattr(grpc, f"{shape}_rpc_method_handler")(
            stream if inspect.isasyncgenfunction(behavior) else call,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    @contextmanager
    def _place(self, context: Any) -> Iterator[None]:
        """Counts a call while it runs. Raises Overloaded."""
        client = client_of_peer(context.peer())
        if not self._limits.connect(client):
            raise Overloaded("this client has too many calls at once; end some before the next one")
        try:
            yield
        finally:
            self._limits.disconnect(client)
