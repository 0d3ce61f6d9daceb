"""A batch that mixes the base and adapters answers row by row like models with merged weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cli.demo.adapter import write_random_adapter
from common.errors import ConfigError, InvalidRequest
from common.grammar.compiler import from_regex
from common.types import SamplingParams
from engine.adapters.ops import AdapterOps
from engine.llm import LLM
from tests.lora.lora_rig import (
    ADAPTERS,
    LAYER_MODULES,
    NAMES,
    Oracle,
    answers,
    make_llm,
    make_oracle,
    merge,
    save_adapter,
)
from tests.rigs.engine.draft_models import BYTES, byte_tokenizer, draft_settings, tiny_target
from tests.rigs.engine.tiny_models import MOE_CASES, TINY_ENGINE, tiny_prompt


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_oracle(tmp_path_factory.mktemp("lora"), {"model_type": "llama"}, ADAPTERS)


@pytest.fixture(scope="module")
def llm(oracle: Oracle) -> Iterator[LLM]:
    made = make_llm(oracle)
    yield made
    made.engine.close()


def test_a_mixed_batch_is_exact_in_chunks_and_after_prefix_hits(oracle: Oracle, llm: LLM) -> None:
    """Prompts of 40 tokens are computed in three chunks; all four models have the same prompts."""
    names = NAMES * 2
    prompts = [tiny_prompt(40 if i < 4 else 5, seed=i // 4) for i in range(8)]
    first, again = (answers(llm, names, prompts) for _ in range(2))
    for name, completion in zip(names * 2, [*first, *again], strict=True):
        oracle.check(completion, name)
    assert len({tuple(c.ids) for c in first[:4]}) == 4, "the adapters change the answers"
    assert [c.cached_tokens for c in first] == [0] * 8, "no adapter has the KV of another"
    assert [c.cached_tokens for c in again] == [36] * 4 + [4] * 4


def test_prompt_logprobs_and_the_samples_of_a_prompt(oracle: Oracle, llm: LLM) -> None:
    prompt = tiny_prompt(21, seed=5)
    found = answers(llm, ["patterns", "patterns"], [prompt, prompt], n=3, temperature=0.0)
    for completion in found:
        oracle.check(completion, "patterns")
    sampled = {
        name: answers(llm, [name], [prompt], n=4, temperature=0.9, seed=3, logprobs=None) for name in ("all", "some")
    }
    again = answers(llm, ["some"], [prompt], n=4, temperature=0.9, seed=3, logprobs=None)
    assert [c.ids for c in again] == [c.ids for c in sampled["some"]]
    assert [c.ids for c in again] != [c.ids for c in sampled["all"]]


@pytest.mark.parametrize(
    "config",
    [
        {"num_blocks": 24},  # for four of eight sequences: preemption
        {"max_adapters": 1, "chunk_tokens": 32},  # one slot for three adapters
        {"speculation": "ngram"},
        {"speculation": "suffix", "max_adapters": 2},
        {"overlap": True},
    ],
    ids=["preemption", "one slot", "ngram", "suffix", "overlap"],
)
def test_mixed_batches_are_exact_with(config: dict[str, Any], oracle: Oracle) -> None:
    llm = make_llm(oracle, **config)
    names = NAMES * 3
    prompts = [tiny_prompt(6 + 3 * (i % 5), seed=i) * 2 for i in range(len(names))]
    for _ in range(2):
        for name, completion in zip(names, answers(llm, names, prompts, max_tokens=20), strict=True):
            oracle.check(completion, name)
    if config.get("num_blocks") == 24:
        assert llm.engine.scheduler.stats().preemptions > 0


def test_the_smallest_and_the_largest_rank(tmp_path: Path) -> None:
    options = {"one": {"seed": 1, "rank": 1}, "most": {"seed": 2, "rank": 256, "size": 0.05}}
    oracle = make_oracle(tmp_path, {"model_type": "llama"}, options)
    llm, names = make_llm(oracle, max_adapter_rank=256), [None, "one", "most"]
    for name, completion in zip(names, answers(llm, names, [tiny_prompt(19, seed=1)] * 3), strict=True):
        oracle.check(completion, name)


def test_a_batch_without_adapters_computes_nothing_of_them(
    oracle: Oracle, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = AdapterOps.__init__
    made = list[Any]()
    monkeypatch.setattr(AdapterOps, "__init__", lambda self, *args: made.append(init(self, *args)))
    prompts = [tiny_prompt(21, seed=seed) for seed in (31, 32)]
    for completion in answers(llm, [None, None], prompts):
        oracle.check(completion, None)
    assert not made
    oracle.check(answers(llm, ["all"], prompts[:1])[0], "all")
    assert made


@pytest.mark.parametrize("family", ["tied", "glm4-moe", "granite-moe"])
def test_other_families(family: str, tmp_path: Path) -> None:
    """Tied embeddings, attention beside experts, heads that rotate in part, and factors on the residual stream."""
    case = (
        {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True} if family == "tied" else MOE_CASES[family]
    )
    modules = (*(LAYER_MODULES if family == "tied" else LAYER_MODULES[:4]), "lm_head", "embed_tokens")
    oracle = make_oracle(tmp_path, case, {"one": {"seed": 4, "modules": modules}})
    llm = make_llm(oracle)
    prompts = [tiny_prompt(19, seed=i) for i in range(4)]
    for name, completion in zip([None, "one"] * 2, answers(llm, [None, "one"] * 2, prompts), strict=True):
        oracle.check(completion, name)


def test_draft_models_and_heads(tmp_path: Path) -> None:
    """They draft for the base: what an adapter says differently is rejected, and preemption changes nothing."""
    directory = tiny_target(tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    paths = {
        "weak": save_adapter(tmp_path / "weak", model, seed=1, size=0.05),
        "strong": save_adapter(tmp_path / "strong", model, seed=2),
    }
    oracle = Oracle(directory, paths, {None: model, **{name: merge(model, path) for name, path in paths.items()}})
    names: list[str | None] = [None, "weak", "strong"] * 2
    prompts = [torch.randint(3, 48, (9 + i,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(6)]
    for kind, settings in draft_settings(directory, tmp_path).items():
        if kind in ("draft_model", "eagle", "eagle3"):
            llm = make_llm(oracle, **settings, num_blocks=40)
            for name, completion in zip(names, answers(llm, names, prompts, max_tokens=16), strict=True):
                oracle.check(completion, name)
            llm.engine.close()


def test_a_quantised_base(oracle: Oracle) -> None:
    """The base's product may be rounded, the adapter's part is added to it: alone and in a batch the answer is one."""
    llm = make_llm(oracle, weights="int8")
    prompts = [tiny_prompt(11, seed=9)] * 4
    together = answers(llm, NAMES, prompts)
    alone = [answers(llm, [name], prompts[:1])[0] for name in NAMES]
    assert [c.ids for c in together] == [c.ids for c in alone]
    assert len({tuple(c.ids) for c in together}) == 4


def test_a_name_that_gets_another_adapter(oracle: Oracle) -> None:
    llm = make_llm(oracle, max_adapters=1)
    prompt = tiny_prompt(30, seed=2)
    llm.add_adapter(oracle.adapters["all"], "mine")
    oracle.check(answers(llm, ["mine"], [prompt])[0], "all")
    llm.add_adapter(oracle.adapters["some"], "mine")
    (completion,) = answers(llm, ["mine"], [prompt])
    oracle.check(completion, "some")
    assert completion.cached_tokens == 0, "the KV of the old adapter is not used"
    llm.add_adapter(oracle.adapters["all"], "mine")
    (completion,) = answers(llm, ["mine"], [prompt])
    oracle.check(completion, "all")
    assert completion.cached_tokens == 28, "the same content is the same adapter"
    llm.remove_adapter("mine")
    with pytest.raises(InvalidRequest, match="unknown adapter 'mine'"):
        answers(llm, ["mine"], [prompt])


def test_a_name_that_is_removed_while_requests_are_made(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread removes it after the call has read it: the call goes on with the adapter that it read."""
    llm = make_llm(oracle)
    make = llm.engine.new_sequence

    def remove_first(*args: Any, **kwargs: Any) -> Any:
        if "all" in llm.engine.adapters.all():
            llm.remove_adapter("all")
        return make(*args, **kwargs)

    monkeypatch.setattr(llm.engine, "new_sequence", remove_first)
    oracle.check(answers(llm, ["all"], [tiny_prompt(9, seed=1)])[0], "all")
    with pytest.raises(InvalidRequest, match="unknown adapter 'all'"):
        answers(llm, ["all"], [tiny_prompt(9, seed=1)])


