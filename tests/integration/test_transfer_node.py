"""Hand-offs between two pods, and pods that are refused.

The same tests on loopback and on NIXL (test_transfer_tcp.py repeats them over TCP).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from common.errors import InvalidRequest, LayoutMismatch, TransferFailed, Unauthenticated
from common.kv_layout import KVLayout
from common.pb import transfer_pb2
from common.types import FinishReason, Role
from common.wire import transfer_id_to_pb
from kv_transfer.backend.interface import Backend, Transport
from kv_transfer.backend.loopback import LoopbackBackend
from kv_transfer.messages import Commit
from tests.rigs.transfer.transfer_pods import NUM_BLOCKS, Cluster, FakePin, hand_over
from tests.rigs.waiting import until


@pytest_asyncio.fixture(params=["loopback", "nixl", "staged", "staged-nixl-shm"])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    cluster = Cluster(request.param)
    yield cluster
    await cluster.stop()


async def test_hand_over(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    untouched = decode.digest(range(NUM_BLOCKS))
    await hand_over(prefill, decode, 1)
    await hand_over(prefill, decode, 2, first=13)
    rng = random.Random(1)
    rng.sample(range(NUM_BLOCKS), 40)
    written = set(rng.sample(range(NUM_BLOCKS), 40))
    rng = random.Random(2)
    rng.sample(range(NUM_BLOCKS), 40)
    written |= set(rng.sample(range(NUM_BLOCKS), 40)[13:])
    after = decode.digest(range(NUM_BLOCKS))
    assert all(after[block] == untouched[block] for block in range(NUM_BLOCKS) if block not in written)
    stats = prefill.node.stats()
    assert (stats.sent_transfers, stats.failed_transfers, stats.sent_blocks) == (2, 0, 67)
    assert stats.pending_writes == 0
    assert stats.peers[0].gb_s > 0
    assert decode.node.stats().open_incoming == 0


async def test_many_at_once(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    targets = random.Random(0).sample(range(NUM_BLOCKS), 120)
    await asyncio.gather(
        *(hand_over(prefill, decode, i, num_blocks=6, target_blocks=targets[6 * i : 6 * i + 6]) for i in range(20))
    )
    assert decode.node.stats().received_transfers == 20
    assert prefill.node.stats().open_outgoing == 0


async def test_blocks_are_delivered_before_the_prompt_is_computed(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    incoming = decode.reserve("r", 0, range(8))
    transfer = prefill.node.start_transfer(incoming.target, "r", 8, 30.0)
    for start in (0, 2, 4):
        transfer.push(start, [start, start + 1], FakePin([start, start + 1]))
    await until(lambda: transfer.delivered_blocks == 6)
    transfer.push(6, [6, 7], FakePin([6, 7]))
    transfer.finish([1], [FinishReason.STOP])
    report = await transfer.done()
    assert 6 <= report.delivered_before_finish <= 8
    assert transfer.delivered_blocks == 8
    await until(lambda: bool(incoming.ready))  # the acknowledgement goes first
    assert incoming.ready[0].finish_reasons == (FinishReason.STOP,)


async def test_a_peer_that_accepts_no_writes_delays_no_other_connection() -> None:
    cluster = Cluster("loopback")
    try:
        prefill, silent = await cluster.pair()
        others = [await cluster.start(f"decode-{i}", Role.DECODE) for i in (1, 2)]
        cluster.fabric.freeze(silent.agent)
        late = asyncio.create_task(prefill.node.connect(silent.address, silent.name))
        await until(lambda: prefill.node.stats().pending_writes == 1)
        peers = await asyncio.gather(*(prefill.node.connect(other.address, other.name) for other in others))
        assert [peer.pod for peer in peers] == ["decode-1", "decode-2"]
        assert not late.done()
        cluster.fabric.thaw(silent.agent)
        assert (await late).pod == silent.name
        assert not prefill.node.stats().pending_writes
    finally:
        await cluster.stop()


async def test_a_broken_connection_is_not_kept_forever(cluster: Cluster) -> None:
    """The address of a pod that ended may never be used again."""
    prefill, gone = await cluster.pair()
    await prefill.node.connect(gone.address, gone.name)
    connector = prefill.node._connector
    (connection,) = connector._connections.values()
    prefill.node._thread.submit(lambda: setattr(connection, "broken", True))
    await until(lambda: connection not in connector._attached)
    other = await cluster.start("decode-1", Role.DECODE)
    await prefill.node.connect(other.address, other.name)
    assert list(connector._connections) == [other.address]


async def test_nothing_to_push(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    incoming = decode.reserve("r", 4, [])
    transfer = prefill.node.start_transfer(incoming.target, "r", 4, 30.0)
    pin = FakePin([1, 2, 3, 4])
    transfer.push(0, [1, 2, 3, 4], pin)
    transfer.finish([3], [None])
    assert (await transfer.done()).blocks == 0
    assert pin.free
    await until(lambda: len(incoming.ready) == 1)


async def test_a_push_outside_the_prompt_is_refused(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    transfer = prefill.node.start_transfer(decode.reserve("r", 0, [1, 2]).target, "r", 2, 30.0)
    pin = FakePin([5, 6])
    with pytest.raises(InvalidRequest):
        transfer.push(1, [5, 6], pin)
    assert pin.free
    transfer.abort("the test is over")


async def test_wrong_secret(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    stranger = await cluster.start("stranger", Role.PREFILL, secret=b"guessed")
    with pytest.raises(Unauthenticated):
        await stranger.node.connect(decode.address, decode.name)
    incoming = decode.reserve("r", 0, [1])
    with pytest.raises(Unauthenticated):
        await stranger.node.start_transfer(incoming.target, "r", 1, 5.0).done()
    assert decode.node.stats().dropped["unauthenticated"] >= 1
    await hand_over(prefill, decode, 1)


@pytest.mark.parametrize(
    ("field", "layout"),
    [
        ("block_size", KVLayout("test", "r1", 2, 2, 32, block_size=32, dtype="float32")),
        ("dtype", KVLayout("test", "r1", 2, 2, 32, block_size=16, dtype="bfloat16")),
        ("revision", KVLayout("test", "r2", 2, 2, 32, block_size=16, dtype="float32")),
        ("num_kv_heads", KVLayout("test", "r1", 2, 1, 32, block_size=16, dtype="float32")),
    ],
)
async def test_other_layouts_are_refused_with_the_field(field: str, layout: KVLayout) -> None:
    cluster = Cluster("loopback")
    try:
        decode = await cluster.start("decode-0", Role.DECODE)
        other = await cluster.start("prefill-1", Role.PREFILL, layout=layout)
        with pytest.raises(LayoutMismatch) as refusal:
            await other.node.connect(decode.address, decode.name)
        assert refusal.value.field == field
        with pytest.raises(LayoutMismatch):
            await other.node.start_transfer(decode.reserve("r", 0, [1]).target, "r", 1, 5.0).done()
        await hand_over(
            await cluster.start("prefill-0", Role.PREFILL), decode, 1
        )  # hand-offs between equal layouts still work
        with pytest.raises(LayoutMismatch) as refusal:
            await decode.node.connect(other.address, other.name)
        assert refusal.value.field == field
    finally:
        await cluster.stop()


@pytest.mark.parametrize("transport", ["tcp", "unknown"])
async def test_gpu_memory_never_travels_over_tcp_without_permission(transport: str) -> None:
    class Slow(LoopbackBackend):
        def transport(self, peer: str, *, same_host: bool, reads: bool = False) -> Transport:
            return Transport(transport, "reported")

    class Device(Cluster):
        def backend(self) -> Backend:
            return Slow(self.fabric)

    cluster = Device("loopback")
    try:
        prefill, decode = await cluster.pair()
        assert (await prefill.node.connect(decode.address, decode.name)).transport == transport
        other = await cluster.start("prefill-1", Role.PREFILL, kind="VRAM")
        with pytest.raises(TransferFailed, match="allow_tcp"):
            await other.node.connect(decode.address, decode.name)
        allowed = await cluster.start("prefill-2", Role.PREFILL, kind="VRAM", allow_tcp=True)
        assert (await allowed.node.connect(decode.address, decode.name)).transport == transport
    finally:
        await cluster.stop()


async def test_commit_is_idempotent(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    incoming = decode.reserve("r", 0, [1])
    transfer = prefill.node.start_transfer(incoming.target, "r", 1, 30.0)
    transfer.push(0, [1], FakePin([1]))
    transfer.finish([1], [None])
    await transfer.done()
    await until(lambda: incoming.over)
    request = transfer_pb2.CommitRequest(
        transfer_id=transfer_id_to_pb(incoming.target.transfer_id), generation=prefill.generation, first_tokens=[9]
    )
    await prefill.node._rpc.call(decode.address, decode.name, "Commit", request, transfer_pb2.CommitResponse, 5.0)
    await until(lambda: incoming.over)  # the acknowledgement goes first
    assert incoming.committed == [Commit((1,), (None,))]
