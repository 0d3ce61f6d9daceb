"""Probes of several connections at once, with a fake transfer thread and fake peers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from common.pb import transfer_pb2
from kv_transfer.peers.connection_probe import ConnectionProbe


class Thread:
    """Does everything at once. A write over RDMA or CMA needs no processor time of the peer."""

    async def run(self, command: Callable[[], Any]) -> Any:
        return command()

    def submit(self, command: Callable[[], Any]) -> None:
        command()

    def write(
        self, _agent: str, _mine: object, _theirs: object, _note: bytes, ended: Callable[[str | None], None]
    ) -> None:
        ended(None)


class Peers:
    """Answers Probe, except of frozen pods, which answer nothing until `thawed`."""

    def __init__(self) -> None:
        self.thawed = asyncio.Event()
        self.asked: list[str] = []

    async def call(self, _address: str, pod: str, *_: object) -> Any:
        self.asked.append(pod)
        if pod.startswith("frozen"):
            await self.thawed.wait()
        return SimpleNamespace(intact=True)


async def test_a_frozen_peer_does_not_delay_the_probes_of_other_peers() -> None:
    memory: Any = SimpleNamespace(kind="DRAM", block_bytes=1024, probe_block=0, write_block=lambda *_: None)
    info = transfer_pb2.InfoResponse(pod="prefill-0", generation=1)
    thread: Any = Thread()
    peers: Any = Peers()
    probe = ConnectionProbe(thread, peers, memory, lambda: info, time.monotonic, False)
    plain = {"probe_block": 0, "in_flight": 0, "block_at": 0.0, "memory": memory}
    pods = ("frozen-0", "frozen-1", "healthy")
    made: list[Any] = [SimpleNamespace(pod=pod, address=pod, agent=pod, **plain) for pod in pods]
    frozen = [asyncio.create_task(probe(connection, keep_alive=True)) for connection in made[:2]]
    async with asyncio.timeout(10):
        while not peers.asked and not any(task.done() for task in frozen):
            await asyncio.sleep(0)
    await asyncio.wait_for(probe(made[2], keep_alive=True), 10.0)
    assert made[2].block_at > 0
    assert not any(task.done() for task in frozen)
    peers.thawed.set()
    await asyncio.gather(*frozen)