def test_blocks_come_back_from_host_memory_for_their_adapter(oracle: Oracle) -> None:
    """The pool has room for one prompt, so each answer moves the blocks of the one before to host memory."""
    block_bytes = make_llm(oracle, num_blocks=24).engine.layout.block_bytes
    llm, prompt = make_llm(oracle, num_blocks=24, host_cache=200 * block_bytes, checksums=True), tiny_prompt(40, seed=3)
    for name in (*NAMES, *NAMES):
        oracle.check(answers(llm, [name], [prompt])[0], name)
        assert llm.engine.pool.host_tier is not None
        assert llm.engine.pool.host_tier.wait_idle(20.0)
    stats = llm.engine.pool.host_stats()
    assert stats is not None
    assert stats.loaded > 0
    llm.engine.close()


def test_answers_of_adapters_match_their_grammar(tmp_path: Path) -> None:
    directory = tiny_target(tmp_path / "model", vocab=BYTES)
    byte_tokenizer(directory)
    llm = LLM(directory, **TINY_ENGINE, num_blocks=64, max_adapters=1)
    for seed in range(2):
        path = write_random_adapter(directory, tmp_path / str(seed), rank=4, seed=seed, size=0.2)
        llm.add_adapter(path, str(seed))
    grammar = from_regex("[a-z]{3}-[0-9]{4}", field="grammar")
    sampling = SamplingParams(temperature=0.0, max_tokens=16)
    done = llm.generate([[3, 4, 5]] * 3, sampling, grammar=grammar, adapter=[None, "0", "1"], show_progress=False)
    assert all(re.fullmatch("[a-z]{3}-[0-9]{4}", completion.text) for completion in done)
    assert len({completion.text for completion in done}) == 3
    llm.engine.close()


def test_without_room_for_adapters(oracle: Oracle, tmp_path: Path) -> None:
    llm = LLM(oracle.directory, **TINY_ENGINE, num_blocks=16)
    with pytest.raises(InvalidRequest, match="set max_adapters"):
        llm.add_adapter(oracle.adapters["all"], "all")
    with pytest.raises(ConfigError, match="deterministic"):
        LLM(oracle.directory, **TINY_ENGINE, num_blocks=16, max_adapters=1, deterministic=True)
