"""Loads the parameters of a Decoder from safetensors (one file, or several with an index), or makes random parameters.

Tensors are copied one at a time from the memory-mapped file to the device and converted there, so the host holds no
copy of the model. A missing tensor, an unknown tensor, or a tensor that is present twice with different numbers is a
ConfigError. This module also computes the revision, a hash of configuration and weights.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from common.errors import ConfigError
from engine.models.base import ModelShape
from engine.models.decoder import Decoder
from engine.models.layers import MLP, Attention
from engine.models.shard import UNSHARDED, Shard
from engine.models.spec import ModelSpec
from engine.progress import progress

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

#: The revision hashes this many samples of each tensor, of this size.
_SAMPLES, _SAMPLE_BYTES = 16, 256


def load_weights(model: Decoder, model_dir: Path, spec: ModelSpec, shard: Shard = UNSHARDED) -> None:
    """Loads all parameters of `model`, which is the part `shard` of the checkpoint, in the model's dtype.

    Args:
        spec: the spec of the whole model.
    """
    targets = _targets(model)
    missing = set(targets)
    total = sum(file.stat().st_size for file in _files(model_dir))
    with progress(f"loading {model_dir.name}", total / 1e9, "GB") as loaded:
        for name, tensor in _tensors(model_dir, model.embedding.weight.device, shard):
            loaded.advance(tensor.nbytes / 1e9)
            if name == HEAD and shard.rank > 0 and not spec.tie_word_embeddings:
                continue  # only rank 0 computes logits
            # With tied embeddings a checkpoint has either name, or both.
            key = EMBEDDING if name == HEAD and spec.tie_word_embeddings else name
            target = targets.get(key)
            if target is None:
                if not name.endswith("rotary_emb.inv_freq"):
                    raise ConfigError(f"the checkpoint has a tensor {name} that {model.spec.architecture} does not use")
            elif target.shape != tensor.shape:
                raise ConfigError(f"{name} has shape {tuple(tensor.shape)}, the config says {tuple(target.shape)}")
            elif key in missing:
                target.copy_(tensor)
                missing.discard(key)
            elif not torch.equal(target, tensor.to(target.dtype)):
                tie = f"; tie_word_embeddings is true, but {HEAD} and {EMBEDDING} differ" if key == EMBEDDING else ""
                raise ConfigError(f"the checkpoint has {key} twice, with different numbers{tie}")
    if missing:
        raise ConfigError(f"the checkpoint lacks {len(missing)} tensors, for example {min(missing)}")


def randomize(model: nn.Module, seed: int) -> None:
    """Fills all parameters in place with random numbers: norms with 1, biases with 0, matrices with N(0, 1 / inputs).

    A seed gives the same numbers on all devices of one type: each parameter has its own stream, keyed by its name.
    """
    for name, parameter in model.named_parameters():
        _randomize(name, parameter, seed)


def randomize_shard(model: Decoder, seed: int, spec: ModelSpec, shard: Shard) -> None:
    """Fills a shard with its part of the numbers that `randomize` makes for the whole model.

    Peak memory is the shard and one whole parameter.

    Args:
        spec: the spec of the whole model.
    """
    whole = dict(Decoder(spec, 1, torch.device("meta"), model.embedding.weight.dtype).named_parameters())
    for name, parameter in model.named_parameters():
        full = torch.empty(whole[name].shape, dtype=parameter.dtype, device=parameter.device)
        _randomize(name, full, seed)
        parameter.copy_(shard.slice_of(name, full, spec))


def _randomize(name: str, parameter: Tensor, seed: int) -> None:
    if parameter.ndim == 1:
        parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    stream = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest()
    generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(stream))
    parameter.normal_(0.0, 1 / math.sqrt(parameter.shape[-1]), generator=generator)


def dummy_revision(spec: ModelShape, seed: int, device: torch.device) -> str:
    """Returns the revision of random weights. Equal numbers have equal revisions, which no checkpoint has."""
    return digest(f"dummy {seed} {device.type} {spec!r}")


def digest(text: str) -> str:
    """Hashes a text to 16 hex digits."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def weights_revision(spec: ModelShape, model_dir: Path) -> str:
    """Returns 16 hex digits that identify the configuration and the weights of a checkpoint.

    Hashes the spec, the header of every file (names, shapes, dtypes) and samples of every tensor. A fine-tune changes
    the samples; a copy of the directory does not. Reads a few MB for a model of any size.
    """
    content = hashlib.blake2b(repr(spec).encode(), digest_size=8)
    for path in _files(model_dir):
        size = path.stat().st_size
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            if header_size > size:
                raise ConfigError(f"{path} is not a safetensors file", field="model")
            header_bytes = file.read(header_size)
            content.update(header_bytes)
            try:
                header: dict[str, Any] = json.loads(header_bytes)
                offsets = [header[name]["data_offsets"] for name in sorted(header.keys() - {"__metadata__"})]
                spans = [(int(begin), int(end)) for begin, end in offsets]
            except (ValueError, AttributeError, KeyError, TypeError) as error:
                raise ConfigError(f"{path} is not a safetensors file", field="model") from error
            complete = 8 + header_size + max((end for _, end in spans), default=0)
            if complete > size:
                raise ConfigError(f"{path} has {size} of its {complete} bytes", field="model")
            for begin, end in spans:
                step = max((end - begin) // _SAMPLES, 1)
                for offset in range(begin, end, step):
                    file.seek(8 + header_size + offset)
                    content.update(file.read(min(_SAMPLE_BYTES, end - offset)))
    return content.hexdigest()


def layer_targets(prefix: str, spec: ModelSpec, attention: Attention, mlp: MLP) -> dict[str, Tensor]:
    """Returns the destination of each matrix and bias of one layer: a parameter, or its part of a merged parameter.

    Args:
        prefix: prefix of the layer's tensor names in the checkpoint, without the dot.
    """
    targets: dict[str, Tensor] = {}
    qkv_sizes = [spec.query_size, spec.kv_size, spec.kv_size]
    for kind, biased, names, merged, sizes in (
        ("self_attn", spec.qkv_bias, ("q_proj", "k_proj", "v_proj"), attention.qkv, qkv_sizes),
        ("self_attn", spec.out_bias, ("o_proj",), attention.out, [spec.hidden_size]),
        ("mlp", spec.mlp_bias, ("gate_proj", "up_proj"), mlp.gate_up, [spec.intermediate_size] * 2),
        ("mlp", spec.mlp_bias, ("down_proj",), mlp.down, [spec.hidden_size]),
    ):
        for name, part in zip(names, torch.split(merged.weight, sizes), strict=True):
            targets[f"{prefix}.{kind}.{name}.weight"] = part
        if biased:
            for name, part in zip(names, torch.split(merged.bias, sizes), strict=True):
                targets[f"{prefix}.{kind}.{name}.bias"] = part
    return targets


def _targets(model: Decoder) -> dict[str, Tensor]:
    """Returns the destination of each checkpoint tensor: a parameter, or its part of a merged parameter."""
    spec = model.spec
    targets: dict[str, Tensor] = {
        EMBEDDING: model.embedding.weight,
        "model.norm.weight": model.norm.weight,
    }
    if not spec.tie_word_embeddings:
        targets[HEAD] = model.head.weight
    for index, layer in enumerate(model.layer_list):
        prefix = f"model.layers.{index}"
        attention = layer.attention
        targets |= layer_targets(prefix, spec, attention, layer.mlp)
        targets[f"{prefix}.input_layernorm.weight"] = layer.attention_norm.weight
        targets[f"{prefix}.post_attention_layernorm.weight"] = layer.mlp_norm.weight
        if attention.q_norm is not None and attention.k_norm is not None:
            targets[f"{prefix}.self_attn.q_norm.weight"] = attention.q_norm.weight
            targets[f"{prefix}.self_attn.k_norm.weight"] = attention.k_norm.weight
    return targets


def _files(model_dir: Path) -> list[Path]:
    """Returns the checkpoint's files in a stable order."""
    single, index = model_dir / "model.safetensors", model_dir / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ConfigError(f"{model_dir} has neither model.safetensors nor an index of shards", field="model")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index} is not an index of shards: {error!r}", field="model") from error
    files = [model_dir / name for name in names]
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{file}, named by the index, does not exist", field="model")
    return files


def _tensors(model_dir: Path, device: torch.device, shard: Shard) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, this rank's part on the device) of every tensor."""
    for path in _files(model_dir):
        with ExitStack() as stack:
            try:
                file = stack.enter_context(safe_open(path, framework="pt", device=str(device)))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path} cannot be read as safetensors: {error}", field="model") from error
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                tensor = shard.read(file, name)
                if not torch.is_floating_point(tensor):
                    raise ConfigError(f"{name} has dtype {tensor.dtype}; only floating-point weights are supported")
                yield name, tensor
