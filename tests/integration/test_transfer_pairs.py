"""Idle pairs of pods: they are probed with a test block, show their trouble in Info, and are connected again."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from common.pb import transfer_pb2
from common.types import Role
from kv_transfer.backend.loopback import LoopbackFault
from kv_transfer.peers import connector, pair_prober
from tests.rigs.transfer.transfer_pods import Cluster, Pod, hand_over
from tests.rigs.waiting import until

PERIOD_S = 0.2


@pytest_asyncio.fixture
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    cluster = Cluster(getattr(request, "param", "loopback"))
    cluster.pair_probe_s = PERIOD_S
    yield cluster
    await cluster.stop()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_prober, "LATE_S", 0.3)
    monkeypatch.setattr(pair_prober, "TICK_S", 0.05)
    monkeypatch.setattr(connector, "PAIR_RETRY_S", 0.05)
    monkeypatch.setattr(pair_prober, "PAIR_RETRY_S", 0.05)


def pair_of(pod: Pod) -> transfer_pb2.Pair:
    """Returns the only pair of the pod as Info shows it."""
    (pair,) = pod.node.pair_stats()
    return pair


@pytest.mark.parametrize("cluster", ["loopback", "nixl", "staged-nixl"], indirect=True)
async def test_an_idle_pair_gets_a_block_from_time_to_time(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await prefill.node.connect(decode.address, decode.name)
    (connection,) = prefill.node._connector.live()
    first = connection.block_at
    await until(lambda: connection.block_at > first)
    second = connection.block_at
    await until(lambda: connection.block_at > second)
    assert pair_of(prefill).HasField("block_age_s")
    assert not pair_of(prefill).trouble
    assert prefill.node.stats().sent_blocks == 0
    await hand_over(prefill, decode, 1)


async def test_a_probe_of_an_idle_pair_does_not_make_the_receiver_poll_fast(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await prefill.node.connect(decode.address, decode.name)
    (connection,) = prefill.node._connector.live()
    decode.node.servicer._expecting_until = 0.0
    since = connection.block_at
    await until(lambda: connection.block_at > since)
    assert not decode.node.servicer.expects_writes


async def test_a_frozen_peer_is_in_trouble_until_it_goes_on(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await prefill.node.connect(decode.address, decode.name)
    (connection,) = prefill.node._connector.live()
    cluster.fabric.freeze(decode.agent)
    await until(lambda: "has not arrived" in pair_of(prefill).trouble)
    assert pair_of(prefill).generation == decode.generation
    assert prefill.node.stats().pending_writes == 1  # one block waits, however long it takes
    cluster.fabric.thaw(decode.agent)
    await until(lambda: not pair_of(prefill).trouble)
    assert prefill.node._connector.live() == [connection]
    await hand_over(prefill, decode, 1)


async def test_a_silently_closed_connection_is_made_again_before_a_request_needs_it(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await prefill.node.connect(decode.address, decode.name)
    (closed,) = prefill.node._connector.live()
    cluster.fabric.on_write = lambda *_: LoopbackFault(fail="connection reset")
    await until(lambda: closed.broken)
    await until(lambda: "connection reset" in pair_of(prefill).trouble)
    assert not prefill.node.stats().peers
    cluster.fabric.on_write = lambda *_: LoopbackFault()
    await until(lambda: bool(prefill.node._connector.live()) and not pair_of(prefill).trouble)
    await hand_over(prefill, decode, 1)


async def test_a_pod_that_cannot_be_reached_is_in_trouble_and_forgotten_later(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector, "UNREACHABLE_S", 0.1)
    prefill, decode = await cluster.pair()
    await prefill.node.connect(decode.address, decode.name)
    await decode.crash()
    await until(lambda: bool(pair_of(prefill).trouble))
    assert (pair_of(prefill).pod, pair_of(prefill).transport) == (decode.name, "")
    monkeypatch.setattr(pair_prober, "FORGET_S", 0.0)
    await until(lambda: not prefill.node._connector.troubles)
    assert prefill.node.pair_stats() == ()


async def test_a_pod_that_comes_back_at_its_address_is_connected_by_itself(
    cluster: Cluster, unused_tcp_port: int
) -> None:
    prefill, decode = await cluster.pair(decode_port=unused_tcp_port)
    await prefill.node.connect(decode.address, decode.name)
    await decode.crash()
    await until(lambda: bool(pair_of(prefill).trouble))
    again = await cluster.start("decode-0", Role.DECODE, port=unused_tcp_port)
    await until(lambda: [c.generation for c in prefill.node._connector.live()] == [again.generation])
    assert not pair_of(prefill).trouble
    again.fill(3)
    await hand_over(prefill, again, 1)
