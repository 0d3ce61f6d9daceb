"""The generation of a starting pod, and the current owner of its name."""

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
    """Returns a Redis hash with text in place of bytes."""
    return {_text(name): _text(value) for name, value in raw.items()}


def _text(raw: str | bytes) -> str:
    return raw.decode() if isinstance(raw, bytes) else raw


async def read_name_owner(url: str, scope: str, pod: str) -> PodRecord | None:
    """Returns the record of the pod that holds a name's lease; None without one, or if Redis takes over 1 s."""
    keys = IndexKeys(scope)
    client = connect_redis(url, timeout_s=_TIMEOUT_S)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            lease, info = await client.get(keys.lease(pod)), decode_hash(await client.hgetall(keys.info(pod)))
        record = PodRecord.from_fields(info) if lease else None
        return record if record is not None and lease == str(record.generation).encode() else None
    except (*REDIS_FAILURES, KeyError, ValueError) as e:
        _log.warning("cannot read the owner of the pod name %s: %r", pod, e)
        return None
    finally:
        await client.aclose()


async def mint_generation(url: str | None, scope: str, pod: str) -> int:
    """Returns the generation of a starting pod: max(now in ms, last generation + 1).

    Without an index, or if Redis does not answer in 1 s, it is the clock alone.
    """
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
        _log.warning("the prefix index does not answer, the generation comes from the clock alone: %r", e)
        return now_ms
    finally:
        await client.aclose()
