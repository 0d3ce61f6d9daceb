"""Runs the same test at rising rates until too few requests are good.

Every rate has its own seed. Equal prompts would be in the server's prefix cache.
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
    """Parses rising rates like `1,2,4`. Raises ConfigError."""
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
    """Yields the result of `measure` for each rate, including the first that fails. config.slo must be set."""
    for number, rate in enumerate(rates):
        document = measure(dataclasses.replace(config, rate=rate, seed=config.seed + number))
        yield document
        if document["stopped"] or not slo_kept(document, config):
            return


def slo_kept(document: RunDocument, config: LoadConfig) -> bool:
    """Returns whether the share of good requests reaches the attainment."""
    return bool(document["goodput"]["share"] >= (config.attainment or ATTAINMENT))
