"""Two pods hand KV over: the same tests on loopback and on NIXL (test_transfer_tcp.py repeats them over TCP)."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from common.errors import (
    BlockDamaged,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    LayoutMismatch,
    TransferFailed,
    Unauthenticated,
    Unavailable,
    UnknownTransfer,
)
from common.kv_layout import KVLayout
from common.pb import transfer_pb2
from common.types import FinishReason, Role
from common.wire import transfer_id_to_pb
from kv_transfer.backend import Backend, Notification, Transport, WriteState
from kv_transfer.faults import WriteFault
from kv_transfer.loopback import LoopbackBackend
from kv_transfer.memory import PeerMemory
from kv_transfer.messages import Commit
from kv_transfer.notification import RangeWritten
from kv_transfer.process_watch import ProcessWatch
from tests.integration.transfer_pods import LAYOUT, NUM_BLOCKS, Cluster, FakeHold, Pod, chunks, until


@pytest_asyncio.fixture(params=["loopback", "nixl"])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    cluster = Cluster(request.param)
    yield cluster
    await cluster.stop()


async def hand_over(
    prefill: Pod, decode: Pod, seed: int, *, num_blocks: int = 40, first: int = 0, home: list[int] | None = None
) -> None:
    """One whole transfer with random pushes between random blocks, checked byte by byte."""
    rng = random.Random(seed)
    source = rng.sample(range(NUM_BLOCKS), num_blocks)
    home = home or rng.sample(range(NUM_BLOCKS), num_blocks)
    incoming = decode.reserve(f"r{seed}", first, home[first:])
    transfer = prefill.node.outgoing(incoming.target, f"r{seed}", num_blocks, 30.0)
    holds = []
    for start, count in chunks(rng, 0, num_blocks):
        holds.append(FakeHold(source[start : start + count]))
        transfer.push(start, source[start : start + count], holds[-1])
        if rng.random() < 0.5:
            await asyncio.sleep(0.001)
    transfer.finish([7], [None])
    report = await transfer.done()
    await until(lambda: incoming.over)
    assert incoming.committed == [Commit((7,), (None,))]
    assert incoming.hold_was_free == [True]
    assert all(hold.free for hold in holds)
    assert report.blocks == num_blocks - first
    assert report.bytes == report.blocks * LAYOUT.block_bytes
    assert decode.digest(home[first:]) == prefill.digest(source[first:])
    decode.node.release(incoming.target.transfer_id)


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
    assert stats.peers[0].gbps > 0
    assert decode.node.stats().open_incoming == 0


async def test_many_at_once(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    homes = random.Random(0).sample(range(NUM_BLOCKS), 120)
    await asyncio.gather(
        *(hand_over(prefill, decode, i, num_blocks=6, home=homes[6 * i : 6 * i + 6]) for i in range(20))
    )
    assert decode.node.stats().received_transfers == 20
    assert prefill.node.stats().open_outgoing == 0


async def test_blocks_are_delivered_before_the_prompt_is_computed(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    incoming = decode.reserve("r", 0, range(8))
    transfer = prefill.node.outgoing(incoming.target, "r", 8, 30.0)
    progress: list[int] = []
    transfer.on_progress = progress.append
    for start in (0, 2, 4):
        transfer.push(start, [start, start + 1], FakeHold([start, start + 1]))
    await until(lambda: transfer.delivered_blocks == 6)
    transfer.push(6, [6, 7], FakeHold([6, 7]))
    transfer.finish([1], [FinishReason.STOP])
    report = await transfer.done()
    assert 6 <= report.delivered_before_finish <= 8
    assert progress[-1] == 8
    await until(lambda: bool(incoming.ready))  # the acknowledgement goes first
    assert incoming.ready[0].finish_reasons == (FinishReason.STOP,)


async def test_nothing_to_push(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    incoming = decode.reserve("r", 4, [])
    transfer = prefill.node.outgoing(incoming.target, "r", 4, 30.0)
    hold = FakeHold([1, 2, 3, 4])
    transfer.push(0, [1, 2, 3, 4], hold)
    transfer.finish([3], [None])
    assert (await transfer.done()).blocks == 0
    assert hold.free
    assert len(incoming.ready) == 1


async def test_a_push_outside_the_prompt_is_refused(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    transfer = prefill.node.outgoing(decode.reserve("r", 0, [1, 2]).target, "r", 2, 30.0)
    hold = FakeHold([5, 6])
    with pytest.raises(InvalidRequest):
        transfer.push(1, [5, 6], hold)
    assert hold.free
    transfer.abort("the test is over")


@pytest.mark.parametrize("stage", ["before open", "while writing", "after all writes"])
async def test_sender_aborts(cluster: Cluster, stage: str) -> None:
    prefill, decode = await cluster.pair()
    await prefill.node.connect(decode.address)
    if stage == "while writing":
        prefill.backend.on_write = lambda _p, _l, _r: WriteFault(delay_s=1.0)
    incoming = decode.reserve("r", 0, range(8))
    transfer = prefill.node.outgoing(incoming.target, "r", 8, 30.0)
    hold = FakeHold(list(range(8)))
    if stage != "before open":
        transfer.push(0, range(8), hold)
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
        assert not hold.free
    if stage != "before open":
        await until(lambda: hold.free)
    decode.node.release(incoming.target.transfer_id)
    await until(lambda: incoming.hold.free)
    assert isinstance(incoming.failed[0], Cancelled)
    await until(lambda: prefill.node.stats().open_outgoing == 0)
    prefill.backend.on_write = lambda _p, _l, _r: WriteFault()
    await hand_over(prefill, decode, 3)


async def test_late_write_lands_in_quarantine_only(cluster: Cluster) -> None:
    """Decode aborts while a write is under way: its block stays held until the writer confirms the end."""
    prefill, decode = await cluster.pair()
    await prefill.node.connect(decode.address)
    prefill.backend.on_write = lambda _p, local, _r: WriteFault(delay_s=1.0 if 20 in local else 0.0)
    incoming = decode.reserve("r", 0, [3, 4])
    transfer = prefill.node.outgoing(incoming.target, "r", 2, 30.0)
    transfer.push(0, [10], FakeHold([10]))
    await until(lambda: transfer.delivered_blocks == 1)
    late = FakeHold([20])
    transfer.push(1, [20], late)
    await until(lambda: prefill.node.stats().pending_writes == 1)
    before = decode.digest([4])
    decode.node.release(incoming.target.transfer_id)
    await until(lambda: incoming.over)
    await until(lambda: incoming.hold.left == {4})
    assert decode.node.stats().quarantined_blocks == 1
    with pytest.raises(TransferFailed):
        await transfer.done()
    while incoming.hold.left:
        assert not late.free or decode.digest([4]) != before
        await asyncio.sleep(0.01)
    assert decode.digest([4]) == prefill.digest([20]) != before
    assert late.free
    assert decode.node.stats().quarantined_blocks == 0


async def test_reservation_that_nobody_opens_expires(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    incoming = decode.reserve("r", 0, [1, 2], deadline_s=0.05)
    await until(lambda: incoming.over)
    assert isinstance(incoming.failed[0], DeadlineExceeded)
    assert incoming.hold.free
    transfer = prefill.node.outgoing(incoming.target, "r", 2, 30.0)
    hold = FakeHold([1, 2])
    transfer.push(0, [1, 2], hold)
    with pytest.raises(TransferFailed):
        await transfer.done()
    assert hold.free
    assert decode.node.stats().dropped["open_unknown"] == 1


async def test_deadline_of_an_open_transfer(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    incoming = decode.reserve("r", 0, range(4), deadline_s=0.5)
    transfer = prefill.node.outgoing(incoming.target, "r", 4, 30.0)
    transfer.push(0, [0, 1], FakeHold([0, 1]))
    await until(lambda: incoming.over)
    assert isinstance(incoming.failed[0], DeadlineExceeded)
    with pytest.raises(TransferFailed):
        await transfer.done()
    await until(lambda: incoming.hold.free)


async def test_sender_deadline(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    incoming = decode.reserve("r", 0, range(4))
    transfer = prefill.node.outgoing(incoming.target, "r", 4, 0.5)
    with pytest.raises(DeadlineExceeded):
        await transfer.done()
    decode.node.release(incoming.target.transfer_id)
    await until(lambda: incoming.hold.free)


async def test_drain_before_open_refuses_the_open(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    incoming = decode.reserve("r", 0, [1])
    request = transfer_pb2.DrainRequest(transfer_id=transfer_id_to_pb(incoming.target.transfer_id))
    answer = await decode.node._rpc.call(prefill.address, "Drain", request, transfer_pb2.DrainResponse, 5.0)
    assert answer.generation == prefill.generation
    with pytest.raises(TransferFailed):
        await prefill.node.outgoing(incoming.target, "r", 1, 30.0).done()
    decode.node.release(incoming.target.transfer_id)
    await until(lambda: incoming.hold.free)


async def test_notifications_come_as_they_like(cluster: Cluster) -> None:
    """Late (after the commit), doubled and in another order."""
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
        first = RangeWritten.parse(notification.payload).first  # type: ignore[union-attr]
        lost.append(first)
        return (0.0,) if lost.count(first) > 1 else ()

    decode.backend.on_notification = lose_each_once
    await hand_over(prefill, decode, 3)
    assert lost.count(0) > 1


async def test_the_sender_is_not_done_before_every_range_arrived(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    decode.backend.on_notification = lambda _n: (0.2,)
    incoming = decode.reserve("r", 0, range(4))
    transfer = prefill.node.outgoing(incoming.target, "r", 4, 30.0)
    transfer.push(0, range(4), FakeHold(list(range(4))))
    transfer.finish([1], [None])
    await transfer.done()
    assert incoming.committed == [Commit((1,), (None,))]


async def test_without_notifications_neither_side_succeeds(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    decode.backend.on_notification = lambda _n: ()
    incoming = decode.reserve("r", 0, range(4), deadline_s=1.0)
    transfer = prefill.node.outgoing(incoming.target, "r", 4, 30.0)
    for block in range(4):
        transfer.push(block, [block], FakeHold([block]))
    transfer.finish([1], [None])
    with pytest.raises(TransferFailed):
        await transfer.done()
    assert isinstance(incoming.failed[0], DeadlineExceeded)
    await until(lambda: incoming.hold.free)  # the writer answered Drained


async def test_failed_write(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    prefill.backend.on_write = lambda _p, local, _r: WriteFault(fail="cable cut" if 2 in local else None)
    incoming = decode.reserve("r", 0, range(4))
    transfer = prefill.node.outgoing(incoming.target, "r", 4, 30.0)
    holds = [FakeHold([block]) for block in range(4)]
    for block, hold in enumerate(holds):
        transfer.push(block, [block], hold)
    with pytest.raises(TransferFailed, match="cable cut"):
        await transfer.done()
    await until(lambda: all(hold.free for hold in holds))
    decode.node.release(incoming.target.transfer_id)
    await until(lambda: incoming.hold.free)
    prefill.backend.on_write = lambda _p, _l, _r: WriteFault()
    await hand_over(prefill, decode, 4)


async def test_damage_is_found_by_checksums(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await prefill.node.connect(decode.address)
    incoming = decode.reserve("good", 0, range(4))
    transfer = prefill.node.outgoing(incoming.target, "good", 4, 30.0)
    transfer.push(0, range(4), FakeHold(list(range(4))))
    transfer.finish([1], [None])
    await transfer.done()
    await until(lambda: bool(incoming.ready))  # the acknowledgement goes first
    assert len(incoming.ready[0].checksums) == 4
    prefill.backend.on_write = lambda _p, _l, _r: WriteFault(corrupt=1)
    incoming = decode.reserve("bad", 0, range(4))
    transfer = prefill.node.outgoing(incoming.target, "bad", 4, 30.0)
    transfer.push(0, range(4), FakeHold(list(range(4))))
    transfer.finish([1], [None])
    with pytest.raises(TransferFailed):
        await transfer.done()
    assert "block 1" in incoming.failed[0].message
    assert isinstance(incoming.failed[0], BlockDamaged)
    assert decode.node.stats().damaged_transfers == 1
    await until(lambda: incoming.hold.free)


async def test_a_source_block_that_changes_before_it_is_written_is_damage(cluster: Cluster) -> None:
    """Checksums are taken when a block is finished, so they also find a source that was reused too early."""
    prefill, decode = await cluster.pair()
    await prefill.node.connect(decode.address)
    prefill.backend.on_write = lambda _p, _l, _r: WriteFault(delay_s=0.1)
    incoming = decode.reserve("r", 1, [4, 5])
    transfer = prefill.node.outgoing(incoming.target, "r", 3, 30.0)
    transfer.push(0, [6, 7, 8], FakeHold([6, 7, 8]))
    transfer.finish([1], [None])
    await until(lambda: prefill.node.stats().pending_writes > 0)
    prefill.memory.write_block(8, bytes(prefill.memory.block_bytes))
    with pytest.raises(TransferFailed):
        await transfer.done()
    assert "block 2" in incoming.failed[0].message
    await until(lambda: incoming.hold.free)


async def test_damage_goes_unnoticed_without_checksums(cluster: Cluster) -> None:
    """The fault is real: without checksums the damaged block is taken over."""
    prefill, decode = await cluster.pair(checksums=False)
    await prefill.node.connect(decode.address)
    prefill.backend.on_write = lambda _p, _l, _r: WriteFault(corrupt=0)
    incoming = decode.reserve("r", 0, [9])
    transfer = prefill.node.outgoing(incoming.target, "r", 1, 30.0)
    transfer.push(0, [5], FakeHold([5]))
    transfer.finish([1], [None])
    await transfer.done()
    await until(lambda: incoming.over)
    expected = bytes(byte ^ 0xFF for byte in prefill.memory.read_block(5))
    assert decode.memory.read_block(9) == expected


async def test_wrong_secret(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    stranger = await cluster.start("stranger", Role.PREFILL, secret=b"guessed")
    with pytest.raises(Unauthenticated):
        await stranger.node.connect(decode.address)
    incoming = decode.reserve("r", 0, [1])
    with pytest.raises(Unauthenticated):
        await stranger.node.outgoing(incoming.target, "r", 1, 5.0).done()
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
async def test_other_layouts_are_refused_by_name(field: str, layout: KVLayout) -> None:
    cluster = Cluster("loopback")
    try:
        decode = await cluster.start("decode-0", Role.DECODE)
        other = await cluster.start("prefill-1", Role.PREFILL, layout=layout)
        with pytest.raises(LayoutMismatch) as refusal:
            await other.node.connect(decode.address)
        assert refusal.value.field == field
        with pytest.raises(LayoutMismatch):
            await other.node.outgoing(decode.reserve("r", 0, [1]).target, "r", 1, 5.0).done()
    finally:
        await cluster.stop()


async def test_decode_restarts_under_its_name(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await hand_over(prefill, decode, 1)
    old = decode.reserve("old", 0, [1])
    await decode.crash()
    port = int(decode.address.rpartition(":")[2])
    again = await cluster.start("decode-0", Role.DECODE, port=port)
    assert again.address == decode.address
    with pytest.raises((TransferFailed, Unavailable)):
        await prefill.node.outgoing(old.target, "old", 1, 10.0).done()
    again.fill(3)
    await hand_over(prefill, again, 2)
    assert [peer.generation for peer in prefill.node.stats().peers] == [again.generation]


async def test_prefill_restarts_under_its_name(cluster: Cluster) -> None:
    """Blocks that the dead process may still write come back once a newer generation answers at its address."""
    prefill, decode = await cluster.pair()
    await prefill.node.connect(decode.address)
    prefill.backend.on_write = lambda _p, _l, _r: WriteFault(delay_s=60.0)
    incoming = decode.reserve("r", 0, [1, 2])
    transfer = prefill.node.outgoing(incoming.target, "r", 2, 60.0)
    transfer.push(0, [1, 2], FakeHold([1, 2]))
    await until(lambda: prefill.node.stats().pending_writes == 1)
    await prefill.crash()
    decode.node.release(incoming.target.transfer_id)
    await until(lambda: incoming.over)
    await asyncio.sleep(0.3)
    assert incoming.hold.left == {1, 2}
    port = int(prefill.address.rpartition(":")[2])
    again = await cluster.start("prefill-0", Role.PREFILL, port=port)
    again.fill(4)
    await until(lambda: incoming.hold.free)
    await hand_over(again, decode, 5)
    request = transfer_pb2.CommitRequest(
        transfer_id=transfer_id_to_pb(incoming.target.transfer_id), generation=prefill.generation
    )
    with pytest.raises(UnknownTransfer):
        await prefill.node._rpc.call(decode.address, "Commit", request, transfer_pb2.CommitResponse, 5.0)
    assert decode.node.stats().dropped["old_generation"] == 1


async def test_reservations_expire_in_the_order_of_their_deadlines(cluster: Cluster) -> None:
    _, decode = await cluster.pair()
    order: list[int] = []
    for number, deadline_s in enumerate((0.6, 0.1, 0.3)):
        decode.node.reserve(
            request_id=f"r{number}",
            first_block=0,
            blocks=[number],
            hold=FakeHold([number]),
            deadline_s=deadline_s,
            on_ready=lambda _commit: None,
            on_failed=lambda _error, number=number: order.append(number),
        )
    await until(lambda: order == [1, 2, 0])


async def test_blocks_are_not_reused_while_a_write_may_land(cluster: Cluster) -> None:
    """Delayed writes, late and doubled notifications, aborts at any time, and homes that are reused once free."""
    prefill, decode = await cluster.pair()
    await prefill.node.connect(decode.address)
    rng = random.Random(11)
    prefill.backend.on_write = lambda _p, _l, _r: WriteFault(delay_s=rng.choice((0, 0, 0.02, 0.1, 0.4)))
    decode.backend.on_notification = lambda _n: rng.choice(((0.0,), (0.0,), (0.1,), (0.0, 0.2)))
    free = list(range(24))
    outcomes = {"ready": 0, "failed": 0}

    async def request(number: int) -> None:
        count = rng.randint(1, 6)
        await until(lambda: len(free) >= count)
        home = [free.pop(rng.randrange(len(free))) for _ in range(count)]
        source = rng.sample(range(NUM_BLOCKS), count)
        incoming = decode.reserve(f"r{number}", 0, home)
        transfer = prefill.node.outgoing(incoming.target, f"r{number}", count, 30.0)
        for start, length in chunks(rng, 0, count):
            transfer.push(start, source[start : start + length], FakeHold(source[start : start + length]))
        transfer.finish([1], [None])
        if rng.random() < 0.5:
            await asyncio.sleep(rng.random() * 0.3)
            decode.node.release(incoming.target.transfer_id)
        await until(lambda: incoming.over)
        if incoming.ready:
            outcomes["ready"] += 1
            for _ in range(3):
                assert decode.digest(home) == prefill.digest(source), "somebody else's write landed here"
                await asyncio.sleep(0.05)
            decode.node.release(incoming.target.transfer_id)
        else:
            outcomes["failed"] += 1
        await until(lambda: incoming.hold.free)
        free.extend(home)

    await asyncio.gather(*(request(number) for number in range(60)))
    assert outcomes["ready"] >= 10
    assert outcomes["failed"] >= 5
    assert sorted(free) == list(range(24))
    stats = decode.node.stats()
    assert (stats.open_incoming, stats.quarantined_blocks) == (0, 0)
    await until(lambda: prefill.node.stats().pending_writes == 0)


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
        transfer = prefill.node.outgoing(incoming.target, "r", 4, 30.0)
        Broken.breaks = 1
        transfer.push(0, range(4), FakeHold(list(range(4))))
        with pytest.raises(TransferFailed, match="no such handle"):
            await transfer.done()
        decode.node.release(incoming.target.transfer_id)
        await until(lambda: incoming.hold.free)
        await hand_over(prefill, decode, 2)
        assert prefill.node.alive
        await prefill.node.stop()
        assert not prefill.node.alive
    finally:
        await cluster.stop()


async def test_watches_are_closed_whatever_becomes_of_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[ProcessWatch] = []

    def watch(_pid: int, _boot_id: str, _address: str) -> ProcessWatch:
        opened.append(ProcessWatch(os.pidfd_open(os.getpid())))
        return opened[-1]

    monkeypatch.setattr("kv_transfer.connector.watch_process", watch)
    monkeypatch.setattr("kv_transfer.servicer.watch_process", watch)
    cluster = Cluster("loopback")
    try:
        prefill, decode = await cluster.pair()
        connect = prefill.backend.connect

        def refuse(peer: str, metadata: bytes, memory: PeerMemory) -> None:
            raise TransferFailed("the metadata was refused")

        prefill.backend.connect = refuse  # type: ignore[method-assign]
        with pytest.raises(TransferFailed, match="refused"):
            await prefill.node.connect(decode.address)
        await until(lambda: opened[0].closed)
        prefill.backend.connect = connect  # type: ignore[method-assign]
        await hand_over(prefill, decode, 1)
        assert [w.closed for w in opened[1:]] == [False, False]  # prefill's of decode, decode's of prefill
    finally:
        await cluster.stop()
    assert all(w.closed for w in opened)
    assert not opened[1].ended()


@pytest.mark.parametrize("transport", ["tcp", "unknown"])
async def test_device_memory_never_travels_over_tcp_unnoticed(transport: str) -> None:
    class Slow(LoopbackBackend):
        def transport(self, peer: str, *, same_host: bool) -> Transport:
            return Transport(transport, "reported")

    class Device(Cluster):
        def backend(self) -> Backend:
            return Slow(self.fabric)

    cluster = Device("loopback")
    try:
        prefill, decode = await cluster.pair()
        assert (await prefill.node.connect(decode.address)).transport == transport
        other = await cluster.start("prefill-1", Role.PREFILL, kind="VRAM")
        with pytest.raises(TransferFailed, match="allow_tcp"):
            await other.node.connect(decode.address)
        allowed = await cluster.start("prefill-2", Role.PREFILL, kind="VRAM", allow_tcp=True)
        assert (await allowed.node.connect(decode.address)).transport == transport
    finally:
        await cluster.stop()


async def test_decode_is_gone(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    target = decode.reserve("r", 0, [1]).target
    await decode.crash()
    hold = FakeHold([1])
    transfer = prefill.node.outgoing(target, "r", 1, 5.0)
    transfer.push(0, [1], hold)
    with pytest.raises((Unavailable, TransferFailed)):
        await transfer.done()
    assert hold.free


async def test_commit_is_idempotent(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    incoming = decode.reserve("r", 0, [1])
    transfer = prefill.node.outgoing(incoming.target, "r", 1, 30.0)
    transfer.push(0, [1], FakeHold([1]))
    transfer.finish([1], [None])
    await transfer.done()
    await until(lambda: incoming.over)
    request = transfer_pb2.CommitRequest(
        transfer_id=transfer_id_to_pb(incoming.target.transfer_id), generation=prefill.generation, first_tokens=[9]
    )
    await prefill.node._rpc.call(decode.address, "Commit", request, transfer_pb2.CommitResponse, 5.0)
    assert incoming.committed == [Commit((1,), (None,))]


async def test_stop_lets_running_transfers_end(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await prefill.node.connect(decode.address)
    prefill.backend.on_write = lambda _p, _l, _r: WriteFault(delay_s=0.3)
    incoming = decode.reserve("r", 0, [1])
    transfer = prefill.node.outgoing(incoming.target, "r", 1, 30.0)
    transfer.push(0, [1], FakeHold([1]))
    transfer.finish([1], [None])
    await prefill.node.stop(5.0)
    assert (await transfer.done()).blocks == 1
    assert len(incoming.ready) == 1
    with pytest.raises(Unavailable):
        prefill.node.outgoing(incoming.target, "again", 1, 30.0)
