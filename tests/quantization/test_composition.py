"""Quantised weights with the rest of Baton: hand-off, ranks, drafts, 8-bit KV, and what pods and clients are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.support.quantized_files import write
from common.errors import BatonError
from common.types import SamplingParams
from engine.llm import LLM
from tests.rigs.engine.draft_models import eagle_head
from tests.rigs.parallel.thread_ranks import thread_ranks
from tests.rigs.pods.harness import CHUNK, Cluster, expected, oracle, prompt_of, request, tiny_llama

torch.set_num_threads(1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, logprobs=0)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def quantised(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by format, in directories of one name: pods compare the name of the model too."""
    made = {
        name: tmp_path_factory.mktemp(name) / "tiny" for name in ("awq", "gptq-order", "fp8-block", "ct-fp8-channel")
    }
    for name, directory in made.items():
        write(plain, directory, name)
    return made


@pytest.mark.parametrize("name", ["awq", "fp8-block", "ct-fp8-channel"])
async def test_a_hand_off_gives_the_tokens_of_one_process(name: str, quantised: dict[str, Path]) -> None:
    llm = oracle(quantised[name])
    async with Cluster.start(quantised[name]) as cluster:
        for prompt in (prompt_of(9, seed=3), prompt_of(3 * CHUNK + 2, seed=5)):
            r = request(prompt, 12)
            assert (await cluster.generate(r, remote_only=True)).ids == expected(llm, r)
        info = await cluster.decode.info()
    assert info.layout.weights.startswith(name.split("-")[0].replace("ct", "compressed-tensors"))


async def test_weights_fp8_with_8_bit_kv_hand_off(plain: Path) -> None:
    settings: dict[str, Any] = {"weights": "fp8", "kv_dtype": "fp8_e4m3"}
    llm = oracle(plain, **settings)
    async with Cluster.start(plain, prefill_config=settings, decode_config=settings) as cluster:
        r = request(prompt_of(2 * CHUNK + 3, seed=5), 12)
        assert (await cluster.generate(r, remote_only=True)).ids == expected(llm, r)


async def test_pods_with_other_weights_refuse_each_other_and_say_why(plain: Path) -> None:
    async with Cluster.start(plain, decode_config={"weights": "fp8"}, check=False) as cluster:
        peer = cluster.decode.runtime
        with pytest.raises(
            BatonError, match=r"KV layouts differ in weights: 'fp8 \(fp8, one scale per output .*\)' on this pod, ''"
        ):
            await cluster.prefill.runtime.transfer_node.connect(peer.address, peer.name)


def test_fingerprints_differ_by_format(plain: Path, quantised: dict[str, Path]) -> None:
    layouts = [oracle(directory).engine.layout for directory in (plain, *quantised.values())]
    layouts += [oracle(plain, weights=weights).engine.layout for weights in ("fp8", "int8")]
    assert len({layout.fingerprint for layout in layouts}) == len(layouts)
    assert [layout.weights for layout in layouts] == [
        "",
        "awq (int4, groups of 32, zeros)",
        "gptq (int4, groups of 32, zeros, activation order)",
        "fp8 (fp8, blocks of 128 x 128 and inputs by groups of 128)",
        "compressed-tensors (fp8, one scale per output and inputs by token)",
        "fp8 (fp8, one scale per output and inputs by token)",
        "int8 (int8, one scale per output)",
    ]


@pytest.mark.parametrize(("name", "weights"), [("gptq-order", "auto"), ("", "int8")])
def test_two_ranks_answer_like_one(name: str, weights: str, plain: Path, quantised: dict[str, Path]) -> None:
    directory = quantised[name] if name else plain
    prompts = [prompt_of(n, seed=n) for n in (3, 40)]
    settings: dict[str, Any] = {
        "block_size": 4,
        "num_blocks": 64,
        "max_model_len": 128,
        "threads": 1,
        "weights": weights,
    }
    one = LLM(directory, **settings).generate(prompts, GREEDY, ignore_eos=True)
    with thread_ranks() as ranks:
        two = LLM(directory, tensor_parallel_size=2, **settings)
        try:
            answers = two.generate(prompts, GREEDY, ignore_eos=True)
        finally:
            two.engine.close()
    ranks.join()
    for left, right in zip(one, answers, strict=True):
        assert right.ids == left.ids
        for a, b in zip(left.tokens, right.tokens, strict=True):
            assert b.logprob == pytest.approx(a.logprob, abs=1e-4 if name else 0.15)


@pytest.mark.parametrize("kind", ["ngram", "draft_model", "eagle"])
def test_drafts_change_no_token(kind: str, plain: Path, quantised: dict[str, Path], tmp_path: Path) -> None:
    """A quantised model with drafts: prompt lookup, itself in another format, and a random EAGLE head."""
    settings: dict[str, Any] = {"speculation": kind, "speculation_tokens": 3}
    if kind == "draft_model":
        settings["speculation_model"] = quantised["fp8-block"]
    if kind == "eagle":
        settings["speculation_model"] = eagle_head(tmp_path / "eagle", vocab=256, hidden=64)
    prompts = [prompt_of(n, seed=n) for n in (5, 30)]
    without = oracle(quantised["awq"]).generate(prompts, GREEDY, ignore_eos=True)
    found = oracle(quantised["awq"], **settings).generate(prompts, GREEDY, ignore_eos=True)
    assert [answer.ids for answer in found] == [answer.ids for answer in without]


def test_blocks_return_from_host_memory(quantised: dict[str, Path]) -> None:
    """A prefix that went to host memory and back gives the same tokens."""
    llm = LLM(
        quantised["awq"],
        block_size=4,
        num_blocks=28,
        max_model_len=96,
        chunk_tokens=16,
        threads=1,
        host_cache=4 << 20,
    )
    prompt = prompt_of(60, seed=1)
    first = llm.generate([prompt], GREEDY, ignore_eos=True)[0]
    for seed in range(2, 5):
        llm.generate([prompt_of(60, seed=seed)], GREEDY, ignore_eos=True)
    again = llm.generate([prompt], GREEDY, ignore_eos=True)[0]
    assert again.ids == first.ids


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
async def test_a_hand_off_in_16_bits(dtype: str, quantised: dict[str, Path]) -> None:
    settings = {"dtype": dtype}
    llm = oracle(quantised["awq"], **settings)
    async with Cluster.start(quantised["awq"], prefill_config=settings, decode_config=settings) as cluster:
        r = request(prompt_of(2 * CHUNK, seed=5), 8)
        assert (await cluster.generate(r, remote_only=True)).ids == expected(llm, r)
        assert (await cluster.decode.info()).layout.dtype == dtype
