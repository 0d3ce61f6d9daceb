"""Many clients, mixed lengths, a fifth of the streams aborted: no error, no hang, blocks conserved, flat memory.

`make soak` measures the same over minutes, with a tiny model and with faults (tests/rigs/chaos/soak.py).
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from redis.asyncio import Redis

from tests.rigs.stack.cluster import Cluster
from tests.rigs.stack.load import Outcomes, StackLoad

SECONDS = 12.0
GROWTH = 48 << 20  # bytes a process may grow by after the first third


@pytest.mark.timeout(SECONDS + 240)
@pytest.mark.parametrize("cluster", ["1P+1D"], indirect=True)
async def test_soak(cluster: Cluster, smollm2_dir: Path) -> None:
    load = StackLoad(cluster.base_url, cluster.model, smollm2_dir, clients=32, abort_share=0.2)
    expected = await load.each()
    outcomes = await soak(cluster, load, expected)
    assert not outcomes.errors, outcomes.errors


@pytest.mark.timeout(SECONDS + 240)
async def test_soak_behind_a_gate(smollm2_dir: Path, tmp_path: Path) -> None:
    gate = {"BATON_MAX_RUNNING": "4", "BATON_MAX_QUEUE": "8", "BATON_MAX_TTFT_S": "5"}
    with Cluster(smollm2_dir, tmp_path, chunk_tokens=256, kv_memory="256M", env=gate) as cluster:
        load = StackLoad(cluster.base_url, cluster.model, smollm2_dir, clients=32, abort_share=0.2)
        expected = [await load.one(which) for which in range(load.prompts)]
        outcomes = await soak(cluster, load, expected)
        assert outcomes.errors["429"]
        # A request that has its blocks may still be shed before its first token, when its head was sent already.
        assert outcomes.errors.keys() <= {"429", "in stream: rate_limit_error"}, outcomes.errors
        redis: Any = Redis.from_url(cluster.stack.redis)
        async with redis:
            async with asyncio.timeout(30):
                while [key async for key in redis.scan_iter("kv:*:resv:*") if await redis.zcard(key)]:
                    await asyncio.sleep(0.1)


async def soak(cluster: Cluster, load: StackLoad, expected: list[str | None]) -> Outcomes:
    """Runs the load. Requires correct answers, no leased blocks at the end and flat memory."""
    names = [*cluster.pods, "gateway"]
    begin = time.monotonic()
    settled: dict[str, int] = {}

    def until() -> bool:
        elapsed = time.monotonic() - begin
        if not settled and elapsed > SECONDS / 3:
            settled.update({name: _rss(cluster, name) for name in names})
        return elapsed > SECONDS

    outcomes = await load.run(until)
    await load.close()
    assert outcomes.hangs == 0
    assert outcomes.aborted > 0
    for which, texts in outcomes.answers.items():
        assert texts == {expected[which]}, f"prompt {which}"
    await asyncio.to_thread(cluster.check_idle)
    grown = {name: _rss(cluster, name) - settled[name] for name in names}
    print(
        f"{outcomes.done} requests, {outcomes.aborted} abandoned, {dict(outcomes.errors)}, growth in MiB:",
        {k: v >> 20 for k, v in grown.items()},
    )
    assert all(bytes_ < GROWTH for bytes_ in grown.values()), grown
    return outcomes


def _rss(cluster: Cluster, name: str) -> int:
    return int(psutil.Process(cluster.pid(name)).memory_info().rss)
