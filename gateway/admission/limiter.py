"""The limits of API keys, counted in Redis for all gateways together, or by each gateway alone while Redis is away.

    reserve --> the request runs, its reservation is renewed --> settle (once, with the tokens that it used)

All grants of Redis are also recorded in this process. So if Redis does not answer within TIMEOUT_S, the gateway goes on
with its own counts from the same numbers, and no client gets an error. A Redis that lost its data gets back today's
count of a key. A reservation that is not settled, because its gateway died, expires after RESERVATION_TTL_S.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import IndexUnavailable, InvalidRequest, QuotaExceeded, RateLimited
from common.redis.client import LuaScript, ScriptRunner
from gateway.admission.api_keys import Caller, KeyLimits
from gateway.telemetry.metrics import GatewayMetrics

TIMEOUT_S = 0.05
RESERVATION_TTL_S, RENEW_S = 60.0, 15.0
_LUA = Path(__file__).parent / "lua"
DAY_MS, MINUTE_MS = 86_400_000, 60_000
CONCURRENT_WAIT_MS = 1000  #: Suggested wait of a request that was refused because too many run.

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LimitDecision:
    """Whether a request fits into the limits of its key, and what is left of them."""

    refused: str  # the limit that refused the request: requests, tokens, day or concurrent; "" if it was granted
    wait_ms: int  # milliseconds until a retry may succeed
    requests: int  #: Requests left of this minute's limit.
    requests_full_ms: int  #: Milliseconds until all of these requests are left again.
    tokens: int  #: Tokens left of this minute's limit.
    tokens_full_ms: int  #: Milliseconds until all of these tokens are left again.
    day: int  # day since the epoch that the tokens count for


@dataclass(slots=True)
class _TokenBucket:
    """The level of a bucket at the time `at`, in milliseconds since the epoch. None is full."""

    level: float | None = None
    at: int = 0

    def level_at(self, now: int, per_minute: int) -> float:
        if self.level is None:
            return float(per_minute)
        return min(per_minute, self.level + max(0, now - self.at) * per_minute / MINUTE_MS)


@dataclass(slots=True)
class KeyBuckets:
    """The limits of one API key in this process: lua/take.lua and lua/settle.lua without Redis. Pure.

    Requests and tokens per minute are token buckets, full at first and refilled evenly. So within t minutes a key never
    gets more than (1 + t) times its limit. Times are milliseconds since the epoch.
    """

    _requests: _TokenBucket = field(default_factory=_TokenBucket)
    _tokens: _TokenBucket = field(default_factory=_TokenBucket)
    _running: set[str] = field(default_factory=set)
    day: int = 0
    spent_today: int = 0  # tokens used on `day`

    def reserve(
        self, limits: KeyLimits, request_id: str, tokens: int, now: int, *, granted: bool = False
    ) -> LimitDecision:
        """Reserves one request and its tokens from all limits, or nothing. `granted`: only records Redis's decision."""
        rpm, tpm, tpd = limits.requests_per_minute, limits.tokens_per_minute, limits.tokens_per_day
        requests_left, tokens_left = self._requests.level_at(now, rpm), self._tokens.level_at(now, tpm)
        today = now // DAY_MS
        spent = self.spent_today if self.day == today else 0
        refused, wait_ms = "", 0.0
        if request_id not in self._running:
            if granted:
                pass
            elif tpd and spent + tokens > tpd:
                refused, wait_ms = "day", (today + 1) * DAY_MS - now
            elif rpm and requests_left < 1:
                refused, wait_ms = "requests", (1 - requests_left) * MINUTE_MS / rpm
            elif tpm and tokens_left < tokens:
                refused, wait_ms = "tokens", (tokens - tokens_left) * MINUTE_MS / tpm
            elif limits.concurrent and len(self._running) >= limits.concurrent:
                refused, wait_ms = "concurrent", CONCURRENT_WAIT_MS
            if not refused:
                requests_left, tokens_left = requests_left - 1, tokens_left - tokens
                self._requests, self._tokens = _TokenBucket(requests_left, now), _TokenBucket(tokens_left, now)
                self.day, self.spent_today = today, spent + tokens
                self._running.add(request_id)
        return LimitDecision(
            refused,
            math.ceil(wait_ms),
            int(max(0.0, requests_left)),
            math.ceil((rpm - requests_left) * MINUTE_MS / rpm) if rpm else 0,
            int(max(0.0, tokens_left)),
            math.ceil((tpm - tokens_left) * MINUTE_MS / tpm) if tpm else 0,
            today,
        )

    def settle(
        self, limits: KeyLimits, request_id: str, reserved_tokens: int, used_tokens: int, day: int, now: int
    ) -> bool:
        """Replaces the tokens that a request reserved on `day` by those it used. Returns False if it does not run."""
        if request_id not in self._running:
            return False
        self._running.remove(request_id)
        if tpm := limits.tokens_per_minute:
            left = self._tokens.level_at(now, tpm) + reserved_tokens - used_tokens
            self._tokens = _TokenBucket(min(tpm, left), now)
        if day == self.day:
            self.spent_today = max(0, self.spent_today - reserved_tokens + used_tokens)
        return True


