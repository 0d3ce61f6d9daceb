"""Experts on several ranks: each has a part of every expert, or whole experts. Both give the results of one rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.errors import ConfigError
from common.types import SamplingParams
from engine.llm import LLM
from engine.models.decoder import Decoder
from engine.models.spec import ModelSpec, Shard, parse_spec, read_config
from engine.models.weights.random_weights import randomize
from engine.models.weights.shards import rank_part
from tests.rigs.engine.tiny_models import (
    CPU,
    MOE_CASES,
    TINY_ENGINE,
    Rig,
    assert_greedy,
    save_reference,
    tiny_prompt,
)
from tests.rigs.parallel.thread_ranks import thread_ranks

torch.set_num_threads(1)
MODES = pytest.mark.parametrize("whole_experts", [False, True], ids=["parts", "whole"])


class ThreadRanks:
    """Runs one function on each of `size` threads. Their all-reduces add up."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=60.0)
        self._parts: list[torch.Tensor | None] = [None] * size
        self.errors: list[BaseException] = []

    def all_reduce(self, rank: int, part: torch.Tensor) -> None:
        self._parts[rank] = part.clone()
        self._barrier.wait()
        total = sum(p for p in self._parts if p is not None)
        self._barrier.wait()
        part.copy_(total)

    def run(self, work: Callable[[int], None]) -> None:
        def guarded(rank: int) -> None:
            try:
                with torch.inference_mode():
                    work(rank)
            except BaseException as error:
                self.errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(len(self._parts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]


@MODES
@pytest.mark.parametrize("family", MOE_CASES)
def test_two_ranks_equal_transformers(family: str, whole_experts: bool, tmp_path: Path) -> None:
    reference = save_reference(tmp_path, MOE_CASES[family])
    ranks, results = ThreadRanks(2), dict[int, list[torch.Tensor]]()
    prompts = [tiny_prompt(n, seed=n) for n in (3, 29)]
    blocks = [[1], list(range(24, 40))]
    rigs = [
        Rig(
            tmp_path,
            shard=Shard(rank, 2, whole_experts),
            all_reduce=lambda part, rank=rank: ranks.all_reduce(rank, part),  # type: ignore[misc]
        )
        for rank in range(2)
    ]

    def work(rank: int) -> None:
        hidden = rigs[rank].hidden(prompts, [0, 0], blocks)
        if rank == 0:
            results[0] = list(rigs[rank].model.logits(hidden).split([3, 29]))

    ranks.run(work)
    for tokens, got in zip(prompts, results[0], strict=True):
        with torch.inference_mode():
            want = reference(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@MODES
@pytest.mark.parametrize("family", ["qwen3-moe", "glm4-moe", "olmoe", "gpt-oss"])
def test_random_weights_of_ranks_are_parts_of_one_model(family: str, whole_experts: bool, tmp_path: Path) -> None:
    save_reference(tmp_path, MOE_CASES[family])
    spec = parse_spec(*read_config(tmp_path))
    whole = Decoder(spec, 32, CPU, torch.float32)
    randomize(whole, 7)
    for rank in range(2):
        shard = Shard(rank, 2, whole_experts)
        cut = shard.shard_spec(spec)
        assert isinstance(cut, ModelSpec)
        part = Decoder(cut, 32, CPU, torch.float32)
        randomize(part, 7, shard)
        for name, parameter in part.named_parameters():
            module, _, kind = name.rpartition(".")
            wanted = rank_part(part.get_submodule(module), kind, whole.get_parameter(name), shard)
            assert torch.equal(parameter, wanted), name


@pytest.mark.parametrize(
    ("family", "whole_experts"),
    [
        ("glm4-moe", True),
        ("gpt-oss", False),
        pytest.param("deepseek-v3", False, marks=pytest.mark.long),
        pytest.param("qwen3-moe", True, marks=pytest.mark.long),
        pytest.param("olmoe", False, marks=pytest.mark.long),
        pytest.param("mixtral", False, marks=pytest.mark.long),
        pytest.param("granite-moe", True, marks=pytest.mark.long),
    ],
)
def test_an_engine_of_two_ranks_equals_transformers(family: str, whole_experts: bool, tmp_path: Path) -> None:
    reference = save_reference(tmp_path, MOE_CASES[family])
    with thread_ranks() as ranks:
        llm = LLM(tmp_path, num_blocks=64, tensor_parallel_size=2, expert_parallel=whole_experts, **TINY_ENGINE)
        try:
            params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0)
            done = llm.generate([tiny_prompt(n, seed=n) for n in (1, 21, 40)], params, ignore_eos=True)
        finally:
            llm.engine.close()
    ranks.join()
    for completion in done:
        assert_greedy(reference, completion.prompt_ids, completion.tokens)


def test_experts_that_cannot_be_split_stay_whole(tmp_path: Path) -> None:
    """An odd intermediate size, and parts of an MXFP4 expert that end inside of a group of 32."""
    case = MOE_CASES["qwen3-moe"] | {"moe_intermediate_size": 45, "mlp_only_layers": []}
    save_reference(tmp_path, case)
    config, _ = read_config(tmp_path)
    odd = Shard(1, 2).shard_spec(parse_spec(config))
    assert isinstance(odd, ModelSpec)
    assert odd.moe is not None
    assert (odd.moe.expert_size, odd.moe.first_local, odd.moe.num_local) == (45, 4, 4)
    with pytest.raises(ConfigError, match=r"divides neither .*size, 45, nor the number of experts, 7") as refused:
        Shard(1, 2).shard_spec(parse_spec(config | {"num_experts": 7, "num_local_experts": 7}))
    assert refused.value.field == "tensor_parallel_size"

    save_reference(tmp_path / "oss", MOE_CASES["gpt-oss"])
    config, _ = read_config(tmp_path / "oss")
    for quantized, size, experts in ({}, 48, 6), ({"quantization_config": {"quant_method": "mxfp4"}}, 96, 3):
        cut = Shard(0, 2).shard_spec(parse_spec(config | quantized))
        assert isinstance(cut, ModelSpec)
        assert cut.moe is not None
        assert (cut.moe.expert_size, cut.moe.num_local) == (size, experts)
