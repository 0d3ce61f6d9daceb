"""Tiny models of transformers with random weights, and our decoder over their checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common.kv_layout import KVLayout
from common.types import Token
from engine.attention.base import StepShape
from engine.attention.torch_backend import TorchAttention
from engine.kv.kv_pool import KVPool
from engine.models.base import ForwardContext
from engine.models.decoder import Decoder
from engine.models.ops import AllReduce
from engine.models.spec import UNSHARDED, ModelSpec, Shard, parse_spec, read_config
from engine.models.weights.load import load_weights

CPU = torch.device("cpu")
#: Settings of an engine for these models.
TINY_ENGINE: dict[str, Any] = {"device": "cpu", "block_size": 4, "chunk_tokens": 16, "threads": 1}
TINY: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
#: The families with experts, by name. Heads, groups and windows differ from their defaults.
MOE_CASES: dict[str, dict[str, Any]] = {
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "moe_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20},
    # transformers has no window in this family, also if config.json has one.
    "olmoe": {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3, "sliding_window": 9},
    "glm4-moe": {
        "model_type": "glm4_moe",
        "head_dim": 32,
        "attention_bias": True,
        "use_qk_norm": True,
        "moe_intermediate_size": 40,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.8,
        "first_k_dense_replace": 1,
    },
    "deepseek-v2": {  # like V2: queries from the states, softmax over the experts
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 20,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1},
    },
    "deepseek-v3": {  # like V3: queries from a latent of their own, sigmoid of each expert's logit
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 40,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
    },
    "granite-moe": {
        "model_type": "granitemoe",
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.5,
        "tie_word_embeddings": True,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 17,
        "num_hidden_layers": 4,
        "rope_parameters": YARN | {"truncate": False, "rope_theta": 150000.0},
    },
}


def save_reference(directory: Path, case: dict[str, Any], **save: Any) -> Any:
    """Saves a model with random weights in float32 and returns it. `save` are options of save_pretrained."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(TINY | case)), dtype=torch.float32).eval()
    with torch.no_grad():  # sharper than the default initialisation, so that an error in a mask or norm shows
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2).add_(1.0 if parameter.ndim == 1 else 0.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
    model.save_pretrained(directory, **save)
    return model


def tiny_prompt(length: int, seed: int) -> list[int]:
    """Returns a reproducible random prompt."""
    return torch.randint(3, TINY["vocab_size"], (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_greedy(reference: Any, prompt: Sequence[int], tokens: Sequence[Token]) -> None:
    """Asserts that the tokens are the greedy answer of the reference, with its log-probabilities if they have any."""
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *(token.id for token in tokens)]])).logits
    logprobs = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    assert [token.id for token in tokens] == logprobs.argmax(-1).tolist()
    for row, token in zip(logprobs, tokens, strict=True):
        assert token.logprob is None or token.logprob == pytest.approx(float(row[token.id]), abs=1e-4)


class Rig:
    """A decoder with a KV pool; logits() computes one step and returns the logits of all its tokens.

    `shard` and `all_reduce` make it one rank of several, see `Decoder`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        block_size: int = 4,
        num_blocks: int = 64,
        shard: Shard = UNSHARDED,
        all_reduce: AllReduce | None = None,
    ) -> None:
        whole = parse_spec(*read_config(directory))
        spec = shard.shard_spec(whole)
        assert isinstance(spec, ModelSpec)
        sizes = spec.num_layers, spec.num_kv_heads, spec.head_dim, block_size
        layout = KVLayout("tiny", "0", *sizes, "float32", latent_dim=spec.latent_dim)
        self.kv = KVPool(layout, num_blocks, CPU)
        self.cache = self.kv.layers()
        windows, pad = spec.windows, self.kv.dummy_block
        self.backend = TorchAttention(self.cache, spec.num_heads, windows, pad, scale=spec.scale)
        self.model = Decoder(spec, 256, CPU, torch.float32, all_reduce=all_reduce)
        load_weights(self.model, directory, whole, shard)

    def hidden(self, tokens: list[list[int]], starts: list[int], blocks: list[list[int]]) -> torch.Tensor:
        """Computes one step and returns the states of all its tokens."""
        counts = [len(t) for t in tokens]
        metadata = self.backend.prepare(StepShape(starts, counts, blocks))
        positions = torch.cat([torch.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
        flat = torch.tensor([i for t in tokens for i in t])
        return self.model.forward(flat, positions, ForwardContext(self.cache, self.backend, metadata))

    def logits(self, tokens: list[list[int]], starts: list[int], blocks: list[list[int]]) -> list[torch.Tensor]:
        with torch.inference_mode():
            hidden = self.hidden(tokens, starts, blocks)
            return list(self.model.logits(hidden).split([len(t) for t in tokens]))


def assert_logits(reference: Any, rig: Rig) -> None:
    """Compares logits with those of `reference`: of whole prompts in one step, then of steps of mixed sizes.

    The steps compute the same prompts, down to single tokens.
    """
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 160, (n,), generator=generator).tolist() for n in (1, 4, 30, 70)]
    blocks = [[1], [5], list(range(24, 40)), [63, 62, 61, 60, *range(44, 60)]]
    with torch.inference_mode():
        expected = [reference(torch.tensor([p])).logits[0] for p in prompts]
    for got, want in zip(rig.logits(prompts, [0] * 4, blocks), expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    done = [0, 0, 0, 0]
    for sizes in ([1, 1, 9, 40], [0, 2, 1, 5], [0, 1, 19, 1], [0, 0, 1, 23], [0, 0, 0, 1]):
        rows = [r for r in range(4) if sizes[r]]
        pieces = [prompts[r][done[r] : done[r] + sizes[r]] for r in rows]
        result = rig.logits(pieces, [done[r] for r in rows], [blocks[r] for r in rows])
        for r, got in zip(rows, result, strict=True):
            want = expected[r][done[r] : done[r] + sizes[r]]
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
            done[r] += sizes[r]
    assert done == [1, 4, 30, 70]
