"""The sender's state machine under every order of events: no block is released while a write reads it; one outcome."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    Unauthenticated,
    Unavailable,
    UnknownTransfer,
)
from common.types import KvTarget, TransferId
from kv_transfer.messages import Commit
from kv_transfer.sender.state_machine import (
    GRACE_S,
    BlocksDelivered,
    BlockWrite,
    ReleasePush,
    RenotifyRanges,
    SendCommit,
    SendDone,
    SenderAction,
    SenderMachine,
    SenderState,
    SendFailed,
    SendOpen,
    WritesStopped,
)

ID = TransferId(5, 1)
COMMIT = Commit((1,), (None,))


def kinds(actions: list[SenderAction]) -> list[str]:
    return [type(action).__name__ for action in actions]


def sender(blocks: int = 4, deadline: float = 100.0) -> SenderMachine:
    target = KvTarget(ID, "decode-0", "127.0.0.1:1", 0, tuple(range(blocks)), "f")
    return SenderMachine(target, max_write_blocks=2, deadline=deadline)


def test_nothing_is_posted_before_the_open_is_acknowledged() -> None:
    machine = sender()
    machine.push(1, 0, [10, 11, 12], 0.0)
    assert machine.next_write() is None
    assert machine.connected(0.0) == [SendOpen()]
    assert machine.next_write() is None
    machine.opened(0.0)
    assert machine.next_write() == BlockWrite(0, 1, 0, (10, 11), (0, 1))
    assert machine.next_write() == BlockWrite(1, 1, 2, (12,), (2,))
    assert machine.next_write() is None


def test_a_block_is_pushed_once() -> None:
    machine = sender()
    machine.push(1, 0, [10, 11], 0.0)
    actions = machine.push(2, 1, [11], 0.0)
    assert kinds(actions) == ["ReleasePush", "ReleasePush", "SendFailed", "WritesStopped"]
    assert isinstance(actions[2], SendFailed)
    assert isinstance(actions[2].error, InternalError)


def test_an_unreachable_receiver_fails_the_transfer() -> None:
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
        assert machine.next_write() is not None
        assert machine.posted() == ([SendCommit(COMMIT)] if posted == 2 else [])
    assert machine.write_ended(0, None, 0.0) == [BlocksDelivered(2)]
    assert machine.committed(0.0) == []  # the receiver has every block; two writes have not ended here
    assert kinds(machine.write_ended(2, None, 0.0)) == ["BlocksDelivered"]
    assert machine.tick(1.0) == []
    assert kinds(machine.write_ended(1, None, 0.0)) == ["ReleasePush", "BlocksDelivered", "SendDone"]


def test_a_commit_may_be_sent_with_some_writes_left_to_post() -> None:
    target = KvTarget(ID, "decode-0", "127.0.0.1:1", 0, tuple(range(6)), "f")
    machine = SenderMachine(target, max_write_blocks=2, deadline=100.0, commit_ahead=2)
    machine.connected(0.0)
    machine.opened(0.0)
    machine.push(1, 0, [10, 11, 12, 13, 14, 15], 0.0)
    assert machine.finish(COMMIT, 0.0) == []
    assert machine.next_write() is not None
    assert machine.posted() == [SendCommit(COMMIT)]
    now = 0.0
    for _ in range(9):  # a refused commit does not count while writes are in flight
        machine.call_failed(Unavailable("6 blocks have not arrived yet"), now)
        now += 0.003
        assert machine.tick(now) == [SendCommit(COMMIT)]
    assert machine.next_write() == BlockWrite(1, 1, 2, (12, 13), (2, 3))
    assert kinds(machine.fail(Cancelled("abort"), now)) == ["SendFailed"]
    assert machine.next_write() is None
    assert machine.write_ended(0, None, now) == [BlocksDelivered(2)]
    assert kinds(machine.write_ended(1, None, now)) == ["ReleasePush", "BlocksDelivered", "WritesStopped"]


def test_a_refused_commit_is_sent_again_soon_and_then_with_a_new_range_notification() -> None:
    machine = sender(blocks=2)
    machine.connected(0.0)
    machine.opened(0.0)
    machine.push(1, 0, [10, 11], 0.0)
    machine.finish(COMMIT, 0.0)
    assert machine.next_write() is not None
    assert machine.posted() == [SendCommit(COMMIT)]
    machine.write_ended(0, None, 0.0)
    now, asked = 0.0, []
    for _ in range(2500):
        if machine.call_failed(Unavailable("2 blocks have not arrived yet"), now) == []:
            while not (actions := machine.tick(now)):
                now += 0.001
            asked.append((now, kinds(actions)))
        if now > 5:
            break
    assert asked[0][0] <= 0.003
    assert [kind for _, kind in asked[:4]] == [["SendCommit"]] + [["RenotifyRanges", "SendCommit"]] * 3
    assert asked[-1][0] - asked[-2][0] == pytest.approx(1.0, abs=0.01)
    assert machine.committed(now) == [SendDone()]


class SenderMachineTest(RuleBasedStateMachine):
    """A model of the backend: writes are in flight until they end."""

    @initialize(blocks=st.integers(0, 9), piece=st.integers(1, 4), ahead=st.integers(0, 2))
    def begin(self, blocks: int, piece: int, ahead: int) -> None:
        target = KvTarget(ID, "decode-0", "127.0.0.1:1", 2, tuple(range(100, 100 + blocks)), "f")
        self.ahead = ahead
        self.machine = SenderMachine(
            target, max_write_blocks=piece, first_write_blocks=1 + piece // 3, deadline=50.0, commit_ahead=ahead
        )
        self.now = 0.0
        self.next_block = 0
        self.end = 2 + blocks
        self.pushes: dict[int, set[int]] = {}  # push -> writes in flight
        self.posted: dict[int, BlockWrite] = {}
        self.written: dict[int, int] = {}
        self.done = self.failed = self.stopped = 0
        self.call: str | None = None
        self.peer_gone_at: float | None = None
        self.finished = False

    def apply(self, actions: list[SenderAction]) -> None:
        for action in actions:
            match action:
                case SendOpen():
                    assert self.call is None
                    self.call = "open"
                case SendCommit():
                    assert self.call is None
                    assert self.finished
                    # A target without blocks needs no push.
                    assert self.end in (self.next_block, 2)
                    assert self.end - 2 - len(self.written) <= self.ahead * 4, "committed long before the last write"
                    assert self.ahead or len(self.written) == self.end - 2
                    self.call = "commit"
                case RenotifyRanges():
                    assert self.machine.state is SenderState.COMMITTING
                    assert len(self.written) == self.end - 2 > 0
                    assert not self.posted
                case ReleasePush(push):
                    grace_over = self.peer_gone_at is not None and self.now - self.peer_gone_at >= GRACE_S - 0.001
                    assert grace_over or not self.pushes[push], "released while a write reads it"
                    del self.pushes[push]
                case SendDone():
                    assert not self.pushes
                    self.done += 1
                case SendFailed():
                    self.failed += 1
                case WritesStopped():
                    assert self.failed
                    self.stopped += 1
                case BlocksDelivered():
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
        piece = self.machine.next_write()
        if piece is None:
            return
        assert self.machine.state in (SenderState.OPEN, SenderState.COMMITTING)
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
        self.apply(self.machine.write_ended(number, None if ok else "cut", self.now))

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
        if self.machine.state in (SenderState.STOPPED, SenderState.DONE):
            assert not self.pushes
            assert self.stopped + self.done == 1

    def teardown(self) -> None:
        if not hasattr(self, "machine"):
            return
        for number in list(self.posted):
            piece = self.posted.pop(number)
            self.pushes.get(piece.push, set()).discard(number)
            self.apply(self.machine.write_ended(number, None, self.now))
        self.time_passes(60.0)
        assert self.done + self.failed == 1
        assert not self.pushes


TestSenderMachine = SenderMachineTest.TestCase
TestSenderMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
