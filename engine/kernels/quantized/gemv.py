"""x @ weight.T of one row with 8-bit weights, with RMSNorm before it and the residual add or SiLU x mul after it.

The kernel is that of `engine.kernels.gemm.gemv` with the scales of the weight. 4-bit weights have no such kernel: their
conversion to float32 takes more instructions than the card can issue while it reads them, so `product` serves one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gemm import load_tile
from engine.kernels.pdl import pdl_args, wait_for_previous
from engine.kernels.quantized.device_weight import DeviceWeight
from engine.kernels.quantized.unpack import e4m3
from engine.quantization.weight import BLOCK

BLOCK_K = 2048  # Largest number of columns in a tile.


@triton.jit
def _to_float32(tile, NATIVE: tl.constexpr):
    """Converts int8 or e4m3 to float32. Without NATIVE, e4m3 are bytes."""
    if NATIVE:
        return tile.to(tl.float32)
    else:
        return e4m3(tile)


@triton.jit
def _gemv_kernel(
    x,
    weight,
    scales,
    bias,
    norm,
    residual,
    out,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    SCALE_N: tl.constexpr,  # stride of blocks of outputs, if a scale covers 128 x 128; 0: a scale for each output
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    rows = first + tl.arange(0, ROWS)
    row_ok = rows < N
    k = tl.arange(0, BK)
    src = weight + rows.to(tl.int64)[:, None] * K + k[None, :]
    even: tl.constexpr = K % BK == 0 and N % ROWS == 0
    w = load_tile(src, row_ok[:, None], k[None, :], 0, K, even)
    if GATED:
        up = load_tile(src + N * K, row_ok[:, None], k[None, :], 0, K, even)
    if SCALE_N == 0:
        scale = tl.load(scales + rows, mask=row_ok, other=0.0)
        if GATED:
            scale_up = tl.load(scales + N + rows, mask=row_ok, other=0.0)
    wait_for_previous(PDL)  # the weights do not depend on the kernel before
    if ADD:
        added = tl.load(residual + rows, mask=row_ok, other=0.0).to(tl.float32)
    acc = tl.zeros([ROWS, BK], tl.float32)
    acc_up = tl.zeros([ROWS, BK], tl.float32)
    square = tl.zeros([BK], tl.float32)
    for start in range(0, K, BK):
        ok = start + k < K
        v = tl.load(x + start + k, mask=ok, other=0.0).to(tl.float32)
        if NORM:
            square += v * v
            v *= tl.load(norm + start + k, mask=ok, other=0.0).to(tl.float32)
        v_up = v
        if SCALE_N > 0:  # the rows of a program lie in one block, so the scales depend on the column alone
            at = scales + (start + k) // 128 + first // 128 * SCALE_N
            if GATED:
                v_up = v * tl.load(at + N // 128 * SCALE_N, mask=ok, other=0.0)
            v = v * tl.load(at, mask=ok, other=0.0)
        acc += _to_float32(w, NATIVE) * v[None, :]
        if GATED:
            acc_up += _to_float32(up, NATIVE) * v_up[None, :]
        if K > BK:
            w = load_tile(src, row_ok[:, None], k[None, :], start + BK, K, False)
            if GATED:
                up = load_tile(src + N * K, row_ok[:, None], k[None, :], start + BK, K, False)
    y = tl.sum(acc, 1)
    if SCALE_N == 0:
        y *= scale
    if NORM:
        rstd = tl.rsqrt(tl.sum(square, 0) / K + eps)
        y *= rstd
    if BIAS:
        y += tl.load(bias + rows, mask=row_ok, other=0.0).to(tl.float32)
    if GATED:
        u = tl.sum(acc_up, 1)
        if SCALE_N == 0:
            u *= scale_up
        if NORM:
            u *= rstd
        if BIAS:
            u += tl.load(bias + N + rows, mask=row_ok, other=0.0).to(tl.float32)
        y = y / (1.0 + tl.exp(-y)) * u
    if ADD:
        y += added
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=row_ok)


def can_gemv(weight: DeviceWeight) -> bool:
    """Returns whether `gemv` supports the weight: 8-bit numbers with a scale per output or per block."""
    if weight.kind == "int4" or weight.offsets is not None or not (weight.block or weight.group == 0):
        return False
    device = weight.numbers.device
    return weight.kind == "int8" or device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def gemv(
    x: Tensor,
    weight: DeviceWeight,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    shape: tuple[int, int, int] | None = None,
) -> Tensor:
    """Computes x @ weight.T for one row [1, K]. Returns [1, N], or [1, N / 2] if gated.

    Arguments are those of `engine.kernels.gemm.gemv`. shape: outputs of a program, columns of a tile, warps.
    """
    n, k = weight.outputs // (2 if gated else 1), weight.inputs
    assert x.shape == (1, k)
    assert not (gated and residual is not None)
    assert not (gated and weight.block and n % BLOCK), "a block has rows of gate and of up"
    out = torch.empty(1, n, dtype=x.dtype, device=x.device) if out is None else out
    rows, columns, warps = shape or (4, BLOCK_K, 4)
    native = weight.kind == "int8" or not triton.knobs.runtime.interpret
    numbers = weight.numbers if native else weight.numbers.view(torch.uint8)
    optional = out if bias is None else bias, x if norm is None else norm, x if residual is None else residual
    sizes = {"N": n, "K": k, "SCALE_N": weight.scales.stride(1) if weight.block else 0, "ROWS": rows}
    sizes |= {"BK": min(columns, triton.next_power_of_2(k)), "NORM": norm is not None, "BIAS": bias is not None}
    sizes |= {"ADD": residual is not None, "GATED": gated, "NATIVE": native, **pdl_args(x.device)}
    _gemv_kernel[(triton.cdiv(n, rows),)](
        x, numbers, weight.scales, *optional, out, eps, **sizes, num_warps=warps
    )
    return out
