"""Arrival processes of an open loop. Each has endless, rising times in seconds with the same mean rate."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator

KINDS = ("poisson", "constant", "gamma", "onoff")


def constant(rate: float) -> Iterator[float]:
    """Returns a time every 1 / rate seconds, starting with 0."""
    return (number / rate for number in itertools.count())


def poisson(rate: float, rng: random.Random) -> Iterator[float]:
    """Returns the times of a Poisson process: arrivals of independent users."""
    return itertools.accumulate(rng.expovariate(rate) for _ in itertools.count())


def gamma(rate: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Returns times with gamma-distributed gaps. `burstiness` is their coefficient of variation; 1 is Poisson.

    BurstGPT (Wang et al., 2024) and the benchmarks of vLLM use the same process.
    """
    shape = burstiness**-2
    return itertools.accumulate(rng.gammavariate(shape, 1 / (shape * rate)) for _ in itertools.count())


def onoff(rate: float, on_s: float, off_s: float, rng: random.Random) -> Iterator[float]:
    """Alternates Poisson arrivals for on_s seconds with none for off_s seconds. `rate` is the mean over both."""
    for on_time in poisson(rate * (on_s + off_s) / on_s, rng):
        yield on_time + on_time // on_s * off_s


def until(times: Iterable[float], end_s: float | None) -> Iterator[float]:
    """Returns the times below end_s, or all if it is None."""
    return itertools.takewhile(lambda at: end_s is None or at < end_s, times)
