"""The stepper: overlapped steps, drafts and failures; also random loads with aborts, pauses and preemptions."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.types import FinishReason, SamplingParams
from engine.schedule.outputs import StepResult
from engine.schedule.scheduler import ScheduledSequence
from engine.schedule.sequence import DraftTokens, Sequence
from engine.schedule.stepper import LaunchCallback
from tests.rigs.engine.late_device import Step, World, answer

GREEDY = SamplingParams(max_tokens=9)


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_are_verified_several_at_a_time(overlap: bool) -> None:
    world = World(overlap=overlap, drafts=4, blocks=200, budget=60)
    params = SamplingParams(max_tokens=30)
    for i in range(4):
        world.add(str(i), [i, 2, 3], params)
    world.drain()
    assert world.tokens == {str(i): answer([i, 2, 3], params) for i in range(4)}
    assert world.speculator is not None
    assert 60 < world.speculator.stats.accepted < world.speculator.stats.proposed
    assert world.device.launches < 25
    assert world.stepper.counters.decode_tokens == 4 * 29
    assert world.stepper.counters.discarded_sequences == 0, "nothing was launched ahead of a result that it depends on"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("has_min_tokens", [False, True])
def test_a_stop_token_within_an_accepted_run_ends_it(overlap: bool, has_min_tokens: bool) -> None:
    """The sequence ends there although later drafts are right, and does not end before min_tokens."""
    inside = 0
    for first in range(20):
        prompt = [first, 2, 3]
        text = answer(prompt, SamplingParams(max_tokens=30))
        stop = text[5]
        min_tokens = text.index(stop) + 1 if has_min_tokens else 0
        params = SamplingParams(max_tokens=30, stop_token_ids=(stop,), min_tokens=min_tokens)
        world = World(overlap=overlap, drafts=7, budget=60)
        world.add("a", prompt, params)
        world.answers["a"] = text  # the proposer does not know the end
        world.drain()
        assert world.tokens["a"] == answer(prompt, params)
        end = world.ends["a"]
        assert end.finish_reason is (FinishReason.STOP if world.tokens["a"][-1] == stop else FinishReason.LENGTH)
        inside += end.finish_reason is FinishReason.STOP and 0 < end.num_accepted < end.num_drafts - 1
    assert inside > 3


def test_drafts_only_take_free_tokens_and_blocks_and_preempt_no_sequence() -> None:
    world = World(overlap=False, drafts=4, blocks=9, size=4, budget=8)
    seqs = [world.add(name, range(4), SamplingParams(max_tokens=12)) for name in "ab"]
    while not all(seq.decoding for seq in seqs):
        world.step()
    scheduled = world.scheduler.schedule({seq: DraftTokens((1, 2, 3, 4, 5)) for seq in seqs})
    assert [len(entry.drafts) for entry in scheduled] == [5, 1], "a budget of eight is two tokens and six drafts"
    assert all(entry.start + entry.num_new <= entry.seq.allocated for entry in scheduled)
    outside = world.pool.lease([], world.pool.num_available())
    assert outside is not None
    for entry in scheduled:
        entry.seq.launch(entry.num_new, sample=True, drafts=len(entry.drafts))
    assert world.scheduler.draft_candidates() == []
    assert world.scheduler.schedule() == [], "the token after the drafts is not known yet"
    for entry in scheduled:
        entry.seq.finish_step(entry.num_new, sample=True, drafts=len(entry.drafts))
        entry.seq.append(0)
    (first, second) = world.scheduler.schedule({seq: DraftTokens((1,) * 7) for seq in seqs})
    assert first.start + first.num_new <= first.seq.allocated
    assert second.start + second.num_new <= second.seq.allocated
    assert [seq.preemptions for seq in seqs] == [0, 0]


def test_blocks_reserved_for_drafts_that_are_not_verified_are_released() -> None:
    world = World(overlap=False, blocks=40, size=4, budget=16)
    seqs = [world.add(name, range(4), SamplingParams(max_tokens=40)) for name in "abc"]
    while not all(seq.decoding for seq in seqs):
        world.step()
    assert world.scheduler.draft_candidates() == seqs
    assert [world.scheduler.reserve_for_drafts(seq, seq.start + 14) >= seq.start + 14 for seq in seqs] == [True] * 3
    drafts = {seqs[0]: DraftTokens((1, 2, 3, 4, 5)), seqs[1]: DraftTokens((1,))}
    scheduled = world.scheduler.schedule(drafts)
    assert [len(entry.drafts) for entry in scheduled] == [5, 1, 0]
    needed = [-(-len(seq.tokens) // 4) for seq in seqs]
    lease_lens = [len(seq.lease.blocks) for seq in seqs if seq.lease is not None]
    assert lease_lens[2] == needed[2], "no drafts of the last sequence are verified"
    assert world.scheduler.schedule()
    assert [len(seq.lease.blocks) for seq in seqs if seq.lease is not None] == lease_lens


def test_reserve_for_drafts_leaves_a_block_for_each_running_sequence() -> None:
    world = World(overlap=False, blocks=12, size=4, budget=16)
    seqs = [world.add(name, range(4), SamplingParams(max_tokens=12)) for name in "ab"]
    while not all(seq.decoding for seq in seqs):
        world.step()
    outside = world.pool.lease([], world.pool.num_available() - 3)
    assert outside is not None
    first, second = seqs
    room = first.allocated
    assert world.scheduler.reserve_for_drafts(first, room + 1) == room + 4
    assert world.scheduler.reserve_for_drafts(second, second.allocated + 1) == second.allocated, (
        "two blocks are left for two sequences"
    )
    assert world.pool.num_available() == 2


def test_drafts_leave_a_block_for_each_running_sequence() -> None:
    world = World(overlap=False, blocks=16, size=4, budget=16)
    seqs = [world.add(name, range(4), SamplingParams(max_tokens=20)) for name in "ab"]
    while not all(seq.decoding for seq in seqs):
        world.step()
    assert [seq.allocated for seq in seqs] == [4, 4]
    outside = world.pool.lease([], world.pool.num_available() - 5)
    assert outside is not None
    scheduled = world.scheduler.schedule({seq: DraftTokens((1,) * 7) for seq in seqs})
    assert [len(entry.drafts) for entry in scheduled] == [7, 3], (
        "a block for each new token, and one more for drafts of the first sequence"
    )
    assert world.pool.num_available() == 2


def test_prompts_keep_their_share_of_a_step_with_drafts() -> None:
    world = World(overlap=False, blocks=60, size=4, budget=16)
    seqs = [world.add(name, range(4), SamplingParams(max_tokens=30)) for name in "ab"]
    while not all(seq.decoding for seq in seqs):
        world.step()
    world.add("c", range(50, 80), GREEDY)
    scheduled = world.scheduler.schedule({seq: DraftTokens((1,) * 7) for seq in seqs})
    assert [len(entry.drafts) for entry in scheduled] == [7, 3, 0], "prompts keep a quarter of sixteen tokens"
    assert scheduled[2].num_new == 4


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_is_launched_ahead_only_with_overlap(overlap: bool) -> None:
    world = World(overlap=overlap)
    seq = world.add("a", [1, 2, 3], GREEDY)
    world.step()
    assert len(world.device.queue) == overlap
    assert (seq.computed, seq.launched, seq.pending) == (3, overlap, overlap)
    world.drain()
    assert world.tokens["a"] == answer([1, 2, 3], GREEDY)
    assert world.stepper.counters.discarded_sequences == 0, "the end by length is known in advance"
    assert world.device.launches == 9


def test_a_request_that_arrives_during_a_step_is_in_the_next_one() -> None:
    world = World(overlap=True)
    world.add("a", [1, 2, 3], GREEDY)
    world.step()

    def inbox(until: float) -> bool:
        if "b" in world.answers:
            return False
        assert world.stepper.has_work
        assert len(world.device.queue) == 1, "the next step is not launched yet"
        assert world.receive("b", [4, 5], GREEDY) is not None
        return True

    world.step(inbox)
    (step,) = world.device.queue
    assert [entry.seq.request_id for entry in step.scheduled] == ["a", "b"]
    world.drain()
    assert world.tokens == {"a": answer([1, 2, 3], GREEDY), "b": answer([4, 5], GREEDY)}


def test_a_request_that_arrives_during_the_last_step_is_launched_before_its_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(overlap=True)
    world.add("a", [1, 2, 3], SamplingParams(max_tokens=1))
    monkeypatch.setattr(world.device, "is_done", lambda _: "b" in world.answers)
    calls = 0

    def inbox(until: float) -> bool:
        nonlocal calls
        calls += 1
        if calls == 5:
            world.add("b", [4, 5], GREEDY)
        return calls == 5

    assert [output.seq.request_id for output in world.step(inbox).outputs] == ["a"]
    assert calls == 5
    assert [entry.seq.request_id for entry in world.device.queue[0].scheduled] == ["b"]
    world.drain()
    assert world.tokens["b"] == answer([4, 5], GREEDY)


def test_a_result_is_reported_during_the_launch_of_the_next_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(overlap=True)
    events: list[str] = []
    world.add("a", [1, 2, 3], SamplingParams(max_tokens=5), hand_off=True)
    launch = world.device.launch

    def slow(scheduled: abc.Sequence[ScheduledSequence], on_layer: LaunchCallback | None = None) -> Step:
        events.append(f"launch {scheduled[0].seq.request_id}")
        step = launch(scheduled, on_layer)
        events.append("launched")
        return step

    monkeypatch.setattr(world.device, "launch", slow)

    def inbox(until: float) -> bool:
        if "b" not in world.answers:
            world.add("b", [4, 5], SamplingParams(max_tokens=5), hand_off=True)
        return True

    def on_step(result: StepResult) -> None:
        events.extend(f"result {output.seq.request_id}" for output in result.outputs)
        world.on_step(result)

    result = world.stepper.step(on_step, inbox)
    assert [output.seq.request_id for output in result.outputs] == ["a"]
    assert events == ["launch a", "launched", "launch b", "result a", "launched"]
    world.drain()
    assert world.tokens == {"a": answer([1, 2, 3], GREEDY)[:1], "b": answer([4, 5], GREEDY)[:1]}


def test_an_error_of_on_step_during_a_launch_is_raised_after_the_launch() -> None:
    world = World(overlap=True)
    world.add("a", [1, 2, 3], SamplingParams(max_tokens=5), hand_off=True)

    def inbox(until: float) -> bool:
        if "b" not in world.answers:
            world.add("b", [4, 5], SamplingParams(max_tokens=5), hand_off=True)
        return True

    def fail(result: StepResult) -> None:
        world.on_step(result)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        world.stepper.step(fail, inbox)
    assert [entry.seq.request_id for entry in world.device.queue[0].scheduled] == ["b"]
    world.drain()
    assert world.tokens == {"a": answer([1, 2, 3], GREEDY)[:1], "b": answer([4, 5], GREEDY)[:1]}


def test_tokens_after_a_stop_token_are_dropped() -> None:
    output = answer([1, 2, 3], GREEDY)
    stop = next(t for i, t in enumerate(output) if i >= 2 and t not in output[:i])
    params = SamplingParams(max_tokens=9, stop_token_ids=(stop,))
    world = World(overlap=True)
    world.add("a", [1, 2, 3], params)
    world.drain()
    assert world.tokens["a"] == output[: output.index(stop) + 1]
    assert world.ends["a"].finish_reason is FinishReason.STOP
    assert world.stepper.counters.discarded_sequences == 1


def test_blocks_of_the_step_in_flight_are_not_reused() -> None:
    world = World(overlap=True, blocks=4, size=4)
    seq = world.add("a", range(12), SamplingParams(max_tokens=4))
    world.step()
    assert seq.lease is not None
    held = set(seq.lease.blocks)
    world.abort("a")
    assert world.pool.lease([], 2) is None, "the device still writes to these blocks"
    world.add("b", [5], SamplingParams(max_tokens=1))
    world.drain()
    assert len(held) == 4
    assert world.tokens["b"] == answer([5], SamplingParams(max_tokens=1))


def test_no_sequence_is_preempted_while_blocks_are_about_to_be_released() -> None:
    world = World(overlap=True, blocks=8, size=4, budget=20)
    world.add("ends", range(8), SamplingParams(max_tokens=1))
    grows = world.add("grows", range(10, 18), GREEDY)
    below = world.add("below", [3, 4, 5, 6], GREEDY)
    for entry in world.scheduler.schedule():
        entry.seq.launch(entry.num_new, sample=entry.samples)
    outside = world.pool.lease([], world.pool.num_available())
    assert world.scheduler.schedule() == []
    assert grows.preemptions == below.preemptions == 0
    assert outside is not None


def test_finish_in_flight_ends_the_step_and_reports_it() -> None:
    world = World(overlap=True)
    world.add("a", [1, 2, 3], GREEDY)
    world.step()
    world.stepper.finish_in_flight(world.on_step)
    assert len(world.tokens["a"]) == 2
    world.abort("a")
    assert not world.stepper.has_work
    world.drain()


def test_a_failed_launch_ends_only_its_sequences() -> None:
    world = World(overlap=True, budget=8)
    world.device.broken = {2}
    world.add("a", [1, 2, 3], SamplingParams(max_tokens=1))
    world.add("b", range(20), GREEDY)
    world.drain()
    assert world.tokens["a"] == answer([1, 2, 3], SamplingParams(max_tokens=1))
    assert world.ends["b"].finish_reason is FinishReason.ERROR
    world.add("c", [4], GREEDY)
    world.drain()
    assert world.tokens["c"] == answer([4], GREEDY)


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's error."""


