"""The receiver's state machine under every order of events: one outcome, and no block is released too early."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import TransferFailed, UnknownTransfer
from common.types import TransferId
from kv_transfer.messages import Commit, Writer
from kv_transfer.receiver.state_machine import (
    GRACE_S,
    CheckChecksums,
    FreeBlocks,
    ReceiveFailed,
    ReceiverAction,
    ReceiverMachine,
    ReceiverState,
    RequestDrain,
    TransferReady,
)

ID = TransferId(5, 1)
WRITER = Writer("prefill-0", 7, "prefill-prefill-0-7", "127.0.0.1:1")
OTHER = Writer("prefill-0", 8, "prefill-prefill-0-8", "127.0.0.1:1")
COMMIT = Commit((1,), (None,))
FIRST, COUNT = 3, 6


def receiver(deadline: float = 100.0) -> ReceiverMachine:
    return ReceiverMachine(ID, first_block=FIRST, num_blocks=COUNT, deadline=deadline)


def freed(actions: list[ReceiverAction]) -> list[int]:
    return [block for action in actions if isinstance(action, FreeBlocks) for block in action.blocks]


def kinds(actions: list[ReceiverAction]) -> list[str]:
    return [type(action).__name__ for action in actions]


def test_ready_needs_ranges_and_commit_in_any_order() -> None:
    machine = receiver()
    machine.open(WRITER, 0.0)
    assert machine.commit(7, COMMIT, 0.0) == []  # kept
    assert machine.commit_waits_for_ranges
    assert machine.range_written(WRITER.agent, 6, 3, 0.0) == []  # stored; the blocks stay pinned
    assert len(machine.missing) == 3
    assert machine.range_written(WRITER.agent, 6, 3, 0.0) == []
    actions = machine.range_written(WRITER.agent, 3, 3, 0.0)
    assert actions == [FreeBlocks((3, 4, 5, 6, 7, 8)), TransferReady(COMMIT)]
    assert machine.release(1.0) == machine.tick(200.0) == []
    assert machine.state is ReceiverState.READY


def test_messages_of_other_writers_are_dropped() -> None:
    machine = receiver()
    assert machine.range_written(WRITER.agent, 3, 1, 0.0) is None
    machine.open(WRITER, 0.0)
    machine.open(WRITER, 0.0)
    with pytest.raises(UnknownTransfer):
        machine.open(OTHER, 0.0)
    with pytest.raises(UnknownTransfer):
        machine.commit(8, COMMIT, 0.0)
    assert machine.range_written(OTHER.agent, 3, 1, 0.0) is None
    assert machine.range_written(WRITER.agent, 2, 1, 0.0) is None
    assert machine.range_written(WRITER.agent, 8, 2, 0.0) is None


def test_a_reservation_without_a_writer_expires_without_quarantine() -> None:
    machine = receiver(deadline=1.0)
    actions = machine.tick(1.0)
    assert kinds(actions) == ["FreeBlocks", "ReceiveFailed"]
    assert machine.state is ReceiverState.CLOSED
    with pytest.raises(UnknownTransfer):
        machine.open(WRITER, 1.0)


def test_a_writer_that_sends_less_gives_the_rest_back_and_is_ready_with_less() -> None:
    machine = receiver()
    assert freed(machine.shrink_to(4)) == [7, 8]
    machine.open(WRITER, 0.0)
    assert machine.range_written(WRITER.agent, 6, 2, 0.0) is None  # block 7 is outside the shrunk transfer
    assert machine.range_written(WRITER.agent, 3, 4, 0.0) == []
    assert machine.shrink_to(6) == []  # it never grows
    assert machine.commit(7, COMMIT, 0.0) == [FreeBlocks((3, 4, 5, 6)), TransferReady(COMMIT)]
    assert machine.shrink_to(1) == []


def test_the_transfer_may_shrink_after_the_commit() -> None:
    machine = receiver()
    machine.open(WRITER, 0.0)
    assert machine.range_written(WRITER.agent, 3, 2, 0.0) == []
    assert machine.commit(7, COMMIT, 0.0) == []
    assert machine.shrink_to(2) == [FreeBlocks((5, 6, 7, 8)), FreeBlocks((3, 4)), TransferReady(COMMIT)]


def test_blocks_that_the_writer_never_sends_are_not_quarantined() -> None:
    machine = receiver()
    machine.open(WRITER, 0.0)
    machine.shrink_to(2)
    machine.release(0.0)
    assert machine.num_quarantined == 2
    assert freed(machine.drained(7, True, 0.0)) == [3, 4]
    assert machine.state is ReceiverState.CLOSED


def test_draining_frees_by_notification_and_by_drained() -> None:
    machine = receiver()
    machine.open(WRITER, 0.0)
    assert machine.range_written(WRITER.agent, 3, 1, 0.0) == []
    actions = machine.release(1.0)
    assert kinds(actions) == ["FreeBlocks", "ReceiveFailed", "RequestDrain"]
    assert freed(actions) == [3]
    assert freed(machine.range_written(WRITER.agent, 4, 2, 1.0) or []) == [4, 5]
    assert machine.range_written(WRITER.agent, 4, 2, 1.0) == []
    with pytest.raises(UnknownTransfer):
        machine.commit(7, COMMIT, 1.0)
    assert machine.drained(8, True, 1.0) == []  # another generation's answer proves nothing
    assert machine.num_quarantined == 3
    assert kinds(machine.tick(2.0)) == ["RequestDrain"]
    assert machine.tick(3.0) == []  # one Drain call at a time
    assert freed(machine.drained(7, True, 3.0)) == [6, 7, 8]
    assert machine.state is ReceiverState.CLOSED


def test_grace_counts_only_time_in_which_the_machine_was_ticked() -> None:
    machine = receiver()
    machine.open(WRITER, 0.0)
    machine.release(0.0)
    machine.writer_ended(1.0)
    assert machine.tick(100.0) == []  # no tick for 99 s: a write may still be in flight
    assert machine.num_quarantined == COUNT
    now = 100.0
    while machine.num_quarantined:
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
    assert machine.num_quarantined == COUNT


def test_dead_writer_fails_an_open_transfer() -> None:
    machine = receiver()
    machine.open(WRITER, 0.0)
    actions = machine.writer_ended(0.0)
    assert kinds(actions) == ["ReceiveFailed"]
    assert isinstance(actions[0], ReceiveFailed)
    assert isinstance(actions[0].error, TransferFailed)


def test_checksums_decide() -> None:
    commit = Commit((1,), (None,), (1, 2, 3, 4, 5, 6))
    for error, expected in ((None, ["FreeBlocks", "TransferReady"]), ("damaged", ["FreeBlocks", "ReceiveFailed"])):
        machine = receiver()
        machine.open(WRITER, 0.0)
        machine.range_written(WRITER.agent, 3, 6, 0.0)
        assert kinds(machine.commit(7, commit, 0.0)) == ["CheckChecksums"]
        assert kinds(machine.checked(error, 0.0)) == expected
        assert machine.state is (ReceiverState.CLOSED if error else ReceiverState.READY)


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

    def apply(self, actions: list[ReceiverAction] | None) -> None:
        for action in actions or ():
            match action:
                case FreeBlocks(blocks):
                    assert not set(blocks) & set(self.freed)
                    grace_over = self.proven_at is not None and self.now - self.proven_at >= GRACE_S - 0.001
                    assert grace_over or not set(blocks) & self.unwritten, "freed while it may still be written"
                    self.freed += blocks
                case TransferReady():
                    assert len(self.freed) == COUNT
                    self.ready += 1
                case ReceiveFailed():
                    self.failed += 1
                case RequestDrain():
                    self.asked = True
                case CheckChecksums():
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
        self.apply(self.machine.range_written(WRITER.agent, first, 1, self.now))

    @rule(first=st.integers(0, 12), count=st.integers(1, 4))
    def stranger_notifies(self, first: int, count: int) -> None:
        assert self.machine.range_written(OTHER.agent, first, count, self.now) is None

    @rule(first=st.integers(FIRST, FIRST + COUNT - 1))
    def duplicate_notification(self, first: int) -> None:
        if self.opened and first not in self.unwritten and self.alive:
            self.apply(self.machine.range_written(WRITER.agent, first, 1, self.now))

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
        if self.machine.state in (ReceiverState.CLOSED, ReceiverState.READY):
            assert sorted(self.freed) == list(range(FIRST, FIRST + COUNT))
            assert self.ready + self.failed == 1

    def teardown(self) -> None:
        """After the writer's end every block is released, and the caller got exactly one outcome."""
        if self.opened:
            self.writer_dies()
        for _ in range(1000):
            self.time_passes(0.1)
        assert sorted(self.freed) == list(range(FIRST, FIRST + COUNT))
        assert self.ready + self.failed == 1


TestReceiverMachine = ReceiverMachineTest.TestCase
TestReceiverMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
