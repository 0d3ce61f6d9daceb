"""The read machine: what was lent is read once, and nothing is given back while bytes may land."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.errors import Cancelled, DeadlineExceeded, TransferFailed
from kv_transfer.read_machine import GRACE_S, Done, Failed, Free, ReadMachine, ReadPiece, ReadState

DEADLINE = 100.0


def machine(blocks: int, piece_blocks: int = 4) -> ReadMachine:
    local, remote = tuple(range(blocks)), tuple(range(50, 50 + blocks))
    return ReadMachine("holder", local, remote, piece_blocks=piece_blocks, deadline=DEADLINE)


def pieces_of(m: ReadMachine) -> list[ReadPiece]:
    found = []
    while (piece := m.next_piece()) is not None:
        found.append(piece)
    return found


def test_every_block_is_read_once_and_then_it_is_done() -> None:
    m = machine(10)
    pieces = pieces_of(m)
    assert [block for piece in pieces for block in piece.local] == list(range(10))
    assert [block for piece in pieces for block in piece.remote] == list(range(50, 60))
    for piece in pieces[:-1]:
        assert m.piece_ended(piece.number, None, 1.0) == []
    assert m.piece_ended(pieces[-1].number, None, 1.0) == [Free(), Done()]
    assert m.fail(Cancelled("late"), 2.0) == []


def test_a_failed_piece_ends_it_and_its_bytes_may_trail() -> None:
    m = machine(8)
    first, second = pieces_of(m)
    (failed,) = m.piece_ended(first.number, "the link broke", 1.0)
    assert isinstance(failed, Failed)
    assert m.piece_ended(second.number, None, 1.1) == []
    now, actions = 1.1, []
    while not actions:
        now += 0.1
        actions = m.tick(now)
    assert actions == [Free()]
    assert now >= 1.0 + GRACE_S


def test_giving_up_waits_for_the_handles_alone() -> None:
    m = machine(8)
    first = m.next_piece()
    assert first is not None
    (failed,) = m.fail(Cancelled("nobody waits"), 1.0)
    assert isinstance(failed, Failed)
    assert m.next_piece() is None
    assert m.tick(1.0 + 50) == []  # the holder hangs: no time frees what it may still fill
    assert m.piece_ended(first.number, None, 60.0) == [Free()]
    assert m.state is ReadState.STOPPED


def test_the_deadline_and_a_holder_that_ended() -> None:
    m = machine(4)
    piece = m.next_piece()
    assert piece is not None
    (failed,) = m.tick(DEADLINE)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, DeadlineExceeded)
    assert m.holder_ended(DEADLINE) == []
    assert m.tick(DEADLINE + 0.2) == []
    for step in range(1, 12):
        actions = m.tick(DEADLINE + 0.2 * (step + 1))
        if actions:
            break
    assert actions == [Free()]
    assert m.piece_ended(piece.number, "gone", DEADLINE + 5) == []  # it was written off


def test_unposted_pieces_are_given_back_at_once() -> None:
    m = machine(4)
    failed, free = m.holder_ended(1.0)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, TransferFailed)
    assert free == Free()


class ReadRules(RuleBasedStateMachine):
    """Any order of ends, failures and time: one Free, never while a piece may land; one Done or Failed."""

    @initialize(blocks=st.integers(1, 20))
    def begin(self, blocks: int) -> None:
        self.m = machine(blocks)
        self.posted: list[ReadPiece] = []
        self.now = 0.0
        self.ended_badly_at: float | None = None
        self.lost_at: float | None = None
        self.said: list[Any] = []

    def take(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, Free):
                lost = self.lost_at is not None and self.now - self.lost_at >= GRACE_S - 1e-6
                assert not self.posted or lost
                if self.ended_badly_at is not None and not lost:
                    assert self.now - self.ended_badly_at >= GRACE_S - 1e-6
            self.said.append(action)

    @rule()
    def post(self) -> None:
        piece = self.m.next_piece()
        if piece is not None:
            assert self.m.state is ReadState.READING
            self.posted.append(piece)

    @precondition(lambda self: self.posted)
    @rule(data=st.data(), error=st.sampled_from([None, None, "broken"]))
    def end(self, data: st.DataObject, error: str | None) -> None:
        piece = data.draw(st.sampled_from(self.posted))
        self.posted.remove(piece)
        if error is not None and self.m.state is not ReadState.STOPPED and self.ended_badly_at is None:
            self.ended_badly_at = self.now
        self.take(self.m.piece_ended(piece.number, error, self.now))

    @rule(seconds=st.sampled_from([0.01, 0.2, 1.0, 60.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.m.tick(self.now))

    @rule()
    def give_up(self) -> None:
        self.take(self.m.fail(Cancelled("enough"), self.now))

    @rule()
    def holder_ends(self) -> None:
        if self.lost_at is None:
            self.lost_at = self.now
        self.take(self.m.holder_ended(self.now))

    @invariant()
    def each_is_said_once(self) -> None:
        said = getattr(self, "said", [])
        assert sum(isinstance(a, Free) for a in said) <= 1
        assert sum(isinstance(a, Done | Failed) for a in said) <= 1


TestReadRules = ReadRules.TestCase


def test_a_read_of_nothing_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        machine(0)
