"""The limits of one API key in this process: lua/take.lua and lua/settle.lua without Redis. Pure.

Requests and tokens per minute are token buckets, full at first and refilled evenly. So within t minutes a key never
gets more than (1 + t) times its limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gateway.admission.api_keys import KeyLimits

DAY_MS, MINUTE_MS = 86_400_000, 60_000

#: Suggested wait of a request that was refused because too many run.
CONCURRENT_WAIT_MS = 1000


@dataclass(frozen=True, slots=True)
class LimitDecision:
    """Whether a request fits into the limits of its key, and the rest of the limits."""

    refused: str  # the limit that refused the request: requests, tokens, day or concurrent; "" if it was granted
    wait_ms: int  # milliseconds until a retry may succeed
    #: Requests left of this minute's limit, and milliseconds until the bucket is full again.
    requests: int
    requests_full_ms: int
    #: The same for tokens.
    tokens: int
    tokens_full_ms: int
    day: int  # day since the epoch that the tokens count for


@dataclass(slots=True)
class _TokenBucket:
    """Level at a time (ms); None is full."""

    level: float | None = None
    at: int = 0

    def level_at(self, now: int, per_minute: int) -> float:
        if self.level is None:
            return float(per_minute)
        return min(per_minute, self.level + max(0, now - self.at) * per_minute / MINUTE_MS)

    def put(self, level: float, now: int) -> None:
        self.level, self.at = level, now


@dataclass(slots=True)
class KeyBuckets:
    """The buckets of one API key. Times are milliseconds since the epoch."""

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
                self._requests.put(requests_left, now)
                self._tokens.put(tokens_left, now)
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
        tpm = limits.tokens_per_minute
        if tpm:
            self._tokens.put(min(tpm, self._tokens.level_at(now, tpm) + reserved_tokens - used_tokens), now)
        if day == self.day:
            self.spent_today = max(0, self.spent_today - reserved_tokens + used_tokens)
        return True
