"""kill -9 of any process under load: every request ends, no answer is wrong, and a restart of that process mends it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.load import Load
from tests.e2e.cluster import Cluster


@pytest.fixture(scope="module")
def cluster(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One pod of each role: nobody can stand in for the one that dies."""
    with Cluster(smollm2_dir, tmp_path_factory.mktemp("kill"), threads=1, kv_memory="256M") as running:
        yield running


@pytest.mark.timeout(280)
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0", "valkey"])
async def test_kill_under_load(cluster: Cluster, smollm2_dir: Path, victim: str) -> None:
    load = Load(cluster.base_url, cluster.model, smollm2_dir, clients=6)
    others = {name: cluster.pid(name) for name in (*cluster.pods, "gateway") if name != victim}
    expected = [await load.one(i) for i in range(load.num_prompts)]
    assert None not in expected

    recovered = asyncio.Event()

    async def kill_and_restart() -> None:
        await asyncio.sleep(2.0)
        await asyncio.to_thread(cluster.kill, victim)
        await asyncio.sleep(3.0)
        await asyncio.to_thread(cluster.restart, victim)
        await asyncio.sleep(3.0)
        recovered.set()

    chaos = asyncio.create_task(kill_and_restart())
    outcomes = await load.run(lambda: recovered.is_set() or chaos.done())
    await chaos
    assert outcomes.hangs == 0
    assert outcomes.done > load.num_prompts
    for which, texts in outcomes.answers.items():
        assert texts == {expected[which]}, f"prompt {which}"
    if victim == "valkey":
        assert not outcomes.errors, outcomes.errors

    # The others were not touched, and all works again.
    assert others == {name: cluster.pid(name) for name in others}
    deadline = time.monotonic() + 20
    while (text := await load.one(0)) is None:
        assert time.monotonic() < deadline, f"no recovery: {load.outcomes.errors}"
    assert text == expected[0]
    assert [await load.one(i) for i in range(load.num_prompts)] == expected
    await load.close()
    await asyncio.to_thread(cluster.check_idle)
