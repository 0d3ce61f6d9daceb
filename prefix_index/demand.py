"""What clients ask of the gateways, beside the prefix index in Redis: a record of each gateway, for the fleet planner.

    kv:demand   HASH gateway -> JSON of DemandRecord

A gateway writes its record every PUBLISH_S seconds. A record has a number that grows, so a reader needs no common clock
to see that it is stale: it measures for how long the number stayed the same.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields

from common.errors import Unavailable, describe
from common.redis.client import REDIS_FAILURES, connect_redis

DEMAND_KEY = "kv:demand"
PUBLISH_S = 2.0
FORGET_S = 60.0  #: A record is removed if its gateway published nothing for so long; the key, if none did.
CALL_S = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandRecord:
    """Counters of one gateway since its start, and its queue. Unknown fields of newer gateways are ignored."""

    number: int  # Grows with each record of the process
    started_ms: int  # Start of the process; another one means that the counters begin again
    models: int  # Number of served models
    arrivals: float  # Requests that ended or run, refused ones included
    prompt_tokens: float  # Of requests whose prompt was looked up in the caches
    uncached_tokens: float  # Of these, tokens that no cache held
    output_tokens: float
    served: float  # First tokens of choices
    in_time: float  # Of these, within the TTFT goal of the gateway's histogram bucket
    waiting: float  # Requests in the gateway's queue now

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, raw: str | bytes) -> DemandRecord:
        """Parses a record. Raises ValueError for one that is not complete, or not of finite numbers."""
        values = json.loads(raw)
        try:
            record = cls(**{f.name: values[f.name] for f in fields(cls)})
        except (KeyError, TypeError) as e:
            raise ValueError(f"a field is missing: {describe(e)}") from e
        if not all(isinstance(v, int | float) and math.isfinite(v) and v >= 0 for v in asdict(record).values()):
            raise ValueError("a value is not a number of at least 0")
        return record


class DemandPublisher:
    """Publishes the demand of one gateway in the background."""

    def __init__(self, url: str, gateway: str, read: Callable[[int], DemandRecord]) -> None:
        """`read` returns the record with a number."""
        self._client = connect_redis(url, timeout_s=CALL_S)
        self._gateway, self._read = gateway, read
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="demand")

    async def stop(self) -> None:
        """Removes the record. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        with suppress(*REDIS_FAILURES):
            async with asyncio.timeout(CALL_S):
                await self._client.hdel(DEMAND_KEY, self._gateway)
        await self._client.aclose()

    async def _run(self) -> None:
        number, logged = 0, False
        while True:
            number += 1
            try:
                async with asyncio.timeout(CALL_S):
                    async with self._client.pipeline() as pipe:
                        pipe.hset(DEMAND_KEY, self._gateway, self._read(number).to_json())
                        pipe.expire(DEMAND_KEY, int(FORGET_S))
                        await pipe.execute()
                logged = False
            except REDIS_FAILURES as e:
                if not logged:
                    _log.warning("the demand is not published: %s", describe(e, limit_s=CALL_S))
                logged = True
            except Exception:
                _log.exception("the demand could not be published")
            await asyncio.sleep(PUBLISH_S)


class DemandReader:
    """Reads the records of all gateways."""

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = connect_redis(url, timeout_s=CALL_S)
        self._clock = clock
        self._seen: dict[str, tuple[tuple[int, int], float]] = {}  # By gateway: start and number, and since when

    async def close(self) -> None:
        await self._client.aclose()

    async def read(self) -> dict[str, tuple[DemandRecord, float]]:
        """Returns the record of each gateway and its age in seconds. Raises Unavailable if Redis does not answer."""
        try:
            async with asyncio.timeout(CALL_S):
                raw = await self._client.hgetall(DEMAND_KEY)
        except REDIS_FAILURES as e:
            raise Unavailable(f"the demand cannot be read: {describe(e, limit_s=CALL_S)}") from e
        now, found = self._clock(), dict[str, tuple[DemandRecord, float]]()
        for name, value in raw.items():
            gateway = name.decode() if isinstance(name, bytes) else name
            try:
                record = DemandRecord.from_json(value)
            except ValueError as e:
                _log.warning("the demand of gateway %s is not used: %s", gateway, e)
                continue
            mark = record.started_ms, record.number
            known, since = self._seen.get(gateway, (None, now))
            self._seen[gateway] = mark, (since if known == mark else now)
            age_s = now - self._seen[gateway][1]
            if age_s > FORGET_S:
                with suppress(*REDIS_FAILURES):
                    await self._client.hdel(DEMAND_KEY, name)
                continue
            found[gateway] = record, age_s
        return found
