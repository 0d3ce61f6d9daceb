"""Requests for n samples in an engine: each child equals a request of its own, and the prompt is computed once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.errors import InvalidRequest
from common.types import FinishReason, SamplingParams, ValidRequest
from engine.llm import LLM
from tests.integration.test_engine import BLOCK, CHUNK, VOCAB, clean, make, prompt, tiny_dir

__all__ = ["tiny_dir"]

torch.set_num_threads(1)
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=9, n=4, logprobs=1)


def alone(llm: LLM, ids: list[int], params: SamplingParams, child: int) -> list[int]:
    """The tokens of a request for one sample that uses the noise of this child."""
    seq = llm.engine.new_sequence(ValidRequest(f"c{child}", "tiny", tuple(ids), replace(params, n=1)), child=child)
    llm.engine.add(seq)
    while llm.engine.has_work:
        llm.engine.step()
    return seq.output


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
def test_each_child_equals_a_request_of_its_own(tiny_dir: Path, length: int) -> None:
    reference = make(tiny_dir)
    expected = [alone(reference, prompt(length), SAMPLED, child) for child in range(4)]
    assert reference.generate([prompt(length)], replace(SAMPLED, n=1), ignore_eos=True)[0].ids == expected[0]
    assert len({tuple(ids) for ids in expected}) > 1
    for overlap in (False, True):
        llm = make(tiny_dir, overlap=overlap)
        got = llm.generate([prompt(length)], SAMPLED, ignore_eos=True)
        assert [c.ids for c in got] == expected
        assert [c.child for c in got] == [0, 1, 2, 3]
        assert llm.engine.counters.prompt_tokens == length
        assert all(token.logprob is not None and len(token.top) == 1 for c in got for token in c.tokens)
        clean(llm.engine)


def test_preemptions_and_other_requests_change_no_token_of_children(tiny_dir: Path) -> None:
    kinds = [
        {"temperature": 0.0, "n": 3},
        {"temperature": 0.9, "n": 5, "top_p": 0.9},
        {"temperature": 0.7, "n": 2, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"temperature": 1.0, "n": 4, "stop_token_ids": tuple(range(0, VOCAB, 4))},
    ]
    params = [SamplingParams(**({"max_tokens": 14, "seed": i} | kind)) for i, kind in enumerate(kinds)]
    prompts = [prompt(length, seed=length) for length in (3, 17, 33, 16)]
    roomy = make(tiny_dir)
    expected = [c.ids for p, q in zip(prompts, params, strict=True) for c in roomy.generate([p], q)]
    for config in ({"num_blocks": 29}, {"max_seqs": 3}, {"num_blocks": 29, "overlap": True}):
        llm = make(tiny_dir, **config)
        assert [c.ids for c in llm.generate(prompts, params)] == expected
        assert (llm.engine.scheduler.stats().preemptions > 0) == ("num_blocks" in config)
        clean(llm.engine)


def test_first_tokens_that_end_some_children(tiny_dir: Path) -> None:
    llm = make(tiny_dir)
    free = llm.generate([prompt(10)], SAMPLED)
    stop = free[2].ids[0]
    got = llm.generate([prompt(10)], replace(SAMPLED, stop_token_ids=(stop,)))
    for child, completion in enumerate(got):
        ids = free[child].ids
        assert completion.ids == (ids[: ids.index(stop) + 1] if stop in ids else ids)
    assert (got[2].finish, len(got[2].ids)) == (FinishReason.STOP, 1)
    one = llm.generate([prompt(10)], replace(SAMPLED, max_tokens=1))
    assert [c.ids for c in one] == [c.ids[:1] for c in free]
    clean(llm.engine)


def test_children_with_a_grammar_are_constrained_separately(tiny_dir: Path) -> None:
    llm = make(tiny_dir)
    allowed = tuple(range(20, 60))
    got = llm.generate([prompt(10)], replace(SAMPLED, allowed_token_ids=allowed, bad_words=((33,), (21, 22))))
    assert len({tuple(c.ids) for c in got}) > 1
    assert all(set(c.ids) <= set(allowed) - {33} for c in got)
    clean(llm.engine)


def test_n_that_never_fits_is_named(tiny_dir: Path) -> None:
    llm = make(tiny_dir, num_blocks=20)
    for n in (0, 19, 129):
        with pytest.raises(InvalidRequest) as refused:
            llm.generate([prompt(9)], replace(SAMPLED, n=n))
        assert refused.value.field == "n"
    clean(llm.engine)
