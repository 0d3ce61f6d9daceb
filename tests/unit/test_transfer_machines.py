"""Receiver and sender machines under every order of events: callbacks exactly once, holds never given up early."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    TransferFailed,
    Unauthenticated,
    Unavailable,
    UnknownTransfer,
)
from common.types import FinishReason, KvTarget, TransferId
from kv_transfer import receiver_machine as r
from kv_transfer import sender_machine as s
from kv_transfer.messages import Commit, Writer
from kv_transfer.notification import CommitNote, Committed, Message, RangeWritten, parse

ID = TransferId(5, 1)
WRITER = Writer("prefill-0", 7, "prefill-prefill-0-7", "127.0.0.1:1")
OTHER = Writer("prefill-0", 8, "prefill-prefill-0-8", "127.0.0.1:1")
COMMIT = Commit((1,), (None,))
FIRST, COUNT = 3, 6


def receiver(deadline: float = 100.0) -> r.ReceiverMachine:
    return r.ReceiverMachine(ID, first_block=FIRST, num_blocks=COUNT, deadline=deadline)


def freed(actions: list[r.ReceiverAction]) -> list[int]:
    return [block for action in actions if isinstance(action, r.Free) for block in action.blocks]


def kinds(actions: list[r.ReceiverAction] | list[s.SenderAction]) -> list[str]:
    return [type(action).__name__ for action in actions]


LAST = TransferId(2**63, 2**64 - 1)
TOLD: list[Message] = [
    RangeWritten(LAST, 0, 17),
    CommitNote(LAST, Commit((2**32 - 1, 0, 7), (None, FinishReason.LENGTH, FinishReason.STOP))),
    CommitNote(ID, Commit((), ())),
    Committed(LAST, 1234),
]


@pytest.mark.parametrize("message", TOLD)
def test_notification_round_trip(message: Message) -> None:
    packed = message.pack()
    assert parse(packed) == message
    for damaged in (packed + b"x", packed[:-1], packed[:4], b"", b"XXXX" + packed[4:], packed + bytes(5)):
        assert parse(damaged) is None


def test_notifications_that_say_too_much_or_nothing() -> None:
    assert parse(RangeWritten(ID, 0, 0).pack()) is None
    assert parse(Committed(ID, 2**40).pack()) == Committed(ID, 2**32 - 1)


def test_ready_needs_ranges_and_commit_in_any_order() -> None:
    machine = receiver()
    machine.open(WRITER, 0.0)
    assert machine.commit(7, COMMIT, 0.0) == []  # kept
    assert machine.awaits_ranges
    assert machine.notified(WRITER.agent, 6, 3, 0.0) == [r.Free((6, 7, 8))]
    assert machine.missing == 3
    assert machine.notified(WRITER.agent, 6, 3, 0.0) == []
    actions = machine.notified(WRITER.agent, 3, 3, 0.0)
    assert actions == [r.Free((3, 4, 5)), r.Ready(COMMIT)]
    assert machine.release(1.0) == machine.tick(200.0) == []
    assert machine.state is r.ReceiverState.READY


def test_strangers_are_dropped() -> None:
    machine = receiver()
    assert machine.notified(WRITER.agent, 3, 1, 0.0) is None
    machine.open(WRITER, 0.0)
    machine.open(WRITER, 0.0)
    with pytest.raises(UnknownTransfer):
        machine.open(OTHER, 0.0)
    with pytest.raises(UnknownTransfer):
        machine.commit(8, COMMIT, 0.0)
    assert machine.notified(OTHER.agent, 3, 1, 0.0) is None
    assert machine.notified(WRITER.agent, 2, 1, 0.0) is None
    assert machine.notified(WRITER.agent, 8, 2, 0.0) is None


def test_unopened_reservation_expires_freely() -> None:
    machine = receiver(deadline=1.0)
    actions = machine.tick(1.0)
    assert kinds(actions) == ["Free", "Failed"]
    assert machine.state is r.ReceiverState.CLOSED
    with pytest.raises(UnknownTransfer):
        machine.open(WRITER, 1.0)


def test_a_writer_that_sends_less_gives_the_rest_back_and_is_ready_with_less() -> None:
    machine = receiver()
    assert freed(machine.narrow(4)) == [7, 8]
    machine.open(WRITER, 0.0)
    assert machine.notified(WRITER.agent, 6, 2, 0.0) is None  # block 7 is not in it any more
    assert freed(machine.notified(WRITER.agent, 3, 4, 0.0) or []) == [3, 4, 5, 6]
    assert machine.narrow(6) == []  # it never grows
    assert kinds(machine.commit(7, COMMIT, 0.0)) == ["Ready"]
    assert machine.narrow(1) == []


def test_the_news_of_less_may_come_last() -> None:
    machine = receiver()
    machine.open(WRITER, 0.0)
    assert freed(machine.notified(WRITER.agent, 3, 2, 0.0) or []) == [3, 4]
    assert machine.commit(7, COMMIT, 0.0) == []
    actions = machine.narrow(2)
    assert kinds(actions) == ["Free", "Ready"]
    assert sorted(freed(actions)) == [5, 6, 7, 8]


def test_what_a_writer_never_sends_is_not_quarantined() -> None:
    machine = receiver()
    machine.open(WRITER, 0.0)
    machine.narrow(2)
    machine.release(0.0)
    assert machine.quarantined == 2
    assert freed(machine.drained(7, True, 0.0)) == [3, 4]
    assert machine.state is r.ReceiverState.CLOSED


def test_draining_frees_by_notification_and_by_drained() -> None:
    machine = receiver()
    machine.open(WRITER, 0.0)
    assert freed(machine.notified(WRITER.agent, 3, 1, 0.0) or []) == [3]
    assert kinds(machine.release(1.0)) == ["Failed", "AskDrain"]
    assert freed(machine.notified(WRITER.agent, 4, 2, 1.0) or []) == [4, 5]
    assert machine.notified(WRITER.agent, 4, 2, 1.0) == []
    with pytest.raises(UnknownTransfer):
        machine.commit(7, COMMIT, 1.0)
    assert machine.drained(8, True, 1.0) == []  # another generation's word is worth nothing
    assert machine.quarantined == 3
    assert kinds(machine.tick(2.0)) == ["AskDrain"]
    assert machine.tick(3.0) == []  # one question at a time
    assert freed(machine.drained(7, True, 3.0)) == [6, 7, 8]
    assert machine.state is r.ReceiverState.CLOSED


def test_grace_counts_only_time_in_which_we_ran() -> None:
    machine = receiver()
    machine.open(WRITER, 0.0)
    machine.release(0.0)
    machine.writer_ended(1.0)
    assert machine.tick(100.0) == []  # we stood still for 99 s: what was on its way may still be
    assert machine.quarantined == COUNT
    now = 100.0
    while machine.quarantined:
        now += 0.1
        actions = machine.tick(now)
        assert now < 103
    assert freed(actions) == [3, 4, 5, 6, 7, 8]
    assert now > 101.7


def test_a_writer_with_failed_writes_needs_the_grace_too() -> None:
    machine = receiver()
    machine.open(WRITER, 0.0)
    machine.release(0.0)
    assert machine.drained(7, False, 0.0) == []
    assert machine.quarantined == COUNT


def test_dead_writer_fails_an_open_transfer() -> None:
    machine = receiver()
    machine.open(WRITER, 0.0)
    actions = machine.writer_ended(0.0)
    assert kinds(actions) == ["Failed"]
    assert isinstance(actions[0], r.Failed)
    assert isinstance(actions[0].error, TransferFailed)


def test_checksums_decide() -> None:
    commit = Commit((1,), (None,), (1, 2, 3, 4, 5, 6))
    for error, expected in ((None, ["Ready"]), ("damaged", ["Failed"])):
        machine = receiver()
        machine.open(WRITER, 0.0)
        machine.notified(WRITER.agent, 3, 6, 0.0)
        assert kinds(machine.commit(7, commit, 0.0)) == ["Check"]
        assert kinds(machine.checked(error, 0.0)) == expected
        assert machine.state is (r.ReceiverState.CLOSED if error else r.ReceiverState.READY)


class ReceiverMachineTest(RuleBasedStateMachine):
    """A model of the writer: which ranges it has written, notified, or may still write."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = receiver(deadline=50.0)
        self.now = 0.0
        self.unwritten: set[int] = set()  # the writer may still write these
        self.freed: list[int] = []
        self.ready = self.failed = 0
        self.asked = False
        self.alive = True
        self.proven_at: float | None = None
        self.opened = False

    def apply(self, actions: list[r.ReceiverAction] | None) -> None:
        for action in actions or ():
            match action:
                case r.Free(blocks):
                    assert not set(blocks) & set(self.freed)
                    grace_over = self.proven_at is not None and self.now - self.proven_at >= r.GRACE_S - 0.001
                    assert grace_over or not set(blocks) & self.unwritten, "freed while it may still be written"
                    self.freed += blocks
                case r.Ready():
                    assert len(self.freed) == COUNT
                    self.ready += 1
                case r.Failed():
                    self.failed += 1
                case r.AskDrain():
                    self.asked = True
                case r.Check():
                    raise AssertionError("no checksums were sent")
        assert self.ready + self.failed <= 1

    @precondition(lambda self: self.alive)
    @rule()
    def open(self) -> None:
        try:
            self.machine.open(WRITER, self.now)
        except UnknownTransfer:
            return
        if not self.opened:
            self.opened = True
            self.unwritten = set(range(FIRST, FIRST + COUNT))

    @precondition(lambda self: self.alive and self.opened and self.unwritten)
    @rule(data=st.data())
    def write_and_notify(self, data: st.DataObject) -> None:
        first = data.draw(st.sampled_from(sorted(self.unwritten)))
        self.unwritten.discard(first)
        self.apply(self.machine.notified(WRITER.agent, first, 1, self.now))

    @rule(first=st.integers(0, 12), count=st.integers(1, 4))
    def stranger_notifies(self, first: int, count: int) -> None:
        assert self.machine.notified(OTHER.agent, first, count, self.now) is None

    @rule(first=st.integers(FIRST, FIRST + COUNT - 1))
    def duplicate_notification(self, first: int) -> None:
        if self.opened and first not in self.unwritten and self.alive:
            self.apply(self.machine.notified(WRITER.agent, first, 1, self.now))

    @precondition(lambda self: self.opened and self.alive and not self.ready)
    @rule()
    def commit(self) -> None:
        try:
            self.apply(self.machine.commit(7, COMMIT, self.now))
            assert bool(self.ready) != bool(self.unwritten), "ready when everything has arrived, and not before"
        except UnknownTransfer:
            assert self.failed

    @precondition(lambda self: self.asked and self.alive)
    @rule(clean=st.booleans())
    def drained(self, clean: bool) -> None:
        self.asked = False
        self.unwritten = set() if clean else self.unwritten
        if not clean and self.proven_at is None:
            self.proven_at = self.now
        self.apply(self.machine.drained(7, clean, self.now))

    @precondition(lambda self: self.asked)
    @rule(generation=st.sampled_from([6, 8]))
    def wrong_drained(self, generation: int) -> None:
        self.asked = False
        self.apply(self.machine.drained(generation, True, self.now))

    @precondition(lambda self: self.asked)
    @rule()
    def drain_failed(self) -> None:
        self.asked = False
        self.apply(self.machine.drain_failed(self.now))

    @precondition(lambda self: self.opened)
    @rule()
    def writer_dies(self) -> None:
        self.alive = False
        if self.proven_at is None:
            self.proven_at = self.now
        self.apply(self.machine.writer_ended(self.now))

    @rule()
    def release(self) -> None:
        self.apply(self.machine.release(self.now))

    @rule(step=st.sampled_from([0.01, 0.2, 1.0, 30.0]))
    def time_passes(self, step: float) -> None:
        self.now += step
        self.apply(self.machine.tick(self.now))

    @invariant()
    def closed_means_all_freed(self) -> None:
        if self.machine.state in (r.ReceiverState.CLOSED, r.ReceiverState.READY):
            assert sorted(self.freed) == list(range(FIRST, FIRST + COUNT))
            assert self.ready + self.failed == 1

    def teardown(self) -> None:
        """Whatever happened: with a dead writer everything comes back, and somebody was told."""
        if self.opened:
            self.writer_dies()
        for _ in range(1000):
            self.time_passes(0.1)
        assert sorted(self.freed) == list(range(FIRST, FIRST + COUNT))
        assert self.ready + self.failed == 1


