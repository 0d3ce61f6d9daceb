"""Limits of API keys, shared by all gateways in Redis, enforced by each gateway alone while Redis is away.

take -> the request runs -> settle, exactly once and with what it really used. All that Redis grants is also written
down here, so that this gateway goes on with its own counts, and the same numbers, when Redis does not answer within
TIMEOUT_S; nobody gets an error for that. A day's spending comes back to a Redis that lost it. What a gateway took and
could not settle, because it died, is given up after LIFE_S.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from common.errors import IndexUnavailable, InvalidRequest, QuotaExceeded, RateLimited
from common.redis.breaker import CircuitBreaker
from common.redis.client import REDIS_FAILURES, LuaScript, RedisClient, connect_redis
from gateway.admission.api_keys import Caller
from gateway.admission.buckets import DAY_MS, KeyBuckets, LimitDecision
from gateway.telemetry.metrics import GatewayMetrics

TIMEOUT_S = 0.05
RESERVATION_TTL_S, RENEW_S = 60.0, 15.0
MAX_CALLS = 8  # at a time, as of the index

_LUA = Path(__file__).parent / "lua"
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class LimitReservation:
    """Tokens that a running request took."""

    caller: Caller
    request: str
    tokens: int
    day: int


class Limiter:
    """See the top of this file. url None: there is no Redis. clock: seconds since the epoch."""

    def __init__(
        self,
        url: str | None,
        metrics: GatewayMetrics,
        *,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client: RedisClient | None = None if url is None else connect_redis(url, timeout_s=max(1.0, timeout_s))
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._clock = clock
        self._breaker = CircuitBreaker()
        self._slots = asyncio.Semaphore(MAX_CALLS)
        self._take = LuaScript("take", directory=_LUA)
        self._settle = LuaScript("settle", directory=_LUA)
        self._renew = LuaScript("renew", directory=_LUA)
        self._local: dict[str, KeyBuckets] = {}
        self._running: dict[str, dict[str, Caller]] = {}  # by key, then request
        self._tasks: set[asyncio.Task[None]] = set()
        self._renewing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to keep running requests alive in Redis."""
        if self._client is not None:
            self._renewing = asyncio.get_running_loop().create_task(self._renew_reservations())

    async def stop(self) -> None:
        """Waits for what is being settled, a moment at most, and closes the connections."""
        if self._renewing is not None:
            self._renewing.cancel()
            with suppress(asyncio.CancelledError):
                await self._renewing
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        for task in list(self._tasks):
            task.cancel()
        if self._client is not None:
            await self._client.aclose()

    async def reserve(
        self, caller: Caller, request: str, tokens: int, headers: dict[str, str]
    ) -> LimitReservation | None:
        """Counts a request of about `tokens` tokens, prompt and answer; None when the caller has no limits.

        headers gets x-ratelimit-*, as OpenAI sends them, granted or not.

        Raises RateLimited, QuotaExceeded, and InvalidRequest for one that never fits into the limits.
        """
        limits = caller.limits
        if not limits:
            return None
        for name, limit in (("minute", limits.tokens_per_minute), ("day", limits.tokens_per_day)):
            if limit and tokens > limit:
                text = f"the request may need {tokens} tokens, and this API key has {limit} tokens a {name}"
                raise InvalidRequest(f"{text}; a smaller max_tokens may help", field="max_tokens")
        buckets = self._local.setdefault(caller.key_id, KeyBuckets())
        now = int(self._clock() * 1000)
        try:
            taken = await self._call_redis(
                lambda client: self._reserve_in_redis(client, caller, request, tokens, buckets)
            )
            if not taken.refused:
                buckets.reserve(limits, request, tokens, now, granted=True)
        except IndexUnavailable as e:
            _log.debug("limits by this gateway's own counts: %s", e)
            self._metrics.limits_without_redis.inc()
            taken = buckets.reserve(limits, request, tokens, now)
        except asyncio.CancelledError:  # Redis may grant it all the same
            if self._client is not None:
                self._spawn(self._settle_in_redis(LimitReservation(caller, request, tokens, now // DAY_MS), 0))
            raise
        headers.update(_headers(caller, taken))
        if taken.refused:
            raise _refusal(caller, taken)
        self._running.setdefault(caller.key_id, {})[request] = caller
        return LimitReservation(caller, request, tokens, taken.day)

    def settle(self, reservation: LimitReservation, used: int) -> None:
        """The request has ended and used so many tokens. Redis hears it in the background."""
        caller, request = reservation.caller, reservation.request
        running = self._running.get(caller.key_id, {})
        if running.pop(request, None) is None:
            return
        if not running:
            del self._running[caller.key_id]
        now = int(self._clock() * 1000)
        self._local[caller.key_id].settle(caller.limits, request, reservation.tokens, used, reservation.day, now)
        if self._client is not None:
            self._spawn(self._settle_in_redis(reservation, used))

    async def _reserve_in_redis(
        self, client: RedisClient, caller: Caller, request: str, tokens: int, buckets: KeyBuckets
    ) -> LimitDecision:
        limits = caller.limits
        per = (limits.requests_per_minute, limits.tokens_per_minute, limits.tokens_per_day, limits.concurrent)
        args = (0, request, *per, tokens, int(RESERVATION_TTL_S * 1000), buckets.day, buckets.spent_today)
        refused, *numbers = await self._take.run(client, _keys(caller), args)
        return LimitDecision(refused.decode(), *map(int, numbers))

    async def _settle_in_redis(self, reservation: LimitReservation, used: int) -> None:
        caller = reservation.caller
        args = (0, reservation.request, caller.limits.tokens_per_minute, reservation.tokens, used, reservation.day)
        with suppress(IndexUnavailable):  # then it is given up after LIFE_S
            await self._call_redis(lambda client: self._settle.run(client, _keys(caller), args))

    async def _renew_reservations(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            for running in list(self._running.values()):
                caller, requests = next(iter(running.values())), tuple(running)
                args = (int(RESERVATION_TTL_S * 1000), *requests)
                keys = _keys(caller)[1:]
                with suppress(IndexUnavailable):
                    await self._call_redis(lambda client, keys=keys, args=args: self._renew.run(client, keys, args))  # type: ignore[misc]

    async def _call_redis(self, call: Callable[[RedisClient], Awaitable[_T]]) -> _T:
        if self._client is None:
            raise IndexUnavailable("there is no Redis")
        async with self._slots:
            if not self._breaker.allow_call():
                raise IndexUnavailable("Redis is away")
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await call(self._client)
            except REDIS_FAILURES as e:
                self._breaker.record_failure()
                raise IndexUnavailable(f"Redis does not answer: {type(e).__name__}: {e}") from e
            self._breaker.record_success()
            return answer

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _keys(caller: Caller) -> tuple[str, str]:
    """One hash tag per tenant: what a script touches is on one node of a cluster."""
    tag = f"kv:{{tenant.{caller.tenant}}}"
    return f"{tag}:limit:{caller.key_id}", f"{tag}:open:{caller.key_id}"


def _headers(caller: Caller, taken: LimitDecision) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, limit, left, full_ms in (
        ("requests", caller.limits.requests_per_minute, taken.requests, taken.requests_full_ms),
        ("tokens", caller.limits.tokens_per_minute, taken.tokens, taken.tokens_full_ms),
    ):
        if limit:
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(left)
            headers[f"x-ratelimit-reset-{name}"] = duration(full_ms)
    return headers


def duration(ms: int) -> str:
    """As OpenAI writes it: 120ms, 7.2s, 6m0s, 1h0m0s."""
    if ms < 1000:
        return f"{max(0, ms)}ms"
    if ms < 60_000:
        return f"{ms / 1000:g}s"
    minutes, seconds = divmod(math.ceil(ms / 1000), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{seconds}s" if hours else f"{minutes}m{seconds}s"


def _refusal(caller: Caller, taken: LimitDecision) -> RateLimited | QuotaExceeded:
    limits, wait_s = caller.limits, taken.wait_ms / 1000
    if taken.refused == "day":
        text = f"the {limits.tokens_per_day} tokens a day of this API key do not last for this request"
        return QuotaExceeded(text, field="tokens_per_day", retry_after_s=wait_s)
    text, field = {
        "requests": (f"{limits.requests_per_minute} requests a minute", "requests_per_minute"),
        "tokens": (f"{limits.tokens_per_minute} tokens a minute", "tokens_per_minute"),
        "concurrent": (f"{limits.concurrent} requests at once", "concurrent"),
    }[taken.refused]
    text = f"this API key's limit of {text} is reached; try again in {duration(taken.wait_ms)}"
    return RateLimited(text, field=field, retry_after_s=wait_s)
