"""Converts a quantised weight to a plain one in a scratch, for products that cuBLAS computes faster than we."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.pdl import pdl_args, wait_for_previous
from engine.kernels.quantized.device_weight import FIELDS, DeviceWeight
from engine.kernels.quantized.product import offset_of, scale_of
from engine.kernels.quantized.unpack import convert, has_assembly, magic
from engine.quantization.weight import BLOCK, FIXED_ZERO


@triton.jit
def _dequantize_kernel(
    numbers,
    scales,
    offsets,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    ROW: tl.constexpr,
    SCALE_G: tl.constexpr,
    SCALE_N: tl.constexpr,
    KIND: tl.constexpr,
    SCALE: tl.constexpr,
    OFFSETS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TOTAL: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    steps: tl.constexpr = (ROW + BK - 1) // BK
    column = tl.program_id(0) % steps * BK
    n = tl.program_id(0) // steps * BN + tl.arange(0, BN)
    j = tl.arange(0, BK)
    n_ok = n < N
    DTYPE: tl.constexpr = out.dtype.element_ty
    w_ok = n_ok[:, None] & (column + j < ROW)[None, :]
    w = tl.load(numbers + n.to(tl.int64)[:, None] * ROW + (column + j)[None, :], mask=w_ok, other=0)
    k0 = column // WIDTH * (WIDTH * TOTAL) + column % WIDTH if TOTAL > 1 else column
    wait_for_previous(PDL)  # an earlier product may still read the scratch
    for field in tl.static_range(TOTAL):
        k = k0 + field * WIDTH
        at = n[:, None] // BLOCK_ROWS * SCALE_N
        if GROUP > 0:
            at += tl.minimum(k // GROUP, (K - 1) // GROUP) * SCALE_G
        packed = tl.load(scales + at, mask=n_ok[:, None], other=0)
        offset = offset_of(packed, offsets, at, n_ok[:, None], DTYPE, SCALE, OFFSETS)
        y = convert(w, 4 * field, offset, KIND, ASM).to(tl.float32) * scale_of(packed, SCALE)
        out_at = n.to(tl.int64)[:, None] * K + (k + j)[None, :]
        tl.store(out + out_at, y.to(DTYPE), mask=n_ok[:, None] & (k + j < K)[None, :])


def dequantize(weight: DeviceWeight, out: Tensor | None = None) -> Tensor:
    """Returns the weight [N, K] in the dtype `weight.compute`; its columns are in the order of the numbers."""
    n, k = weight.outputs, weight.inputs
    out = torch.empty(n, k, dtype=weight.compute, device=weight.numbers.device) if out is None else out
    assert out.shape == (n, k)
    assert out.is_contiguous()
    total = FIELDS if weight.kind == "int4" else 1
    numbers = weight.numbers if weight.kind == "int4" else weight.numbers.view(torch.uint8)
    bk = weight.width
    constant = -(FIXED_ZERO + magic(weight.compute)) if weight.kind == "int4" else 0
    sizes: dict[str, Any] = {"N": n, "K": k, "ROW": numbers.shape[1], "KIND": weight.kind}
    sizes |= {"SCALE_G": weight.scales.stride(0), "SCALE_N": weight.scales.stride(1)}
    sizes |= {
        "SCALE": str(weight.scale_dtype).removeprefix("torch."),
        "OFFSETS": constant if weight.offsets is None else 1,
    }
    sizes |= {"GROUP": weight.group, "BLOCK_ROWS": BLOCK if weight.block else 1, "WIDTH": weight.width}
    sizes |= {"BN": 32, "BK": bk, "TOTAL": total, "ASM": has_assembly(weight.compute), **pdl_args(out.device)}
    grid = triton.cdiv(n, 32) * triton.cdiv(numbers.shape[1], bk)
    offsets = weight.scales if weight.offsets is None else weight.offsets
    _dequantize_kernel[(grid,)](numbers, weight.scales, offsets, out, **sizes, num_warps=4)
    return out
