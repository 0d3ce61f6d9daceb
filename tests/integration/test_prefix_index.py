"""The prefix index against a real Valkey in cluster mode (one node): a script that left its slot would fail."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from common import index_pod, index_reader
from common.block_hash import block_hashes
from common.breaker import Breaker
from common.errors import BatonError, IndexUnavailable, error_class
from common.index_store import Keys, Script, connect, pack
from common.prefix_index import (
    Candidate,
    Held,
    IndexReader,
    PodIndex,
    PodLoad,
    PodRecord,
    PodStatus,
    Reserved,
    Tier,
    mint_generation,
)
from common.types import Role
from common.valkey import EmbeddedValkey

SCOPE = "00112233"
FINGERPRINT = SCOPE * 4
RECORD = PodRecord("decode-0", 1_000, "127.0.0.1:5", Role.DECODE, "smol", SCOPE, FINGERPRINT, 16, 2048, 99)


def chain(seed: int, length: int) -> list[bytes]:
    rng = random.Random(seed)
    tokens = [rng.randrange(50_000) for _ in range(16 * length)]
    return block_hashes(tokens, fingerprint=FINGERPRINT, block_size=16)


def common(a: list[bytes], b: list[bytes]) -> int:
    """Blocks that two chains share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class FakePool:
    """What a block pool tells its index, with a lock like the real one's."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.hashes: set[bytes] = set()
        self.index: PodIndex | None = None

    def store(self, hashes: list[bytes]) -> None:
        with self.lock:
            self.hashes.update(hashes)
            if self.index is not None:
                self.index.stored(hashes)

    def evict(self, hashes: list[bytes]) -> None:
        with self.lock:
            self.hashes.difference_update(hashes)
            if self.index is not None:
                self.index.evicted(hashes)

    def snapshot(self) -> list[bytes]:
        with self.lock:
            return list(self.hashes)


class Rig:
    """One Valkey, a raw client, a reader; pods on demand."""

    def __init__(self, valkey: EmbeddedValkey, url: str) -> None:
        self.valkey = valkey
        self.url = url
        self.raw: Any = connect(url, timeout_s=5.0)
        self._readers = [IndexReader(url, timeout_s=2.0)]
        self.reader = self._readers[0]

    async def __aenter__(self) -> Rig:
        await self.wipe()
        return self

    async def __aexit__(self, *_: object) -> None:
        for reader in self._readers:
            await reader.close()
        await self.raw.aclose()

    @asynccontextmanager
    async def pod(
        self, record: PodRecord = RECORD, hashes: list[bytes] | None = None, load: PodLoad | None = None
    ) -> AsyncIterator[FakePool]:
        pool = FakePool()
        pool.store(hashes or [])
        pool.index = PodIndex(self.url, record, pool.snapshot, lambda: load or PodLoad(free_blocks=7))
        await pool.index.start()
        try:
            await until(lambda: pool.index is not None and pool.index.connected)
            yield pool
        finally:
            await pool.index.stop()

    async def members(self, record: PodRecord = RECORD) -> set[bytes]:
        found: set[bytes] = await self.raw.smembers(Keys(record.scope).own(record.pod, record.generation))
        return found

    async def shows(self, hashes: set[bytes], record: PodRecord = RECORD) -> None:
        """Waits until the pod's set is exactly these hashes."""
        want = {h[:8] for h in hashes}

        async def same() -> bool:
            return await self.members(record) == want

        await until(same)

    def fresh(self) -> IndexReader:
        """A reader that remembers no answer."""
        self._readers.append(IndexReader(self.url, timeout_s=2.0))
        return self._readers[-1]

    async def postings(self, scope: str = SCOPE) -> set[bytes]:
        return set(await self.raw.hkeys(Keys(scope).where))

    async def live(self) -> dict[str, PodStatus]:
        return {s.record.pod: s for s in await self.reader.pods()}

    async def wipe(self) -> None:
        await self.raw.flushall()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        assert self.valkey.pid is not None
        os.kill(self.valkey.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.valkey.pid, signal.SIGCONT)