class SenderMachineTest(RuleBasedStateMachine):
    """A model of the backend: pieces are under way until they end."""

    @initialize(blocks=st.integers(0, 9), piece=st.integers(1, 4), ahead=st.integers(0, 2))
    def begin(self, blocks: int, piece: int, ahead: int) -> None:
        target = KvTarget(ID, "decode-0", "127.0.0.1:1", 2, tuple(range(100, 100 + blocks)), "f")
        self.ahead = ahead
        self.machine = s.SenderMachine(
            target, piece_blocks=piece, first_blocks=1 + piece // 3, deadline=50.0, ahead=ahead
        )
        self.now = 0.0
        self.next_block = 0
        self.end = 2 + blocks
        self.pushes: dict[int, set[int]] = {}  # push -> pieces under way
        self.posted: dict[int, s.Piece] = {}
        self.written: dict[int, int] = {}
        self.done = self.failed = self.stopped = 0
        self.call: str | None = None
        self.peer_gone_at: float | None = None
        self.finished = False

    def apply(self, actions: list[s.SenderAction]) -> None:
        for action in actions:
            match action:
                case s.SendOpen():
                    assert self.call is None
                    self.call = "open"
                case s.SendCommit():
                    assert self.call is None
                    assert self.finished
                    assert self.next_block == self.end
                    assert self.end - 2 - len(self.written) <= self.ahead * 4, "announced long before it can be had"
                    assert self.ahead or len(self.written) == self.end - 2
                    self.call = "commit"
                case s.Renotify():
                    assert self.machine.state is s.SenderState.COMMITTING
                    assert len(self.written) == self.end - 2 > 0
                    assert not self.posted
                case s.Release(push):
                    grace_over = self.peer_gone_at is not None and self.now - self.peer_gone_at >= s.GRACE_S - 0.001
                    assert grace_over or not self.pushes[push], "released while a write reads it"
                    del self.pushes[push]
                case s.Done():
                    assert not self.pushes
                    self.done += 1
                case s.Failed():
                    self.failed += 1
                case s.Stopped():
                    assert self.failed
                    self.stopped += 1
                case s.Delivered():
                    pass
        assert self.done + self.failed <= 1
        assert self.stopped <= 1

    @rule()
    def connected(self) -> None:
        self.apply(self.machine.connected(self.now))

    @precondition(lambda self: self.call is not None)
    @rule(ok=st.booleans(), error=st.sampled_from([Unavailable, DeadlineExceeded, UnknownTransfer, Unauthenticated]))
    def call_ends(self, ok: bool, error: type) -> None:
        call, self.call = self.call, None
        if not ok:
            self.apply(self.machine.call_failed(error("no"), self.now))
        elif call == "open":
            self.apply(self.machine.opened(self.now))
        else:
            self.apply(self.machine.committed(self.now))

    @precondition(lambda self: self.next_block < self.end)
    @rule(count=st.integers(1, 5))
    def push(self, count: int) -> None:
        count = min(count, self.end - self.next_block)
        number = self.next_block
        self.pushes[number] = set()
        blocks = list(range(self.next_block, self.next_block + count))
        self.apply(self.machine.push(number, self.next_block, blocks, self.now))
        self.next_block += count

    @rule()
    def post(self) -> None:
        piece = self.machine.next_piece()
        if piece is None:
            return
        assert self.machine.state in (s.SenderState.OPEN, s.SenderState.COMMITTING)
        self.posted[piece.number] = piece
        self.pushes[piece.push].add(piece.number)
        for local, remote, logical in zip(piece.local, piece.remote, range(piece.first, self.end), strict=False):
            assert local == logical
            assert remote == 98 + logical
            assert logical not in self.written
            self.written[logical] = remote
        self.apply(self.machine.posted())

    @precondition(lambda self: self.posted)
    @rule(data=st.data(), ok=st.booleans())
    def piece_ends(self, data: st.DataObject, ok: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.posted)))
        piece = self.posted.pop(number)
        self.pushes.get(piece.push, set()).discard(number)
        self.apply(self.machine.piece_ended(number, None if ok else "cut", self.now))

    @precondition(lambda self: not self.finished)
    @rule()
    def finish(self) -> None:
        self.finished = True
        self.apply(self.machine.finish(COMMIT, self.now))

    @rule()
    def abort(self) -> None:
        self.apply(self.machine.fail(Cancelled("abort"), self.now))

    @rule()
    def peer_dies(self) -> None:
        if self.peer_gone_at is None:
            self.peer_gone_at = self.now
        self.apply(self.machine.peer_ended(self.now))

    @rule(step=st.sampled_from([0.01, 0.2, 1.0, 30.0]))
    def time_passes(self, step: float) -> None:
        self.now += step
        self.apply(self.machine.tick(self.now))

    @invariant()
    def stopped_means_nothing_under_way(self) -> None:
        if self.machine.state in (s.SenderState.STOPPED, s.SenderState.DONE):
            assert not self.pushes
            assert self.stopped + self.done == 1

    def teardown(self) -> None:
        if not hasattr(self, "machine"):
            return
        for number in list(self.posted):
            piece = self.posted.pop(number)
            self.pushes.get(piece.push, set()).discard(number)
            self.apply(self.machine.piece_ended(number, None, self.now))
        self.time_passes(60.0)
        assert self.done + self.failed == 1
        assert not self.pushes


