"""Readiness checks of HTTP, Redis and gRPC servers. Each sends one request; the caller limits the time."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from common.errors import describe
from common.settings.kinds import host_port

if TYPE_CHECKING:  # only imported when gRPC is probed
    from common.tls import TlsFiles


async def http_ready(host: str, port: int, path: str = "/health") -> bool:
    """True if GET `path` answers 200, False for any failure."""
    return await _http_trouble(host, port, path) is None


async def redis_ready(host: str, port: int, password: str) -> bool:
    """True if the server accepts the password, False for any failure."""
    try:
        return await _exchange(host, port, f"AUTH {password}\r\n".encode()) == b"+OK\r\n"
    except OSError:
        return False


async def redis_trouble(url: str, timeout_s: float = 3.0) -> str | None:
    """None if the servers of a Redis URL (common/redis/url.py) answer, otherwise the error. Raises ConfigError."""
    from common.redis.client import REDIS_FAILURES, connect_redis

    try:
        async with connect_redis(url, timeout_s=timeout_s) as client:
            await client.ping()
    except REDIS_FAILURES as error:
        return describe(error, limit_s=timeout_s)
    return None


async def trouble(url: str, timeout_s: float, tls: TlsFiles | None = None) -> str | None:
    """Checks the health of a server: None if it is well, otherwise the problem in a few words.

    http://host:port[/path] and https:// must answer 200, with any certificate; the path is /ready if there is none. The
    health of grpc://host:port[/service] must be SERVING. With `tls` gRPC uses mutual TLS. Raises ValueError for another
    kind of URL.
    """
    parts = urlsplit(url)
    if not parts.hostname or not parts.port or parts.scheme not in ("http", "https", "grpc"):
        raise ValueError(url)
    if parts.scheme == "grpc":
        return await _grpc_trouble(parts.netloc, timeout_s, parts.path.strip("/"), tls)
    secure = parts.scheme == "https"
    try:
        path = parts.path if parts.path.strip("/") else "/ready"
        return await asyncio.wait_for(_http_trouble(parts.hostname, parts.port, path, secure), timeout_s)
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"


async def grpc_ready(address: str, tls: TlsFiles | None = None, timeout_s: float = 2.0) -> bool:
    """True if the gRPC health of the whole server is SERVING, False for any failure."""
    return await _grpc_trouble(address, timeout_s, "", tls) is None


async def _http_trouble(host: str, port: int, path: str, secure: bool = False) -> str | None:
    request = f"GET {path} HTTP/1.1\r\nHost: {host_port(host, port)}\r\nConnection: close\r\n\r\n".encode()
    try:
        status = await _exchange(host, port, request, secure)
    except OSError as e:
        return describe(e).partition(" (")[0]  # without the address, which the caller names
    if not status.startswith(b"HTTP/1."):
        return "the answer is not HTTP"
    _version, _, status_text = status.partition(b" ")
    return None if status_text.startswith(b"200") else f"the answer is {status_text.decode('latin-1').strip()}"


async def _grpc_trouble(address: str, timeout_s: float, service: str, tls: TlsFiles | None) -> str | None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from common.rpc import connection_hint, open_channel

    async with open_channel(address, tls) as channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.aio.AioRpcError as e:
            if e.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"no answer within {timeout_s:g} s"
            details = e.details() or ""
            return f"{e.code().name}: {connection_hint(details) or ' '.join(details.split())}"
    if reply.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return f"its health is {health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)}"


async def _exchange(host: str, port: int, request: bytes, secure: bool = False) -> bytes:
    """The first line of the answer, or b"". Raises OSError if the connection fails. TLS accepts any certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if secure else None
    if context is not None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        writer.write(request)
        return await reader.readline()
    except ValueError:  # the line is longer than the reader's limit
        return b""
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
