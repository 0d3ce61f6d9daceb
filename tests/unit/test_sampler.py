"""The torch sampler against transformers' logits processors, and its noise against published vectors."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from common.types import SamplingParams
from engine.sampling.sampler import SampleRow, gumbel, gumbel_at, philox, sample, token_logprobs, token_probs

torch.set_num_threads(1)

# Known answers of philox4x32-10, from the Random123 distribution (kat_vectors).
VECTORS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def make_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def row(tokens: Sequence[int] = (1, 2, 3), prompt_len: int = 2, child: int = 0, **params: Any) -> SampleRow:
    return SampleRow(SamplingParams(**params), list(tokens), prompt_len, child)


def noise_of(r: SampleRow, vocab: int) -> Tensor:
    seed = r.params.seed - (1 << 64) if r.params.seed >= 1 << 63 else r.params.seed
    return gumbel(torch.tensor([seed]), torch.tensor([r.child]), torch.tensor([len(r.tokens)]), vocab)


def reference(logits: Tensor, r: SampleRow) -> int:
    """The token of one row by transformers' processors and Gumbel-max with the same noise."""
    p, scores, ids = r.params, logits[None].clone(), torch.tensor([list(r.tokens)])
    if p.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(p.repetition_penalty)(ids, scores)
    for token in set(r.tokens[r.prompt_len :]):
        count = list(r.tokens[r.prompt_len :]).count(token)
        scores[0, token] -= p.frequency_penalty * count + p.presence_penalty
    for token, bias in p.logit_bias:
        scores[0, token] += bias
    if len(r.tokens) - r.prompt_len < p.min_tokens:
        scores[0, list(p.stop_token_ids)] = float("-inf")
    if p.greedy:
        return int(scores.argmax())
    scores = TemperatureLogitsWarper(p.temperature)(ids, scores)
    if p.top_k:
        scores = TopKLogitsWarper(p.top_k)(ids, scores)
    if p.top_p < 1:
        scores = TopPLogitsWarper(p.top_p)(ids, scores)
    if p.min_p > 0:
        scores = MinPLogitsWarper(p.min_p)(ids, scores)
    return int((scores + noise_of(r, logits.shape[0])).argmax())


def random_row(rng: random.Random, vocab: int) -> SampleRow:
    tokens = [rng.randrange(vocab) for _ in range(rng.randrange(1, 40))]
    return row(
        tokens,
        rng.randrange(1, len(tokens) + 1),
        temperature=rng.choice([0.0, 0.3, 1.0, 1.0, 2.5]),
        top_k=rng.choice([0, 0, 1, 5, 40, 2000]),
        top_p=rng.choice([1.0, 1.0, 0.1, 0.7, 0.95, 0.9999]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.6]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3, 0.7]),
        presence_penalty=rng.choice([0.0, 0.0, 1.5, -1.0]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.8]),
        logit_bias=rng.choice([(), ((3, 5.0), (7, -100.0))]),
        min_tokens=rng.choice([0, 0, 60]),
        stop_token_ids=(2, 9),
        seed=rng.randrange(1 << 64),
    )


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = philox(
        tuple(torch.tensor([c]) for c in counter),  # type: ignore[arg-type]
        tuple(torch.tensor([k]) for k in key),  # type: ignore[arg-type]
    )
    assert [int(w) for w in words] == expected


def test_noise_at_indices_is_the_noise_everywhere() -> None:
    seed, child, position = torch.tensor([5, -1, 1 << 40]), torch.tensor([0, 3, 1]), torch.tensor([0, 7, 9000])
    everywhere = gumbel(seed, child, position, 1001)
    index = torch.randint(0, 1001, (3, 50), generator=torch.Generator().manual_seed(1))
    assert torch.equal(gumbel_at(seed, child, position, index), everywhere.gather(1, index))
    assert torch.isfinite(everywhere).all()
    for i in range(3):
        for j in range(i):
            assert not torch.equal(everywhere[i], everywhere[j])


