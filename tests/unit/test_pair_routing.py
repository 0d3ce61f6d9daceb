"""Pairs in trouble: gateways do not use a pair of pods that cannot exchange KV, and their errors name the pair."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from common.errors import Unavailable
from common.types import Role
from tests.unit.test_gateway_routing import TWO_BY_TWO, FakeIndex, World

WHY = "a test block has not arrived within 5 s"


def trouble(world: World, prefill: str, *decodes: str, generation: int = 1) -> None:
    """The prefill pod reports that it cannot send KV to these pods."""
    world[prefill].pair_troubles = dict.fromkeys(decodes, (generation, WHY))
    world.table.notify_changed()


async def placed(world: World, count: int = 40) -> set[tuple[str, str]]:
    """Returns the pairs (decode, prefill) that the router chooses."""
    pairs = [await world.place(100 + seed, seed=seed) for seed in range(count)]
    return {pair for pair in pairs if pair is not None}


async def test_a_pair_in_trouble_is_not_used() -> None:
    world = World(TWO_BY_TWO, FakeIndex())
    assert len(await placed(world)) == 4
    trouble(world, "p0", "d0")
    found = await placed(world)
    assert ("d0", "p0") not in found
    assert {decode for decode, _ in found} == {"d0", "d1"}
    trouble(world, "p0")
    assert len(await placed(world)) == 4


async def test_a_decode_pod_that_no_prefill_pod_reaches_gets_nothing() -> None:
    world = World(TWO_BY_TWO, FakeIndex())
    for prefill in ("p0", "p1"):
        trouble(world, prefill, "d0")
    assert {decode for decode, _ in await placed(world)} == {"d1"}
    assert world.table.ready


async def test_a_prefill_pod_that_reaches_no_decode_pod_gets_nothing() -> None:
    world = World(TWO_BY_TWO, FakeIndex())
    trouble(world, "p1", "d0", "d1")
    assert {prefill for _, prefill in await placed(world)} == {"p0"}


async def test_a_retry_finds_no_pair_if_the_only_other_one_is_in_trouble() -> None:
    world = World(TWO_BY_TWO, FakeIndex())
    trouble(world, "p0", "d0")
    trouble(world, "p1", "d0")
    assert await world.place(100, tried={world.pod("d1").address}) is None


async def test_trouble_with_a_former_process_does_not_count() -> None:
    world = World(TWO_BY_TWO, FakeIndex())
    trouble(world, "p0", "d0", "d1")
    for name in ("d0", "d1"):
        pod = world.pod(name)
        assert pod.info is not None
        pod.info = replace(pod.info, generation=2)
    assert len(await placed(world)) == 4
    trouble(world, "p0", "d0", "d1", generation=0)  # no generation ever answered
    assert {prefill for _, prefill in await placed(world)} == {"p1"}


async def test_without_a_usable_pair_the_gateway_is_not_ready_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    world = World({"p0": Role.PREFILL, "d0": Role.DECODE})
    assert world.table.ready
    trouble(world, "p0", "d0")
    assert not world.table.ready
    assert world.table.why_unready() == "KV cannot be sent from the prefill pods to the decode pods"
    with pytest.raises(Unavailable, match="KV cannot be sent"):
        world.table.limits()
    with caplog.at_level(logging.WARNING):
        world.table._log_state()
    assert f"p0 -> d0: {WHY}" in caplog.text
    trouble(world, "p0")
    assert world.table.ready


async def test_an_aggregated_pod_needs_no_pair() -> None:
    world = World({"p0": Role.PREFILL, "d0": Role.DECODE, "b0": Role.BOTH})
    trouble(world, "p0", "d0")
    assert world.table.ready
    assert await placed(world) == {("b0", "")}
