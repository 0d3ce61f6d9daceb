"""Transfers over a network that loses, repeats and damages messages, and with failing writes.

The same tests on loopback and on NIXL (test_transfer_tcp.py repeats them over TCP).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from common.errors import BlockDamaged, DeadlineExceeded, TransferFailed
from kv_transfer.backend.interface import Backend, Notification, WriteState
from kv_transfer.backend.loopback import LoopbackBackend
from kv_transfer.messages import Commit, RangeWritten, parse_notification
from tests.rigs.transfer.faulty_backend import WriteFaultPlan
from tests.rigs.transfer.transfer_pods import Cluster, FakePin, hand_over
from tests.rigs.waiting import until


@pytest_asyncio.fixture(params=["loopback", "nixl"])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    cluster = Cluster(request.param)
    yield cluster
    await cluster.stop()


async def test_notifications_may_be_late_doubled_and_reordered(cluster: Cluster) -> None:
    """Late means after the commit."""
    prefill, decode = await cluster.pair()
    rng = random.Random(5)
    decode.backend.on_notification = lambda _n: [rng.random() * 0.3 for _ in range(rng.randint(1, 3))]
    for seed in range(3):
        await hand_over(prefill, decode, seed)
    await asyncio.sleep(0.3)
    assert decode.node.stats().received_transfers == 3


async def test_a_lost_notification_is_sent_again(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    lost: list[int] = []

    def lose_each_once(notification: Notification) -> tuple[float, ...]:
        written = parse_notification(notification.payload)
        assert isinstance(written, RangeWritten)
        lost.append(written.first)
        return (0.0,) if lost.count(written.first) > 1 else ()

    decode.backend.on_notification = lose_each_once
    await hand_over(prefill, decode, 3)
    assert lost.count(0) > 1


async def test_the_sender_is_not_done_before_every_range_arrived(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    decode.backend.on_notification = lambda _n: (0.2,)
    incoming = decode.reserve("r", 0, range(4))
    transfer = prefill.node.start_transfer(incoming.target, "r", 4, 30.0)
    transfer.push(0, range(4), FakePin(list(range(4))))
    transfer.finish([1], [None])
    await transfer.done()
    await until(lambda: incoming.over)  # the acknowledgement goes first
    assert incoming.committed == [Commit((1,), (None,))]


async def test_without_notifications_neither_side_succeeds(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await prefill.node.connect(decode.address, decode.name)
    decode.backend.on_notification = lambda _n: ()
    incoming = decode.reserve("r", 0, range(4), deadline_s=3.0)
    transfer = prefill.node.start_transfer(incoming.target, "r", 4, 30.0)
    for block in range(4):
        transfer.push(block, [block], FakePin([block]))
    transfer.finish([1], [None])
    with pytest.raises(TransferFailed):
        await transfer.done()
    await until(lambda: incoming.over)
    assert isinstance(incoming.failed[0], DeadlineExceeded)
    await until(lambda: incoming.pin.free)  # the writer answered Drain


async def test_failed_write(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    prefill.backend.on_write = lambda _p, local, _r: WriteFaultPlan(fail="cable cut" if 2 in local else None)
    incoming = decode.reserve("r", 0, range(4))
    transfer = prefill.node.start_transfer(incoming.target, "r", 4, 30.0)
    pins = [FakePin([block]) for block in range(4)]
    for block, pin in enumerate(pins):
        transfer.push(block, [block], pin)
    with pytest.raises(TransferFailed, match="cable cut"):
        await transfer.done()
    await until(lambda: all(pin.free for pin in pins))
    decode.node.release(incoming.target.transfer_id)
    await until(lambda: incoming.pin.free)
    prefill.backend.on_write = lambda _p, _l, _r: WriteFaultPlan()
    await hand_over(prefill, decode, 4)


async def test_damage_is_found_by_checksums(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await prefill.node.connect(decode.address, decode.name)
    incoming = decode.reserve("good", 0, range(4))
    transfer = prefill.node.start_transfer(incoming.target, "good", 4, 30.0)
    transfer.push(0, range(4), FakePin(list(range(4))))
    transfer.finish([1], [None])
    await transfer.done()
    await until(lambda: bool(incoming.ready))  # the acknowledgement goes first
    assert len(incoming.ready[0].checksums) == 4
    prefill.backend.on_write = lambda _p, _l, _r: WriteFaultPlan(corrupt=1)
    incoming = decode.reserve("bad", 0, range(4))
    transfer = prefill.node.start_transfer(incoming.target, "bad", 4, 30.0)
    transfer.push(0, range(4), FakePin(list(range(4))))
    transfer.finish([1], [None])
    with pytest.raises(TransferFailed):
        await transfer.done()
    await until(lambda: incoming.over)  # the acknowledgement goes first
    assert "block 1" in incoming.failed[0].message
    assert isinstance(incoming.failed[0], BlockDamaged)
    assert decode.node.stats().damaged_transfers == 1
    await until(lambda: incoming.pin.free)


async def test_a_source_block_that_changes_before_it_is_written_is_damage(cluster: Cluster) -> None:
    """Checksums are taken when a block is finished, so they also find a source that was reused too early."""
    prefill, decode = await cluster.pair()
    await prefill.node.connect(decode.address, decode.name)

    def change(*_blocks: object) -> WriteFaultPlan:
        """Changes a block that was pushed but not written."""
        prefill.memory.write_block(8, bytes(prefill.memory.block_bytes))
        return WriteFaultPlan()

    prefill.backend.on_write = change
    incoming = decode.reserve("r", 1, [4, 5])
    transfer = prefill.node.start_transfer(incoming.target, "r", 3, 30.0)
    transfer.push(0, [6, 7, 8], FakePin([6, 7, 8]))
    transfer.finish([1], [None])
    with pytest.raises(TransferFailed):
        await transfer.done()
    await until(lambda: incoming.over)  # the acknowledgement goes first
    assert "block 2" in incoming.failed[0].message
    await until(lambda: incoming.pin.free)


async def test_damage_goes_unnoticed_without_checksums(cluster: Cluster) -> None:
    """Without checksums the damaged block is accepted."""
    prefill, decode = await cluster.pair(checksums=False)
    await prefill.node.connect(decode.address, decode.name)
    prefill.backend.on_write = lambda _p, _l, _r: WriteFaultPlan(corrupt=0)
    incoming = decode.reserve("r", 0, [9])
    transfer = prefill.node.start_transfer(incoming.target, "r", 1, 30.0)
    transfer.push(0, [5], FakePin([5]))
    transfer.finish([1], [None])
    await transfer.done()
    await until(lambda: incoming.over)
    expected = bytes(byte ^ 0xFF for byte in prefill.memory.read_block(5))
    assert decode.memory.read_block(9) == expected


async def test_a_poll_that_raises_fails_its_write_and_nothing_else() -> None:
    class Broken(LoopbackBackend):
        breaks = 0

        def poll(self, handle: int) -> WriteState:
            state = super().poll(handle)
            if Broken.breaks:
                Broken.breaks -= 1
                raise RuntimeError("no such handle")
            return state

    class Breaking(Cluster):
        def backend(self) -> Backend:
            return Broken(self.fabric)

    cluster = Breaking("loopback")
    try:
        prefill, decode = await cluster.pair()
        await hand_over(prefill, decode, 1)
        incoming = decode.reserve("r", 0, range(4))
        transfer = prefill.node.start_transfer(incoming.target, "r", 4, 30.0)
        Broken.breaks = 1
        transfer.push(0, range(4), FakePin(list(range(4))))
        with pytest.raises(TransferFailed, match="no such handle"):
            await transfer.done()
        decode.node.release(incoming.target.transfer_id)
        await until(lambda: incoming.pin.free)
        await hand_over(prefill, decode, 2)
        assert prefill.node.alive
        await prefill.node.stop()
        assert not prefill.node.alive
    finally:
        await cluster.stop()
