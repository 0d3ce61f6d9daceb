"""Who a pod is in the index before it is in it: the generation it starts with, and who holds its name."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from common.redis.client import REDIS_FAILURES, LuaScript, connect_redis
from prefix_index.records import PodRecord
from prefix_index.store import LUA_DIR, PODS_TTL_S, IndexKeys

_log = logging.getLogger(__name__)

_TIMEOUT_S = 1.0


def decode_hash(raw: Mapping[str | bytes, str | bytes]) -> dict[str, str]:
    """A Redis hash, decoded."""
    return {_text(name): _text(value) for name, value in raw.items()}


def _text(raw: str | bytes) -> str:
    return raw.decode() if isinstance(raw, bytes) else raw


async def read_name_owner(url: str, scope: str, pod: str) -> PodRecord | None:
    """The record of the pod that holds the lease of a name; None without one, and when Redis is away for 1 s."""
    keys = IndexKeys(scope)
    client = connect_redis(url, timeout_s=_TIMEOUT_S)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            lease, info = await client.get(keys.lease(pod)), decode_hash(await client.hgetall(keys.info(pod)))
        record = PodRecord.from_fields(info) if lease else None
        return record if record is not None and lease == str(record.generation).encode() else None
    except (*REDIS_FAILURES, KeyError, ValueError) as e:
        _log.warning("who holds the name %s cannot be told: %r", pod, e)
        return None
    finally:
        await client.aclose()


async def mint_generation(url: str | None, scope: str, pod: str) -> int:
    """A generation for a starting pod: max(now in ms, the last one + 1); the clock alone when Redis is away for 1 s."""
    now_ms = int(time.time() * 1000)
    if url is None:
        return now_ms
    keys = IndexKeys(scope)
    client = connect_redis(url, timeout_s=_TIMEOUT_S)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            names = (keys.pods, keys.generation(pod))
            return int(await LuaScript("mint", directory=LUA_DIR).run(client, names, (pod, now_ms, PODS_TTL_S)))
    except REDIS_FAILURES as e:
        _log.warning("generation minted from the clock alone, the prefix index does not answer: %r", e)
        return now_ms
    finally:
        await client.aclose()
