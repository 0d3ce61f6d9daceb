"""Requests for n samples in a stepper: each child gets the tokens that it would get alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.types import FinishReason, SamplingParams
from engine.kv.blocks import BlockPool
from engine.schedule.outputs import SequenceOutput, StepResult
from engine.schedule.sequence import Sequence
from tests.rigs.engine.late_device import Steps, answer

Name = tuple[str, int]


class World(Steps):
    """Collects the tokens and the end of each child."""

    def __init__(self, *, overlap: bool, blocks: int = 60, size: int = 4, budget: int = 16, seqs: int = 4) -> None:
        self.stored: list[bytes] = []
        pool = BlockPool(blocks, size, on_stored=self.stored.extend)
        super().__init__(pool, size, overlap=overlap, budget=budget, seqs=seqs)
        self.tokens: dict[Name, list[int]] = {}
        self.ends: dict[Name, SequenceOutput] = {}

    def on_step(self, result: StepResult) -> None:
        for output in result.outputs:
            seq = output.seq
            name = seq.request_id, seq.child
            assert name not in self.ends, "an output after the end"
            assert all(token.child == seq.child for token in output.tokens)
            assert [t.index for t in output.tokens] == [len(self.tokens.get(name, []))] * len(output.tokens)
            self.tokens.setdefault(name, []).extend(t.id for t in output.tokens)
            if seq.lease is not None:
                assert seq.lease.num_published * self.size <= max(seq.computed, seq.prompt_len)
            if output.ended:
                self.ends[name] = output

    def abort(self, name: str, child: int | None = None) -> None:
        for seq in self.scheduler.abort(name, child):
            if seq.lease is not None:
                seq.lease.finish("abort")
            for ended in range(seq.child, seq.child + seq.num_samples):
                self.ends[name, ended] = SequenceOutput(seq, seq.computed, finish_reason=FinishReason.ABORT)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_children_share_the_prompt_and_each_copies_its_last_block_once(overlap: bool, length: int) -> None:
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
    assert len(world.stored) == len(set(world.stored)), "a block is announced once"


def test_more_children_than_slots_and_one_stops_at_its_first_token() -> None:
    world = World(overlap=True, seqs=2)
    prompt = [1, 2, 3, 4, 5]
    params = SamplingParams(max_tokens=5, n=7)
    stopped = answer(prompt, params, 3)[0]
    params = SamplingParams(max_tokens=5, n=7, stop_token_ids=(stopped,))
    world.add("a", prompt, params)
    world.drain()
    for child in range(7):
        assert world.tokens["a", child] == answer(prompt, params, child)
    assert world.ends["a", 3].finish_reason is FinishReason.STOP
    assert len(world.tokens["a", 3]) == 1


def test_one_child_is_aborted_and_the_others_go_on() -> None:
    world = World(overlap=True)
    params = SamplingParams(max_tokens=9, n=3)
    world.add("a", [1, 2, 3], params)
    world.abort("a", 0)
    assert not world.ends, "one sequence stands for all children until the prompt is computed"
    while not world.tokens:
        world.step()
    world.abort("a", 1)
    world.drain()
    assert world.ends["a", 1].finish_reason is FinishReason.ABORT
    for child in (0, 2):
        assert world.tokens["a", child] == answer([1, 2, 3], params, child)


def test_a_hand_off_ends_with_the_first_tokens_of_all_children() -> None:
    world = World(overlap=True)
    params = SamplingParams(max_tokens=9, n=4)
    stopped = answer([1, 2, 3], params, 2)[0]
    world.add("a", [1, 2, 3], SamplingParams(max_tokens=9, n=4, stop_token_ids=(stopped,)), hand_off=True)
    world.drain()
    assert [world.tokens["a", child] for child in range(4)] == [answer([1, 2, 3], params, c)[:1] for c in range(4)]
    assert all(end.handed_off for end in world.ends.values())
    assert [world.ends["a", c].finish_reason for c in range(4)] == [None, None, FinishReason.STOP, None]


def test_n_that_never_fits_is_refused() -> None:
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
    """One request of a random load."""

    step: int
    group: int
    prompt_len: int
    max_tokens: int
    n: int
    stops: bool
    hand_off: bool
    #: Steps after the arrival, and the child (None for all).
    abort: tuple[int, int | None] | None
    #: Steps after the arrival, and their number.
    pause: tuple[int, int] | None
    seq: Sequence | None = field(default=None, compare=False)

    @property
    def prompt(self) -> list[int]:
        return [(self.group * i * i) % 7 for i in range(self.prompt_len)]

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, n=self.n, stop_token_ids=(1, 4) if self.stops else ())


arrivals = st.builds(
    Arrival,
    step=st.integers(0, 12),
    group=st.integers(0, 2),
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
    while now < 40 or world.stepper.has_work:  # the last pause ends at step 12 + 10 + 15
        assert now < 3000, "starved"
        for number, arrival in enumerate(load):
            name, since = str(number), now - arrival.step
            if since == 0:
                arrival.seq = world.add(name, arrival.prompt, arrival.params, hand_off=arrival.hand_off)
            if since < 0:
                continue
            if arrival.pause is not None:
                for seq in world.scheduler.sequences_of(name):
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
            if end[name].finish_reason is FinishReason.ABORT:
                assert arrival.abort is not None
                assert arrival.abort[1] in (None, child)
                assert tokens == wanted[: len(tokens)]
            else:
                assert tokens == (wanted[:1] if arrival.hand_off else wanted)
