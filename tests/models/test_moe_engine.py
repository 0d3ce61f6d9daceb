"""The engine with native mixtures of experts: tokens and log-probabilities equal transformers.

Prompts in chunks and batches, prefix hits, preemptions, speculation.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.types import SamplingParams
from engine.llm import LLM
from engine.models.loader import open_model
from engine.models.spec import ModelSpec
from tests.rigs.engine.known_answer_proposer import Guesses
from tests.rigs.engine.tiny_models import MOE_CASES, TINY_ENGINE, assert_greedy, save_reference, tiny_prompt

torch.set_num_threads(1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, logprobs=0)


@pytest.mark.parametrize("family", MOE_CASES)
def test_tokens_and_logprobs_equal_transformers(family: str, tmp_path: Path) -> None:
    reference = save_reference(tmp_path, MOE_CASES[family])
    # The three at once need more blocks than there are: one of them is preempted and computed again.
    # tests/kv_groups has the same with KV groups.
    llm = LLM(tmp_path, num_blocks=34, kv_groups=False, **TINY_ENGINE)
    assert isinstance(open_model(tmp_path).spec, ModelSpec)
    prompts = [tiny_prompt(n, seed=n) for n in (37, 50, 23)]
    done = llm.generate(prompts, GREEDY, ignore_eos=True)
    assert llm.engine.scheduler.stats().preemptions > 0
    again = llm.generate([prompts[0], [*prompts[0][:20], 5, 6]], GREEDY, ignore_eos=True)
    assert again[0].ids == done[0].ids
    assert [c.cached_tokens for c in again] == [36, 20]
    llm.engine.pool.check_integrity()
    for completion in (*done, *again):
        assert_greedy(reference, completion.prompt_ids, completion.tokens)


@pytest.mark.parametrize("family", MOE_CASES)
def test_drafts_change_no_token(family: str, tmp_path: Path) -> None:
    reference = save_reference(tmp_path, MOE_CASES[family])
    llm = LLM(tmp_path, num_blocks=64, speculation="ngram", **TINY_ENGINE)
    prompts = [tiny_prompt(25, seed=1), tiny_prompt(30, seed=2)]
    llm.engine.set_proposer(None)
    answers = llm.generate(prompts, GREEDY, ignore_eos=True)
    known = {f"local-{3 + i}": answer.ids for i, answer in enumerate(answers)}
    llm.engine.set_proposer(Guesses(known, vocab=160))
    done = llm.generate(prompts, GREEDY, ignore_eos=True)
    assert llm.engine.speculator is not None
    assert 0 < llm.engine.speculator.stats.accepted < llm.engine.speculator.stats.proposed
    for completion in done:
        assert_greedy(reference, completion.prompt_ids, completion.tokens)
