"""The prefix index against a real Valkey in cluster mode: pods, their sets, generations, duplicates, gaps, zombies."""

from __future__ import annotations

import asyncio
import os
import random
import time
from dataclasses import replace
from typing import Any

import pytest

from common.redis.client import LuaScript
from common.types import PodLoad
from prefix_index import publisher
from prefix_index.publisher import mint_generation
from prefix_index.store import LUA_DIR, CacheTier, IndexKeys, pack_hashes
from tests.rigs.index.index_rig import RECORD, SCOPE, FakePool, Rig, book, chain
from tests.rigs.waiting import until

pytestmark = pytest.mark.usefixtures("quick_index")


async def test_a_pod_is_in_the_index_with_record_load_and_blocks_and_leaves_no_keys(rig: Rig) -> None:
    blocks = chain(1, 40)
    load = PodLoad(queued_tokens=12, running=3, waiting=1, free_blocks=50, draining=True)
    async with rig.pod(hashes=blocks, load=load):
        status = (await rig.live())["decode-0"]
        assert (status.record, status.load, status.draining) == (RECORD, load, True)
        assert await rig.reader.lookup(SCOPE, blocks, [("decode-0", 1_000)]) == {"decode-0": 40}
        await book(rig.reader, "decode-0", "r", 5)
    assert await rig.live() == {}
    readers = IndexKeys(SCOPE).gateways.encode()  # whoever asked for pods
    assert [k for k in await rig.raw.keys("*") if b"gen:" not in k and k != readers] == []


async def test_changes_are_published_and_opposite_ones_cancel_out(rig: Rig) -> None:
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


async def test_too_many_pending_changes_cause_a_snapshot(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "MAX_PENDING", 50)
    monkeypatch.setattr(publisher, "MAX_BATCH_BLOCKS", 30)
    blocks = chain(4, 120)
    async with rig.pod() as pool:
        pool.store(blocks)
        pool.evict(blocks[100:])
        await rig.shows(set(blocks[:100]))
        pool.evict(blocks[:90])
        await rig.shows(set(blocks[90:100]))


async def test_a_large_snapshot_is_sent_in_slices(rig: Rig) -> None:
    many = [os.urandom(16) for _ in range(23_456)]
    async with rig.pod(hashes=many) as pool:
        await rig.shows(set(many))
        pool.evict(many[:12_000])
        await rig.shows(set(many[12_000:]))
        assert await rig.raw.keys("*own:*:*:*") == []


async def test_a_set_of_another_size_is_replaced(rig: Rig) -> None:
    blocks = chain(6, 10)
    async with rig.pod(hashes=blocks):
        await rig.raw.srem(IndexKeys(SCOPE).held_blocks("decode-0", 1_000), blocks[3][:8])
        await rig.shows(set(blocks))


async def test_keys_of_a_killed_pod_expire(rig: Rig) -> None:
    async with rig.pod(hashes=chain(7, 5)):
        await book(rig.reader, "decode-0", "r", 5)
        lasting = {b"kv:scopes"}
        ttls = {k: await rig.raw.pttl(k) for k in await rig.raw.keys("*") if k not in lasting}
    assert {k: t for k, t in ttls.items() if t <= 0} == {}
    assert ttls[IndexKeys(SCOPE).lease("decode-0").encode()] <= 10_000
    assert ttls[IndexKeys(SCOPE).held_blocks("decode-0", 1_000).encode()] <= 60_000


async def test_a_restarted_pod_replaces_its_entries_and_the_old_process_is_fenced(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    old_blocks, new_blocks = chain(8, 10), chain(9, 10)
    young = replace(RECORD, generation=2_000, address="127.0.0.1:6")
    async with rig.pod(hashes=old_blocks) as old_pool:
        await book(rig.reader, "decode-0", "r", 5)
        async with rig.pod(young, new_blocks):
            old_pool.store(chain(10, 5))
            await until(lambda: old_pool.index is not None and not old_pool.index.registered)
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
    keys, apply = IndexKeys(SCOPE), LuaScript("postings", "apply", directory=LUA_DIR)
    names = (
        keys.lease("p"),
        keys.batch_number("p", 7),
        keys.held_blocks("p", 7),
        keys.held_blocks("p", 7, CacheTier.HOST),
        keys.held_blocks("p", 7, CacheTier.DISK),
        keys.postings,
        keys.slots,
    )
    a, b, c = (os.urandom(8) for _ in range(3))

    async def send(generation: int, number: int, stored: bytes = b"", evicted: bytes = b"") -> Any:
        args = (generation, number, 60, b"\x05\x00", 1, stored, evicted, b"", b"", b"", b"")
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
    assert await rig.raw.hgetall(names[5]) == {b: b"\x05\x00", c: b"\x05\x00"}


async def test_generations_only_grow(rig: Rig) -> None:
    before = int(time.time() * 1000)
    minted = await asyncio.gather(*(mint_generation(rig.url, SCOPE, "p") for _ in range(5)))
    assert len(set(minted)) == 5
    assert min(minted) >= before
    future = max(minted) + 10**7
    await rig.raw.hset(IndexKeys(SCOPE).pods, "p", future)
    assert await mint_generation(rig.url, SCOPE, "p") == future + 1


async def test_without_redis_a_generation_comes_from_the_clock(rig: Rig) -> None:
    before = int(time.time() * 1000)
    assert await mint_generation(None, SCOPE, "p") >= before
    assert await mint_generation("redis://127.0.0.1:1/0", SCOPE, "p") >= before
    with rig.frozen():
        async with asyncio.timeout(30):
            assert await mint_generation(rig.url, SCOPE, "p") >= before


def test_a_chain_is_packed_by_its_first_eight_bytes() -> None:
    blocks = chain(19, 3)
    assert pack_hashes(blocks) == blocks[0][:8] + blocks[1][:8] + blocks[2][:8]
