"""Adapters on a GPU in fp32, with and without CUDA graphs: a mixed batch answers like models with merged weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.llm import LLM
from tests.lora.lora_rig import LAYER_MODULES, NAMES, Oracle, answers, make_llm, make_oracle
from tests.rigs.engine.tiny_models import tiny_prompt

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CASE = {"model_type": "llama", "head_dim": 32, "hidden_size": 128, "intermediate_size": 256}
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"seed": 1},
    "some": {"seed": 2, "modules": LAYER_MODULES[::2], "rank": 20, "rslora": True},
    "patterns": {"seed": 3, "modules": (*LAYER_MODULES, "lm_head", "embed_tokens"), "ranks": {"gate_proj": 60}},
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_oracle(tmp_path_factory.mktemp("lora"), CASE, ADAPTERS)


@pytest.fixture(
    scope="module",
    params=[
        {},
        {"cuda_graphs": False},
        {"speculation": "ngram"},
        {"max_adapters": 1},
        pytest.param({"tensor_parallel_size": 2, "max_adapters": 2}, marks=TWO_GPUS),
    ],
    ids=["graphs", "no graphs", "ngram", "one slot", "two ranks"],
)
def llm(request: pytest.FixtureRequest, oracle: Oracle) -> Iterator[LLM]:
    settings = {"device": "cuda", "block_size": 16, "chunk_tokens": 64, "max_seqs": 16}
    made = make_llm(oracle, **(settings | request.param))
    yield made
    made.engine.close()


@torch.inference_mode()
def test_a_mixed_batch_is_exact(oracle: Oracle, llm: LLM) -> None:
    names = NAMES * 3
    prompts = [tiny_prompt(8 + 9 * (i % 5), seed=i // 4) for i in range(len(names))]
    for _ in range(2):
        for name, completion in zip(names, answers(llm, names, prompts, max_tokens=12), strict=True):
            oracle.check(completion, name)


def test_prompt_logprobs_and_single_requests(oracle: Oracle, llm: LLM) -> None:
    for name in NAMES:
        (completion,) = answers(llm, [name], [tiny_prompt(30, seed=11)], max_tokens=6, n=1)
        oracle.check(completion, name)
        for child in answers(llm, [name], [tiny_prompt(30, seed=11)], max_tokens=6, n=2):
            oracle.check(child, name)


def test_prompts_of_more_tokens_than_a_graph(tmp_path: Path) -> None:
    oracle = make_oracle(tmp_path, CASE | {"max_position_embeddings": 2048}, ADAPTERS)
    llm = make_llm(oracle, device="cuda", block_size=16, max_seqs=8, num_blocks=600, chunk_tokens=0)
    prompts = [tiny_prompt(length, seed=length) for length in (1500, 700, 1500, 40)]
    for name, completion in zip(NAMES, answers(llm, NAMES, prompts, max_tokens=4), strict=True):
        oracle.check(completion, name)
