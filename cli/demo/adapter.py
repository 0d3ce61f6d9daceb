"""Writes a LoRA adapter with random weights for a model, to try adapters without training one.

    python -m cli.demo.adapter MODEL ADAPTER_DIR --rank 8 --seed 1

MODEL is smollm2, the demo's model, or a directory. The adapter is in PEFT's format. `--size 0` makes one that changes
nothing; 1, the default, changes every answer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from cli.demo.model import prepared
from common.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from engine.models.spec import ModelSpec


def module_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Returns inputs and outputs of the matrices of each layer, without experts, by their names in the checkpoint."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    attention = {"q": spec.query_size, "k": spec.kv_size, "v": spec.kv_size}
    shapes: dict[str, tuple[int, int]] = {}
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{name}_proj": (hidden, outputs) for name, outputs in attention.items()}
        shapes[f"{prefix}self_attn.o_proj"] = spec.query_size, hidden
        if not spec.has_experts(layer):
            shapes |= {f"{prefix}mlp.{name}_proj": (hidden, inner) for name in ("gate", "up")}
            shapes[f"{prefix}mlp.down_proj"] = inner, hidden
    return shapes


def write_random_adapter(model_dir: Path, directory: Path, *, rank: int, seed: int, size: float = 1.0) -> Path:
    """Writes an adapter of all matrices of the layers and returns its directory.

    size: about the ratio of the change to the weight. Raises ConfigError if the model is not native or has latents.
    """
    import torch
    from safetensors.torch import save_file

    from engine.models.spec import parse_spec, read_config

    spec = parse_spec(*read_config(model_dir))
    if spec.latent_dim:
        raise ConfigError("adapters over a model with latent attention are not supported", field="model")
    shapes = module_shapes(spec)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, (inputs, outputs) in shapes.items():
        a = torch.randn(rank, inputs, generator=generator) * (size / (rank * inputs) ** 0.5)
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(model_dir),
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in shapes}),
        "bias": "none",
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="smollm2 or a model directory")
    parser.add_argument("directory", type=Path, help="directory of the adapter, which is made")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=float, default=1.0, help="about the ratio of the change to the weight")
    args = parser.parse_args()
    try:
        model_dir = prepared(args.model, tokenizer=False, weights=False, say=print)
        write_random_adapter(model_dir, args.directory, rank=args.rank, seed=args.seed, size=args.size)
    except ConfigError as error:
        parser.error(error.message)


if __name__ == "__main__":
    main()
