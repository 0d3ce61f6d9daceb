"""Engine and pods with an 8-bit KV cache: close to the 16-bit one, and no token depends on how blocks were moved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError, LayoutMismatch
from common.types import SamplingParams, ValidRequest
from engine.llm import LLM
from tests.rigs.pods.harness import BLOCK, CHUNK, MAX_LEN, Cluster, oracle, prompt_of, request

FP8 = {"kv_dtype": "fp8_e4m3"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> LLM:
    return oracle(model_dir, **FP8)


def test_log_probabilities_of_smollm2_stay_close(
    smollm2_dir: Path, record_property: Callable[[str, float], None]
) -> None:
    """Log-probabilities of one continuation on both caches; prints and records the differences."""
    rng = torch.Generator().manual_seed(1)
    prompts = [torch.randint(100, 40000, (n,), generator=rng).tolist() for n in (7, 90)]
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0)
    made: dict[str, Any] = {"kv_memory": 64 << 20, "chunk_tokens": 128, "max_model_len": 256, "threads": 1}
    full = LLM(smollm2_dir, **made).generate(prompts, params)
    small = LLM(smollm2_dir, **made, **FP8)
    differences: list[float] = []
    for ids, answer in zip(prompts, full, strict=True):
        for i, token in enumerate(answer.tokens):
            one = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
            top = small.generate([ids + answer.ids[:i]], one)[0].tokens[0].top
            found = {t.token: t.logprob for t in top}
            assert token.id in found, "the best token must stay among the likeliest"
            assert token.logprob is not None
            differences.append(abs(found[token.id] - token.logprob))
    mean = sum(differences) / len(differences)
    record_property("mean", mean)
    record_property("worst", max(differences))
    print(f"log-probability, 8 bits against float32: mean difference {mean:.4f}, worst {max(differences):.4f}")
    assert 0 < mean < 0.1
    assert max(differences) < 0.5


@pytest.mark.parametrize("length", [1, BLOCK, BLOCK + 1, 3 * CHUNK + 2])
def test_chunks_prefix_hits_and_batches_change_no_token(model_dir: Path, llm: LLM, length: int) -> None:
    ids = prompt_of(length)
    expected = oracle(model_dir, **FP8).generate([ids], GREEDY)[0]
    together = llm.generate([prompt_of(30, seed=4), ids, prompt_of(5, seed=5)], GREEDY)[1]
    again = llm.generate([ids], GREEDY)[0]
    assert expected.ids == together.ids == again.ids
    assert again.cached_tokens == (length - 1) // BLOCK * BLOCK


def test_preemption_changes_no_token(model_dir: Path, llm: LLM) -> None:
    prompts = [prompt_of(20 + n, seed=n) for n in range(6)]
    tight = LLM(model_dir, block_size=BLOCK, num_blocks=45, max_model_len=MAX_LEN, chunk_tokens=CHUNK, threads=1, **FP8)
    params = SamplingParams(temperature=0.0, max_tokens=30)
    assert [c.ids for c in tight.generate(prompts, params)] == [c.ids for c in llm.generate(prompts, params)]
    assert tight.engine.scheduler.stats().preemptions > 0


def test_a_nan_fails_only_its_sequence(llm: LLM) -> None:
    """A NaN in blocks of others and in free blocks has no effect; in a block of its own it fails the sequence."""
    prompts = [prompt_of(10, seed=1), prompt_of(10, seed=2)]
    expected = [c.ids for c in llm.generate(prompts, GREEDY)]
    llm.engine.pool.reset_prefix_cache()
    llm.engine.kv.data[: llm.engine.kv.num_blocks] = 0xFF
    seqs = [llm.engine.new_sequence(ValidRequest(f"r{i}", "tiny", tuple(ids), GREEDY)) for i, ids in enumerate(prompts)]
    for seq in seqs:
        llm.engine.add(seq)
    outputs = [o for _ in range(3) for o in llm.engine.step().outputs]
    assert seqs[0].lease is not None
    llm.engine.kv.segment_view("scales")[seqs[0].lease.blocks[0], 0, 0, 1, 1] = float("nan")
    while llm.engine.has_work:
        outputs += llm.engine.step().outputs
    assert [o.seq.request_id for o in outputs if o.error is not None] == ["r0"]
    assert seqs[1].output == expected[1]
    llm.engine.pool.reset_prefix_cache()
    assert llm.generate(prompts, GREEDY)[0].ids == expected[0]


@pytest.mark.parametrize("length", [BLOCK + 1, 3 * CHUNK])
async def test_hand_off_between_pods(model_dir: Path, llm: LLM, length: int) -> None:
    async with Cluster.start(model_dir, prefill_config=FP8, decode_config=FP8) as cluster:
        for attempt in range(2):
            r = request(prompt_of(length, seed=7), 10)
            answer = await cluster.generate(r, remote_only=True)
            assert answer.ids == llm.generate([r.prompt_ids], r.sampling)[0].ids
            assert answer.cached_tokens == (0 if attempt == 0 else (length - 1) // BLOCK * BLOCK)
        info = await cluster.decode.info()
        assert (info.layout.dtype, info.computed.prefill) == ("float8_e4m3", 0)


async def test_pods_with_different_kv_dtypes_refuse_each_other(model_dir: Path) -> None:
    async with Cluster.start(model_dir, prefill_config=FP8, check=False) as cluster:
        with pytest.raises(LayoutMismatch):
            await cluster.generate(request(prompt_of(20), 4))


def test_an_unknown_kv_dtype_is_named(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="kv_dtype: invalid value 'int4'"):
        oracle(model_dir, kv_dtype="int4")
