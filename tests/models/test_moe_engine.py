"""The engine with native mixtures of experts: tokens and log-probabilities equal transformers.

Prompts in chunks and batches, prefix hits, preemptions, speculation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.types import SamplingParams
from engine.llm import LLM, Completion
from engine.models.loader import open_model
from engine.models.spec import ModelSpec
from tests.rigs.engine.tiny_models import MOE_CASES, save_reference

torch.set_num_threads(1)
BLOCK, CHUNK = 4, 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, logprobs=0)
SETTINGS: dict[str, Any] = {"device": "cpu", "block_size": BLOCK, "chunk_tokens": CHUNK, "threads": 1}


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, 160, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def equal_reference(reference: Any, completions: list[Completion]) -> None:
    """Asserts that each completion is the greedy answer of the reference, with its log-probabilities."""
    for completion in completions:
        text = [*completion.prompt_ids, *completion.ids]
        with torch.inference_mode():
            logprobs = reference(torch.tensor([text])).logits[0, len(completion.prompt_ids) - 1 : -1].log_softmax(-1)
        assert completion.ids == logprobs.argmax(-1).tolist()
        chosen = [float(row[token.id]) for row, token in zip(logprobs, completion.tokens, strict=True)]
        assert [token.logprob for token in completion.tokens] == pytest.approx(chosen, abs=1e-4)


@pytest.mark.parametrize("family", MOE_CASES)
def test_tokens_and_logprobs_equal_transformers(family: str, tmp_path: Path) -> None:
    reference = save_reference(tmp_path, MOE_CASES[family])
    # The three at once need more blocks than there are: one of them is preempted and computed again.
    llm = LLM(tmp_path, num_blocks=34, **SETTINGS)
    assert isinstance(open_model(tmp_path).spec, ModelSpec)
    prompts = [prompt(n, seed=n) for n in (37, 50, 23)]
    done = llm.generate(prompts, GREEDY, ignore_eos=True)
    assert llm.engine.scheduler.stats().preemptions > 0
    again = llm.generate([prompts[0], [*prompts[0][:20], 5, 6]], GREEDY, ignore_eos=True)
    assert again[0].ids == done[0].ids
    assert [c.cached_tokens for c in again] == [36, 20]
    llm.engine.pool.check_integrity()
    equal_reference(reference, [*done, *again])


@pytest.mark.parametrize("family", ["glm4-moe", "gpt-oss"])
def test_drafts_change_no_token(family: str, tmp_path: Path) -> None:
    reference = save_reference(tmp_path, MOE_CASES[family])
    llm = LLM(tmp_path, num_blocks=64, speculation="ngram", **SETTINGS)
    done = llm.generate([prompt(5, seed=1) * 5, prompt(30, seed=2)], GREEDY, ignore_eos=True)
    assert llm.engine.speculator is not None
    assert llm.engine.speculator.stats.proposed > 0
    equal_reference(reference, done)
