"""Reading request bodies and headers from strangers: bounded while reading, parsed strictly."""

from __future__ import annotations

import asyncio
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import orjson
from starlette.types import Receive, Scope

from common.errors import Cancelled, InvalidRequest, RequestTooLarge, RequestTooSlow
from common.tracing.context import TRACEPARENT, TRACESTATE, TraceContext
from gateway.api.http.json_fields import MAX_DEPTH, deeper_than
from gateway.serving.request import MAX_JSON_PARTS

REQUEST_ID = b"x-request-id"
REQUEST_TIMEOUT = b"x-request-timeout"
SESSION_AFFINITY = b"x-session-affinity"
MAX_AFFINITY_CHARS = 256
_TRACEPARENT, _TRACESTATE = TRACEPARENT.encode(), TRACESTATE.encode()
_IN_STRING = re.compile(rb'[^"\\]{0,999}(?:\\.[^"\\]{0,999}){0,99}', re.DOTALL)
_TURN = 500  # strings, or parts of long ones, that are looked at before others have their turn
_TURN_BYTES = 1 << 18
_MAX_DISCARD = 128 << 20
_DISCARD_S = 10.0


async def read_json_body(
    scope: Scope, receive: Receive, limit: int, timeout_s: float, max_parts: Callable[[], int]
) -> Any:
    """The parsed body.

    Raises RequestTooLarge once it is longer than `limit` bytes, or if it has more than MAX_PARTS parts and than
    most_parts() allows; RequestTooSlow when it is not here within timeout_s seconds; InvalidRequest if not JSON, or
    nested deeper than MAX_DEPTH.
    """
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _read(scope, receive, limit)
    except TimeoutError as e:
        raise RequestTooSlow(f"the request body did not arrive within {timeout_s:.3g} s") from e
    if (encoding := header(scope, b"content-encoding") or "identity").lower() != "identity":
        text = f"the request body has the content-encoding {encoding[:60]!r}, which is not supported; send plain JSON"
        raise InvalidRequest(text, field="content-encoding")
    if not raw.strip():
        raise InvalidRequest("the request body is empty; a JSON object is expected")
    if _count_parts(raw) > MAX_JSON_PARTS:
        await _require_max_parts(raw, max_parts())
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as e:
        raise InvalidRequest(f"the request body is not valid JSON: {e.msg} at position {e.pos}") from e
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and deeper_than(body, MAX_DEPTH):
        raise InvalidRequest(f"the request body is nested deeper than {MAX_DEPTH} levels")
    return body


async def _read(scope: Scope, receive: Receive, limit: int) -> bytes:
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdecimal() and int(declared) > limit:
        await _discard(receive)
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client went away")
        part = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(part)
        if size > limit:
            parts.clear()
            if more:
                await _discard(receive)
            raise _too_large(limit)
        parts.append(part)
    return b"".join(parts)


def _count_parts(raw: bytes) -> int:
    """As many parts as there can be, which is exact where there are no strings."""
    return len(raw) - len(raw.translate(None, b"[{:,"))


async def _require_max_parts(raw: bytes, max_parts: int) -> None:
    """Raises RequestTooLarge for more than `most` parts: to parse a million takes half a second, and whichever thread
    does it, the event loop waits.

    Where strings are full of brackets and commas, all of them have to be found; others have a turn meanwhile. More
    strings than parts, of which each is one, are not JSON.
    """
    at, turned, parts, strings, inside = 0, 0, 0, 0, False
    for step in itertools.count(1):
        if inside:
            found = _IN_STRING.match(raw, at)
            assert found is not None, "it matches nothing as well"
            inside = found.end() > at and raw[found.end() : found.end() + 1] != b'"'
            at = found.end() + (not inside)
        else:
            quote = raw.find(b'"', at)
            parts += _count_parts(raw[at:quote] if quote >= 0 else raw[at:])
            strings += 1
            if max(parts, strings) > max_parts:
                raise RequestTooLarge(
                    f"the request body has more than {max_parts} arrays, objects, members and entries"
                )
            at, inside = quote + 1, True
            if quote < 0:
                return
        if step % _TURN == 0 or at - turned > _TURN_BYTES:
            turned = at
            await asyncio.sleep(0)


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(f"the request body is larger than {limit} bytes")


async def _discard(receive: Receive) -> None:
    """Reads on without keeping anything, so that the client sees the answer rather than a reset; bounded."""
    seen = 0
    try:
        async with asyncio.timeout(_DISCARD_S):
            while seen < _MAX_DISCARD:
                message = await receive()
                seen += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def header(scope: Scope, name: bytes) -> str | None:
    """A request header by its lower-case name."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


def client_request_id(scope: Scope) -> str | None:
    """The client's own id for logs; only printable ASCII of at most 128 characters is taken."""
    value = header(scope, REQUEST_ID)
    return value if value and len(value) <= 128 and value.isascii() and value.isprintable() else None


def client_affinity(scope: Scope) -> str:
    """What the client wants to stay on the same pods; empty when it does not say, or says too much."""
    return parse_affinity(header(scope, SESSION_AFFINITY))


def parse_affinity(value: str | bytes | None) -> str:
    """A hint that may be ignored, so nothing is refused: too long is no hint."""
    text = value.decode("latin-1") if isinstance(value, bytes) else value or ""
    return text if len(text) <= MAX_AFFINITY_CHARS else ""


def client_trace(scope: Scope) -> TraceContext | None:
    """The client's span, if it names one that makes sense."""
    traceparent = header(scope, _TRACEPARENT)
    return None if traceparent is None else TraceContext.parse(traceparent, header(scope, _TRACESTATE))


def client_timeout(scope: Scope) -> float | None:
    """Seconds the client is willing to wait. Raises InvalidRequest."""
    value = header(scope, REQUEST_TIMEOUT)
    if value is None:
        return None
    name = REQUEST_TIMEOUT.decode()
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidRequest(f"{name} must be a positive number of seconds", field=name)
    return seconds
