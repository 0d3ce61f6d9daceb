"""Proposers, the draft controller, the speculator and the statistics of drafts."""

from __future__ import annotations

from collections import abc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.types import SamplingParams, ValidRequest
from engine.kv.blocks import BlockPool
from engine.schedule.scheduler import ScheduledSequence
from engine.schedule.sequence import Sequence
from engine.speculation.acceptance import accepted_tokens
from engine.speculation.controller import (
    FIRST_PROBE_INTERVAL,
    FIRST_TIME_BUDGET,
    MAX_PROBE_INTERVAL,
    TIME_BUDGET_RATE,
    AlwaysDraft,
    DraftController,
)
from engine.speculation.ngram import LENGTHS, NgramIndex, NgramProposer
from engine.speculation.speculator import USELESS_AFTER, SpeculationStats, Speculator
from engine.speculation.suffix import SuffixProposer, SuffixTable


def sequence(prompt: abc.Sequence[int], output: abc.Sequence[int] = (), *, salt: str = "") -> Sequence:
    request = ValidRequest("r", "m", tuple(prompt), SamplingParams(max_tokens=100), cache_salt=salt)
    return Sequence(request, fingerprint="00" * 16, block_size=4, output=output)


def look_up(tokens: list[int], limit: int) -> tuple[int, list[int]]:
    """The result of `NgramIndex.match`, by a linear search from the end."""
    for n in LENGTHS:
        for end in range(len(tokens) - 1, n - 1, -1):
            if len(tokens) >= n and tokens[end - n : end] == tokens[-n:]:
                return n, [tokens[end + i % (len(tokens) - end)] for i in range(limit)]
    return 0, []


@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    output=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=8),
    limit=st.integers(1, 6),
)
def test_ngram_index_equals_a_linear_search(prompt: list[int], output: list[list[int]], limit: int) -> None:
    index, tokens = NgramIndex(prompt), list(prompt)
    for new in output:
        known, found = index.match(limit)
        assert (known, found.tolist()) == look_up(tokens, limit)
        index.extend(new)
        tokens += new
    known, found = index.match(limit)
    assert (known, found.tolist()) == look_up(tokens, limit)


def test_ngram_index_grows_beyond_its_first_buffer() -> None:
    index = NgramIndex([1, 2, 3])
    index.extend(list(range(2000)))
    index.extend([500, 501, 502, 503, 504])
    assert index.match(3)[1].tolist() == [505, 506, 507]


def test_ngram_proposes_for_a_batch() -> None:
    proposer = NgramProposer()
    seqs = [sequence([5, 6, 7, 8, 9, 1], [5, 6, 7]), sequence([1, 2, 3], [4]), sequence([3, 3, 3, 3])]
    states = [proposer.new_state(seq) for seq in seqs]
    drafts = proposer.propose(seqs, states, [2, 4, 3])
    assert drafts.lengths.tolist() == [2, 0, 3]
    assert drafts.tokens[0, :2].tolist() == [8, 9]
    assert drafts.tokens[2, :3].tolist() == [3, 3, 3]
    seqs[1].tokens += [1, 2, 3]
    assert proposer.propose(seqs[1:2], states[1:2], [4]).tokens[0].tolist() == [4, 1, 2, 3]


def test_suffix_learns_from_other_sequences_of_the_same_tenant() -> None:
    proposer = SuffixProposer()
    output = [11, 12, 13, 14, 15, 16, 17, 18]
    for _ in range(2):
        proposer.new_state(sequence([1, 2, 3], output))
    same_tenant = sequence([4, 5, 6], output[:4])
    assert proposer.propose([same_tenant], [proposer.new_state(same_tenant)], [3]).tokens[0].tolist() == [15, 16, 17]
    other_tenant = sequence([4, 5, 6], output[:4], salt="other")
    assert proposer.propose([other_tenant], [proposer.new_state(other_tenant)], [3]).lengths.tolist() == [0]


def test_suffix_prefers_the_longer_of_own_and_shared_history() -> None:
    proposer = SuffixProposer()
    for _ in range(3):
        proposer.new_state(sequence([1], [21, 22, 23, 30]))
    own = sequence([20, 5, 22, 23, 24, 25, 9, 20, 21, 22, 23])
    states = proposer.new_state(own)
    assert proposer.propose([own], [states], [1]).tokens[0].tolist() == [30], (
        "the table matches three tokens, the sequence two"
    )
    longer = sequence([19, 20, 21, 22, 23, 24, 25, 9, 19, 20, 21, 22, 23])
    assert proposer.propose([longer], [proposer.new_state(longer)], [1]).tokens[0].tolist() == [24]


