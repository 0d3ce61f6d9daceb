"""Lease.fork and copy_on_write: children share the prompt's blocks and copy the last one before they write to it."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import InternalError
from engine.kv.blocks import BlockPool
from engine.kv.lease import BlockCopy, Lease
from engine.kv.ledger import StepFence

SIZE = 4


def chain(blocks: int) -> list[bytes]:
    return [bytes([i]).ljust(16, b"\0") for i in range(blocks)]


def leased(pool: BlockPool, blocks: int) -> Lease:
    lease = pool.lease([], blocks)
    assert lease is not None
    return lease


def test_all_leases_but_the_last_copy_the_shared_block() -> None:
    pool = BlockPool(12, SIZE)
    first = leased(pool, 3)
    first.publish(chain(2))
    second, third = first.fork(3), first.fork(3)
    assert first.blocks == second.blocks == third.blocks
    assert (second.num_published, second.cow_index, pool.num_available()) == (2, 2, 9)
    shared = first.blocks[2]
    copies = [lease.copy_on_write() for lease in (second, first)]
    assert [copy.source for each in copies if each for copy in each] == [shared, shared]
    assert len({shared, second.blocks[2], first.blocks[2]}) == 3
    assert third.copy_on_write() == (BlockCopy(shared, shared),), "the step makes its copies before it writes"
    third.finish("done")
    pool.check_integrity()
    assert pool.num_available() == 7, "the step that copies from the block is not launched yet"
    pool.begin_step().end()
    assert pool.num_available() == 8
    for lease in (first, second):
        lease.finish("done")
    pool.check_integrity()
    assert (pool.counts().leased, pool.counts().cached) == (0, 2)


def test_copy_on_write_takes_the_spare_block() -> None:
    pool = BlockPool(5, SIZE)
    first = leased(pool, 5)
    first.publish(chain(1))
    second = first.fork(2, spare=1)
    assert (len(first.blocks), len(second.blocks), pool.num_available()) == (4, 3, 0)
    spare = second.blocks[2]
    assert second.copy_on_write() == (BlockCopy(first.blocks[1], spare),)
    assert second.blocks == [first.blocks[0], spare]
    assert first.copy_on_write() == (BlockCopy(first.blocks[1], first.blocks[1]),)
    with pytest.raises(InternalError):
        first.fork(4, spare=1)


def test_copy_on_write_waits_for_a_free_block_and_a_reader_counts_as_sharing() -> None:
    pool = BlockPool(2, SIZE)
    first = leased(pool, 1)
    second = first.fork(1)
    other = leased(pool, 1)
    assert second.copy_on_write() is None
    assert second.cow_index == 0
    reader = first.pin_for_read(0, 1)
    first.finish("done")
    assert second.copy_on_write() is None, "the reader still needs the block"
    other.finish("done")
    copies = second.copy_on_write()
    assert copies is not None
    (copy,) = copies
    assert copy.target != copy.source
    reader.release()
    second.finish("done")
    pool.begin_step().end()
    pool.check_integrity()
    assert pool.counts().free == 2


def test_a_shared_block_is_hashed_once() -> None:
    stored: list[bytes] = []
    pool = BlockPool(6, SIZE, on_stored=stored.extend)
    first = leased(pool, 2)
    second = first.fork(2)
    second.publish(chain(2))
    first.publish(chain(2))
    assert stored == chain(2)
    assert (first.num_replaced, first.blocks) == (0, second.blocks)
    first.finish("done")
    second.finish("done")
    pool.check_integrity()
    assert (pool.counts().cached, pool.counts().free) == (2, 4)


@dataclass(eq=False)
class Child:
    """A lease and its tokens, which are unique except for those that forks share."""

    lease: Lease
    tokens: list[int]

    def hashes(self) -> list[bytes]:
        ends = range(SIZE, len(self.tokens) + 1, SIZE)
        return [blake2b(repr(self.tokens[:end]).encode(), digest_size=16).digest() for end in ends]


class Forks(RuleBasedStateMachine):
    """Leases fork, write, publish and finish at random, with steps in flight; no two leases write to one block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(10, SIZE)
        self.children: list[Child] = []
        self.fences: list[StepFence] = []
        self.fresh = count()
        #: Blocks that the step being planned copies from.
        self.copying: set[int] = set()

    def pick(self, data: st.DataObject) -> Child:
        return data.draw(st.sampled_from(self.children))

    @rule(tokens=st.integers(1, 10))
    def prompt(self, tokens: int) -> None:
        blocks = -(-tokens // SIZE)
        lease = self.pool.lease([], blocks)
        if lease is not None:
            child = Child(lease, [next(self.fresh) for _ in range(tokens)])
            lease.publish(child.hashes())
            self.children.append(child)

    @precondition(lambda self: self.children)
    @rule(data=st.data(), spare=st.integers(0, 1))
    def fork(self, data: st.DataObject, spare: int) -> None:
        parent = self.pick(data)
        shared = -(-len(parent.tokens) // SIZE)
        if len(parent.lease.blocks) - spare < shared:
            return
        self.children.append(Child(parent.lease.fork(shared, spare=spare), list(parent.tokens)))

    @precondition(lambda self: self.children)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """Writes one more token, as the scheduler does."""
        child = self.pick(data)
        lease, index = child.lease, len(child.tokens) // SIZE
        if lease.cow_index == index:
            copies = lease.copy_on_write()
            if copies is None:
                assert self.pool.num_available() == 0
                return
            (copy,) = copies
            if copy.source != copy.target:
                assert copy.target not in self.copying, "the same step copies from this block"
                self.copying.add(copy.source)
        if index == len(lease.blocks) and not lease.grow():
            return
        block = lease.blocks[index]
        assert block not in {b for c in self.children if c is not child for b in c.lease.blocks}, "two write one block"
        assert index >= lease.num_published
        child.tokens.append(next(self.fresh))

    @precondition(lambda self: self.children)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        child = self.pick(data)
        child.lease.publish(child.hashes())

    @precondition(lambda self: self.children)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        child = self.pick(data)
        self.children.remove(child)
        child.lease.finish("done")

    @precondition(lambda self: len(self.fences) < 2)
    @rule()
    def launch(self) -> None:
        self.fences.append(self.pool.begin_step())
        self.copying.clear()

    @precondition(lambda self: self.fences)
    @rule()
    def end_step(self) -> None:
        self.fences.pop(0).end()

    @invariant()
    def is_consistent(self) -> None:
        self.pool.check_integrity()

    def teardown(self) -> None:
        for child in self.children:
            child.lease.finish("over")
        self.pool.begin_step().end()
        for fence in self.fences:
            fence.end()
        self.pool.check_integrity()
        counts = self.pool.counts()
        assert (counts.leased, counts.quarantined) == (0, 0)


Forks.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestForks = Forks.TestCase
