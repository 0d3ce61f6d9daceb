"""Tiny hybrid models of transformers with random weights: gated delta layers and attention with output gates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

TINY_HYBRID: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 8192,
    "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
_EXPERTS = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
#: The families, by name. The last layer of qwen3.5 is a gated delta layer.
HYBRID_CASES: dict[str, dict[str, Any]] = {
    "qwen3-next": {"model_type": "qwen3_next", "mlp_only_layers": [1], "attention_bias": True} | _EXPERTS,
    "qwen3.5": {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
    },
    "qwen3.5-moe": {"model_type": "qwen3_5_moe_text", "full_attention_interval": 2} | _EXPERTS,
}
_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}


def save_hybrid(directory: Path, name: str, *, multimodal: bool = False, **changes: Any) -> Any:
    """Saves a model with random weights in float32 and returns its text model.

    multimodal: with an image encoder. `changes` are fields of its configuration.
    """
    torch.manual_seed(11)
    case = TINY_HYBRID | HYBRID_CASES[name] | changes
    if multimodal:
        kind = case["model_type"].removesuffix("_text")
        config = AutoConfig.for_model(kind, text_config=case, vision_config=_VISION)
        model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**case), dtype=torch.float32).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith("A_log"):
                parameter.uniform_(-3.0, 1.0)
            elif path.endswith("linear_attn.norm.weight"):
                parameter.normal_(1.0, 0.2)
            else:
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(directory)
    config_file = directory / "config.json"
    content = json.loads(config_file.read_text())
    content["eos_token_id"] = None
    config_file.write_text(json.dumps(content))
    return model
