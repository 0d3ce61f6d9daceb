"""Proposers, the control of how many drafts are made, and what is counted."""

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
from engine.speculation.speculator import Speculator
from engine.speculation.stats import ALARM_CHAINS, SpeculationStats
from engine.speculation.suffix import SuffixProposer, SuffixTable


def sequence(prompt: abc.Sequence[int], output: abc.Sequence[int] = (), *, salt: str = "") -> Sequence:
    request = ValidRequest("r", "m", tuple(prompt), SamplingParams(max_tokens=100), cache_salt=salt)
    return Sequence(request, fingerprint="00" * 16, block_size=4, output=output)


def look_up(tokens: list[int], most: int) -> tuple[int, list[int]]:
    """What History.match says, by looking at every place from the end."""
    for n in LENGTHS:
        for end in range(len(tokens) - 1, n - 1, -1):
            if len(tokens) >= n and tokens[end - n : end] == tokens[-n:]:
                return n, [tokens[end + i % (len(tokens) - end)] for i in range(most)]
    return 0, []


@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    output=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=8),
    most=st.integers(1, 6),
)
def test_an_index_finds_what_a_search_finds(prompt: list[int], output: list[list[int]], most: int) -> None:
    history, tokens = NgramIndex(prompt), list(prompt)
    for new in output:
        known, found = history.match(most)
        assert (known, found.tolist()) == look_up(tokens, most)
        history.extend(new)
        tokens += new
    known, found = history.match(most)
    assert (known, found.tolist()) == look_up(tokens, most)


def test_histories_outgrow_their_first_buffer() -> None:
    history = NgramIndex([1, 2, 3])
    history.extend(list(range(2000)))
    history.extend([500, 501, 502, 503, 504])
    assert history.match(3)[1].tolist() == [505, 506, 507]


def test_ngram_proposes_for_a_batch() -> None:
    proposer = NgramProposer()
    seqs = [sequence([5, 6, 7, 8, 9, 1], [5, 6, 7]), sequence([1, 2, 3], [4]), sequence([3, 3, 3, 3])]
    kept = [proposer.new_state(seq) for seq in seqs]
    drafts = proposer.propose(seqs, kept, [2, 4, 3])
    assert drafts.lengths.tolist() == [2, 0, 3]
    assert drafts.tokens[0, :2].tolist() == [8, 9]
    assert drafts.tokens[2, :3].tolist() == [3, 3, 3]
    seqs[1].tokens += [1, 2, 3]
    assert proposer.propose(seqs[1:2], kept[1:2], [4]).tokens[0].tolist() == [4, 1, 2, 3]


def test_suffix_learns_from_other_sequences_of_the_same_tenant() -> None:
    proposer = SuffixProposer()
    said = [11, 12, 13, 14, 15, 16, 17, 18]
    for _ in range(2):
        proposer.new_state(sequence([1, 2, 3], said))
    asks = sequence([4, 5, 6], said[:4])
    assert proposer.propose([asks], [proposer.new_state(asks)], [3]).tokens[0].tolist() == [15, 16, 17]
    stranger = sequence([4, 5, 6], said[:4], salt="other")
    assert proposer.propose([stranger], [proposer.new_state(stranger)], [3]).lengths.tolist() == [0]


def test_suffix_prefers_the_longer_of_own_and_shared_history() -> None:
    proposer = SuffixProposer()
    for _ in range(3):
        proposer.new_state(sequence([1], [21, 22, 23, 30]))
    own = sequence([20, 5, 22, 23, 24, 25, 9, 20, 21, 22, 23])
    kept = proposer.new_state(own)
    assert proposer.propose([own], [kept], [1]).tokens[0].tolist() == [30], "three of the table's, two of its own"
    longer = sequence([19, 20, 21, 22, 23, 24, 25, 9, 19, 20, 21, 22, 23])
    assert proposer.propose([longer], [proposer.new_state(longer)], [1]).tokens[0].tolist() == [24]


