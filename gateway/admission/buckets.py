"""The limits of one key in this process: what lua/take.lua and lua/settle.lua do, for when Redis is away.

Requests and tokens per minute are token buckets: full at first, refilled evenly. So in t minutes after any moment a key
never gets more than its limit times (1 + t). Pure: time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.admission.api_keys import KeyLimits

DAY_MS, MINUTE_MS = 86_400_000, 60_000
CONCURRENT_WAIT_MS = 1000


@dataclass(frozen=True, slots=True)
class LimitDecision:
    """refused: requests, tokens, day or concurrent; empty when it was taken. wait_ms: until a retry may succeed.

    requests, tokens: what is left; *_full_ms: until all of it is back. day: since the epoch.
    """

    refused: str
    wait_ms: int
    requests: int
    requests_full_ms: int
    tokens: int
    tokens_full_ms: int
    day: int


@dataclass(slots=True)
class _TokenBucket:
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
    """One key's. Times are ms since the epoch."""

    _requests: _TokenBucket = field(default_factory=_TokenBucket)
    _tokens: _TokenBucket = field(default_factory=_TokenBucket)
    _running: set[str] = field(default_factory=set)
    day: int = 0
    spent_today: int = 0  # on that day

    def reserve(self, limits: KeyLimits, request: str, cost: int, now: int, *, granted: bool = False) -> LimitDecision:
        """All that the request needs, or nothing. granted: Redis gave it, so that it is only written down here."""
        rpm, tpm, tpd = limits.requests_per_minute, limits.tokens_per_minute, limits.tokens_per_day
        requests, tokens = self._requests.level_at(now, rpm), self._tokens.level_at(now, tpm)
        today = now // DAY_MS
        spent = self.spent_today if self.day == today else 0
        refused, wait = "", 0.0
        if request not in self._running:
            if granted:
                pass
            elif tpd and spent + cost > tpd:
                refused, wait = "day", (today + 1) * DAY_MS - now
            elif rpm and requests < 1:
                refused, wait = "requests", (1 - requests) * MINUTE_MS / rpm
            elif tpm and tokens < cost:
                refused, wait = "tokens", (cost - tokens) * MINUTE_MS / tpm
            elif limits.concurrent and len(self._running) >= limits.concurrent:
                refused, wait = "concurrent", CONCURRENT_WAIT_MS
            if not refused:
                requests, tokens = requests - 1, tokens - cost
                self._requests.put(requests, now)
                self._tokens.put(tokens, now)
                self.day, self.spent_today = today, spent + cost
                self._running.add(request)
        return LimitDecision(
            refused,
            _up(wait),
            int(max(0.0, requests)),
            _up((rpm - requests) * MINUTE_MS / rpm) if rpm else 0,
            int(max(0.0, tokens)),
            _up((tpm - tokens) * MINUTE_MS / tpm) if tpm else 0,
            today,
        )

    def settle(self, limits: KeyLimits, request: str, cost: int, used: int, day: int, now: int) -> bool:
        """The request took `cost` on `day` and used `used`; False when it does not run (any more)."""
        if request not in self._running:
            return False
        self._running.remove(request)
        tpm = limits.tokens_per_minute
        if tpm:
            self._tokens.put(min(tpm, self._tokens.level_at(now, tpm) + cost - used), now)
        if day == self.day:
            self.spent_today = max(0, self.spent_today - cost + used)
        return True


def _up(value: float) -> int:
    return int(-(-value // 1))
