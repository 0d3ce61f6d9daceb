"""Measures durations and summarises them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from loadtest.slo import percentile

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}


def ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def percentiles_ms(seconds: Sequence[float], *names: str) -> dict[str, float]:
    """Returns the named percentiles (see SHARES) in milliseconds."""
    return {name: ms(percentile(seconds, SHARES[name])) for name in names}


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Returns p50, p90, p99, p99.9, mean and maximum in milliseconds, and the count."""
    more = {"mean": ms(statistics.fmean(seconds)), "max": ms(max(seconds)), "count": len(seconds)}
    return percentiles_ms(seconds, *SHARES) | more


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Runs the work. Returns the seconds and its result."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


async def timed_calls(call: Callable[[], Awaitable[Any]], count: int) -> list[float]:
    """Awaits `count` calls in turn. Returns the seconds of each."""
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        await call()
        seconds.append(time.perf_counter() - began)
    return seconds
