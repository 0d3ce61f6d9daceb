"""The same test at one rate after another, up to the first at which too few requests are good.

Every rate gets a seed of its own: the same prompts again would be in the server's prefix cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from common.errors import ConfigError
from loadtest.config import LoadConfig

ATTAINMENT = 0.9

RunDocument = Mapping[str, Any]


def parse_rates(text: str) -> tuple[float, ...]:
    """`1,2,4`, rising. Raises ConfigError."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < 1e6 for rate in rates) or sorted(set(rates)) != list(rates):
        raise ConfigError(f"--rates: {text!r} is not a rising list of rates like 1,2,4", field="rates")
    return rates


def sweep(
    config: LoadConfig, rates: tuple[float, ...], measure: Callable[[LoadConfig], RunDocument]
) -> Iterator[RunDocument]:
    """What `measure` tells of each rate, the first that fails included. config has an slo."""
    for number, rate in enumerate(rates):
        told = measure(dataclasses.replace(config, rate=rate, seed=config.seed + number))
        yield told
        if told["stopped"] or not slo_kept(told, config):
            return


def slo_kept(told: RunDocument, config: LoadConfig) -> bool:
    """Whether enough requests were good."""
    return bool(told["goodput"]["share"] >= (config.attainment or ATTAINMENT))
