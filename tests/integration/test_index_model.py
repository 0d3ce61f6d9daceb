"""The publisher and the scripts against a model, in a real Valkey.

Calls are lost, repeated, delayed, and the index is wiped. The index always converges to the blocks that the pods hold,
and no look-up ever counts a block for a replaced generation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from redis.exceptions import ConnectionError

from cli.stack.valkey import EmbeddedValkey
from common.block_hash import hash_blocks
from common.redis.client import connect_redis
from common.types import PodLoad, Role
from prefix_index import publisher
from prefix_index.publisher import IndexPublisher
from prefix_index.reader import IndexReader
from prefix_index.store import STORED_HASH_BYTES, CacheTier, IndexKeys, PodRecord, PrefixHits, sampling_interval

SCOPE = "00112233"
CHAINS = [hash_blocks([seed] * 8 + list(range(24)), fingerprint=SCOPE * 4, block_size=1) for seed in range(3)]
PODS = ("a", "b")


class Wire:
    """A client between a pod and Valkey that loses, repeats and delays script calls."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.faults: list[str] = []
        self.kept: list[tuple[Any, ...]] = []  # calls that can arrive a second time, later

    async def evalsha(self, *call: Any) -> Any:
        fault = self.faults.pop() if self.faults else ""
        if fault == "lost":
            raise ConnectionError("lost on the way there")
        answer = await self._inner.evalsha(*call)
        if fault == "answer lost":
            raise ConnectionError("lost on the way back")
        if fault == "twice":
            answer = await self._inner.evalsha(*call)
        if fault == "kept":
            self.kept.append(call)
        return answer

    async def repeat_kept(self) -> None:
        """The kept calls arrive a second time; faults do not apply to them."""
        calls, self.kept = self.kept, []
        for call in calls:
            await self._inner.evalsha(*call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Pod:
    """One process under a name: two caches and their publisher.

    Like a real pool, a cache holds a prefix of each chain and evicts from the end.
    """

    def __init__(self, url: str, name: str, generation: int) -> None:
        self.record = PodRecord(
            name, generation, f"127.0.0.1:{generation}", Role.DECODE, "m", SCOPE, SCOPE * 4, 16, 1, 1
        )
        self.held: dict[CacheTier, list[int]] = {
            tier: [0] * len(CHAINS) for tier in CacheTier
        }  # blocks of each chain, from its start
        self.index = IndexPublisher(
            url,
            self.record,
            lambda: self.hashes(CacheTier.DEVICE),
            PodLoad,
            host_snapshot=lambda: self.hashes(CacheTier.HOST),
            disk_snapshot=lambda: self.hashes(CacheTier.DISK),
        )
        self.wire = Wire(self.index._client)
        self.index._client = self.wire  # type: ignore[assignment]

    def hashes(self, tier: CacheTier) -> list[bytes]:
        return [h for chain, depth in zip(CHAINS, self.held[tier], strict=True) for h in chain[:depth]]

    def move(self, tier: CacheTier, chain: int, depth: int) -> None:
        """Stores or evicts until the tier holds the first `depth` blocks of the chain."""
        before, self.held[tier][chain] = self.held[tier][chain], depth
        if depth > before:
            self.index.stored(CHAINS[chain][before:depth], tier)
        else:
            self.index.evicted(CHAINS[chain][depth:before][::-1], tier)

    def truth(self, chain: int) -> PrefixHits:
        device, host, disk = (self.held[tier][chain] for tier in CacheTier)
        return PrefixHits(device, max(device, host, disk), max(0, disk - max(device, host)))


class IndexMachine(RuleBasedStateMachine):
    """Pods under two names; their publishers run as background tasks of one loop."""

    url = ""
    loop: asyncio.AbstractEventLoop

    @initialize()
    def start(self) -> None:
        self.pods: dict[str, Pod] = {}
        self.dead: list[Pod] = []
        self.generation = 1
        self.run(self._wipe())
        for name in PODS:
            self.restart(name)

    def run(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    async def _wipe(self) -> None:
        async with connect_redis(self.url, timeout_s=5.0) as raw:
            await raw.flushall()

    @rule(name=st.sampled_from(PODS))
    def restart(self, name: str) -> None:
        """A new process takes over the name; the old process keeps running, as a zombie."""
        old = self.pods.pop(name, None)
        if old is not None:
            self.dead.append(old)
        self.generation += 1
        self.pods[name] = Pod(self.url, name, self.generation)
        self.run(self.pods[name].index.start())

    @rule(
        name=st.sampled_from(PODS),
        tier=st.sampled_from(CacheTier),
        chain=st.integers(0, len(CHAINS) - 1),
        depth=st.integers(0, 32),
    )
    def move(self, name: str, tier: CacheTier, chain: int, depth: int) -> None:
        self.pods[name].move(tier, chain, depth)

    @precondition(lambda self: self.dead)
    @rule(chain=st.integers(0, len(CHAINS) - 1), depth=st.integers(0, 32))
    def a_zombie_goes_on(self, chain: int, depth: int) -> None:
        self.dead[-1].move(CacheTier.DEVICE, chain, depth)

    @rule(name=st.sampled_from(PODS), faults=st.lists(st.sampled_from(("", "lost", "answer lost", "twice", "kept"))))
    def disturb(self, name: str, faults: list[str]) -> None:
        self.pods[name].wire.faults += faults[:4]

    @rule(name=st.sampled_from(PODS))
    def arrives_late(self, name: str) -> None:
        for pod in (self.pods[name], *self.dead):
            self.run(pod.wire.repeat_kept())

    @rule(name=st.sampled_from(PODS), seed=st.integers(0, 99))
    def damage(self, name: str, seed: int) -> None:
        """Redis loses some hashes of a pod's set (seed >= 30), or all keys."""
        pod = self.pods[name]

        async def lose() -> None:
            async with connect_redis(self.url, timeout_s=5.0) as raw:
                key = IndexKeys(SCOPE).held_blocks(name, pod.record.generation)
                await raw.spop(key, 1 + seed % 3)

        self.run(self._wipe() if seed < 30 else lose())

    @rule(seconds=st.sampled_from((0.0, 0.005, 0.02)))
    def wait(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @rule()
    def converges(self) -> None:
        for pod in (*self.pods.values(), *self.dead):
            pod.wire.faults.clear()
        self.run(self._converge())

    async def _converge(self) -> None:
        raw, keys = connect_redis(self.url, timeout_s=5.0), IndexKeys(SCOPE)
        try:
            for _ in range(3_000):
                if await self._right(raw, keys):
                    break
                await asyncio.sleep(0.01)
            assert await self._right(raw, keys), "the index did not converge to the blocks that the pods hold"
            reader = IndexReader(self.url, timeout_s=5.0)
            assert {s.record for s in await reader.pods()} == {pod.record for pod in self.pods.values()}
            names = [(pod.record.pod, pod.record.generation) for pod in self.pods.values()]
            old = [(pod.record.pod, pod.record.generation) for pod in self.dead]
            for i, chain in enumerate(CHAINS):
                found = await reader.lookup_tiers(SCOPE, chain, names)
                assert found == {name: pod.truth(i) for name, pod in self.pods.items()}
                for owner in old:
                    assert await reader.lookup(SCOPE, chain, [owner]) == {owner[0]: 0}
            await reader.close()
        finally:
            await raw.aclose()

    async def _right(self, raw: Any, keys: IndexKeys) -> bool:
        """Each pod's sets equal its caches, and the postings equal their sampled hashes."""
        slots = {owner: int(slot) for slot, owner in (await raw.hgetall(keys.slots)).items() if slot.isdigit()}
        want: dict[bytes, set[int]] = {}
        for name, pod in self.pods.items():
            generation = pod.record.generation
            slot = slots.get(f"{name}:{generation}".encode())
            if slot is None:
                return False
            for tier in CacheTier:
                hashes = {h[:STORED_HASH_BYTES] for h in pod.hashes(tier)}
                if await raw.smembers(keys.held_blocks(name, generation, tier)) != hashes:
                    return False
                for h in hashes:
                    if h[0] % sampling_interval(16) == 0:
                        want.setdefault(h, set()).add(slot)
        got = await raw.hgetall(keys.postings)
        return {h: _slots(posting) for h, posting in got.items()} == want

    def teardown(self) -> None:
        self.converges()
        for pod in (*self.pods.values(), *self.dead):
            self.run(pod.index.stop())


def _slots(posting: bytes) -> set[int]:
    slots = [int.from_bytes(posting[i : i + 2], "little") for i in range(0, len(posting), 2)]
    assert len(slots) == len(set(slots)), "a pod is listed twice"
    return set(slots)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[IndexMachine]]:
    for name, value in {
        "BATCH_S": 0.002,
        "HEARTBEAT_S": 0.03,
        "MAX_BATCH_BLOCKS": 7,
        "MAX_PENDING": 40,
        "SWEEP_S": 0,
        "_MIN_BACKOFF_S": 0.01,
        "_MAX_BACKOFF_S": 0.02,
    }.items():
        monkeypatch.setattr(publisher, name, value)
    loop = asyncio.new_event_loop()
    valkey = EmbeddedValkey(0, tmp_path)
    IndexMachine.url, IndexMachine.loop = loop.run_until_complete(valkey.start()), loop
    yield IndexMachine
    loop.run_until_complete(valkey.stop())
    loop.close()


def test_the_index_converges_to_the_blocks_that_the_pods_hold(machine: type[IndexMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