async def until(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        answer = condition()
        if answer if isinstance(answer, bool) else await answer:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("did not happen in time")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[EmbeddedValkey, str]]:
    with socket.socket() as bus:
        bus.bind(("127.0.0.1", 0))
        bus_port = bus.getsockname()[1]
    arguments = ["--cluster-enabled", "yes", "--cluster-port", str(bus_port)]
    valkey = EmbeddedValkey(0, tmp_path_factory.mktemp("valkey"), arguments)
    url = await valkey.start()
    async with connect(url, timeout_s=5.0) as client:
        await client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        await until(lambda: _cluster_ok(client))
    yield valkey, url
    await valkey.stop()


@pytest_asyncio.fixture
async def rig(cluster: tuple[EmbeddedValkey, str]) -> AsyncIterator[Rig]:
    async with Rig(*cluster) as rig:
        yield rig


async def _cluster_ok(raw: Any) -> bool:
    info = await raw.execute_command("CLUSTER", "INFO")
    return "cluster_state:ok" in str(info)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_pod, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(index_pod, "_MAX_BACKOFF_S", 0.2)


# ---- pods and their sets


async def test_a_pod_is_seen_with_its_record_load_and_blocks_and_leaves_without_a_trace(rig: Rig) -> None:
    blocks = chain(1, 40)
    load = PodLoad(queued_tokens=12, running=3, waiting=1, free_blocks=50, draining=True)
    async with rig.pod(hashes=blocks, load=load):
        status = (await rig.live())["decode-0"]
        assert (status.record, status.load, status.draining) == (RECORD, load, True)
        assert await rig.reader.lookup(SCOPE, blocks, [("decode-0", 1_000)]) == {"decode-0": 40}
        await book(rig.reader, "decode-0", "r", 5)
    assert await rig.live() == {}
    readers = Keys(SCOPE).gateways.encode()  # whoever asked for pods
    assert [k for k in await rig.raw.keys("*") if b"gen:" not in k and k != readers] == []


async def test_changes_follow_and_cancel_out(rig: Rig) -> None:
    blocks = chain(2, 30)
    async with rig.pod() as pool:
        pool.store(blocks)
        await rig.shows(set(blocks))
        pool.evict(blocks[20:])
        pool.store(blocks[25:])
        pool.evict(blocks[29:])
        pool.store(chain(3, 4))
        pool.evict(chain(3, 4))
        await rig.shows({*blocks[:20], *blocks[25:29]})


async def test_stores_and_evictions_from_an_engine_thread_converge(rig: Rig) -> None:
    rng = random.Random(5)
    universe = [h for i in range(20) for h in chain(100 + i, 25)]

    def engine(pool: FakePool) -> None:
        for _ in range(400):
            some = rng.sample(universe, 20)
            pool.store([h for h in some[:12] if h not in pool.hashes])
            pool.evict([h for h in some[12:] if h in pool.hashes])
            if rng.random() < 0.05:
                time.sleep(0.01)

    async with rig.pod() as pool:
        await asyncio.to_thread(engine, pool)
        await rig.shows(pool.hashes)


async def test_more_changes_than_are_kept_become_a_snapshot(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_pod, "MAX_PENDING", 50)
    monkeypatch.setattr(index_pod, "SLICE", 30)
    blocks = chain(4, 120)
    async with rig.pod() as pool:
        pool.store(blocks)
        pool.evict(blocks[100:])
        await rig.shows(set(blocks[:100]))
        pool.evict(blocks[:90])
        await rig.shows(set(blocks[90:100]))


async def test_a_large_set_travels_in_slices(rig: Rig) -> None:
    many = [os.urandom(16) for _ in range(23_456)]
    async with rig.pod(hashes=many) as pool:
        await rig.shows(set(many))
        pool.evict(many[:12_000])
        await rig.shows(set(many[12_000:]))
        assert await rig.raw.keys("*own:*:*:*") == []


