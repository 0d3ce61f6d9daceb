"""The figures of the overload benchmark: each load counts its own refusals only."""

from __future__ import annotations

import asyncio
import math
from argparse import Namespace

import pytest

from benchmarks.reliability import overload
from benchmarks.reliability.overload import Client, LoadOutcome, quantile_ms, refused

BEFORE = {"arrival": {0.01: 40.0, 0.1: 50.0, math.inf: 50.0}}
AFTER = {"arrival": {0.01: 50.0, 0.1: 60.0, math.inf: 60.0}, "waiting": {0.01: 0.0, 0.1: 3.0, math.inf: 3.0}}


def test_refusals_of_earlier_loads_do_not_count() -> None:
    assert refused(AFTER, BEFORE) == {"arrival": 10, "waiting": 3}
    assert refused(AFTER, AFTER) == {}


def test_a_quantile_is_that_of_the_refusals_between_two_readings() -> None:
    """Ten refusals, all of them within 10 ms."""
    assert quantile_ms(AFTER["arrival"], BEFORE["arrival"], 0.5) == pytest.approx(5.0)
    assert quantile_ms(AFTER["waiting"], {}, 0.5) == pytest.approx(55.0)


async def test_a_client_that_is_refused_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a pause its requests would take the processor from the stack whose capacity is measured."""
    sent = 0

    async def request(_client: Client, _load: LoadOutcome) -> str:
        nonlocal sent
        sent += 1
        await asyncio.sleep(0)
        return "429"

    monkeypatch.setattr(Client, "request", request)
    await Client("http://127.0.0.1:1", "m", Namespace()).closed(0.1)
    assert sent == overload.CLOSED