def test_a_majority_decides_and_the_table_is_bounded() -> None:
    table = SuffixTable(most=50)
    for token in (7, 8, 7, 7):
        table.learn("", [1, 2, 3, token], 3)
    assert table.predict("", [1, 2, 3], 1) == (3, [7])
    for _ in range(5):
        table.learn("", [1, 2, 3, 8], 3)
    assert table.predict("", [1, 2, 3], 1) == (3, [8])
    for i in range(500):
        table.learn("", [i, i + 1, i + 2, i + 3, i + 4], 3)
        assert len(table) <= 110
    assert table.predict("", [1, 2, 3], 1) != (3, [8]), "what was said long ago is forgotten"


@given(drafts=st.lists(st.integers(0, 2), max_size=6), sampled=st.lists(st.integers(-1, 2), min_size=7, max_size=7))
def test_a_run_ends_with_the_first_token_that_is_no_draft(drafts: list[int], sampled: list[int]) -> None:
    run = accepted_tokens(drafts, sampled[: len(drafts) + 1])
    assert 1 <= len(run) <= len(drafts) + 1
    assert list(run) == sampled[: len(run)]
    assert list(run[:-1]) == drafts[: len(run) - 1]
    assert len(run) == len(drafts) + 1 or run[-1] != drafts[len(run) - 1]


def steps(control: DraftController, rate: float, count: int, *, cost: float, fixed: float = 0.0) -> list[int]:
    """Drafts of the steps of one sequence whose drafts are right with probability `rate`."""
    state, output, made, luck = control.new_state(None), 1, [], 0.5
    for _ in range(count):
        (limit,) = control.limits([(state, output)])
        accepted = 0
        if limit:
            control.on_proposal_asked()
            control.on_proposed(state, limit)
            while accepted < limit and (luck := (luck + 0.618034) % 1) < rate:
                accepted += 1
        output += 1 + accepted
        if limit:
            control.on_verified(state, output, limit, accepted)
        control.on_step(1, limit, 1 + (fixed if limit else 0) + cost * limit)
        made.append(limit)
    return made


@pytest.mark.parametrize("padded", [False, True])
def test_drafts_that_are_right_are_made_and_others_rarely(padded: bool) -> None:
    costs = {"cost": 0.0, "fixed": 0.2} if padded else {"cost": 0.16}
    assert sum(steps(DraftController(4, pads_steps=padded), 0.9, 200, **costs)) > 4 * 190
    useless = steps(DraftController(4, pads_steps=padded), 0.0, 600, **costs)[100:]
    tried, extra = sum(limit > 0 for limit in useless), 0.2 if padded else 0.64
    assert min(500 // MAX_PROBE_INTERVAL, 500 * TIME_BUDGET_RATE / extra) - 3 <= tried <= 500 // FIRST_PROBE_INTERVAL
    assert tried * extra <= 600 * TIME_BUDGET_RATE + FIRST_TIME_BUDGET + extra


def test_a_draft_model_is_asked_as_often_as_it_pays() -> None:
    dear = steps(DraftController(4, pads_steps=False, has_model=True), 0.65, 600, cost=1.1)[100:]
    assert 0 < sum(dear) < 40
    fair = steps(DraftController(4, pads_steps=False, has_model=True), 0.65, 300, cost=0.3)[100:]
    cheap = steps(DraftController(4, pads_steps=False, has_model=True), 0.65, 300, cost=0.02)[100:]
    assert sum(dear) < sum(fair) < sum(cheap)
    assert sum(cheap) > 4 * 180


def test_cheap_drafts_are_made_where_dear_ones_are_not() -> None:
    cheap = steps(DraftController(4, pads_steps=False), 0.5, 300, cost=0.02)[100:]
    dear = steps(DraftController(4, pads_steps=False), 0.5, 300, cost=0.02, fixed=0.9)[100:]
    assert sum(cheap) > 3 * sum(dear) > 0


@pytest.mark.parametrize("padded", [False, True])
def test_a_sequence_that_begins_to_repeat_itself_is_found_out(padded: bool) -> None:
    control = DraftController(4, pads_steps=padded)
    state, output = control.new_state(None), 1
    made = []
    for step in range(500):
        (limit,) = control.limits([(state, output)])
        accepted = limit if step > 200 else 0
        if limit:
            control.on_proposal_asked()
            control.on_proposed(state, limit)
        output += 1 + accepted
        if limit:
            control.on_verified(state, output, limit, accepted)
        control.on_step(1, limit, 1 + 0.16 * limit)
        made.append(limit)
    assert sum(made[150:200]) < 20
    assert sum(made[-80:]) > 240


def test_texts_that_repeat_nothing_make_no_step_wait() -> None:
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
        "one of them repeats its prompt"
    )
    assert list(speculator.draft(seqs)) == seqs[:1]


