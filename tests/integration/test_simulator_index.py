"""The simulator's index models give the same answers as the Lua scripts in a real Valkey."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cli.stack.valkey import EmbeddedValkey
from common.redis.client import LuaScript, RedisClient, connect_redis
from common.types import PodLoad, Role
from loadtest.workload.trace import synthetic_block_hash
from prefix_index.publisher import BATCH_S, HEARTBEAT_S, IndexPublisher
from prefix_index.reader import IndexReader
from prefix_index.store import (
    HELD_TTL_S,
    INFO_TTL_S,
    LEASE_MS,
    LUA_DIR,
    PODS_TTL_S,
    STORED_HASH_BYTES,
    BookingCandidate,
    BookingResult,
    CacheTier,
    IndexKeys,
    PodRecord,
)
from simulator.agent_workload import AgentWorkload
from simulator.clock import VirtualClock
from simulator.cluster import SimulatedCluster
from simulator.hardware_rates import FLAT_8K
from simulator.index import BookingModel, IndexModel, SimIndex, SimPublisher, SimReader
from simulator.spec import ClusterSpec

PODS = ("a", "b", "c")
BLOCK = 512  # as in traces: every block has a posting
# A tree of blocks: chains share their first blocks, in several depths.
CHAINS = [
    [synthetic_block_hash(branch[: (i // 4) + 1], i) for i in range(12)]
    for branch in itertools.product(range(2), repeat=3)
]
SCOPES = itertools.count()
T = TypeVar("T")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with asyncio.Runner() as runner:
        server = EmbeddedValkey(0, Path(tmp_path_factory.mktemp("valkey")))
        yield runner.run(server.start())
        runner.run(server.stop())


def record_of(pod: str, generation: int, scope: str) -> PodRecord:
    return PodRecord(pod, generation, f"{pod}:1", Role.PREFILL, "m", scope, scope * 4, BLOCK, 1, 1)


class LuaIndex:
    """IndexModel's methods as commands of one scope, as prefix_index/publisher.py sends them."""

    def __init__(self, client: RedisClient, reader: IndexReader, scope: str) -> None:
        self._client = client
        self._reader = reader
        self._scope = scope
        self._keys = IndexKeys(scope)
        self._slots: dict[tuple[str, int], int] = {}

    async def register(self, pod: str, generation: int) -> bool:
        k = self._keys
        record = record_of(pod, generation, self._scope)
        names = (
            k.pods,
            k.info(pod),
            k.lease(pod),
            k.load(pod),
            k.bookings(pod),
            k.booking_units(pod),
            k.slots,
            k.sweep,
        )
        args = (k.prefix, pod, generation, LEASE_MS, INFO_TTL_S, PODS_TTL_S, PodLoad().to_json(), *record.to_fields())
        slot = int(await LuaScript("register", directory=LUA_DIR).run(self._client, names, args))
        if slot:
            self._slots[pod, generation] = slot
        return slot > 0

    async def heartbeat(self, pod: str, generation: int) -> int:
        k = self._keys
        names = (
            *(k.pods, k.info(pod), k.lease(pod), k.load(pod), k.held_blocks(pod, generation)),
            *(
                k.held_blocks(pod, generation, CacheTier.HOST),
                k.held_blocks(pod, generation, CacheTier.DISK),
                k.batch_number(pod, generation),
                k.postings,
                k.slots,
                k.sweep,
            ),
        )
        slot = self._slots.get((pod, generation), 0)
        args = (pod, generation, slot, LEASE_MS, PodLoad().to_json(), HELD_TTL_S, INFO_TTL_S, PODS_TTL_S)
        return int((await LuaScript("heartbeat", directory=LUA_DIR).run(self._client, names, args))[0])

    async def apply(self, pod: str, generation: int, number: int, stored: list[bytes], evicted: list[bytes]) -> str:
        k = self._keys
        names = (
            *(
                k.lease(pod),
                k.batch_number(pod, generation),
                k.held_blocks(pod, generation),
                k.held_blocks(pod, generation, CacheTier.HOST),
                k.held_blocks(pod, generation, CacheTier.DISK),
            ),
            *(k.postings, k.slots),
        )
        slot = self._slots.get((pod, generation), 0).to_bytes(2, "little")
        args = (generation, number, HELD_TTL_S, slot, 1, _packed(stored), _packed(evicted), *[b""] * 4)
        return str((await LuaScript("postings", "apply", directory=LUA_DIR).run(self._client, names, args)).decode())

    async def snapshot(self, pod: str, generation: int, number: int, held: list[bytes]) -> str:
        k = self._keys
        shadow, *others = (k.shadow(pod, generation, number, tier) for tier in CacheTier)
        slot = self._slots.get((pod, generation), 0).to_bytes(2, "little")
        if held:
            args: tuple[Any, ...] = (generation, HELD_TTL_S, slot, 1, _packed(held))
            names: tuple[str, ...] = (k.lease(pod), shadow, k.postings)
            answer = await LuaScript("postings", "snapshot_slice", directory=LUA_DIR).run(self._client, names, args)
            if answer != b"ok":
                return str(answer.decode())
        names = (
            *(k.lease(pod), k.batch_number(pod, generation), shadow, k.held_blocks(pod, generation)),
            *(others[0], k.held_blocks(pod, generation, CacheTier.HOST)),
            *(others[1], k.held_blocks(pod, generation, CacheTier.DISK), k.slots),
        )
        args = (generation, number, HELD_TTL_S, len(held), 0, 0)
        return str((await LuaScript("snapshot_commit", directory=LUA_DIR).run(self._client, names, args)).decode())

    async def leave(self, pod: str, generation: int) -> None:
        k = self._keys
        names = (
            *(k.pods, k.info(pod), k.lease(pod), k.load(pod), k.held_blocks(pod, generation)),
            *(
                k.held_blocks(pod, generation, CacheTier.HOST),
                k.held_blocks(pod, generation, CacheTier.DISK),
                k.batch_number(pod, generation),
                k.bookings(pod),
                k.booking_units(pod),
            ),
            *(k.postings, k.slots, k.sweep),
        )
        slot = self._slots.get((pod, generation), 0)
        await LuaScript("leave", directory=LUA_DIR).run(self._client, names, (pod, generation, slot))

    async def expire(self, pod: str) -> None:
        """The lease runs out."""
        await self._client.delete(self._keys.lease(pod))

    async def lookup(self, chain: list[bytes], pods: list[tuple[str, int]]) -> dict[tuple[str, int], int]:
        found: dict[tuple[str, int], int] = {}
        for pod in pods:  # one by one: a name may be asked for in several generations
            blocks = (await self._reader.lookup(self._scope, chain, [pod]))[pod[0]]
            if blocks:
                found[pod] = blocks
        return found


