"""Speculation on a GPU changes no token in fp32: all proposers, 50 mixed requests, graphs, few blocks, hand-offs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.types import SamplingParams, ValidRequest
from engine.engine import Engine
from engine.llm import LLM
from engine.schedule.outputs import StepResult
from engine.speculation.controller import AlwaysDraft
from tests.rigs.engine.draft_models import disturbed, eagle_head, tiny_target

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

VOCAB, REQUESTS = 48, 50
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "logprobs": 2},
    {"temperature": 0.6, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 4, "min_p": 0.05},
    {"temperature": 0.5, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    {"temperature": 0.0, "logit_bias": ((5, 2.0), (7, 1.5)), "min_tokens": 9, "stop_token_ids": tuple(range(40))},
    {"temperature": 0.8, "allowed_token_ids": tuple(range(5, 12))},
]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), vocab=VOCAB, layers=3)


@pytest.fixture(scope="module")
def drafting(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("drafts")
    aux_layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    return {
        "ngram": {"speculation": "ngram"},
        "suffix": {"speculation": "suffix"},
        "draft_model": {"speculation": "draft_model", "speculation_model": disturbed(target_dir, root / "model")},
        "eagle": {"speculation": "eagle", "speculation_model": eagle_head(root / "eagle", vocab=VOCAB)},
        "eagle3": {
            "speculation": "eagle",
            "speculation_model": eagle_head(root / "eagle3", vocab=VOCAB, fuses=True, draft_vocab=24, **aux_layers),
        },
    }


def make(target_dir: Path, **config: Any) -> LLM:
    defaults: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "block_size": 4,
        "num_blocks": 400,
        "chunk_tokens": 64,
        "max_seqs": 12,
    }
    return LLM(target_dir, **(defaults | config))


def load() -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = [[3 + (7 * i + j % (1 + i % 7)) % (VOCAB - 3) for j in range(1 + (i * 5) % 37)] for i in range(REQUESTS)]
    params = [SamplingParams(**({"max_tokens": 10 + i % 23, "seed": 7 * i} | KINDS[i % 7])) for i in range(REQUESTS)]
    return prompts, params


@pytest.fixture(scope="module")
def expected(target_dir: Path) -> list[list[int]]:
    """The tokens of a CPU without speculation."""
    llm = make(target_dir, device="cpu", threads=4)
    return [answer.ids for answer in llm.generate(*load(), ignore_eos=True, show_progress=False)]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("blocks", [400, 60])
@pytest.mark.parametrize("proposer", ["ngram", "suffix", "draft_model", "eagle", "eagle3"])
def test_no_token_changes(
    proposer: str, blocks: int, graphs: bool, target_dir: Path, drafting: dict[str, Any], expected: list[list[int]]
) -> None:
    llm = make(target_dir, **drafting[proposer], num_blocks=blocks, cuda_graphs=graphs)
    llm.engine.set_proposer(llm.engine.configured_proposer(), AlwaysDraft(4))
    got = [answer.ids for answer in llm.generate(*load(), ignore_eos=True, show_progress=False)]
    assert got == expected
    assert llm.engine.speculator is not None
    stats = llm.engine.speculator.stats
    assert 0 < stats.accepted < stats.proposed
    assert stats.failures == 0
    assert blocks == 400 or llm.engine.scheduler.stats().preemptions > 0
    llm.engine.pool.check_integrity()
    if llm.engine.runner.draft_loop is not None:
        assert (llm.engine.runner.draft_graphs is not None) == graphs


def handed_over(first: Engine, second: Engine) -> list[list[int]]:
    """Computes prompts in the first engine and decodes in the second, with copied blocks. Returns the answers."""
    answers: dict[str, list[int]] = {}
    moved: list[tuple[ValidRequest, list[bytes]]] = []

    def copy_blocks(result: StepResult) -> None:
        for output in result.outputs:
            seq = output.seq
            answers.setdefault(seq.request_id, []).extend(token.id for token in output.tokens)
            if output.handed_off and output.finish_reason is None:
                assert seq.lease is not None
                blocks = seq.lease.blocks[: first.layout.blocks_for(seq.prompt_len)]
                moved.append((seq.request, [first.kv.read_block(block) for block in blocks]))

    for i, (ids, params) in enumerate(zip(*load(), strict=True)):
        first.add(first.new_sequence(ValidRequest(f"{i}", "m", tuple(ids), params), hand_off=True))
    while first.has_work:
        first.step(copy_blocks)
    while moved or second.has_work:
        while moved:
            request, contents = moved[0]
            lease = second.pool.lease([], second.layout.blocks_for(request.prompt_len + 1), keep_free=6)
            if lease is None:
                break
            for block, content in zip(lease.blocks, contents, strict=False):
                second.kv.write_block(block, content)
            output = answers[request.request_id]
            second.add(second.new_sequence(request, output=output, lease=lease, computed=request.prompt_len))
            del moved[0]
        for out in second.step().outputs:
            assert out.error is None
            answers[out.seq.request_id] += [token.id for token in out.tokens]
    return [answers[f"{i}"] for i in range(REQUESTS)]


@pytest.mark.parametrize("proposer", ["ngram", "suffix", "draft_model", "eagle", "eagle3"])
def test_no_token_changes_after_a_hand_off(
    proposer: str, target_dir: Path, drafting: dict[str, Any], expected: list[list[int]]
) -> None:
    first, second = (make(target_dir, **drafting[proposer], num_blocks=blocks).engine for blocks in (400, 60))
    second.set_proposer(second.configured_proposer(), AlwaysDraft(4))
    assert handed_over(first, second) == expected
    assert second.counters.prompt_tokens == 0
    assert second.scheduler.stats().preemptions > 0
    assert second.speculator is not None
    assert 0 < second.speculator.stats.accepted < second.speculator.stats.proposed
    assert second.speculator.stats.failures == 0


@pytest.mark.parametrize("proposer", ["draft_model", "eagle3"])
def test_rejection_sampling_of_greedy_requests_changes_nothing(
    proposer: str, target_dir: Path, drafting: dict[str, Any], expected: list[list[int]]
) -> None:
    llm = make(target_dir, **drafting[proposer], speculation_accept="rejection")
    llm.engine.set_proposer(llm.engine.configured_proposer(), AlwaysDraft(4))
    prompts, params = load()
    answers = llm.generate(prompts, params, ignore_eos=True, show_progress=False)
    for answer, ids, sampling in zip(answers, expected, params, strict=True):
        assert answer.error is None
        assert not sampling.greedy or answer.ids == ids
    assert llm.engine.speculator is not None
    assert 0 < llm.engine.speculator.stats.accepted < llm.engine.speculator.stats.proposed


@pytest.mark.parametrize("proposer", ["draft_model", "eagle3"])
def test_memory_is_sized_with_the_draft_model(proposer: str, target_dir: Path, drafting: dict[str, Any]) -> None:
    """The pool takes the remaining memory, in bfloat16 with e4m3 KV."""
    llm = make(
        target_dir,
        **drafting[proposer],
        dtype="bfloat16",
        kv_dtype="fp8_e4m3",
        block_size=64,
        num_blocks=0,
        gpu_memory_utilization=0.05,
    )
    answers = llm.generate(*load(), ignore_eos=True, show_progress=False)
    assert all(answer.error is None for answer in answers)
    assert llm.engine.speculator is not None
    assert llm.engine.speculator.stats.failures == 0
