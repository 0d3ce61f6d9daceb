"""Loads the parameters of a Decoder from safetensors (one file, or several with an index), or makes random parameters.

Models without safetensors are read from .bin files in the same way, by torch.load(weights_only=True).

Every module names its checkpoint tensors (layers.py). `checkpoint_targets` maps these names to parameters. Tensors are
copied one at a time from the memory-mapped file to the device and converted there, so the host holds no copy of the
model. A missing tensor, an unknown tensor, or a tensor that is present twice with different numbers is a ConfigError.
This module also computes the revision, a hash of configuration and weights.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from common.errors import ConfigError, describe
from common.model.directory import directory_name
from common.model.hub import WEIGHTS
from engine.models.base import ModelShape
from engine.models.decoder import Decoder
from engine.models.layers import Embedding, Linear, RMSNorm, Sinks, Target
from engine.models.moe import Experts, Router
from engine.models.spec.model import MXFP4_GROUP
from engine.models.spec import UNSHARDED, ModelSpec, Shard
from engine.progress import progress

_log = logging.getLogger(__name__)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_SAMPLES, _SAMPLE_BYTES = 16, 256  # The revision hashes this many samples of each tensor, of this size.


def checkpoint_targets(root: nn.Module, prefix: str = "", shard: Shard = UNSHARDED) -> dict[str, Target]:
    """Returns the destination of each tensor of a module and its submodules, by its name without the prefix."""
    targets: dict[str, Target] = {}
    for module in root.modules():
        if isinstance(module, Linear | Embedding | RMSNorm):
            for kind, parameter in module.named_parameters(recurse=False):
                parts = torch.split(parameter, list(module.parts.values()))
                for name, part in zip(module.parts, parts, strict=True):
                    order = module.orders.get(name)
                    targets[f"{prefix}{name}.{kind}"] = Target(part, _split_dim(module, kind), order)
        elif isinstance(module, Sinks):
            (name,) = module.parts
            targets[f"{prefix}{name}"] = Target(module.weight, module.split)
        elif isinstance(module, Experts | Router):
            found = module.targets(shard) if isinstance(module, Experts) else module.targets()
            targets |= {f"{prefix}{name}": target for name, target in found}
    return targets


def _decoder_targets(model: Decoder, shard: Shard) -> dict[str, Target]:
    parts: list[tuple[nn.Module, str]] = [(module, "") for module in (model.embedding, model.norm, model.head)]
    parts += [(layer, f"model.layers.{index}.") for index, layer in enumerate(model.layer_list)]
    return {name: target for part in parts for name, target in checkpoint_targets(*part, shard).items()}


def _split_dim(module: nn.Module, kind: str) -> int | None:
    """Returns the dimension in which ranks split a parameter. The bias of a partial sum is not split."""
    split: int | None = getattr(module, "split", None)
    return None if kind == "bias" and split == 1 else split


def load_weights(model: Decoder, model_dir: Path, spec: ModelSpec, shard: Shard = UNSHARDED) -> None:
    """Loads this rank's part (`shard`) of a checkpoint of the whole model `spec` into `model`, in the model's dtype."""
    targets = _decoder_targets(model, shard)
    missing = {name for name, target in targets.items() if target.tensor is not None and not target.replaces}
    unused = tuple(f"model.layers.{spec.num_layers + index}." for index in range(spec.extra_layers))
    only_pickled(model_dir)
    total = sum(file.stat().st_size for file in _files(model_dir))
    with progress(f"loading {directory_name(model_dir)}", total / 1e9, "GB") as loaded:
        for file, name in _tensors(model_dir, model.embedding.weight.device):
            # With tied embeddings a checkpoint has either name, or both.
            key = EMBEDDING if name == HEAD and spec.tie_word_embeddings else name
            target = targets.get(key)
            if target is None:
                # Only rank 0 computes logits.
                known = name.endswith("rotary_emb.inv_freq") or name.startswith(unused)
                if not known and not (name == HEAD and shard.rank > 0):
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
    if missing:
        raise ConfigError(f"the checkpoint lacks {len(missing)} tensors, for example {min(missing)}")


def _read(file: Any, name: str, target: Target, shard: Shard) -> Tensor:
    """Reads this rank's part of a tensor, and no other bytes. Raises ConfigError if it does not fit the target."""
    assert target.tensor is not None
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
    if torch.is_floating_point(tensor) != torch.is_floating_point(target.tensor):
        needed = "floating-point weights" if torch.is_floating_point(target.tensor) else f"{target.tensor.dtype}"
        raise ConfigError(f"{name} has dtype {tensor.dtype}; only {needed} are supported")
    return tensor if target.order is None else tensor[target.order.to(tensor.device)]


def randomize(model: nn.Module, seed: int, shard: Shard = UNSHARDED) -> None:
    """Fills all parameters in place with random numbers: norms with 1, biases with 0, matrices with N(0, 1 / inputs).

    A seed gives the same numbers on all devices of one type: each parameter has its own stream, keyed by its name. A
    shard gets its part of the numbers of the whole model. Peak memory is the shard and one whole parameter.
    """
    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            shape = _whole_shape(module, kind, parameter, shard)
            if shape == list(parameter.shape):
                _randomize(f"{path}.{kind}", parameter, seed)
                continue
            whole = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
            _randomize(f"{path}.{kind}", whole, seed)
            parameter.copy_(rank_part(module, kind, whole, shard))


