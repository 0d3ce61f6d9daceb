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
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
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
from engine.models.gated_delta.layer import DeltaRule
from engine.models.layers import Embedding, Linear, RMSNorm, Sinks, Target
from engine.models.moe import ExpertRouter, Experts
from engine.models.spec import UNSHARDED, ModelSpec, Shard
from engine.models.spec.model import MXFP4_GROUP
from engine.models.spec.text_tower import UNUSED_TENSORS, TextTensors
from engine.progress import Progress, progress
from engine.quantization.at_load import quantize
from engine.quantization.checkpoint import LayerReader
from engine.quantization.scheme import Quantization
from engine.quantization.weight import QuantizedWeight, concatenate

_log = logging.getLogger(__name__)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_QUANTIZED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32)
#: Scales of keys and values in the files of the formats. KV in 8 bits has a scale for each token, see `LayerKV`.
_KV_SCALE = re.compile(r"\.self_attn\.((attn\.)?[kv]_scale|kv_scale|[kv]_proj\.([kv]_scale|output_scale))$")
_SAMPLES, _SAMPLE_BYTES = 16, 256  # The revision hashes this many samples of each tensor, of this size.


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
                    target = Target(part, _split_dim(module, kind), module.orders.get(name), shift=shift)
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


def _split_dim(module: nn.Module, kind: str) -> int | None:
    """Returns the dimension in which ranks split a parameter. The bias of a partial sum is not split."""
    split: int | None = getattr(module, "split", None)
    return None if kind == "bias" and split == 1 else split


def load_weights(
    model: Decoder, model_dir: Path, spec: ModelSpec, shard: Shard = UNSHARDED, quantization: Quantization | None = None
) -> None:
    """Loads this rank's part (`shard`) of a checkpoint of the whole model `spec` into `model`, in the model's dtype.

    `quantization` is that of the model. Its layers are read and placed one after the other, so beside the model there
    are the tensors of one layer.
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
    total = sum(file.stat().st_size for file in _files(model_dir))
    device = model.embedding.weight.device
    with progress(f"loading {directory_name(model_dir)}", total / 1e9, "GB") as loaded:
        read = set() if quantization is None else _load_quantized(model, model_dir, shard, loaded)
        for file, name in _tensors(model_dir, device, text_part=spec.states is not None):
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
    """Reads the weights of the layers that have a scheme. Returns the names of the tensors that they consist of."""
    text_part = model.spec.states is not None
    with _OpenFiles(model_dir, model.embedding.weight.device, loaded, text_part=text_part) as files:
        for prefix, linear in model.linears():
            if linear.scheme is None:
                continue
            parts = []
            for name, outputs in linear.parts.items():
                own = shard.among(linear.copies.get(name, 1))
                across, along = (own.size if linear.split == dim else 1 for dim in (0, 1))
                sizes = outputs * across, linear.in_features * along
                weight = LayerReader(files, prefix + name, *sizes, linear.scheme).weight()
                weight = _part_of(weight, linear, outputs, own)
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


def _part_of(weight: QuantizedWeight, linear: Linear, outputs: int, shard: Shard) -> QuantizedWeight:
    """Returns this rank's part of the weight of one projection, which has `outputs` outputs on each rank."""
    if shard.size == 1 or linear.split is None:
        return weight
    if linear.split == 0:
        return weight.rows(slice(shard.rank * outputs, (shard.rank + 1) * outputs))
    return weight.columns(slice(shard.rank * linear.in_features, (shard.rank + 1) * linear.in_features))


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


def randomize(model: nn.Module, seed: int, shard: Shard = UNSHARDED) -> None:
    """Fills all parameters in place with random numbers: norms with 1, biases with 0, matrices with N(0, 1 / inputs).

    A seed gives the same numbers on all devices of one type: each parameter has its own stream, keyed by its name. A
    shard gets its part of the numbers of the whole model. Peak memory is the shard and one whole parameter. Weights
    of layers with a scheme are quantised.
    """
    for path, module in list(model.named_modules()):
        for kind, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(module, Linear) and isinstance(model, Decoder) and parameter.numel() == 0:
                _randomize_quantized(f"{path}.{kind}", module, model, seed, shard)
                continue
            if isinstance(module, Experts) and module.scheme is not None:
                continue
            shape = _whole_shape(module, kind, parameter, shard)
            if shape == list(parameter.shape):
                _randomize(f"{path}.{kind}", parameter, seed)
                continue
            whole = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
            _randomize(f"{path}.{kind}", whole, seed)
            parameter.copy_(rank_part(module, kind, whole, shard))
        if isinstance(module, Experts) and module.scheme is not None:
            _randomize_experts(path, module, seed, shard)


