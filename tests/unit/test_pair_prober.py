"""When the prober probes and retries, with a fake connector and clock."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from common.errors import BatonError, TransferFailed, Unavailable
from kv_transfer.peers import pair_prober
from kv_transfer.peers.connection import PairTrouble
from kv_transfer.peers.connector import PAIR_RETRY_S, PeerConnector
from kv_transfer.peers.pair_prober import FORGET_S, MAX_PROBES, PairProber

PERIOD_S = 10.0


@dataclass(eq=False)
class Connection:
    pod: str
    address: str = "127.0.0.1:1"
    generation: int = 1
    block_at: float = 0.0
    probe_at: float = 0.0
    trouble: str = ""


@dataclass
class Connector:
    """Keeps the calls; each probe ends when its test says so."""

    connections: list[Connection]
    troubles: dict[str, PairTrouble] = field(default_factory=dict)
    probes: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    connected: list[tuple[str, int | None]] = field(default_factory=list)
    refusal: BatonError | None = None

    def live(self) -> list[Connection]:
        return self.connections

    async def probe(self, connection: Connection, *, keep_alive: bool) -> None:
        assert keep_alive
        assert connection.pod not in self.probes, "two probes of one connection"
        self.probes[connection.pod] = asyncio.get_running_loop().create_future()
        try:
            await self.probes[connection.pod]
        finally:
            del self.probes[connection.pod]

    def break_connection(self, connection: Connection, _why: str) -> None:
        self.broken.append(connection.pod)

    async def connect(self, _address: str, pod: str, _timeout_s: float, generation: int | None) -> None:
        self.connected.append((pod, generation))
        if self.refusal is not None:
            raise self.refusal


@dataclass
class Rig:
    connector: Connector
    now: float = 0.0

    def __post_init__(self) -> None:
        made: Any = self.connector
        self.prober = PairProber(made, lambda: self.now, PERIOD_S)

    async def look(self) -> set[str]:
        """Lets the prober look at the connections once. Returns the pods whose probe runs."""
        self.prober._begin_due(self.now)
        await self.turns()
        return set(self.connector.probes)

    async def end(self, pod: str, error: BatonError | None = None) -> None:
        probe = self.connector.probes[pod]
        probe.set_result(None) if error is None else probe.set_exception(error)
        await self.turns()

    async def turns(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
def rig() -> Rig:
    return Rig(Connector([Connection("d0")]))


async def test_only_a_connection_without_traffic_is_probed(rig: Rig) -> None:
    (connection,) = rig.connector.connections
    rig.now = 0.7 * PERIOD_S
    assert not await rig.look()
    rig.now = connection.block_at = 5 * PERIOD_S  # a transfer wrote a block
    assert not await rig.look()
    rig.now += PERIOD_S
    assert await rig.look() == {"d0"}
    rig.now += PERIOD_S
    assert await rig.look() == {"d0"}  # not a second one while the first runs


async def test_at_most_some_probes_run_at_the_same_time_and_late_ones_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pair_prober, "LATE_S", 0.02)
    rig = Rig(Connector([Connection(f"d{i}", block_at=i) for i in range(MAX_PROBES + 3)]))
    rig.now = 1000.0
    longest_idle = {f"d{i}" for i in range(MAX_PROBES)}
    assert await rig.look() == longest_idle
    await asyncio.sleep(0.1)
    assert all(c.trouble for c in rig.connector.connections if c.pod in longest_idle)
    assert len(await rig.look()) == MAX_PROBES + 3


async def test_a_late_block_is_trouble_until_it_arrives(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_prober, "LATE_S", 0.01)
    (connection,) = rig.connector.connections
    rig.now = PERIOD_S
    await rig.look()
    await asyncio.sleep(0.05)
    assert "has not arrived" in connection.trouble
    await rig.end("d0")
    assert not connection.trouble
    assert not rig.connector.broken


async def test_a_peer_that_does_not_answer_is_probed_again_soon(rig: Rig) -> None:
    (connection,) = rig.connector.connections
    rig.now = PERIOD_S
    await rig.look()
    await rig.end("d0", Unavailable("no answer"))
    assert connection.trouble == "no answer"
    assert not await rig.look()
    rig.now += PAIR_RETRY_S
    assert await rig.look() == {"d0"}
    assert not rig.connector.broken


async def test_a_failed_block_breaks_the_connection(rig: Rig) -> None:
    rig.now = PERIOD_S
    await rig.look()
    await rig.end("d0", TransferFailed("reset"))
    assert rig.connector.broken == ["d0"]


async def test_a_failed_probe_of_a_replaced_connection_is_no_trouble_of_the_pair(rig: Rig) -> None:
    """The pod restarts during the probe, and a request connects to its new generation."""
    rig.now = PERIOD_S
    await rig.look()
    rig.connector.connections[:] = [Connection("d0", generation=2, block_at=PERIOD_S), Connection("d1", block_at=99.0)]
    await rig.end("d0", TransferFailed("the process has ended"))
    assert rig.connector.broken == []


async def test_a_pair_in_trouble_is_retried_less_and_less_often_and_then_forgotten(rig: Rig) -> None:
    connector = rig.connector
    connector.connections.clear()
    connector.troubles["d1"] = PairTrouble("d1", 7, "127.0.0.1:1", "gone", wanted_at=0.0, retry_at=1.0)
    connector.refusal = Unavailable("gone")
    tried = []
    for rig.now in range(60):
        await rig.look()
        if len(connector.connected) > len(tried):
            tried.append(rig.now)
    assert tried[:3] == [1, 3, 7]
    assert 5 < len(tried) < 12
    assert set(connector.connected) == {("d1", 7)}
    rig.now = FORGET_S
    await rig.look()
    assert not connector.troubles


async def test_a_pod_that_the_index_lists_stays_in_trouble(rig: Rig) -> None:
    """Gateways would use the pair, and each request would wait for an attempt to connect."""
    rig.connector.connections.clear()
    rig.connector.refusal = Unavailable("timed out")
    unused: Any = None
    connector = PeerConnector(unused, unused, unused, lambda: rig.now, unused)
    rig.connector.troubles = connector.troubles
    connector.record_trouble("127.0.0.1:1", "d1", 7, "timed out")
    for rig.now, left in ((FORGET_S - 1, 1), (FORGET_S + 1, 1), (2 * FORGET_S + 2, 0)):
        await rig.look()
        assert len(connector.troubles) == left
        if rig.now < FORGET_S:
            connector.want("d1")


async def test_stop_ends_the_probes(rig: Rig) -> None:
    rig.prober.start()
    rig.now = PERIOD_S
    await rig.look()
    await rig.prober.stop()
    assert not rig.connector.probes
