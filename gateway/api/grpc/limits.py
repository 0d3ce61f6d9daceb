"""Bounds on what clients of the gRPC API hold open: calls for each client address, and connections of all together.

HTTP/1.1 carries one request on a connection, so a gRPC call counts like a connection of HTTP. gRPC itself has no bound
on the connections of one address. Connections without a call are closed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

from common.call_wrapper import CallWrapper
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


class CallLimit(CallWrapper):
    """Refuses the calls of a client address beyond its bound. `limits` counts calls as connections."""

    def __init__(self, limits: ClientLimits) -> None:
        super().__init__()
        self._limits = limits

    def wraps(self, method: str) -> bool:
        return method != HEALTH_CHECK

    @contextmanager
    def around(self, method: str, handler: Any, request: Any, context: Any) -> Iterator[Any]:
        """Counts a call while it runs. Raises Overloaded."""
        client = client_of_peer(context.peer())
        if not self._limits.connect(client):
            raise Overloaded("this client has too many calls at once; end some before the next one")
        try:
            yield request
        finally:
            self._limits.disconnect(client)
