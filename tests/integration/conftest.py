"""A gateway over fake pods, for the tests that need no other: a file may have a cluster, or a gateway, of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.fake_pods import FakeCluster, fake_cluster
from tests.gateway_rig import Rig, rig


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    """One prefill and one decode pod."""
    async with fake_cluster() as c:
        yield c


@pytest_asyncio.fixture
async def gw(cluster: FakeCluster, smollm2_dir: Path) -> AsyncIterator[Rig]:
    """REST alone; at rest after the test."""
    async with rig(cluster, smollm2_dir) as r:
        yield r
        await r.settled()