@pytest.mark.parametrize(
    ("error", "counted"), [(OutOfMemoryError("CUDA"), 1), (MemoryError(), 1), (RuntimeError("no kernel"), 0)]
)
def test_out_of_memory_steps_have_their_own_counter(error: Exception, counted: int) -> None:
    world = World(overlap=True)
    world.device.broken, world.device.error = {1}, error
    world.add("a", [1, 2, 3], GREEDY)
    world.drain()
    assert world.ends["a"].finish_reason is FinishReason.ERROR
    assert world.stepper.counters.out_of_memory == counted


def test_a_failing_scheduler_ends_all_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(overlap=True)
    for name in "ab":
        world.add(name, [1, 2, 3], GREEDY)
    world.step()

    def fail() -> None:
        raise RuntimeError("the scheduler broke")

    with monkeypatch.context() as patch:
        patch.setattr(world.scheduler, "schedule", fail)
        world.step()
    assert {output.finish_reason for output in world.ends.values()} == {FinishReason.ERROR}
    world.drain()
    world.add("c", [4], GREEDY)
    world.drain()
    assert world.tokens["c"] == answer([4], GREEDY)


def test_an_error_of_on_step_is_raised_and_the_next_step_is_reported() -> None:
    world = World(overlap=True)
    world.add("a", [1, 2, 3], GREEDY)

    def fail(result: StepResult) -> None:
        world.on_step(result)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        world.stepper.step(fail)
    world.drain()
    assert world.tokens["a"] == answer([1, 2, 3], GREEDY)