def test_nobody_drafts_where_more_sequences_decode_than_a_step_verifies() -> None:
    pool, seqs = BlockPool(60, 4), [sequence([1, 2, 3, 1, 2, 3], [1]) for _ in range(3)]
    for slot, seq in enumerate(seqs):
        seq.lease, seq.computed, seq.slot = pool.lease([], 10), 6, slot
    speculator = Speculator(NgramProposer(), AlwaysDraft(2), max_seqs=2)
    assert not speculator.wants_drafts(seqs)
    assert not speculator.draft(seqs)
    assert speculator.wants_drafts(seqs[:2])
    assert list(speculator.draft(seqs[:2])) == seqs[:2]


@pytest.mark.parametrize("at", ["new_state", "propose", "expects_drafts", "on_verified"])
def test_a_proposer_that_fails_costs_its_drafts_and_no_more(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, proposer = BlockPool(60, 4), NgramProposer()
    seq = sequence([1, 2, 3, 1, 2, 3], [1])
    seq.lease, seq.computed, seq.slot = pool.lease([], 10), 6, 0
    broken = Speculator(proposer, AlwaysDraft(2), max_seqs=4)

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(proposer, at, fail)
    assert broken.wants_drafts([seq]) == (at in ("propose", "on_verified"))
    drafts = broken.draft([seq])
    assert bool(drafts) == (at in ("expects_drafts", "on_verified"))
    if drafts:
        broken.on_verified(seq, 2, 1)
    broken.on_step([ScheduledSequence(seq, 6, 1, samples=True, is_decode=True)], 0.01)
    assert broken.stats.failures > 0


def test_a_proposer_that_fails_in_every_step_does_not_fill_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    proposer, seq = NgramProposer(), sequence([1, 2, 3, 1, 2, 3], [1])
    seq.lease, seq.computed, seq.slot = BlockPool(60, 4).lease([], 10), 6, 0
    broken = Speculator(proposer, AlwaysDraft(2), max_seqs=4)

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(proposer, "propose", fail)
    for _ in range(100):
        assert not broken.draft([seq])
    assert broken.stats.failures == 100
    assert [record.args[1] for record in caplog.records if record.args] == [1, 2, 4, 8, 16, 32, 64]  # type: ignore[index]


def test_an_alarm_while_nothing_is_accepted() -> None:
    stats = SpeculationStats("p", 4)
    stats.add(4, 2)
    for _ in range(ALARM_CHAINS):
        assert not stats.is_useless
        stats.add(3, 0)
    assert stats.is_useless
    stats.add(4, 1)
    assert not stats.is_useless
    assert (stats.proposed, stats.accepted) == (8 + 3 * ALARM_CHAINS, 3)
    assert stats.proposed_at == [ALARM_CHAINS + 2] * 3 + [2]
    assert stats.accepted_at == [2, 1, 0, 0]
