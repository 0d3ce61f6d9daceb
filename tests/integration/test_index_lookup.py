"""The prefix index against a real Valkey in cluster mode: look-ups and bookings."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from common.types import Role
from prefix_index import publisher, reader
from prefix_index.reader import IndexReader
from prefix_index.store import BookingCandidate, BookingResult, CacheTier, IndexKeys, PrefixHits
from tests.rigs.engine.comparisons import shared
from tests.rigs.index.index_rig import RECORD, SCOPE, Rig, book, chain
from tests.rigs.waiting import until

pytestmark = pytest.mark.usefixtures("quick_index")


async def test_lookup_finds_the_longest_prefix_of_every_length(rig: Rig) -> None:
    blocks = chain(11, 33)
    names = [(f"p{n}", 5) for n in range(34)]
    keys = IndexKeys(SCOPE)
    async with rig.raw.pipeline(transaction=False) as pipe:
        for n, (pod, generation) in enumerate(names):
            pipe.set(keys.lease(pod), generation)
            if n:
                pipe.sadd(keys.held_blocks(pod, generation), *(h[:8] for h in blocks[:n]))
        await pipe.execute()
    for length in (1, 2, 7, 16, 32, 33):
        for first in (0, 16, 18):
            found = await rig.reader.lookup(SCOPE, blocks[:length], names[first : first + 16])
            assert found == {f"p{n}": min(n, length) for n in range(first, first + 16)}
    found = await rig.reader.lookup(SCOPE, blocks, [("p9", 5), ("p9x", 5), ("p10", 4)])
    assert found == {"p9": 9, "p9x": 0, "p10": 0}
    assert await rig.reader.lookup(SCOPE, [], names[:1]) == {"p0": 0}
    assert await rig.reader.lookup(SCOPE, blocks, []) == {}


async def test_with_many_pods_sampled_blocks_give_hits_and_the_best_are_exact(rig: Rig) -> None:
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
                truth = {pod: shared(blocks, branch) for pod, blocks in held.items()}
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
        pool.index.stored(blocks[20:40], CacheTier.HOST)
        pool.index.stored(other, CacheTier.HOST)
        pool.evict(blocks[30:])

        async def moved() -> bool:
            return (await rig.fresh().lookup_tiers(SCOPE, blocks, names))["decode-0"] == PrefixHits(30, 40)

        await until(moved)
        assert (await rig.fresh().lookup_tiers(SCOPE, other, names))["decode-0"] == PrefixHits(0, 10)
        assert await rig.postings() == {h[:8] for h in [*blocks[:40], *other] if h[0] % 8 == 0}
        pool.index.evicted([*blocks[20:40], *other], CacheTier.HOST)

        async def gone() -> bool:
            return (await rig.fresh().lookup_tiers(SCOPE, blocks, names))["decode-0"] == PrefixHits(30, 30)

        await until(gone)
        assert await rig.postings() == {h[:8] for h in blocks[:30] if h[0] % 8 == 0}


async def test_blocks_that_only_the_disk_has_are_told_apart(rig: Rig) -> None:
    blocks, other = chain(64, 50), chain(65, 10)
    names = [("decode-0", 1_000)]
    async with rig.pod(hashes=blocks[:20]) as pool:
        assert pool.index is not None
        pool.index.stored(blocks[20:30], CacheTier.HOST)
        pool.index.stored([*blocks[:45], *other], CacheTier.DISK)

        async def found() -> bool:
            return (await rig.fresh().lookup_tiers(SCOPE, blocks, names))["decode-0"] == PrefixHits(20, 45, 15)

        await until(found)
        assert (await rig.fresh().lookup_tiers(SCOPE, other, names))["decode-0"] == PrefixHits(0, 10, 10)
        pool.index.evicted([*blocks[40:45], *other], CacheTier.DISK)

        async def fewer() -> bool:
            return (await rig.fresh().lookup_tiers(SCOPE, blocks, names))["decode-0"] == PrefixHits(20, 40, 10)

        await until(fewer)
        assert await rig.postings() == {h[:8] for h in blocks[:40] if h[0] % 8 == 0}


async def test_postings_follow_snapshots_and_the_slots_of_dead_pods_are_swept(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "SWEEP_S", 0)
    monkeypatch.setattr(publisher, "SWEEP_POSTINGS", 10)
    blocks, others = chain(62, 200), chain(63, 900)
    async with rig.pod(hashes=blocks) as pool:
        gone = replace(RECORD, pod="decode-1")
        async with rig.pod(gone, [*others, *blocks[:100]]):
            assert len(await rig.postings()) > 100
        with pool.lock:  # what is not told becomes known by a snapshot
            pool.hashes = set(blocks[50:150])
        assert pool.index is not None
        await rig.raw.srem(IndexKeys(SCOPE).held_blocks("decode-0", 1_000), blocks[3][:8])
        kept = {h[:8] for h in blocks[50:150] if h[0] % 8 == 0}

        async def swept() -> bool:
            return await rig.postings() == kept and await rig.raw.hget(IndexKeys(SCOPE).sweep, "pending") == b"0"

        await until(swept)
        assert {len(p) for p in (await rig.raw.hgetall(IndexKeys(SCOPE).postings)).values()} == {2}
        # One that was killed: its lease and its sets expire.
        slot = await rig.raw.hincrby(IndexKeys(SCOPE).sweep, "next", 0)
        await rig.raw.hset(IndexKeys(SCOPE).slots, slot + 2, "killed:7")
        await rig.raw.hset(IndexKeys(SCOPE).postings, b"12345678", (slot + 2).to_bytes(2, "little"))
        await until(swept)
        assert await rig.raw.hget(IndexKeys(SCOPE).slots, slot + 2) is None


async def test_answers_are_cached_until_a_booking(rig: Rig) -> None:
    blocks = chain(64, 10)
    one, two = ("decode-0", 1_000), ("decode-1", 1_000)
    reader = rig.fresh(lambda: 100.0)  # no answer becomes too old
    async with rig.pod(hashes=blocks[:4]) as pool, rig.pod(replace(RECORD, pod="decode-1"), blocks):
        assert await reader.lookup(SCOPE, blocks, [one, two]) == {"decode-0": 4, "decode-1": 10}
        pool.store(blocks[4:6])
        await rig.shows(set(blocks[:6]))
        assert await reader.lookup(SCOPE, blocks, [one]) == {"decode-0": 4}
        await book(reader, "decode-1", "r", 5)  # it holds everything already
        assert await reader.lookup(SCOPE, blocks, [one, two]) == {"decode-0": 4, "decode-1": 10}
        assert await reader.lookup(SCOPE, blocks[:9], [one]) == {"decode-0": 6}
        await book(reader, "decode-0", "r", 5)
        assert await reader.lookup(SCOPE, blocks, [two]) == {"decode-1": 10}
        assert await reader.lookup(SCOPE, blocks, [one]) == {"decode-0": 6}
        assert await reader.lookup(SCOPE, blocks, [("decode-0", 1_001)]) == {"decode-0": 0}


async def test_pods_of_all_scopes_are_read_without_broken_records(rig: Rig) -> None:
    other = replace(RECORD, pod="prefill-0", scope="ffffffff", fingerprint="f" * 32, role=Role.PREFILL, model="big")
    async with rig.pod(), rig.pod(other):
        broken = IndexKeys(SCOPE)
        await rig.raw.hset(broken.pods, "x", 1)
        await rig.raw.set(broken.lease("x"), 1)
        await rig.raw.hset("kv:scopes", "abandoned", "m")
        live = await rig.live()
        assert {name: s.record for name, s in live.items()} == {"decode-0": RECORD, "prefill-0": other}


async def test_a_reader_reads_the_record_of_a_pod_that_returns(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    other = replace(RECORD, pod="decode-1")
    async with rig.pod(), rig.pod(other):
        await rig.raw.delete(IndexKeys(SCOPE).lease("decode-1"))
        assert set(await rig.live()) == {"decode-0"}

        async def both() -> bool:
            return {name: s.record for name, s in (await rig.live()).items()} == {"decode-0": RECORD, "decode-1": other}

        await until(both)
        assert await both()
        await rig.raw.hset(IndexKeys(SCOPE).info("decode-1"), "role", "chef")
        await rig.raw.hincrby(IndexKeys(SCOPE).slots, "version", 1)
        for _ in range(3):
            assert set(await rig.live()) == {"decode-0"}
        assert caplog.text.count("unreadable") == 1


async def test_bookings_are_summed_shared_by_readers_and_end(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    second = IndexReader(rig.url, timeout_s=5.0)
    assert await book(rig.reader, "p", "a", 100) == 100
    assert await book(second, "p", "b", 50) == 150
    assert await book(second, "p", "b", 60) == 160
    await second.unbook(SCOPE, "p", "a")
    await second.unbook(SCOPE, "p", "never")
    assert await book(rig.reader, "p", "b", 60) == 60
    monkeypatch.setattr(reader, "BOOKING_TTL_S", 0.05)
    await book(rig.reader, "p", "short", 1_000)
    monkeypatch.undo()

    async def expired() -> bool:
        return await book(rig.reader, "p", "c", 1) == 61

    await until(expired)
    assert await rig.raw.hlen(IndexKeys(SCOPE).booking_units("p")) == 2
    await second.close()


async def test_a_burst_over_two_gateways_sees_every_booking_once(rig: Rig) -> None:
    second = IndexReader(rig.url, timeout_s=5.0)
    readers = (rig.reader, second)
    totals = await asyncio.gather(*(book(readers[i % 2], "p", f"r{i}", 10) for i in range(40)))
    assert sorted(totals) == [10 * (i + 1) for i in range(40)]
    await second.close()


async def test_the_cheapest_of_each_group_is_booked_and_bookings_before_a_pods_report_do_not_count(
    rig: Rig,
) -> None:
    def group(age_s: float, **costs: float) -> list[BookingCandidate]:
        return [BookingCandidate(pod, cost, 0.001, 100, age_s) for pod, cost in costs.items()]

    async def reserve(request: str, *groups: list[BookingCandidate]) -> list[BookingResult]:
        return await rig.reader.book(SCOPE, request, groups)

    assert await reserve("a", group(60, p=0.2, q=0.25), group(60, d=1.0)) == [
        BookingResult(0, (0, 0)),
        BookingResult(0, (0,)),
    ]
    assert await reserve("b", group(60, p=0.2, q=0.25)) == [BookingResult(1, (100, 0))]
    assert await reserve("c", group(60, p=0.2, q=0.25), group(60, d=1.0, e=1.05)) == [
        BookingResult(0, (100, 100)),
        BookingResult(1, (100, 0)),
    ]
    await asyncio.sleep(0.05)
    assert await reserve("d", group(0.04, p=0.2, q=0.25)) == [BookingResult(0, (0, 0))]
    assert await reserve("d", group(60, p=0.2, q=0.25)) == [BookingResult(1, (200, 100))]
