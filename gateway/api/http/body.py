"""Request bodies and headers: bounded while they are read, and parsed strictly."""

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
from gateway.api.http.json_value import MAX_DEPTH, deeper_than
from gateway.serving.request import MAX_JSON_PARTS

REQUEST_ID = b"x-request-id"
REQUEST_TIMEOUT = b"x-request-timeout"
SESSION_AFFINITY = b"x-session-affinity"
MAX_AFFINITY_CHARS = 256
_TRACEPARENT, _TRACESTATE = TRACEPARENT.encode(), TRACESTATE.encode()
_IN_STRING = re.compile(rb'[^"\\]{0,999}(?:\\.[^"\\]{0,999}){0,99}', re.DOTALL)
#: Strings, or parts of long strings, that are scanned before other tasks run.
_TURN_STRINGS = 500
#: Bytes that are scanned before other tasks run.
_TURN_BYTES = 1 << 18
#: Bytes of a too large body that are read and dropped before the answer.
_MAX_DISCARD = 128 << 20
_DISCARD_S = 10.0


async def read_json_body(
    scope: Scope, receive: Receive, limit: int, timeout_s: float, max_parts: Callable[[], int]
) -> Any:
    """Reads and parses the body.

    Args:
        limit: Most bytes of the body.
        timeout_s: The body has to arrive in this time.
        max_parts: Returns how many arrays, objects, members and entries the body may have, if more than MAX_JSON_PARTS.

    Raises:
        RequestTooLarge: The body has more bytes or parts.
        RequestTooSlow: The body did not arrive in time.
        InvalidRequest: The body is not JSON, or nested deeper than MAX_DEPTH.
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
    """Reads the body. A body that is too large is dropped while it is read."""
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
            raise Cancelled("the client disconnected")
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
    """Returns an upper bound of the number of parts; it is exact for a text without strings."""
    return len(raw) - len(raw.translate(None, b"[{:,"))


async def _require_max_parts(raw: bytes, max_parts: int) -> None:
    """Raises RequestTooLarge for more than `max_parts` parts.

    Parsing a million parts takes half a second, during which the event loop waits, in whichever thread it runs. So the
    parts outside of strings are counted first, with turns for other tasks. In valid JSON each string is a part, so too
    many strings end the count as well.
    """
    at, turned, parts, strings, inside = 0, 0, 0, 0, False
    for step in itertools.count(1):
        if inside:
            match = _IN_STRING.match(raw, at)
            assert match is not None, "it matches nothing as well"
            inside = match.end() > at and raw[match.end() : match.end() + 1] != b'"'
            at = match.end() + (not inside)
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
        if step % _TURN_STRINGS == 0 or at - turned > _TURN_BYTES:
            turned = at
            await asyncio.sleep(0)


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(f"the request body is larger than {limit} bytes")


async def _discard(receive: Receive) -> None:
    """Reads and drops the rest of the body, bounded, so that the client sees the answer and not a connection reset."""
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
    """Returns a request header by its lower-case name, None if it is absent."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


def client_request_id(scope: Scope) -> str | None:
    """Returns the client's own id for logs, if it has 1 to 128 printable ASCII characters, else None."""
    value = header(scope, REQUEST_ID)
    return value if value and len(value) <= 128 and value.isascii() and value.isprintable() else None


def client_affinity(scope: Scope) -> str:
    """Returns the client's affinity hint, "" without a usable one."""
    return parse_affinity(header(scope, SESSION_AFFINITY))


def parse_affinity(value: str | bytes | None) -> str:
    """Returns an affinity hint. A hint that is too long counts as none, because hints are never rejected."""
    text = value.decode("latin-1") if isinstance(value, bytes) else value or ""
    return text if len(text) <= MAX_AFFINITY_CHARS else ""


def client_trace(scope: Scope) -> TraceContext | None:
    """Returns the client's trace span, None without a valid one."""
    traceparent = header(scope, _TRACEPARENT)
    return None if traceparent is None else TraceContext.parse(traceparent, header(scope, _TRACESTATE))


def client_timeout(scope: Scope) -> float | None:
    """Returns the seconds that the client is willing to wait, None without a limit. Raises InvalidRequest."""
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
