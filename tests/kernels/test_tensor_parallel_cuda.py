"""Two GPUs, or the second GPU alone, give the tokens of the first: NCCL, Triton attention, overlapping steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.types import SamplingParams
from engine.llm import LLM
from tests.rigs.pods.harness import prompt_of, tiny_llama

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_tokens_of_two_gpus_are_those_of_one(kv_dtype: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"device": "cuda", "dtype": "float32", "kv_dtype": kv_dtype, "cuda_graphs": False}
    settings |= {"block_size": 16, "num_blocks": 64, "max_seqs": 8, "chunk_tokens": 64}
    prompts = [prompt_of(n, seed=n) for n in (1, 17, 70, 100)]
    params = [SamplingParams(temperature=0.0, max_tokens=12, logprobs=2), SamplingParams(seed=3, max_tokens=12)] * 2
    one = LLM(tiny_llama(tmp_path), **settings)
    two = LLM(tmp_path, tensor_parallel_size=2, **settings)
    expected = one.generate(prompts, params, ignore_eos=True)
    for left, right in zip(expected, two.generate(prompts, params, ignore_eos=True), strict=True):
        assert (right.error, right.ids) == (None, left.ids)
        for a, b in zip(left.tokens, right.tokens, strict=True):
            assert a.logprob is None or b.logprob == pytest.approx(a.logprob, abs=1e-3)
    again = two.generate([prompts[2]], params[0], ignore_eos=True)[0]
    assert (again.ids, again.cached_tokens) == (expected[2].ids, 64)
    two.engine.close()


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_a_gpu_that_is_not_the_first_computes_too(cuda_graphs: bool, tmp_path: Path) -> None:
    """Steps run on their own thread, and the current device of a new thread is the first GPU."""
    settings: dict[str, Any] = {"dtype": "float32", "block_size": 16, "num_blocks": 64, "max_seqs": 8}
    settings |= {"cuda_graphs": cuda_graphs, "host_cache": 1 << 24}
    tiny_llama(tmp_path)
    params = [SamplingParams(temperature=0.0, max_tokens=12), SamplingParams(seed=3, max_tokens=12)]
    prompts = [prompt_of(n, seed=n) for n in (17, 100)]
    done: list[list[list[int]]] = []
    for device in ("cuda:0", "cuda:1"):
        with torch.cuda.device(0):
            llm = LLM(tmp_path, device=device, **settings)
        done.append([c.ids for c in llm.generate(prompts, params, ignore_eos=True)])
        llm.engine.close()
    assert done[0] == done[1]
