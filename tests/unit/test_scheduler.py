"""Scheduler: the rules of the policy one by one, then random loads with simulated KV in which each token is checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import BatonError, ConfigError, InvalidRequest
from common.types import FinishReason, SamplingParams, ValidRequest
from engine.kv.blocks import BlockPool
from engine.kv.lease import Lease
from engine.kv.ledger import BlockPin
from engine.schedule.limits import SchedulerConfig
from engine.schedule.scheduler import ScheduledSequence, Scheduler
from engine.schedule.sequence import Sequence

FINGERPRINT = "00" * 16


def prefixes(tokens: list[int]) -> list[int]:
    """The simulated KV of each token: a hash of the token and all tokens before it."""
    return list(accumulate(tokens, lambda state, token: hash((state, token)), initial=0))[1:]


def next_token(tokens: list[int]) -> int:
    return prefixes(tokens)[-1] % 5


class World:
    """A scheduler, its pool, and a simulated engine that writes the KV of each token and checks it."""

    def __init__(
        self,
        blocks: int = 64,
        size: int = 4,
        budget: int = 32,
        seqs: int = 8,
        limit: int = 1000,
        prompt_step_tokens: int | None = None,
    ) -> None:
        self.size = size
        self.pool = BlockPool(blocks, size)
        self.config = SchedulerConfig(
            chunk_tokens=budget, prompt_step_tokens=prompt_step_tokens, max_seqs=seqs, max_model_len=limit
        )
        self.scheduler = Scheduler(self.config, self.pool)
        self.kv: dict[tuple[int, int], int] = {}
        self.done: list[Sequence] = []

    def sequence(
        self,
        name: str,
        prompt: list[int] | int,
        max_tokens: int = 4,
        *,
        priority: int = 0,
        hand_off: bool = False,
        lease: Lease | None = None,
        output: list[int] | None = None,
    ) -> Sequence:
        # Prompts of different names share no prefix, so none matches the cache.
        ids = tuple(prompt) if isinstance(prompt, list) else tuple(crc32(f"{name} {i}".encode()) for i in range(prompt))
        request = ValidRequest(name, "m", ids, SamplingParams(max_tokens=max_tokens), priority=priority)
        return Sequence(
            request,
            fingerprint=FINGERPRINT,
            block_size=self.size,
            lease=lease,
            computed=len(ids) if lease is not None else 0,
            output=output or (),
            hand_off=hand_off,
        )

    def add(self, name: str, prompt: list[int] | int, max_tokens: int = 4, **kw: object) -> Sequence:
        seq = self.sequence(name, prompt, max_tokens, **kw)  # type: ignore[arg-type]
        self.scheduler.add(seq)
        return seq

    def receive(self, name: str, prompt: list[int], max_tokens: int, lease: Lease, *, priority: int = 0) -> Sequence:
        """A sequence whose prompt another pod has computed into the lease's blocks."""
        self.write(lease, prompt, 0, len(prompt))
        output = [next_token(prompt)]
        return self.sequence(name, prompt, max_tokens, priority=priority, lease=lease, output=output)

    def outside(self, blocks: int) -> Lease:
        lease = self.pool.lease([], blocks)
        assert lease is not None
        return lease

    def write(self, lease: Lease, tokens: list[int], start: int, end: int) -> None:
        for i, state in enumerate(prefixes(tokens[:end])):
            slot = (lease.blocks[i // self.size], i % self.size)
            if i >= start:
                self.kv[slot] = state
            assert self.kv[slot] == state, "the KV of a token was lost"

    def run(self, batch: list[ScheduledSequence]) -> None:
        decodes = any(entry.is_decode for entry in batch)
        assert sum(entry.num_new for entry in batch) <= (
            self.config.chunk_tokens if decodes else self.config.max_step_tokens
        )
        assert len({id(entry.seq) for entry in batch}) == len(batch)
        assert self.scheduler.stats().running <= self.config.max_seqs
        for seq, start, num_new, sample, *_ in batch:
            assert seq.lease is not None
            assert num_new > 0
            assert not seq.paused
            assert start == seq.computed
            assert sample == (start + num_new == len(seq.tokens))
            self.write(seq.lease, seq.tokens, start, start + num_new)
            seq.computed += num_new
            seq.publish()
            if sample:
                seq.append(next_token(seq.tokens))
                if len(seq.tokens) >= seq.max_len:
                    self.end(seq, FinishReason.LENGTH)

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        self.scheduler.finish(seq, reason)
        if seq.lease is not None:
            seq.lease.finish(reason)
        self.done.append(seq)

    def abort(self, name: str) -> None:
        for seq in self.scheduler.sequences_of(name):
            self.end(seq, FinishReason.ABORT)

    def step(self) -> dict[str, int]:
        batch = self.scheduler.schedule()
        self.run(batch)
        return {entry.seq.request_id: entry.num_new for entry in batch}


def test_chunks_end_with_blocks_and_the_last_with_the_prompt() -> None:
    world = World(budget=10, limit=100)
    world.add("a", 21, 2)
    assert [world.step() for _ in range(4)] == [{"a": 8}, {"a": 8}, {"a": 5}, {"a": 1}]
    assert not world.scheduler.has_work
    world.pool.check_integrity()


def test_decodes_come_first_and_prompts_share_the_rest() -> None:
    world = World(blocks=200, budget=33)
    world.add("d", 4, 20)
    world.step()
    world.add("long", 200)
    world.add("longer", 300)
    world.add("short", 7)
    assert world.step() == {"d": 1, "long": 24, "short": 7}


def test_prompts_keep_a_quarter_of_a_step_with_many_decodes() -> None:
    world = World(budget=4, seqs=8)
    for i in range(6):
        world.scheduler.add(world.receive(f"d{i}", [i] * 3, 50, world.outside(1)))
    world.add("p", 6)
    assert [world.step().get("p", 0) for _ in range(6)] == [1, 1, 1, 1, 1, 1]


def test_higher_priority_is_admitted_first_then_arrival() -> None:
    world = World(seqs=1)
    for name, priority in (("a", 0), ("b", 0), ("c", 1)):
        world.add(name, 3, 1, priority=priority)
    assert [list(world.step()) for _ in range(3)] == [["c"], ["a"], ["b"]]


def test_admission_takes_the_cached_prefix_and_leaves_one_token() -> None:
    world = World()
    world.add("a", list(range(16)), 1)
    world.step()
    again = world.add("b", list(range(16)), 1)
    assert world.step() == {"b": 4}
    assert again.cached_tokens == 12


def test_a_waiting_prompt_uses_blocks_published_after_its_admission() -> None:
    world = World(budget=8, blocks=16)
    world.add("a", list(range(20)), 1)
    late = world.add("b", [*range(20), 99], 1)
    late.paused = True
    world.step()
    late.paused = False
    world.scheduler.schedule()
    assert late.cached_tokens == 8


def test_a_hand_off_needs_blocks_for_the_prompt_only() -> None:
    world = World(blocks=2, size=4)
    seq = world.add("a", 8, 500, hand_off=True)
    world.step()
    assert (seq.num_output, seq.finish_reason) == (1, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field"),
    [(0, 1, "prompt"), (100, 1, "prompt"), (90, 11, "max_tokens"), (33, 1, "prompt"), (30, 4, "max_tokens")],
)
def test_a_request_that_never_fits_is_refused_with_the_field(prompt: int, max_tokens: int, field: str) -> None:
    world = World(blocks=8, size=4, limit=100)
    with pytest.raises(InvalidRequest) as refused:
        world.add("a", prompt, max_tokens)
    assert refused.value.field == field
    assert not world.scheduler.has_work
    world.add("fits", 30, 3)
    with pytest.raises(BatonError):
        world.add("fits", 3, 3)


def test_wrong_configuration_names_its_field() -> None:
    with pytest.raises(ConfigError) as refused:
        SchedulerConfig(chunk_tokens=1, max_seqs=0, max_model_len=1)
    assert refused.value.field == "max_seqs"


def test_the_newest_is_preempted_and_its_recomputed_tokens_are_counted() -> None:
    world = World(blocks=6, size=4, budget=8)
    a, b = world.add("a", 8, 16), world.add("b", 8, 16)
    while not b.preemptions:
        world.step()
    assert (a.preemptions, b.computed, b.recomputing) == (0, 0, True)
    assert world.scheduler.waits_for_blocks
    c = world.add("c", 1, 1)
    while world.scheduler.has_work:
        assert all(n <= 8 for n in world.step().values())
        assert c.computed == 0 or not world.scheduler.waits_for_blocks
    assert [seq.finish_reason for seq in (a, b, c)] == [FinishReason.LENGTH] * 3
    assert world.done[0] is a
    assert 0 < world.scheduler.stats().recomputed_tokens <= 16 + 24
    world.pool.check_integrity()
    assert world.pool.counts().leased == 0


def test_a_full_pool_gives_empty_batches_until_the_outside_lease_ends() -> None:
    world = World(blocks=4)
    outside = world.outside(4)
    seq = world.add("a", 5, 1)
    assert world.step() == {}
    assert world.scheduler.has_work
    outside.finish("expired")
    assert world.step() == {"a": 5}
    assert seq.finish_reason is FinishReason.LENGTH


def test_a_paused_sequence_is_preempted_if_nothing_else_can_run() -> None:
    world = World(blocks=4, seqs=1)
    slow = world.add("slow", 10, 4)
    world.step()
    slow.paused = True
    assert not world.scheduler.has_work
    assert world.step() == {}
    world.add("next", 10, 1)
    assert world.step() == {"next": 10}
    slow.paused = False
    while world.scheduler.has_work:
        world.step()
    assert slow.finish_reason is FinishReason.LENGTH


def test_a_received_sequence_without_a_slot_does_not_block_the_pool() -> None:
    world = World(blocks=3, size=4, seqs=1)
    world.add("a", 4, 5)
    world.step()
    world.scheduler.add(world.receive("b", [1] * 5, 3, world.outside(2)))
    for _ in range(30):
        world.step()
    assert [seq.request_id for seq in world.done] == ["a", "b"]


def test_a_received_sequence_of_higher_rank_without_a_slot_does_not_block_the_pool() -> None:
    world = World(blocks=3, size=4, seqs=1)
    world.add("a", 4, 5)
    world.step()
    world.scheduler.add(world.receive("b", [1] * 5, 3, world.outside(2), priority=1))
    for _ in range(30):
        world.step()
    assert {seq.request_id for seq in world.done} == {"a", "b"}


def test_a_preempted_sequence_that_does_not_fit_waits_for_those_with_blocks() -> None:
    world = World(blocks=4, size=4, seqs=2)
    first, second = (
        world.receive(name, [1] * n, 4, world.outside(n // 4)) for name, n in (("first", 4), ("second", 12))
    )
    world.scheduler.add(first)
    world.scheduler.add(second)
    world.step()
    assert second.preemptions == 1
    reserved = world.outside(2)
    while first.finish_reason is None:
        world.step()
    assert world.step() == {}
    world.scheduler.add(world.receive("third", [2] * 5, 3, reserved))
    assert world.step() == {"third": 1}
    while world.scheduler.has_work:
        world.step()
    assert [seq.request_id for seq in world.done] == ["first", "third", "second"]


def test_no_more_sequences_are_preempted_while_a_step_in_flight_will_free_blocks() -> None:
    world = World(blocks=6, size=4, budget=64)
    seqs = [world.receive(name, [i] * 8, 9, world.outside(2)) for i, name in enumerate("abc")]
    for seq in seqs:
        world.scheduler.add(seq)
    fence = world.pool.begin_step()
    batch = world.scheduler.schedule()
    assert [seq.preemptions for seq in seqs] == [0, 0, 1]
    assert batch == []
    fence.end()
    assert set(world.step()) == {"a", "b"}


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=8),
    budget=st.integers(1, 70),
    size=st.sampled_from([1, 4, 16]),
)
def test_the_oldest_prompt_gets_half_and_short_prompts_pass_long_ones(
    lengths: list[int], budget: int, size: int
) -> None:
    world = World(blocks=2000, size=size, budget=budget, seqs=8)
    seqs = [world.add(str(i), n, 1, hand_off=True) for i, n in enumerate(lengths)]
    for _ in range(5000):
        left = {seq.request_id: seq.remaining for seq in seqs if seq.finish_reason is None}
        if not left:
            break
        first, *others = left
        given_to = world.step()
        assert given_to[first] >= min(left[first], (budget + 1) // 2)
        rest = budget - max(given_to[first], (budget + 1) // 2 + size)
        for name in sorted(others, key=left.__getitem__):
            rest -= left[name]
            assert rest < 0 or given_to.get(name) == left[name]
    assert all(seq.finish_reason is FinishReason.LENGTH for seq in seqs)


@dataclass
class Arrival:
    """One request of a random load; abort and pause are in steps after its arrival."""

    step: int
    group: int
    prompt_len: int
    max_tokens: int
    priority: int
    kind: str
    abort: int | None
    pause: tuple[int, int] | None
    seq: Sequence | None = field(default=None, compare=False)


arrivals = st.builds(
    Arrival,
    step=st.integers(0, 30),
    group=st.integers(0, 2),
    prompt_len=st.integers(1, 24),
    max_tokens=st.integers(1, 16),
    priority=st.sampled_from([0, 0, 0, 1]),
    kind=st.sampled_from(["both", "both", "hand_off", "received"]),
    abort=st.one_of(st.none(), st.none(), st.integers(0, 20)),
    pause=st.one_of(st.none(), st.none(), st.tuples(st.integers(0, 10), st.integers(0, 30))),
)
reserved = st.tuples(st.integers(0, 40), st.integers(1, 8), st.integers(1, 20), st.booleans())


@settings(max_examples=300, deadline=None)
@given(
    load=st.lists(arrivals, max_size=12),
    reservations=st.lists(reserved, max_size=4),
    blocks=st.integers(3, 16),
    size=st.sampled_from([1, 2, 4]),
    budget=st.integers(1, 24),
    seqs=st.integers(1, 6),
)
def test_every_load_ends_with_the_right_tokens_and_all_blocks(
    load: list[Arrival], reservations: list[tuple[int, int, int, bool]], blocks: int, size: int, budget: int, seqs: int
) -> None:
    world = World(blocks=blocks, size=size, budget=budget, seqs=seqs, limit=40)
    accepted: list[Arrival] = []
    outside: list[tuple[int, Lease, BlockPin]] = []
    now = 0
    while now < 80 or world.scheduler.has_work:
        assert now < 3000, "starved"
        for arrival in load:
            if arrival.step != now:
                continue
            prompt = [(arrival.group * i * i) % 7 for i in range(arrival.prompt_len)]
            name = str(len(accepted))
            if arrival.kind == "received":
                need = -(-arrival.prompt_len // size)
                lease = None if world.scheduler.waits_for_blocks else world.pool.lease([], need, keep_free=1)
                if lease is None:
                    continue
                seq = world.receive(name, prompt, max(2, arrival.max_tokens), lease)
            else:
                hand_off = arrival.kind == "hand_off"
                seq = world.sequence(name, prompt, arrival.max_tokens, priority=arrival.priority, hand_off=hand_off)
            try:
                world.scheduler.add(seq)
            except InvalidRequest:
                assert seq.max_len - 1 > blocks * size or seq.max_len > 40
                if seq.lease is not None:
                    seq.lease.finish("refused")
                continue
            arrival.seq = seq
            accepted.append(arrival)
        for at, count, length, aborted in reservations:
            if at == now and (lease := world.pool.lease([], count)) is not None:
                outside.append((now + length, lease, lease.pin_for_write(0, count)))
                if aborted:
                    lease.finish("quarantined")
        for at, lease, pin in outside:
            if at == now:
                pin.release()
                lease.finish("expired")
        for arrival in accepted:
            assert arrival.seq is not None
            if arrival.pause is not None:
                start, length = arrival.pause
                arrival.seq.paused = arrival.step + start <= now < arrival.step + start + length
            if arrival.abort is not None and now == arrival.step + arrival.abort:
                world.abort(arrival.seq.request_id)
        world.step()
        world.pool.check_integrity()
        now += 1
    for arrival in accepted:
        seq = arrival.seq
        assert seq is not None
        assert seq.lease is None or seq.lease.finished
        assert arrival.abort is not None or seq.finish_reason is FinishReason.LENGTH
        assert len(seq.tokens) == seq.max_len or seq.finish_reason is FinishReason.ABORT
        assert all(seq.tokens[i] == next_token(seq.tokens[:i]) for i in range(seq.prompt_len, len(seq.tokens)))
    counts = world.pool.counts()
    assert (counts.leased, counts.quarantined) == (0, 0)


def test_steps_without_decodes_have_long_chunks() -> None:
    world = World(blocks=200, size=4, budget=8, prompt_step_tokens=16)
    world.add("a", 100)
    assert world.step() == {"a": 32}
    world.add("c", 4)
    assert world.step() == {"a": 4, "c": 4}
    assert world.step() == {"c": 1, "a": 4}


def test_long_prompts_run_one_after_another_and_short_ones_share_a_step() -> None:
    world = World(blocks=200, size=4, budget=8, prompt_step_tokens=32)
    for name in "ab":
        world.add(name, 20, 1)
    steps = [world.step() for _ in range(6)]
    assert steps[:3] == [{"a": 8}, {"a": 8}, {"a": 4, "b": 4}], "the first ends before the second is long under way"
    assert [seq.request_id for seq in world.done] == ["a", "b"]
    for name in "cdef":
        world.add(name, 7, 1)
    assert world.step() == {"c": 7, "d": 7, "e": 7, "f": 7}


@pytest.mark.parametrize(("length", "chunks"), [(8, [8]), (9, [4, 5]), (16, [8, 8]), (17, [12, 5]), (50, [32, 12, 6])])
def test_the_last_chunk_of_a_hand_off_is_at_most_chunk_tokens(length: int, chunks: list[int]) -> None:
    world = World(blocks=200, size=4, budget=8, prompt_step_tokens=16)
    world.add("a", length, hand_off=True)
    assert [world.step()["a"] for _ in chunks] == chunks
    assert world.done
    world.add("b", length, 1)
    assert world.step()["b"] == min(length, 32), "one that stays here is not cut"


def test_prompt_step_tokens_must_not_be_less_than_chunk_tokens() -> None:
    with pytest.raises(ConfigError, match="prompt_step_tokens"):
        SchedulerConfig(chunk_tokens=8, prompt_step_tokens=4, max_seqs=1, max_model_len=1)
