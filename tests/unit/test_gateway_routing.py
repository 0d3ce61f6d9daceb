"""Token order, bookings, and where requests go."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import IndexUnavailable, Unavailable
from common.prefix_index import PodLoad
from common.types import FinishReason, Role, SamplingParams, Token, ValidRequest
from gateway.metrics import GatewayMetrics
from gateway.pod import Pod, PodInfo
from gateway.pods import PodTable
from gateway.router import Router
from gateway.timeline import Timeline, Timelines
from gateway.token_order import TokenOrder

FP = "ab" * 16


@given(size=st.integers(1, 12), seed=st.integers(0, 2**32))
def test_any_order_and_repetition_gives_each_token_once(size: int, seed: int) -> None:
    rng = random.Random(seed)
    arrivals = [i for i in range(size) for _ in range(rng.randint(1, 3))]
    rng.shuffle(arrivals)
    order, got, finish = TokenOrder(), [], None
    for i in arrivals:
        order.put([Token(i, 100 + i)])
        if i == size - 1:
            order.end(FinishReason.LENGTH)
        tokens, reason = order.take()
        got += tokens
        finish = reason or finish
        if reason is not None:
            assert len(got) == size
    assert [t.index for t in got] == list(range(size))
    assert finish is FinishReason.LENGTH
    assert order.duplicates == len(arrivals) - size


def test_an_end_without_tokens_waits_for_the_first() -> None:
    order = TokenOrder()
    order.end(FinishReason.STOP)
    assert order.take() == ([], None)
    order.put([Token(0, 5)])
    assert order.take() == ([Token(0, 5)], FinishReason.STOP)


class FakeIndex:
    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.up = True

    async def lookup(self, scope: str, hashes: list[bytes], pods: list[tuple[str, int]]) -> dict[str, int]:
        if not self.up:
            raise IndexUnavailable("away")
        return {name: min(self.held.get(name, 0), len(hashes)) for name, _ in pods}


class World:
    def __init__(self, roles: dict[str, Role], index: FakeIndex | None = None) -> None:
        self.index = index
        self.table = PodTable((), index, gateway_id="g", model="m")  # type: ignore[arg-type]
        self.table.index_up = index is not None
        self.router = Router(self.table, GatewayMetrics())
        for i, (name, role) in enumerate(roles.items()):
            pod = Pod(f"127.0.0.1:{i + 1}", "g", model="m", static=True, on_change=lambda: None)
            pod.info = PodInfo(
                name=name, generation=1, address=pod.address, role=role, model="m", fingerprint=FP, scope=FP[:8],
                block_size=16, max_model_len=4096, num_blocks=1000, vocab_size=100, ready=True, draining=False,
            )  # fmt: skip
            pod.alive = True
            pod.stream_up = role is not Role.PREFILL
            self.table.pods[pod.address] = pod

    def __getitem__(self, name: str) -> Pod:
        return next(p for p in self.table.pods.values() if p.name == name)

    async def prefill(self, length: int, seed: int = 0, avoid: Any = ()) -> str:
        plan = await self.router.plan(prompt(length, seed))
        pod = plan.prefill(FP, avoid)
        assert pod is not None
        return pod.name

    async def decode(self, length: int, seed: int = 0) -> str:
        pod = (await self.router.plan(prompt(length, seed))).decode((), ())
        assert pod is not None
        return pod.name


def prompt(length: int, seed: int = 0) -> ValidRequest:
    rng = random.Random(seed)
    ids = tuple(rng.randrange(100) for _ in range(length))
    return ValidRequest("r", "m", ids, SamplingParams(max_tokens=16))


TWO_BY_TWO = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}


async def test_the_pod_that_holds_the_prefix_gets_the_request_until_it_is_busy() -> None:
    index = FakeIndex()
    world = World(TWO_BY_TWO, index)
    index.held = {"p1": 60, "d0": 60}
    assert {await world.prefill(1000) for _ in range(20)} == {"p1"}
    assert {await world.decode(1000) for _ in range(20)} == {"d0"}
    world["p1"].prefilling.add("x", 2000)
    assert {await world.prefill(1000) for _ in range(20)} == {"p0"}
    world["p1"].prefilling.remove("x")
    assert await world.prefill(1000) == "p1"


async def test_near_ties_are_spread_and_one_common_block_does_not_herd() -> None:
    index = FakeIndex()
    world = World(TWO_BY_TWO, index)
    index.held = {"p0": 1}
    got: Counter[str] = Counter()
    for i in range(100):
        name = await world.prefill(1000, seed=i)
        got[name] += 1
        world[name].prefilling.add(str(i), 1000)
    assert min(got.values()) > 35
    assert len({await world.decode(1000, seed=i) for i in range(30)}) == 2


async def test_the_reported_load_and_later_bookings_are_added_up() -> None:
    world = World(TWO_BY_TWO, FakeIndex())
    world["p0"].prefilling.add("old", 500)
    for name, queued in (("p0", 500), ("p1", 700)):
        world[name].load, world[name].load_seen = PodLoad(queued_tokens=queued, free_blocks=1000), time.monotonic()
    assert await world.prefill(16) == "p0"
    world["p0"].prefilling.add("new", 400)
    assert await world.prefill(16) == "p1"


async def test_a_pod_without_free_blocks_is_the_last_resort() -> None:
    world = World(TWO_BY_TWO, FakeIndex())
    world["d0"].load = PodLoad(free_blocks=2)
    world["d1"].load = PodLoad(free_blocks=900, running=50)
    assert {await world.decode(1000) for _ in range(10)} == {"d1"}


@pytest.mark.parametrize("index", [None, FakeIndex()])
async def test_without_an_index_prompts_stick_and_load_stays_bounded(index: FakeIndex | None) -> None:
    if index is not None:
        index.up = False
    world = World(TWO_BY_TWO, index)
    homes = {seed: await world.prefill(200, seed) for seed in range(40)}
    assert len(set(homes.values())) == 2
    for seed, home in homes.items():
        assert await world.prefill(200, seed) == home
    got: Counter[str] = Counter()
    for i in range(60):
        name = await world.prefill(200, seed=7)
        got[name] += 1
        world[name].prefilling.add(str(i), 200)
    assert min(got.values()) >= 20


async def test_failed_pods_are_avoided_while_others_live() -> None:
    world = World(TWO_BY_TWO)
    avoid = {world["p0"].address}
    assert {await world.prefill(100, s, avoid) for s in range(10)} == {"p1"}
    world["p1"].alive = False
    assert await world.prefill(100, 0, avoid) == "p0"


async def test_pods_too_small_for_a_request_are_not_asked() -> None:
    world = World({"d0": Role.BOTH})
    assert (await world.router.plan(prompt(4080))).decode((), ()) is not None
    assert (await world.router.plan(prompt(4081))).decode((), ()) is None


async def test_of_two_addresses_with_one_name_the_later_generation_counts() -> None:
    from dataclasses import replace

    world = World({"d0": Role.BOTH, "d1": Role.BOTH})
    new = world["d1"]
    assert new.info is not None
    new.info = replace(new.info, name="d0", generation=9)
    assert world.table.decodes() == [new]


async def test_of_one_name_with_two_layouts_the_later_counts_for_the_limits_too() -> None:
    from dataclasses import replace

    world = World(TWO_BY_TWO)
    new = world["p1"]
    assert new.info is not None
    new.info = replace(new.info, name="p0", generation=9, fingerprint="cd" * 16)
    assert world.table.decodes() == []
    with pytest.raises(Unavailable):
        world.table.limits()


def test_timelines_are_a_ring() -> None:
    ring = Timelines(size=3)
    for i in range(5):
        ring.add(Timeline(f"id{i}", "same", "chat"))
    assert ring.find("id1") is None
    assert ring.find("chatcmpl-id4") is ring.find("id4") is ring.find("same")
