"""The host tier of a real engine on a CPU: blocks from host memory give the same tokens as blocks of the pool."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from common.types import FinishReason, SamplingParams
from engine.llm import LLM, Completion
from engine.speculation.controller import AlwaysDraft
from tests.rigs.pods.harness import BLOCK, CHUNK, MAX_LEN, prompt_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
LONG = SamplingParams(temperature=0.7, seed=3, max_tokens=40, logprobs=1)
HOST_BLOCKS = 200
WAIT_S = 20.0


def make(model_dir: Path, *, num_blocks: int = 256, host_blocks: int = 0, **config: Any) -> LLM:
    torch.set_num_threads(1)
    kv_bytes_per_block = 2 * 2 * 2 * BLOCK * 16 * 4
    return LLM(
        model_dir,
        block_size=BLOCK,
        num_blocks=num_blocks,
        max_model_len=MAX_LEN,
        chunk_tokens=CHUNK,
        threads=1,
        host_cache=host_blocks * kv_bytes_per_block,
        checksums=host_blocks > 0,
        **config,
    )


def settle(llm: LLM) -> None:
    assert llm.engine.pool.host_tier is not None
    assert llm.engine.pool.host_tier.wait_idle(WAIT_S)


def clean(llm: LLM) -> None:
    settle(llm)
    llm.engine.pool.check_integrity()
    counts = llm.engine.pool.counts()
    assert counts.leased == counts.quarantined == 0


def assert_same(got: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.ids == other.ids
        for a, b in zip(one.tokens, other.tokens, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3)


def test_an_evicted_prompt_comes_back_and_is_not_recomputed(model_dir: Path) -> None:
    llm, plain = make(model_dir, num_blocks=24, host_blocks=HOST_BLOCKS), make(model_dir)
    prompts = [prompt_of(60, seed=i) for i in range(4)]
    for prompt in prompts:
        assert (
            llm.generate([prompt], GREEDY, ignore_eos=True)[0].ids
            == plain.generate([prompt], GREEDY, ignore_eos=True)[0].ids
        )
    settle(llm)
    before = llm.engine.counters.prompt_tokens
    again = llm.generate([prompts[0]], GREEDY, ignore_eos=True)[0]
    assert again.cached_tokens == 56
    assert llm.engine.counters.prompt_tokens - before == 4
    assert again.ids == plain.generate([prompts[0]], GREEDY, ignore_eos=True)[0].ids
    stats = llm.engine.pool.host_stats()
    assert stats is not None
    assert stats.loaded > 0
    assert stats.damaged == 0
    clean(llm)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_blocks_come_back_bit_for_bit(model_dir: Path, kv_dtype: str) -> None:
    """All segments of a block are equal, including scales."""
    llm = make(model_dir, num_blocks=24, host_blocks=HOST_BLOCKS, kv_dtype=kv_dtype)
    engine, prompts = llm.engine, [prompt_of(60, seed=i) for i in range(3)]

    def contents() -> dict[bytes, bytes]:
        blocks = engine.pool._cache.block_by_hash
        return {h: engine.kv.read_block(blocks[h]) for h in engine.pool.cached_hashes()}

    llm.generate([prompts[0]], GREEDY, ignore_eos=True)
    before = contents()
    for prompt in prompts[1:]:
        llm.generate([prompt], GREEDY, ignore_eos=True)
    settle(llm)
    assert len(before.keys() & contents().keys()) < 15
    assert llm.generate([prompts[0]], GREEDY, ignore_eos=True)[0].cached_tokens == 56
    after = contents()
    # The first 14 blocks came back. The last one was computed again, in a step of another shape.
    for h in list(before)[:14]:
        assert after[h] == before[h]


def test_preempted_sequences_resume_without_recomputing(model_dir: Path) -> None:
    prompts = [prompt_of(20, seed=i) for i in range(5)]
    expected = make(model_dir).generate(prompts, LONG, ignore_eos=True)
    llm = make(model_dir, num_blocks=28, host_blocks=HOST_BLOCKS)
    assert_same(llm.generate(prompts, LONG, ignore_eos=True), expected)
    stats = llm.engine.scheduler.stats()
    assert stats.preemptions > 0
    assert (stats.fully_restored, stats.partly_recomputed) == (stats.preemptions, 0)
    assert llm.engine.counters.recomputed_tokens == 0
    clean(llm)


def test_a_host_tier_that_is_too_small_only_costs_recomputing(model_dir: Path) -> None:
    prompts = [prompt_of(20, seed=i) for i in range(5)]
    expected = make(model_dir).generate(prompts, LONG, ignore_eos=True)
    llm = make(model_dir, num_blocks=28, host_blocks=3)
    assert_same(llm.generate(prompts, LONG, ignore_eos=True), expected)
    assert llm.engine.scheduler.stats().partly_recomputed > 0
    assert llm.engine.counters.recomputed_tokens > 0
    clean(llm)


def test_children_and_prompt_logprobs_resume_too(model_dir: Path) -> None:
    families = SamplingParams(temperature=0.9, seed=5, max_tokens=40, n=3)
    scored = SamplingParams(temperature=0.0, max_tokens=30, prompt_logprobs=1)
    prompts = [prompt_of(18, seed=1), prompt_of(70, seed=2), prompt_of(19, seed=3), prompt_of(66, seed=4)]
    params = [families, scored, families, scored]
    expected = make(model_dir).generate(prompts, params, ignore_eos=True)
    llm = make(model_dir, num_blocks=44, host_blocks=HOST_BLOCKS)
    assert_same(llm.generate(prompts, params, ignore_eos=True), expected)
    assert llm.engine.scheduler.stats().preemptions > 0
    clean(llm)


@pytest.mark.parametrize("speculation", ["ngram", "suffix"])
def test_with_drafts_the_tokens_are_the_same(model_dir: Path, speculation: str) -> None:
    prompts = [[5, 6, 7, 8] * 6, prompt_of(21, seed=9), [9, 10] * 9]
    expected = make(model_dir).generate(prompts, LONG, ignore_eos=True)
    llm = make(model_dir, num_blocks=30, host_blocks=HOST_BLOCKS, speculation=speculation)
    llm.engine.set_proposer(llm.engine.configured_proposer(), AlwaysDraft(4))
    assert_same(llm.generate(prompts, LONG, ignore_eos=True), expected)
    assert llm.engine.scheduler.stats().fully_restored > 0
    assert llm.engine.speculator is not None
    stats = llm.engine.speculator.stats
    assert 0 < stats.accepted < stats.proposed
    clean(llm)


def test_a_block_damaged_in_host_memory_fails_only_its_request(model_dir: Path) -> None:
    llm = make(model_dir, num_blocks=24, host_blocks=HOST_BLOCKS)
    prompts = [prompt_of(60, seed=i) for i in range(3)]
    first = [llm.generate([prompt], GREEDY, ignore_eos=True)[0].ids for prompt in prompts]
    settle(llm)
    assert llm.engine.host_memory is not None
    llm.engine.host_memory.data[:, 7] ^= 1
    bad, good = llm.generate([prompts[0], prompt_of(9)], GREEDY, ignore_eos=True)
    assert bad.finish is FinishReason.ERROR
    assert bad.error is not None
    assert bad.error.kind == "BlockDamaged"
    assert len(good.ids) == GREEDY.max_tokens
    stats = llm.engine.pool.host_stats()
    assert stats is not None
    assert stats.damaged == 1
    assert llm.generate([prompts[0]], GREEDY, ignore_eos=True)[0].ids == first[0]
    clean(llm)


def test_without_checksums_that_damage_goes_unnoticed(model_dir: Path) -> None:
    """Shows that the damage of the test above would change the output without checksums."""
    llm = make(model_dir, num_blocks=24, host_blocks=HOST_BLOCKS)
    unchecked = LLM(
        model_dir,
        block_size=BLOCK,
        num_blocks=24,
        max_model_len=MAX_LEN,
        chunk_tokens=CHUNK,
        threads=1,
        host_cache=llm.engine.config.host_cache,
    )
    prompts = [prompt_of(60, seed=i) for i in range(3)]
    first = [unchecked.generate([prompt], GREEDY, ignore_eos=True)[0].ids for prompt in prompts]
    settle(unchecked)
    assert unchecked.engine.host_memory is not None
    unchecked.engine.host_memory.data[:, 3::4] = 0x40
    assert unchecked.generate([prompts[0]], GREEDY, ignore_eos=True)[0].ids != first[0]


def test_after_a_failed_copy_the_pool_works_without_a_host_tier(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, plain = make(model_dir, num_blocks=24, host_blocks=HOST_BLOCKS), make(model_dir)

    def fail(*_: object) -> None:
        raise RuntimeError("the host is on fire")

    assert llm.engine.host_memory is not None
    monkeypatch.setattr(llm.engine.host_memory, "save", fail)
    prompts = [prompt_of(60, seed=i) for i in range(4)]
    for prompt in (*prompts, *prompts):
        assert (
            llm.generate([prompt], GREEDY, ignore_eos=True)[0].ids
            == plain.generate([prompt], GREEDY, ignore_eos=True)[0].ids
        )
    assert llm.engine.pool.host_tier is not None
    assert llm.engine.pool.host_tier.closed
    assert llm.engine.pool.host_hashes() == []
    llm.engine.pool.check_integrity()


def test_the_copier_ends_with_its_engine(model_dir: Path) -> None:
    def copiers() -> int:
        return sum(thread.name == "host-tier" for thread in threading.enumerate())

    gc.collect()
    before = copiers()
    llm, other = make(model_dir, host_blocks=4), make(model_dir, host_blocks=4)
    assert copiers() == before + 2
    llm.engine.close()
    llm.engine.close()
    assert copiers() == before + 1
    del other
    gc.collect()
    assert copiers() == before
