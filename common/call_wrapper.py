"""A gRPC interceptor that runs each call of a server inside a context manager of its subclass."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing
from typing import Any

import grpc


class CallWrapper(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not subscriptable at run time
    """Wraps the handler of each method once. Subclasses say which methods, and what happens around a call."""

    def __init__(self) -> None:
        self._wrapped: dict[str, Any] = {}  #: Handlers by method. Handlers are registered once.

    def wraps(self, method: str) -> bool:
        """Returns whether calls of this method are wrapped."""
        raise NotImplementedError

    def around(self, method: str, handler: Any, request: Any, context: Any) -> AbstractContextManager[Any]:
        """Returns the context manager of one call; it yields the request for the handler. Raises BatonError."""
        raise NotImplementedError

    def deserializer(self, method: str, handler: Any) -> Callable[[bytes], Any] | None:
        """Returns how gRPC parses a message before `around` gets it; None: not at all."""
        parse: Callable[[bytes], Any] = handler.request_deserializer
        return parse

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or not self.wraps(method):
            return handler
        if method not in self._wrapped:
            self._wrapped[method] = self._wrap(method, handler)
        return self._wrapped[method]

    def _wrap(self, method: str, handler: Any) -> Any:
        shape = "_".join("stream" if x else "unary" for x in (handler.request_streaming, handler.response_streaming))
        behavior = getattr(handler, shape)

        async def call(request: Any, context: Any) -> Any:
            with self.around(method, handler, request, context) as given:
                return await behavior(given, context)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            with self.around(method, handler, request, context) as given:
                async with aclosing(behavior(given, context)) as responses:
                    async for response in responses:
                        yield response

        return getattr(grpc, f"{shape}_rpc_method_handler")(
            stream if inspect.isasyncgenfunction(behavior) else call,
            request_deserializer=self.deserializer(method, handler),
            response_serializer=handler.response_serializer,
        )
