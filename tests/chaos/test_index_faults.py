"""Faults of the prefix index under load: killed, wiped, frozen, cut off and wrong. Clients see no error.

Gateway, index and Valkey are real, with proxies between them; the pods are fake.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from cli.stack.valkey import EmbeddedValkey
from common.block_hash import hash_blocks
from common.errors import IndexUnavailable
from common.redis.client import connect_redis
from gateway.pods import pod as gateway_pod
from prefix_index import publisher
from prefix_index.store import IndexKeys
from tests.rigs.gateway.gateway_rig import Rig, rig
from tests.rigs.index.index_entry import IndexEntry
from tests.rigs.index.tcp_proxy import TcpProxy, tcp_proxy
from tests.rigs.pods.fake_pods import FakeCluster, FakePod, fake_cluster
from tests.rigs.waiting import until

PROMPT = list(range(100, 400))


class Stage:
    """A gateway and pods that reach one Valkey through two proxies. The second pod of each role holds PROMPT."""

    def __init__(
        self, gw: Rig, cluster: FakeCluster, valkey: EmbeddedValkey, url: str, proxies: tuple[TcpProxy, TcpProxy]
    ) -> None:
        self.gw = gw
        self.cluster = cluster
        self.valkey = valkey
        self.url = url
        self.proxies = proxies
        self.entries: dict[str, IndexEntry] = {}
        self.zombies: list[IndexEntry] = []

    async def enter(self, pod: FakePod, prompt: list[int]) -> None:
        entry = IndexEntry(f"redis://127.0.0.1:{self.proxies[1].port}", pod)
        entry.hold(prompt)
        if pod.name in self.entries:  # the old pod does not know that a new one has replaced it
            self.zombies.append(self.entries[pod.name])
        self.entries[pod.name] = entry
        await entry.index.start()

    def mode(self) -> str:
        """Returns the scraped metric kv_index_mode."""
        lines = self.gw.gateway.metrics.base.exposition().decode().splitlines()
        (line,) = (x for x in lines if x.startswith("baton_kv_index_mode{") and x.endswith(" 1.0"))
        return line.split('"')[1]

    async def knows(self, pod: FakePod, blocks: int, prompt: list[int] = PROMPT) -> bool:
        """Whether the gateway's index reader finds this many blocks of the prompt, and only on this pod."""
        layout, index = pod.layout, self.gw.gateway.pod_table.index
        assert index is not None
        hashes = hash_blocks(prompt, fingerprint=layout.fingerprint, block_size=layout.block_size)
        try:
            found = await index.lookup(layout.scope, hashes, [(pod.name, pod.generation)])
        except IndexUnavailable:
            return False
        return found == {pod.name: blocks}

    async def routed_by_redis(self) -> None:
        """Waits until the index has all entries again and requests are routed by them."""
        for entry in self.entries.values():
            await until(lambda entry=entry: self.knows(entry.pod, len(entry.hashes)))  # type: ignore[misc]
        await until(self._mode_is_redis)

    async def _mode_is_redis(self) -> bool:
        await self.gw.complete(prompt=PROMPT, max_tokens=1)
        return self.mode() == "redis"

    @asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Clients send requests and require the correct answer to each."""
        stop = asyncio.Event()
        answers: dict[int, str] = {}
        served = 0

        async def client(seed: int) -> None:
            nonlocal served
            rng = random.Random(seed)
            while not stop.is_set():
                length = rng.choice((20, 150, 300))
                response = await self.gw.complete(prompt=PROMPT[:length], max_tokens=4)
                assert response.status_code == 200, response.text
                text = response.json()["choices"][0]["text"]
                assert answers.setdefault(length, text) == text
                served += 1
                await asyncio.sleep(0.02)

        async with asyncio.TaskGroup() as group:
            for seed in range(4):
                group.create_task(client(seed))
            await asyncio.sleep(0.2)
            yield
            before = served
            await until(lambda: served >= before + 8)  # requests succeed after the fault
            stop.set()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(publisher, "_MAX_BACKOFF_S", 0.2)
    monkeypatch.setattr(publisher, "_COMMAND_S", 0.5)
    monkeypatch.setattr(gateway_pod, "INFO_TIMEOUT_S", 10.0)  # a busy machine is no fault of the pods


@pytest_asyncio.fixture
async def stage(smollm2_dir: Path, tmp_path: Path) -> AsyncIterator[Stage]:
    valkey = EmbeddedValkey(0, tmp_path, password="")
    url = await valkey.start()
    port = int(url.rpartition(":")[2].partition("/")[0])
    async with (
        fake_cluster(prefill=2, decode=2) as cluster,
        tcp_proxy(port) as gateways,
        tcp_proxy(port) as pods,
        rig(cluster, smollm2_dir, index_timeout_s=0.1, redis=f"redis://127.0.0.1:{gateways.port}") as gw,
    ):
        stage = Stage(gw, cluster, valkey, url, (gateways, pods))
        for group in (cluster.prefills, cluster.decodes):
            await stage.enter(group[0], PROMPT[:40])
            await stage.enter(group[1], PROMPT)
        try:
            await stage.routed_by_redis()
            yield stage
            await gw.settled()
        finally:
            for entry in (*stage.entries.values(), *stage.zombies):
                await entry.index.stop()
            await stage.valkey.stop()


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_requests_go_on_while_redis_is_killed_wiped_and_frozen(stage: Stage, tmp_path: Path) -> None:
    async with stage.load():
        pid = stage.valkey.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: stage.mode() in ("local", "hash"))
        await stage.valkey.stop()
        port = int(stage.url.rpartition(":")[2].partition("/")[0])
        stage.valkey = EmbeddedValkey(port, tmp_path / "again", password="")
        await stage.valkey.start()
        await stage.routed_by_redis()

        async with connect_redis(stage.url, timeout_s=5.0) as raw:
            await raw.flushall()
        await stage.routed_by_redis()

        pid = stage.valkey.pid
        assert pid is not None
        with frozen(pid):
            await until(lambda: stage.mode() in ("local", "hash"))
        await stage.routed_by_redis()
    assert stage.gw.gateway.ready


async def test_requests_go_on_while_gateway_or_pods_are_cut_off(stage: Stage) -> None:
    gateways, pods = stage.proxies
    async with stage.load():
        gateways.silence()
        await until(lambda: stage.mode() in ("local", "hash"))
        gateways.heal()
        await stage.routed_by_redis()
        pods.silence()
        for entry in stage.entries.values():
            await until(lambda entry=entry: not entry.index.registered)  # type: ignore[misc]
        stage.entries[stage.cluster.prefills[0].name].hold(PROMPT[:80])
        pods.heal()
        await stage.routed_by_redis()
        for proxy in stage.proxies:
            proxy.hang_up()
        await stage.routed_by_redis()
        async with connect_redis(stage.url, timeout_s=5.0) as raw:
            await raw.execute_command("CLIENT", "PAUSE", 2_000, "ALL")
        await until(lambda: stage.mode() in ("local", "hash"))
        await stage.routed_by_redis()


async def test_wrong_index_entries_only_cost_a_recompute(stage: Stage) -> None:
    """The index claims that every pod holds every block. Pods still get whole prompts and answer correctly."""
    other = list(range(2000, 2300))
    layout = stage.cluster.prefills[0].layout
    hashes = hash_blocks(other, fingerprint=layout.fingerprint, block_size=layout.block_size)
    async with connect_redis(stage.url, timeout_s=5.0) as raw:
        right = await stage.gw.complete(prompt=other, max_tokens=3, cache_salt="apart")
        for pod in stage.cluster.pods.values():
            await raw.sadd(IndexKeys(layout.scope).held_blocks(pod.name, pod.generation), *(h[:8] for h in hashes))
        wrong = await stage.gw.complete(prompt=other, max_tokens=3)
    assert wrong.status_code == 200
    assert wrong.json()["choices"] == right.json()["choices"]
    prompts = [r.prompt_ids for pod in stage.cluster.pods.values() for r in (*pod.seen.prefilled, *pod.seen.reserved)]
    assert prompts.count(tuple(other)) == 4  # prefill and decode, twice
    assert wrong.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    await stage.routed_by_redis()  # routing by the index recovers


async def test_a_restarted_pod_does_not_inherit_the_entries_of_the_old_process(stage: Stage) -> None:
    holder = stage.cluster.prefills[1]
    async with stage.load():
        reborn = await holder.restart()
        stage.cluster.prefills[1] = reborn
        await stage.enter(reborn, PROMPT[:16])
        await until(lambda: stage.knows(reborn, 1))
        await until(lambda: stage.gw.gateway.pod_table.pods[reborn.address].info.generation == reborn.generation)  # type: ignore[union-attr]
        (zombie,) = stage.zombies
        await until(lambda: not zombie.index.registered)
        zombie.hold(PROMPT)
        await stage.routed_by_redis()
        await asyncio.sleep(0.5)  # it tries again and again, and is refused
        assert not zombie.index.registered
        await until(lambda: stage.knows(holder, 0))
        await until(lambda: stage.knows(reborn, 1))
