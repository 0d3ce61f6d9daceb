"""The lease of the acting planner, in Redis: of several planners of one model, one acts.

kv:planner:NAME   name of the planner that acts; it expires unless the planner renews it
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from common.errors import Unavailable, describe
from common.redis.client import REDIS_FAILURES, connect_redis

CALL_S = 2.0


class PlannerLease:
    """The right to change the pods of one model. Call `hold` before each decision."""

    def __init__(self, url: str, served_name: str | None, name: str, lease_s: float) -> None:
        """`lease_s`: seconds after which another planner may act, if this one does not renew its lease."""
        self._client = connect_redis(url, timeout_s=CALL_S)
        self._key, self._name, self._lease_ms = f"kv:planner:{served_name or ''}", name, int(lease_s * 1000)
        self._held = False

    async def hold(self) -> str:
        """Takes or renews the lease. Returns "", or the name of the planner that has it. Raises Unavailable."""
        try:
            async with asyncio.timeout(CALL_S):
                found = await self._client.set(self._key, self._name, nx=True, get=True, px=self._lease_ms)
                holder = _text(found)
                self._held = holder in (None, self._name)
                if holder == self._name:
                    await self._client.pexpire(self._key, self._lease_ms)
        except REDIS_FAILURES as e:
            raise Unavailable(f"the lease of the planner cannot be renewed: {describe(e, limit_s=CALL_S)}") from e
        return "" if self._held else str(holder)

    async def close(self) -> None:
        """Gives a held lease back, so that the next planner need not wait for its end."""
        if self._held:
            with suppress(*REDIS_FAILURES):
                async with asyncio.timeout(CALL_S):
                    if _text(await self._client.get(self._key)) == self._name:
                        await self._client.delete(self._key)
        await self._client.aclose()


def _text(value: object) -> str | None:
    """Returns an answer of Redis as text; None for none."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return None if value is None else str(value)
