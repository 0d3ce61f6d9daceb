"""Arrival processes of an open loop. Each yields endless, rising times in seconds with the same mean rate.

They differ in the burstiness of the arrivals.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

KINDS = ("poisson", "constant", "gamma", "onoff")


def constant(rate: float) -> Iterator[float]:
    """Yields a time every 1 / rate seconds, starting with 0."""
    number = 0
    while True:
        yield number / rate
        number += 1


def poisson(rate: float, rng: random.Random) -> Iterator[float]:
    """Yields the times of a Poisson process: arrivals of independent users."""
    at = 0.0
    while True:
        at += rng.expovariate(rate)
        yield at


def gamma(rate: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Yields times with gamma-distributed gaps. `burstiness` is their coefficient of variation; 1 is Poisson.

    BurstGPT (Wang et al., 2024) and the benchmarks of vLLM use the same process.
    """
    shape = burstiness**-2
    at = 0.0
    while True:
        at += rng.gammavariate(shape, 1 / (shape * rate))
        yield at


def onoff(rate: float, on_s: float, off_s: float, rng: random.Random) -> Iterator[float]:
    """Alternates Poisson arrivals for on_s seconds with none for off_s seconds. `rate` is the mean over both."""
    for on_time in poisson(rate * (on_s + off_s) / on_s, rng):
        yield on_time + on_time // on_s * off_s


def until(times: Iterable[float], end_s: float | None) -> Iterator[float]:
    """Yields the times below end_s, or all if it is None."""
    for at in times:
        if end_s is not None and at >= end_s:
            return
        yield at