def test_suffix_table_keeps_the_majority_and_a_bounded_size() -> None:
    table = SuffixTable(max_suffixes=50)
    for token in (7, 8, 7, 7):
        table.learn("", [1, 2, 3, token], 3)
    assert table.predict("", [1, 2, 3], 1) == (3, [7])
    for _ in range(5):
        table.learn("", [1, 2, 3, 8], 3)
    assert table.predict("", [1, 2, 3], 1) == (3, [8])
    for i in range(500):
        table.learn("", [i, i + 1, i + 2, i + 3, i + 4], 3)
        assert len(table) <= 110
    assert table.predict("", [1, 2, 3], 1) != (3, [8]), "old suffixes are forgotten"


@given(drafts=st.lists(st.integers(0, 2), max_size=6), sampled=st.lists(st.integers(-1, 2), min_size=7, max_size=7))
def test_accepted_tokens_end_with_the_first_token_that_is_no_draft(drafts: list[int], sampled: list[int]) -> None:
    run = accepted_tokens(drafts, sampled[: len(drafts) + 1])
    assert 1 <= len(run) <= len(drafts) + 1
    assert list(run) == sampled[: len(run)]
    assert list(run[:-1]) == drafts[: len(run) - 1]
    assert len(run) == len(drafts) + 1 or run[-1] != drafts[len(run) - 1]


def steps(controller: DraftController, rate: float, count: int, *, cost: float, fixed: float = 0.0) -> list[int]:
    """Draft limits of the steps of one sequence, if a draft is right with probability `rate`.

    A step takes 1, plus `fixed` if it has drafts, plus `cost` for each draft.
    """
    state, num_output, limits, draw = controller.new_state(None), 1, [], 0.5
    for _ in range(count):
        (limit,) = controller.limits([(state, num_output)])
        accepted = 0
        if limit:
            controller.on_proposal_asked()
            controller.on_proposed(state, limit)
            while accepted < limit and (draw := (draw + 0.618034) % 1) < rate:
                accepted += 1
        num_output += 1 + accepted
        if limit:
            controller.on_verified(state, num_output, limit, accepted)
        controller.on_step(1, limit, 1 + (fixed if limit else 0) + cost * limit)
        limits.append(limit)
    return limits


