"""A pod process is killed and started again at the same address, many times (test_transfer_tcp.py repeats it over TCP).

benchmarks/reliability/restarts.py measures how long the first hand-off takes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from common.types import Role
from tests.integration.test_transfer_processes import Hosts, outcome, send


@pytest_asyncio.fixture
async def hosts() -> AsyncIterator[Hosts]:
    hosts = Hosts()
    yield hosts
    for child in hosts.children:
        await child.end()
    await hosts.stop()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("restarts", [5, pytest.param(100, marks=pytest.mark.long)])
async def test_the_first_hand_off_after_each_restart_of_processes_works(
    hosts: Hosts, restarts: int, unused_tcp_port: int
) -> None:
    prefill = await hosts.start("prefill-0", Role.PREFILL)
    steady = await hosts.child(Role.DECODE, "decode-1")
    for number in range(1 + restarts):
        decode = await hosts.child(Role.DECODE, "decode-0", unused_tcp_port)
        assert await outcome(await send(prefill, await decode.reserve(f"r{number}", [1, 2, 3]), f"r{number}")) is None
        if number % 10 == 0:
            assert await outcome(await send(prefill, await steady.reserve(f"s{number}", [4]), f"s{number}")) is None
        await decode.end()
    assert steady.process.returncode is None
    assert prefill.node.alive
    assert prefill.node.stats().open_outgoing == 0
    assert len(prefill.node._connector._attached) <= 3  # the steady pod, and those that just ended
