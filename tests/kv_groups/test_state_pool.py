"""The slots of recurrent states against a model that knows which tokens each slot has seen."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.kv_groups import PageOrder
from engine.kv.groups.state_blocks import StateBlockPool, StateLease, StatePin, require_states
from engine.kv.groups.state_slots import Snapshot
from engine.kv.lease import BlockCopy
from engine.kv.ledger import BlockPin, StepFence
from engine.schedule.scheduler import ScheduledSequence
from engine.schedule.states import plan_states

SIZE, BLOCKS, MAX_TOKENS = 2, 24, 15
Tokens = tuple[int, ...]
#: Few tokens, so that many prompts share a prefix.
texts = st.lists(st.integers(0, 1), min_size=1, max_size=MAX_TOKENS).map(tuple)


def hashes_of(tokens: Tokens) -> list[bytes]:
    """Returns the hash of each full block: its tokens and those before it."""
    return [blake2b(bytes(tokens[:end]), digest_size=16).digest() for end in range(SIZE, len(tokens) + 1, SIZE)]


@dataclass(eq=False)
class Running:
    """A sequence with the attributes that a step reads."""

    lease: StateLease
    tokens: Tokens
    prefill_len: int
    computed: int  # Tokens of collected steps
    launched: int = 0  # Tokens of steps in flight

    @property
    def start(self) -> int:
        return self.computed + self.launched


@dataclass
class DeviceRow:
    """What a step does with the state of one sequence."""

    slot: int
    tokens: Tokens
    start: int
    end: int
    snapshots: tuple[Snapshot, ...]


@dataclass(eq=False)
class Launched:
    """A step that the host has not collected. The device runs it at any time before."""

    scheduled: list[ScheduledSequence]
    fence: StepFence
    copies: list[BlockCopy] = field(default_factory=list)
    rows: list[DeviceRow] = field(default_factory=list)
    leases: list[StateLease] = field(default_factory=list)
    ran: bool = False


@dataclass(eq=False)
class Transfer:
    """A state that moves from or to another pod."""

    pin: BlockPin
    slot: int
    tokens: Tokens
    lease: StateLease | None = None  # Of the receiver; None for a sender, and after an abort
    order: PageOrder | None = None  # Of a pulled prefix; None for a prompt


STATE_PAGES = 2


def order_of(tokens: Tokens) -> PageOrder:
    return PageOrder(-(-len(tokens) // SIZE), state_pages=STATE_PAGES)


class StateMachine(RuleBasedStateMachine):
    """Random prompts, steps, forks, aborts, errors and hand-offs. Two steps are in flight, and the device is late."""

    @initialize(num_states=st.integers(1, 7), spacing=st.integers(1, 3), policy=st.sampled_from(["lru", "gdsf"]))
    def make(self, num_states: int, spacing: int, policy: str) -> None:
        options: dict[str, Any] = {"num_states": num_states, "spacing": spacing, "state_pages": STATE_PAGES}
        self.announced: set[bytes] = set()
        options |= {"on_stored": self.announced.update, "on_evicted": self.announced.difference_update}
        self.pool = StateBlockPool(BLOCKS, SIZE, policy=policy, **options)
        self.seen: list[Tokens | None] = [None] * num_states + [()]  # By slot; the last one is the zero slot
        self.text_of: dict[bytes, Tokens] = {}
        self.running: list[Running] = []
        self.in_flight: list[Launched] = []
        self.readers: list[Transfer] = []
        self.arriving: list[Transfer] = []

    def hashes(self, tokens: Tokens) -> list[bytes]:
        hashes = hashes_of(tokens)
        self.text_of |= {block_hash: tokens[: SIZE * i] for i, block_hash in enumerate(hashes, 1)}
        return hashes

    @property
    def busy(self) -> bool:
        return bool(self.running or self.in_flight or self.readers or self.arriving)

    @rule(tokens=texts)
    def add(self, tokens: Tokens) -> None:
        matchable = self.hashes(tokens)[: (len(tokens) - 1) // SIZE]
        expected = self.pool.match_prefix(matchable)
        lease = self.pool.lease(matchable, -(-len(tokens) // SIZE))
        if lease is None:
            assert self.busy, "an idle pool grants every lease"
            return
        assert lease.cached_blocks == expected
        self.running.append(Running(lease, tokens, len(tokens), lease.cached_blocks * SIZE))

    @precondition(lambda self: self.running and len(self.in_flight) < 2)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        scheduled: list[ScheduledSequence] = []
        for seq in self.running:
            wanted = data.draw(st.integers(0, len(seq.tokens)))
            num_new = min(wanted, len(seq.tokens) - seq.start)
            if num_new and self.prepare(seq, seq.start + num_new):
                num_new = min(num_new, len(seq.tokens) - seq.start)
                scheduled.append(ScheduledSequence(seq, seq.start, num_new, samples=False))  # type: ignore[arg-type]
        if not scheduled:
            return
        planned = plan_states(self.pool, scheduled)
        step = Launched(planned, self.pool.begin_step())
        for entry in planned:
            seq: Any = entry.seq
            end = entry.start + entry.num_new
            lengths = [snapshot.length for snapshot in entry.snapshots]
            assert lengths == sorted(set(lengths))
            assert all(entry.start < length <= end and length % SIZE == 0 for length in lengths)
            step.copies += entry.state_copies
            step.rows.append(DeviceRow(seq.lease.slot, seq.tokens, entry.start, end, entry.snapshots))
            step.leases.append(require_states(seq.lease))
            seq.launched += entry.num_new
        self.in_flight.append(step)

    @precondition(lambda self: any(not step.ran for step in self.in_flight))
    @rule()
    def device_runs(self) -> None:
        self.run(next(step for step in self.in_flight if not step.ran))

    def run(self, step: Launched) -> None:
        step.ran = True
        for source, target in step.copies:
            self.seen[target] = self.seen[source]
        for row in step.rows:
            assert self.seen[row.slot] == row.tokens[: row.start], "the live state has seen other tokens"
            for length, slot in row.snapshots:
                self.seen[slot] = row.tokens[:length]
            self.seen[row.slot] = row.tokens[: row.end]

    def prepare(self, seq: Running, end: int) -> bool:
        """Does what the scheduler does before a step of a sequence; returns whether the blocks are there."""
        lease = seq.lease
        if seq.start == lease.cached_blocks * SIZE and seq.start < seq.prefill_len:
            seq.computed = lease.rematch(self.hashes(seq.tokens)[: (len(seq.tokens) - 1) // SIZE]) * SIZE
        if lease.cow_index == seq.start // SIZE and lease.copy_on_write() is None:
            return False
        missing = -(-max(end, seq.start + 1) // SIZE) - len(lease.blocks)
        return missing <= 0 or lease.grow(missing)

    @precondition(lambda self: self.in_flight)
    @rule(fails=st.lists(st.booleans(), min_size=8, max_size=8))
    def collect(self, fails: list[bool]) -> None:
        launched = self.in_flight.pop(0)
        if not launched.ran:
            self.run(launched)
        launched.fence.end()
        for number, (entry, lease) in enumerate(zip(launched.scheduled, launched.leases, strict=True)):
            seq: Any = entry.seq
            if lease.finished:
                continue
            seq.launched -= entry.num_new
            seq.computed += entry.num_new
            if fails[number % 8] and fails[0]:
                self.end(seq, "error")
                continue
            lease.publish(self.hashes(seq.tokens)[: seq.computed // SIZE])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 1))
    def sample(self, data: st.DataObject, token: int) -> None:
        seq = data.draw(st.sampled_from(self.running))
        if seq.start == len(seq.tokens):
            seq.tokens += (token,)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 1))
    def fork(self, data: st.DataObject, token: int) -> None:
        seq = data.draw(st.sampled_from(self.running))
        if not seq.computed == seq.prefill_len == len(seq.tokens) or seq.launched:
            return
        lease = require_states(seq.lease.fork(-(-seq.prefill_len // SIZE)))
        if lease.is_complete:
            self.running.append(Running(lease, (*seq.tokens, token), seq.prefill_len, seq.prefill_len))
        else:
            assert not self.pool.slots.free
            assert not self.pool.slots.snapshots
            lease.finish("preempted")

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.running)), "abort")

    def end(self, seq: Running, reason: str) -> None:
        seq.lease.finish(reason)
        self.running.remove(seq)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        """A prompt is computed: its state is read by a transfer, and its lease ends."""
        seq = data.draw(st.sampled_from(self.running))
        if not seq.computed == seq.prefill_len == len(seq.tokens) or seq.launched:
            return
        pin = seq.lease.pin_for_read(0, -(-seq.prefill_len // SIZE), order_of(seq.tokens))
        assert len(pin.blocks) == order_of(seq.tokens).num_pages
        self.readers.append(Transfer(pin, seq.lease.slot, seq.tokens))
        self.end(seq, "handed off")

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def end_read(self, data: st.DataObject) -> None:
        read = data.draw(st.sampled_from(self.readers))
        assert self.seen[read.slot] == read.tokens, "the state changed while it was read"
        read.pin.release()
        self.readers.remove(read)

    @rule(tokens=texts)
    def receive(self, tokens: Tokens) -> None:
        """A request whose prompt another pod computes."""
        matchable, order = self.hashes(tokens)[: (len(tokens) - 1) // SIZE], order_of(tokens)
        lease = self.pool.lease(matchable, order.num_blocks + 1)
        if lease is None:
            return
        if not lease.cover_transfer(order):
            lease.finish("no slot")
            assert self.busy, "an idle pool has an idle slot"
            return
        cached = lease.cached_blocks
        assert cached == len(self.pool._cache.match(matchable))
        pin = lease.pin_for_write(cached, order.num_blocks - cached, order)
        assert len(pin.blocks) == order.num_pages - cached
        self.arriving.append(Transfer(pin, lease.slot, tokens, lease))
        self.seen[lease.slot] = None  # bytes may land at once

    @precondition(lambda self: self.arriving)
    @rule(data=st.data(), token=st.integers(0, 1))
    def write_some(self, data: st.DataObject, token: int) -> None:
        """Bytes land in a slot, also in one of a request that has ended."""
        self.seen[data.draw(st.sampled_from(self.arriving)).slot] = None

    @precondition(lambda self: self.arriving)
    @rule(data=st.data(), token=st.integers(0, 1), samples=st.integers(1, 2))
    def arrive(self, data: st.DataObject, token: int, samples: int) -> None:
        """All bytes of a transfer have landed. Several samples fork from its lease, which ends."""
        arrived = data.draw(st.sampled_from(self.arriving))
        self.arriving.remove(arrived)
        self.seen[arrived.slot] = arrived.tokens
        half = sorted(arrived.pin.pinned)[::2]
        arrived.pin.release(half)
        arrived.pin.release()
        if arrived.order is not None:
            self.end_pull(arrived, arrived.order.num_pages)
        elif arrived.lease is not None:
            arrived.lease.publish(self.hashes(arrived.tokens))
            length, leases = len(arrived.tokens), [arrived.lease]
            if samples > 1:
                forks = [require_states(arrived.lease.fork(-(-length // SIZE))) for _ in range(samples)]
                leases = [fork for fork in forks if fork.is_complete]
                for lease in (arrived.lease, *(fork for fork in forks if not fork.is_complete)):
                    lease.finish("forked")
            self.running += [Running(lease, (*arrived.tokens, token), length, length) for lease in leases]

    @precondition(lambda self: self.arriving)
    @rule(data=st.data())
    def abort_transfer(self, data: st.DataObject) -> None:
        """The request ends; its pin stays until no byte can land any more."""
        ended = data.draw(st.sampled_from(self.arriving))
        if ended.lease is not None:
            ended.lease.finish("abort")
            ended.lease = None

    @precondition(lambda self: self.pool.slots.snapshots)
    @rule(data=st.data(), more=texts)
    def lend(self, data: st.DataObject, more: Tokens) -> None:
        """Another pod pulls what this one has of a prefix, from any of its blocks on."""
        tokens = self.text_of[data.draw(st.sampled_from(sorted(self.pool.slots.snapshots)))]
        hashes = self.hashes((*tokens, *more))
        held = self.pool.lendable_blocks(hashes)
        assert held >= len(tokens) // SIZE
        assert held == len(hashes) or self.pool.pin_prefix(hashes, 0) is None
        first = data.draw(st.integers(0, held))
        pin = self.pool.pin_prefix(hashes[:held], first)
        assert isinstance(pin, StatePin)
        assert len(pin.blocks) == self.pool.prefix_pages(held) - first
        self.readers.append(Transfer(pin, pin.slot, (*tokens, *more)[: held * SIZE]))

    @rule(tokens=texts)
    def pull(self, tokens: Tokens) -> None:
        """A prefix that another pod sends with the state at its end."""
        hashes = self.hashes(tokens)
        order = PageOrder(len(hashes), state_pages=STATE_PAGES)
        lease = self.pool.lease(hashes, len(hashes)) if hashes else None
        if lease is None:
            return
        if lease.cached_blocks == len(hashes) or not lease.cover_transfer(order):
            lease.finish("no slot, or nothing to pull")
            return
        first = lease.cached_blocks
        pin = lease.pin_for_write(first, len(hashes) - first, order)
        assert len(pin.blocks) == order.num_pages - first
        self.arriving.append(Transfer(pin, lease.slot, tokens[: len(hashes) * SIZE], lease, order))
        self.seen[lease.slot] = None

    def end_pull(self, pull: Transfer, num_pages: int) -> None:
        if pull.lease is not None:
            assert pull.order is not None
            hashes = self.hashes(pull.tokens)
            assert pull.lease.publish_pulled(hashes, pull.order, num_pages) >= min(num_pages, len(hashes))
            pull.lease.finish("pulled")
            assert (self.pool.match_prefix(hashes) == len(hashes)) >= (num_pages == pull.order.num_pages)

    @precondition(lambda self: any(pull.order is not None for pull in self.arriving))
    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        """A holder sends only the blocks of a prefix, and not the state."""
        pull = data.draw(st.sampled_from([pull for pull in self.arriving if pull.order is not None]))
        self.arriving.remove(pull)
        pull.pin.release()
        self.end_pull(pull, len(pull.tokens) // SIZE)

    @rule()
    def reset(self) -> None:
        self.pool.reset_prefix_cache()
        if not self.busy:
            assert len(self.pool.slots.free) == self.pool.slots.num_slots

    @invariant()
    def every_snapshot_has_seen_its_prefix(self) -> None:
        slots = self.pool.slots
        for block_hash, slot in slots.snapshots.items():
            assert self.seen[slot] == self.text_of[block_hash]
        assert slots._matched <= slots.snapshots.keys()
        self.pool.check_integrity()
        assert self.pool.num_available() == 0 or slots.has_available
        before = {h for block_hash in slots.snapshots for h in hashes_of(self.text_of[block_hash])}
        assert self.announced == set(self.pool.cached_hashes()) == before, "the index gets the blocks before snapshots"

    def teardown(self) -> None:
        while self.in_flight:
            self.collect([False] * 8)
        for seq in tuple(self.running):
            self.end(seq, "stop")
        for transfer in (*self.readers, *self.arriving):
            transfer.pin.release()
            if transfer.lease is not None:
                transfer.lease.finish("stop")
        self.every_snapshot_has_seen_its_prefix()
        assert self.pool.counts().leased == 0
        assert len(self.pool.slots.free) + len(self.pool.slots.snapshots) == self.pool.slots.num_slots


TestStateMachine = StateMachine.TestCase
TestStateMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


def test_the_only_available_slot_has_the_snapshot_of_the_hit() -> None:
    pool, order = StateBlockPool(BLOCKS, SIZE, num_states=2, spacing=1), PageOrder(2, state_pages=1)
    hashes = hashes_of((0, 1, 1, 0, 1))
    pulled = pool.lease(hashes, 2)
    assert pulled is not None
    assert pulled.cover_transfer(order)
    pulled.pin_for_write(0, 2, order).release()
    pulled.publish_pulled(hashes, order, order.num_pages)
    pulled.finish("pulled")
    other = pool.lease([], 1)
    lease = pool.lease(hashes, 3)
    assert other is not None
    assert lease is not None, "num_available() promises it"
    assert lease.cached_blocks == 2
    assert pool.cached_hashes() == [], "the snapshot is the live state now"
    assert lease.slot not in {copy.target for copy in pool.take_copies([other, lease])}
    for used in (other, lease):
        used.finish("end")
    pool.check_integrity()
    assert len(pool.slots.free) == 2
