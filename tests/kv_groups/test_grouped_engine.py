"""Models with KV groups on a CPU: tokens and log-probabilities equal those of transformers, whatever the pages do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from common.types import SamplingParams
from engine.kv.blocks import BlockPool
from engine.kv.groups.grouped_blocks import GroupedBlockPool
from engine.llm import LLM
from engine.schedule.sequence import Sequence as EngineSequence
from tests.kv_groups.families import BLOCK, CHUNK, FAMILIES, check, check_tokens, prompt, save
from tests.rigs.pods.harness import tiny_llama

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _checked_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineSequence, "CHECKS", True)


GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0)


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("model")
    return path, save(path, request.param)


def make(path: Path, **options: Any) -> LLM:
    llm = LLM(
        path,
        **({"device": "cpu", "threads": 1, "block_size": BLOCK, "chunk_tokens": CHUNK, "kv_groups": True} | options),
    )
    assert isinstance(llm.engine.pool, GroupedBlockPool)
    return llm


def test_chunks_hits_at_every_boundary_and_preemptions(saved: tuple[Path, Any]) -> None:
    path, reference = saved
    llm = make(path, num_blocks=200)
    first = prompt(41, seed=1)
    check(reference, llm.generate([first], GREEDY, ignore_eos=True))
    for blocks in range(1, 11):
        other = [*first[: blocks * BLOCK], *prompt(3, seed=100 + blocks)]
        (done,) = llm.generate([other], GREEDY, ignore_eos=True)
        assert done.cached_tokens == blocks * BLOCK
        check(reference, [done])
    llm.engine.pool.check_integrity()

    # Too few pages for all: prompts wait, chunks shrink, and sequences are preempted and computed again.
    groups = llm.engine.pool.pages_per_block
    llm = make(path, num_blocks=14 + 8 * groups)
    done = llm.generate([prompt(n, seed=n) for n in (30, 9, 41, 17, 6)], GREEDY, ignore_eos=True)
    assert llm.engine.scheduler.stats().preemptions > 0
    check(reference, done)
    llm.engine.pool.check_integrity()
    assert llm.engine.pool.counts().leased == 0


def test_samples_share_the_prompts_pages_and_copy_the_last_one(saved: tuple[Path, Any]) -> None:
    path, reference = saved
    llm = make(path, num_blocks=120)
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=14, logprobs=0)
    done = llm.generate([prompt(22, seed=4)], params, ignore_eos=True)
    assert len({tuple(c.ids) for c in done}) == 3
    for completion in done:
        check_tokens(reference, completion.prompt_ids, completion.tokens, greedy=False)
    llm.engine.pool.check_integrity()
    assert llm.engine.pool.counts().leased == 0


@pytest.mark.parametrize(
    "options",
    [
        {"speculation": "ngram", "speculation_tokens": 3},
        {"overlap": True, "num_blocks": 60},
        {"kv_dtype": "fp8_e4m3"},
        {"deterministic": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_change_no_token(options: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, "qwen2-window")
    prompts = [[*prompt(8, seed=i), *prompt(8, seed=i), *prompt(5 + 6 * i, seed=i)] for i in range(4)]
    answers = []
    for groups in (True, False):
        config = {"num_blocks": 200, "kv_groups": groups} | (options if groups or "overlap" not in options else {})
        llm = LLM(tmp_path, device="cpu", threads=1, block_size=BLOCK, chunk_tokens=CHUNK, **config)
        assert isinstance(llm.engine.pool, GroupedBlockPool) == groups
        rounds = [llm.generate(prompts, GREEDY, ignore_eos=True) for _ in range(2)]
        answers.append([[c.ids for c in each] for each in rounds])
        llm.engine.pool.check_integrity()
    assert answers[0] == answers[1]
    assert answers[0][0] == answers[0][1]


def test_pages_that_left_the_window_are_free_or_evictable(tmp_path: Path) -> None:
    save(tmp_path, "gpt-oss")
    llm = make(tmp_path, num_blocks=400)
    pool, used = llm.engine.pool, []
    step = llm.engine._stepper._launch

    def launch(*args: Any) -> Any:
        launched = step(*args)
        used.append(pool.counts().leased)
        return launched

    llm.engine._stepper._launch = launch  # type: ignore[method-assign]
    llm.generate([prompt(200, seed=1)], SamplingParams(temperature=0.0, max_tokens=40), ignore_eos=True)
    # A full page per block; of the window's pages those of two chunks and the window at most.
    assert max(used) <= 60 + 2 * CHUNK // BLOCK + 4
    assert used[-1] <= 60 + 4


@pytest.mark.parametrize(
    "options",
    [
        {"host_cache": 1 << 20},
        {"max_adapters": 1},
        {"cache_policy": "gdsf"},
        {"cache_pin": 1 << 20},
        {"prefix_cache": False},
        {"tensor_parallel_size": 2},
        {"kv_order": "heads"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_settings_without_groups_are_refused_for_models_with_groups(options: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, "qwen2-window")
    (name,) = options
    with pytest.raises(ConfigError, match=f"{name} .* cannot be combined with kv_groups") as caught:
        LLM(tmp_path, device="cpu", threads=1, num_blocks=20, kv_groups=True, **options)
    assert caught.value.field == name


def test_models_without_groups_ignore_the_setting(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    llm = LLM(tmp_path, device="cpu", threads=1, num_blocks=20, kv_groups=True, cache_policy="gdsf")
    plain = LLM(tmp_path, device="cpu", threads=1, num_blocks=20)
    assert llm.engine.layout == plain.engine.layout
    assert type(llm.engine.pool) is BlockPool
