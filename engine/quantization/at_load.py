"""Quantises a weight in this process: for the setting `weights`, and for random weights of a quantised model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.quantization.scheme import Scheme
from engine.quantization.weight import BLOCK, FIXED_ZERO, QuantizedWeight, pack_nibbles

LARGEST_E4M3 = 448.0
LARGEST_INT8 = 127
_TINY = torch.finfo(torch.float32).tiny


def quantize(weight: Tensor, scheme: Scheme) -> QuantizedWeight:
    """Returns a weight [N, K] in the form that the scheme describes, with the scales that the largest numbers need.

    int8 has scales that bfloat16 holds, because torch's product on a CPU reads them so. Inputs keep their order, and
    the zeros of 4-bit numbers are 8. A scale of inputs, which needs samples to measure, is 1.
    """
    wide = weight.float()
    outputs, inputs = weight.shape
    if scheme.kind == "int4":
        return _four_bits(wide, scheme.group_size or inputs)
    block = scheme.extent == "block"
    size = {"block": BLOCK, "group": scheme.group_size}.get(scheme.extent, inputs)
    if block:
        padded = F.pad(wide, (0, -inputs % BLOCK, 0, -outputs % BLOCK))
        scales = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).abs().amax(dim=(1, 3))
    else:
        scales = wide.unflatten(1, (-1, size)).abs().amax(dim=-1)
    if scheme.extent == "tensor":
        scales = scales.amax().expand(outputs, 1).contiguous()
    scales = scales / (LARGEST_E4M3 if scheme.kind == "fp8" else LARGEST_INT8)
    scales.clamp_(min=_TINY)
    if scheme.kind == "int8":
        scales = scales.bfloat16().float()  # before the numbers are rounded, so that this rounding adds no error
    rows = scales.repeat_interleave(BLOCK, 0)[:outputs] if block else scales
    numbers = wide.div_(rows.repeat_interleave(size, 1)[:, :inputs]) if wide is not weight else None
    if numbers is None:
        numbers = weight / rows.repeat_interleave(size, 1)[:, :inputs]
    if scheme.kind == "fp8":
        numbers = numbers.clamp_(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)
    else:
        numbers = numbers.round_().clamp_(-LARGEST_INT8, LARGEST_INT8).to(torch.int8)
    input_scale = torch.ones((), device=weight.device) if scheme.activations == "static" else None
    return QuantizedWeight(
        scheme.kind,
        numbers,
        scales,
        block=block,
        activations=scheme.activations,
        input_scale=input_scale,
        group_size=size,
    )


def _four_bits(weight: Tensor, size: int) -> QuantizedWeight:
    groups = weight.unflatten(1, (-1, size))
    scales = (groups.abs().amax(dim=-1) / (FIXED_ZERO - 1)).clamp_(min=_TINY)
    numbers = (groups / scales[..., None]).round_().add_(FIXED_ZERO).clamp_(0, 15).to(torch.uint8).flatten(1)
    return QuantizedWeight("int4", pack_nibbles(numbers), scales, group_size=size)