@pytest.mark.parametrize("padded", [False, True])
def test_right_drafts_are_always_made_and_wrong_ones_rarely(padded: bool) -> None:
    costs = {"cost": 0.0, "fixed": 0.2} if padded else {"cost": 0.16}
    assert sum(steps(DraftController(4, pads_steps=padded), 0.9, 200, **costs)) > 4 * 190
    useless = steps(DraftController(4, pads_steps=padded), 0.0, 600, **costs)[100:]
    tried, extra = sum(limit > 0 for limit in useless), 0.2 if padded else 0.64
    assert min(500 // MAX_PROBE_INTERVAL, 500 * TIME_BUDGET_RATE / extra) - 3 <= tried <= 500 // FIRST_PROBE_INTERVAL
    assert tried * extra <= 600 * TIME_BUDGET_RATE + FIRST_TIME_BUDGET + extra


def test_a_draft_model_drafts_as_much_as_it_pays() -> None:
    expensive = steps(DraftController(4, pads_steps=False, has_model=True), 0.65, 600, cost=1.1)[100:]
    assert 0 < sum(expensive) < 40
    fair = steps(DraftController(4, pads_steps=False, has_model=True), 0.65, 300, cost=0.3)[100:]
    cheap = steps(DraftController(4, pads_steps=False, has_model=True), 0.65, 300, cost=0.02)[100:]
    assert sum(expensive) < sum(fair) < sum(cheap)
    assert sum(cheap) > 4 * 180


def test_cheap_drafts_are_made_more_often_than_expensive_ones() -> None:
    cheap = steps(DraftController(4, pads_steps=False), 0.5, 300, cost=0.02)[100:]
    expensive = steps(DraftController(4, pads_steps=False), 0.5, 300, cost=0.02, fixed=0.9)[100:]
    assert sum(cheap) > 3 * sum(expensive) > 0


@pytest.mark.parametrize("padded", [False, True])
def test_a_sequence_that_begins_to_repeat_itself_drafts_again(padded: bool) -> None:
    controller = DraftController(4, pads_steps=padded)
    state, num_output = controller.new_state(None), 1
    limits = []
    for step in range(500):
        (limit,) = controller.limits([(state, num_output)])
        accepted = limit if step > 200 else 0
        if limit:
            controller.on_proposal_asked()
            controller.on_proposed(state, limit)
        num_output += 1 + accepted
        if limit:
            controller.on_verified(state, num_output, limit, accepted)
        controller.on_step(1, limit, 1 + 0.16 * limit)
        limits.append(limit)
    assert sum(limits[150:200]) < 20
    assert sum(limits[-80:]) > 240


def test_a_text_without_repetition_makes_no_step_wait() -> None:
    pool = BlockPool(600, 16)
    seqs = []
    for i in range(16):
        request = ValidRequest(f"r{i}", "m", tuple(range(1000 * i, 1000 * i + 32)), SamplingParams(max_tokens=500))
        lease = pool.lease([], 34)
        seqs.append(Sequence(request, fingerprint="00" * 16, block_size=16, lease=lease, computed=32, output=[-i]))
    speculator = Speculator(NgramProposer(), DraftController(4, pads_steps=True), max_seqs=64)
    for step in range(400):
        assert not speculator.wants_drafts(seqs)
        for seq in seqs:
            seq.append(20_000 + 1000 * step + seq.output[0])
            seq.computed += 1
        speculator.on_step([ScheduledSequence(seq, seq.start, 1, samples=True, is_decode=True) for seq in seqs], 0.01)
    for seq in seqs[:1]:
        seq.tokens += [3, 4]
        seq.computed += 2
    assert any(speculator.wants_drafts(seqs) or speculator.on_step([], 0.01) for _ in range(4)), (
        "one sequence repeats its prompt"
    )
    assert list(speculator.draft(seqs)) == seqs[:1]


def test_no_sequence_drafts_while_more_than_max_seqs_decode() -> None:
    pool, seqs = BlockPool(60, 4), [sequence([1, 2, 3, 1, 2, 3], [1]) for _ in range(3)]
    for slot, seq in enumerate(seqs):
        seq.lease, seq.computed, seq.slot = pool.lease([], 10), 6, slot
    speculator = Speculator(NgramProposer(), AlwaysDraft(2), max_seqs=2)
    assert not speculator.wants_drafts(seqs)
    assert not speculator.draft(seqs)
    assert speculator.wants_drafts(seqs[:2])
    assert list(speculator.draft(seqs[:2])) == seqs[:2]


@pytest.mark.parametrize("method", ["new_state", "propose", "expects_drafts", "on_verified"])
def test_a_failing_proposer_costs_only_its_drafts(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, proposer = BlockPool(60, 4), NgramProposer()
    seq = sequence([1, 2, 3, 1, 2, 3], [1])
    seq.lease, seq.computed, seq.slot = pool.lease([], 10), 6, 0
    speculator = Speculator(proposer, AlwaysDraft(2), max_seqs=4)

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(proposer, method, fail)
    assert speculator.wants_drafts([seq]) == (method in ("propose", "on_verified"))
    drafts = speculator.draft([seq])
    assert bool(drafts) == (method in ("expects_drafts", "on_verified"))
    if drafts:
        speculator.on_verified(seq, 2, 1)
    speculator.on_step([ScheduledSequence(seq, 6, 1, samples=True, is_decode=True)], 0.01)
    assert speculator.stats.failures > 0


def test_a_proposer_that_always_fails_does_not_fill_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    proposer, seq = NgramProposer(), sequence([1, 2, 3, 1, 2, 3], [1])
    seq.lease, seq.computed, seq.slot = BlockPool(60, 4).lease([], 10), 6, 0
    speculator = Speculator(proposer, AlwaysDraft(2), max_seqs=4)

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(proposer, "propose", fail)
    for _ in range(100):
        assert not speculator.draft([seq])
    assert speculator.stats.failures == 100
    assert [record.args[1] for record in caplog.records if record.args] == [1, 2, 4, 8, 16, 32, 64]  # type: ignore[index]


def test_speculation_is_useless_while_no_draft_is_accepted() -> None:
    stats = SpeculationStats("p", 4)
    stats.add(4, 2)
    for _ in range(USELESS_AFTER):
        assert not stats.is_useless
        stats.add(3, 0)
    assert stats.is_useless
    stats.add(4, 1)
    assert not stats.is_useless
    assert (stats.proposed, stats.accepted) == (8 + 3 * USELESS_AFTER, 3)
    assert stats.proposed_at == [USELESS_AFTER + 2] * 3 + [2]
    assert stats.accepted_at == [2, 1, 0, 0]
