"""Is a server at this address ready? One question each, False for any failure; the caller bounds the time."""

from __future__ import annotations

import asyncio
import contextlib


async def http_ready(host: str, port: int, path: str = "/health") -> bool:
    """True when GET `path` answers 200."""
    request = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode()
    status = await _exchange(host, port, request)
    return status.startswith(b"HTTP/1.1 200")


async def redis_ready(host: str, port: int) -> bool:
    """True when PING answers PONG."""
    return await _exchange(host, port, b"PING\r\n") == b"+PONG\r\n"


async def grpc_ready(address: str, timeout_s: float = 2.0) -> bool:
    """True when the gRPC health service says SERVING for the whole server."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with grpc.aio.insecure_channel(address) as channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
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
