"""Loads the parameters of a Decoder from its checkpoint.

Every module names its checkpoint tensors (layers.py). `checkpoint_targets` maps these names to parameters. Tensors are
copied one at a time from the memory-mapped file to the device and converted there, so the host holds no copy of the
model. A missing tensor, an unknown tensor, or a tensor that is present twice with different numbers is a ConfigError.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import ConfigError
from common.model.directory import directory_name
from engine.models.decoder import Decoder
from engine.models.gated_delta.layer import DeltaRule
from engine.models.layers import Embedding, Linear, RMSNorm, Sinks, Target
from engine.models.moe import ExpertRouter, Experts
from engine.models.spec import UNSHARDED, ModelSpec, Shard
from engine.models.spec.text_tower import UNUSED_TENSORS
from engine.models.weights.files import OpenFiles, only_pickled, tensors, weight_files
from engine.models.weights.shards import part_of, split_dim
from engine.progress import Progress, progress
from engine.quantization.checkpoint import LayerReader
from engine.quantization.scheme import Quantization
from engine.quantization.weight import concatenate

_log = logging.getLogger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_QUANTIZED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32)
#: Scales of keys and values in the files of the formats. KV in 8 bits has a scale for each token, see `LayerKV`.
_KV_SCALE = re.compile(r"\.self_attn\.((attn\.)?[kv]_scale|kv_scale|[kv]_proj\.([kv]_scale|output_scale))$")


def checkpoint_targets(root: nn.Module, prefix: str = "", shard: Shard = UNSHARDED) -> dict[str, Target]:
    """Returns the destination of each tensor of a module and its submodules, by its name without the prefix."""
    targets: dict[str, Target] = {}
    for module in root.modules():
        if isinstance(module, Linear | Embedding | RMSNorm):
            for kind, parameter in module.named_parameters(recurse=False):
                if kind == "weight" and isinstance(module, Linear) and module.scheme is not None:
                    continue  # `_load_quantized` reads it
                parts = torch.split(parameter, list(module.parts.values()))
                for name, part in zip(module.parts, parts, strict=True):
                    shift = module.shift if isinstance(module, RMSNorm) else 0.0
                    target = Target(part, split_dim(module, kind), module.orders.get(name), shift=shift)
                    targets[f"{prefix}{name}.{kind}"] = target._replace(copies=module.copies.get(name, 1))
        elif isinstance(module, Sinks):
            (name,) = module.parts
            targets[f"{prefix}{name}"] = Target(module.weight, module.split)
        elif isinstance(module, Experts | ExpertRouter | DeltaRule):
            found = module.targets(shard) if isinstance(module, Experts) else module.targets()
            for name, target in found:
                replaces = frozenset(prefix + replaced for replaced in target.replaces)
                targets[f"{prefix}{name}"] = target._replace(replaces=replaces)
    return targets


def _decoder_targets(model: Decoder, shard: Shard = UNSHARDED) -> dict[str, Target]:
    parts: list[tuple[nn.Module, str]] = [(module, "") for module in (model.embedding, model.norm, model.head)]
    parts += [(layer, f"model.layers.{index}.") for index, layer in enumerate(model.layer_list)]
    return {name: target for part in parts for name, target in checkpoint_targets(*part, shard).items()}


def load_weights(
    model: Decoder, model_dir: Path, spec: ModelSpec, shard: Shard = UNSHARDED, quantization: Quantization | None = None
) -> None:
    """Loads this rank's part (`shard`) of a checkpoint of the whole model `spec` into `model`, in the model's dtype.

    `quantization` is that of the model. Quantised layers are read and placed one after the other, so the peak memory is
    the model and the tensors of one layer.
    """
    targets = _decoder_targets(model, shard)
    missing = {name for name, target in targets.items() if target.tensor is not None and not target.replaces}
    unused = tuple(f"model.layers.{spec.num_layers + index}." for index in range(spec.extra_layers))
    unused += UNUSED_TENSORS if spec.states is not None else ()
    others = {  # quantised experts of other ranks
        prefix + name
        for prefix, experts in model.experts()
        if experts.scheme is not None and len(experts.gate_up) < experts.num_experts
        for name in experts.projection_names()
    }
    skipped = 0
    only_pickled(model_dir)
    total = sum(file.stat().st_size for file in weight_files(model_dir))
    device = model.embedding.weight.device
    with progress(f"loading {directory_name(model_dir)}", total / 1e9, "GB") as loaded:
        read = set() if quantization is None else _load_quantized(model, model_dir, shard, loaded)
        for file, name in tensors(model_dir, device, text_part=spec.states is not None):
            # With tied embeddings a checkpoint has either name, or both.
            key = EMBEDDING if name == HEAD and spec.tie_word_embeddings else name
            target = targets.get(key)
            if target is None:
                skipped += name.startswith(unused)
                known = name in read or name.startswith(unused) or name.rpartition(".")[0] in others
                if not known and not _is_unused(file, name, shard, quantization):
                    raise ConfigError(f"the checkpoint has a tensor {name} that {spec.architecture} does not use")
                continue
            if target.tensor is None:
                continue
            tensor = _read(file, name, target, shard)
            loaded.advance(tensor.nbytes / 1e9)
            if key in missing or target.replaces:
                target.tensor.copy_(tensor)
                missing -= {key, *target.replaces}
            elif not torch.equal(target.tensor, tensor.to(target.tensor.dtype)):
                tie = f"; tie_word_embeddings is true, but {HEAD} and {EMBEDDING} differ" if key == EMBEDDING else ""
                raise ConfigError(f"the checkpoint has {key} twice, with different numbers{tie}")
    if skipped:
        _log.info("%d tensors for multi-token prediction or images are not used: neither is supported", skipped)
    if missing:
        raise ConfigError(f"the checkpoint lacks {len(missing)} tensors, for example {min(missing)}")


def _is_unused(file: Any, name: str, shard: Shard, quantization: Quantization | None) -> bool:
    """Returns whether a checkpoint may have a tensor that the model has no parameter for."""
    if name.startswith("lm_head.") and shard.rank > 0:  # only rank 0 computes logits
        return True
    if name.endswith("rotary_emb.inv_freq"):
        return True
    if quantization is None:
        return False
    if quantization.kv_scales and _KV_SCALE.search(name):
        if ".layers.0." in name:
            _log.info("%s and the like are not used: KV in 8 bits has a scale for each token and head", name)
        return True
    module, _, kind = name.rpartition(".")  # GPTQ writes a bias of zeros for layers without one
    return kind == "bias" and quantization.scheme_of(module) is not None and not bool(file.get_tensor(name).any())


def _load_quantized(model: Decoder, model_dir: Path, shard: Shard, loaded: Progress) -> set[str]:
    """Reads the weights of the layers that have a scheme. Returns the names of the tensors that it has read."""
    text_part = model.spec.states is not None
    with OpenFiles(model_dir, model.embedding.weight.device, loaded, text_part=text_part) as files:
        for prefix, linear in model.linears():
            if linear.scheme is None:
                continue
            parts = []
            for name, outputs in linear.parts.items():
                own = shard.among(linear.copies.get(name, 1))
                across, along = (own.size if linear.split == dim else 1 for dim in (0, 1))
                sizes = outputs * across, linear.in_features * along
                weight = LayerReader(files, prefix + name, *sizes, linear.scheme).weight()
                weight = part_of(weight, linear, outputs, own)
                order = linear.orders.get(name)
                parts.append(weight if order is None else weight.reordered(order))
            try:
                model.place(linear, concatenate(parts))
            except ValueError as error:
                names = " and ".join(prefix + name for name in linear.parts)
                raise ConfigError(f"{names} cannot be one product: they have {error}", field="model") from error
        for prefix, experts in model.experts():
            if (scheme := experts.scheme) is None:
                continue
            for projection in experts.projections(shard):
                sizes = projection.outputs, projection.inputs
                weight = LayerReader(files, prefix + projection.name, *sizes, scheme).weight()
                experts.place(projection, weight, model.embedding.weight.dtype)
        return files.read_names


def _read(file: Any, name: str, target: Target, shard: Shard) -> Tensor:
    """Reads this rank's part of a tensor, and no other bytes. Raises ConfigError if it does not fit the target."""
    assert target.tensor is not None
    shard = shard.among(target.copies)
    part, split = file.get_slice(name), target.split
    shape, expected = list(part.get_shape()), list(target.shape or target.tensor.shape)
    if split is not None:
        expected[split] *= shard.size
    if shape != expected:
        raise ConfigError(f"{name} has shape {tuple(shape)}, the config says {tuple(expected)}")
    if target.read is not None:
        tensor: Tensor = target.read(part)
    elif split is None or shard.size == 1:
        tensor = file.get_tensor(name)
    else:
        width = target.tensor.shape[split]
        span = slice(shard.rank * width, (shard.rank + 1) * width)
        tensor = part[span] if split == 0 else part[:, span]
    wanted = (torch.uint8,) if target.tensor.dtype == torch.uint8 else _DTYPES
    if tensor.dtype not in wanted:
        dtype = str(tensor.dtype).removeprefix("torch.")
        problem = "the quantization config does not name this layer" if tensor.dtype in _QUANTIZED else "unsupported"
        names = "uint8" if len(wanted) == 1 else "float32, bfloat16 or float16"
        raise ConfigError(f"{name} has dtype {dtype}: {problem}; expected {names}")
    tensor = tensor if target.order is None else tensor[target.order.to(tensor.device)]
    return tensor.float() + target.shift if target.shift else tensor
