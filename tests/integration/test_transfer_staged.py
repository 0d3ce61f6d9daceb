"""KV through host memory: chosen where the direct way does not pass, with the same rules for aborts and dead peers.

test_transfer_node.py and test_transfer_pairs.py run on staged backends too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from common.errors import TransferFailed
from common.types import Role
from kv_transfer.backend.loopback import LoopbackFault
from kv_transfer.receiver import state_machine
from tests.rigs.transfer.transfer_pods import Cluster, FakePin, Pod, hand_over
from tests.rigs.waiting import until


@pytest_asyncio.fixture
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    cluster = Cluster(request.param)
    yield cluster
    await cluster.stop()


async def gpu_pair(cluster: Cluster) -> tuple[Pod, Pod]:
    """Starts two pods whose memory counts as that of a GPU."""
    pods = [await cluster.start(n, r, kind="VRAM") for n, r in (("p", Role.PREFILL), ("d", Role.DECODE))]
    for seed, pod in enumerate(pods):
        pod.fill(seed)
    return pods[0], pods[1]


def areas() -> set[Path]:
    return set(Path("/dev/shm").glob("baton-kv-*"))


@pytest.mark.parametrize(
    ("cluster", "transport"), [("auto", "staged_tcp"), ("auto-shm", "staged_shm")], indirect=["cluster"]
)
async def test_gpu_pods_that_only_tcp_connects_stage_their_kv(cluster: Cluster, transport: str) -> None:
    before = areas()
    cluster.fabric.transport = "tcp"
    prefill, decode = await gpu_pair(cluster)
    peer = await prefill.node.connect(decode.address, decode.name)
    assert peer.transport == transport
    await hand_over(prefill, decode, 1)
    await hand_over(prefill, decode, 2, first=13)
    (pair,) = prefill.node.pair_stats()
    assert (pair.transport, pair.blocks) == (transport, 67)
    await cluster.stop()
    assert areas() <= before


@pytest.mark.parametrize("cluster", ["auto-shm"], indirect=True)
async def test_gpu_pods_whose_direct_writes_fail_stage_their_kv(cluster: Cluster) -> None:
    """As between containers: UCX chooses cuda_ipc, and the other process cannot map the memory."""

    def only_between_host_agents(_source: str, peer: str, _count: int) -> LoopbackFault:
        return LoopbackFault() if peer.endswith("-host") else LoopbackFault(fail="invalid device context")

    cluster.fabric.on_write = only_between_host_agents
    prefill, decode = await gpu_pair(cluster)
    assert (await prefill.node.connect(decode.address, decode.name)).transport == "staged_shm"
    await hand_over(prefill, decode, 1)


@pytest.mark.parametrize("cluster", ["auto"], indirect=True)
async def test_nothing_is_staged_where_the_direct_way_passes(cluster: Cluster) -> None:
    cluster.fabric.transport = "cuda_ipc"
    prefill, decode = await gpu_pair(cluster)
    assert (await prefill.node.connect(decode.address, decode.name)).transport == "cuda_ipc"
    await hand_over(prefill, decode, 1)
    assert not any(name.endswith("-host") for name in cluster.fabric._agents)


@pytest.mark.parametrize("cluster", ["auto"], indirect=True)
async def test_a_peer_that_does_not_stage_is_refused_with_the_cause_of_the_direct_way(cluster: Cluster) -> None:
    cluster.fabric.transport = "tcp"
    prefill = await cluster.start("p", Role.PREFILL, kind="VRAM")
    cluster.kind = "loopback"
    decode = await cluster.start("d", Role.DECODE, kind="VRAM")
    with pytest.raises(TransferFailed, match="over TCP"):
        await prefill.node.connect(decode.address, decode.name)


@pytest.mark.parametrize("cluster", ["staged", "staged-shm"], indirect=True)
async def test_many_transfers_share_the_window(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    spread = [list(range(6 * i, 6 * i + 6)) for i in range(20)]
    await asyncio.gather(*(hand_over(prefill, decode, i, num_blocks=6, target_blocks=spread[i]) for i in range(20)))
    assert decode.node.stats().received_transfers == 20
    assert prefill.node.stats().pending_writes == 0


@pytest.mark.parametrize("cluster", ["staged", "staged-shm"], indirect=True)
async def test_an_aborted_transfer_keeps_its_target_until_its_pieces_have_landed(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await prefill.node.connect(decode.address, decode.name)
    held: list[tuple[str, str, bytes]] = []

    def hold_pieces(source: str, peer: str, payload: bytes) -> Sequence[float]:
        if payload[:4] == b"BTH3" and not released:
            held.append((source, peer, payload))
            return ()
        return (0.0,)

    released: list[bool] = []
    cluster.fabric.on_notify = hold_pieces
    incoming = decode.reserve("r", 0, range(8))
    transfer = prefill.node.start_transfer(incoming.target, "r", 8, 30.0)
    pin = FakePin(list(range(8)))
    transfer.push(0, range(8), pin)
    await until(lambda: len(held) >= 2)
    decode.node.release(incoming.target.transfer_id)
    transfer.abort("the client left")
    await until(lambda: incoming.over)
    await asyncio.sleep(0.3)
    assert incoming.pin.left == set(range(8))  # a piece may still be copied into them
    assert decode.node.stats().quarantined_blocks == 8
    released.append(True)
    for message in held:
        cluster.fabric.notify(*message)
    await until(lambda: incoming.pin.free and pin.free)
    assert prefill.node.stats().pending_writes == 0
    await hand_over(prefill, decode, 1)


@pytest.mark.parametrize("cluster", ["staged", "staged-shm"], indirect=True)
async def test_a_pod_that_restarts_gets_a_window_again_and_again(
    cluster: Cluster, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are three windows. That of a dead writer is free after the grace."""
    monkeypatch.setattr("kv_transfer.backend.staging.receiver_end.GRACE_S", 0.1)
    monkeypatch.setattr(state_machine, "GRACE_S", 0.1)
    decode = await cluster.start("decode-0", Role.DECODE)
    decode.fill(2)
    for number in range(6):
        prefill = await cluster.start("prefill-0", Role.PREFILL)
        prefill.fill(number)
        await hand_over(prefill, decode, number)
        await prefill.crash()
    for number in range(3):
        await decode.crash()
        decode = await cluster.start("decode-0", Role.DECODE, port=unused_tcp_port)
        prefill = await cluster.start("prefill-0", Role.PREFILL)
        await hand_over(prefill, decode, number)
