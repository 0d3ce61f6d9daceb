"""Reads LoRA adapters (Hu et al. 2021) in PEFT's format: adapter_config.json and adapter_model.safetensors.

Invariant: an adapter that loads is computed exactly. Every setting of PEFT that changes the computation, and that is
not computed here, is refused with a ConfigError that names the file and the setting.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.errors import ConfigError, describe

MAX_RANK = 256
DIGEST_BYTES = 16
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: PEFT saves a copy of the base's weight beside the LoRA tensors of an embedding or LM head. LoRA does not train it.
_BASE_COPY = ".base_layer.weight"
_PREFIX = "base_model.model."
_KINDS = {".lora_A.weight": "A", ".lora_B.weight": "B", ".lora_embedding_A": "A", ".lora_embedding_B": "B"}
_LARGEST = torch.finfo(torch.float32).max  # Scales are float32
_MAX_REPEATS = 4  # Of a pattern of module names: a match takes up to (length of the name) ** repeats steps
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Settings that must be absent, false or empty, and what they mean.
_REFUSED = {
    "use_dora": "DoRA changes the norm of the weights",
    "modules_to_save": "whole modules were trained",
    "lora_bias": "biases were trained",
    "trainable_token_indices": "rows of the embedding were trained",
    "target_parameters": "parameters without a module of their own, such as experts, were trained",
    "layer_replication": "layers are repeated",
    "fan_in_fan_out": "the weights are transposed",
    "use_qalora": "QALoRA pools the inputs",
    "alora_invocation_tokens": "activated LoRA begins in the middle of a prompt",
    "megatron_config": "the layers are Megatron's",
}
#: Initialisations by name that keep the weights of the base. Others, such as PiSSA, change them.
_SAME_BASE = ("gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The change of one module's weight: scale * b @ a."""

    a: Tensor  # [rank, inputs]
    b: Tensor  # [outputs, rank]
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """The content of an adapter's directory."""

    digest: str  # 32 hex digits for all ranks, scales and weights. Names, paths and the order of tensors do not matter.
    pairs: Mapping[str, LoraPair]  # By the module's name in the base's checkpoint.


def read_adapter(directory: Path, shapes: Mapping[str, tuple[int, int]], max_rank: int) -> AdapterFile:
    """Reads an adapter for a base with these modules: their inputs and outputs, by their name in the checkpoint.

    Raises ConfigError if the adapter is damaged, does not fit, has a rank above `max_rank`, or is not plain LoRA.
    """
    config = _read_config(directory / CONFIG)
    file = directory / WEIGHTS
    if not file.is_file():
        other = (
            "adapter_model.bin is not read: save it as safetensors"
            if (directory / "adapter_model.bin").is_file()
            else ""
        )
        raise _error(file, other or "the file does not exist")
    pairs: dict[str, LoraPair] = {}
    halves = _read_halves(file, shapes)
    for name in sorted(halves):
        missing = {"A", "B"} - halves[name].keys()
        if missing:
            raise _error(file, f"{name} has no lora_{missing.pop()}")
        pairs[name] = _pair(name, halves[name], shapes[name], config, directory, max_rank)
    targets = config.get("target_modules")
    for target in targets if isinstance(targets, list) else []:
        if not any(name == target or name.endswith(f".{target}") for name in pairs):
            raise _error(file, f"the file has no tensors of {target!r}, which target_modules of {CONFIG} names")
    if not pairs:
        raise _error(file, "the file has no LoRA tensors")
    return AdapterFile(_digest(pairs), pairs)


def _read_config(file: Path) -> dict[str, Any]:
    if file.exists() and not file.is_file():
        raise _error(file, "the file cannot be read: it is not a regular file")  # a pipe would never end
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _error(file, f"the file cannot be read: {describe(error)}") from error
    if not isinstance(config, dict):
        raise _error(file, "expected an object")
    if config.get("peft_type") != "LORA":
        raise _error(file, f"peft_type is {config.get('peft_type')!r}: expected 'LORA'")
    for name, meaning in _REFUSED.items():
        if config.get(name):
            raise _error(file, f"{name} is not supported: {meaning}")
    if config.get("bias", "none") != "none":
        raise _error(file, f"bias is {config['bias']!r}: expected 'none'")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in _SAME_BASE:
        expected = f"expected a boolean or one of {', '.join(_SAME_BASE)}, which keep the weights of the base"
        raise _error(file, f"init_lora_weights is {start!r}: {expected}")
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(name) or {}, dict):
            raise _error(file, f"{name}: expected an object")
    return config


