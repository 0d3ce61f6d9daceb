"""Sequences that fork from one prompt: leases at random, then whole loads on a fake device that computes late.

Its KV stands for a token and all before it, per physical slot, so a block that two children write, that is copied too
late or reused too early gives wrong tokens. Child c's next token is what the KV says plus c.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate, count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import InternalError, InvalidRequest
from common.types import FinishReason, SamplingParams, Token, ValidRequest
from engine.block_pool import BlockPool, Lease, StepFence
from engine.lease import BlockCopy
from engine.scheduler import Item, Scheduler, SchedulerConfig
from engine.sequence import Sequence
from engine.step_result import SequenceOutput, StepResult
from engine.stepper import Between, ItemResult, Stepper

FINGERPRINT = "00" * 16
VOCAB = 11
SIZE = 4


def chain(blocks: int) -> list[bytes]:
    return [bytes([i]).ljust(16, b"\0") for i in range(blocks)]


def leased(pool: BlockPool, blocks: int) -> Lease:
    lease = pool.lease([], blocks)
    assert lease is not None
    return lease


def test_all_but_the_last_user_copy_the_last_block() -> None:
    pool = BlockPool(12, SIZE)
    first = leased(pool, 3)
    first.publish(chain(2))
    second, third = first.fork(3), first.fork(3)
    assert first.blocks == second.blocks == third.blocks
    assert (second.published, second.borrowed, pool.available()) == (2, 2, 9)
    shared = first.blocks[2]
    copies = [lease.own() for lease in (second, first)]
    assert [copy.source for copy in copies if copy] == [shared, shared]
    assert len({shared, second.blocks[2], first.blocks[2]}) == 3
    assert third.own() == BlockCopy(shared, shared), "its copies are taken before anything is written"
    third.finish("done")
    pool.check()
    assert pool.available() == 7, "the step that copies from it is still to come"
    pool.begin_step().end()
    assert pool.available() == 8
    for lease in (first, second):
        lease.finish("done")
    pool.check()
    assert (pool.counts().leased, pool.counts().cached) == (0, 2)


def test_a_spare_block_is_what_the_copy_takes() -> None:
    pool = BlockPool(5, SIZE)
    first = leased(pool, 5)
    first.publish(chain(1))
    second = first.fork(2, spare=1)
    assert (len(first.blocks), len(second.blocks), pool.available()) == (4, 3, 0)
    spare = second.blocks[2]
    assert second.own() == BlockCopy(first.blocks[1], spare)
    assert second.blocks == [first.blocks[0], spare]
    assert first.own() == BlockCopy(first.blocks[1], first.blocks[1])
    with pytest.raises(InternalError):
        first.fork(4, spare=1)


def test_own_waits_for_a_block_and_a_reader_keeps_the_bytes() -> None:
    pool = BlockPool(2, SIZE)
    first = leased(pool, 1)
    second = first.fork(1)
    other = leased(pool, 1)
    assert second.own() is None
    assert second.borrowed == 0
    reader = first.reader(0, 1)
    first.finish("done")
    assert second.own() is None, "somebody else still reads it"
    other.finish("done")
    copy = second.own()
    assert copy is not None
    assert copy.target != copy.source
    reader.release()
    second.finish("done")
    pool.begin_step().end()
    pool.check()
    assert pool.counts().free == 2


def test_a_shared_block_is_hashed_once() -> None:
    stored: list[bytes] = []
    pool = BlockPool(6, SIZE, on_stored=stored.extend)
    first = leased(pool, 2)
    second = first.fork(2)
    second.publish(chain(2))
    first.publish(chain(2))
    assert stored == chain(2)
    assert (first.swaps, first.blocks) == (0, second.blocks)
    first.finish("done")
    second.finish("done")
    pool.check()
    assert (pool.counts().cached, pool.counts().free) == (2, 4)


@dataclass(eq=False)
class Child:
    """A lease and its tokens, each of which is another one but for those that a fork shares."""

    lease: Lease
    tokens: list[int]

    def hashes(self) -> list[bytes]:
        ends = range(SIZE, len(self.tokens) + 1, SIZE)
        return [blake2b(repr(self.tokens[:end]).encode(), digest_size=16).digest() for end in ends]


class Forks(RuleBasedStateMachine):
    """Leases that fork, write, publish and finish, with steps in flight; a write belongs to one lease alone."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(10, SIZE)
        self.children: list[Child] = []
        self.fences: list[StepFence] = []
        self.fresh = count()
        self.copying: set[int] = set()  # blocks that a step which was not launched yet copies from

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
        """One token more, as the scheduler has it written."""
        child = self.pick(data)
        lease, place = child.lease, len(child.tokens) // SIZE
        if lease.borrowed == place:
            copy = lease.own()
            if copy is None:
                assert self.pool.available() == 0
                return
            if copy.source != copy.target:
                assert copy.target not in self.copying, "it is copied from in the same step"
                self.copying.add(copy.source)
        if place == len(lease.blocks) and not lease.grow():
            return
        block = lease.blocks[place]
        assert block not in {b for c in self.children if c is not child for b in c.lease.blocks}, "two write one block"
        assert place >= lease.published
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
    def land(self) -> None:
        self.fences.pop(0).end()

    @invariant()
    def adds_up(self) -> None:
        self.pool.check()

    def teardown(self) -> None:
        for child in self.children:
            child.lease.finish("over")
        self.pool.begin_step().end()
        for fence in self.fences:
            fence.end()
        self.pool.check()
        counts = self.pool.counts()
        assert (counts.leased, counts.quarantined) == (0, 0)