def _packed(hashes: list[bytes]) -> bytes:
    return b"".join(h[:STORED_HASH_BYTES] for h in hashes)


pod_names = st.sampled_from(PODS)
generations = st.integers(1, 3)
offsets = st.sampled_from([0, 0, 0, 0, -1, 1])
steps = st.one_of(
    st.tuples(st.just("register"), pod_names, generations),
    st.tuples(st.just("heartbeat"), pod_names, generations),
    st.tuples(st.just("leave"), pod_names, generations),
    st.tuples(st.just("expire"), pod_names, generations),
    # offset: of the number to the right one. store and evict: a chain and how many of its blocks stay or go.
    *[
        st.tuples(st.just(kind), pod_names, generations, offsets, st.integers(0, 7), st.integers(0, 12))
        for kind in ("store", "evict", "store", "evict", "snapshot")
    ],
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(steps, min_size=5, max_size=40))
def test_the_index_model_answers_like_the_scripts(url: str, script: list[tuple[Any, ...]]) -> None:
    async def compare() -> None:
        model = IndexModel(VirtualClock().time)
        client, scope = connect_redis(url, timeout_s=5.0), f"{next(SCOPES):08x}"
        reader = IndexReader(url, timeout_s=5.0, clock=lambda: time.monotonic() * 1e6)  # nothing is kept
        lua = LuaIndex(client, reader, scope)
        held: dict[tuple[str, int], list[bytes]] = {}  # what the pod believes, in an order in which it may be stored
        number: dict[tuple[str, int], int] = {}
        try:
            for step in (("register", "a", 1), ("snapshot", "a", 1, 0, 0, 6), *script):
                kind, pod, generation = step[:3]
                process = pod, generation
                if kind == "register":
                    assert model.register(*process) == await lua.register(*process)
                elif kind == "heartbeat":
                    assert model.heartbeat(*process) == await lua.heartbeat(*process)
                elif kind == "leave":
                    model.leave(*process)
                    await lua.leave(*process)
                elif kind == "expire":
                    model.expire(pod)
                    await lua.expire(pod)
                else:
                    offset, chain, depth = step[3:]
                    mine, at = held.get(process, []), number.get(process, 0) + 1 + offset
                    if kind == "snapshot":
                        after = CHAINS[chain][:depth]
                        answers = model.snapshot(*process, at, after), await lua.snapshot(*process, at, after)
                    else:
                        after = _after(mine, CHAINS[chain], depth, kind == "store")
                        stored, evicted = [h for h in after if h not in mine], [h for h in mine if h not in after]
                        answers = (
                            model.apply(*process, at, stored, evicted),
                            await lua.apply(*process, at, stored, evicted),
                        )
                    assert answers[0] == answers[1]
                    if answers[0] == "ok":
                        held[process], number[process] = after, at
                asked = [(pod, g) for g in range(1, 4)]
                for chain in (CHAINS[0], CHAINS[5]):
                    assert model.lookup(chain, asked) == await lua.lookup(chain, asked), (kind, chain)
            asked = [(p, g) for p in PODS for g in range(1, 4)]
            for chain in CHAINS:
                assert model.lookup(chain, asked) == await lua.lookup(chain, asked), chain
        finally:
            await reader.close()
            await client.aclose()

    asyncio.run(compare())


