"""Transfers that fail: aborts, deadlines, restarts, deaths.

The same tests on loopback and on NIXL (test_transfer_tcp.py repeats them over TCP).
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from common.errors import Cancelled, DeadlineExceeded, TransferFailed, Unavailable, UnknownTransfer
from common.pb import transfer_pb2
from common.types import Role
from common.wire import transfer_id_to_pb
from kv_transfer import servicer
from kv_transfer.memory import PeerMemory
from kv_transfer.peers.process_watch import ProcessWatch
from tests.rigs.transfer.faulty_backend import WriteFaultPlan
from tests.rigs.transfer.transfer_pods import NUM_BLOCKS, Cluster, FakePin, chunks, hand_over
from tests.rigs.waiting import until


@pytest_asyncio.fixture(params=["loopback", "nixl"])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    cluster = Cluster(request.param)
    yield cluster
    await cluster.stop()


@pytest.mark.parametrize("stage", ["before open", "while writing", "after all writes"])
async def test_sender_aborts(cluster: Cluster, stage: str) -> None:
    prefill, decode = await cluster.pair()
    await prefill.node.connect(decode.address, decode.name)
    if stage == "while writing":
        prefill.backend.on_write = lambda _p, _l, _r: WriteFaultPlan(delay_s=600.0)
    incoming = decode.reserve("r", 0, range(8))
    transfer = prefill.node.start_transfer(incoming.target, "r", 8, 30.0)
    pin = FakePin(list(range(8)))
    if stage != "before open":
        transfer.push(0, range(8), pin)
        await until(
            lambda: (
                transfer.delivered_blocks == 8
                if stage == "after all writes"
                else prefill.node.stats().pending_writes > 0
            )
        )
    transfer.abort("the client left")
    with pytest.raises(Cancelled):
        await transfer.done()
    if stage == "while writing":
        assert not pin.free
        prefill.release_late_writes()
    if stage != "before open":
        await until(lambda: pin.free)
    decode.node.release(incoming.target.transfer_id)
    await until(lambda: incoming.over and incoming.pin.free)
    assert isinstance(incoming.failed[0], Cancelled)
    await until(lambda: prefill.node.stats().open_outgoing == 0)
    assert prefill.node.stats().failed_transfers == 0  # an abort is not a failure
    prefill.backend.on_write = lambda _p, _l, _r: WriteFaultPlan()
    await hand_over(prefill, decode, 3)


async def test_late_write_lands_in_quarantine_only(cluster: Cluster) -> None:
    """Decode aborts while a write is in flight: its block stays pinned until the writer confirms the end."""
    prefill, decode = await cluster.pair()
    await prefill.node.connect(decode.address, decode.name)
    prefill.backend.on_write = lambda _p, local, _r: WriteFaultPlan(delay_s=600.0 if 20 in local else 0.0)
    incoming = decode.reserve("r", 0, [3, 4])
    transfer = prefill.node.start_transfer(incoming.target, "r", 2, 30.0)
    transfer.push(0, [10], FakePin([10]))
    await until(lambda: transfer.delivered_blocks == 1)
    late = FakePin([20])
    transfer.push(1, [20], late)
    await until(lambda: prefill.node.stats().pending_writes == 1)
    before = decode.digest([4])
    decode.node.release(incoming.target.transfer_id)
    await until(lambda: incoming.over)
    await until(lambda: incoming.pin.left == {4})
    assert decode.node.stats().quarantined_blocks == 1
    with pytest.raises(TransferFailed):
        await transfer.done()
    prefill.release_late_writes()
    while incoming.pin.left:
        assert not late.free or decode.digest([4]) != before
        await asyncio.sleep(0.01)
    assert decode.digest([4]) == prefill.digest([20]) != before
    assert late.free
    await until(lambda: decode.node.stats().quarantined_blocks == 0)


async def test_reservation_without_a_writer_expires(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    incoming = decode.reserve("r", 0, [1, 2], deadline_s=0.05)
    await until(lambda: incoming.over)
    assert isinstance(incoming.failed[0], DeadlineExceeded)
    await until(lambda: incoming.pin.free)
    transfer = prefill.node.start_transfer(incoming.target, "r", 2, 30.0)
    pin = FakePin([1, 2])
    transfer.push(0, [1, 2], pin)
    with pytest.raises(TransferFailed):
        await transfer.done()
    await until(lambda: pin.free)
    assert decode.node.stats().dropped["open_unknown"] == 1


async def test_deadline_of_an_open_transfer(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await prefill.node.connect(decode.address, decode.name)
    incoming = decode.reserve("r", 0, range(4), deadline_s=2.0)
    transfer = prefill.node.start_transfer(incoming.target, "r", 4, 30.0)
    transfer.push(0, [0, 1], FakePin([0, 1]))
    await until(lambda: incoming.over)
    assert isinstance(incoming.failed[0], DeadlineExceeded)
    with pytest.raises(TransferFailed):
        await transfer.done()
    await until(lambda: incoming.pin.free)


async def test_sender_deadline(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    incoming = decode.reserve("r", 0, range(4))
    transfer = prefill.node.start_transfer(incoming.target, "r", 4, 0.5)
    with pytest.raises(DeadlineExceeded):
        await transfer.done()
    decode.node.release(incoming.target.transfer_id)
    await until(lambda: incoming.pin.free)


async def test_drain_before_open_refuses_the_open(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    incoming = decode.reserve("r", 0, [1])
    request = transfer_pb2.DrainRequest(transfer_id=transfer_id_to_pb(incoming.target.transfer_id))
    answer = await decode.node._rpc.call(
        prefill.address, prefill.name, "Drain", request, transfer_pb2.DrainResponse, 5.0
    )
    assert answer.generation == prefill.generation
    with pytest.raises(TransferFailed):
        await prefill.node.start_transfer(incoming.target, "r", 1, 30.0).done()
    decode.node.release(incoming.target.transfer_id)
    await until(lambda: incoming.pin.free)


async def test_decode_restarts_under_its_name(cluster: Cluster, unused_tcp_port: int) -> None:
    prefill, decode = await cluster.pair(decode_port=unused_tcp_port)
    await hand_over(prefill, decode, 1)
    old = decode.reserve("old", 0, [1])
    await decode.crash()
    again = await cluster.start("decode-0", Role.DECODE, port=unused_tcp_port)
    assert again.address == decode.address
    with pytest.raises((TransferFailed, Unavailable)):
        await prefill.node.start_transfer(old.target, "old", 1, 10.0).done()
    again.fill(3)
    await hand_over(prefill, again, 2)
    assert [peer.generation for peer in prefill.node.stats().peers] == [again.generation]


async def test_prefill_restarts_under_its_name(cluster: Cluster, unused_tcp_port: int) -> None:
    """Blocks that the dead process could write are released once a newer generation answers at its address."""
    prefill, decode = await cluster.pair(prefill_port=unused_tcp_port)
    await prefill.node.connect(decode.address, decode.name)
    prefill.backend.on_write = lambda _p, _l, _r: WriteFaultPlan(delay_s=60.0)
    incoming = decode.reserve("r", 0, [1, 2])
    transfer = prefill.node.start_transfer(incoming.target, "r", 2, 60.0)
    transfer.push(0, [1, 2], FakePin([1, 2]))
    await until(lambda: prefill.node.stats().pending_writes == 1)
    await prefill.crash()
    decode.node.release(incoming.target.transfer_id)
    await until(lambda: incoming.over)
    await asyncio.sleep(0.3)
    assert incoming.pin.left == {1, 2}
    again = await cluster.start("prefill-0", Role.PREFILL, port=unused_tcp_port)
    again.fill(4)
    await until(lambda: incoming.pin.free)
    await hand_over(again, decode, 5)
    request = transfer_pb2.CommitRequest(
        transfer_id=transfer_id_to_pb(incoming.target.transfer_id), generation=prefill.generation
    )
    with pytest.raises(UnknownTransfer):
        await prefill.node._rpc.call(decode.address, decode.name, "Commit", request, transfer_pb2.CommitResponse, 5.0)
    assert decode.node.stats().dropped["old_generation"] == 1


async def test_a_forgotten_writer_repeats_the_handshake(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "MAX_WRITERS", 2)
    decode = await cluster.start("decode-0", Role.DECODE)
    first, busy, last = [await cluster.start(f"prefill-{number}", Role.PREFILL) for number in range(3)]
    for seed, prefill in enumerate((busy, first, busy, last)):
        prefill.fill(seed)
        await hand_over(prefill, decode, seed)
    await hand_over(busy, decode, 4)  # still known: its last call is newer than that of the first one
    assert "unknown_pod" not in decode.node.stats().dropped
    assert first.agent not in decode.node._incoming.watches
    incoming = decode.reserve("r", 0, [1, 2])
    with pytest.raises(TransferFailed, match="has not shaken hands, or was forgotten"):
        await first.node.start_transfer(incoming.target, "r", 2, 30.0).done()
    assert decode.node.stats().dropped["unknown_pod"] == 1
    await hand_over(first, decode, 5)
    decode.node.release(incoming.target.transfer_id)
    await until(lambda: incoming.pin.free)


async def test_reservations_expire_in_the_order_of_their_deadlines(cluster: Cluster) -> None:
    _, decode = await cluster.pair()
    order: list[int] = []
    for number, deadline_s in enumerate((1.1, 0.1, 0.6)):
        decode.node.expect_transfer(
            request_id=f"r{number}",
            first_block=0,
            blocks=[number],
            pin=FakePin([number]),
            deadline_s=deadline_s,
            on_ready=lambda _commit: None,
            on_failed=lambda _error, number=number: order.append(number),
        )
    await until(lambda: order == [1, 2, 0])


async def test_blocks_are_not_reused_while_a_write_may_land(cluster: Cluster) -> None:
    """Delayed writes, late and doubled notifications, aborts at any time, and blocks that are reused once free."""
    prefill, decode = await cluster.pair()
    await prefill.node.connect(decode.address, decode.name)
    rng = random.Random(11)
    prefill.backend.on_write = lambda _p, _l, _r: WriteFaultPlan(delay_s=rng.choice((0, 0, 0.02, 0.1, 0.4)))
    decode.backend.on_notification = lambda _n: rng.choice(((0.0,), (0.0,), (0.1,), (0.0, 0.2)))
    free = list(range(24))
    outcomes = {"ready": 0, "failed": 0}

    async def request(number: int) -> None:
        count = rng.randint(1, 6)
        await until(lambda: len(free) >= count)
        targets = [free.pop(rng.randrange(len(free))) for _ in range(count)]
        source = rng.sample(range(NUM_BLOCKS), count)
        incoming = decode.reserve(f"r{number}", 0, targets)
        transfer = prefill.node.start_transfer(incoming.target, f"r{number}", count, 30.0)
        for start, length in chunks(rng, 0, count):
            transfer.push(start, source[start : start + length], FakePin(source[start : start + length]))
        transfer.finish([1], [None])
        if rng.random() < 0.5:
            await asyncio.sleep(rng.random() * 0.3)
            decode.node.release(incoming.target.transfer_id)
        await until(lambda: incoming.over)
        if incoming.ready:
            outcomes["ready"] += 1
            for _ in range(3):
                assert decode.digest(targets) == prefill.digest(source), "a foreign write landed here"
                await asyncio.sleep(0.05)
            decode.node.release(incoming.target.transfer_id)
        else:
            outcomes["failed"] += 1
        await until(lambda: incoming.pin.free)
        free.extend(targets)

    await asyncio.gather(*(request(number) for number in range(60)))
    assert outcomes["ready"] >= 10
    assert outcomes["failed"] >= 5
    assert sorted(free) == list(range(24))
    stats = decode.node.stats()
    assert (stats.open_incoming, stats.quarantined_blocks) == (0, 0)
    await until(lambda: prefill.node.stats().pending_writes == 0)


async def test_process_watches_are_closed_however_the_connection_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[ProcessWatch] = []

    def watch(_pid: int, _boot_id: str, _address: str) -> ProcessWatch:
        opened.append(ProcessWatch(os.pidfd_open(os.getpid())))
        return opened[-1]

    monkeypatch.setattr("kv_transfer.peers.connection.watch_process", watch)
    monkeypatch.setattr("kv_transfer.servicer.watch_process", watch)
    cluster = Cluster("loopback")
    try:
        prefill, decode = await cluster.pair()
        connect = prefill.backend.connect

        def refuse(peer: str, metadata: bytes, memory: PeerMemory) -> None:
            raise TransferFailed("the metadata was refused")

        prefill.backend.connect = refuse  # type: ignore[method-assign]
        with pytest.raises(TransferFailed, match="refused"):
            await prefill.node.connect(decode.address, decode.name)
        await until(lambda: opened[0].closed)
        prefill.backend.connect = connect  # type: ignore[method-assign]
        await hand_over(prefill, decode, 1)
        assert [w.closed for w in opened[1:]] == [False, False]  # prefill's of decode, decode's of prefill
    finally:
        await cluster.stop()
    assert all(w.closed for w in opened)
    assert not opened[1].ended()


async def test_decode_is_gone(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    target = decode.reserve("r", 0, [1]).target
    await decode.crash()
    pin = FakePin([1])
    transfer = prefill.node.start_transfer(target, "r", 1, 5.0)
    transfer.push(0, [1], pin)
    with pytest.raises((Unavailable, TransferFailed)):
        await transfer.done()
    await until(lambda: pin.free)


async def test_stop_lets_running_transfers_end(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await prefill.node.connect(decode.address, decode.name)
    prefill.backend.on_write = lambda _p, _l, _r: WriteFaultPlan(delay_s=0.3)
    incoming = decode.reserve("r", 0, [1])
    transfer = prefill.node.start_transfer(incoming.target, "r", 1, 30.0)
    transfer.push(0, [1], FakePin([1]))
    transfer.finish([1], [None])
    await prefill.node.stop(30.0)
    assert (await transfer.done()).blocks == 1
    await until(lambda: len(incoming.ready) == 1)
    with pytest.raises(Unavailable):
        prefill.node.start_transfer(incoming.target, "again", 1, 30.0)