Forks.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestForks = Forks.TestCase


def state(tokens: abc.Sequence[int], before: int = 0) -> int:
    return list(accumulate(tokens, lambda s, token: hash((s, token)), initial=before))[-1]


def answer(prompt: abc.Sequence[int], params: SamplingParams, child: int) -> list[int]:
    """What a child gives when nobody disturbs it."""
    tokens = list(prompt)
    while True:
        tokens.append((state(tokens) + child) % VOCAB)
        output = tokens[len(prompt) :]
        if output[-1] in params.stop_token_ids or len(output) >= params.max_tokens:
            return output


@dataclass
class Step:
    """What the host knew at launch."""

    items: list[Item]
    slots: list[int]
    blocks: list[list[int]]
    known: list[list[int]]


class Device:
    """Runs steps in order, as late as possible."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.kv: dict[tuple[int, int], int] = {}
        self.last: dict[int, int] = {}
        self.queue: list[Step] = []
        self.copies = 0

    def launch(self, items: abc.Sequence[Item], between: Between | None = None) -> Step:
        blocks = [list(item.seq.lease.blocks) for item in items if item.seq.lease is not None]
        written = [b for b, item in zip(blocks, items, strict=True) for b in self._touched(b, item)]
        assert len(written) == len(set(written)), "two sequences write one block in a step"
        known = [item.seq.tokens[item.start : item.start + item.num_new] for item in items]
        step = Step(list(items), [item.seq.slot for item in items], blocks, known)
        self.queue.append(step)
        return step

    def _touched(self, blocks: list[int], item: Item) -> list[int]:
        return blocks[item.start // self.size : (item.start + item.num_new - 1) // self.size + 1]

    def constrain(self, launched: Step) -> Step:
        return launched

    def collect(self, launched: Step) -> list[ItemResult]:
        assert self.queue.pop(0) is launched
        for item in launched.items:
            if item.copy is not None and item.copy.source != item.copy.target:
                self.copies += 1
                for offset in range(self.size):
                    if (found := self.kv.get((item.copy.source, offset))) is not None:
                        self.kv[item.copy.target, offset] = found
        rows = zip(launched.items, launched.slots, launched.blocks, launched.known, strict=True)
        return [self._compute(*row) for row in rows]

    def _compute(self, item: Item, slot: int, blocks: list[int], known: list[int]) -> ItemResult:
        tokens = known if len(known) == item.num_new else [*known, self.last[slot]]
        for position, token in enumerate(tokens, item.start):
            before = self.kv[self._at(blocks, position - 1)] if position else 0
            self.kv[self._at(blocks, position)] = state([token], before)
        if not item.sample:
            return ItemResult(True)
        found = self.kv[self._at(blocks, item.start + item.num_new - 1)]
        seq = item.seq
        self.last[slot] = (found + seq.child) % VOCAB
        others = [Token(0, (found + child) % VOCAB, child=child) for child in range(1, seq.draws)]
        return ItemResult(True, (Token(seq.num_output, self.last[slot], child=seq.child),), others=tuple(others))

    def _at(self, blocks: list[int], position: int) -> tuple[int, int]:
        return blocks[position // self.size], position % self.size


Name = tuple[str, int]


class World:
    """Engine-like: a stepper, and what its hook saw of each child."""

    def __init__(self, *, overlap: bool, blocks: int = 60, size: int = 4, budget: int = 16, seqs: int = 4) -> None:
        self.size = size
        self.device = Device(size)
        self.stored: list[bytes] = []
        self.pool = BlockPool(blocks, size, on_stored=self.stored.extend)
        self.scheduler = Scheduler(SchedulerConfig(token_budget=budget, max_seqs=seqs, max_model_len=60), self.pool)
        self.stepper = Stepper(self.scheduler, self.pool, self.device, max_model_len=60, overlap=overlap)
        self.tokens: dict[Name, list[int]] = {}
        self.ends: dict[Name, SequenceOutput] = {}

    def add(self, name: str, prompt: abc.Sequence[int], params: SamplingParams, *, hand_off: bool = False) -> Sequence:
        request = ValidRequest(name, "m", tuple(prompt), params)
        seq = Sequence(request, fingerprint=FINGERPRINT, block_size=self.size, hand_off=hand_off)
        self.scheduler.add(seq)
        return seq

    def hook(self, result: StepResult) -> None:
        for output in result.outputs:
            seq = output.seq
            name = seq.request_id, seq.child
            assert name not in self.ends, "told after its end"
            assert all(token.child == seq.child for token in output.tokens)
            assert [t.index for t in output.tokens] == [len(self.tokens.get(name, []))] * len(output.tokens)
            self.tokens.setdefault(name, []).extend(t.id for t in output.tokens)
            if seq.lease is not None:
                assert seq.lease.published * self.size <= max(seq.computed, seq.prompt_len)
            if output.ended:
                self.ends[name] = output

    def abort(self, name: str, child: int | None = None) -> None:
        for seq in self.scheduler.abort(name, child):
            if seq.lease is not None:
                seq.lease.finish("abort")
            for ended in range(seq.child, seq.child + seq.draws):
                self.ends[name, ended] = SequenceOutput(seq, seq.computed, finish=FinishReason.ABORT)

    def step(self) -> StepResult:
        result = self.stepper.step(self.hook)
        self.pool.check()
        return result

    def drain(self) -> None:
        for _ in range(3000):
            if not self.stepper.has_work:
                break
            self.step()
        else:
            raise AssertionError("starved")
        counts = self.pool.counts()
        assert (counts.leased, counts.quarantined) == (0, 0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_children_share_the_prompt_and_copy_its_last_block_once_each(overlap: bool, length: int) -> None:
    world = World(overlap=overlap)
    params = SamplingParams(max_tokens=6, n=3)
    prompt = list(range(length))
    world.add("a", prompt, params)
    for _ in range(20):
        if world.scheduler.stats().running == 3:
            break
        world.step()
    else:
        raise AssertionError("the children never ran side by side")
    world.drain()
    assert [world.tokens["a", child] for child in range(3)] == [answer(prompt, params, child) for child in range(3)]
    assert world.stepper.counters.prompt_tokens == length
    assert world.device.copies == (2 if length % 4 else 0)
    assert len(world.stored) == len(set(world.stored)), "a block is told once"


def test_more_children_than_slots_and_one_that_stops_at_its_first_token() -> None:
    world = World(overlap=True, seqs=2)
    prompt = [1, 2, 3, 4, 5]
    params = SamplingParams(max_tokens=5, n=7)
    stopped = answer(prompt, params, 3)[0]
    params = SamplingParams(max_tokens=5, n=7, stop_token_ids=(stopped,))
    world.add("a", prompt, params)
    world.drain()
    for child in range(7):
        assert world.tokens["a", child] == answer(prompt, params, child)
    assert world.ends["a", 3].finish is FinishReason.STOP
    assert len(world.tokens["a", 3]) == 1


def test_one_child_is_aborted_and_the_others_go_on() -> None:
    world = World(overlap=True)
    params = SamplingParams(max_tokens=9, n=3)
    world.add("a", [1, 2, 3], params)
    world.abort("a", 0)
    assert not world.ends, "it stands for all until the prompt is computed"
    while not world.tokens:
        world.step()
    world.abort("a", 1)
    world.drain()
    assert world.ends["a", 1].finish is FinishReason.ABORT
    for child in (0, 2):
        assert world.tokens["a", child] == answer([1, 2, 3], params, child)


def test_a_prompt_that_hands_off_ends_with_the_first_tokens_of_all() -> None:
    world = World(overlap=True)
    params = SamplingParams(max_tokens=9, n=4)
    stopped = answer([1, 2, 3], params, 2)[0]
    world.add("a", [1, 2, 3], SamplingParams(max_tokens=9, n=4, stop_token_ids=(stopped,)), hand_off=True)
    world.drain()
    assert [world.tokens["a", child] for child in range(4)] == [answer([1, 2, 3], params, c)[:1] for c in range(4)]
    assert all(end.handed_off for end in world.ends.values())
    assert [world.ends["a", c].finish for c in range(4)] == [None, None, FinishReason.STOP, None]


def test_what_never_fits_is_refused_by_name() -> None:
    world = World(overlap=False, blocks=6)
    world.add("fits", range(16), SamplingParams(max_tokens=5, n=3))
    world.add("ends at once", range(16), SamplingParams(max_tokens=1, n=128))
    for n in (0, 4, 129):
        with pytest.raises(InvalidRequest) as refused:
            world.add("more", range(16), SamplingParams(max_tokens=5, n=n))
        assert refused.value.field == "n"
    world.drain()
    assert len(world.ends) == 131


@dataclass
class Arrival:
    """One request of a random load; abort: steps after its arrival, and which child (None: all)."""

    step: int
    family: int
    prompt_len: int
    max_tokens: int
    n: int
    stops: bool
    hand_off: bool
    abort: tuple[int, int | None] | None
    pause: tuple[int, int] | None
    seq: Sequence | None = field(default=None, compare=False)

    @property
    def prompt(self) -> list[int]:
        return [(self.family * i * i) % 7 for i in range(self.prompt_len)]

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, n=self.n, stop_token_ids=(1, 4) if self.stops else ())


arrivals = st.builds(
    Arrival,
    step=st.integers(0, 12),
    family=st.integers(0, 2),
    prompt_len=st.integers(1, 18),
    max_tokens=st.integers(1, 12),
    n=st.integers(1, 5),
    stops=st.booleans(),
    hand_off=st.sampled_from([False, False, True]),
    abort=st.one_of(st.none(), st.tuples(st.integers(0, 15), st.one_of(st.none(), st.integers(0, 4)))),
    pause=st.one_of(st.none(), st.none(), st.tuples(st.integers(0, 10), st.integers(0, 15))),
)


@settings(max_examples=100, deadline=None)
@given(
    load=st.lists(arrivals, min_size=1, max_size=6),
    blocks=st.integers(12, 24),
    size=st.sampled_from([1, 4]),
    budget=st.integers(2, 20),
    seqs=st.integers(1, 6),
    overlap=st.booleans(),
)
def test_every_child_gets_the_tokens_that_it_gets_alone(
    load: list[Arrival], blocks: int, size: int, budget: int, seqs: int, overlap: bool
) -> None:
    world = World(overlap=overlap, blocks=blocks * 4 // size, size=size, budget=budget, seqs=seqs)
    now = 0
    while now < 30 or world.stepper.has_work:
        assert now < 3000, "starved"
        for number, arrival in enumerate(load):
            name, since = str(number), now - arrival.step
            if since == 0:
                arrival.seq = world.add(name, arrival.prompt, arrival.params, hand_off=arrival.hand_off)
            if since < 0:
                continue
            if arrival.pause is not None:
                for seq in world.scheduler.family(name):
                    seq.paused = arrival.pause[0] <= since < sum(arrival.pause)
            if arrival.abort is not None and arrival.abort[0] == since:
                world.abort(name, arrival.abort[1])
        world.step()
        now += 1
    world.drain()
    for number, arrival in enumerate(load):
        for child in range(arrival.n):
            name = str(number), child
            wanted, tokens, end = answer(arrival.prompt, arrival.params, child), world.tokens.get(name, []), world.ends
            if end[name].finish is FinishReason.ABORT:
                assert arrival.abort is not None
                assert arrival.abort[1] in (None, child)
                assert tokens == wanted[: len(tokens)]
            else:
                assert tokens == (wanted[:1] if arrival.hand_off else wanted)
