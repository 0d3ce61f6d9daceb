"""Many clients, mixed lengths, a fifth of them leaving half-way: no error, no hang, blocks conserved, flat memory.

SOAK_SECONDS sets the length (`make soak`: 300); without it a short run.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import psutil
import pytest

from tests.chaos.load import Load
from tests.e2e.cluster import Cluster

SECONDS = float(os.environ.get("SOAK_SECONDS", "20"))
GROWTH = 48 << 20  # bytes a process may grow by after the first third

pytestmark = pytest.mark.parametrize("cluster", ["1P+1D"], indirect=True)


@pytest.mark.timeout(SECONDS + 240)
async def test_soak(cluster: Cluster, smollm2_dir: Path) -> None:
    load = Load(cluster.base_url, cluster.model, smollm2_dir, clients=32, abort_share=0.2)
    expected = await load.each()
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
    assert not outcomes.errors, outcomes.errors
    assert outcomes.hangs == 0
    assert outcomes.aborted > 0
    for which, texts in outcomes.answers.items():
        assert texts == {expected[which]}, f"prompt {which}"
    await asyncio.to_thread(cluster.check_idle)
    grown = {name: _rss(cluster, name) - settled[name] for name in names}
    print(
        f"{outcomes.done} requests, {outcomes.aborted} abandoned, growth in MiB:",
        {k: v >> 20 for k, v in grown.items()},
    )
    assert all(bytes_ < GROWTH for bytes_ in grown.values()), grown


def _rss(cluster: Cluster, name: str) -> int:
    return int(psutil.Process(cluster.pid(name)).memory_info().rss)
