"""Fills a Decoder, from safetensors (one file, or shards with an index) or with random numbers, and names the content.

A tensor goes from the file's pages to the device and is converted there, one at a time: the host holds no copy of the
model. Every parameter must be filled, with one content, and every tensor of the checkpoint must have a home: a
checkpoint with more or less than the configuration promises is a ConfigError, never a model that is subtly another one.
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
from engine.models.decoder import MLP, Attention, Decoder
from engine.models.shard import UNSHARDED, Shard
from engine.models.spec import ModelSpec
from engine.progress import progress

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_SAMPLES = 16  # places of each tensor that enter the revision
_SAMPLE_BYTES = 256


def load_weights(model: Decoder, model_dir: Path, spec: ModelSpec, shard: Shard = UNSHARDED) -> None:
    """Fills all parameters of `model`, which is this part of the checkpoint's, converting to its dtype. spec: the
    whole model's.
    """
    homes = _targets(model)
    missing = set(homes)
    total = sum(file.stat().st_size for file in _files(model_dir))
    with progress(f"loading {model_dir.name}", total / 1e9, "GB") as loaded:
        for name, tensor in _tensors(model_dir, model.embedding.weight.device, shard):
            loaded.advance(tensor.nbytes / 1e9)
            if name == HEAD and shard.rank > 0 and not spec.tie_word_embeddings:
                continue  # logits are rank 0's
            # Where both are one, a checkpoint has either name, or both.
            at = EMBEDDING if name == HEAD and spec.tie_word_embeddings else name
            home = homes.get(at)
            if home is None:
                if not name.endswith("rotary_emb.inv_freq"):
                    raise ConfigError(f"the checkpoint has a tensor {name} that {model.spec.architecture} does not use")
            elif home.shape != tensor.shape:
                raise ConfigError(f"{name} has shape {tuple(tensor.shape)}, the config says {tuple(home.shape)}")
            elif at in missing:
                home.copy_(tensor)
                missing.discard(at)
            elif not torch.equal(home, tensor.to(home.dtype)):
                tie = f"; tie_word_embeddings says that {HEAD} is {EMBEDDING}, and it is not" if at == EMBEDDING else ""
                raise ConfigError(f"the checkpoint has {at} twice, with different numbers{tie}")
    if missing:
        raise ConfigError(f"the checkpoint lacks {len(missing)} tensors, such as {min(missing)}")


def randomize(model: nn.Module, seed: int) -> None:
    """Random parameters, made where they lie: norms are 1, biases 0, products keep the scale of what they multiply.

    The same seed makes the same numbers on devices of one type: each parameter has a stream of its own, keyed by name.
    """
    for name, parameter in model.named_parameters():
        _randomize(name, parameter, seed)


def randomize_shard(model: Decoder, seed: int, spec: ModelSpec, shard: Shard) -> None:
    """What `randomize` makes of the whole model of `spec`, as far as this part goes: one whole parameter at a time."""
    whole = dict(Decoder(spec, 1, torch.device("meta"), model.embedding.weight.dtype).named_parameters())
    for name, parameter in model.named_parameters():
        made = torch.empty(whole[name].shape, dtype=parameter.dtype, device=parameter.device)
        _randomize(name, made, seed)
        parameter.copy_(shard.slice_of(name, made, spec))


def _randomize(name: str, parameter: Tensor, seed: int) -> None:
    if parameter.ndim == 1:
        parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    stream = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest()
    generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(stream))
    parameter.normal_(0.0, 1 / math.sqrt(parameter.shape[-1]), generator=generator)


def dummy_revision(spec: ModelShape, seed: int, device: torch.device) -> str:
    """What `weights_revision` is for random weights: never that of a checkpoint, equal where the numbers are."""
    return digest(f"dummy {seed} {device.type} {spec!r}")


def digest(text: str) -> str:
    """16 hex digits."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def weights_revision(spec: ModelShape, model_dir: Path) -> str:
    """16 hex digits that name the weights' content and the configuration they are computed with.

    Hashes the spec, every file's header (names, shapes, dtypes) and samples spread over every tensor: a fine-tune
    changes the samples, a copy of the directory does not. Reads a few MB, whatever the model's size.
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
                spans = [header[name]["data_offsets"] for name in sorted(header.keys() - {"__metadata__"})]
                places = [(int(first), int(last)) for first, last in spans]
            except (ValueError, AttributeError, KeyError, TypeError) as error:
                raise ConfigError(f"{path} is not a safetensors file", field="model") from error
            complete = 8 + header_size + max((last for _, last in places), default=0)
            if complete > size:
                raise ConfigError(f"{path} has {size} of its {complete} bytes", field="model")
            for first, last in places:
                step = max((last - first) // _SAMPLES, 1)
                for offset in range(first, last, step):
                    file.seek(8 + header_size + offset)
                    content.update(file.read(min(_SAMPLE_BYTES, last - offset)))
    return content.hexdigest()


def layer_targets(at: str, spec: ModelSpec, attention: Attention, mlp: MLP) -> dict[str, Tensor]:
    """Where the tensors of a layer's products go, whose names begin with `at`: a parameter, or its part of a merged
    one.
    """
    homes: dict[str, Tensor] = {}
    qkv_sizes = [spec.query_size, spec.kv_size, spec.kv_size]
    for kind, biased, names, merged, sizes in (
        ("self_attn", spec.qkv_bias, ("q_proj", "k_proj", "v_proj"), attention.qkv, qkv_sizes),
        ("self_attn", spec.out_bias, ("o_proj",), attention.out, [spec.hidden_size]),
        ("mlp", spec.mlp_bias, ("gate_proj", "up_proj"), mlp.gate_up, [spec.intermediate_size] * 2),
        ("mlp", spec.mlp_bias, ("down_proj",), mlp.down, [spec.hidden_size]),
    ):
        for name, part in zip(names, torch.split(merged.weight, sizes), strict=True):
            homes[f"{at}.{kind}.{name}.weight"] = part
        if biased:
            for name, part in zip(names, torch.split(merged.bias, sizes), strict=True):
                homes[f"{at}.{kind}.{name}.bias"] = part
    return homes


def _targets(model: Decoder) -> dict[str, Tensor]:
    """Where each checkpoint tensor goes: a parameter, or its part of a merged one."""
    spec = model.spec
    homes: dict[str, Tensor] = {
        EMBEDDING: model.embedding.weight,
        "model.norm.weight": model.norm.weight,
    }
    if not spec.tie_word_embeddings:
        homes[HEAD] = model.head.weight
    for index, layer in enumerate(model.layer_list):
        at = f"model.layers.{index}"
        attention = layer.attention
        homes |= layer_targets(at, spec, attention, layer.mlp)
        homes[f"{at}.input_layernorm.weight"] = layer.attention_norm.weight
        homes[f"{at}.post_attention_layernorm.weight"] = layer.mlp_norm.weight
        if attention.q_norm is not None and attention.k_norm is not None:
            homes[f"{at}.self_attn.q_norm.weight"] = attention.q_norm.weight
            homes[f"{at}.self_attn.k_norm.weight"] = attention.k_norm.weight
    return homes


def _files(model_dir: Path) -> list[Path]:
    """The checkpoint's files in a stable order."""
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
    for path in _files(model_dir):
        with ExitStack() as stack:
            try:
                file = stack.enter_context(safe_open(path, framework="pt", device=str(device)))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path} cannot be read as safetensors: {error}", field="model") from error
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                tensor = shard.read(file, name)
                if not torch.is_floating_point(tensor):
                    raise ConfigError(f"{name} has dtype {tensor.dtype}; only floating-point weights are served")
                yield name, tensor
