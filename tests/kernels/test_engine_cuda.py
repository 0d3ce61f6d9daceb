"""The engine gives the same tokens on a GPU and on a CPU in fp32: chunks, prefix hits, batches, preemption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from common.types import SamplingParams
from engine.llm import LLM

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

VOCAB = 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
LOCAL_GLOBAL = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SHAPE),
    "mistral": MistralConfig(**SHAPE, sliding_window=96),
    "qwen2": Qwen2Config(**{k: v for k, v in SHAPE.items() if k != "head_dim"}),
    "qwen3": Qwen3Config(**SHAPE),
    "llama-dim-80": LlamaConfig(**SHAPE | {"head_dim": 80, "num_key_value_heads": 4}),
    "mistral-dim-96": MistralConfig(**SHAPE | {"head_dim": 96}, sliding_window=96),
    "qwen3-dim-128": Qwen3Config(**SHAPE | {"head_dim": 128, "num_attention_heads": 6}),
    "llama-dim-256": LlamaConfig(**SHAPE | {"head_dim": 256, "num_key_value_heads": 1}),
    # Models that transformers computes over our KV pool.
    "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=256, n_head=4, n_layer=3, n_positions=1024, eos_token_id=1),
    "gemma2": Gemma2Config(**SHAPE, sliding_window=96, layer_types=LOCAL_GLOBAL, attn_logit_softcapping=5.0),
    "gemma3": Gemma3TextConfig(**SHAPE, sliding_window=96, layer_types=LOCAL_GLOBAL),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
}
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 200, 500)


def prompts() -> list[list[int]]:
    rng = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCAB, (n,), generator=rng).tolist() for n in LENGTHS]


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_tokens_equal_those_of_the_cpu(family: str, sampling: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1).add_(1.0 if parameter.ndim == 1 else 0.0)
    model.save_pretrained(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=0)
    if sampling == "sampled":
        params = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=16, repetition_penalty=1.1, logprobs=0)
    got: dict[str, list[list[tuple[int, float | None]]]] = {}
    for device in ("cpu", "cuda"):
        llm = LLM(tmp_path, device=device, dtype="float32", block_size=16, num_blocks=160, chunk_tokens=64)
        cold = llm.generate(prompts(), params)
        warm = llm.generate(prompts(), params)
        assert [c.ids for c in warm] == [c.ids for c in cold], device
        assert warm[-1].cached_tokens > 0
        got[device] = [[(t.id, t.logprob) for t in c.tokens] for c in cold]
        llm.engine.pool.check_integrity()
    for length, a, b in zip(LENGTHS, got["cpu"], got["cuda"], strict=True):
        assert [t for t, _ in a] == [t for t, _ in b], f"prompt of {length}"
        assert [p for _, p in a] == pytest.approx([p for _, p in b], abs=1e-3)


def test_preemption_on_the_gpu_changes_no_token(tmp_path: Path) -> None:
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(CONFIGS["llama"], dtype=torch.float32).save_pretrained(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=80)
    answers = []
    for blocks in (400, 40):
        llm = LLM(tmp_path, device="cuda", dtype="float32", block_size=16, num_blocks=blocks, chunk_tokens=64)
        answers.append([c.ids for c in llm.generate(prompts()[:8], params)])
    assert llm.engine.scheduler.stats().preemptions > 0
    assert answers[0] == answers[1]
