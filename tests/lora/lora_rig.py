"""LoRA adapters in PEFT's format with random weights, and the models that result from merging them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

Q, K, V, OUT = (f"self_attn.{name}_proj" for name in "qkvo")
GATE, UP, DOWN = (f"mlp.{name}_proj" for name in ("gate", "up", "down"))
LAYER_MODULES = (Q, K, V, OUT, GATE, UP, DOWN)


def save_adapter(
    directory: Path,
    model: nn.Module,
    *,
    seed: int,
    modules: Sequence[str] = LAYER_MODULES,
    rank: int = 4,
    alpha: float = 8.0,
    rslora: bool = False,
    ranks: Mapping[str, int] | None = None,
    alphas: Mapping[str, float] | None = None,
    size: float = 0.15,
    **config: Any,
) -> Path:
    """Writes an adapter for a model of transformers and returns its directory.

    modules: ends of module names. ranks, alphas: rank_pattern and alpha_pattern, whose keys are ends of module names.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if not any(name == end or name.endswith(f".{end}") for end in modules):
            continue
        own = next((r for end, r in (ranks or {}).items() if name.endswith(end)), rank)
        outputs, inputs = module.weight.shape
        a, b = (torch.randn(shape, generator=generator) * size for shape in ((own, inputs), (outputs, own)))
        if isinstance(module, nn.Embedding):
            a, b = (
                torch.randn(own, outputs, generator=generator) * size,
                torch.randn(inputs, own, generator=generator) * size,
            )
            tensors |= {f"base_model.model.{name}.lora_embedding_A": a, f"base_model.model.{name}.lora_embedding_B": b}
        else:
            tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({end.rpartition(".")[2] for end in modules}),
        "use_rslora": rslora,
        "rank_pattern": dict(ranks or {}),
        "alpha_pattern": dict(alphas or {}),
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(settings | config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def merge(model: Any, directory: Path) -> Any:
    """Returns a copy of a model of transformers with an adapter merged, as PEFT's merge_and_unload defines it.

    This is the oracle: it shares no code with the engine. W + scale * B @ A, scale = alpha / r, or alpha / sqrt(r) with
    rsLoRA. Embedding and LM head are untied first.
    """
    from safetensors.torch import load_file

    config = json.loads((directory / "adapter_config.json").read_text())
    tensors = load_file(directory / "adapter_model.safetensors")
    merged = copy.deepcopy(model)
    if merged.lm_head.weight is merged.model.embed_tokens.weight:
        merged.lm_head.weight = nn.Parameter(merged.lm_head.weight.detach().clone())
    for name, module in merged.named_modules():
        prefix = f"base_model.model.{name}."
        a = tensors.get(prefix + "lora_A.weight", tensors.get(prefix + "lora_embedding_A"))
        b = tensors.get(prefix + "lora_B.weight", tensors.get(prefix + "lora_embedding_B"))
        if a is None or b is None:
            continue
        rank = next((r for end, r in config["rank_pattern"].items() if name.endswith(end)), config["r"])
        alpha = next((x for end, x in config["alpha_pattern"].items() if name.endswith(end)), config["lora_alpha"])
        scale = alpha / (rank**0.5 if config["use_rslora"] else rank)
        change = (a.T @ b.T if isinstance(module, nn.Embedding) else b @ a) * scale
        with torch.no_grad():
            module.weight += change
    return merged.eval()