def sender(blocks: int = 4, deadline: float = 100.0) -> s.SenderMachine:
    target = KvTarget(ID, "decode-0", "127.0.0.1:1", 0, tuple(range(blocks)), "f")
    return s.SenderMachine(target, piece_blocks=2, deadline=deadline)


def test_nothing_is_posted_before_the_open_is_acknowledged() -> None:
    machine = sender()
    machine.push(1, 0, [10, 11, 12], 0.0)
    assert machine.next_piece() is None
    assert machine.connected(0.0) == [s.SendOpen()]
    assert machine.next_piece() is None
    machine.opened(0.0)
    assert machine.next_piece() == s.Piece(0, 1, 0, (10, 11), (0, 1))
    assert machine.next_piece() == s.Piece(1, 1, 2, (12,), (2,))
    assert machine.next_piece() is None


def test_a_block_is_pushed_once() -> None:
    machine = sender()
    machine.push(1, 0, [10, 11], 0.0)
    actions = machine.push(2, 1, [11], 0.0)
    assert kinds(actions) == ["Release", "Release", "Failed", "Stopped"]
    assert isinstance(actions[2], s.Failed)
    assert isinstance(actions[2].error, InternalError)


def test_an_unreachable_receiver_is_given_up() -> None:
    machine = sender()
    machine.connected(0.0)
    now, asked = 0.0, 1
    while not machine.ended:
        machine.call_failed(Unavailable("refused"), now)
        for _ in range(200):
            now += 0.01
            actions = machine.tick(now)
            if actions:
                asked += 1
                break
    assert 3 < asked < 20
    assert now < 10