def _randomize_experts(path: str, experts: Experts, seed: int, shard: Shard) -> None:
    """Quantises random weights. Each projection of an expert has its own stream."""
    assert experts.scheme is not None
    for projection in experts.projections(shard):
        whole = torch.empty(projection.outputs, projection.inputs, device=experts.gate_up.device)
        _randomize(f"{path}.{projection.name}", whole, seed)
        experts.place(projection, quantize(whole, experts.scheme), whole.dtype)


def _whole_shape(module: nn.Module, kind: str, parameter: Tensor, shard: Shard) -> list[int]:
    """Returns the shape of a parameter in the whole model."""
    if isinstance(module, Experts):
        return module.whole_shape(kind, shard)
    shape, split = list(parameter.shape), _split_dim(module, kind)
    if split is not None:
        assert isinstance(module, Linear | RMSNorm | Sinks)
        shape[split] = sum(width * own.size for width, own in _split_widths(module, split, shard))
    return shape


def _split_widths(module: Linear | RMSNorm | Sinks, split: int, shard: Shard) -> list[tuple[int, Shard]]:
    """Returns, for each part of a split parameter, its width on this rank and the ranks with different parts."""
    if isinstance(module, Linear) and split == 1:
        return [(module.in_features, shard)]
    copies: Mapping[str, int] = getattr(module, "copies", {})
    return [(width, shard.among(copies.get(name, 1))) for name, width in module.parts.items()]


def _randomize_quantized(name: str, linear: Linear, model: Decoder, seed: int, shard: Shard) -> None:
    assert linear.scheme is not None
    shape = [linear.out_features, linear.in_features]
    owners = [shard] * len(linear.parts)
    if linear.split is not None:
        widths = _split_widths(linear, linear.split, shard)
        shape[linear.split] = sum(width * own.size for width, own in widths)
        owners = [own for _, own in widths] if linear.split == 0 else owners
    whole = torch.empty(shape, device=model.embedding.weight.device)
    _randomize(name, whole, seed)
    weight, parts, start = quantize(whole, linear.scheme), [], 0
    for outputs, own in zip(linear.parts.values(), owners, strict=True):
        rows = outputs * own.size if linear.split == 0 else outputs
        parts.append(_part_of(weight.rows(slice(start, start + rows)), linear, outputs, own))
        start += rows
    model.place(linear, concatenate(parts))


def rank_part(module: nn.Module, kind: str, whole: Tensor, shard: Shard) -> Tensor:
    """Returns the part of the whole model's parameter `kind` that belongs to `module`, the module of this rank."""
    if isinstance(module, Experts):
        return module.rank_part(kind, whole, shard)
    split = _split_dim(module, kind)
    if split is None:
        return whole
    assert isinstance(module, Linear | RMSNorm | Sinks)
    widths = _split_widths(module, split, shard)
    parts = torch.split(whole, [width * own.size for width, own in widths], split)
    owned = zip(parts, widths, strict=True)
    return torch.cat([part.chunk(own.size, split)[own.rank] for part, (_, own) in owned], split)


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


def _tensors(model_dir: Path, device: torch.device, *, text_part: bool) -> Iterator[tuple[Any, str]]:
    """Yields (open file, name) of every tensor. Tensors are read to the device. text_part: see `_open`."""
    for path in _files(model_dir):
        with _open(path, device, text_part=text_part) as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                yield file, name


def _open(path: Path, device: torch.device, *, text_part: bool) -> Any:
    """Opens a file of a checkpoint; its tensors are read to the device. Raises ConfigError.

    text_part: the checkpoint may be that of a multimodal model (`TextTensors`).
    """
    try:
        file = _Pickled(path, device) if path.suffix == ".bin" else safe_open(path, "pt", device=str(device))
        return TextTensors(file) if text_part else file
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors: {describe(error)}", field="model") from error


class _OpenFiles:
    """All tensors of a checkpoint by name (`engine.quantization.checkpoint.TensorFiles`)."""

    def __init__(self, model_dir: Path, device: torch.device, loaded: Progress, *, text_part: bool) -> None:
        self.read_names: set[str] = set()
        self._text_part = text_part
        self._paths, self._device, self._loaded = _files(model_dir), device, loaded
        self._opened, self._files = ExitStack(), dict[str, list[Any]]()

    def __enter__(self) -> Self:
        for path in self._paths:
            file = self._opened.enter_context(_open(path, self._device, text_part=self._text_part))
            for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                self._files.setdefault(name, []).append(file)
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name][0].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        if len(self._files[name]) > 1:
            raise ConfigError(f"the checkpoint has {name} in two files", field="model")
        tensor: Tensor = self._files[name][0].get_tensor(name)
        self._loaded.advance(tensor.nbytes / 1e9)
        self.read_names.add(name)
        return tensor


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
