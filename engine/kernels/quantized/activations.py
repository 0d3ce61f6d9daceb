"""Quantises inputs to e4m3 or int8 for products whose both operands have 8 bits, with an RMSNorm before it if asked.

A scale is that of a token (row), or of a token and 128 inputs: largest magnitude / largest number of the type.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.pdl import pdl_args, wait_for_previous
from engine.quantization.weight import BLOCK

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: the sum with a small number has the units as its last bit.


@triton.jit
def _store(out, y, ok, LARGEST: tl.constexpr, NATIVE: tl.constexpr):
    """Stores float32 y, at most LARGEST in magnitude, as e4m3 (bytes without NATIVE) or int8."""
    if LARGEST == 127.0:
        tl.store(out, ((y + ROUND) - ROUND).to(tl.int8), mask=ok)
    elif NATIVE:
        tl.store(out, y.to(tl.float8e4nv), mask=ok)
    else:
        tl.store(out, _encode(y), mask=ok)


@triton.jit
def _encode(y):
    """Encodes |y| <= 448 to e4m3 bytes with rounding to nearest even."""
    bits = tl.abs(y).to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(y) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    sign = (y.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (tl.where(tl.abs(y) < 0.015625, small, normal) | sign).to(tl.uint8)


@triton.jit
def _quantize_kernel(
    x,
    norm,
    static,
    out,
    scales,
    x_row,
    scales_row,
    scales_column,
    eps,
    K: tl.constexpr,
    GROUP: tl.constexpr,  # 0: a scale for each row
    LARGEST: tl.constexpr,
    NORM: tl.constexpr,
    STATIC: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = triton.next_power_of_2(K)
    k = tl.arange(0, SIZE)
    ok = k < K
    wait_for_previous(PDL)
    v = tl.load(x + row * x_row + k, mask=ok, other=0.0).to(tl.float32)
    if NORM:
        rstd = tl.rsqrt(tl.sum(v * v, 0) / K + eps)
        v = v * rstd * tl.load(norm + k, mask=ok, other=0.0).to(tl.float32)
        v = v.to(x.dtype.element_ty).to(tl.float32)  # as the kernel of the norm stores it
    if GROUP > 0:
        groups = tl.reshape(v, [SIZE // GROUP, GROUP])
        scale = tl.maximum(tl.max(tl.abs(groups), 1), 1e-12) / LARGEST
        g = tl.arange(0, SIZE // GROUP)
        tl.store(scales + row * scales_row + g * scales_column, scale, mask=g * GROUP < K)
        y = tl.reshape(groups / scale[:, None], [SIZE])
    elif STATIC:
        scale = tl.load(static)
        tl.store(scales + row * scales_row, scale)
        y = tl.clamp(v / scale, -LARGEST, LARGEST)
    else:
        scale = tl.maximum(tl.max(tl.abs(v), 0), 1e-12) / LARGEST
        tl.store(scales + row * scales_row, scale)
        y = v / scale
    _store(out + row * K + k, y, ok, LARGEST, NATIVE)


def quantize(
    x: Tensor,
    dtype: torch.dtype,
    *,
    group: bool = False,
    static: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    multiple: int = 1,
) -> tuple[Tensor, Tensor]:
    """Quantises x [R, K]. Returns numbers [R, K] and scales float32 [R, 1], or [R, ceil(K / 128)] with `group`.

    Args:
        multiple: the results have R rounded up to a multiple of this number as rows; the added ones are not written.
        dtype: float8_e4m3fn or int8.
        group: a scale for each row and 128 inputs. The scales of a column are contiguous, as cuBLAS reads them.
        static: float32 []: the scale of all inputs, which are clamped to what it can represent.
        norm: weight [K] of an RMSNorm that is applied to x first.
    """
    rows, k = x.shape
    assert x.stride(1) == 1
    groups = -(-k // BLOCK) if group else 1
    stored = -(-rows // multiple) * multiple
    scales = torch.empty(groups, stored, dtype=torch.float32, device=x.device).t()
    out = torch.empty(stored, k, dtype=dtype, device=x.device)
    native = not triton.knobs.runtime.interpret
    target = out if native or dtype == torch.int8 else out.view(torch.uint8)
    optional = x if norm is None else norm, scales if static is None else static
    sizes = {"K": k, "GROUP": BLOCK if group else 0, "LARGEST": LARGEST[dtype], "NORM": norm is not None}
    sizes |= {"STATIC": static is not None, "NATIVE": native, **pdl_args(x.device)}
    warps = min(16, max(1, triton.next_power_of_2(k) // 512))
    _quantize_kernel[(rows,)](
        x, *optional, target, scales, x.stride(0), *scales.stride(), eps, **sizes, num_warps=warps
    )
    return out, scales
