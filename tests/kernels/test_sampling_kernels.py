"""Sampling kernels against sampling by sorting in float64, with the noise of engine/sampling/sampler.py."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels.sampling import (
    IN_PROMPT,
    MAX_ENTRIES,
    NUM_FLOATS,
    SLOT_WORDS,
    SamplingKernels,
    SamplingTensors,
    count_tokens,
)
from engine.sampling.sampler import gumbel

VOCAB = 3001
OFF = (1.0, 1.0, 0.0, 1.0, 0.0, 0.0)


class Case:
    """A batch with one slot per row, in reverse order.

    rows: (top_k, seed, child, position, penalised) and (temperature, top_p, min_p, repetition, presence, frequency).
    """

    def __init__(self, rows, device, bias=None, ban_until=0) -> None:
        n = len(rows)
        words = torch.zeros(n, SLOT_WORDS, dtype=torch.int64)
        entries = torch.full((n, 2, MAX_ENTRIES), 2**31 - 1, dtype=torch.int32)
        for r, ((k, seed, child, _, penalised), floats) in enumerate(rows):
            words[r].view(torch.float32)[:NUM_FLOATS] = torch.tensor(floats)
            named = sorted((bias or {}).get(r, ()))
            words[r, NUM_FLOATS // 2 :] = torch.tensor([k, seed, child, ban_until, len(named), penalised])
            for j, (token, value) in enumerate(named):
                entries[r, 0, j] = token
                entries[r, 1].view(torch.float32)[j] = value
        counts = torch.zeros(n, VOCAB, dtype=torch.int32)
        words, entries, counts = (t.flip(0).contiguous().to(device) for t in (words, entries, counts))
        self.params = SamplingTensors(words, entries, counts)
        self.slots = torch.arange(n - 1, -1, -1, dtype=torch.int32, device=device)
        self.rows, self.bias, self.ban_until = rows, bias or {}, ban_until
        self.positions = torch.tensor([i[3] for i, _ in rows], dtype=torch.int32, device=device)
        self.sampler = SamplingKernels(n, VOCAB, device)

    def counts(self, r: int) -> torch.Tensor:
        return self.params.counts[len(self.rows) - 1 - r]

    def sample(self, logits, allowed=None):
        for scratch in self.sampler._buffers[2:]:
            scratch.fill_(float("nan"))
        return self.sampler.sample(logits, self.slots, self.positions, self.params, allowed)

    def expected(self, logits: torch.Tensor, r: int) -> int:
        x = logits[r].double()
        (k, seed, child, position, penalised), floats = self.rows[r]
        temperature, top_p, min_p, repetition, presence, frequency = (float(torch.tensor(f)) for f in floats)
        if penalised:
            count = self.counts(r)
            x = torch.where(count > 0, torch.where(x > 0, x / repetition, x * repetition), x)
            said = count & (IN_PROMPT - 1)
            x = x - frequency * said - presence * (said > 0)
        for token, value in self.bias.get(r, ()):
            if value > float("-inf") or position < self.ban_until:
                x[token] += value
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
        ((k, seed, child, 17 + child, 0), floats)
        for k, floats in CUTS
        for child, seed in enumerate((3, -(2**62) + 12345))
    ]
    logits = torch.randn(len(rows), VOCAB + 8, generator=gen, device=device)[:, :VOCAB] * spread
    case = Case(rows, device)
    tokens, finite = case.sample(logits)
    assert finite.all()
    assert tokens.tolist() == [case.expected(logits, r) for r in range(len(rows))]


def test_penalties_bias_and_bans(device, gen):
    floats = [(0.0, 1.0, 0.0, 1.7, 0.5, 0.25), (0.8, 0.9, 0.0, 1.2, -0.5, 0.1), (0.0, 1.0, 0.0, 1.0, 0.0, 0.0)]
    rows = [((0, 9, 0, 4, int(r < 2)), f) for r, f in enumerate([*floats, floats[2]])]
    logits = torch.randn(4, VOCAB, generator=gen, device=device) * 2
    best, tile_edge = int(logits[2].argmax()), [(2047, 1.0), (2048, 50.0), (VOCAB - 1, 9.0)]
    bias = {0: [(5, 3.0), *tile_edge], 2: [(best, float("-inf"))], 3: tile_edge}
    case = Case(rows, device, bias, ban_until=5)
    said = torch.randint(0, VOCAB, (400,), generator=gen, device=device)
    slot = case.slots[torch.arange(400, device=device) % 2]
    count_tokens(case.params.counts, slot, said)
    count_tokens(case.params.counts, slot, ~said.flip(0))
    want = torch.zeros_like(case.params.counts)
    for s, token in zip(slot.tolist(), said.tolist(), strict=True):
        want[s, token] += 1
    assert torch.equal(case.params.counts & (IN_PROMPT - 1), want)
    expected = [case.expected(logits, r) for r in range(4)]
    tokens, _ = case.sample(logits)
    assert tokens.tolist() == expected
    assert tokens[2] != best
    assert tokens[3] == 2048
    for r in range(2):
        want[case.slots[r], expected[r]] += 1
    assert torch.equal(case.params.counts & (IN_PROMPT - 1), want)
    case.positions += 1  # the ban has ended
    assert case.sample(logits)[0][2] == best


def test_masked_tokens_are_never_sampled(device, gen):
    rows = [
        ((0, r, 0, 1, 0), (t, p, 0.0, 1.0, 0.0, 0.0)) for r, (t, p) in enumerate([(0.0, 1.0), (1.0, 1.0), (1.0, 0.9)])
    ]
    logits = torch.randn(3, VOCAB, generator=gen, device=device)
    keep = torch.rand(3, VOCAB, generator=gen, device=device) < 0.1
    padded = torch.nn.functional.pad(keep, (0, -VOCAB % 32)).view(3, -1, 32).long()
    words = (padded << torch.arange(32, device=device)).sum(-1).to(torch.uint32).view(torch.int32)
    case = Case(rows, device)
    shaped = logits.masked_fill(~keep, float("-inf"))
    tokens, finite = case.sample(logits, words)
    assert finite.all()
    assert tokens.tolist() == [case.expected(shaped, r) for r in range(3)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_logit_fails_its_row_alone(bad, device, gen):
    rows = [((5, 1, 0, 0, 1), (1.0, 0.9, 0.0, 1.0, 0.0, 0.0))] * 3
    logits = torch.randn(3, VOCAB, generator=gen, device=device)
    case = Case(rows, device)
    want = [case.expected(logits, r) for r in range(3)]
    logits[1, VOCAB - 2] = bad
    tokens, finite = case.sample(logits)
    assert finite.tolist() == [True, False, True]
    assert [tokens[0], tokens[2]] == [want[0], want[2]]
    assert 0 <= tokens[1] < VOCAB
    assert int(case.counts(1).sum()) == 0


def test_a_row_does_not_depend_on_its_batch(device, gen):
    logits = torch.randn(1, VOCAB, generator=gen, device=device)
    row = ((0, 77, 2, 31, 0), (1.0, 0.95, 0.0, 1.0, 0.0, 0.0))
    alone, _ = Case([row], device).sample(logits)
    batch, _ = Case([row] * 4, device).sample(logits.expand(4, -1))
    assert batch.tolist() == alone.tolist() * 4