def test_drafts_count_like_output_tokens() -> None:
    """In penalties, min_tokens and noise. The vocabulary is small, so that many tokens repeat."""
    rng, vocab, banned = random.Random(5), 12, 0
    for trial in range(12):
        full = []
        for _ in range(16):
            drawn = random_row(rng, vocab)
            min_tokens = rng.randrange(len(drawn.tokens) - drawn.prompt_len + 3)
            full.append(dataclasses.replace(drawn, params=dataclasses.replace(drawn.params, min_tokens=min_tokens)))
        known = [rng.randrange(r.prompt_len, len(r.tokens) + 1) for r in full]
        drafted = [
            dataclasses.replace(r, tokens=r.tokens[:at], drafts=r.tokens[at:])
            for r, at in zip(full, known, strict=True)
        ]
        banned += sum(
            at - r.prompt_len < r.params.min_tokens <= len(r.tokens) - r.prompt_len
            for r, at in zip(full, known, strict=True)
        )
        logits = make_logits(16, vocab, trial)
        assert sample(logits, drafted).tokens.tolist() == sample(logits, full).tokens.tolist()
        assert torch.equal(token_probs(logits, drafted), token_probs(logits, full))
    assert banned > 10, "min_tokens ends within drafts"


@pytest.mark.parametrize("vocab", [50, 3001])
def test_equals_transformers_processors(vocab: int) -> None:
    rng = random.Random(vocab)
    for trial in range(12):
        logits = make_logits(16, vocab, trial)
        rows = [random_row(rng, vocab) for _ in range(16)]
        result = sample(logits, rows)
        expected = [reference(logits[r], rows[r]) for r in range(16)]
        assert result.tokens.tolist() == expected
        assert result.finite.all()


def test_flat_logits_need_the_whole_vocabulary() -> None:
    """top-p over a flat distribution: the 1024 most likely tokens have less than p of the mass."""
    logits = make_logits(3, 5000) * 0.01
    rows = [
        row(top_p=0.9, seed=4),
        row(top_p=0.999, top_k=4000, seed=5),
        row(min_p=0.5, seed=6),
    ]
    assert sample(logits, rows).tokens.tolist() == [reference(logits[r], rows[r]) for r in range(3)]