def _after(mine: list[bytes], chain: list[bytes], depth: int, store: bool) -> list[bytes]:
    """Returns a change that keeps the set prefix-closed: adds leading blocks of a chain, or removes its end."""
    if store:
        return mine + [h for h in chain[:depth] if h not in mine]
    gone = set(chain[depth:])
    for other in CHAINS:
        cut = next((i for i, h in enumerate(other) if h in gone), len(other))
        gone.update(other[cut:])
    return [h for h in mine if h not in gone]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["reserve", "reserve", "unbook"]),
            st.integers(0, 5),
            st.lists(
                st.tuples(
                    pod_names,
                    st.sampled_from([0.0, 1.0, 2.0]),
                    st.sampled_from([0.0, 0.125]),
                    st.integers(1, 40),
                    st.sampled_from([0.0, 20.0, 40.0]),
                ),
                min_size=1,
                max_size=3,
                unique_by=lambda c: c[0],
            ),
        ),
        max_size=25,
    )
)
def test_the_booking_model_chooses_like_the_script(url: str, calls: list[tuple[Any, ...]]) -> None:
    async def compare() -> None:
        scope = f"{next(SCOPES):08x}"
        reader, model = IndexReader(url, timeout_s=5.0), BookingModel(time.monotonic)
        try:
            for kind, request, options in calls:
                candidates = [BookingCandidate(*option) for option in options]
                if kind == "reserve":
                    (lua,) = await reader.book(scope, f"r{request}", [candidates])
                    assert model.reserve(f"r{request}", candidates) == lua
                else:
                    await reader.unbook(scope, candidates[0].pod, f"r{request}")
                    model.unbook(candidates[0].pod, f"r{request}")
        finally:
            await reader.close()

    asyncio.run(compare())


class SteppedPodIndex(IndexPublisher):
    """PodIndex without its task: the caller decides when it registers, sends a heartbeat and sends changes."""

    async def join(self) -> None:
        self._loop = asyncio.get_running_loop()  # from now on changes are recorded
        await self._register()
        await self._send_snapshot()

    async def beat(self) -> None:
        await self._heartbeat()

    async def flush(self) -> None:
        while self._changes.stale or self._changes:
            await (self._send_snapshot() if self._changes.stale else self._send_batch())

    async def close(self) -> None:
        self._loop = None
        if self._client is not None:
            await self._client.aclose()


