"""A new pod pulls the most used prefixes of its peers before it is ready, within its limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cli.stack.valkey import EmbeddedValkey
from common.types import Role
from engine.llm import LLM
from prefix_index import publisher
from prefix_index.reader import IndexReader
from tests.rigs.pods.harness import BLOCK, Cluster, Pod, expected, prompt_of, request
from tests.rigs.waiting import until

PREFIX = prompt_of(8 * BLOCK, seed=9)
WARM = {"warm_up_s": 30.0, "pull": "push"}


@pytest.fixture
async def redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    monkeypatch.setattr(publisher, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(publisher, "HOT_S", 0.05)
    valkey = EmbeddedValkey(0, tmp_path)
    try:
        yield await valkey.start()
    finally:
        await valkey.stop()


def warmed(pod: Pod) -> int:
    return int(pod.runtime.metrics.warm_up_blocks._value.get())


async def use_prefix(cluster: Cluster, redis: str) -> None:
    """Three prompts with one prefix; waits until Redis has the prefill pod's list."""
    for number in range(3):
        await cluster.generate(request([*PREFIX, *prompt_of(BLOCK + 1, seed=number)], 2))
    holder = cluster.prefills[0].runtime
    reader = IndexReader(redis, books=False, timeout_s=5.0)

    async def listed() -> bool:
        return await reader.hot_prefixes(holder.engine.layout.scope, [holder.name]) != [None]

    await until(listed)
    await reader.close()


async def test_a_new_pod_has_the_hot_prefix_when_it_is_ready(model_dir: Path, llm: LLM, redis: str) -> None:
    config: dict[str, Any] = {"redis": redis, **WARM}
    async with Cluster.start(model_dir, prefill_config=config, decode_config=config) as cluster:
        assert [warmed(pod) for pod in cluster.pods] == [0, 0], "the first pods have no peers to pull from"
        await use_prefix(cluster, redis)
        new = await cluster.add(Role.PREFILL, **config)
        assert warmed(new) == len(PREFIX) // BLOCK
        r = request([*PREFIX, *prompt_of(BLOCK + 3, seed=77)], 6)
        answer = await cluster.generate(r, prefill=new)
        assert answer.ids == expected(llm, r)
        assert answer.cached_tokens == len(PREFIX)
        small = await cluster.add(Role.PREFILL, **config, warm_up_size=3 * new.runtime.engine.layout.block_bytes)
        assert warmed(small) == 3
        cold = await cluster.add(Role.PREFILL, **{**config, "warm_up_s": 0.0})
        assert warmed(cold) == 0


async def test_a_holder_that_fails_leaves_a_new_pod_cold_and_ready(
    model_dir: Path, redis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: dict[str, Any] = {"redis": redis, **WARM}
    async with Cluster.start(model_dir, prefill_config=config, decode_config=config, check=False) as cluster:
        await use_prefix(cluster, redis)
        holder = cluster.prefills[0].runtime

        def refuse(*_: object) -> None:
            raise RuntimeError("no block is lent")

        monkeypatch.setattr(holder.engine.pool, "pin_prefix", refuse)
        async with asyncio.timeout(60):
            new = await cluster.add(Role.PREFILL, **{**config, "warm_up_s": 1.0})
        assert warmed(new) == 0


async def test_without_redis_a_pod_starts_at_once(model_dir: Path) -> None:
    config: dict[str, Any] = {"redis": "redis://127.0.0.1:1", **WARM}
    async with asyncio.timeout(60):
        async with Cluster.start(model_dir, role=Role.BOTH, prefill=0, decode_config=config) as cluster:
            assert warmed(cluster.decode) == 0
