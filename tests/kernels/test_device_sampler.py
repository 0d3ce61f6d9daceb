"""DeviceSampler samples the tokens of the host sampler, for random requests that start, grow and end over steps."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from common.errors import InvalidRequest
from common.types import SamplingParams
from engine.kernels.sampling import IN_PROMPT, MAX_ENTRIES
from engine.sampling.device_sampler import DeviceSampler
from engine.sampling.sampler import SampleRow, sample

VOCAB, ROWS = 2101, 4


def request(rng: random.Random, **fixed: Any) -> SampleRow:
    tokens = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))]
    """Returns a random request; `fixed` sets some of its parameters."""
    params: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.3, 1.0, 1.0, 2.5]),
        "top_k": rng.choice([0, 0, 1, 5, 40, 2000]),
        "top_p": rng.choice([1.0, 1.0, 0.1, 0.7, 0.95]),
        "min_p": rng.choice([0.0, 0.0, 0.05, 0.6]),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.3, 0.7]),
        "presence_penalty": rng.choice([0.0, 0.0, 1.5, -1.0]),
        "frequency_penalty": rng.choice([0.0, 0.0, 0.8]),
        "logit_bias": rng.choice([(), ((VOCAB - 1, 9.0), (3, 5.0), (7, -100.0))]),
        "min_tokens": rng.choice([0, 0, 3, 45]),
        "stop_token_ids": tuple(rng.sample(range(VOCAB), rng.choice([1, 200]))),
        "seed": rng.randrange(1 << 64),
    }
    return SampleRow(SamplingParams(**(params | fixed)), tokens, rng.randrange(1, len(tokens) + 1), rng.randrange(4))


def run(
    sampler: DeviceSampler, logits: Tensor, rows: dict[int, SampleRow], pad: int = 0
) -> tuple[list[int], list[bool]]:
    """Samples rows by slot, with `pad` padding rows after them. Returns the rows' tokens and finite flags."""
    device = logits.device
    slots = torch.tensor([*rows, *[sampler.pad_slot] * pad], dtype=torch.int32, device=device)
    positions = torch.tensor([*(len(r.tokens) for r in rows.values()), *[0] * pad], dtype=torch.int32, device=device)
    sampler.flush()
    tokens, finite = sampler.sample(logits, slots, positions)
    return tokens.tolist()[: len(rows)], finite.tolist()[: len(rows)]


def test_equals_the_host_sampler(device: torch.device) -> None:
    rng = random.Random(11)
    generator = torch.Generator().manual_seed(1)
    sampler = DeviceSampler(ROWS, VOCAB, device)
    running: dict[int, SampleRow] = {}
    counted = 0
    for step in range(7):
        for slot in rng.sample(range(ROWS), ROWS):
            if slot in running and rng.random() < 0.3:
                del running[slot]
                sampler.clear_slot(slot)
            if slot not in running and rng.random() < 0.7:
                running[slot] = request(rng)
                sampler.stage(slot, running[slot])
        order = rng.sample(list(running), len(running))
        rows = {slot: running[slot] for slot in order}
        # A few logits are large, so that tokens repeat and their counts matter.
        logits = torch.randn(ROWS, VOCAB, generator=generator)
        logits[:, :8] += 6
        want = sample(logits[: len(rows)], list(rows.values())).tokens.tolist()
        got, finite = run(sampler, logits.to(device), rows, pad=ROWS - len(rows))
        assert got == want, f"step {step}"
        assert all(finite)
        for row, token in zip(rows.values(), got, strict=True):
            row.tokens.append(token)  # type: ignore[attr-defined]
            counted += row.params.frequency_penalty > 0
    assert counted > 3


def test_rows_after_drafts_equal_the_host_samplers(device: torch.device) -> None:
    """A slot has several rows, each after one more draft. Drafts are not counted before they are accepted."""
    rng = random.Random(12)
    sampler = DeviceSampler(12, VOCAB, device, max_drafts=36)
    rows: list[SampleRow] = []
    inputs: list[int] = []
    slots: list[int] = []
    for slot in range(12):
        fixed = {"temperature": 0.0} if slot % 3 else {}
        row = request(
            rng,
            repetition_penalty=1.0 + slot % 2,
            frequency_penalty=1.0,
            min_tokens=2 + slot % 4,
            stop_token_ids=(0, 1),
            **fixed,
        )
        row = replace(row, tokens=[*row.tokens, 2, 3], prompt_len=len(row.tokens))
        sampler.stage(slot, row)
        drafts = [rng.randrange(2, 6) for _ in range(slot % 4)]
        rows += [replace(row, drafts=drafts[:count]) for count in range(len(drafts) + 1)]
        inputs += [3, *drafts]
        slots += [slot] * (len(drafts) + 1)
    sampler.flush()
    before = sampler._tensors.counts.clone()
    # A few logits are large, so that drafted tokens repeat and their counts matter.
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(2))
    logits[:, :6] += 6
    for at, row in enumerate(rows):
        if row.drafts:  # with one occurrence this token is still the most likely, with two it is not
            logits[at, row.drafts[-1]] = logits[at].max() + 1.5
    offsets = torch.tensor([len(row.drafts) for row in rows], dtype=torch.int32, device=device)
    positions = torch.tensor([row.position for row in rows], dtype=torch.int32, device=device)
    tokens, finite = sampler.sample(
        logits.to(device),
        torch.tensor(slots, device=device),
        positions,
        drafts=(torch.tensor(inputs, device=device), offsets),
    )
    assert bool(finite.all())
    assert tokens.tolist() == sample(logits, rows).tokens.tolist()
    assert torch.equal(sampler._tensors.counts, before)


