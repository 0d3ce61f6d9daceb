"""Hybrid models on a CPU: tokens and log-probabilities equal those of transformers, whatever blocks and states do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from common.types import FinishReason, SamplingParams, ValidRequest
from engine.kv.groups.state_blocks import StateBlockPool, StateLease
from engine.llm import LLM, Completion
from engine.schedule.sequence import Sequence as EngineSequence
from tests.rigs.engine.hybrid_models import HYBRID_CASES, save_hybrid

torch.set_num_threads(1)
BLOCK, CHUNK, SPACING = 4, 16, 3
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, logprobs=0)


@pytest.fixture(autouse=True)
def _checked_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineSequence, "CHECKS", True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """The directory and the reference of each family."""
    paths = {name: tmp_path_factory.mktemp("model") for name in HYBRID_CASES}
    return {name: (path, save_hybrid(path, name)) for name, path in paths.items()}


@pytest.fixture
def saved(models: dict[str, tuple[Path, Any]]) -> tuple[Path, Any]:
    return models["qwen3.5"]


def make(path: Path, **options: Any) -> LLM:
    config = {"device": "cpu", "threads": 1, "block_size": BLOCK, "chunk_tokens": CHUNK, "snapshot_blocks": SPACING}
    llm = LLM(path, **(config | {"num_blocks": 200, "num_states": 60} | options))
    assert isinstance(llm.engine.pool, StateBlockPool)
    return llm


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, 150, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def check(reference: Any, completions: Sequence[Completion], *, greedy: bool = True) -> None:
    for completion in completions:
        text = [*completion.prompt_ids, *completion.ids]
        with torch.inference_mode():
            logits = reference(torch.tensor([text])).logits
        logprobs = logits[0, len(completion.prompt_ids) - 1 : -1].log_softmax(-1)
        assert not greedy or completion.ids == logprobs.argmax(-1).tolist()
        chosen = [float(row[token.id]) for row, token in zip(logprobs, completion.tokens, strict=True)]
        assert [token.logprob for token in completion.tokens] == pytest.approx(chosen, abs=5e-4)


def check_idle(llm: LLM) -> None:
    """Asserts that no block and no state is in use."""
    pool = llm.engine.pool
    assert isinstance(pool, StateBlockPool)
    pool.check_integrity()
    assert pool.counts().leased == 0
    assert len(pool.slots.free) + len(pool.slots.snapshots) == pool.slots.num_slots


@pytest.mark.parametrize("name", HYBRID_CASES)
def test_hits_end_at_snapshots(name: str, models: dict[str, tuple[Path, Any]]) -> None:
    path, reference = models[name]
    llm = make(path)
    first = prompt(43, seed=1)
    check(reference, llm.generate([first], GREEDY, ignore_eos=True))
    snapshots = {0, 3, 6, 9, 10}  # the last one is the last boundary before the end
    for blocks in range(1, 11):
        other = [*first[: blocks * BLOCK], *prompt(3, seed=100 + blocks)]
        (done,) = llm.generate([other], GREEDY, ignore_eos=True)
        assert done.cached_tokens == max(count for count in snapshots if count <= blocks) * BLOCK
        check(reference, [done])
        snapshots.add(blocks)
        # The prompt has missed a hit, so its own snapshot is where that would have ended.
        (done,) = llm.generate([[*other[: blocks * BLOCK], *prompt(2, seed=blocks)]], GREEDY, ignore_eos=True)
        assert done.cached_tokens == blocks * BLOCK
        check(reference, [done])
    check_idle(llm)


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe"])
def test_mixed_batches_and_preemptions(name: str, models: dict[str, tuple[Path, Any]]) -> None:
    path, reference = models[name]
    prompts = [prompt(n, seed=n) for n in (30, 9, 41, 17, 6, 1)]
    for options in ({}, {"num_blocks": 20}, {"num_states": 2}, {"overlap": True, "num_blocks": 20, "num_states": 9}):
        llm = make(path, **options)
        done = llm.generate(prompts, GREEDY, ignore_eos=True)
        check(reference, done)
        assert (llm.engine.scheduler.stats().preemptions > 0) == (options.get("num_blocks") == 20)
        check_idle(llm)
        check(reference, llm.generate(prompts[::2], GREEDY, ignore_eos=True))
        check_idle(llm)


def test_samples_have_states_of_their_own(saved: tuple[Path, Any]) -> None:
    path, reference = saved
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=14, logprobs=0)
    answers = []
    for num_states in (60, 4, 1):  # with few states, samples wait and are computed from the prompt's snapshot
        llm = make(path, num_states=num_states)
        done = llm.generate([prompt(22, seed=4), prompt(8, seed=5)], params, ignore_eos=True)
        answers.append([tuple(c.ids) for c in done])
        assert len(set(answers[-1])) == 6
        check(reference, done, greedy=False)
        check_idle(llm)
    assert answers[0] == answers[1] == answers[2]


def test_a_conversation_continues_at_the_last_block(saved: tuple[Path, Any]) -> None:
    path, reference = saved
    llm = make(path)
    text = prompt(14, seed=6)
    for turn in range(3):
        (done,) = llm.generate([text], GREEDY, ignore_eos=True)
        check(reference, [done])
        assert turn == 0 or done.cached_tokens == (len(text) - 6) // BLOCK * BLOCK
        text = [*text, *done.ids, *prompt(5, seed=50 + turn)]
    check_idle(llm)


def test_a_long_prompt_again_computes_one_block(saved: tuple[Path, Any]) -> None:
    llm = make(saved[0], block_size=16, chunk_tokens=256, num_blocks=1200, snapshot_blocks=64)
    text = prompt(4000, seed=9)
    for repeated in (False, True):
        (done,) = llm.generate([text], GREEDY, ignore_eos=True)
        assert done.cached_tokens == (3984 if repeated else 0)
    # Each edit leaves a snapshot where it has missed the longer hit.
    promised = {249, *range(0, 250, 64)}
    for edit in random.Random(25).sample(range(4000), 3):
        (done,) = llm.generate([[*text[:edit], 5, *text[edit + 1 :]]], GREEDY, ignore_eos=True)
        matched = min(edit // 16, 249)
        assert done.cached_tokens == max(blocks for blocks in promised if blocks <= matched) * 16
        promised.add(matched)
    check_idle(llm)


def test_aborts_return_states(saved: tuple[Path, Any]) -> None:
    engine = make(saved[0]).engine
    for index in range(3):
        params = SamplingParams(max_tokens=20, n=2)
        request = ValidRequest(f"r{index}", "m", tuple(prompt(30, seed=index)), params)
        engine.add(engine.new_sequence(request))
    for step in range(8):
        engine.step()
        if step in (1, 3, 5):
            engine.abort(f"r{step // 2}")
    engine.finish_in_flight()
    engine.pool.check_integrity()
    assert engine.pool.counts().leased == 0


def test_a_failed_plan_launches_nothing_and_returns_states(
    saved: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reference = saved
    llm = make(path)
    engine = llm.engine
    for index in range(2):
        engine.add(engine.new_sequence(ValidRequest(f"r{index}", "m", tuple(prompt(30, index)), SamplingParams())))
    engine.step()
    with monkeypatch.context() as broken:
        broken.setattr(StateLease, "plan_snapshots", lambda *args: 1 / 0)
        broken.setattr(engine.runner, "launch", lambda *args: pytest.fail("the failed sequences were launched"))
        result = engine.step()
    assert [output.finish_reason for output in result.outputs] == [FinishReason.ERROR] * 2
    assert not engine.has_work
    check_idle(llm)
    check(reference, llm.generate([prompt(30, seed=0)], GREEDY, ignore_eos=True))


def test_prefixes_are_not_kept_if_the_cache_is_off(saved: tuple[Path, Any]) -> None:
    path, reference = saved
    llm = make(path, prefix_cache=False)
    for _ in range(2):
        (done,) = llm.generate([prompt(30, seed=2)], GREEDY, ignore_eos=True)
        assert done.cached_tokens == 0
        check(reference, [done])
    assert not llm.engine.pool.slots.snapshots  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe"])
def test_the_text_part_of_a_multimodal_checkpoint(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference = save_hybrid(tmp_path, name, multimodal=True)
    with caplog.at_level("INFO"):
        llm = make(tmp_path)
    assert "images are not used" in caplog.text
    check(reference, llm.generate([prompt(30, seed=2)], GREEDY, ignore_eos=True))


@pytest.mark.parametrize(
    "options",
    [
        {"speculation": "ngram"},
        {"recurrent_states": False},
        {"host_cache": 1 << 20},
        {"max_adapters": 1},
        {"tensor_parallel_size": 2},
        {"deterministic": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_parts_without_states_are_refused_by_name(options: dict[str, Any], saved: tuple[Path, Any]) -> None:
    field = next(iter(options)).replace("recurrent_states", "model")
    with pytest.raises(ConfigError, match=field) as refused:
        make(saved[0], **options)
    assert refused.value.field == field
