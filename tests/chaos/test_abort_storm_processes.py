"""A small abort storm over processes: half of the streams are aborted, one pod freezes and another is killed.

test_abort_storm.py has the larger storm in one process.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.rigs.stack.cluster import Cluster
from tests.rigs.stack.load import StackLoad
from tests.rigs.waiting import until

pytestmark = pytest.mark.parametrize("cluster", ["1P+1D"], indirect=True)
WAIT_S = 120.0


@pytest.mark.timeout(600)
async def test_a_storm_over_real_processes(cluster: Cluster, smollm2_dir: Path) -> None:
    """Half of the streams are aborted. The decode pod freezes and thaws, then prefill is killed and restarts."""
    load = StackLoad(cluster.base_url, cluster.model, smollm2_dir, clients=6, abort_share=0.5)
    expected = await load.each()
    assert None not in expected
    outcomes = load.outcomes

    async def strike() -> None:
        await until(lambda: outcomes.done > 10, WAIT_S)
        cluster.freeze("decode-0")
        try:
            await asyncio.sleep(2.0)
        finally:
            cluster.thaw("decode-0")
        done = outcomes.done
        await until(lambda: outcomes.done > done + 5, WAIT_S)
        await asyncio.to_thread(cluster.kill, "prefill-0")
        await until(lambda: outcomes.done > done + 10, WAIT_S)
        await asyncio.to_thread(cluster.restart, "prefill-0")
        done = outcomes.done
        await until(lambda: outcomes.done > done + 10, WAIT_S)

    strikes = asyncio.create_task(strike())
    await load.run(strikes.done)
    await strikes
    assert outcomes.hangs == 0
    assert outcomes.aborted > 0
    for which, texts in outcomes.answers.items():
        assert texts == {expected[which]}, f"prompt {which}"
    async with asyncio.timeout(WAIT_S):
        while await load.one(0) is None:
            continue
    assert await load.each() == expected
    await load.close()
    await asyncio.to_thread(cluster.check_idle)
