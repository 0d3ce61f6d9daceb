"""Two gateways with one index: bursts are spread, a common prefix does not herd, and pods that leave are forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cli.stack.valkey import EmbeddedValkey
from common.redis.client import connect_redis
from common.types import ValidRequest
from gateway.pods import table as gateway_pods
from prefix_index import publisher
from tests.rigs.gateway.gateway_rig import Rig, rig
from tests.rigs.index.index_entry import IndexEntry
from tests.rigs.pods.fake_pods import FakeCluster, fake_cluster
from tests.rigs.waiting import until

BURST, PODS = 64, 4
HEAD = list(range(100, 164))  # four blocks that head every prompt


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "HEARTBEAT_S", 0.2)


@asynccontextmanager
async def two_gateways(
    model_dir: Path, directory: Path
) -> AsyncIterator[tuple[FakeCluster, tuple[Rig, Rig], dict[str, IndexEntry]]]:
    """Runs idle pods without prefixes, and two gateways that found them by the index."""
    valkey = EmbeddedValkey(0, directory)
    url = await valkey.start()
    try:
        async with fake_cluster(prefill=PODS, decode=PODS) as cluster:
            entries = {pod.name: IndexEntry(url, pod) for pod in cluster.pods.values()}
            for entry in entries.values():
                await entry.index.start()
            try:
                async with (
                    rig(cluster, model_dir, pods=(), redis=url, index_timeout_s=20.0) as one,
                    rig(cluster, model_dir, pods=(), redis=url, index_timeout_s=20.0) as two,
                ):
                    for gw in (one, two):
                        await until(lambda gw=gw: len(gw.gateway.pod_table.pods) == 2 * PODS)  # type: ignore[misc]
                    yield cluster, (one, two), entries
                    for gw in (one, two):
                        await gw.settled()
                    async with connect_redis(url, timeout_s=5.0) as raw:
                        async with asyncio.timeout(30):  # every booking is returned
                            while await raw.keys("*resv*"):
                                await asyncio.sleep(0.02)
            finally:
                for entry in entries.values():
                    await entry.index.stop()
    finally:
        await valkey.stop()


async def burst(cluster: FakeCluster, gateways: tuple[Rig, Rig], prompts: list[list[int]]) -> tuple[int, int]:
    """Sends all at once, every second one to the other gateway; requests on the fullest prefill and decode pod.

    No prompt is computed before all have a place.
    """
    started = sum(len(pod.seen.prefilled) for pod in cluster.prefills)

    async def all_placed(_request: ValidRequest) -> None:
        await until(lambda: sum(len(pod.seen.prefilled) for pod in cluster.prefills) >= started + len(prompts))

    for pod in cluster.prefills:
        pod.faults.before_prefill = all_placed
    before = {pod.name: (len(pod.seen.prefilled), len(pod.seen.reserved)) for pod in cluster.pods.values()}
    calls = (gateways[i % 2].complete(prompt=p, max_tokens=2) for i, p in enumerate(prompts))
    assert {r.status_code for r in await asyncio.gather(*calls)} == {200}
    prefill = max(len(pod.seen.prefilled) - before[pod.name][0] for pod in cluster.prefills)
    decode = max(len(pod.seen.reserved) - before[pod.name][1] for pod in cluster.decodes)
    return prefill, decode


async def test_a_burst_is_spread_by_gateways_with_equal_views(smollm2_dir: Path, tmp_path: Path) -> None:
    share = BURST / PODS
    async with two_gateways(smollm2_dir, tmp_path) as (cluster, gateways, entries):
        alone = [list(range(1_000 + 300 * i, 1_300 + 300 * i)) for i in range(BURST)]
        assert max(await burst(cluster, gateways, alone)) <= 1.25 * share
        # One prefill pod holds what heads every prompt: better than the others, but not that much better.
        entries[cluster.prefills[0].name].hold(HEAD)
        await entries[cluster.prefills[0].name].shown()
        await asyncio.sleep(1.2)  # until no kept answer is older than that
        headed = [HEAD + list(range(20_000 + 300 * i, 20_236 + 300 * i)) for i in range(BURST)]
        assert (await burst(cluster, gateways, headed))[0] <= 2 * share


async def test_pods_that_leave_or_die_are_forgotten_by_every_gateway(
    smollm2_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_pods, "FORGET_S", 0.5)
    monkeypatch.setattr(publisher, "LEASE_MS", 5_000)
    async with two_gateways(smollm2_dir, tmp_path) as (cluster, gateways, entries):
        leaves, dies = cluster.prefills[0], cluster.prefills[1]
        await entries[leaves.name].index.stop()
        for pod in (leaves, dies):
            await pod.stop()
        task = entries[dies.name].index._task
        assert task is not None
        task.cancel()  # no more heartbeats, and no word that it leaves
        for gw in gateways:
            await until(lambda gw=gw: len(gw.gateway.pod_table.pods) == 2 * PODS - 2)  # type: ignore[misc]
            assert (await gw.complete(max_tokens=2)).status_code == 200
