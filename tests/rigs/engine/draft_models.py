"""Small target models, draft models and EAGLE heads with random weights, in the formats of public checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def tiny_target(directory: Path, *, vocab: int = 48, layers: int = 2, length: int = 256, scale: float = 0.3) -> Path:
    """Saves a random Llama of hidden size 32; its greedy output soon repeats."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=length,
        eos_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, scale).add_(1.0 if parameter.ndim == 1 else 0.0)
    model.save_pretrained(directory)
    return directory


def byte_tokenizer(directory: Path) -> int:
    """Saves a tokenizer of single bytes (ids 3 to 258, </s> is 2) in a model directory; returns its vocabulary size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(tokens[:3])
    tokenizer.save(str(directory / "tokenizer.json"))
    return len(tokens)


BYTES = 259  # tokens of byte_tokenizer


def draft_settings(target_dir: Path, root: Path, *, vocab: int = 48, noise: float = 0.02) -> dict[str, dict[str, Any]]:
    """Engine settings for each proposer over a tiny_target of two layers; `noise` is that of the draft model."""
    below = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 1]}}
    models = {
        "draft_model": disturbed(target_dir, root / "model", noise),
        "eagle": eagle_head(root / "eagle", vocab=vocab),
        "eagle3": eagle_head(root / "eagle3", vocab=vocab, fuses=True, draft_vocab=vocab // 2, **below),
    }
    kinds: dict[str, dict[str, Any]] = {"ngram": {"speculation": "ngram"}, "suffix": {"speculation": "suffix"}}
    for name, directory in models.items():
        kinds[name] = {"speculation": name.removesuffix("3"), "speculation_model": directory}
    return kinds


def disturbed(source: Path, directory: Path, noise: float = 0.02) -> Path:
    """Saves a copy of a model with noise on its weights; its tokens often agree with the original's."""
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
    """Saves a random EAGLE head.

    Args:
        fuses: EAGLE-3.
        draft_vocab: Size of a vocabulary of its own, a regular subset of the target's; 0 for the target's.
        suffix: `bin` for pytorch_model.bin, as the authors publish it; else safetensors.
        scale: Standard deviation of the weights.
        config: More fields of config.json.
    """
    directory.mkdir(parents=True)
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 40,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    }
    settings |= {"draft_vocab_size": draft_vocab or vocab} if fuses else {"bias": False}
    (directory / "config.json").write_text(json.dumps(settings | config))
    random, dim = torch.Generator().manual_seed(21), hidden // 2
    at, wide = ("midlayer.", 2 * hidden) if fuses else ("layers.0.", hidden)
    shapes = {
        at + "self_attn.q_proj.weight": (hidden, wide),
        at + "self_attn.k_proj.weight": (dim, wide),
        at + "self_attn.v_proj.weight": (dim, wide),
        at + "self_attn.o_proj.weight": (hidden, hidden),
        at + "mlp.gate_proj.weight": (40, hidden),
        at + "mlp.up_proj.weight": (40, hidden),
        at + "mlp.down_proj.weight": (hidden, 40),
        at + "post_attention_layernorm.weight": (hidden,),
        "fc.weight": (hidden, 3 * hidden if fuses else 2 * hidden),
    }
    if fuses:
        shapes |= {at + "input_layernorm.weight": (hidden,), at + "hidden_norm.weight": (hidden,)}
        shapes |= {"norm.weight": (hidden,), "lm_head.weight": (draft_vocab or vocab, hidden)}
    else:
        shapes |= {"embed_tokens.weight": (vocab, hidden)}  # a copy of the target's, in public checkpoints
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
