"""SmolLM2 on a GPU: the tokens of transformers in fp32, and bf16 log-probabilities as close to fp32 as theirs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from common.types import SamplingParams
from engine.llm import LLM, Completion
from tests.rigs.stack.prompts import prompt_of

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LENGTHS = (1, 2, 5, 9, 15, 16, 17, 31, 33, 48, 64, 65, 100, 127, 128, 200, 257, 333, 400, 600)
#: Logits closer than this may be in either order.
NEAR_TIE = 1e-4
SLACK = 1.05


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """Disables TF32 in the reference."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def prompts(model_dir: Path) -> list[list[int]]:
    return [prompt_of(model_dir, length, seed) for seed, length in enumerate(LENGTHS)]


def complete(model_dir: Path, dtype: str, params: SamplingParams) -> list[Completion]:
    llm = LLM(model_dir, device=DEVICE, dtype=dtype, kv_memory=1 << 30, max_model_len=1024, chunk_tokens=256)
    return llm.generate(prompts(model_dir), params, ignore_eos=True)


def logits(model_dir: Path, dtype: torch.dtype, completions: list[Completion]) -> list[Tensor]:
    """Computes the logits of transformers at each token of each completion, float32[tokens, vocab]."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).to(DEVICE).eval()
    found = []
    with torch.inference_mode():
        for completion in completions:
            text = torch.tensor([[*completion.prompt_ids, *completion.ids]], device=DEVICE)
            found.append(model(text).logits[0, len(completion.prompt_ids) - 1 : -1].float())
    return found


def test_fp32_gives_the_greedy_tokens_of_transformers(smollm2_dir: Path) -> None:
    completions = complete(smollm2_dir, "float32", SamplingParams(temperature=0.0, max_tokens=32, logprobs=0))
    for completion, expected in zip(completions, logits(smollm2_dir, torch.float32, completions), strict=True):
        best = expected.topk(2)
        for i, token in enumerate(completion.tokens):
            near = float(best.values[i, 0] - best.values[i, 1]) < NEAR_TIE
            assert token.id == int(best.indices[i, 0]) or near, f"prompt of {len(completion.prompt_ids)}, token {i}"
            assert token.logprob == pytest.approx(float(expected[i].log_softmax(-1)[token.id]), abs=1e-3)


def test_bf16_is_no_further_from_fp32_than_transformers_is(
    smollm2_dir: Path, record_property: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compares the mean distance of log-probabilities over the 8 best fp32 tokens of every position.

    Tokens that are not among our 20 best are left out. Comparing our own 20 best would favour transformers.
    """
    completions = complete(smollm2_dir, "bfloat16", SamplingParams(temperature=0.0, max_tokens=12, logprobs=20))
    exact = logits(smollm2_dir, torch.float32, completions)
    theirs = logits(smollm2_dir, torch.bfloat16, completions)
    distances: dict[str, list[float]] = {"ours": [], "transformers": []}
    for completion, want, other in zip(completions, exact, theirs, strict=True):
        for i, token in enumerate(completion.tokens):
            known = {top.token: top.logprob for top in token.top}
            ids = [best for best in want[i].topk(8).indices.tolist() if best in known]
            at = want[i].log_softmax(-1)[ids]
            ours = torch.tensor([known[best] for best in ids], device=DEVICE)
            distances["ours"] += (ours - at).abs().tolist()
            distances["transformers"] += (other[i].log_softmax(-1)[ids] - at).abs().tolist()
    mean = {name: sum(values) / len(values) for name, values in distances.items()}
    for name, value in mean.items():
        record_property(f"logprob_distance_{name}", value)
    with capsys.disabled():
        print(
            f"\nbf16 log-probabilities, mean distance from fp32: ours {mean['ours']:.5f}, "
            f"transformers {mean['transformers']:.5f}"
        )
    assert mean["ours"] <= mean["transformers"] * SLACK