@dataclass(frozen=True, slots=True)
class LimitReservation:
    """Tokens that a running request reserved from its key's limits."""

    caller: Caller
    request_id: str
    tokens: int
    day: int  # day since the epoch that the tokens count for


@dataclass(frozen=True, slots=True)
class TokenFields:
    """The fields of a body that its tokens come from, for errors."""

    prompt_tokens: int = 0  #: Tokens of `prompt_field`; `max_tokens_field` allows the other tokens.
    prompt_field: str = "prompt"
    max_tokens_field: str = "max_tokens"


class Limiter:
    """Reserves requests and tokens from the limits of API keys, and settles them."""

    def __init__(self, url: str | None, metrics: GatewayMetrics, *, timeout_s: float = TIMEOUT_S) -> None:
        """`url`: Redis; None counts in this process only."""
        self._redis = ScriptRunner(url, timeout_s=timeout_s)
        self._metrics = metrics
        self._take, self._settle, self._renew = (LuaScript(n, directory=_LUA) for n in ("take", "settle", "renew"))
        self._local: dict[str, KeyBuckets] = {}  # this process's own counts by key id
        self._running: dict[str, dict[str, Caller]] = {}  #: Callers of running requests by key id and request id.
        self._tasks: set[asyncio.Task[None]] = set()
        self._renewing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts to renew the reservations of running requests in Redis."""
        if self._redis.has_redis:
            self._renewing = asyncio.get_running_loop().create_task(self._renew_reservations())

    async def stop(self) -> None:
        """Waits at most 1 s for settlements in the background, and closes the connections."""
        if self._renewing is not None:
            self._renewing.cancel()
            with suppress(asyncio.CancelledError):
                await self._renewing
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        for task in list(self._tasks):
            task.cancel()
        await self._redis.close()

    async def reserve(
        self,
        caller: Caller,
        request_id: str,
        tokens: int,
        headers: dict[str, str],
        fields: TokenFields = TokenFields(),
    ) -> LimitReservation:
        """Reserves one request and its prompt and output tokens.

        Args:
            headers: Gets OpenAI's x-ratelimit-* headers, whether the request is granted or not.

        Raises:
            RateLimited: A limit per minute or the number of concurrent requests is reached.
            QuotaExceeded: The tokens of this day are used up.
            InvalidRequest: The request is larger than a limit. The error names the prompt's field if the prompt alone
                is larger.
        """
        limits = caller.limits
        for name, limit in (("minute", limits.tokens_per_minute), ("day", limits.tokens_per_day)):
            if limit and tokens > limit:
                text = f"the request may need {tokens} tokens, and this API key has {limit} tokens a {name}"
                if fields.prompt_tokens > limit:
                    raise InvalidRequest(f"{text}; a shorter prompt may help", field=fields.prompt_field)
                field = fields.max_tokens_field
                raise InvalidRequest(f"{text}; a smaller {field} may help", field=field)
        buckets = self._local.setdefault(caller.key_id, KeyBuckets())
        now = int(time.time() * 1000)
        per = (limits.requests_per_minute, limits.tokens_per_minute, limits.tokens_per_day, limits.concurrent)
        args = (0, request_id, *per, tokens, int(RESERVATION_TTL_S * 1000), buckets.day, buckets.spent_today)
        # A task of its own: it goes on if this request is cancelled, so that `settle` follows it in Redis.
        taking = asyncio.get_running_loop().create_task(self._redis.run(self._take, _keys(caller), args))
        try:
            refused, *numbers = await asyncio.shield(taking)
            decision = LimitDecision(refused.decode(), *map(int, numbers))
            if not decision.refused:
                buckets.reserve(limits, request_id, tokens, now, granted=True)
        except IndexUnavailable as e:
            _log.debug("limits by this gateway's own counts: %s", e)
            self._metrics.limits_without_redis.inc()
            decision = buckets.reserve(limits, request_id, tokens, now)
        except asyncio.CancelledError:  # Redis may have granted the request
            self._settle_in_background(LimitReservation(caller, request_id, tokens, now // DAY_MS), 0, after=taking)
            raise
        headers.update(_headers(caller, decision))
        if decision.refused:
            rejection = _rejection(caller, decision)
            self._metrics.rejections.labels(rejection.field).inc()
            raise rejection
        self._running.setdefault(caller.key_id, {})[request_id] = caller
        return LimitReservation(caller, request_id, tokens, decision.day)

    def settle(self, reservation: LimitReservation, used_tokens: int) -> None:
        """Replaces a reservation by the tokens that the request used; in Redis in the background."""
        caller, request_id = reservation.caller, reservation.request_id
        running = self._running.get(caller.key_id, {})
        if running.pop(request_id, None) is None:
            return
        if not running:
            del self._running[caller.key_id]
        now = int(time.time() * 1000)
        self._local[caller.key_id].settle(
            caller.limits, request_id, reservation.tokens, used_tokens, reservation.day, now
        )
        self._settle_in_background(reservation, used_tokens)

    def _settle_in_background(
        self, reservation: LimitReservation, used_tokens: int, *, after: asyncio.Task[Any] | None = None
    ) -> None:
        if self._redis.has_redis:
            task = asyncio.get_running_loop().create_task(self._settle_in_redis(reservation, used_tokens, after))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _settle_in_redis(
        self, reservation: LimitReservation, used_tokens: int, after: asyncio.Task[Any] | None
    ) -> None:
        """Settles a reservation in Redis, when `after` has made it. Without an answer the reservation expires there."""
        if after is not None:
            with suppress(IndexUnavailable):  # Redis may have granted the request
                await after
        limits = reservation.caller.limits
        args = (0, reservation.request_id, limits.tokens_per_minute, reservation.tokens, used_tokens, reservation.day)
        with suppress(IndexUnavailable):
            await self._redis.run(self._settle, _keys(reservation.caller), args)

    async def _renew_reservations(self) -> None:
        """Renews the reservations of the running requests of each key, every RENEW_S."""
        while True:
            await asyncio.sleep(RENEW_S)
            for running in list(self._running.values()):
                caller = next(iter(running.values()), None)
                if caller is None:  # the last request has ended meanwhile
                    continue
                try:
                    await self._redis.run(self._renew, _keys(caller)[1:], (int(RESERVATION_TTL_S * 1000), *running))
                except IndexUnavailable:
                    pass  # the circuit breaker has the cause
                except Exception:
                    _log.exception("the reservations of an API key could not be renewed")


def _keys(caller: Caller) -> tuple[str, str]:
    """Returns the Redis keys of a caller. Their hash tag is the tenant, so that they are on one node of a cluster."""
    tag = f"kv:{{tenant.{caller.tenant}}}"
    return f"{tag}:limit:{caller.key_id}", f"{tag}:open:{caller.key_id}"


def _headers(caller: Caller, decision: LimitDecision) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, limit, left, full_ms in (
        ("requests", caller.limits.requests_per_minute, decision.requests, decision.requests_full_ms),
        ("tokens", caller.limits.tokens_per_minute, decision.tokens, decision.tokens_full_ms),
    ):
        if limit:
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(left)
            headers[f"x-ratelimit-reset-{name}"] = duration(full_ms)
    return headers


def duration(ms: int) -> str:
    """Formats a duration as OpenAI does: 120ms, 7.2s, 6m0s, 1h0m0s."""
    if ms < 1000:
        return f"{max(0, ms)}ms"
    if ms < 60_000:
        return f"{ms / 1000:g}s"
    minutes, seconds = divmod(math.ceil(ms / 1000), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{seconds}s" if hours else f"{minutes}m{seconds}s"


def _rejection(caller: Caller, decision: LimitDecision) -> RateLimited | QuotaExceeded:
    limits, wait_s = caller.limits, decision.wait_ms / 1000
    if decision.refused == "day":
        text = f"this API key's limit of {limits.tokens_per_day} tokens a day leaves too few tokens for this request"
        return QuotaExceeded(text, field="tokens_per_day", retry_after_s=wait_s)
    text, field = {
        "requests": (f"{limits.requests_per_minute} requests a minute", "requests_per_minute"),
        "tokens": (f"{limits.tokens_per_minute} tokens a minute", "tokens_per_minute"),
        "concurrent": (f"{limits.concurrent} requests at once", "concurrent"),
    }[decision.refused]
    text = f"this API key's limit of {text} is reached; try again in {duration(decision.wait_ms)}"
    return RateLimited(text, field=field, retry_after_s=wait_s)