def _read_halves(file: Path, shapes: Mapping[str, tuple[int, int]]) -> dict[str, dict[str, Tensor]]:
    """Returns the tensors of each module by "A" and "B"."""
    halves: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(file, "pt", device="cpu") as opened:
            for key in opened.keys():  # noqa: SIM118 - safe_open is not a mapping
                name = key.removeprefix(_PREFIX)
                if name.endswith(_BASE_COPY) and name.removesuffix(_BASE_COPY) in shapes:
                    inputs, outputs = shapes[name.removesuffix(_BASE_COPY)]
                    if sorted(opened.get_slice(key).get_shape()) != sorted((inputs, outputs)):
                        raise _error(file, f"{key}: the base has another shape, {outputs} x {inputs}")
                    continue
                suffix = next((suffix for suffix in _KINDS if name.endswith(suffix)), None)
                if suffix is None:
                    what = "DoRA is not supported" if "lora_magnitude_vector" in name else "it is not a tensor of LoRA"
                    raise _error(file, f"unknown tensor {key}: {what}")
                module = name.removesuffix(suffix)
                if module not in shapes:
                    hint = ": experts have no adapters" if "experts" in module else ""
                    raise _error(file, f"the base computes no adapter of the module {module}{hint}")
                # A copy: a file that is overwritten meanwhile must not change weights whose digest is known.
                halves.setdefault(module, {})[_KINDS[suffix]] = opened.get_tensor(key).clone()
    except (SafetensorError, OSError) as error:
        raise _error(file, f"the file cannot be read as safetensors: {describe(error)}") from error
    return halves


def _pair(
    name: str,
    halves: Mapping[str, Tensor],
    shape: tuple[int, int],
    config: Mapping[str, Any],
    directory: Path,
    max_rank: int,
) -> LoraPair:
    a, b, file = halves["A"], halves["B"], directory / WEIGHTS
    rank = _setting(config, "rank_pattern", "r", name, directory / CONFIG)
    alpha = _setting(config, "alpha_pattern", "lora_alpha", name, directory / CONFIG)
    if not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
        raise _error(directory / CONFIG, f"the rank of {name} is {rank}: expected 1 to {MAX_RANK}")
    if rank > max_rank:
        raise _error(directory / CONFIG, f"the rank of {name} is {rank}: raise max_adapter_rank, which is {max_rank}")
    inputs, outputs = shape
    for half, expected in ((a, (rank, inputs)), (b, (outputs, rank))):
        found = tuple(half.shape)
        if found != expected:
            kind = "A" if half is a else "B"
            raise _error(file, f"lora_{kind} of {name} has shape {found}: expected {expected}")
        if half.dtype not in _DTYPES or not bool(torch.isfinite(half).all()):
            raise _error(file, f"{name}: expected finite numbers of float32, bfloat16 or float16")
    return LoraPair(a, b, alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)


def _setting(config: Mapping[str, Any], patterns: str, default: str, module: str, file: Path) -> Any:
    """Returns a setting of a module: that of the first pattern which matches the end of its name, else the default."""
    value = config.get(default)
    for pattern, own in (config.get(patterns) or {}).items():
        if len(re.findall(r"[*+{]", pattern)) > _MAX_REPEATS or re.search(r"\)[*+{]", pattern):
            problem = f"expected up to {_MAX_REPEATS} repeats and no repeated group, which could take for ever to match"
            raise _error(file, f"{patterns}: {pattern[:200]!r} is not supported: {problem}")
        try:
            matches = re.match(rf"(.*\.)?({pattern})$", module) is not None
        except re.error as error:
            raise _error(file, f"{patterns}: {pattern!r} is not a regular expression: {error}") from error
        if matches:
            value = own
            break
    # The comparison is false for NaN, and right for an int that no float can hold.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        raise _error(file, f"{default} of {module} is {value!r}: expected a number of float32")
    return value


def _digest(pairs: Mapping[str, LoraPair]) -> str:
    content = blake2b(digest_size=DIGEST_BYTES)
    for name, pair in sorted(pairs.items()):
        content.update(f"{name} {pair.scale!r}".encode())
        for half in (pair.a, pair.b):
            content.update(f" {half.dtype} {tuple(half.shape)} ".encode())
            content.update(half.contiguous().view(torch.uint8).numpy().data)
    return content.hexdigest()


def _error(file: Path, problem: str) -> ConfigError:
    return ConfigError(f"{file}: {problem}", field="adapter")