@dataclass
class Arrival:
    """One request of a random load."""

    step: int
    group: int
    prompt_len: int
    max_tokens: int
    min_tokens: int
    stops: bool
    kind: str
    #: Steps after the arrival; a pause also has its number of steps.
    abort: int | None
    pause: tuple[int, int] | None
    poison: int | None
    seq: Sequence | None = field(default=None, compare=False)

    @property
    def prompt(self) -> list[int]:
        return [(self.group * i * i) % 7 for i in range(self.prompt_len)]

    @property
    def params(self) -> SamplingParams:
        stops = (1, 4) if self.stops else ()
        return SamplingParams(max_tokens=self.max_tokens, min_tokens=self.min_tokens, stop_token_ids=stops)


rarely = st.one_of(st.none(), st.none(), st.none(), st.integers(0, 15))
arrivals = st.builds(
    Arrival,
    step=st.integers(0, 20),
    group=st.integers(0, 2),
    prompt_len=st.integers(1, 20),
    max_tokens=st.integers(2, 16),
    min_tokens=st.integers(0, 3),
    stops=st.booleans(),
    kind=st.sampled_from(["both", "both", "hand_off", "received"]),
    abort=rarely,
    pause=st.one_of(st.none(), st.none(), st.tuples(st.integers(0, 10), st.integers(0, 20))),
    poison=rarely,
)


