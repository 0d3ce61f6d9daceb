"""Writes a checkpoint in each quantised format that Baton reads, from an unquantised one.

The numbers are rounded to nearest, by min and max; no calibration improves them. The files have the layout that the
tools of each format write. Nothing here uses the reader (`engine.quantization`), so tests compare two implementations:
`write` returns the weights that the files mean.

    quantized = write(source, dest, "awq", group_size=64)
    quantized.weights["model.layers.0.mlp.up_proj"]  # float32 [outputs, inputs]
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E4M3 = 448.0
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # Output of each nibble of a word, from the lowest
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class QuantizedFiles:
    """What a quantised checkpoint means."""

    #: How inputs are rounded: none, token, group or static; and to which numbers: fp8 or int8.
    activations: str
    kind: str
    weights: dict[str, Tensor] = field(default_factory=dict)  #: float32 [outputs, inputs], by the layer's name
    input_scales: dict[str, float] = field(default_factory=dict)  #: With `static`


Packer = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]


class QuantizedWriter:
    """The packers of all formats. Each returns the tensors of one layer, and the weight that they mean."""

    def __init__(self, group_size: int, seed: int) -> None:
        self.group_size, self._seed = group_size, seed

    # -- 8 bits: one number an element -------------------------------------------------------------------------------
    def fp8(self, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Returns e4m3 numbers for scales that broadcast, and the weight."""
        numbers = (weight / scale).clamp(-E4M3, E4M3).to(torch.float8_e4m3fn)
        return numbers, numbers.float() * scale

    def fp8_tensor(self, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scale = weight.abs().max().reshape(1) / E4M3
        numbers, meant = self.fp8(weight, scale)
        return {"weight": numbers, "weight_scale": scale}, meant

    def fp8_channel(self, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scale = (weight.abs().amax(1, keepdim=True) / E4M3).bfloat16()
        numbers, meant = self.fp8(weight, scale.float())
        return {"weight": numbers, "weight_scale": scale}, meant

    def fp8_block(
        self, name: str, weight: Tensor, scale_name: str = "weight_scale"
    ) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = (-(-size // 128) for size in weight.shape)
        scale, wide = torch.empty(rows, columns), torch.empty_like(weight)
        for i in range(rows):
            for j in range(columns):
                part = weight[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
                scale[i, j] = part.abs().max() / E4M3
                wide[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128] = scale[i, j]
        numbers, meant = self.fp8(weight, wide)
        return {"weight": numbers, scale_name: scale}, meant

    def fp8_block_inverse(self, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return self.fp8_block(name, weight, "weight_scale_inv")

    def int8_channel(self, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
        numbers = (weight / scale.float()).round().clamp(-128, 127)
        return {"weight": numbers.to(torch.int8), "weight_scale": scale}, numbers * scale.float()

    # -- integers in words -------------------------------------------------------------------------------------------
    def integers(self, weight: Tensor, groups: Tensor, bits: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Returns unsigned numbers [N, K], scales and zeros [N, G]; groups [K] is the group of each input."""
        count, top = int(groups.max()) + 1, 2**bits - 1
        numbers, scales = torch.empty_like(weight), torch.empty(len(weight), count)
        zeros = torch.full((len(weight), count), 2.0 ** (bits - 1))
        for g in range(count):
            part = weight[:, groups == g]
            if symmetric:
                scale = (part.abs().amax(1) * 2 / top).half().float()
            else:
                low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
                scale = ((high - low) / top).half().float()
                zeros[:, g] = (-low / scale).round().clamp(0, top)
            scales[:, g] = scale
            numbers[:, groups == g] = (part / scale[:, None] + zeros[:, g : g + 1]).round().clamp(0, top)
        return numbers, scales, zeros

    def order(self, name: str, inputs: int, *, shuffled: bool) -> Tensor:
        """Returns the group of each input. Layers that read the same inputs have the same."""
        groups = torch.arange(inputs) // self.size(inputs)
        if not shuffled:
            return groups
        parts = name.split(".")
        reads = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}.get(parts[-1], parts[-1])
        seed = self._seed + 100 * int(parts[2]) + LINEARS.index(reads)
        return groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]

    def size(self, inputs: int) -> int:
        return inputs if self.group_size == -1 else self.group_size

    def awq(self, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = self.order(name, weight.shape[1], shuffled=False)
        numbers, scales, zeros = self.integers(weight, groups, 4, symmetric=False)

        def words(values: Tensor) -> Tensor:
            """[.., N] to [.., N / 8]."""
            array = values.numpy().astype(np.uint32)
            packed = sum(array[:, output::8] << np.uint32(4 * place) for place, output in enumerate(AWQ_ORDER))
            return _int32(packed)

        tensors = {"qweight": words(numbers.t()), "qzeros": words(zeros.t()), "scales": scales.t().half().contiguous()}
        return tensors, (numbers - zeros[:, groups]) * scales[:, groups]

    def gptq(
        self,
        name: str,
        weight: Tensor,
        *,
        bits: int = 4,
        shift: int = 1,
        shuffled: bool = False,
        symmetric: bool = False,
    ) -> tuple[dict[str, Tensor], Tensor]:
        groups = self.order(name, weight.shape[1], shuffled=shuffled)
        numbers, scales, zeros = self.integers(weight, groups, bits, symmetric=symmetric)
        stored = (zeros - shift) % 2**bits  # a zero of 0 is stored as the largest number
        tensors = {
            "qweight": _along(numbers.t(), 0, bits),
            "qzeros": _along(stored.t(), 1, bits),
            "scales": scales.t().half().contiguous(),
            "g_idx": groups.int(),
        }
        return tensors, (numbers - zeros[:, groups]) * scales[:, groups]

    def packed(
        self, name: str, weight: Tensor, *, bits: int = 4, symmetric: bool = True, shuffled: bool = False
    ) -> tuple[dict[str, Tensor], Tensor]:
        groups = self.order(name, weight.shape[1], shuffled=shuffled)
        numbers, scales, zeros = self.integers(weight, groups, bits, symmetric=symmetric)
        tensors = {
            "weight_packed": _along(numbers, 1, bits),
            "weight_scale": scales.half(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = _along(zeros, 0, bits)
        if shuffled:
            tensors["weight_g_idx"] = groups.int()
        return tensors, (numbers - zeros[:, groups]) * scales[:, groups]


def _int32(words: Any) -> Tensor:
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def _along(values: Tensor, dim: int, bits: int) -> Tensor:
    """Packs numbers of [A, B] into 32-bit words along a dimension, the first number in the lowest bits."""
    array, count = values.numpy().astype(np.uint32), 32 // bits
    array = array if dim == 0 else array.T
    packed = sum(array[place::count] << np.uint32(bits * place) for place in range(count))
    return _int32(packed if dim == 0 else packed.T)  # type: ignore[union-attr]


def _ct(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    """The config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}, "input_activations": inputs}
    known = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "kv_cache_scheme": None}
    return {**known, "format": form, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def _number(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, **more}


def _formats(size: int) -> dict[str, tuple[str, dict[str, Any], dict[str, Any], str, str]]:
    """By name: packer, its options, quantization_config, activations, kind of the rounded inputs."""
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": size, "sym": False, "desc_act": False}
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
    awq = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    auto, four = {"quant_method": "fp8", "ignored_layers": ["lm_head"]}, _number(4, "int", "group", group_size=size)
    token8, static8 = _number(8, "float", "token", dynamic=True), _number(8, "float", "tensor", dynamic=False)
    group8 = _number(8, "float", "group", dynamic=True, group_size=128)
    block = _number(8, "float", "block", block_structure=[128, 128])
    zeros, ordered = {**four, "symmetric": False}, {**four, "actorder": "group"}
    modelopt = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    ints = _ct("int-quantized", _number(8, "int", "channel"), _number(8, "int", "token", dynamic=True))
    eight = _number(8, "int", "group", group_size=size)
    return {
        "ct-fp8-tensor": (
            "fp8_tensor",
            {},
            _ct("float-quantized", _number(8, "float", "tensor"), static8),
            "static",
            "fp8",
        ),
        "ct-fp8-channel": (
            "fp8_channel",
            {},
            _ct("float-quantized", _number(8, "float", "channel"), token8),
            "token",
            "fp8",
        ),
        "ct-fp8-block": ("fp8_block", {}, _ct("float-quantized", block, group8), "group", "fp8"),
        "ct-int8": ("int8_channel", {}, ints, "token", "int8"),
        "ct-w4": ("packed", {}, _ct("pack-quantized", four, None), "none", "int4"),
        "ct-w4-zeros": ("packed", {"symmetric": False}, _ct("pack-quantized", zeros, None), "none", "int4"),
        "ct-w4-order": ("packed", {"shuffled": True}, _ct("pack-quantized", ordered, None), "none", "int4"),
        "ct-w8": ("packed", {"bits": 8}, _ct("pack-quantized", eight, None), "none", "int8"),
        "fp8-block": ("fp8_block_inverse", {}, {**fp8, "weight_block_size": [128, 128]}, "group", "fp8"),
        "autofp8": ("fp8_tensor", {}, {**auto, "activation_scheme": "static"}, "static", "fp8"),
        "autofp8-dynamic": ("fp8_tensor", {}, {**auto, "activation_scheme": "dynamic"}, "token", "fp8"),
        "modelopt": ("fp8_tensor", {}, modelopt, "static", "fp8"),
        "awq": ("awq", {}, awq, "none", "int4"),
        "gptq": ("gptq", {"symmetric": True}, {**gptq, "sym": True}, "none", "int4"),
        "gptq-zeros": ("gptq", {}, gptq, "none", "int4"),
        "gptq-v2": ("gptq", {"shift": 0}, {**gptq, "checkpoint_format": "gptq_v2"}, "none", "int4"),
        "gptq-order": ("gptq", {"shuffled": True}, {**gptq, "desc_act": True}, "none", "int4"),
        "gptq-8": ("gptq", {"bits": 8}, {**gptq, "bits": 8}, "none", "int8"),
    }


FORMATS = tuple(_formats(128))


def write(
    source: Path,
    dest: Path,
    name: str,
    *,
    group_size: int = 32,
    input_scales: Mapping[str, float] | None = None,
    skip: Callable[[str], bool] = lambda layer: False,
    seed: int = 0,
) -> QuantizedFiles:
    """Quantises the checkpoint in `source` to the format `name` and writes it to `dest`, with all other files.

    input_scales: scale of the inputs of each layer, for static formats. Layers with skip(layer) stay as they are.
    """
    packer, options, config, activations, kind = _formats(group_size)[name]
    pack: Callable[..., tuple[dict[str, Tensor], Tensor]] = getattr(QuantizedWriter(group_size, seed), packer)
    meaning, tensors = QuantizedFiles(activations, kind), dict[str, Tensor]()
    shutil.copytree(source, dest, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"), dirs_exist_ok=True)
    for file in sorted(source.glob("*.safetensors")):
        for key, tensor in load_file(file).items():
            layer, _, part = key.rpartition(".")
            if part != "weight" or layer.rpartition(".")[2] not in LINEARS or skip(layer):
                tensors[key] = tensor
                continue
            packed, meaning.weights[layer] = pack(layer, tensor.float(), **options)
            if activations == "static":
                meaning.input_scales[layer] = 0.05 if input_scales is None else input_scales[layer]
                packed["input_scale"] = torch.tensor([meaning.input_scales[layer]])
            tensors |= {f"{layer}.{kind}": value.contiguous() for kind, value in packed.items()}
    save_file(tensors, dest / "model.safetensors", {"format": "pt"})
    read = json.loads((source / "config.json").read_text())
    (dest / "config.json").write_text(json.dumps({**read, "quantization_config": config}))
    return meaning