def _whole_shape(module: nn.Module, kind: str, parameter: Tensor, shard: Shard) -> list[int]:
    """Returns the shape of a parameter in the whole model."""
    if isinstance(module, Experts):
        return module.whole_shape(kind, shard)
    shape, split = list(parameter.shape), _split_dim(module, kind)
    if split is not None:
        shape[split] *= shard.size
    return shape


def rank_part(module: nn.Module, kind: str, whole: Tensor, shard: Shard) -> Tensor:
    """Returns the part of the whole model's parameter `kind` that belongs to `module`, the module of this rank."""
    if isinstance(module, Experts):
        return module.rank_part(kind, whole, shard)
    split = _split_dim(module, kind)
    if split is None:
        return whole
    assert isinstance(module, Linear | RMSNorm | Sinks)
    joined = module.parts.values() if split == 0 else [module.in_features]
    parts = torch.split(whole, [width * shard.size for width in joined], split)
    return torch.cat([part.chunk(shard.size, split)[shard.rank] for part in parts], split)


def _randomize(name: str, parameter: Tensor, seed: int) -> None:
    if parameter.ndim == 1 or name.endswith("bias"):
        parameter.fill_(0.0 if name.endswith(("bias", "correction")) else 1.0)
        return
    stream = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest()
    generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(stream))
    inputs = parameter.shape[-1]
    if parameter.dtype == torch.uint8:
        if name.endswith("scales"):  # The numbers of 4 bits have a mean square of 8.6.
            parameter.fill_(127 - round(math.log2(8.6 * inputs * MXFP4_GROUP) / 2))
        else:
            parameter.random_(0, 256, generator=generator)
        return
    parameter.normal_(0.0, 1 / math.sqrt(inputs), generator=generator)


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
        if path.suffix == ".bin":
            for name, tensor in sorted(_read_pickled(path).items()):
                content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                numbers = tensor.contiguous().flatten().view(torch.uint8)
                for offset in range(0, len(numbers), max(len(numbers) // _SAMPLES, 1)):
                    content.update(numbers[offset : offset + _SAMPLE_BYTES].numpy().tobytes())
            continue
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
            except (ValueError, AttributeError, KeyError, TypeError, OverflowError, RecursionError) as error:
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


def _files(model_dir: Path) -> list[Path]:
    """Returns the checkpoint's files in a stable order: safetensors, or .bin files if there are none."""
    for single, index in ((model_dir / one, model_dir / several) for one, several in WEIGHTS):
        if single.is_file():
            return [single]
        if not index.is_file():
            continue
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            files = [model_dir / name for name in names]
            missing = next((file for file in files if not file.is_file()), None)
        except (ValueError, KeyError, AttributeError, TypeError, OSError, RecursionError) as error:
            raise ConfigError(f"{index} is not an index of shards: {describe(error)}", field="model") from error
        if missing is not None:
            raise ConfigError(f"{missing}, named by the index, does not exist", field="model")
        if not files:
            raise ConfigError(f"{index} names no file", field="model")
        return files
    raise ConfigError(f"{model_dir} has neither model.safetensors nor an index of shards nor .bin files", field="model")


def only_pickled(model_dir: Path) -> bool:
    """Returns whether the weights are .bin files, and logs a notice if they are."""
    pickled = not (model_dir / "model.safetensors").is_file() and _files(model_dir)[0].suffix == ".bin"
    if pickled:
        text = "%s has no safetensors: its .bin files are read by torch.load(weights_only=True), which runs no code"
        _log.warning(text, model_dir)
    return pickled


def _tensors(model_dir: Path, device: torch.device) -> Iterator[tuple[Any, str]]:
    """Yields (open file, name) of every tensor. Tensors are read to the device."""
    for path in _files(model_dir):
        try:
            opened: Any = _Pickled(path, device) if path.suffix == ".bin" else safe_open(path, "pt", device=str(device))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} cannot be read as safetensors: {describe(error)}", field="model") from error
        with opened as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                yield file, name


class _Pickled:
    """A .bin file with the methods of safe_open."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self._tensors, self._device = _read_pickled(path), device

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tensors = {}

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name].to(self._device)

    def get_slice(self, name: str) -> _PickledSlice:
        return _PickledSlice(self._tensors[name], self._device)


class _PickledSlice:
    """A tensor of a .bin file; a caller reads a part of it."""

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        self._tensor, self._device = tensor, device

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, part: Any) -> Tensor:
        return self._tensor[part].to(self._device)


def _read_pickled(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a .bin file, by mapping it into memory if its format allows. Raises ConfigError."""
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
    try:
        try:
            tensors = torch.load(path, mmap=True, **options)
        except RuntimeError:  # the format before torch 1.6 cannot be mapped
            tensors = torch.load(path, **options)
    except Exception as error:  # a damaged archive or pickle raises anything
        problem = f"{path} cannot be read by torch.load(weights_only=True): {describe(error)}"
        raise ConfigError(problem, field="model") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ConfigError(f"{path} is not a dictionary of tensors", field="model")
    return tensors
