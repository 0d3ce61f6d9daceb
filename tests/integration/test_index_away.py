"""The prefix index while Redis is away, frozen, wiped or replaced, and afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cli.stack.valkey import EmbeddedValkey
from common.errors import BatonError, IndexUnavailable
from common.redis.client import CircuitBreaker
from common.types import PodLoad
from prefix_index.publisher import IndexPublisher
from prefix_index.reader import IndexReader
from tests.rigs.index.index_rig import RECORD, SCOPE, FakePool, Rig, book, chain
from tests.rigs.waiting import until

pytestmark = pytest.mark.usefixtures("quick_index")


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


async def test_pods_return_after_the_server_was_replaced(tmp_path: Path, unused_tcp_port: int) -> None:
    blocks = chain(20, 10)
    first = EmbeddedValkey(unused_tcp_port, tmp_path / "first", password="")
    url = await first.start()
    second = EmbeddedValkey(unused_tcp_port, tmp_path / "second", password="")
    async with Rig(first, url) as rig, rig.pod(hashes=blocks) as pool:
        assert pool.index is not None
        index = pool.index
        await first.stop()
        pool.evict(blocks[8:])
        await until(lambda: not index.registered)
        await second.start()
        await rig.shows(set(blocks[:8]))
        assert set(await rig.live()) == {"decode-0"}
    await second.stop()


async def test_a_pod_lives_without_redis_and_stops_in_time() -> None:
    pool = FakePool()
    pool.index = IndexPublisher("redis://127.0.0.1:1/0", RECORD, pool.snapshot, PodLoad)
    await pool.index.start()
    pool.store(chain(13, 10))
    await asyncio.sleep(0.3)
    assert not pool.index.registered
    await asyncio.wait_for(pool.index.stop(), 30)
    pool.store(chain(14, 10))
    nothing = IndexPublisher(None, RECORD, pool.snapshot, PodLoad)
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

    index = IndexPublisher(rig.url, RECORD, snapshot, PodLoad)
    await index.start()
    await rig.shows(set(chain(16, 3)))
    await index.stop()


async def test_a_dead_index_costs_a_few_timeouts_then_opens_the_breaker(rig: Rig) -> None:
    now = 100.0
    reader = IndexReader(rig.url, timeout_s=30.0, breaker=CircuitBreaker(clock=lambda: now))
    await reader.pods()
    with rig.frozen(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "_timeout_s", 0.8)
        for _ in range(3):
            assert reader.available
            with pytest.raises(IndexUnavailable, match="does not answer"):
                await reader.lookup(SCOPE, chain(17, 3), [("p", 1)])
        assert not reader.available
        with pytest.raises(IndexUnavailable, match="did not answer the last calls"):
            await book(reader, "p", "r", 1)
        now += 1.0
        with pytest.raises(IndexUnavailable, match="does not answer"):
            await reader.unbook(SCOPE, "p", "r")
        with pytest.raises(IndexUnavailable, match="did not answer the last calls"):
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
    assert BatonError.by_kind["IndexUnavailable"] is IndexUnavailable


async def test_scripts_are_loaded_again_after_the_server_forgot_them(rig: Rig) -> None:
    async with rig.pod(hashes=chain(18, 4)):
        await rig.live()
        await rig.raw.script_flush()
        assert set(await rig.live()) == {"decode-0"}
        await rig.raw.script_flush()
        assert await rig.reader.lookup(SCOPE, chain(18, 4), [("decode-0", 1_000)]) == {"decode-0": 4}
