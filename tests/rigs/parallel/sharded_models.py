"""Configurations of every native family for 1 to 4 ranks. Their weights are random (`load_format="dummy"`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.rigs.engine.bare_model import bare_model
from tests.rigs.engine.tiny_models import MOE_CASES, TINY

VOCAB = 256
#: Architectures by model_type.
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
#: By name: fields of config.json, then settings of the engine.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"model_type": "llama"}, {}),
    "llama-shared-heads": ({"model_type": "llama", "num_key_value_heads": 2}, {}),
    "llama-one-head": ({"model_type": "llama", "num_key_value_heads": 1}, {}),
    "llama-fp8-kv": ({"model_type": "llama"}, {"kv_dtype": "fp8_e4m3"}),
    "llama-int8": ({"model_type": "llama", "num_key_value_heads": 2}, {"weights": "int8"}),
    "mistral": ({"model_type": "mistral", "sliding_window": 9, "num_key_value_heads": 2}, {}),
    "qwen2": ({"model_type": "qwen2", "num_key_value_heads": 2}, {}),
    "qwen3": ({"model_type": "qwen3", "head_dim": 32}, {}),
    **{name: (case, {}) for name, case in MOE_CASES.items()},
}


def sharded_model(directory: Path, name: str) -> tuple[Path, dict[str, Any]]:
    """Writes the config.json of a family. Returns the directory and the settings of its engines."""
    case, settings = FAMILIES[name]
    sizes = {"vocab_size": VOCAB, "intermediate_size": 96, "num_attention_heads": 12, "hidden_size": 96, "head_dim": 8}
    heads = {"num_key_value_heads": 12 if case["model_type"] in ("llama", "deepseek_v2", "deepseek_v3") else 4}
    config = TINY | sizes | heads | case | {"architectures": [_ARCHITECTURES[case["model_type"]]]}
    return bare_model(directory, config), {"load_format": "dummy", "dtype": "float32", **settings}
