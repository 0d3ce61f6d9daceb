"""Stored responses: in Redis, for a limited time, up to a number of bytes per tenant.

Invariant: an entry is found only under the tenant that made it. An entry holds the whole conversation so far, so a
later response does not depend on earlier entries, which expire first.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import orjson

from common.errors import Unavailable, describe
from common.redis.client import REDIS_FAILURES, CircuitBreaker, LuaScript, connect_redis
from gateway.api.http.json import Json
from gateway.api.openai.responses.request import ResponseItem

_LUA = Path(__file__).parent / "lua"
TIMEOUT_S = 1.0
MAX_ENTRY_BYTES = 4 << 20
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it is stored."""

    response: Json
    input: list[ResponseItem]  #: Input items of this response's request.
    conversation: list[ResponseItem]  #: All items of the conversation, this response's output included.


class ResponseStore:
    """The stored responses of all gateways of one Redis. Every call raises Unavailable while Redis is down."""

    def __init__(self, url: str, *, ttl_s: float, max_bytes_per_tenant: int) -> None:
        """`ttl_s` are the seconds that a response is stored, above 0."""
        self._client = connect_redis(url, timeout_s=TIMEOUT_S)
        self._ttl_ms = max(1, int(1000 * ttl_s))
        self._max_bytes_per_tenant = max_bytes_per_tenant
        self._breaker = CircuitBreaker()
        self._save_script = LuaScript("response_keep", directory=_LUA)
        self._delete_script = LuaScript("response_forget", directory=_LUA)

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def save(self, tenant: str, response: StoredResponse) -> bool:
        """Stores a response. Returns False if it is too large."""
        entry = orjson.dumps(response)  # without the copies of dataclasses.asdict
        if len(entry) > min(MAX_ENTRY_BYTES, self._max_bytes_per_tenant):
            return False
        prefix, keys = _keys(tenant)
        args = (prefix, response.response["id"], entry, self._ttl_ms, self._max_bytes_per_tenant)
        return bool(await self._bounded(lambda: self._save_script.run(self._client, keys, args)))

    async def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Returns a response, None if it is not stored or has expired."""
        entry = await self._bounded(lambda: self._client.get(_keys(tenant)[0] + response_id))
        try:
            return None if entry is None else StoredResponse(**orjson.loads(entry))
        except (ValueError, TypeError) as e:
            _log.warning("the stored response %s is unreadable and counts as expired: %s", response_id, describe(e))
            return None

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Deletes a response. Returns False if it was not stored."""
        prefix, keys = _keys(tenant)
        return bool(await self._bounded(lambda: self._delete_script.run(self._client, keys, (prefix, response_id))))

    async def _bounded(self, call: Callable[[], Awaitable[_T]]) -> _T:
        if not self._breaker.allow_call():
            raise _unreachable(self._breaker.cause)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await call()
        except REDIS_FAILURES as e:
            cause = describe(e, limit_s=TIMEOUT_S)
            if not self._breaker.cause:
                _log.warning("stored responses: Redis does not answer: %s", cause)
            self._breaker.record_failure(cause)
            raise _unreachable(cause) from e
        self._breaker.record_success()
        return answer


def _unreachable(cause: str) -> Unavailable:
    """Returns the error for clients: the cause without the address, which follows in brackets."""
    return Unavailable(f"stored responses cannot be reached: {cause.partition(' (')[0]}", retry_after_s=1.0)


def _keys(tenant: str) -> tuple[str, tuple[str, str, str]]:
    """Returns the prefix of a tenant's entries, and the keys of the counters of its entries."""
    tag = hashlib.blake2b(tenant.encode(), digest_size=16).hexdigest()
    prefix = f"responses:{{{tag}}}:"
    return f"{prefix}entry:", (f"{prefix}ids", f"{prefix}sizes", f"{prefix}total")