async def test_a_set_that_differs_is_replaced(rig: Rig) -> None:
    blocks = chain(6, 10)
    async with rig.pod(hashes=blocks):
        await rig.raw.srem(Keys(SCOPE).own("decode-0", 1_000), blocks[3][:8])
        await rig.shows(set(blocks))


async def test_keys_of_a_killed_pod_expire(rig: Rig) -> None:
    async with rig.pod(hashes=chain(7, 5)):
        await book(rig.reader, "decode-0", "r", 5)
        lasting = {b"kv:scopes"}
        ttls = {k: await rig.raw.pttl(k) for k in await rig.raw.keys("*") if k not in lasting}
    assert {k: t for k, t in ttls.items() if t <= 0} == {}
    assert ttls[Keys(SCOPE).lease("decode-0").encode()] <= 10_000
    assert ttls[Keys(SCOPE).own("decode-0", 1_000).encode()] <= 60_000


# ---- generations, duplicates, gaps, zombies


async def test_a_restarted_pod_replaces_its_entries_and_the_old_process_is_fenced(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    old_blocks, new_blocks = chain(8, 10), chain(9, 10)
    young = replace(RECORD, generation=2_000, address="127.0.0.1:6")
    async with rig.pod(hashes=old_blocks) as old_pool:
        await book(rig.reader, "decode-0", "r", 5)
        async with rig.pod(young, new_blocks):
            old_pool.store(chain(10, 5))
            await until(lambda: old_pool.index is not None and not old_pool.index.connected)
            status = (await rig.live())["decode-0"]
            assert status.record == young
            assert await book(rig.reader, "decode-0", "new", 5) == 5
            assert "decode-0 at 127.0.0.1:5 was replaced by 127.0.0.1:6" in caplog.text
            assert await rig.members(RECORD) == set()
            both = [("decode-0", 1_000)]
            assert await rig.reader.lookup(SCOPE, old_blocks, both) == {"decode-0": 0}
            assert old_pool.index is not None
            await old_pool.index.stop()
            assert (await rig.live())["decode-0"].record == young
            assert await rig.members(young) == {h[:8] for h in new_blocks}


async def test_duplicates_gaps_and_zombies_are_refused(rig: Rig) -> None:
    keys, apply = Keys(SCOPE), Script("postings", "apply")
    names = (keys.lease("p"), keys.seq("p", 7), keys.own("p", 7), keys.own("p", 7, Tier.HOST), keys.where, keys.slots)
    a, b, c = (os.urandom(8) for _ in range(3))

    async def send(generation: int, number: int, stored: bytes = b"", evicted: bytes = b"") -> Any:
        args = (generation, number, 60, b"\x05\x00", 1, stored, evicted, b"", b"")
        return await apply.run(rig.raw, names, args)

    assert await send(7, 1, a) == b"fenced"
    await rig.raw.set(names[0], 7)
    assert await send(7, 1, a) == b"gap"
    await rig.raw.set(names[1], 4)
    assert await send(7, 5, a + b) == b"ok"
    assert await send(7, 5, c, a) == b"duplicate"
    assert await send(7, 3, c) == b"duplicate"
    assert await send(7, 7, c) == b"gap"
    assert await send(6, 6, c) == b"fenced"
    assert await rig.raw.smembers(names[2]) == {a, b}
    assert await send(7, 6, c, a) == b"ok"
    assert await rig.raw.smembers(names[2]) == {b, c}
    assert await rig.raw.hgetall(names[4]) == {b: b"\x05\x00", c: b"\x05\x00"}


async def test_generations_only_grow(rig: Rig) -> None:
    before = int(time.time() * 1000)
    minted = await asyncio.gather(*(mint_generation(rig.url, SCOPE, "p") for _ in range(5)))
    assert len(set(minted)) == 5
    assert min(minted) >= before
    future = max(minted) + 10**7
    await rig.raw.hset(Keys(SCOPE).pods, "p", future)
    assert await mint_generation(rig.url, SCOPE, "p") == future + 1


async def test_a_generation_is_minted_without_redis_too(rig: Rig) -> None:
    before = int(time.time() * 1000)
    assert await mint_generation(None, SCOPE, "p") >= before
    assert await mint_generation("redis://127.0.0.1:1/0", SCOPE, "p") >= before
    with rig.frozen():
        start = time.monotonic()
        assert await mint_generation(rig.url, SCOPE, "p") >= before
        assert time.monotonic() - start < 5


# ---- look-up


async def test_lookup_finds_the_longest_prefix_of_every_length(rig: Rig) -> None:
    blocks = chain(11, 33)
    names = [(f"p{n}", 5) for n in range(34)]
    keys = Keys(SCOPE)
    async with rig.raw.pipeline(transaction=False) as pipe:
        for n, (pod, generation) in enumerate(names):
            pipe.set(keys.lease(pod), generation)
            if n:
                pipe.sadd(keys.own(pod, generation), *(h[:8] for h in blocks[:n]))
        await pipe.execute()
    for length in (1, 2, 7, 16, 32, 33):
        for first in (0, 16, 18):
            found = await rig.reader.lookup(SCOPE, blocks[:length], names[first : first + 16])
            assert found == {f"p{n}": min(n, length) for n in range(first, first + 16)}
    found = await rig.reader.lookup(SCOPE, blocks, [("p9", 5), ("p9x", 5), ("p10", 4)])
    assert found == {"p9": 9, "p9x": 0, "p10": 0}
    assert await rig.reader.lookup(SCOPE, [], names[:1]) == {"p0": 0}
    assert await rig.reader.lookup(SCOPE, blocks, []) == {}


async def test_many_pods_are_found_by_sampled_blocks_and_the_best_are_exact(rig: Rig) -> None:
    rng = random.Random(3)
    trunk = chain(40, 120)
    branches = {n: trunk[: 40 + 10 * n] + chain(50 + n, 60) for n in range(8)}
    for every, block_size in ((8, 16), (1, 128)):
        scope = f"{every:08x}"
        held: dict[str, list[bytes]] = {}
        async with AsyncExitStack() as stack:
            for i in range(40):
                branch = branches[rng.randrange(8)]
                held[f"p{i}"] = branch[: rng.choice((0, 3, 40, 90, len(branch), rng.randrange(len(branch))))]
                record = replace(RECORD, pod=f"p{i}", scope=scope, block_size=block_size)
                await stack.enter_async_context(rig.pod(record, held[f"p{i}"]))
            names = [(pod, 1_000) for pod in held]
            for branch in (*branches.values(), chain(99, 30)):
                truth = {pod: common(blocks, branch) for pod, blocks in held.items()}
                found = await rig.reader.lookup(scope, branch, names)
                for pod, blocks in truth.items():
                    least = max((n for n in range(1, blocks + 1) if branch[n - 1][0] % every == 0), default=0)
                    assert least <= found[pod] <= blocks
                assert every > 1 or found == truth
                best = max(truth.values())
                level = max((n for n in range(1, best + 1) if branch[n - 1][0] % every == 0), default=0)
                if level and sum(blocks >= level for blocks in truth.values()) <= 16:
                    assert {p for p, n in found.items() if n == best} == {p for p, n in truth.items() if n == best}
            stranger = await rig.reader.lookup(scope, branches[7], [*names, ("p41", 1_000), ("p1", 999)])
            assert stranger["p41"] == 0


async def test_a_pod_that_moved_blocks_to_its_host_tier_still_holds_them(rig: Rig) -> None:
    blocks, other = chain(60, 50), chain(61, 10)
    names = [("decode-0", 1_000)]
    async with rig.pod(hashes=blocks) as pool:
        assert pool.index is not None
        pool.index.stored(blocks[20:40], Tier.HOST)
        pool.index.stored(other, Tier.HOST)
        pool.evict(blocks[30:])

        async def moved() -> bool:
            return (await rig.fresh().lookup_tiers(SCOPE, blocks, names))["decode-0"] == Held(30, 40)

        await until(moved)
        assert (await rig.fresh().lookup_tiers(SCOPE, other, names))["decode-0"] == Held(0, 10)
        assert await rig.postings() == {h[:8] for h in [*blocks[:40], *other] if h[0] % 8 == 0}
        pool.index.evicted([*blocks[20:40], *other], Tier.HOST)

        async def gone() -> bool:
            return (await rig.fresh().lookup_tiers(SCOPE, blocks, names))["decode-0"] == Held(30, 30)

        await until(gone)
        assert await rig.postings() == {h[:8] for h in blocks[:30] if h[0] % 8 == 0}


async def test_postings_follow_snapshots_and_the_slots_of_gone_pods_are_swept(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_pod, "SWEEP_S", 0)
    monkeypatch.setattr(index_pod, "SWEEP_POSTINGS", 10)
    blocks, others = chain(62, 200), chain(63, 900)
    async with rig.pod(hashes=blocks) as pool:
        gone = replace(RECORD, pod="decode-1")
        async with rig.pod(gone, [*others, *blocks[:100]]):
            assert len(await rig.postings()) > 100
        with pool.lock:  # what is not told becomes known by a snapshot
            pool.hashes = set(blocks[50:150])
        assert pool.index is not None
        await rig.raw.srem(Keys(SCOPE).own("decode-0", 1_000), blocks[3][:8])
        kept = {h[:8] for h in blocks[50:150] if h[0] % 8 == 0}

        async def swept() -> bool:
            return await rig.postings() == kept and await rig.raw.hget(Keys(SCOPE).sweep, "pending") == b"0"

        await until(swept)
        assert {len(p) for p in (await rig.raw.hgetall(Keys(SCOPE).where)).values()} == {2}
        # One that was killed: its lease and its sets expire.
        slot = await rig.raw.hincrby(Keys(SCOPE).sweep, "next", 0)
        await rig.raw.hset(Keys(SCOPE).slots, slot + 2, "killed:7")
        await rig.raw.hset(Keys(SCOPE).where, b"12345678", (slot + 2).to_bytes(2, "little"))
        await until(swept)
        assert await rig.raw.hget(Keys(SCOPE).slots, slot + 2) is None


async def test_answers_are_kept_for_a_moment_unless_something_is_booked(rig: Rig) -> None:
    blocks = chain(64, 10)
    one, two = ("decode-0", 1_000), ("decode-1", 1_000)
    async with rig.pod(hashes=blocks[:4]) as pool, rig.pod(replace(RECORD, pod="decode-1"), blocks):
        assert await rig.reader.lookup(SCOPE, blocks, [one, two]) == {"decode-0": 4, "decode-1": 10}
        pool.store(blocks[4:6])
        await rig.shows(set(blocks[:6]))
        assert await rig.reader.lookup(SCOPE, blocks, [one]) == {"decode-0": 4}
        await book(rig.reader, "decode-1", "r", 5)  # it holds everything already
        assert await rig.reader.lookup(SCOPE, blocks, [one, two]) == {"decode-0": 4, "decode-1": 10}
        assert await rig.reader.lookup(SCOPE, blocks[:9], [one]) == {"decode-0": 6}
        await book(rig.reader, "decode-0", "r", 5)
        assert await rig.reader.lookup(SCOPE, blocks, [two]) == {"decode-1": 10}
        assert await rig.reader.lookup(SCOPE, blocks, [one]) == {"decode-0": 6}
        assert await rig.reader.lookup(SCOPE, blocks, [("decode-0", 1_001)]) == {"decode-0": 0}


async def test_pods_of_all_scopes_are_read_and_broken_records_left_out(rig: Rig) -> None:
    other = replace(RECORD, pod="prefill-0", scope="ffffffff", fingerprint="f" * 32, role=Role.PREFILL, model="big")
    async with rig.pod(), rig.pod(other):
        broken = Keys(SCOPE)
        await rig.raw.hset(broken.pods, "x", 1)
        await rig.raw.set(broken.lease("x"), 1)
        await rig.raw.hset("kv:scopes", "abandoned", "m")
        live = await rig.live()
        assert {name: s.record for name, s in live.items()} == {"decode-0": RECORD, "prefill-0": other}


async def test_a_reader_that_missed_a_pod_learns_who_it_is_when_it_is_back(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    other = replace(RECORD, pod="decode-1")
    async with rig.pod(), rig.pod(other):
        await rig.raw.delete(Keys(SCOPE).lease("decode-1"))
        assert set(await rig.live()) == {"decode-0"}

        async def both() -> bool:
            return {name: s.record for name, s in (await rig.live()).items()} == {"decode-0": RECORD, "decode-1": other}

        await until(both)
        assert await both()
        await rig.raw.hset(Keys(SCOPE).info("decode-1"), "role", "chef")
        await rig.raw.hincrby(Keys(SCOPE).slots, "version", 1)
        for _ in range(3):
            assert set(await rig.live()) == {"decode-0"}
        assert caplog.text.count("unreadable") == 1


# ---- bookings


async def book(reader: IndexReader, pod: str, request: str, tokens: int) -> int:
    """Tokens booked on the pod, these included."""
    (answer,) = await reader.reserve(SCOPE, request, [[Candidate(pod, 0.0, 1.0, tokens, 60.0)]])
    return answer.booked[0] + tokens


async def test_bookings_add_up_are_shared_and_end(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    second = IndexReader(rig.url, timeout_s=2.0)
    assert await book(rig.reader, "p", "a", 100) == 100
    assert await book(second, "p", "b", 50) == 150
    assert await book(second, "p", "b", 60) == 160
    await second.unbook(SCOPE, "p", "a")
    await second.unbook(SCOPE, "p", "never")
    assert await book(rig.reader, "p", "b", 60) == 60
    monkeypatch.setattr(index_reader, "BOOKING_S", 0.05)
    await book(rig.reader, "p", "short", 1_000)
    monkeypatch.undo()

    async def expired() -> bool:
        return await book(rig.reader, "p", "c", 1) == 61

    await until(expired)
    assert await rig.raw.hlen(Keys(SCOPE).resv_tokens("p")) == 2
    await second.close()


async def test_a_burst_over_two_gateways_sees_every_booking_once(rig: Rig) -> None:
    second = IndexReader(rig.url, timeout_s=5.0)
    readers = (rig.reader, second)
    totals = await asyncio.gather(*(book(readers[i % 2], "p", f"r{i}", 10) for i in range(40)))
    assert sorted(totals) == [10 * (i + 1) for i in range(40)]
    await second.close()


async def test_the_cheapest_of_each_group_is_booked_and_what_is_older_than_a_pods_report_does_not_count(
    rig: Rig,
) -> None:
    def group(age_s: float, **costs: float) -> list[Candidate]:
        return [Candidate(pod, cost, 0.001, 100, age_s) for pod, cost in costs.items()]

    async def reserve(request: str, *groups: list[Candidate]) -> list[Reserved]:
        return await rig.reader.reserve(SCOPE, request, groups)

    assert await reserve("a", group(60, p=0.2, q=0.25), group(60, d=1.0)) == [Reserved(0, (0, 0)), Reserved(0, (0,))]
    assert await reserve("b", group(60, p=0.2, q=0.25)) == [Reserved(1, (100, 0))]
    assert await reserve("c", group(60, p=0.2, q=0.25), group(60, d=1.0, e=1.05)) == [
        Reserved(0, (100, 100)),
        Reserved(1, (100, 0)),
    ]
    await asyncio.sleep(0.05)
    assert await reserve("d", group(0.04, p=0.2, q=0.25)) == [Reserved(0, (0, 0))]
    assert await reserve("d", group(60, p=0.2, q=0.25)) == [Reserved(1, (200, 100))]


# ---- Redis away


async def test_pods_return_after_a_wipe_and_a_freeze(rig: Rig) -> None:
    blocks = chain(12, 20)
    async with rig.pod(hashes=blocks[:10]) as pool:
        await rig.wipe()
        pool.store(blocks[10:15])
        await rig.shows(set(blocks[:15]))
        with rig.frozen():
            pool.store(blocks[15:])
            pool.evict(blocks[19:])
            await asyncio.sleep(1.5)
        await rig.shows(set(blocks[:19]))


async def test_pods_return_after_the_server_was_replaced(tmp_path: Path) -> None:
    blocks = chain(20, 10)
    first = EmbeddedValkey(0, tmp_path / "first")
    url = await first.start()
    second = EmbeddedValkey(int(url.split(":")[-1].split("/")[0]), tmp_path / "second")
    async with Rig(first, url) as rig, rig.pod(hashes=blocks) as pool:
        assert pool.index is not None
        index = pool.index
        await first.stop()
        pool.evict(blocks[8:])
        await until(lambda: not index.connected)
        await second.start()
        await rig.shows(set(blocks[:8]))
        assert set(await rig.live()) == {"decode-0"}
    await second.stop()


async def test_a_pod_lives_without_redis_and_stops_in_time() -> None:
    pool = FakePool()
    pool.index = PodIndex("redis://127.0.0.1:1/0", RECORD, pool.snapshot, PodLoad)
    await pool.index.start()
    pool.store(chain(13, 10))
    await asyncio.sleep(0.3)
    assert not pool.index.connected
    await asyncio.wait_for(pool.index.stop(), 10)
    pool.store(chain(14, 10))
    nothing = PodIndex(None, RECORD, pool.snapshot, PodLoad)
    await nothing.start()
    nothing.stored(chain(15, 3))
    await nothing.stop()


async def test_a_callback_that_fails_does_not_end_publishing(rig: Rig) -> None:
    failures = 2

    def snapshot() -> list[bytes]:
        nonlocal failures
        if failures:
            failures -= 1
            raise KeyError("not now")
        return chain(16, 3)

    index = PodIndex(rig.url, RECORD, snapshot, PodLoad)
    await index.start()
    await rig.shows(set(chain(16, 3)))
    await index.stop()


async def test_a_dead_index_costs_a_few_timeouts_then_nothing_and_is_tried_again(rig: Rig) -> None:
    now = 100.0
    reader = IndexReader(rig.url, timeout_s=0.4, breaker=Breaker(clock=lambda: now))
    await reader.pods()
    with rig.frozen():
        for _ in range(3):
            assert reader.available
            with pytest.raises(IndexUnavailable, match="does not answer"):
                await reader.lookup(SCOPE, chain(17, 3), [("p", 1)])
        assert not reader.available
        with pytest.raises(IndexUnavailable, match="is away"):
            await book(reader, "p", "r", 1)
        now += 1.0
        with pytest.raises(IndexUnavailable, match="does not answer"):
            await reader.unbook(SCOPE, "p", "r")
        with pytest.raises(IndexUnavailable, match="is away"):
            await reader.pods()
    now += 1.0
    await reader.pods()
    assert reader.available
    assert await reader.lookup(SCOPE, chain(17, 3), [("p", 1)]) == {"p": 0}
    await reader.close()


async def test_without_a_url_the_index_is_unavailable() -> None:
    reader = IndexReader(None)
    assert not reader.available
    with pytest.raises(IndexUnavailable):
        await reader.pods()
    await reader.close()
    assert issubclass(IndexUnavailable, BatonError)
    assert error_class("IndexUnavailable") is IndexUnavailable


async def test_the_server_forgetting_its_scripts_is_no_matter(rig: Rig) -> None:
    async with rig.pod(hashes=chain(18, 4)):
        await rig.live()
        await rig.raw.script_flush()
        assert set(await rig.live()) == {"decode-0"}
        await rig.raw.script_flush()
        assert await rig.reader.lookup(SCOPE, chain(18, 4), [("decode-0", 1_000)]) == {"decode-0": 4}


def test_a_chain_is_packed_by_its_first_eight_bytes() -> None:
    blocks = chain(19, 3)
    assert pack(blocks) == blocks[0][:8] + blocks[1][:8] + blocks[2][:8]
