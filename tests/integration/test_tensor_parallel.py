"""One engine over two ranks on CPUs: same results as on one device, and a lost rank fails the engine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError, InternalError
from common.types import FinishReason, SamplingParams
from engine.llm import LLM, Completion
from engine.parallel.collectives import TIMEOUT_S
from tests.rigs.engine.bare_model import GPT2, LLAMA, bare_model
from tests.rigs.pods.harness import prompt_of

torch.set_num_threads(1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3)
SETTINGS: dict[str, Any] = {"device": "cpu", "threads": 1, "block_size": 4, "max_model_len": 128, "chunk_tokens": 16}


@pytest.fixture(scope="module")
def two(model_dir: Path) -> Iterator[LLM]:
    made = LLM(model_dir, num_blocks=24, tensor_parallel_size=2, **SETTINGS)
    yield made
    assert made.engine.rank_group is not None
    (pid,) = made.engine.rank_group.pids
    made.engine.close()
    with pytest.raises(ProcessLookupError):  # the rank has ended with its engine
        os.kill(pid, 0)


def same(left: list[Completion], right: list[Completion]) -> None:
    for a, b in zip(left, right, strict=True):
        assert (b.error, b.ids, b.finish) == (None, a.ids, a.finish)
        for x, y in zip(a.tokens, b.tokens, strict=True):
            assert y.logprob == pytest.approx(x.logprob, abs=1e-4)
            assert [t.token for t in y.top] == [t.token for t in x.top]


def test_results_equal_one_device_and_transformers(model_dir: Path, llm: LLM, two: LLM) -> None:
    from transformers import AutoModelForCausalLM

    prompts = [prompt_of(n, seed=n) for n in (1, 3, 4, 17, 40)]
    answers = two.generate(prompts, GREEDY, ignore_eos=True)
    same(llm.generate(prompts, GREEDY, ignore_eos=True), answers)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logprobs = model(torch.tensor([[*prompt, *answer.ids]])).logits[0].log_softmax(-1)
        for at, token in enumerate(answer.tokens, len(prompt) - 1):
            assert int(logprobs[at].argmax()) == token.id
            assert token.logprob == pytest.approx(float(logprobs[at, token.id]), abs=1e-4)


def test_prefix_hits_and_preemption(llm: LLM, two: LLM) -> None:
    shared = prompt_of(24, seed=7)
    first = two.generate([shared], GREEDY, ignore_eos=True)[0]
    longer = [*shared, *first.ids[:5], 9]
    again = two.generate([longer], GREEDY, ignore_eos=True)[0]
    assert again.cached_tokens >= 24
    same(llm.generate([longer], GREEDY, ignore_eos=True), [again])
    many, long = [prompt_of(12, seed=n) for n in range(5)], SamplingParams(temperature=0.0, max_tokens=24, logprobs=3)
    before = two.engine.scheduler.stats().preemptions
    same(llm.generate(many, long, ignore_eos=True), two.generate(many, long, ignore_eos=True))
    assert two.engine.scheduler.stats().preemptions > before
    two.engine.pool.check_integrity()


def test_children_masks_and_prompt_logprobs(llm: LLM, two: LLM) -> None:
    prompt = prompt_of(13, seed=3)  # the children share its last block and copy it
    params = [
        SamplingParams(seed=5, max_tokens=6, n=3, logprobs=3),
        SamplingParams(seed=6, max_tokens=6, logprobs=3, allowed_token_ids=(3, 4, 5)),
        SamplingParams(temperature=0.0, max_tokens=2, logprobs=3, prompt_logprobs=1),
    ]
    same(llm.generate([prompt] * 3, params, ignore_eos=True), two.generate([prompt] * 3, params, ignore_eos=True))


def test_ngram_drafts_and_eight_bit_kv_and_a_lost_rank(model_dir: Path) -> None:
    settings = {**SETTINGS, "load_format": "dummy", "kv_dtype": "fp8_e4m3", "speculation": "ngram", "num_blocks": 64}
    prompts = [prompt_of(5, seed=1) * 4, prompt_of(30, seed=2)]
    params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=3)
    alone = LLM(model_dir, **settings).generate(prompts, params, ignore_eos=True)
    llm = LLM(model_dir, tensor_parallel_size=2, **settings)
    same(alone, llm.generate(prompts, params, ignore_eos=True))
    speculator = llm.engine.speculator
    assert speculator is not None
    assert 0 < speculator.stats.accepted < speculator.stats.proposed

    # A killed rank fails this call long before the time-out of a collective, and every later call.
    assert llm.engine.rank_group is not None
    (pid,) = llm.engine.rank_group.pids
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    for _ in range(2):
        lost = llm.generate([prompts[0]], params)[0]
        assert lost.finish is FinishReason.ERROR
        assert "tensor-parallel rank 1 has ended (SIGKILL)" in str(lost.error)
    assert time.monotonic() - began < 0.5 * TIMEOUT_S
    assert llm.engine.failure is not None
    llm.engine.pool.check_integrity()
    llm.engine.close()


def test_a_rank_with_another_model_is_reported(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.models.loader.ModelSource.revision", lambda _self, _device: "another")
    with pytest.raises(InternalError, match="rank 1 failed: rank 1 has another model"):
        LLM(model_dir, num_blocks=16, tensor_parallel_size=2, **SETTINGS)


@pytest.mark.parametrize(
    ("changed", "field", "words"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size", "num_key_value_heads, 2"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size", "from 1 to 1024"),
        ({"tensor_parallel_nodes": 3}, "tensor_parallel_nodes", "does not divide"),
        ({"tensor_parallel_nodes": 2}, "tensor_parallel_master", "address of rank 0"),
        ({"tensor_parallel_nodes": 2, "tensor_parallel_master": "x:1"}, "tensor_parallel_nodes", "only pods"),
        ({"tensor_parallel_master": "192.0.2.1:7"}, "tensor_parallel_master", "cannot listen"),
    ],
)
def test_unsupported_settings_are_refused_by_name(
    model_dir: Path, changed: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        LLM(model_dir, **{**SETTINGS, "num_blocks": 16, "tensor_parallel_size": 2, **changed})
    assert refused.value.field == field


def test_a_size_that_does_not_divide_the_model_is_refused(tmp_path: Path) -> None:
    bare_model(tmp_path, LLAMA | {"num_key_value_heads": 4, "intermediate_size": 30})
    with pytest.raises(ConfigError, match="4 does not divide the model's intermediate_size, 30"):
        LLM(tmp_path, load_format="dummy", num_blocks=16, tensor_parallel_size=4, **SETTINGS)
    bare_model(tmp_path, GPT2)
    with pytest.raises(ConfigError, match="computed by transformers, on one device only") as refused:
        LLM(tmp_path, load_format="dummy", num_blocks=16, tensor_parallel_size=2, **SETTINGS)
    assert refused.value.field == "tensor_parallel_size"
