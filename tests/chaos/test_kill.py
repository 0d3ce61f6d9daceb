"""kill -9 of any process under load: every request ends, no answer is wrong, and service resumes after a restart."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.rigs.stack.cluster import Cluster
from tests.rigs.stack.load import StackLoad

# One pod of each role, so no other pod can replace a killed one.
pytestmark = pytest.mark.parametrize("cluster", ["1P+1D"], indirect=True)
WAIT_S = 120.0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0", "valkey"])
async def test_kill_under_load(cluster: Cluster, smollm2_dir: Path, victim: str) -> None:
    load = StackLoad(cluster.base_url, cluster.model, smollm2_dir, clients=6)
    others = {name: cluster.pid(name) for name in (*cluster.pods, "gateway") if name != victim}
    expected = await load.each()
    assert None not in expected
    outcomes = load.outcomes

    async def more(done: int) -> None:
        """Waits until this many more requests have ended."""
        goal, deadline = outcomes.done + done, time.monotonic() + WAIT_S
        while outcomes.done < goal:
            assert time.monotonic() < deadline, f"no request ends: {outcomes}"
            await asyncio.sleep(0.05)

    async def kill_and_restart() -> None:
        await more(4)
        await asyncio.to_thread(cluster.kill, victim)
        await more(4)
        await asyncio.to_thread(cluster.restart, victim)
        await more(8)

    chaos = asyncio.create_task(kill_and_restart())
    await load.run(chaos.done)
    await chaos
    assert outcomes.hangs == 0
    for which, texts in outcomes.answers.items():
        assert texts == {expected[which]}, f"prompt {which}"
    if victim == "valkey":
        assert not outcomes.errors, outcomes.errors

    # The other processes still run, and requests succeed again.
    assert others == {name: cluster.pid(name) for name in others}
    deadline = time.monotonic() + WAIT_S
    while (text := await load.one(0)) is None:
        assert time.monotonic() < deadline, f"no recovery: {outcomes.errors}"
    assert text == expected[0]
    assert await load.each() == expected
    await load.close()
    await asyncio.to_thread(cluster.check_idle)
