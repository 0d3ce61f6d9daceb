"""When requests of an open loop come, whatever becomes of those before: endless times in seconds, in order.

All of them have the same mean rate; they differ in how much arrivals cluster.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

KINDS = ("poisson", "constant", "gamma", "onoff")


def constant(rate: float) -> Iterator[float]:
    """One every 1 / rate seconds, the first at once."""
    number = 0
    while True:
        yield number / rate
        number += 1


def poisson(rate: float, rng: random.Random) -> Iterator[float]:
    """Independent users."""
    at = 0.0
    while True:
        at += rng.expovariate(rate)
        yield at


def gamma(rate: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Gamma-distributed gaps whose coefficient of variation is `burstiness`: 1 is Poisson, more is burstier.

    As in BurstGPT (Wang et al., 2024) and the bench tools of vLLM.
    """
    shape = burstiness**-2
    at = 0.0
    while True:
        at += rng.gammavariate(shape, 1 / (shape * rate))
        yield at


def onoff(rate: float, on_s: float, off_s: float, rng: random.Random) -> Iterator[float]:
    """Poisson for on_s seconds, then nothing for off_s, and again; `rate` is the mean over both."""
    for busy in poisson(rate * (on_s + off_s) / on_s, rng):
        yield busy + busy // on_s * off_s


def until(times: Iterable[float], end_s: float | None) -> Iterator[float]:
    """Those before the end."""
    for at in times:
        if end_s is not None and at >= end_s:
            return
        yield at
