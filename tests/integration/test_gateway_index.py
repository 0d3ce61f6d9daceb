"""The gateway with a real index: discovery of pods, prefix routing, and operation without Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from cli.stack.valkey import EmbeddedValkey
from common.pb import prefill_pb2, transfer_pb2
from tests.rigs.gateway.gateway_rig import Rig, rig
from tests.rigs.index.index_entry import IndexEntry
from tests.rigs.pods.fake_pods import FakeCluster, FakePod, fake_cluster
from tests.rigs.waiting import until

PROMPT = list(range(100, 400))


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with fake_cluster(prefill=2, decode=2) as c:
        yield c


async def test_pods_are_found_by_the_index_and_requests_follow_prefixes(
    cluster: FakeCluster, smollm2_dir: Path, tmp_path: Path
) -> None:
    valkey = EmbeddedValkey(port=0, directory=tmp_path)
    url = await valkey.start()
    entries = {pod.name: IndexEntry(url, pod) for pod in cluster.pods.values()}
    stranger = IndexEntry(url, FakePod(cluster, "stranger", cluster.decodes[0].role, port=1), model="other")
    try:
        for entry in (*entries.values(), stranger):
            await entry.index.start()
        async with rig(cluster, smollm2_dir, pods=(), redis=url) as gw:
            await until(lambda: len(gw.gateway.pod_table.pods) == 4 and gw.gateway.pod_table.index_up)
            await _prefers_holders(gw, cluster, entries)
            await valkey.stop()
            await until(lambda: not gw.gateway.pod_table.index_up)
            assert (await gw.complete(prompt=PROMPT)).status_code == 200
            assert 'baton_kv_index_mode{mode="local"} 1.0' in (await gw.http.get("/metrics")).text
            assert gw.gateway.ready
            await gw.settled()
    finally:
        for entry in (*entries.values(), stranger):
            await entry.index.stop()
        await valkey.stop()


async def _prefers_holders(gw: Rig, cluster: FakeCluster, entries: dict[str, IndexEntry]) -> None:
    prefill, decode = cluster.prefills[1], cluster.decodes[0]
    for pod in (prefill, decode):
        entries[pod.name].hold(PROMPT)
        await entries[pod.name].shown()  # a request before that would make other pods holders too
    predicted = gw.gateway.metrics.predicted_hits

    async def all_hit() -> bool:
        before = (len(prefill.seen.prefilled), len(decode.seen.reserved))
        await gw.complete(prompt=PROMPT, max_tokens=2)
        return (len(prefill.seen.prefilled), len(decode.seen.reserved)) == (before[0] + 1, before[1] + 1)

    in_a_row = 0
    async with asyncio.timeout(30):
        while in_a_row < 10:
            in_a_row = in_a_row + 1 if await all_hit() and predicted.collect()[0].samples[0].value > 0 else 0
    hits = [await all_hit() for _ in range(10)]
    assert all(hits)
    start = (len(prefill.seen.prefilled), len(cluster.prefills[0].seen.prefilled))
    for i in range(10):  # another tenant shares nothing
        await gw.complete(prompt=PROMPT, max_tokens=2, cache_salt=f"t{i}")
    assert len(prefill.seen.prefilled) - start[0] + len(cluster.prefills[0].seen.prefilled) - start[1] == 10
    text = (await gw.http.get("/metrics")).text
    assert 'baton_kv_index_mode{mode="redis"} 1.0' in text


async def test_pods_get_pull_hints_and_the_remote_prefill_cost(
    cluster: FakeCluster, smollm2_dir: Path, tmp_path: Path
) -> None:
    """Only a decode pod holds the prompt, so the chosen prefill pod gets a hint to pull it from there."""
    decode = cluster.decodes[0]
    decode.pairs = [transfer_pb2.Pair(pod=pod.name, gb_s=1.0) for pod in cluster.prefills]
    for pod in cluster.prefills:
        pod.pulls = True
        pod.load = transfer_pb2.Load(prefill_rate=100.0, free_blocks=1000, transfer_rate=1e5, hand_off_s=0.004)
    valkey = EmbeddedValkey(port=0, directory=tmp_path)
    url = await valkey.start()
    entries = {pod.name: IndexEntry(url, pod) for pod in cluster.pods.values()}
    try:
        for entry in entries.values():
            await entry.index.start()
        async with rig(cluster, smollm2_dir, pods=(), redis=url) as gw:
            await until(lambda: len(gw.gateway.pod_table.pods) == 4 and gw.gateway.pod_table.index_up)
            entries[decode.name].hold(PROMPT)
            await entries[decode.name].shown()
            hints: list[prefill_pb2.PullHint] = []

            async def hinted() -> bool:
                """The gateway gives hints once it has read the pods' rates."""
                assert (await gw.complete(prompt=PROMPT, max_tokens=2)).status_code == 200
                hints[:] = [hint for pod in cluster.prefills for hint in pod.seen.pull_hints]
                return bool(hints)

            await until(hinted)
            assert (hints[0].pod, hints[0].address) == (decode.name, decode.address)
            assert hints[0].generation == decode.generation
            assert hints[0].blocks == (len(PROMPT) - 1) // decode.layout.block_size
            assert hints[0].seconds > 0
            remote = next(r for pod in cluster.decodes for r in pod.seen.remote_costs if r.compute_s < 2.0)
            assert remote.tokens_per_s == pytest.approx(100.0)
            assert remote.hand_off_s >= 0.004
            await gw.settled()
    finally:
        for entry in entries.values():
            await entry.index.stop()
        await valkey.stop()


async def test_a_gateway_that_starts_without_redis_finds_it_later(
    cluster: FakeCluster, smollm2_dir: Path, tmp_path: Path, unused_tcp_port: int
) -> None:
    url = f"redis://127.0.0.1:{unused_tcp_port}"
    async with rig(cluster, smollm2_dir, redis=url) as gw:
        assert (await gw.complete()).status_code == 200
        assert not gw.gateway.pod_table.index_up
        valkey = EmbeddedValkey(port=unused_tcp_port, directory=tmp_path, password="")
        await valkey.start()
        try:
            await until(lambda: gw.gateway.pod_table.index_up)
            assert (await gw.complete()).status_code == 200
        finally:
            await valkey.stop()
        await gw.settled()