@settings(max_examples=250, deadline=None)
@given(
    load=st.lists(arrivals, min_size=1, max_size=10),
    blocks=st.integers(10, 24),
    size=st.sampled_from([1, 4]),
    budget=st.integers(2, 20),
    seqs=st.integers(1, 5),
    overlap=st.sampled_from([True, True, True, False]),
    drafts=st.sampled_from([0, 0, 1, 4, 7]),
    during_steps=st.booleans(),
)
def test_every_load_gives_the_tokens_of_undisturbed_requests(
    load: list[Arrival], blocks: int, size: int, budget: int, seqs: int, overlap: bool, drafts: int, during_steps: bool
) -> None:
    """With `during_steps` requests arrive, pause and end while a step is on the device, else between the calls."""
    world = World(overlap=overlap, blocks=blocks * 4 // size, size=size, budget=budget, seqs=seqs, drafts=drafts)
    now, happened = 0, -1

    def happen() -> None:
        nonlocal happened
        if happened == now:
            return
        happened = now
        for number, arrival in enumerate(load):
            name, since = str(number), now - arrival.step
            if since == 0:
                if arrival.kind == "received":
                    arrival.seq = world.receive(name, arrival.prompt, arrival.params)
                else:
                    hand_off = arrival.kind == "hand_off"
                    arrival.seq = world.add(name, arrival.prompt, arrival.params, hand_off=hand_off)
            if arrival.seq is None:
                continue
            if arrival.pause is not None:
                arrival.seq.paused = arrival.pause[0] <= since < sum(arrival.pause)
            if arrival.abort == since:
                world.abort(name)
            if arrival.poison == since:
                world.device.poisoned.add(name)

    def inbox(until: float) -> bool:
        happen()
        return True

    while now < 45 or world.stepper.has_work:
        assert now < 2000, "starved"
        if not during_steps:
            happen()
        world.step(inbox)
        happen()  # without a launch ahead the inbox is not read
        now += 1
    world.drain()
    for number, arrival in enumerate(load):
        if arrival.seq is None:
            continue
        name = str(number)
        end, tokens, wanted = world.ends[name], world.tokens.get(name, []), answer(arrival.prompt, arrival.params)
        assert arrival.seq.lease is None or arrival.seq.lease.finished
        assert arrival.seq.slot == -1
        if end.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert tokens == wanted[: len(tokens)] or arrival.kind == "received"
            assert end.finish_reason is FinishReason.ABORT or arrival.poison is not None
        elif arrival.kind == "hand_off":
            assert end.handed_off
            assert tokens == wanted[:1]
        elif arrival.kind == "received" and wanted[0] in arrival.params.stop_token_ids:
            assert tokens[0] == wanted[0]  # the other pod would have ended it there
        else:
            assert tokens == wanted
            assert end.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    if not overlap:
        assert world.stepper.counters.discarded_sequences == 0