def test_the_commit_travels_while_the_last_bytes_do() -> None:
    machine = sender(blocks=6)
    machine.connected(0.0)
    machine.opened(0.0)
    machine.push(1, 0, [10, 11, 12, 13, 14, 15], 0.0)
    assert machine.finish(COMMIT, 0.0) == []
    for posted in range(3):
        assert machine.next_piece() is not None
        assert machine.posted() == ([s.SendCommit(COMMIT)] if posted == 2 else [])
    assert machine.piece_ended(0, None, 0.0) == [s.Delivered(2)]
    assert machine.committed(0.0) == []  # the receiver has it all; our writes are not known to be over
    assert kinds(machine.piece_ended(2, None, 0.0)) == ["Delivered"]
    assert machine.tick(1.0) == []
    assert kinds(machine.piece_ended(1, None, 0.0)) == ["Release", "Delivered", "Done"]


def test_a_commit_may_be_announced_with_some_pieces_left_to_post() -> None:
    target = KvTarget(ID, "decode-0", "127.0.0.1:1", 0, tuple(range(6)), "f")
    machine = s.SenderMachine(target, piece_blocks=2, deadline=100.0, ahead=2)
    machine.connected(0.0)
    machine.opened(0.0)
    machine.push(1, 0, [10, 11, 12, 13, 14, 15], 0.0)
    assert machine.finish(COMMIT, 0.0) == []
    assert machine.next_piece() is not None
    assert machine.posted() == [s.SendCommit(COMMIT)]
    now = 0.0
    for _ in range(9):  # "not yet" says nothing while writes are under way
        machine.call_failed(Unavailable("6 blocks have not arrived yet"), now)
        now += 0.003
        assert machine.tick(now) == [s.SendCommit(COMMIT)]
    assert machine.next_piece() == s.Piece(1, 1, 2, (12, 13), (2, 3))
    assert kinds(machine.fail(Cancelled("abort"), now)) == ["Failed"]
    assert machine.next_piece() is None
    assert machine.piece_ended(0, None, now) == [s.Delivered(2)]
    assert kinds(machine.piece_ended(1, None, now)) == ["Release", "Delivered", "Stopped"]


def test_a_commit_is_asked_again_soon_and_then_with_a_new_notification() -> None:
    machine = sender(blocks=2)
    machine.connected(0.0)
    machine.opened(0.0)
    machine.push(1, 0, [10, 11], 0.0)
    machine.finish(COMMIT, 0.0)
    assert machine.next_piece() is not None
    assert machine.posted() == [s.SendCommit(COMMIT)]
    machine.piece_ended(0, None, 0.0)
    now, asked = 0.0, []
    for _ in range(2500):
        if machine.call_failed(Unavailable("2 blocks have not arrived yet"), now) == []:
            while not (actions := machine.tick(now)):
                now += 0.001
            asked.append((now, kinds(actions)))
        if now > 5:
            break
    assert asked[0][0] <= 0.003
    assert [kind for _, kind in asked[:4]] == [["SendCommit"]] + [["Renotify", "SendCommit"]] * 3
    assert asked[-1][0] - asked[-2][0] == pytest.approx(1.0, abs=0.01)
    assert machine.committed(now) == [s.Done()]


TestReceiverMachine = ReceiverMachineTest.TestCase
TestSenderMachine = SenderMachineTest.TestCase
TestReceiverMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSenderMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
