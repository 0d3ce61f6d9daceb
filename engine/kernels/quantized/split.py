"""x @ weight.T of up to 16 rows with a quantised weight: each warp of a program reads its own part of K.

A decode step reads a weight once, so the card must have many bytes in flight and many warps that convert numbers. A
matrix with few outputs has too few tiles for that. So the WARPS warps of a program compute the same BN outputs over
parts of K of equal size, as a batched product [WARPS, BN, BK] x [WARPS, BK, BM], and add their results at the end:

    K       0 ........ K / WARPS ........ 2 K / WARPS ........
    warp    0 0 0 0 0 0 1 1 1 1 1 1 1 1 1 2 2 2 2 2 ...

There are no atomics, and a row's result does not depend on the other rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.pdl import pdl_args, wait_for_previous
from engine.kernels.quantized.device_weight import FIELDS, DeviceWeight
from engine.kernels.quantized.product import Tile, accumulate, prefetch, scale_of
from engine.kernels.quantized.unpack import has_assembly, magic
from engine.quantization.weight import BLOCK, FIXED_ZERO


@triton.jit(do_not_specialize=["rows"])
def _split_kernel(
    x,
    numbers,
    scales,
    offsets,
    bias,
    residual,
    out,
    rows,
    x_row,
    residual_row,
    out_row,
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
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TOTAL: tl.constexpr,
    SPLIT: tl.constexpr,  # parts of K
    STAGES: tl.constexpr,
    LINES: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    steps: tl.constexpr = (ROW + BK * SPLIT - 1) // (BK * SPLIT)
    even_n: tl.constexpr = N % BN == 0
    even_w: tl.constexpr = ROW % (BK * SPLIT) == 0 and even_n
    even_k: tl.constexpr = K == ROW * TOTAL and ROW % (BK * SPLIT) == 0
    m, n = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    m_ok, n_ok = m < rows, n < N
    prefetch(numbers, n, n_ok, ROW * numbers.dtype.element_ty.primitive_bitwidth // 8, LINES, PDL)
    if GATED:
        prefetch(numbers, n + N, n_ok, ROW * numbers.dtype.element_ty.primitive_bitwidth // 8, LINES, PDL)
    wait_for_previous(PDL)
    first = tl.arange(0, SPLIT)[:, None, None] * (steps * BK)  # first word of each part
    n3, n3_ok = n[None, :, None], n_ok[None, :, None]
    m3, m3_ok = m[None, None, :], m_ok[None, None, :]
    word = first + tl.arange(0, BK)[None, None, :]  # [S, 1, BK]
    src = numbers + n3.to(tl.int64) * ROW + word
    start = first * TOTAL  # a step has whole blocks of fields, so the columns are in order
    column = start + tl.arange(0, BK)[None, :, None]  # [S, BK, 1]
    x_src = x + m3 * x_row + column
    acc = tl.zeros([SPLIT, BN, BM], tl.float32)
    acc_up = tl.zeros([SPLIT, BN, BM], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        w_ok = n3_ok & (word + step * BK < ROW)
        w = tl.load(src + step * BK, mask=None if even_w else w_ok, other=None if even_w else 0)
        if GATED:
            u = tl.load(src + N * ROW + step * BK, mask=None if even_w else w_ok, other=None if even_w else 0)
        for field in tl.static_range(TOTAL):
            k = step * (BK * TOTAL) + field * WIDTH
            v = tl.load(x_src + k, mask=m3_ok if even_k else m3_ok & (column + k < K), other=0.0)
            at = n3 // BLOCK_ROWS * SCALE_N + first * 0
            if GROUP > 0:
                at += tl.minimum((start + k) // GROUP, (K - 1) // GROUP) * SCALE_G
            acc = accumulate(acc, w, v, scales, offsets, at, n3_ok, 4 * field, KIND, SCALE, OFFSETS, GROUP, False, ASM)
            if GATED:
                at += N // BLOCK_ROWS * SCALE_N
                acc_up = accumulate(
                    acc_up, u, v, scales, offsets, at, n3_ok, 4 * field, KIND, SCALE, OFFSETS, GROUP, False, ASM
                )
    y = tl.sum(acc, 0)
    u = tl.sum(acc_up, 0)
    if GROUP == 0:
        y *= scale_of(tl.load(scales + n, mask=n_ok, other=0), SCALE)[:, None]
        if GATED:
            u *= scale_of(tl.load(scales + N + n, mask=n_ok, other=0), SCALE)[:, None]
    if BIAS:
        y += tl.load(bias + n, mask=n_ok, other=0.0).to(tl.float32)[:, None]
        if GATED:
            u += tl.load(bias + N + n, mask=n_ok, other=0.0).to(tl.float32)[:, None]
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * u
    ok = n_ok[:, None] & m_ok[None, :]
    if ADD:
        y += tl.load(residual + m[None, :] * residual_row + n[:, None], mask=ok, other=0.0).to(tl.float32)
    tl.store(out + m[None, :] * out_row + n[:, None], y.to(out.dtype.element_ty), mask=ok)


def can_split(weight: DeviceWeight, tile: Tile) -> bool:
    """Returns whether the parts of K are whole steps of the kernel, and a step has whole groups."""
    if tile.words != weight.width if weight.kind == "int4" else weight.group and tile.words > weight.width:
        return False
    return weight.numbers.shape[1] % (tile.words * tile.warps) == 0


def split_product(
    x: Tensor,
    weight: DeviceWeight,
    tile: Tile,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Computes x @ weight.T of at most `tile.rows` rows; arguments are those of `product`."""
    rows, k = x.shape
    n = weight.outputs // (2 if gated else 1)
    assert k == weight.inputs
    assert x.dtype == weight.compute
    assert rows <= tile.rows
    assert can_split(weight, tile)
    assert x.stride(1) == 1
    assert not (gated and residual is not None)
    assert not (gated and weight.block and n % BLOCK), "a block has rows of gate and of up"
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device) if out is None else out
    total = FIELDS if weight.kind == "int4" else 1
    numbers = weight.numbers if weight.kind == "int4" else weight.numbers.view(torch.uint8)
    offsets, addend = weight.offsets, x if residual is None else residual
    constant = -(FIXED_ZERO + magic(x.dtype)) if weight.kind == "int4" else 0
    sizes: dict[str, Any] = {"N": n, "K": k, "ROW": numbers.shape[1], "KIND": weight.kind}
    sizes |= {"SCALE_G": weight.scales.stride(0), "SCALE_N": weight.scales.stride(1)}
    sizes |= {"SCALE": str(weight.scale_dtype).removeprefix("torch."), "OFFSETS": constant if offsets is None else 1}
    sizes |= {"GROUP": weight.group, "BLOCK_ROWS": BLOCK if weight.block else 1, "WIDTH": weight.width}
    sizes |= {"BM": tile.rows, "BN": tile.outputs, "BK": tile.words, "TOTAL": total, "SPLIT": tile.warps}
    sizes |= {"STAGES": tile.stages, "LINES": tile.lines, "BIAS": bias is not None, "ADD": residual is not None}
    sizes |= {"GATED": gated, "ASM": has_assembly(x.dtype), **pdl_args(x.device)}
    optional = weight.scales if offsets is None else offsets, weight.scales if bias is None else bias, addend
    _split_kernel[(triton.cdiv(n, tile.outputs),)](
        x,
        numbers,
        weight.scales,
        *optional,
        out,
        rows,
        x.stride(0),
        addend.stride(0),
        out.stride(0),
        **sizes,
        num_warps=tile.warps,
    )
    return out
