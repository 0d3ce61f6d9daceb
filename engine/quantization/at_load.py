"""Quantises a weight in this process: for the setting `weights`, and for random weights of a quantised model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import ConfigError
from engine.quantization.inputs import LARGEST
from engine.quantization.scheme import Scheme
from engine.quantization.weight import BLOCK, FIXED_ZERO, QuantizedWeight, pack_nibbles

_TINY = torch.finfo(torch.float32).tiny


def quantize(weight: Tensor, scheme: Scheme) -> QuantizedWeight:
    """Returns a weight [N, K] in the form that the scheme describes, with the scales that the largest numbers need.

    int8 has scales that bfloat16 holds, because torch's product on a CPU reads them so. Inputs keep their order, and
    the zeros of 4-bit numbers are 8 (the reader of GPTQ drops such zeros). A scale of inputs, which needs samples to
    measure, is 1. Needs about twelve bytes of memory for each number.
    """
    outputs, inputs = weight.shape
    block = scheme.extent == "block"
    size = {"block": BLOCK, "group": scheme.group_size}.get(scheme.extent, inputs)
    if not block and inputs % size:
        raise ConfigError(f"{inputs} inputs of a layer are not whole groups of {size}", field="model")
    wide = weight.float()
    if scheme.kind == "int4":
        return _four_bits(wide, size, zeros=not scheme.symmetric and scheme.layout != "gptq")
    if block:
        padded = F.pad(wide, (0, -inputs % BLOCK, 0, -outputs % BLOCK))
        rows, columns = (length // BLOCK for length in padded.shape)
        scales = padded.view(rows, BLOCK, columns, BLOCK).abs().amax(dim=(1, 3))
    else:
        scales = wide.view(outputs, -1, size).abs().amax(dim=-1)
    if scheme.extent == "tensor":
        scales = scales.amax().expand(outputs, 1)
    scales = (scales / LARGEST[scheme.kind]).clamp_(min=_TINY)
    if scheme.kind == "int8":
        scales = scales.bfloat16().float()  # before the numbers are rounded, so that this rounding adds no error
    by_row = scales.repeat_interleave(BLOCK, 0)[:outputs] if block else scales
    numbers = wide / by_row.repeat_interleave(size, 1)[:, :inputs]
    numbers.clamp_(-LARGEST[scheme.kind], LARGEST[scheme.kind])
    return QuantizedWeight(
        scheme.kind,
        numbers.to(torch.float8_e4m3fn) if scheme.kind == "fp8" else numbers.round_().to(torch.int8),
        scales,
        block=block,
        activations=scheme.activations,
        input_scale=torch.ones((), device=weight.device) if scheme.activations == "static" else None,
        group_size=size,
    )


def _four_bits(weight: Tensor, size: int, *, zeros: bool) -> QuantizedWeight:
    """Returns a weight with scales that float16 holds, like those of checkpoints. zeros: store the zeros."""
    groups = weight.view(len(weight), -1, size)
    scales = (groups.abs().amax(dim=-1) / (FIXED_ZERO - 1)).clamp_(2.0**-24, torch.finfo(torch.half).max).half().float()
    numbers = (groups / scales[..., None]).round_().add_(FIXED_ZERO).clamp_(0, 15).to(torch.uint8)
    stored = torch.full_like(scales, FIXED_ZERO, dtype=torch.uint8) if zeros else None
    return QuantizedWeight("int4", pack_nibbles(numbers.view(weight.shape)), scales, stored, group_size=size)
