"""CUDA graphs and overlap change no token; NaN fails its request alone; the pool takes the remaining memory."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from common.errors import ConfigError, InternalError
from common.types import SamplingParams
from engine.llm import LLM

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

VOCAB = 512
#: Memory that is not part of the share: context, code, and local memory of float32 kernels for all threads of the GPU.
DRIVER = 4 << 30


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1).add_(1.0 if parameter.ndim == 1 else 0.0)
    model.save_pretrained(directory)
    return directory


def make(model_dir: Path, **config: Any) -> LLM:
    defaults = {"device": "cuda", "dtype": "float32", "max_seqs": 12, "chunk_tokens": 64, "num_blocks": 200}
    return LLM(model_dir, **(defaults | config))


def prompts(count: int) -> list[list[int]]:
    rng = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCAB, (1 + 11 * i,), generator=rng).tolist() for i in range(count)]


def params(count: int) -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.2, "presence_penalty": 0.4},
        {"temperature": 0.0, "stop_token_ids": tuple(range(0, VOCAB, 9))},
    ]
    return [SamplingParams(**({"max_tokens": 40 + 3 * i, "seed": i} | kinds[i % len(kinds)])) for i in range(count)]


def test_graphs_and_overlap_change_no_token(model_dir: Path) -> None:
    answers = []
    for graphs, overlap, blocks in [*itertools.product((False, True), (False, True), (200,)), (True, True, 40)]:
        llm = make(model_dir, cuda_graphs=graphs, overlap=overlap, num_blocks=blocks)
        assert (llm.engine.runner.decode_step is not None) == graphs
        done = llm.generate(prompts(16), params(16), ignore_eos=True)
        again = llm.generate(prompts(16)[::-1], params(16)[::-1], ignore_eos=True)[::-1]
        assert [c.ids for c in again] == [c.ids for c in done]
        answers.append([c.ids for c in done])
        llm.engine.pool.check_integrity()
        assert llm.engine.pool.counts().leased == 0
        assert blocks == 200 or llm.engine.scheduler.stats().preemptions > 0
        assert llm.engine.runner.time_replay(3) is None or graphs
    for other in answers[1:]:
        assert other == answers[0]


def test_nan_in_the_cache_fails_its_request_alone(model_dir: Path) -> None:
    llm = make(model_dir)
    greedy = SamplingParams(temperature=0.0, max_tokens=30)
    expected = llm.generate(prompts(4), greedy, ignore_eos=True)
    engine = llm.engine
    engine.pool.reset_prefix_cache()
    seqs = []
    for completion in expected:
        seq = engine.new_sequence(_request(completion.prompt_ids, greedy))
        engine.add(seq)
        seqs.append(seq)
    while min(seq.num_output for seq in seqs) < 3:
        engine.step()
    lease = seqs[2].lease
    assert lease is not None
    engine.kv.segment_view("kv")[lease.blocks[0], 1, 0, 0, 2] = float("nan")
    outputs = []
    while engine.has_work:
        outputs += engine.step().outputs
    failed = [o for o in outputs if o.error is not None]
    assert [o.seq for o in failed] == [seqs[2]]
    assert isinstance(failed[0].error, InternalError)
    assert [seqs[i].output for i in (0, 1, 3)] == [expected[i].ids for i in (0, 1, 3)]


def _request(ids: tuple[int, ...], sampling: SamplingParams) -> Any:
    from common.types import ValidRequest

    return ValidRequest(f"r{len(ids)}", "m", ids, sampling)


def test_the_pool_takes_the_rest_of_the_memory_share(model_dir: Path) -> None:
    free, total = torch.cuda.mem_get_info()
    if free < total // 4:
        pytest.skip("other processes use three quarters of the GPU memory")
    share = 0.2
    llm = make(model_dir, num_blocks=0, gpu_memory_utilization=share)
    taken = free - torch.cuda.mem_get_info()[0]
    assert 0.15 * total < llm.engine.kv.data.nbytes < share * total
    assert taken < share * total + DRIVER
    del llm
    with pytest.raises(ConfigError) as refused:
        make(model_dir, num_blocks=0, gpu_memory_utilization=1e-4)
    assert refused.value.field == "gpu_memory_utilization"
    assert "weights" in refused.value.message