def test_a_slot_keeps_nothing_of_its_last_request(device: torch.device) -> None:
    sampler = DeviceSampler(2, VOCAB, device)
    logits = torch.zeros(1, VOCAB, device=device)
    logits[0, 9], logits[0, 4] = 2.0, 1.0
    biased = SampleRow(SamplingParams(temperature=0.0, logit_bias=((6, 50.0),), presence_penalty=2.0), [9], 1)
    sampler.stage(1, biased)
    assert run(sampler, logits, {1: biased})[0] == [6]
    penalised = SampleRow(SamplingParams(temperature=0.0, presence_penalty=1.5), [6, 9], 1)
    sampler.stage(1, penalised)
    assert run(sampler, logits, {1: penalised})[0] == [4]
    plain = SampleRow(SamplingParams(temperature=0.0), [9, 9], 1)
    sampler.stage(1, plain)
    assert run(sampler, logits, {1: plain})[0] == [9]


def test_a_preempted_request_continues_with_the_same_tokens(device: torch.device) -> None:
    sampler = DeviceSampler(2, VOCAB, device)
    params = SamplingParams(temperature=1.0, frequency_penalty=1.0, repetition_penalty=1.2, seed=5)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2)).to(device)
    logits[:, :4] += 6
    answers = []
    for preempted in (False, True):
        row = SampleRow(params, [1, 2, 3], 3)
        sampler.stage(0, row)
        for step in range(6):
            if preempted and step == 3:
                sampler.clear_slot(0)
                sampler.stage(1, row)
            (token,), _ = run(sampler, logits, {1 if preempted and step >= 3 else 0: row})
            row.tokens.append(token)  # type: ignore[attr-defined]
        answers.append(row.tokens)
    assert answers[0] == answers[1]
    assert len(set(answers[0][3:])) > 2


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_row_that_is_not_finite_fails_alone_and_is_not_counted(bad: float, device: torch.device) -> None:
    sampler = DeviceSampler(3, VOCAB, device)
    rows = {
        slot: SampleRow(SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=1.0, seed=slot), [5], 1)
        for slot in (2, 0, 1)
    }
    for slot, row in rows.items():
        sampler.stage(slot, row)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3))
    want = sample(logits, list(rows.values())).tokens.tolist()
    clean = logits.clone()
    logits[1, 77] = bad
    got, finite = run(sampler, logits.to(device), rows)
    assert finite == [True, False, True]
    assert (got[0], got[2]) == (want[0], want[2])
    again, _ = run(sampler, clean[1:2].to(device), {0: rows[0]})
    assert again == want[1:2]


