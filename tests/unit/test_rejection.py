"""Rejection sampling of drafts on a small vocabulary: the output has the distribution of the target for any proposal,
with penalties and truncation. A broken rule does not pass.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from common.types import SamplingParams
from engine.sampling.sampler import SampleRow, sample, token_probs
from engine.schedule.sequence import DraftTokens
from engine.speculation import acceptance
from engine.speculation.acceptance import accepted_tokens, rejection_sample
from tests.rigs.engine.comparisons import chi_square_p

VOCAB, DRAWS, DRAFTS = 10, 20_000, 2
ROWS = range(DRAFTS + 1)  # of a sequence with DRAFTS drafts
PARAMS = {
    "plain": {"temperature": 1.0},
    "cut": {"temperature": 0.8, "top_p": 0.85, "top_k": 7, "min_p": 0.01},
    "penalised": {
        "temperature": 1.1,
        "top_p": 0.95,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "logit_bias": ((3, 0.7),),
    },
}
CONTEXT = [1, 2, 2, 4]


@functools.cache
def logits_after(tokens: tuple[int, ...]) -> Tensor:
    """float32 [VOCAB], logits of a model after CONTEXT and these tokens."""
    return torch.randn(
        VOCAB, generator=torch.Generator().manual_seed(sum(7**i * (t + 1) for i, t in enumerate(tokens)))
    )


def target(tokens: tuple[int, ...], params: SamplingParams) -> Tensor:
    row = SampleRow(params, [*CONTEXT, *tokens], 2)
    return token_probs(logits_after(tokens)[None], [row])[0]


def point() -> DraftTokens:
    """Drafts that are not drawn: the second choice of the target, often right."""
    tokens: tuple[int, ...] = ()
    for _ in range(DRAFTS):
        tokens = (*tokens, int(logits_after(tokens).topk(2).indices[1]))
    return DraftTokens(tokens, None)


def drawn(flat: bool) -> list[DraftTokens]:
    """DRAWS chains of a draft model that is close to the target, or of a uniform one."""
    coins = torch.Generator().manual_seed(1)
    begun: dict[tuple[int, ...], tuple[int, list[Tensor]]] = {(): (DRAWS, [])}
    for _ in range(DRAFTS):
        longer: dict[tuple[int, ...], tuple[int, list[Tensor]]] = {}
        for tokens, (count, before) in begun.items():
            probs = torch.full((VOCAB,), 1 / VOCAB) if flat else (logits_after(tokens) * 0.6 + 0.2).softmax(-1)
            drafts = torch.multinomial(probs, count, replacement=True, generator=coins)
            for draft, times in enumerate(torch.bincount(drafts, minlength=VOCAB).tolist()):
                if times:
                    longer[*tokens, draft] = (times, [*before, probs])
        begun = longer
    return [chain for t, (count, p) in begun.items() for chain in [DraftTokens(t, torch.stack(p))] * count]


@pytest.fixture(scope="module")
def chains() -> dict[str, list[DraftTokens]]:
    """DRAWS chains of each kind of proposer."""
    return {"point": [point()] * DRAWS, "drawn": drawn(flat=False), "flat": drawn(flat=True)}


def draw(chains: list[DraftTokens], params: SamplingParams) -> tuple[dict[tuple[int, int], int], list[int]]:
    """How often each pair of first tokens came, and of each chain how many drafts were accepted.

    A chain that gave one token goes on by itself, as the next step would.
    """
    seeds = [replace(params, seed=seed) for seed in range(len(chains))]
    before = [(chain.tokens[:n], own) for chain, own in zip(chains, seeds, strict=True) for n in ROWS]
    raw = torch.stack([logits_after(tokens) for tokens, _ in before])
    rows = [SampleRow(own, CONTEXT, 2, drafts=tokens) for tokens, own in before]
    sampled = rejection_sample(raw, rows, chains).tokens.tolist()
    counts: Counter[tuple[int, int]] = Counter()
    accepted, short = [], []
    for number, chain in enumerate(chains):
        first = number * len(ROWS)
        run = accepted_tokens(chain.tokens, sampled[first : first + len(ROWS)])
        accepted.append(len(run) - 1)
        if len(run) == 1:
            short.append((number, run[0]))
        else:
            counts[run[0], run[1]] += 1
    if short:
        raw = torch.stack([logits_after((token,)) for _, token in short])
        rows = [SampleRow(seeds[n], [*CONTEXT, t], 2) for n, t in short]
        seconds = sample(raw, rows).tokens.tolist()
        counts.update((token, second) for (_, token), second in zip(short, seconds, strict=True))
    return counts, accepted


def pairs(params: SamplingParams) -> dict[tuple[int, int], float]:
    first = target((), params)
    return {
        (a, b): float(first[a] * second)
        for a in range(VOCAB)
        if first[a] > 0
        for b, second in enumerate(target((a,), params))
        if second > 0
    }


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [  # each kind and each sampling twice; the other pairs are long
        pytest.param(kind, sampling, marks=pytest.mark.long if (i + j) % 3 == 1 else ())
        for i, kind in enumerate(["point", "drawn", "flat"])
        for j, sampling in enumerate(PARAMS)
    ],
)
def test_the_distribution_is_the_targets(kind: str, sampling: str, chains: dict[str, list[DraftTokens]]) -> None:
    params = SamplingParams(**PARAMS[sampling])  # type: ignore[arg-type]
    counts, accepted = draw(chains[kind], params)
    expected = pairs(params)
    assert sum(counts.values()) == DRAWS
    assert set(counts) <= set(expected), "a token that is truncated"
    assert chi_square_p(counts, expected) > 0.01
    # The first draft is accepted as often as the two distributions overlap.
    right = sum(number > 0 for number in accepted) / DRAWS
    drafts = torch.tensor([chain.tokens[0] for chain in chains[kind]])
    q = torch.bincount(drafts, minlength=VOCAB) / DRAWS
    assert 0 < right < 1
    assert right == pytest.approx(float(torch.minimum(target((), params), q).sum()), abs=0.02)


def test_a_step_in_parts_samples_the_same(
    chains: dict[str, list[DraftTokens]], monkeypatch: pytest.MonkeyPatch
) -> None:
    some = [*chains["drawn"][::800], DraftTokens(()), chains["point"][0]]
    before = [chain.tokens[:n] for chain in some for n in range(len(chain.tokens) + 1)]
    raw = torch.stack([logits_after(tokens) for tokens in before])
    rows = [SampleRow(SamplingParams(seed=i), CONTEXT, 2, drafts=tokens) for i, tokens in enumerate(before)]
    whole = rejection_sample(raw, rows, some)
    for most in (1, 4, 7):
        monkeypatch.setattr(acceptance, "LOGITS_AT_ONCE", most * VOCAB)
        assert torch.equal(rejection_sample(raw, rows, some).tokens, whole.tokens)


@pytest.mark.parametrize("broken", ["always accepts", "ignores q", "replaces from p"])
def test_a_broken_rule_fails_the_distribution_test(
    broken: str,
    monkeypatch: pytest.MonkeyPatch,
    chains: dict[str, list[DraftTokens]],
) -> None:
    params = SamplingParams(**PARAMS["plain"])  # type: ignore[arg-type]
    if broken == "always accepts":
        monkeypatch.setattr(acceptance, "uniform", lambda seed, child, position, stream: torch.zeros(len(seed)))
    elif broken == "ignores q":
        monkeypatch.setattr(acceptance, "_draft_probs", lambda chain, like: torch.ones(len(chain.tokens), VOCAB))
    else:
        monkeypatch.setattr(acceptance, "_residual", lambda target, proposed: target)
    counts, _ = draw(chains["drawn"], params)
    assert chi_square_p(counts, pairs(params)) < 1e-6


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_token_probs_is_the_distribution_of_sample(temperature: float) -> None:
    """`token_probs` against the frequency of `sample`."""
    params = SamplingParams(temperature=temperature, top_p=0.9, frequency_penalty=0.5)
    rows = [SampleRow(replace(params, seed=i), CONTEXT, 2) for i in range(DRAWS)]
    raw = logits_after((5,))[None].expand(DRAWS, VOCAB)
    seen = torch.bincount(sample(raw, rows).tokens, minlength=VOCAB) / DRAWS
    assert torch.allclose(seen, token_probs(raw[:1], rows[:1])[0], atol=0.015)
