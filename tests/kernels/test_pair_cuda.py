"""A prefill and a decode pod, on two GPUs if there are two, give the tokens of one engine in fp32."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import torch

from benchmarks.support.pd_stack import FLAGS, make_model, prompts, running, transport_of
from common.types import SamplingParams
from engine.llm import LLM

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LENGTHS = (1, 15, 16, 17, 300, 1024, 2049, 4096, 7000)
OUTPUT = 24


async def test_tokens_equal_one_engines_and_kv_goes_over_cuda_ipc(tmp_path: Path) -> None:
    batch = [prompt for length in LENGTHS for prompt in prompts("small", 1, length, seed=3)]
    async with running("small", "auto", dtype="float32", flags=FLAGS) as (stack, client):
        alone = [await client.ask(prompt, OUTPUT) for prompt in batch]
        salted = [list(reversed(prompt)) for prompt in batch]
        together = await asyncio.gather(*(client.ask(prompt, OUTPUT) for prompt in salted))
        connections = transport_of(stack)
        assert connections
        assert all("over cuda_ipc" in line for line in connections)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    make_model(tmp_path, "small")
    llm = LLM(tmp_path, device="cuda", dtype="float32", load_format="dummy", kv_memory=2 << 30, max_model_len=8192)
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT)
    for requests, answers in ((batch, alone), (salted, together)):
        expected = [done.ids for done in llm.generate(requests, params, ignore_eos=True)]
        assert [answer.ids for answer in answers] == expected
