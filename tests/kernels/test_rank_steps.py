"""Steps of several ranks from graphs give the tokens of one rank. `fake_graphs` has graphs and ranks on a CPU."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from common.errors import InternalError
from common.types import SamplingParams
from engine.llm import LLM
from engine.parallel import graphs
from engine.speculation.controller import AlwaysDraft
from tests.lora.lora_rig import answers, make_llm, make_oracle
from tests.rigs.engine.bare_model import LLAMA, bare_model
from tests.rigs.engine.draft_models import draft_settings, tiny_target
from tests.rigs.engine.tiny_models import tiny_prompt
from tests.rigs.parallel.fake_graphs import fake_graphs
from tests.rigs.parallel.thread_ranks import ThreadRanks, thread_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_tensor_parallel_graphs_cuda.py has real graphs")

SMALL = LLAMA | {"head_dim": 16, "vocab_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
SETTINGS: dict[str, Any] = {"device": "cpu", "load_format": "dummy", "block_size": 4, "max_model_len": 32, "threads": 1}
SETTINGS |= {"max_seqs": 2, "chunk_tokens": 8, "num_blocks": 64, "dtype": "float32"}


@pytest.fixture
def messages() -> Iterator[list[tuple[str, Any]]]:
    with fake_graphs() as told:
        yield told


@pytest.fixture
def ranks() -> Iterator[ThreadRanks]:
    with thread_ranks() as started:
        yield started


def plain(model_dir: Path, **options: Any) -> LLM:
    return LLM(model_dir, **(SETTINGS | options))


def group(model_dir: Path, **options: Any) -> LLM:
    """Returns an engine of two ranks with captured graphs."""
    own: dict[str, Any] = {"tensor_parallel_size": 2, "tensor_parallel_graphs": True, "overlap": True}
    llm = LLM(model_dir, **(SETTINGS | own | options))
    llm.engine.runner.capture()
    return llm


def prompts() -> list[list[int]]:
    return [[(7 * i + 3 * n) % 48 for i in range(n)] for n in (1, 11, 6)]


def params() -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0.0, max_tokens=5, logprobs=1),
        SamplingParams(seed=3, max_tokens=4, repetition_penalty=1.3),
        SamplingParams(temperature=0.0, max_tokens=6),
    ]


MOE = {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 16, "num_experts": 4}
MOE |= {"num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {"host_cache": 1 << 20}),
    "fp8 KV and few blocks": ({}, {"kv_dtype": "fp8_e4m3", "num_blocks": 5}),
    "experts": (MOE, {"expert_parallel": True}),
    "four ranks": ({}, {"tensor_parallel_size": 4}),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_one_rank(
    case: str, tmp_path: Path, messages: list[tuple[str, Any]], ranks: ThreadRanks
) -> None:
    config, options = CASES[case]
    model_dir = bare_model(tmp_path / "model", SMALL | config)
    llm, alone = group(model_dir, **options), plain(model_dir, kv_dtype=options.get("kv_dtype", "auto"))
    try:
        captured = [name for kind, name in messages if kind == "capture"]
        assert len(set(captured)) == len(captured) > 3
        del messages[:]
        for extra in ([], [5]):  # the second time with cached prefixes
            asked = [[*prompt, *extra] for prompt in prompts()]
            found = llm.generate(asked, params(), ignore_eos=True)
            for left, right in zip(found, alone.generate(asked, params(), ignore_eos=True), strict=True):
                assert (left.error, left.ids) == (None, right.ids)
        kinds = Counter(kind for kind, _ in messages)
        assert kinds["replay"] > 5
        assert not kinds["device_step"] + kinds["capture"]
        assert {name for _, name in messages} <= set(captured)
        llm.engine.pool.check_integrity()
        assert options.get("num_blocks") is None or llm.engine.scheduler.stats().preemptions
    finally:
        llm.engine.close()
    ranks.join()


@pytest.mark.parametrize("kind", [pytest.param("draft_model", marks=pytest.mark.long), "eagle"])
def test_drafts(kind: str, tmp_path: Path, messages: list[tuple[str, Any]], ranks: ThreadRanks) -> None:
    """Rank 0 alone drafts; the other ranks compute the drafts that it sends."""
    target = tiny_target(tmp_path / "target")
    options = {**draft_settings(target, tmp_path)[kind], "speculation_tokens": 2, "load_format": "auto"}
    llm, alone = group(target, **options), plain(target, **options)
    try:
        for one in (llm.engine, alone.engine):
            one.set_proposer(one.configured_proposer(), AlwaysDraft(2))
        del messages[:]
        asked = [[3, 4, 5, 3, 4, 5, 3], [7, 8, 9]]
        greedy = SamplingParams(temperature=0.0, max_tokens=7)
        found, expected = llm.generate(asked, greedy, ignore_eos=True), alone.generate(asked, greedy, ignore_eos=True)
        assert [c.ids for c in found] == [c.ids for c in expected]
        assert {kind for kind, _ in messages} == {"replay"}
        ours = llm.engine.speculator
        assert ours is not None
        assert ours.stats.proposed
        assert any("3 tokens" in name for _, name in messages)
    finally:
        llm.engine.close()
    ranks.join()


def test_adapters(tmp_path: Path, messages: list[tuple[str, Any]], ranks: ThreadRanks) -> None:
    """Steps with adapters and without have graphs of their own. All answers are those of merged models."""
    kinds = {"all": {"seed": 1}, "other": {"seed": 2, "rank": 3}}
    oracle = make_oracle(tmp_path, {"model_type": "llama", "num_hidden_layers": 1}, kinds)
    own: dict[str, Any] = {"tensor_parallel_size": 2, "tensor_parallel_graphs": True, "overlap": True}
    llm = make_llm(oracle, **own, max_seqs=2, chunk_tokens=8, max_model_len=32, num_blocks=40)
    try:
        llm.engine.runner.capture()
        cases: list[list[str | None]] = [[None, None], ["all", None], ["other", "all"]]
        for names in cases:
            del messages[:]
            prompts = [tiny_prompt(n, seed=n) for n in (5, 9)]
            for name, completion in zip(names, answers(llm, names, prompts, max_tokens=4), strict=True):
                oracle.check(completion, name)
            assert {kind for kind, _ in messages} == {"replay"}
            assert any("adapters" in name for _, name in messages) == any(names)
    finally:
        llm.engine.close()
    ranks.join()


def test_a_rank_that_never_ends_its_capture_ends_the_start(
    tmp_path: Path, messages: list[tuple[str, Any]], ranks: ThreadRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, capture = threading.Event(), graphs.RankGraphs.capture

    def hang(self: graphs.RankGraphs, message: Any) -> None:
        capture(self, message)
        release.wait(30.0)

    monkeypatch.setattr(graphs.RankGraphs, "capture", hang)
    monkeypatch.setattr(graphs, "CAPTURE_S", 0.2)
    with pytest.raises(InternalError, match=r"ranks \[1\] sent no answer within 0.2 s"):
        group(bare_model(tmp_path / "model", SMALL))
    release.set()
    ranks.threads[0].join(30.0)
    assert [kind for kind, _ in messages].count("capture") == 1


def test_a_rank_that_fails_while_it_captures_ends_the_start(
    tmp_path: Path, messages: list[tuple[str, Any]], ranks: ThreadRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has recorded its graph, and then learns why the other rank has none."""
    capture = graphs.RankGraphs.capture

    def fail(self: graphs.RankGraphs, message: Any) -> None:
        if message.fields["name"] == "decode: 1 rows of 1 tokens":
            capture(self, message)  # computes, so that rank 0 does not wait for a sum
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        capture(self, message)

    monkeypatch.setattr(graphs.RankGraphs, "capture", fail)
    with pytest.raises(InternalError, match=r"rank 1 failed: .*CUDA out of memory"):
        group(bare_model(tmp_path / "model", SMALL))
    assert [name for kind, name in messages if kind == "capture"][-1] == "decode: 1 rows of 1 tokens"
    ranks.threads[0].join(30.0)
    assert isinstance(ranks.errors[0], torch.OutOfMemoryError)


def test_a_step_whose_rank_was_lost_has_no_result(
    tmp_path: Path, messages: list[tuple[str, Any]], ranks: ThreadRanks
) -> None:
    """A sum that a lost rank has ended may be wrong. Its step fails, although its tokens have arrived."""
    llm = group(bare_model(tmp_path / "model", SMALL))
    engine = llm.engine
    assert engine.rank_group is not None
    collect = engine.runner.collect

    def lose(step: Any) -> Any:
        assert engine.rank_group is not None
        engine.rank_group.fail("rank 1 was lost")
        return collect(step)

    engine.runner.collect = lose  # type: ignore[method-assign]
    found = llm.generate(prompts()[:1], params()[0], ignore_eos=True)[0]
    assert "rank 1" in str(found.error)
    assert not found.ids
    engine.close()
    ranks.threads[0].join(30.0)