def test_more_biased_tokens_than_a_slot_holds_are_refused(device: torch.device) -> None:
    sampler = DeviceSampler(1, VOCAB, device)
    bias = tuple((token, 1.0) for token in range(MAX_ENTRIES))
    sampler.stage(0, SampleRow(SamplingParams(logit_bias=bias), [1], 1))
    with pytest.raises(InvalidRequest, match="logit_bias"):
        sampler.stage(0, SampleRow(SamplingParams(logit_bias=bias, stop_token_ids=(1,)), [1], 1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_graph_serves_every_mix_of_requests(device: torch.device) -> None:
    rng = random.Random(4)
    sampler = DeviceSampler(ROWS, VOCAB, device)
    logits = torch.zeros(ROWS, VOCAB, device=device)
    slots = torch.full((ROWS,), sampler.pad_slot, dtype=torch.int32, device=device)
    positions = torch.zeros(ROWS, dtype=torch.int32, device=device)
    sampler.sample(logits, slots, positions)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, finite = sampler.sample(logits, slots, positions)
    rows = {}
    for step in range(12):
        for slot in range(ROWS):
            if step % 3 == 0:
                rows[slot] = request(rng, **({"temperature": 0.0} if step == 0 else {}))
                sampler.stage(slot, rows[slot])
        host_logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(step))
        logits.copy_(host_logits)
        slots.copy_(torch.tensor(list(rows), dtype=torch.int32))
        positions.copy_(torch.tensor([len(r.tokens) for r in rows.values()], dtype=torch.int32))
        sampler.flush()
        graph.replay()
        assert tokens.tolist() == sample(host_logits, list(rows.values())).tokens.tolist()
        assert finite.all()
        for row, token in zip(rows.values(), tokens.tolist(), strict=True):
            row.tokens.append(token)  # type: ignore[attr-defined]


def test_a_token_that_is_sampled_again_under_a_mask_replaces_the_first_in_the_counts(device: torch.device) -> None:
    sampler = DeviceSampler(2, VOCAB, device)
    params = SamplingParams(temperature=0.7, frequency_penalty=0.9, seed=4)
    row = SampleRow(params, [1, 2, 3], 3)
    sampler.stage(1, row)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(6))
    words = torch.zeros(1, -(-VOCAB // 32), dtype=torch.int32)
    words[0, 0] = 0b1110000
    slots, device_logits = torch.tensor([1], device=device), logits.to(device)
    for _ in range(6):
        position = torch.tensor([len(row.tokens)], device=device)
        sampler.flush()
        first, _ = sampler.sample(device_logits, slots, position)
        sampler.uncount_tokens(slots, first)
        again, _ = sampler.sample(device_logits, slots, position, words.to(device))
        want = sample(logits, [SampleRow(params, list(row.tokens), 3, allowed_mask=words[0].numpy())]).tokens
        assert again.tolist() == want.tolist()
        assert int(again) in (4, 5, 6)
        row.tokens.append(int(again))  # type: ignore[attr-defined]
    sampler.uncount_tokens(slots, torch.tensor([-1], device=device))  # a row that was not finite was not counted
    assert int((sampler._tensors.counts[1] & (IN_PROMPT - 1)).sum()) == 6


def test_accept_drafts_counts_the_accepted_tokens(device: torch.device) -> None:
    """Rows have all lengths; some have a token that is not finite, some have no tokens."""
    rng = random.Random(6)
    sampler = DeviceSampler(ROWS, VOCAB, device)
    for slot in range(ROWS):
        sampler.stage(slot, SampleRow(SamplingParams(presence_penalty=1.0 * (slot % 2)), [1], 1))
    sampler.flush()
    counts = torch.zeros(ROWS + 1, VOCAB, dtype=torch.int32)
    counts[1::2, 1] = IN_PROMPT
    last = torch.full((ROWS + 1,), 5)
    lasts = last.to(device)
    ends = {"number": 0, "rejected": 0, "all": 0}
    for _ in range(20):
        slots = rng.sample(range(ROWS), ROWS)
        lengths = [rng.randrange(6) for _ in slots]
        cu_q = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        sampled = torch.tensor([rng.randrange(3) for _ in range(sum(lengths))])
        finite = torch.tensor([rng.random() < 0.9 for _ in sampled], dtype=torch.bool)
        inputs = torch.tensor([rng.choice([int(sampled[i - 1]), 0]) for i in range(len(sampled))])
        sampler.accept_drafts(
            sampled.to(device),
            finite.to(device),
            inputs.to(device),
            cu_q.to(device),
            torch.tensor(slots, device=device),
            lasts,
            query=5,
        )
        for slot, first, length in zip(slots, cu_q.tolist(), lengths, strict=False):
            end = "all"
            for i in range(first, first + length):
                if not finite[i]:
                    end = "number"
                    break
                last[slot] = sampled[i]
                counts[slot, sampled[i]] += slot % 2
                if i + 1 < first + length and inputs[i + 1] != sampled[i]:
                    end = "rejected"
                    break
            ends[end] += 1
    assert lasts.tolist() == last.tolist()
    assert sampler._tensors.counts.tolist() == counts.tolist()
    assert min(ends.values()) > 5


def test_results_mark_rows_that_are_not_finite(device: torch.device) -> None:
    sampler = DeviceSampler(3, VOCAB, device)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0)).to(device)
    logits[1, 7] = float("nan")
    pad = torch.full((3,), sampler.pad_slot, device=device)
    results = torch.full((3,), 99, device=device)
    tokens, finite = sampler.sample(logits, pad, pad, results=results)
    assert finite.tolist() == [True, False, True]
    assert results.tolist() == [int(tokens[0]), -1, int(tokens[2])]
    assert 0 <= int(tokens[1]) < VOCAB, "the next step may already be launched with this token"
