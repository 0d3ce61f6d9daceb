"""Log-probabilities of a prompt equal those of transformers, with chunks, cached prefixes and preemptions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.types import PromptLogprobs, SamplingParams
from engine.engine import Engine
from engine.llm import LLM
from engine.schedule.outputs import SequenceOutput, StepResult
from tests.integration.test_engine import prompt, request

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def llm(smollm2_dir: Path) -> LLM:
    return LLM(smollm2_dir, threads=1, chunk_tokens=64, num_blocks=40, max_model_len=512)


@pytest.fixture(scope="module")
def expected(smollm2_dir: Path) -> torch.Tensor:
    """Log-probabilities of the long prompt, [tokens, vocab]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([prompt(150)])).logits[0].log_softmax(-1)


def run(engine: Engine, name: str, ids: list[int], params: SamplingParams) -> list[SequenceOutput]:
    found: list[SequenceOutput] = []

    def on_step(result: StepResult) -> None:
        found.extend(o for o in result.outputs if o.seq.request_id == name)

    engine.add(engine.new_sequence(request(name, ids, params)))
    while engine.has_work:
        engine.step(on_step)
    return found


def check(parts: list[PromptLogprobs], ids: list[int], expected: torch.Tensor, top: int) -> None:
    at = 1
    for part in parts:
        assert part.first == at
        for i, (value, rank) in enumerate(zip(part.logprobs, part.ranks, strict=True)):
            line = expected[at - 1]
            assert value == pytest.approx(float(line[ids[at]]), abs=TOLERANCE)
            assert abs(rank - 1 - int((line > line[ids[at]]).sum())) <= 1  # two tokens that differ only by rounding
            best = line.topk(top)
            assert [t.logprob for t in part.top(i)] == pytest.approx(best.values.tolist(), abs=TOLERANCE)
            at += 1
    assert at == len(ids)


def test_chunks_and_a_cached_prefix_give_every_token(llm: LLM, expected: torch.Tensor) -> None:
    engine, ids = llm.engine, prompt(150)
    run(engine, "warm", ids, SamplingParams(temperature=0.0, max_tokens=1))
    assert engine.pool.match_prefix(engine.new_sequence(request("m", ids)).matchable_hashes()) > 0
    for top in (0, 3):
        outputs = run(engine, f"r{top}", ids, SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=top))
        parts = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
        assert len(parts) == 3
        check(parts, ids, expected, top)
        assert outputs[-1].seq.cached_tokens == 0
    plain = run(engine, "plain", ids, SamplingParams(temperature=0.0, max_tokens=2))
    assert all(o.prompt_logprobs is None for o in plain)
    assert plain[-1].seq.cached_tokens > 0


def test_a_prompt_of_one_token_has_none(llm: LLM) -> None:
    outputs = run(llm.engine, "one", prompt(1), SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1))
    assert [o.prompt_logprobs for o in outputs] == [None]


def test_after_a_preemption_no_prompt_logprob_is_computed_twice(llm: LLM, expected: torch.Tensor) -> None:
    engine, ids = llm.engine, prompt(150)
    engine.add(seq := engine.new_sequence(request("p", ids, SamplingParams(max_tokens=1, prompt_logprobs=0))))
    parts: list[PromptLogprobs] = []

    def on_step(result: StepResult) -> None:
        parts.extend(o.prompt_logprobs for o in result.outputs if o.prompt_logprobs is not None)

    engine.step(on_step)
    engine.scheduler._preempt(seq)
    while engine.has_work:
        engine.step(on_step)
    check(parts, ids, expected, 0)