def test_a_row_does_not_depend_on_other_rows() -> None:
    rng = random.Random(8)
    logits = make_logits(24, 2000)
    rows = [random_row(rng, 2000) for _ in range(24)]
    together = sample(logits, rows).tokens
    alone = [int(sample(logits[r : r + 1], rows[r : r + 1]).tokens) for r in range(24)]
    assert together.tolist() == alone
    order = list(range(24))
    rng.shuffle(order)
    assert sample(logits[order], [rows[r] for r in order]).tokens.tolist() == [alone[r] for r in order]


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}],
    ids=["plain", "temperature", "top_k", "top_p", "min_p"],
)
def test_distribution(params: dict[str, Any]) -> None:
    """Chi-square test of 20,000 draws over eight tokens; each row has its own seed, like a request."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0])
    scaled = logits / params.get("temperature", 1.0)
    probabilities = scaled.softmax(0)
    keep = torch.ones(8, dtype=torch.bool)
    if "top_k" in params:
        keep = torch.arange(8) < 4
    if "top_p" in params:
        keep = probabilities.cumsum(0) - probabilities < 0.8
    if "min_p" in params:
        keep = probabilities >= 0.2 * probabilities.max()
    expected = torch.where(keep, probabilities, torch.zeros(())) / probabilities[keep].sum()
    draws = 20_000
    rows = [row(range(1 + i % 50), 1, seed=i, **params) for i in range(draws)]
    counts = torch.bincount(sample(logits.expand(draws, 8).contiguous(), rows).tokens, minlength=8)
    assert counts[~keep].sum() == 0
    ideal = expected[keep] * draws
    statistic = float(((counts[keep] - ideal) ** 2 / ideal).sum())
    assert (
        statistic < 24.3
    )  # 0.1% quantile of chi-square with 7 degrees of freedom; with fewer tokens the test is weaker


def test_every_parameter_changes_the_result() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 4], logits[0, 5], logits[0, 6] = 3.0, 2.5, 2.0
    full = [4, 4, 5, 4]

    def greedy(**params: Any) -> int:
        return int(sample(logits, [row(full, 1, temperature=0.0, **params)]).tokens)

    assert greedy() == 4
    assert greedy(repetition_penalty=2.0) == 6
    assert greedy(presence_penalty=1.2) == 6
    assert greedy(presence_penalty=0.6) == 4
    assert greedy(frequency_penalty=0.6) == 6
    assert greedy(logit_bias=((8, 4.0),)) == 8
    assert greedy(min_tokens=4, stop_token_ids=(4,)) == 5
    assert greedy(min_tokens=3, stop_token_ids=(4,)) == 4
    # Presence and frequency penalties count output tokens, the repetition penalty counts the prompt too.
    assert int(sample(logits, [row([4, 4], 2, temperature=0.0, presence_penalty=2.0)]).tokens) == 4
    assert int(sample(logits, [row([4, 4], 2, temperature=0.0, repetition_penalty=2.0)]).tokens) == 5


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = make_logits(3, 40)
    rows = [row(temperature=0.0), row(temperature=0.5, logit_bias=((11, 100.0),)), row(temperature=0.0)]
    tokens = sample(logits, rows).tokens
    chosen, top, top_ids = token_logprobs(logits, tokens, 3)
    expected = logits.log_softmax(-1)
    assert top is not None
    assert top_ids is not None
    assert int(tokens[1]) == 11
    torch.testing.assert_close(chosen, expected.gather(1, tokens[:, None])[:, 0])
    torch.testing.assert_close(top[0], expected[0].topk(3).values)
    assert int(top_ids[0, 0]) == int(tokens[0])
    assert token_logprobs(logits, tokens, 0)[1:] == (None, None)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_does_not_change_the_others(poison: float) -> None:
    rng = random.Random(2)
    logits = make_logits(8, 1500)
    rows = [random_row(rng, 1500) for _ in range(8)]
    clean = sample(logits, rows).tokens
    logits[3, 17] = poison
    logits[5] = poison
    result = sample(logits, rows)
    assert result.finite.tolist() == [r not in (3, 5) for r in range(8)]
    healthy = [0, 1, 2, 4, 6, 7]
    assert result.tokens[healthy].tolist() == clean[healthy].tolist()


def test_logits_are_not_changed() -> None:
    logits = make_logits(4, 60)
    before = logits.clone()
    sample(logits, [random_row(random.Random(i), 60) for i in range(4)])
    assert torch.equal(logits, before)


def test_masked_rows_sample_allowed_tokens_with_the_same_noise() -> None:
    """Rows with and without a mask in one batch. A masked row equals a row with very low logits elsewhere."""
    rng = random.Random(8)
    vocab = 70
    logits = make_logits(16, vocab)
    rows = [random_row(rng, vocab) for _ in range(16)]
    masked, hidden = [], logits.clone()
    for r, plain in enumerate(rows):
        if r % 3 == 0:
            masked.append(plain)
            continue
        allowed = torch.rand(vocab, generator=torch.Generator().manual_seed(r)) < 0.2
        allowed[11] = True
        words = np.packbits(np.pad(allowed.numpy(), (0, -vocab % 32)), bitorder="little").view(np.int32)
        masked.append(dataclasses.replace(plain, allowed_mask=words))
        hidden[r, ~allowed] = -1e30
    got = sample(logits, masked).tokens.tolist()
    assert got == [reference(hidden[r], rows[r]) for r in range(16)]
    assert got != sample(logits, rows).tokens.tolist()