class ValkeyIndex(SimIndex):
    """The real PodIndex, IndexReader and Lua under the simulated cluster; no virtual time passes during a command.

    Leases follow the server's clock, so a run must not be longer than one. Bookings do too, and all of a run is an
    instant for the server: it gets the bookings, but BookingModel makes the choice.
    """

    def __init__(self, clock: VirtualClock, url: str, runner: asyncio.Runner) -> None:
        super().__init__(clock)
        self.url = url
        self.scope = f"{next(SCOPES):08x}"
        self.runner = runner
        self.opened: list[SteppedPodIndex | IndexReader] = []

    def publisher(self, pod: str, generation: int) -> SimPublisher:
        return ValkeyPublisher(self, pod, generation)

    def reader(self) -> SimReader:
        return ValkeyReader(self)

    def wait(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(call)

    async def close(self) -> None:
        for client in self.opened:
            await client.close()


class ValkeyPublisher(SimPublisher):
    def __init__(self, index: ValkeyIndex, pod: str, generation: int) -> None:
        super().__init__(index, pod, generation)
        self._valkey = index
        self._record = record_of(pod, generation, index.scope)

    def start(self, snapshot: Callable[[], list[bytes]]) -> None:
        self._pod_index = SteppedPodIndex(self._valkey.url, self._record, snapshot, PodLoad)
        self._valkey.opened.append(self._pod_index)
        self._clock.call_at(self._clock.now, self._join)

    def _enqueue(self, hashes: list[bytes], held: bool) -> None:
        change = self._pod_index.stored if held else self._pod_index.evicted
        change(hashes)
        if not self._flushing:
            self._flushing = True
            self._clock.call_after(BATCH_S, self._flush)

    def _join(self) -> None:
        self._valkey.wait(self._pod_index.join())
        self._clock.call_after(HEARTBEAT_S, self._beat)

    def _beat(self) -> None:
        self._valkey.wait(self._pod_index.beat())
        self._clock.call_after(HEARTBEAT_S, self._beat)

    def _flush(self) -> None:
        self._flushing = False
        self._valkey.wait(self._pod_index.flush())


class ValkeyReader(SimReader):
    def __init__(self, index: ValkeyIndex) -> None:
        super().__init__(index)
        self._valkey = index
        self._reader = IndexReader(index.url, timeout_s=5.0, clock=index.clock.time)
        index.opened.append(self._reader)

    def lookup(self, chain: Sequence[bytes], pods: Sequence[tuple[str, int]]) -> dict[str, int]:
        self._valkey.wait(self._reader.pods())  # slots of pods that have registered since the last call
        return self._valkey.wait(self._reader.lookup(self._valkey.scope, chain, pods))

    def reserve(self, request_id: str, candidates: Sequence[BookingCandidate]) -> BookingResult:
        reserved = self._valkey.bookings.reserve(request_id, candidates)
        self._valkey.wait(self._reader.book(self._valkey.scope, request_id, [[candidates[reserved.chosen]]]))
        return reserved

    def unbook(self, pod: str, request_id: str) -> None:
        self._valkey.bookings.unbook(pod, request_id)
        self._valkey.wait(self._reader.unbook(self._valkey.scope, pod, request_id))


@pytest.mark.parametrize("policy", ["cost", "least_loaded"])
def test_a_run_with_valkey_equals_a_run_with_the_models(url: str, policy: str) -> None:
    trace = AgentWorkload(rate=5.0, seconds=40.0, tenants=6).trace()
    spec = ClusterSpec(rates=FLAT_8K, prefill=4, policy=policy, prefill_blocks=120)
    with asyncio.Runner() as runner:
        index = ValkeyIndex(VirtualClock(), url, runner)
        try:
            real = SimulatedCluster(spec, trace, index).run()
        finally:
            runner.run(index.close())
    modelled = SimulatedCluster(spec, trace).run()
    assert sum(o.hit_tokens for o in modelled.outcomes) > 0
    assert real.outcomes == modelled.outcomes
    assert repr(replace(real.summary, cpu_s=0.0)) == repr(replace(modelled.summary, cpu_s=0.0))
