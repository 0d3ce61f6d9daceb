"""Small draft models, and EAGLE heads in the formats of public checkpoints, with random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def tiny_target(directory: Path, *, vocab: int = 48, layers: int = 2, length: int = 256, scale: float = 0.3) -> Path:
    """A random Llama of hidden size 32 that repeats itself soon when it is greedy."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=length, eos_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, scale).add_(1.0 if parameter.ndim == 1 else 0.0)
    model.save_pretrained(directory)
    return directory


def disturbed(source: Path, directory: Path, noise: float = 0.02) -> Path:
    """The same model with noise on its weights: it often agrees, and sometimes does not."""
    shutil.copytree(source, directory)
    random = torch.Generator().manual_seed(11)
    tensors = load_file(directory / "model.safetensors")
    for tensor in tensors.values():
        tensor.add_(torch.randn(tensor.shape, generator=random), alpha=noise)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def eagle_head(
    directory: Path,
    *,
    vocab: int = 48,
    hidden: int = 32,
    fuses: bool = False,
    draft_vocab: int = 0,
    suffix: str = "bin",
    scale: float = 0.3,
    **config: Any,
) -> Path:
    """A random head. fuses: EAGLE-3; draft_vocab: of its own, every other token of the target's. suffix: bin for the
    authors' pytorch_model.bin, else safetensors.
    """
    directory.mkdir(parents=True)
    settings = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": hidden,
        "intermediate_size": 40, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "rope_theta": 10000.0, "vocab_size": vocab,
        "tie_word_embeddings": False,
    }  # fmt: skip
    settings |= {"draft_vocab_size": draft_vocab or vocab} if fuses else {"bias": False}
    (directory / "config.json").write_text(json.dumps(settings | config))
    random, dim = torch.Generator().manual_seed(21), hidden // 2
    at, wide = ("midlayer.", 2 * hidden) if fuses else ("layers.0.", hidden)
    shapes = {
        at + "self_attn.q_proj.weight": (hidden, wide), at + "self_attn.k_proj.weight": (dim, wide),
        at + "self_attn.v_proj.weight": (dim, wide), at + "self_attn.o_proj.weight": (hidden, hidden),
        at + "mlp.gate_proj.weight": (40, hidden), at + "mlp.up_proj.weight": (40, hidden),
        at + "mlp.down_proj.weight": (hidden, 40), at + "post_attention_layernorm.weight": (hidden,),
        "fc.weight": (hidden, 3 * hidden if fuses else 2 * hidden),
    }  # fmt: skip
    if fuses:
        shapes |= {at + "input_layernorm.weight": (hidden,), at + "hidden_norm.weight": (hidden,)}
        shapes |= {"norm.weight": (hidden,), "lm_head.weight": (draft_vocab or vocab, hidden)}
    else:
        shapes |= {"embed_tokens.weight": (vocab, hidden)}  # of the target, in public checkpoints
    tensors = {
        name: torch.randn(shape, generator=random) * scale + (1.0 if len(shape) == 1 else 0.0)
        for name, shape in shapes.items()
    }
    if config.get("bias"):
        tensors["fc.bias"] = torch.randn(hidden, generator=random) * scale
    if draft_vocab:
        ids = torch.arange(draft_vocab) * (vocab // draft_vocab)
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    if suffix == "bin":
        torch.save(tensors, directory / "pytorch_model.bin")
    else:
        save_file(tensors, directory / "model.safetensors")
    return directory
