"""The staging protocol on a fake clock: pieces, lost messages, sessions, windows and their grace. Loopback inside."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from common.errors import TransferFailed
from kv_transfer.backend.interface import Notification, WriteState
from kv_transfer.backend.loopback import LoopbackBackend, LoopbackFabric, LoopbackFault
from kv_transfer.backend.staged import StagedBackend
from kv_transfer.backend.staging import messages
from kv_transfer.backend.staging.agent import StagingOptions
from kv_transfer.backend.staging.area import StagingArea
from kv_transfer.backend.staging.copiers import Ended, MemoryCopier
from kv_transfer.backend.staging.receiver_end import GRACE_S
from kv_transfer.backend.staging.writer_end import END_S, SILENCE_S
from kv_transfer.memory import PoolMemory, host_pool

BLOCKS, BLOCK_BYTES, SLOTS = 64, 512, 64  # windows of 16 slots, pieces of 4 blocks, three windows


class SlowCopier(MemoryCopier):
    """Copies at once, and ends the copies when the test says so. Fails copies if asked."""

    hold = fails = False
    loads = 0

    def save(self, blocks: Sequence[int], area: StagingArea, slots: Sequence[int]) -> Ended:
        super().save(blocks, area, slots)
        return self._ended

    def load(self, area: StagingArea, slots: Sequence[int], blocks: Sequence[int]) -> Ended:
        self.loads += 1
        super().load(area, slots, blocks)
        return self._ended

    def _ended(self) -> bool:
        if self.fails:
            raise RuntimeError("an illegal memory access was encountered")
        return not self.hold


@dataclass
class Pod:
    """A backend with its pool, and what it delivered."""

    name: str
    backend: StagedBackend
    memory: PoolMemory
    copier: SlowCopier
    delivered: list[Notification] = field(default_factory=list)

    def turn(self) -> None:
        self.delivered += self.backend.notifications()

    @property
    def payloads(self) -> list[bytes]:
        return [notification.payload for notification in self.delivered]


class World:
    """Pods on one fabric with one clock."""

    def __init__(self, directory: str | None) -> None:
        self.now = 0.0
        self.directory = directory
        self.fabric = LoopbackFabric(lambda: self.now)
        self.pods: list[Pod] = []

    def pod(self, name: str) -> Pod:
        memory = host_pool(BLOCKS, BLOCK_BYTES)
        copier = SlowCopier(memory)
        options = StagingOptions(SLOTS * BLOCK_BYTES, self.directory, always=True)
        direct = LoopbackBackend(self.fabric)
        backend = StagedBackend(
            direct, lambda: LoopbackBackend(self.fabric), lambda _: copier, options, lambda: self.now
        )
        backend.start(name, memory)
        self.pods.append(Pod(name, backend, memory, copier))
        rng = random.Random(name)
        for block in range(BLOCKS):
            memory.write_block(block, rng.randbytes(BLOCK_BYTES))
        return self.pods[-1]

    def connect(self, writer: Pod, receiver: Pod) -> None:
        """Does what a handshake and connect do."""
        receiver.backend.add_peer(writer.name, writer.backend.metadata())
        writer.backend.connect(receiver.name, receiver.backend.metadata(), receiver.memory)
        receiver.backend.accept_staged(writer.name, writer.backend.staging_metadata())
        writer.backend.connect_staged(receiver.name, receiver.backend.staging_metadata())

    def turns(self, count: int = 20, seconds: float = 0.0) -> None:
        """Lets every pod iterate, with the clock going on by `seconds` in each turn."""
        for _ in range(count):
            self.now += seconds
            for pod in self.pods:
                pod.turn()


@pytest.fixture(params=["shared", "network"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(str(tmp_path_factory.mktemp("shm")) if request.param == "shared" else None)


def blocks(pod: Pod, which: Sequence[int]) -> list[bytes]:
    return [pod.memory.read_block(block) for block in which]


def test_a_write_of_many_pieces_arrives_before_its_notification(world: World) -> None:
    writer, receiver = world.pod("p"), world.pod("d")
    world.connect(writer, receiver)
    local, remote = random.Random(1).sample(range(BLOCKS), 50), random.Random(2).sample(range(BLOCKS), 50)
    handle = writer.backend.write("d", local, remote, b"range")
    while not receiver.delivered:
        assert writer.backend.poll(handle) is WriteState.PENDING
        world.turns(1)
    assert blocks(receiver, remote) == blocks(writer, local)
    world.turns(2)
    assert writer.backend.poll(handle) is WriteState.DONE
    writer.backend.release(handle)
    assert receiver.payloads == [b"range"]
    assert receiver.delivered[0].peer == "p"
    name = writer.backend.transport("d", same_host=True).name
    assert name == ("staged_shm" if world.directory else "staged_loopback")


def test_nothing_is_delivered_before_the_copy_into_the_pool_has_ended(world: World) -> None:
    writer, receiver = world.pod("p"), world.pod("d")
    world.connect(writer, receiver)
    receiver.copier.hold = True
    handle = writer.backend.write("d", [1, 2], [3, 4], b"range")
    world.turns()
    assert receiver.copier.loads == 1
    assert not receiver.delivered
    assert writer.backend.poll(handle) is WriteState.PENDING
    receiver.copier.hold = False
    world.turns()
    assert receiver.payloads == [b"range"]
    assert writer.backend.poll(handle) is WriteState.DONE


def test_lost_doubled_and_late_messages_change_nothing(world: World) -> None:
    writer, receiver = world.pod("p"), world.pod("d")
    rng = random.Random(5)
    delays = ((), (0.0,), (0.0, 0.0), (0.05,), (0.3, 0.01))
    world.fabric.on_notify = lambda *_: rng.choice(delays)
    world.connect(writer, receiver)
    expected = {}
    handles = []
    for number in range(12):
        local = rng.sample(range(BLOCKS), 5)
        remote = list(range(5 * number, 5 * number + 5))
        expected |= dict(zip(remote, blocks(writer, local), strict=True))
        handles.append(writer.backend.write("d", local, remote, b"range %d" % number))
    for _ in range(1400):
        world.turns(1, seconds=0.01)
        if all(writer.backend.poll(handle) is WriteState.DONE for handle in handles):
            break
    assert all(writer.backend.poll(handle) is WriteState.DONE for handle in handles)
    assert sorted(receiver.payloads) == sorted(b"range %d" % number for number in range(12))
    assert {block: receiver.memory.read_block(block) for block in expected} == expected


def test_a_silent_receiver_fails_the_write_once_it_drops_late_pieces(world: World) -> None:
    """Silence proves nothing: the receiver may free the blocks when the write has failed, and a late LAND may come."""
    writer, receiver = world.pod("p"), world.pod("d")
    world.connect(writer, receiver)
    world.turns()
    late: list[tuple[str, str, bytes]] = []

    def cut(*message: Any) -> Sequence[float]:
        late.append(message)
        return ()

    world.fabric.on_notify = cut
    handle = writer.backend.write("d", [1], [2], b"range")
    world.turns(40, seconds=1.0)
    assert writer.backend.poll(handle) is WriteState.PENDING
    world.fabric.on_notify = lambda *_: (0.0,)
    world.turns(4, seconds=0.1)
    assert writer.backend.poll(handle) is WriteState.FAILED
    assert "no answer" in writer.backend.error(handle)
    before = receiver.memory.read_block(2)
    for source, peer, payload in late:
        world.fabric.notify(source, peer, payload)
    world.turns()
    assert receiver.memory.read_block(2) == before
    assert not receiver.delivered
    writer.backend.release(handle)
    writer.backend.disconnect("d")


def test_a_peer_that_never_answers_again_ends_its_writes(world: World) -> None:
    writer, receiver = world.pod("p"), world.pod("d")
    world.connect(writer, receiver)
    world.turns()
    world.fabric.on_notify = lambda *_: ()
    handle = writer.backend.write("d", [1], [2], b"range")
    world.turns(int(SILENCE_S + END_S) - 2, seconds=1.0)
    assert writer.backend.poll(handle) is WriteState.PENDING
    world.turns(4, seconds=1.0)
    assert writer.backend.poll(handle) is WriteState.FAILED


def test_a_failed_write_ends_the_writes_that_wait_for_its_slots(world: World) -> None:
    writer, receiver = world.pod("p"), world.pod("d")
    world.connect(writer, receiver)
    world.turns()
    receiver.copier.fails = True
    handles = [writer.backend.write("d", list(range(32)), list(range(32)), b"range") for _ in range(3)]
    world.turns(10, seconds=0.1)
    receiver.copier.fails = False
    world.turns(100, seconds=1.0)
    assert [writer.backend.poll(handle) for handle in handles] == [WriteState.FAILED] * 3
    for handle in handles:
        writer.backend.release(handle)
    writer.backend.disconnect("d")


def test_a_receiver_that_grants_nothing_fails_the_write(world: World) -> None:
    writer, receiver = world.pod("p"), world.pod("d")
    world.fabric.on_notify = lambda *_: ()
    world.connect(writer, receiver)
    handle = writer.backend.write("d", [1], [2], b"range")
    world.turns(10, seconds=1.0)
    assert writer.backend.poll(handle) is WriteState.PENDING
    world.turns(10, seconds=1.0)
    assert writer.backend.poll(handle) is WriteState.FAILED
    assert "granted no staging window" in writer.backend.error(handle)


def test_an_answer_that_overtakes_the_end_of_the_network_write_loses_no_slot() -> None:
    world = World(None)
    writer, receiver = world.pod("p"), world.pod("d")
    world.connect(writer, receiver)
    world.turns()
    inner = writer.backend._staging.agent.inner  # type: ignore[union-attr]
    poll, late = inner.poll, [True]
    inner.poll = lambda handle: WriteState.PENDING if late else poll(handle)  # type: ignore[method-assign]
    handle = writer.backend.write("d", [1, 2], [3, 4], b"range")
    world.turns()
    assert receiver.payloads == [b"range"]
    assert writer.backend.poll(handle) is WriteState.PENDING
    late.clear()
    world.turns()
    assert writer.backend.poll(handle) is WriteState.DONE
    assert sorted(writer.backend._staging.writer_end._own) == list(range(48, 64))  # type: ignore[union-attr]


def test_a_copy_that_fails_on_the_receiver_fails_the_write(world: World) -> None:
    writer, receiver = world.pod("p"), world.pod("d")
    world.connect(writer, receiver)
    receiver.copier.fails = True
    handle = writer.backend.write("d", [1], [2], b"range")
    world.turns()
    assert writer.backend.poll(handle) is WriteState.FAILED
    assert not receiver.delivered


def test_a_copy_that_fails_on_the_writer_fails_the_write_once(caplog: pytest.LogCaptureFixture) -> None:
    world = World(None)
    writer, receiver = world.pod("p"), world.pod("d")
    world.connect(writer, receiver)
    world.turns()
    writer.copier.fails = True
    handle = writer.backend.write("d", list(range(10)), list(range(10)), b"range")
    world.turns()
    assert writer.backend.poll(handle) is WriteState.FAILED
    assert "illegal memory access" in writer.backend.error(handle)
    assert caplog.text.count("a staged write to d failed") == 3  # once for each piece
    assert not receiver.delivered
    assert sorted(writer.backend._staging.writer_end._own) == list(range(48, 64))  # type: ignore[union-attr]


def test_the_source_is_free_only_when_nothing_reads_it(world: World) -> None:
    """A write that has an error stays pending while a copy from the pool, or the network, may read it."""
    writer, receiver = world.pod("p"), world.pod("d")
    world.connect(writer, receiver)
    world.turns()
    writer.copier.hold = True
    handle = writer.backend.write("d", [1], [2], b"range")
    (receiving,) = writer.backend._staging.writer_end.receivers.values()  # type: ignore[union-attr]
    receiving.writes[0].error = "the peer ended"
    world.turns()
    assert writer.backend.poll(handle) is WriteState.PENDING
    writer.copier.hold = False
    world.turns()
    assert writer.backend.poll(handle) is WriteState.FAILED


def test_a_network_write_that_fails_fails_the_write() -> None:
    world = World(None)
    writer, receiver = world.pod("p"), world.pod("d")
    world.connect(writer, receiver)
    world.turns()
    world.fabric.on_write = lambda *_: LoopbackFault(fail="connection reset")
    handle = writer.backend.write("d", list(range(10)), list(range(10)), b"range")
    world.turns()
    assert writer.backend.poll(handle) is WriteState.FAILED
    assert writer.backend.error(handle) == "connection reset"
    assert sorted(writer.backend._staging.writer_end._own) == list(range(48, 64))  # type: ignore[union-attr]


def test_pieces_of_a_former_session_are_dropped(world: World) -> None:
    """A new session may reuse the slots at once: a late LAND of the old one must copy nothing."""
    writer, receiver = world.pod("p"), world.pod("d")
    world.connect(writer, receiver)
    world.turns()
    late: list[tuple[str, str, bytes]] = []

    def keep(source: str, peer: str, payload: bytes) -> Sequence[float]:
        if payload[:4] == b"BTH3":
            late.append((source, peer, payload))
            return ()
        return (0.0,)

    world.fabric.on_notify = keep
    handle = writer.backend.write("d", [1], [2], b"old")
    world.turns(40, seconds=1.0)
    assert writer.backend.poll(handle) is WriteState.FAILED
    old = receiver.memory.read_block(2)
    writer.backend.release(handle)
    writer.backend.disconnect("d")
    assert late
    world.fabric.on_notify = lambda *_: (0.0,)
    world.connect(writer, receiver)
    for source, peer, payload in late:
        world.fabric.notify(source, peer, payload)
    world.turns()
    assert receiver.memory.read_block(2) == old
    assert not receiver.delivered
    again = writer.backend.write("d", [3], [4], b"new")
    world.turns()
    assert writer.backend.poll(again) is WriteState.DONE
    assert receiver.payloads == [b"new"]


def test_a_window_goes_to_another_writer_only_after_the_end_of_its_writer_and_the_grace(world: World) -> None:
    receiver = world.pod("d")
    writers = [world.pod(f"p{number}") for number in range(5)]
    for writer in writers[:4]:
        world.connect(writer, receiver)
    world.turns()
    refused = writers[3].backend.write("d", [1], [2], b"")
    world.turns()
    assert writers[3].backend.poll(refused) is WriteState.FAILED
    assert "no staging window left" in writers[3].backend.error(refused)
    receiver.backend.remove_peer("p0")
    receiver.backend.remove_peer("p3")
    world.turns(1, seconds=60.0)  # a standstill of the thread proves nothing
    world.connect(writers[4], receiver)
    handle = writers[4].backend.write("d", [1], [2], b"range")
    world.turns()
    assert writers[4].backend.poll(handle) is WriteState.PENDING
    world.turns(int(GRACE_S / 0.2) + 2, seconds=0.2)
    assert writers[4].backend.poll(handle) is WriteState.DONE
    assert receiver.payloads == [b"range"]


def test_a_repeated_handshake_keeps_the_window(world: World) -> None:
    writer, receiver = world.pod("p"), world.pod("d")
    world.connect(writer, receiver)
    world.turns()
    receiver.backend.remove_peer("p")  # the receiver does so at each handshake
    receiver.backend.add_peer("p", writer.backend.metadata())
    receiver.backend.accept_staged("p", writer.backend.staging_metadata())
    world.turns(60, seconds=0.2)
    handle = writer.backend.write("d", [1], [2], b"range")
    world.turns()
    assert writer.backend.poll(handle) is WriteState.DONE


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"BTH1",
        b"BTH2 short",
        b"BTH9" + bytes(40),
        messages._PIECE.pack(b"BTH3", 0, 1, 0, 1, 1000),
        b"\xff" * 60,
    ],
)
def test_malformed_messages_are_dropped(payload: bytes) -> None:
    world = World(None)
    writer, receiver = world.pod("p"), world.pod("d")
    world.connect(writer, receiver)
    world.turns()
    world.fabric.notify("p-host", "d-host", payload)
    world.turns()
    handle = writer.backend.write("d", [1], [2], b"range")
    world.turns()
    assert writer.backend.poll(handle) is WriteState.DONE


def test_slots_and_blocks_outside_are_refused() -> None:
    world = World(None)
    writer, receiver = world.pod("p"), world.pod("d")
    world.connect(writer, receiver)
    world.turns()
    before = blocks(receiver, range(BLOCKS))
    session = writer.backend._staging.writer_end.receivers["d"].session  # type: ignore[union-attr]
    for slot, block in ((20, 1), (0, BLOCKS + 1)):
        head = messages._PIECE.pack(b"BTH3", session, 77, 0, 1, 1)
        world.fabric.notify("p-host", "d-host", head + slot.to_bytes(4, "big") + block.to_bytes(4, "big"))
    world.turns()
    assert blocks(receiver, range(BLOCKS)) == before
    assert receiver.copier.loads == 0


def test_too_little_memory_is_refused_with_what_is_needed() -> None:
    world = World(None)
    backend = StagedBackend(
        LoopbackBackend(world.fabric),
        lambda: LoopbackBackend(world.fabric),
        MemoryCopier,
        StagingOptions(3 * BLOCK_BYTES, None, always=True),
    )
    backend.start("p", host_pool(BLOCKS, BLOCK_BYTES))
    with pytest.raises(TransferFailed, match="staging_memory has room for 3 blocks"):
        backend.staging_metadata()


def test_a_pool_in_host_memory_is_staged_only_if_asked() -> None:
    world = World(None)
    backend = StagedBackend(
        LoopbackBackend(world.fabric),
        lambda: LoopbackBackend(world.fabric),
        MemoryCopier,
        StagingOptions(SLOTS * BLOCK_BYTES, None),
    )
    backend.start("p", host_pool(BLOCKS, BLOCK_BYTES))
    assert backend.staging_metadata() == b""
