"""Tiny model directories with a config.json only. Their weights are random (`load_format="dummy"`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: A Llama with native code.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
#: A model that transformers computes.
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 96,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}


def bare_model(directory: Path, config: dict[str, Any] = LLAMA) -> Path:
    """Writes `config` into `directory`, which it creates. Returns the directory."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory
