"""The tables of transfers without threads or peers, on a fake clock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from common.errors import BatonError, TransferFailed, UnknownTransfer
from common.types import KvTarget, TransferId
from kv_transfer.memory import PeerMemory, host_pool
from kv_transfer.messages import Commit, CommitNotification, DroppedMessages, RangeWritten, Writer
from kv_transfer.peers.connection import PeerConnection
from kv_transfer.peers.traffic import PairTrafficTable
from kv_transfer.receiver.state_machine import ReceiverMachine
from kv_transfer.receiver.transfers import IncomingTransfer, TransferReceiver
from kv_transfer.sender.transfers import TransferSender
from kv_transfer.sender.write_limits import DEFAULT_WRITE_LIMITS
from kv_transfer.transfer_thread import HOT_POLL_LIMIT_S

ID = TransferId(5, 1)
WRITER = Writer("prefill-0", 7, "prefill-prefill-0-7", "127.0.0.1:1")
COMMIT = Commit((1,), (None,))
SIGNATURE = b"signature"


class Now:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


class Agents:
    """The part of a backend that notifications need. known: peers of add_peer."""

    def __init__(self) -> None:
        self.known: list[str] = []
        self.told: list[str] = []

    def add_peer(self, peer: str, metadata: bytes) -> None:
        if metadata != b"good":
            raise TransferFailed("the metadata was refused")
        assert peer not in self.known
        self.known.append(peer)

    def remove_peer(self, peer: str) -> None:
        self.known.remove(peer)

    def notify(self, peer: str, payload: bytes) -> None:
        assert peer in self.known
        self.told.append(peer)


class FakePin:
    blocks: Sequence[int] = (3,)

    def release(self, blocks: Sequence[int] | None = None) -> None:
        pass


class Thread:
    """Runs each command at once."""

    running = True

    def __init__(self, backend: Agents | None = None) -> None:
        self.backend = backend

    def submit(self, command: Callable[[], None]) -> None:
        command()


class Calls:
    """Calls that are never made."""

    async def open(self) -> None: ...

    def run_on_loop(self, work: Callable[[], Awaitable[None]]) -> None: ...


def receiving(now: Now, agents: Agents) -> TransferReceiver:
    unused: Any = (Thread(agents), Calls())
    return TransferReceiver(*unused, now, DroppedMessages())


def entry(
    transfer_id: TransferId, deadline: float, on_failed: Callable[[BatonError], None] = lambda _: None
) -> IncomingTransfer:
    machine = ReceiverMachine(transfer_id, first_block=0, num_blocks=1, deadline=deadline)
    target = KvTarget(transfer_id, "decode-0", "127.0.0.1:2", 0, (3,), "f", signature=SIGNATURE)
    return IncomingTransfer(machine, "r", target, FakePin(), lambda _: None, on_failed)


def test_a_commit_without_its_ranges_is_polled_hot_for_a_moment_only() -> None:
    now = Now()
    table = receiving(now, Agents())
    table.add(entry(ID, now() + 60.0))
    table.open_transfer(ID, "r", SIGNATURE, WRITER)
    assert not table.poll_hot
    answer: Future[float] = Future()
    table.commit(ID, 7, SIGNATURE, COMMIT, answer)
    assert table.poll_hot
    now.s += HOT_POLL_LIMIT_S + 0.01
    table.commit(ID, 7, SIGNATURE, COMMIT, Future())  # asked again
    assert (table.poll_hot, table.poll_fast) == (False, True)
    table.on_notification(WRITER.agent, RangeWritten(ID, 0, 1))
    assert answer.result(0) > HOT_POLL_LIMIT_S
    assert not table.poll_fast


def test_open_and_commit_need_the_signature_of_the_target() -> None:
    table = receiving(Now(), Agents())
    table.add(entry(ID, 200.0))
    for wrong in (b"", b"another", SIGNATURE + b"x"):
        with pytest.raises(UnknownTransfer, match="signature"):
            table.open_transfer(ID, "r", wrong, WRITER)
    table.open_transfer(ID, "r", SIGNATURE, WRITER)
    refused: Future[float] = Future()
    table.commit(ID, 7, b"another", COMMIT, refused)
    assert isinstance(refused.exception(0), UnknownTransfer)
    assert not table.poll_fast
    assert table.dropped.snapshot() == {"wrong_capability": 4}


def test_nothing_counts_after_the_deadline() -> None:
    """Also before the tick that ends the transfer."""
    now = Now()
    table = receiving(now, Agents())
    table.add(entry(ID, now() + 60.0))
    table.open_transfer(ID, "r", SIGNATURE, WRITER)
    now.s += 60.0
    with pytest.raises(UnknownTransfer, match="late"):
        table.open_transfer(ID, "r", SIGNATURE, WRITER)
    refused: Future[float] = Future()
    table.commit(ID, 7, SIGNATURE, COMMIT, refused)
    assert isinstance(refused.exception(0), UnknownTransfer)
    table.on_notification(WRITER.agent, CommitNotification(ID, COMMIT))
    table.on_notification(WRITER.agent, RangeWritten(ID, 0, 1))
    assert (table.num_open, table.received_transfers) == (1, 0)
    table.tick(now())
    assert (table.num_open, table.received_transfers) == (0, 0)


def test_an_acknowledgement_is_polled_hot_for_a_moment_only() -> None:
    now = Now()
    unused: Any = (Thread(), None, Calls())
    table = TransferSender(
        *unused,
        host_pool(4, 64),
        now,
        PairTrafficTable(now),
        fingerprint=lambda: "f",
        with_checksums=False,
        write_limits=DEFAULT_WRITE_LIMITS["DRAM"],
        commit_notifications=True,
    )
    transfer = table.start(KvTarget(ID, "decode-0", "127.0.0.1:1", 1, (), "f"), "r", 1, 60.0)
    peer = PeerMemory(0, 64, 4, 0, "DRAM")
    table._connected(transfer, PeerConnection("decode-0", 5, "127.0.0.1:1", "a", 3, 3, peer, b"", True, None))
    table._apply(transfer, transfer.machine.opened(now()))
    assert not table.poll_hot
    transfer.finish([1], [None])
    assert table.poll_hot
    now.s += HOT_POLL_LIMIT_S + 0.01
    assert (table.poll_hot, table.poll_fast) == (False, True)
    table._apply(transfer, transfer.machine.committed(now()))
    assert transfer.outcome.done()
    assert not table.poll_fast


def test_a_writer_with_refused_metadata_and_a_forgotten_writer_are_unknown_to_the_backend() -> None:
    agents = Agents()
    table = receiving(Now(), agents)
    for number in range(3):
        assert table.add_peer(f"prefill-{number}", b"good")
        table.watch(f"prefill-{number}", None)
    assert not table.add_peer("prefill-0", b"bad")
    table.forget_writer("prefill-1")
    assert agents.known == ["prefill-2"]
    assert "prefill-1" not in table.watches


def test_a_forgotten_writer_gets_no_notification() -> None:
    """Its commit came as a notification, but the backend does not know the writer. The call is answered."""
    agents = Agents()
    table = receiving(Now(), agents)
    for number, forgotten in enumerate((False, True)):
        transfer_id = TransferId(5, number)
        assert table.add_peer(WRITER.agent, b"good")
        table.add(entry(transfer_id, 200.0))
        table.open_transfer(transfer_id, "r", SIGNATURE, WRITER)
        table.on_notification(WRITER.agent, CommitNotification(transfer_id, COMMIT))
        if forgotten:
            table.forget_writer(WRITER.agent)
        table.on_notification(WRITER.agent, RangeWritten(transfer_id, 0, 1))
        assert len(agents.told) == 1
        answer: Future[float] = Future()
        table.commit(transfer_id, 7, SIGNATURE, COMMIT, answer)
        assert answer.result(0) == 0.0


def test_a_forgotten_writer_with_an_open_transfer_is_watched_until_the_transfer_ends() -> None:
    class Watch:
        closed = gone = False

        def ended(self) -> bool:
            return self.gone

        def close(self) -> None:
            self.closed = True

    now, watch = Now(), Watch()
    table, as_watch = receiving(now, Agents()), watch
    failed: list[Exception] = []
    table.add(entry(ID, now() + 60.0, failed.append))
    table.watch(WRITER.agent, as_watch)  # type: ignore[arg-type]
    table.open_transfer(ID, "r", SIGNATURE, WRITER)
    table.forget_writer(WRITER.agent)
    table.tick(now())
    assert not watch.closed
    watch.gone = True
    for _ in range(20):
        now.s += 0.2
        table.tick(now())
    assert isinstance(failed[0], TransferFailed)
    assert table.num_open == 0
    assert watch.closed
