"""Responses that are kept: in Redis, for a while, up to so many bytes per tenant.

Invariant: an entry is found only under the tenant that made it, whatever id is asked for. An entry holds everything
that a later response needs (the whole conversation so far), so it does not depend on others that expire before it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import orjson

from common.errors import Unavailable
from common.redis.breaker import CircuitBreaker
from common.redis.client import REDIS_FAILURES, LuaScript, connect_redis
from gateway.api.http.json_fields import Json
from gateway.api.openai.responses.items import ResponseItem

_LUA = Path(__file__).parent / "lua"

TIMEOUT_S = 1.0
MAX_ENTRY_BYTES = 4 << 20

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, its own input, and all items of the conversation up to its end."""

    response: Json
    input: list[ResponseItem]
    conversation: list[ResponseItem]


class ResponseStore:
    """One per gateway; all gateways of one Redis share what they keep. ttl_s > 0; memory: bytes per tenant.

    Every call raises Unavailable while Redis is away.
    """

    def __init__(self, url: str, *, ttl_s: float, max_bytes_per_tenant: int) -> None:
        self._client = connect_redis(url, timeout_s=TIMEOUT_S)
        self._ttl_ms = max(1, int(1000 * ttl_s))
        self._memory = max_bytes_per_tenant
        self._breaker = CircuitBreaker()
        self._keep = LuaScript("response_keep", directory=_LUA)
        self._forget = LuaScript("response_forget", directory=_LUA)

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def save(self, tenant: str, kept: StoredResponse) -> bool:
        """Keeps it; False when it is too large."""
        entry = orjson.dumps(asdict(kept))
        if len(entry) > min(MAX_ENTRY_BYTES, self._memory):
            return False
        prefix, keys = _keys(tenant)
        args = (prefix, kept.response["id"], entry, self._ttl_ms, self._memory)
        return bool(await self._bounded(lambda: self._keep.run(self._client, keys, args)))

    async def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        """None when there is none, or no more."""
        entry = await self._bounded(lambda: self._client.get(_keys(tenant)[0] + response_id))
        return None if entry is None else StoredResponse(**orjson.loads(entry))

    async def delete(self, tenant: str, response_id: str) -> bool:
        """False when there was none."""
        prefix, keys = _keys(tenant)
        return bool(await self._bounded(lambda: self._forget.run(self._client, keys, (prefix, response_id))))

    async def _bounded(self, call: Callable[[], Awaitable[_T]]) -> _T:
        try:
            if not self._breaker.allow_call():
                raise ConnectionError("it has not answered lately")
            async with asyncio.timeout(TIMEOUT_S):
                answer = await call()
        except REDIS_FAILURES as e:
            self._breaker.record_failure()
            raise Unavailable(f"kept responses cannot be reached: {type(e).__name__}", retry_after_s=1.0) from e
        self._breaker.record_success()
        return answer


def _keys(tenant: str) -> tuple[str, tuple[str, str, str]]:
    """The prefix of a tenant's entries, and the keys that count them."""
    tag = hashlib.blake2b(tenant.encode(), digest_size=16).hexdigest()
    prefix = f"responses:{{{tag}}}:"
    return f"{prefix}entry:", (f"{prefix}ids", f"{prefix}sizes", f"{prefix}total")
