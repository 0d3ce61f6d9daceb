"""Sampling kernels against the same choice made by sorting, in float64, with the noise of engine/philox.py."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels.sampling import IN_PROMPT, NUM_FLOATS, NUM_INTS, Sampler, SamplingTensors, count_tokens
from engine.philox import gumbel

VOCAB = 3001
OFF = (1.0, 1.0, 0.0, 1.0, 0.0, 0.0)


def tensors(rows, device, counts=None, bias=None) -> SamplingTensors:
    """rows: (top_k, seed, child, position, count_row) and (temperature, top_p, min_p, repetition, presence,
    frequency).
    """
    ends, tokens, values = [0], [], []
    for r in range(len(rows)):
        for token, value in (bias or {}).get(r, ()):
            tokens.append(token)
            values.append(value)
        ends.append(len(tokens))
    return SamplingTensors(
        floats=torch.tensor([f for _, f in rows], dtype=torch.float32, device=device),
        ints=torch.tensor([i for i, _ in rows], dtype=torch.int64, device=device),
        counts=torch.zeros(1, VOCAB, dtype=torch.int32, device=device) if counts is None else counts,
        bias_ends=torch.tensor(ends, dtype=torch.int32, device=device),
        bias_tokens=torch.tensor(tokens or [0], dtype=torch.int32, device=device),
        bias_values=torch.tensor(values or [0.0], dtype=torch.float32, device=device),
    )


def expected(logits: torch.Tensor, params: SamplingTensors, r: int) -> int:
    x = logits[r].double()
    temperature, top_p, min_p, repetition, presence, frequency = params.floats[r].tolist()
    k, seed, child, position, slot = params.ints[r].tolist()
    if slot >= 0:
        count = params.counts[slot]
        x = torch.where(count > 0, torch.where(x > 0, x / repetition, x * repetition), x)
        said = count & (IN_PROMPT - 1)
        x = x - frequency * said - presence * (said > 0)
    for j in range(int(params.bias_ends[r]), int(params.bias_ends[r + 1])):
        x[params.bias_tokens[j]] += params.bias_values[j]
    if temperature == 0:
        return int(x.argmax())
    x = x / temperature
    ordered = x.sort(descending=True).values
    kept = x >= ordered[k - 1] if 0 < k < VOCAB else torch.ones_like(x, dtype=torch.bool)
    if top_p < 1:
        probs = ordered.masked_fill(ordered < x[kept].min(), float("-inf")).softmax(0)
        inside = int((probs.cumsum(0) - probs < top_p).sum().clamp(min=1))
        kept &= x >= ordered[inside - 1]
    if min_p > 0:
        kept &= x >= ordered[0] + torch.tensor(min_p).double().log()
    one = [torch.tensor([v], device=x.device) for v in (seed, child, position)]
    return int((x + gumbel(*one, VOCAB)[0].double()).masked_fill(~kept, float("-inf")).argmax())


CUTS = [
    (0, OFF),
    (0, (0.0, 1.0, 0.0, 1.0, 0.0, 0.0)),
    (0, (0.7, 0.9, 0.0, 1.0, 0.0, 0.0)),
    (0, (1.3, 0.05, 0.0, 1.0, 0.0, 0.0)),
    (1, OFF),
    (50, OFF),
    (40, (1.0, 0.8, 0.0, 1.0, 0.0, 0.0)),
    (2000, (2.0, 0.5, 0.0, 1.0, 0.0, 0.0)),
    (0, (1.5, 1.0, 0.1, 1.0, 0.0, 0.0)),
    (30, (1.5, 0.9, 0.05, 1.0, 0.0, 0.0)),
    (VOCAB + 5, (0.9, 0.999, 0.0, 1.0, 0.0, 0.0)),
]


@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_cuts(spread, device, gen):
    rows = [
        ((k, seed, child, 17 + child, -1), floats)
        for k, floats in CUTS
        for child, seed in enumerate((3, -(2**62) + 12345))
    ]
    logits = torch.randn(len(rows), VOCAB + 8, generator=gen, device=device)[:, :VOCAB] * spread
    params = tensors(rows, device)
    tokens, finite = Sampler(len(rows), VOCAB, device).sample(logits, params)
    assert finite.all()
    assert tokens.tolist() == [expected(logits, params, r) for r in range(len(rows))]


def test_penalties_and_bias(device, gen):
    floats = [(0.0, 1.0, 0.0, 1.7, 0.5, 0.25), (0.8, 0.9, 0.0, 1.2, -0.5, 0.1), (0.0, 1.0, 0.0, 1.0, 0.0, 0.0)]
    rows = [((0, 9, 0, 4, r if r < 2 else -1), f) for r, f in enumerate(floats)]
    counts = torch.zeros(2, VOCAB, dtype=torch.int32, device=device)
    said = torch.randint(0, VOCAB, (400,), generator=gen, device=device)
    row = torch.arange(400, device=device) % 3 - 1
    count_tokens(counts, row, said, prompt=False)
    count_tokens(counts, row, said.flip(0), prompt=True)
    want = torch.zeros_like(counts)
    for r, token in zip(row.tolist(), said.tolist(), strict=True):
        if r >= 0:
            want[r, token] += 1
    assert torch.equal(counts & (IN_PROMPT - 1), want)
    logits = torch.randn(3, VOCAB, generator=gen, device=device) * 2
    best = int(logits[2].argmax())
    params = tensors(rows, device, counts, {0: [(5, 3.0), (VOCAB - 1, 9.0)], 2: [(best, float("-inf"))]})
    tokens, _ = Sampler(3, VOCAB, device).sample(logits, params)
    assert tokens.tolist() == [expected(logits, params, r) for r in range(3)]
    assert tokens[2] != best


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_logit_fails_its_row_alone(bad, device, gen):
    rows = [((5, 1, 0, 0, -1), (1.0, 0.9, 0.0, 1.0, 0.0, 0.0))] * 3
    logits = torch.randn(3, VOCAB, generator=gen, device=device)
    params = tensors(rows, device)
    want = [expected(logits, params, r) for r in range(3)]
    logits[1, VOCAB - 2] = bad
    tokens, finite = Sampler(3, VOCAB, device).sample(logits, params)
    assert finite.tolist() == [True, False, True]
    assert [tokens[0], tokens[2]] == [want[0], want[2]]
    assert 0 <= tokens[1] < VOCAB


def test_a_row_does_not_depend_on_its_batch(device, gen):
    logits = torch.randn(1, VOCAB, generator=gen, device=device)
    row = ((0, 77, 2, 31, -1), (1.0, 0.95, 0.0, 1.0, 0.0, 0.0))
    alone, _ = Sampler(1, VOCAB, device).sample(logits, tensors([row], device))
    batch, _ = Sampler(4, VOCAB, device).sample(logits.expand(4, -1), tensors([row] * 4, device))
    assert batch.tolist() == alone.tolist() * 4
    assert len(row[1]) == NUM_FLOATS
    assert len(row[0]) == NUM_INTS
