"""Products of many rows with 8-bit inputs on the tensor cores' 8-bit types.

fp8, scale per output       inputs quantised per token (or by the checkpoint's scale), `torch._scaled_mm`
fp8, scale per block        inputs quantised per token and 128 columns, `torch._scaled_mm` with blocks (Hopper)
int8, scale per output      inputs quantised per token, `torch._int_mm`
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from engine.kernels.quantized.activations import quantize
from engine.kernels.quantized.device_weight import DeviceWeight
from engine.quantization.weight import BLOCK

#: Inputs have rows in multiples of this number; the added rows have any content. With scales per block cuBLAS reads the
#: scales of a column, one for each row, by 16 bytes, and refuses 70 rows. `torch._int_mm` refuses 16 rows and fewer.
MULTIPLE = {torch.float8_e4m3fn: 16, torch.int8: 32}


def has_wide_product(weight: DeviceWeight) -> bool:
    """Returns whether `wide_product` supports the weight: its inputs may be quantised, and cuBLAS has the product."""
    aligned = weight.inputs % 16 == 0 and weight.outputs % 16 == 0
    if weight.activations == "none" or weight.kind == "int4" or weight.offsets is not None or not aligned:
        return False
    if weight.kind == "int8":
        return weight.group == 0 and weight.activations == "token"
    device, compute = weight.numbers.device, weight.compute
    if weight.group == 0:
        fits = weight.activations in ("token", "static") and supports_fp8(device)
    else:
        fits = weight.activations == "group" and weight.block and weight.inputs % (4 * BLOCK) == 0
        fits = fits and supports_blocks(device)
    if fits:
        result_dtype(device, compute, weight.group > 0)  # asked here, because a CUDA graph cannot capture the question
    return fits


@cache
def supports_fp8(device: torch.device) -> bool:
    """Returns whether `torch._scaled_mm` has products of e4m3 with scales per row on this device."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def supports_blocks(device: torch.device) -> bool:
    """Returns whether `torch._scaled_mm` has products of e4m3 with scales per 128 x 128 block on this device."""
    if not supports_fp8(device) or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    return _has_result(device, torch.bfloat16, blocks=True)


@cache
def result_dtype(device: torch.device, compute: torch.dtype, blocks: bool) -> torch.dtype:
    """Returns the dtype in which `torch._scaled_mm` gives products: `compute` if it can, otherwise bfloat16."""
    half = compute == torch.float16 and _has_result(device, compute, blocks=blocks)
    return compute if half else torch.bfloat16


def _has_result(device: torch.device, dtype: torch.dtype, *, blocks: bool) -> bool:
    """Tries a product of e4m3 with a result of the dtype, with scales per row or per block."""
    numbers = torch.zeros(512, 512, dtype=torch.float8_e4m3fn, device=device)
    rows = torch.ones(512, 4 if blocks else 1, device=device).t().contiguous().t()
    columns = torch.ones(4, 4, device=device).t() if blocks else torch.ones(1, 512, device=device)
    try:
        _product(numbers, rows, numbers, columns, dtype, blocks=blocks)
    except (RuntimeError, ValueError):
        return False
    return True


def _product(
    x: Tensor, x_scales: Tensor, numbers: Tensor, scales: Tensor, dtype: torch.dtype, *, blocks: bool
) -> Tensor:
    """Multiplies e4m3 [R, K] and [N, K]. Returns [R, N] in the dtype.

    Args:
        x_scales: [R, 1], or [R, K / 128] with `blocks`, where R is a multiple of 4.
        scales: [1, N], or [K / 128, N / 128] with `blocks`.
    """
    return torch._scaled_mm(x, numbers.t(), x_scales, scales, out_dtype=dtype, use_fast_accum=not blocks)


def wide_product(x: Tensor, weight: DeviceWeight, *, norm: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Computes x @ weight.T, [R, N] in the dtype of x [R, K], with quantised inputs. norm: as in `quantize`."""
    dtype, rows, group = weight.numbers.dtype, len(x), weight.group > 0
    numbers, scales = quantize(
        x, dtype, group=group, static=weight.input_scale, norm=norm, eps=eps, multiple=MULTIPLE[dtype]
    )
    if dtype == torch.int8:
        product = torch._int_mm(numbers, weight.numbers.t())[:rows]
        return product.mul(scales[:rows]).mul_(weight.scales).to(x.dtype)
    result = result_dtype(x.device, x.dtype, group)
    return _product(numbers, scales, weight.numbers, weight.scales, result, blocks=group)[:rows].to(x.dtype)
