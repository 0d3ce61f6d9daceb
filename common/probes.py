"""Is a server at this address ready? One question each, False for any failure; the caller bounds the time."""

from __future__ import annotations

import asyncio
import contextlib
from urllib.parse import urlsplit


async def http_ready(host: str, port: int, path: str = "/health") -> bool:
    """True when GET `path` answers 200."""
    request = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode()
    status = await _exchange(host, port, request)
    return status.startswith(b"HTTP/1.1 200")


async def redis_ready(host: str, port: int) -> bool:
    """True when PING answers PONG."""
    return await _exchange(host, port, b"PING\r\n") == b"+PONG\r\n"


async def answers(url: str, timeout_s: float) -> bool:
    """True when http://host:port/path answers 200, or the health of grpc://host:port[/service] is SERVING, in time.

    Raises ValueError for another kind of URL.
    """
    parts = urlsplit(url)
    if not parts.hostname or not parts.port or parts.scheme not in ("http", "grpc"):
        raise ValueError(url)
    if parts.scheme == "grpc":
        return await grpc_ready(parts.netloc, timeout_s, parts.path.strip("/"))
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(http_ready(parts.hostname, parts.port, parts.path or "/"), timeout_s)
    return False


async def grpc_ready(address: str, timeout_s: float = 2.0, service: str = "") -> bool:
    """True when the gRPC health service says SERVING for a service, by default for the whole server."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with grpc.aio.insecure_channel(address) as channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


async def _exchange(host: str, port: int, request: bytes) -> bytes:
    """First line of the answer, or nothing."""
    writer = None
    try:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(request)
        return await reader.readline()
    except (OSError, ValueError):
        return b""
    finally:
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
