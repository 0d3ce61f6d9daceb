"""Beam search, compared with transformers' generate on a tiny random Llama, and with a search of all sequences."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from common.types import FinishReason, TokenLogprob
from gateway.serving.answers import Beam, beam_search
from gateway.serving.request import BeamSearchParams, EarlyStopping

VOCAB = 24
PROMPT = [3, 5, 7, 11]
STOPS = (14, 17)


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.25,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def by_model(model: Any, count: int) -> Any:
    """Returns an `expand` that computes `count` alternatives per beam with the model."""

    async def expand(beams: Sequence[Beam]) -> list[list[TokenLogprob]]:
        rows = torch.tensor([[*PROMPT, *(token.id for token in beam.tokens)] for beam in beams])
        with torch.inference_mode():
            top = model(rows).logits[:, -1].log_softmax(-1).topk(count)
        return [
            [TokenLogprob(int(i), float(v)) for i, v in zip(ids, values, strict=True)]
            for ids, values in zip(top.indices, top.values, strict=True)
        ]

    return expand


@pytest.mark.parametrize("early", [False, True, "never"])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.5])
@pytest.mark.parametrize(("width", "min_tokens"), [(2, 0), (3, 4), (6, 0)])
async def test_beams_equal_those_of_transformers(
    model: Any, width: int, min_tokens: int, penalty: float, early: EarlyStopping
) -> None:
    params = BeamSearchParams(width, penalty, early)
    expand = by_model(model, width + len(STOPS))
    found = await beam_search(expand, params, max_tokens=10, min_tokens=min_tokens, stops=STOPS)
    out = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        length_penalty=penalty,
        early_stopping=early,
        max_new_tokens=10,
        min_new_tokens=min_tokens or None,
        eos_token_id=list(STOPS),
        pad_token_id=1,  # 0 would count as no pad token
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    for beam, row, score in zip(found, out.sequences, out.sequences_scores, strict=True):
        ids = [token.id for token in beam.tokens]
        assert row[len(PROMPT) :].tolist()[: len(ids)] == ids
        assert set(row[len(PROMPT) + len(ids) :].tolist()) <= {1}
        assert params.score(beam.logprob, len(ids)) == pytest.approx(float(score), abs=1e-4)
        assert beam.finish is (FinishReason.STOP if ids[-1] in STOPS else FinishReason.LENGTH)
        assert not set(ids[:-1]) & set(STOPS)
        assert len(ids) > min_tokens


async def test_the_cases_end_with_and_without_a_stop_token(model: Any) -> None:
    found = await beam_search(by_model(model, 8), BeamSearchParams(6), max_tokens=10, stops=STOPS)
    assert {beam.finish for beam in found} == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize("seed", range(4))
async def test_a_wide_search_finds_the_best_of_all_sequences(seed: int) -> None:
    rng, ids, length = random.Random(seed), range(4), 4
    table: dict[tuple[int, ...], list[float]] = {}

    def logprobs(before: tuple[int, ...]) -> list[float]:
        if before not in table:
            weights = [rng.random() + 0.01 for _ in ids]
            table[before] = [math.log(w / sum(weights)) for w in weights]
        return table[before]

    async def expand(beams: Sequence[Beam]) -> list[list[TokenLogprob]]:
        rows = [logprobs(tuple(token.id for token in beam.tokens)) for beam in beams]
        return [sorted(map(TokenLogprob, ids, row), key=lambda t: -t.logprob) for row in rows]

    stop = 3
    every = {
        sequence[: sequence.index(stop) + 1] if stop in sequence else sequence
        for sequence in itertools.product(ids, repeat=length)
    }
    params = BeamSearchParams(300, 1.0, "never")

    def score(sequence: tuple[int, ...]) -> float:
        return params.score(sum(logprobs(sequence[:i])[t] for i, t in enumerate(sequence)), len(sequence))

    found = await beam_search(expand, params, max_tokens=length, stops=(stop,), num_top=2)
    assert [tuple(t.id for t in beam.tokens) for beam in found] == sorted(every, key=score, reverse=True)
    for beam in found:
        for i, token in enumerate(beam.tokens):
            before = tuple(t.id for t in beam.tokens[:i])
            assert (token.index, token.logprob) == (i, logprobs(before)[token.id])
            assert [t.logprob for t in token.top] == sorted(logprobs(before), reverse=True)[:2]


async def test_early_stopping_ends_at_as_many_hypotheses_as_beams() -> None:
    steps: list[int] = []

    async def expand(beams: Sequence[Beam]) -> list[list[TokenLogprob]]:
        steps.append(len(beams))
        return [[TokenLogprob(0, -0.4), TokenLogprob(1, -1.0), TokenLogprob(2, -9.0)] for _ in beams]

    found = await beam_search(expand, BeamSearchParams(2, 1.0, True), max_tokens=50, stops=(0,))
    assert [[t.id for t in beam.tokens] for beam in found] == [[0], [1, 0]]
    assert steps == [1, 2]
