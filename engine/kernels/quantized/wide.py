"""Products of many rows: with 8-bit inputs on the tensor cores' 8-bit types, or over a dequantised scratch.

fp8, scale per output       inputs quantised per token (or by the checkpoint's scale), `torch._scaled_mm`
fp8, scale per block        inputs quantised per token and 128 columns, `torch._scaled_mm` with blocks (Hopper)
int8, scale per output      inputs quantised per token, `torch._int_mm`
others                      the weight is dequantised to a scratch, which cuBLAS multiplies
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.quantized.activations import quantize
from engine.kernels.quantized.dequantize import dequantize
from engine.kernels.quantized.device_weight import DeviceWeight
from engine.quantization.weight import BLOCK


def has_wide_product(weight: DeviceWeight) -> bool:
    """Returns whether `wide_product` supports the weight: its inputs may be quantised, and cuBLAS has the product."""
    aligned = weight.inputs % 16 == 0 and weight.outputs % 16 == 0
    if weight.activations == "none" or weight.kind == "int4" or weight.offsets is not None or not aligned:
        return False
    if weight.kind == "int8":
        return weight.group == 0 and weight.activations == "token"
    if weight.group == 0:
        return weight.activations in ("token", "static") and supports_fp8(weight.numbers.device)
    if weight.activations != "group" or not weight.block:
        return False
    return weight.inputs % (4 * BLOCK) == 0 and supports_blocks(weight.numbers.device)


@cache
def supports_fp8(device: torch.device) -> bool:
    """Returns whether `torch._scaled_mm` has products of e4m3 with scales per row on this device."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def supports_blocks(device: torch.device) -> bool:
    """Returns whether `torch._scaled_mm` has products of e4m3 with scales per 128 x 128 block on this device."""
    if not supports_fp8(device) or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    numbers = torch.zeros(512, 512, dtype=torch.float8_e4m3fn, device=device)
    try:
        _block_product(numbers, torch.ones(4, 512, device=device).t(), numbers, torch.ones(4, 4, device=device).t())
    except (RuntimeError, ValueError):
        return False
    return True


def _block_product(x: Tensor, x_scales: Tensor, numbers: Tensor, scales: Tensor) -> Tensor:
    """Multiplies e4m3 [R, K], scales [R, K / 128], and [N, K], scales [K / 128, N / 128]; bfloat16 [R, N]."""
    return torch._scaled_mm(x, numbers.t(), x_scales, scales, out_dtype=torch.bfloat16)


def wide_product(x: Tensor, weight: DeviceWeight, *, norm: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Computes x @ weight.T, [R, N] in the dtype of x [R, K], with quantised inputs. norm: as in `quantize`."""
    if weight.kind == "int8":
        numbers, scales = quantize(x, torch.int8, norm=norm, eps=eps)
        product = torch._int_mm(numbers, weight.numbers.t())
        return product.mul(scales).mul_(weight.scales).to(x.dtype)
    group = weight.group > 0
    numbers, scales = quantize(x, torch.float8_e4m3fn, group=group, static=weight.input_scale, norm=norm, eps=eps)
    if group:
        return _block_product(numbers, scales, weight.numbers, weight.scales).to(x.dtype)
    result = torch._scaled_mm(
        numbers, weight.numbers.t(), scales, weight.scales, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return result.to(x.dtype)


def scratch_product(x: Tensor, weight: DeviceWeight, bias: Tensor | None = None) -> Tensor:
    """Computes x @ weight.T + bias with the weight dequantised."""
    return F.linear(x, dequantize(weight), bias)
