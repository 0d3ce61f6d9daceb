"""Readiness checks of HTTP, Redis and gRPC servers. Each sends one request; the caller limits the time."""

from __future__ import annotations

import asyncio
import contextlib
import os
from urllib.parse import urlsplit


async def http_ready(host: str, port: int, path: str = "/health") -> bool:
    """True if GET `path` answers 200, False for any failure."""
    return await _http_trouble(host, port, path) is None


async def redis_ready(host: str, port: int) -> bool:
    """True if PING answers PONG, False for any failure."""
    try:
        return await _exchange(host, port, b"PING\r\n") == b"+PONG\r\n"
    except OSError:
        return False


async def trouble(url: str, timeout_s: float) -> str | None:
    """Checks the health of a server: None if it is well, otherwise the problem in a few words.

    http://host:port/path must answer 200; the health of grpc://host:port[/service] must be SERVING. Raises ValueError
    for another kind of URL.
    """
    parts = urlsplit(url)
    if not parts.hostname or not parts.port or parts.scheme not in ("http", "grpc"):
        raise ValueError(url)
    if parts.scheme == "grpc":
        return await _grpc_trouble(parts.netloc, timeout_s, parts.path.strip("/"))
    try:
        return await asyncio.wait_for(_http_trouble(parts.hostname, parts.port, parts.path or "/"), timeout_s)
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"


async def grpc_ready(address: str, timeout_s: float = 2.0) -> bool:
    """True if the gRPC health of the whole server is SERVING, False for any failure."""
    return await _grpc_trouble(address, timeout_s, "") is None


async def _http_trouble(host: str, port: int, path: str) -> str | None:
    request = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode()
    try:
        status = await _exchange(host, port, request)
    except OSError as e:
        return os.strerror(e.errno) if e.errno else str(e)  # asyncio's text repeats the address
    if not status.startswith(b"HTTP/1."):
        return "the answer is not HTTP"
    _version, _, status_text = status.partition(b" ")
    return None if status_text.startswith(b"200") else f"the answer is {status_text.decode('latin-1').strip()}"


async def _grpc_trouble(address: str, timeout_s: float, service: str) -> str | None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with grpc.aio.insecure_channel(address) as channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.aio.AioRpcError as e:
            if e.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"no answer within {timeout_s:g} s"
            return f"{e.code().name}: {' '.join((e.details() or '').split())}"
    if reply.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return f"its health is {health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)}"


async def _exchange(host: str, port: int, request: bytes) -> bytes:
    """The first line of the answer, or b"". Raises OSError if the connection fails."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        return await reader.readline()
    except ValueError:  # the line is longer than the reader's limit
        return b""
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
