"""Tiny random models of the families that transformers computes over our KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 160
FOREIGN_TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GROUPED = {"num_key_value_heads": 2}
LOCAL_GLOBAL = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8, "head_dim": 16}
FOREIGN_CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16},
    "gpt_neox": {"rotary_pct": 0.5},
    "gemma2": GROUPED | LOCAL_GLOBAL | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "gemma3_text": GROUPED
    | LOCAL_GLOBAL
    | {
        "query_pre_attn_scalar": 48,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        },
    },
    "phi3": GROUPED | {"sliding_window": 9},
    "apertus": GROUPED,
    "arcee": GROUPED,
    "biogpt": {},
    "codegen": {"rotary_dim": 4},
    "cohere": GROUPED,
    "cohere2": GROUPED | {"sliding_window": 8, "head_dim": 8},
    "ernie4_5": GROUPED | {"head_dim": 8},
    "exaone4": GROUPED | {"sliding_window": 8},
    "gemma": GROUPED | {"head_dim": 16},
    "glm4": GROUPED | {"head_dim": 8},
    "gpt_bigcode": {},
    "gptj": {"rotary_dim": 4},
    "granite": GROUPED | {"attention_multiplier": 0.2, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "helium": GROUPED | {"head_dim": 8},
    "nemotron": GROUPED,
    "olmo": GROUPED | {"clip_qkv": 1.0},
    "olmo2": GROUPED,
    "persimmon": {},
    "phi": GROUPED,
    "qwen2_moe": GROUPED | {"num_experts": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "seed_oss": GROUPED | {"head_dim": 8},
    "smollm3": GROUPED,
    "stablelm": GROUPED | {"use_qkv_bias": True},
    "starcoder2": GROUPED | {"sliding_window": 8},
}


def save_foreign(directory: Path, model_type: str, **config: Any) -> Any:
    """A random model of a family, sharper than the default, so that an error in a mask or a position shows."""
    torch.manual_seed(7)
    made = AutoConfig.for_model(model_type, **(FOREIGN_TINY | config))
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2).add_(1.0 if parameter.ndim == 1 else 0.0)
    model.save_pretrained(directory)
    return model
