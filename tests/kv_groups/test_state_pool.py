"""The slots of recurrent states against a model that knows which tokens each slot has seen."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.kv.blocks import BlockPin, StepFence
from engine.kv.state_blocks import StateBlockPool, StateLease, require_states
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
    prompt_len: int
    computed: int  # Tokens of collected steps
    launched: int = 0  # Tokens of steps in flight

    @property
    def start(self) -> int:
        return self.computed + self.launched


@dataclass(eq=False)
class Launched:
    """A step whose copies and results are in the slots; the host has not collected it."""

    scheduled: list[ScheduledSequence]
    fence: StepFence
    leases: list[StateLease] = field(default_factory=list)


class StateMachine(RuleBasedStateMachine):
    """Random prompts, steps of random lengths, two of them in flight, forks, aborts at any time, errors and readers."""

    @initialize(num_states=st.integers(1, 7), spacing=st.integers(1, 3))
    def make(self, num_states: int, spacing: int) -> None:
        self.pool = StateBlockPool(BLOCKS, SIZE, num_states=num_states, spacing=spacing)
        self.seen: list[Tokens | None] = [None] * num_states + [()]  # By slot; the last one is the zero slot
        self.text_of: dict[bytes, Tokens] = {}
        self.running: list[Running] = []
        self.in_flight: list[Launched] = []
        self.readers: list[BlockPin] = []

    def hashes(self, tokens: Tokens) -> list[bytes]:
        hashes = hashes_of(tokens)
        self.text_of |= {block_hash: tokens[: SIZE * i] for i, block_hash in enumerate(hashes, 1)}
        return hashes

    @rule(tokens=texts)
    def add(self, tokens: Tokens) -> None:
        matchable = self.hashes(tokens)[: (len(tokens) - 1) // SIZE]
        expected = self.pool.match_prefix(matchable)
        lease = self.pool.lease(matchable, -(-len(tokens) // SIZE))
        if lease is None:
            assert self.running, "an idle pool grants every lease"
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
        fence = self.pool.begin_step()
        for entry in planned:
            for source, target in entry.state_copies:
                self.seen[target] = self.seen[source]
        for entry in planned:
            seq: Any = entry.seq
            end = entry.start + entry.num_new
            assert self.seen[seq.lease.slot] == seq.tokens[: entry.start], "the live state has seen other tokens"
            lengths = [snapshot.length for snapshot in entry.snapshots]
            assert lengths == sorted(set(lengths))
            assert all(entry.start < length <= end and length % SIZE == 0 for length in lengths)
            for length, slot in entry.snapshots:
                self.seen[slot] = seq.tokens[:length]
            self.seen[seq.lease.slot] = seq.tokens[:end]
            seq.launched += entry.num_new
        leases = [require_states(entry.seq.lease) for entry in planned]
        self.in_flight.append(Launched(planned, fence, leases))

    def prepare(self, seq: Running, end: int) -> bool:
        """Does what the scheduler does before a step of a sequence; returns whether the blocks are there."""
        lease = seq.lease
        if seq.start == lease.cached_blocks * SIZE and seq.start < seq.prompt_len:
            seq.computed = lease.rematch(self.hashes(seq.tokens)[: (len(seq.tokens) - 1) // SIZE]) * SIZE
        if lease.cow_index == seq.start // SIZE and lease.copy_on_write() is None:
            return False
        missing = -(-max(end, seq.start + 1) // SIZE) - len(lease.blocks)
        return missing <= 0 or lease.grow(missing)

    @precondition(lambda self: self.in_flight)
    @rule(fails=st.lists(st.booleans(), min_size=8, max_size=8))
    def collect(self, fails: list[bool]) -> None:
        launched = self.in_flight.pop(0)
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
        if not seq.computed == seq.prompt_len == len(seq.tokens) or seq.launched:
            return
        lease = require_states(seq.lease.fork(-(-seq.prompt_len // SIZE)))
        if lease.is_complete:
            self.running.append(Running(lease, (*seq.tokens, token), seq.prompt_len, seq.prompt_len))
        else:
            assert len(self.running) == self.pool.slots.num_slots - len(self.planned())
            lease.finish("preempted")

    def planned(self) -> list[int]:
        """The slots of snapshots that are not registered yet."""
        return [slot for seq in self.running for slot in seq.lease.all_slots() if slot != seq.lease.slot]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.running)), "abort")

    def end(self, seq: Running, reason: str) -> None:
        seq.lease.finish(reason)
        self.running.remove(seq)

    @rule(tokens=texts)
    def pin(self, tokens: Tokens) -> None:
        if pin := self.pool.pin_prefix(self.hashes(tokens), 0):
            self.readers.append(pin)

    @precondition(lambda self: self.readers)
    @rule()
    def unpin(self) -> None:
        self.readers.pop().release()

    @rule()
    def reset(self) -> None:
        self.pool.reset_prefix_cache()
        if not (self.running or self.in_flight or self.readers):
            assert len(self.pool.slots.free) == self.pool.slots.num_slots

    @invariant()
    def every_snapshot_has_seen_its_prefix(self) -> None:
        slots = self.pool.slots
        for block_hash, slot in slots.snapshots.items():
            assert self.seen[slot] == self.text_of[block_hash]
        assert slots._matched <= slots.snapshots.keys()
        self.pool.check_integrity()

    def teardown(self) -> None:
        while self.in_flight:
            self.collect([False] * 8)
        for seq in tuple(self.running):
            self.end(seq, "stop")
        for pin in self.readers:
            pin.release()
        self.every_snapshot_has_seen_its_prefix()
        assert self.pool.counts().leased == 0
        assert len(self.pool.slots.free) + len(self.pool.slots.snapshots) == self.pool.slots.num_slots


TestStateMachine = StateMachine.TestCase
TestStateMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
