"""Two routers with a real index: a burst is spread, and bookings are returned."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cli.stack.valkey import EmbeddedValkey
from common.auth import GATEWAY, Signer
from common.errors import IndexUnavailable
from common.types import Role, SamplingParams, ValidRequest
from gateway.pods.info import PodInfo
from gateway.pods.pod import Pod
from gateway.pods.table import PodTable
from gateway.pods.view import PodView
from gateway.routing import router as router_module
from gateway.routing.placement import Placement
from gateway.routing.router import Router
from gateway.telemetry.metrics import GatewayMetrics
from prefix_index import reader
from prefix_index.reader import IndexReader
from prefix_index.store import SCOPES_KEY, IndexKeys
from tests.rigs.waiting import until

FP = "cd" * 16
BURST = 64


def gateway(url: str, roles: list[Role], seed: int) -> tuple[Router, IndexReader]:
    """Returns a router that knows these pods, which do not exist, and its index reader."""
    index, signer = IndexReader(url, timeout_s=20.0), Signer(b"secret", GATEWAY, f"g{seed}", 1)
    table = PodTable((), index, signer=signer, model="m")
    table.index_up = True
    for i, role in enumerate(roles):
        pod = Pod(f"127.0.0.1:{i + 1}", signer, model="m", static=True, on_change=table.notify_changed)
        pod.info = PodInfo(
            name=f"{role}-{i}",
            generation=1,
            address=pod.address,
            role=role,
            model="m",
            fingerprint=FP,
            scope=FP[:8],
            block_bytes=1 << 20,
            block_size=16,
            max_model_len=4096,
            num_blocks=10_000,
            vocab_size=100,
            ready=True,
            draining=False,
        )
        pod.view = PodView(
            pod.info.name, address=pod.address, role=role, block_size=16, max_request_tokens=4096, num_blocks=10_000
        )
        pod.alive, pod.token_stream_up = True, role is not Role.PREFILL
        table.pods[pod.address] = pod
    return Router(table, GatewayMetrics(), rng=random.Random(seed)), index


async def place(router: Router, number: int) -> Placement:
    rng = random.Random(number)
    ids = tuple(rng.randrange(100) for _ in range(800))
    plan = await router.plan(ValidRequest(f"r{number}", "m", ids, SamplingParams(max_tokens=16)))
    placement = await plan.place(f"r{number}-1.1", (), ())
    assert placement is not None
    return placement


@pytest.mark.parametrize("num_pods", [4, 7, 16, 32])
@pytest.mark.parametrize("both", [False, True], ids=["pairs", "aggregated"])
async def test_a_burst_over_two_gateways_is_spread(num_pods: int, both: bool, tmp_path: Path) -> None:
    roles = [Role.BOTH] * num_pods if both else [Role.PREFILL] * num_pods + [Role.DECODE] * num_pods
    valkey = EmbeddedValkey(port=0, directory=tmp_path)
    url = await valkey.start()
    gateways = [gateway(url, roles, seed) for seed in range(2)]
    try:
        placed = await asyncio.gather(*(place(gateways[i % 2][0], i) for i in range(BURST)))
        sides: list[list[Any]] = [[p.decode for p in placed], [p.prefill for p in placed if p.prefill]]
        for pods in sides[: 1 if both else 2]:
            got = Counter(pod.address for pod in pods)
            assert sum(got.values()) == BURST
            assert max(got.values()) <= max(-(-BURST // num_pods), 1.25 * BURST / num_pods)
        booked = await _bookings(gateways[0][1])
        assert booked == BURST * (1 if both else 2)
        for placement in placed:
            placement.release()
        async with asyncio.timeout(30):
            while await _bookings(gateways[0][1]):
                await asyncio.sleep(0.02)
        for router, _ in gateways:
            views = [pod.view for pod in router._table.pods.values() if pod.view]
            assert not any(len(view.prefill_bookings) + len(view.decode_bookings) for view in views)
            assert len(router.inflight) == 0
            await until(lambda router=router: not router._tasks)  # type: ignore[misc]
    finally:
        for router, index in gateways:
            await router.stop()
            await index.close()
        await valkey.stop()


async def test_the_only_gateway_does_not_wait_for_its_bookings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    valkey = EmbeddedValkey(port=0, directory=tmp_path)
    url = await valkey.start()
    gateways = [gateway(url, [Role.PREFILL] * 2 + [Role.DECODE] * 2, seed) for seed in range(2)]
    (router, index), (_, other) = gateways
    try:
        assert index._client is not None
        await index._client.hset(SCOPES_KEY, FP[:8], "m")
        assert not index.is_only_gateway(FP[:8])  # the index was not read yet
        await index.pods()
        assert index.is_only_gateway(FP[:8])
        pod = IndexReader(url, books=False, timeout_s=20.0)  # a pod that looks for its peers does not count
        await pod.pods()
        await pod.close()
        await index.pods()
        assert index.is_only_gateway(FP[:8])
        answered = asyncio.Event()
        book = index.book

        async def late(*args: Any) -> Any:
            await answered.wait()
            return await book(*args)

        monkeypatch.setattr(index, "book", late)
        placed = [await asyncio.wait_for(place(router, i), 30) for i in range(4)]
        assert {p.prefill.address for p in placed if p.prefill} == {"127.0.0.1:1", "127.0.0.1:2"}
        assert await _bookings(index) == 0
        answered.set()
        async with asyncio.timeout(30):
            while await _bookings(index) < 2 * len(placed):
                await asyncio.sleep(0.02)
        await other.pods()
        assert not other.is_only_gateway(FP[:8])
        await index.pods()
        assert not index.is_only_gateway(FP[:8])
        answered.clear()
        waiting = asyncio.create_task(place(router, 5))
        await until(lambda: len(router.inflight) == 5)
        assert not waiting.done()
        answered.set()
        await waiting
        monkeypatch.setattr(reader, "GATEWAY_TTL_MS", 1)  # less than the silence of the other gateway
        await asyncio.sleep(0.01)
        await index.pods()
        assert index.is_only_gateway(FP[:8])
        monkeypatch.setattr(index, "_clock", lambda: time.monotonic() + reader.ONLY_GATEWAY_S)
        assert not index.is_only_gateway(FP[:8])
    finally:
        for r, i in gateways:
            await r.stop()
            await i.close()
        await valkey.stop()


async def test_unbooking_is_retried_while_the_index_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_module, "UNBOOK_RETRY_S", (0.02,) * 10)
    valkey = EmbeddedValkey(port=0, directory=tmp_path)
    url = await valkey.start()
    router, index = gateway(url, [Role.PREFILL, Role.DECODE], 0)
    try:
        placed = [await place(router, i) for i in range(4)]
        async with asyncio.timeout(30):
            while await _bookings(index) < 2 * len(placed):
                await asyncio.sleep(0.02)
        unbook, refusals = index.unbook, itertools.count()

        async def at_first_not(*args: str) -> None:
            if next(refusals) < 9:
                raise IndexUnavailable("Redis does not answer")
            await unbook(*args)

        monkeypatch.setattr(index, "unbook", at_first_not)
        router._table.index_up = False  # as after a failed poll
        for placement in placed:
            placement.release()
        async with asyncio.timeout(30):
            while await _bookings(index):
                await asyncio.sleep(0.02)
        await until(lambda: not router._tasks)
    finally:
        await router.stop()
        await index.close()
        await valkey.stop()


async def _bookings(index: IndexReader) -> int:
    assert index._client is not None
    keys = await index._client.keys(IndexKeys(FP[:8]).bookings("*"))
    return sum([await index._client.zcard(key) for key in keys])
