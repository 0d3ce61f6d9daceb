"""A name belongs to one live pod. The name of a dead pod is free at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from cli.stack.valkey import EmbeddedValkey
from common.errors import ConfigError
from common.types import PodLoad, Role
from pod.index import require_free_name
from prefix_index.publisher import IndexPublisher
from prefix_index.store import PodRecord
from tests.rigs.pods.fake_pods import LAYOUT, FakePod, fake_cluster
from tests.rigs.waiting import until

NAME = "decode-0"


@pytest_asyncio.fixture
async def redis(tmp_path: Path) -> AsyncIterator[str]:
    valkey = EmbeddedValkey(0, tmp_path)
    yield await valkey.start()
    await valkey.stop()


@pytest_asyncio.fixture
async def pod() -> AsyncIterator[FakePod]:
    async with fake_cluster() as cluster:
        yield cluster.decodes[0]


@asynccontextmanager
async def leased(redis: str, pod: FakePod) -> AsyncIterator[PodRecord]:
    record = PodRecord(
        pod.name, pod.generation, pod.address, Role.DECODE, "m", LAYOUT.scope, LAYOUT.fingerprint, 16, 2048, 99
    )
    index = IndexPublisher(redis, record, list, PodLoad)
    await index.start()
    try:
        await until(lambda: index.registered)
        yield record
    finally:
        await index.stop()


async def test_a_living_pod_keeps_its_name_until_it_leaves(redis: str, pod: FakePod) -> None:
    async with leased(redis, pod) as record:
        with pytest.raises(ConfigError, match=f"^name: {NAME} is held by {record.address}; give --name$") as error:
            await require_free_name(redis, record.scope, NAME, "127.0.0.1:0")
        assert error.value.field == "name"
        await require_free_name(redis, record.scope, "another", "127.0.0.1:0")
        await require_free_name(redis, "another", NAME, "127.0.0.1:0")
    await require_free_name(redis, record.scope, NAME, "127.0.0.1:0")


@pytest.mark.parametrize("case", ["dead", "dead, same address", "another generation", "another name"])
async def test_the_lease_of_a_dead_pod_is_no_obstacle(redis: str, pod: FakePod, case: str) -> None:
    async with leased(redis, pod) as record:
        own = record.address if "same" in case else "127.0.0.1:0"
        if "dead" in case:
            await pod.stop()
        pod.generation += int("generation" in case)
        pod.name += "x" if "name" in case else ""
        await require_free_name(redis, record.scope, NAME, own)


async def test_without_redis_every_name_is_accepted() -> None:
    await require_free_name("redis://127.0.0.1:1", LAYOUT.scope, NAME, "127.0.0.1:0")
