"""x @ weight.T with a quantised weight that is converted in registers, for any number of rows.

A program computes BN outputs of BM rows over all K. The weight is the first operand of the tensor cores: its numbers go
from shared memory to registers, are converted there and never stored again. Conversions are exact and the scale of a
group multiplies the float32 sum of the group, so the only rounding is that of the result (but see `Tile.scaled`).

A step of the loop converts all fields of a tile of words, each for its own columns of x. The shift of a field is a
constant, because Triton converts a tile in registers only if no operand of the conversion varies with the step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.pdl import launch_next_and_wait, pdl_args, wait_for_previous
from engine.kernels.quantized.device_weight import FIELDS, DeviceWeight
from engine.kernels.quantized.unpack import convert, convert_scaled, has_assembly, magic, raw_int4
from engine.quantization.weight import BLOCK, FIXED_ZERO

LINE = tl.constexpr(128)  # Bytes that one prefetch brings to the L2 cache.


class Tile(NamedTuple):
    """Sizes of a program: rows, outputs and words per step, warps, pipeline stages.

    split: the warps have parts of K, see split.py.
    scaled: the scales of groups multiply 4-bit numbers, which costs one rounding of each weight, not their sums.
    splits: parts of K that are computed by different programs. Their float32 results are added by another kernel.
    sums: 4-bit numbers keep the offset of their conversion. The tensor cores also sum the inputs of a group; the sum
        times the offset is subtracted. This saves an instruction for two numbers, and costs products with ones.
    lines: 128-byte lines of each row that a program brings to the L2 cache before it waits for the kernel before it.
    """

    rows: int
    outputs: int
    words: int
    warps: int
    stages: int
    split: bool = False
    scaled: bool = False
    lines: int = 4
    splits: int = 1
    sums: bool = False


@triton.jit
def prefetch(weight, n, ok, ROW_BYTES: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr):
    """Brings the first LINES lines of the rows n of the weight to the L2 cache, before the kernel waits for x."""
    if PDL and ROW_BYTES >= LINE * LINES:
        first = weight.to(tl.int64)
        start = tl.where(ok, first + n.to(tl.int64) * ROW_BYTES, first)[:, None] + tl.arange(0, LINES)[None, :] * LINE
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [start], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def scale_of(packed, SCALE: tl.constexpr):
    """Returns float32 scales. SCALE: their dtype, float32 or that of the upper half of int32."""
    if SCALE == "float32":
        result = packed
    elif SCALE == "bfloat16":
        result = (packed & -65536).to(tl.float32, bitcast=True)
    else:
        result = (packed >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return result


@triton.jit
def offset_of(packed, offsets, at, ok, DTYPE: tl.constexpr, SCALE: tl.constexpr, OFFSETS: tl.constexpr):
    """Returns the offsets of a group in DTYPE, from the lower half of `packed`, from a tensor, or a constant."""
    if SCALE != "float32":
        result = packed.to(tl.int16).to(DTYPE, bitcast=True)
    elif OFFSETS == 1:
        result = tl.load(offsets + at, mask=ok, other=0.0)
    else:
        result = tl.full([1, 1], OFFSETS, DTYPE)
    return result


@triton.jit
def accumulate(
    acc,
    w,
    v,
    scales,
    offsets,
    at,
    ok,
    shift,
    KIND: tl.constexpr,
    SCALE: tl.constexpr,
    OFFSETS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED: tl.constexpr,
    SUMS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Returns acc [.., BN, BM] plus the product of one field of the words w [.., BN, BK] and v [.., BK, BM].

    Args:
        at: places [.., BN, 1] of the scales. ok: which of them exist.
    """
    if GROUP > 0 or SCALE != "float32":
        packed = tl.load(scales + at, mask=ok, other=0)
    else:
        packed = 0.0
    offset = offset_of(packed, offsets, at, ok, v.dtype, SCALE, OFFSETS)
    if SCALED:
        number = convert_scaled(w, shift, offset, scale_of(packed, SCALE), ASM)
        result = tl.dot(number, v, acc, input_precision="ieee")
    elif SUMS and ASM and KIND == "int4" and GROUP > 0:  # the offset multiplies the sum of the inputs
        part = tl.dot(raw_int4(w, shift, v.dtype), v, input_precision="ieee", out_dtype=tl.float32)
        sums = tl.dot(tl.full(w.shape, 1.0, v.dtype), v, input_precision="ieee", out_dtype=tl.float32)
        result = acc + (part + sums * offset.to(tl.float32)) * scale_of(packed, SCALE)
    elif GROUP > 0:
        part = tl.dot(convert(w, shift, offset, KIND, ASM), v, input_precision="ieee", out_dtype=tl.float32)
        result = acc + part * scale_of(packed, SCALE)
    else:
        result = tl.dot(convert(w, shift, offset, KIND, ASM), v, acc, input_precision="ieee")
    return result


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
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
    N: tl.constexpr,  # outputs; of gate alone if GATED
    K: tl.constexpr,
    ROW: tl.constexpr,  # words per row of numbers
    SCALE_G: tl.constexpr,  # strides of scales: of a group, of an output or block of outputs
    SCALE_N: tl.constexpr,
    KIND: tl.constexpr,
    SCALE: tl.constexpr,
    OFFSETS: tl.constexpr,  # 1: a tensor; else the constant offset
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # outputs that share a scale
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TOTAL: tl.constexpr,  # fields of a word
    SCALED: tl.constexpr,  # scales multiply the numbers, not the sums of their groups
    STAGES: tl.constexpr,
    LINES: tl.constexpr,
    SPLITS: tl.constexpr,
    SUMS: tl.constexpr,  # offsets multiply sums of inputs, see `Tile.sums`
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles = tl.cdiv(rows, BM)
    m = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    n = tl.program_id(0) // tiles * BN + tl.arange(0, BN)
    part = tl.program_id(1)
    j = tl.arange(0, BK)
    m_ok, n_ok = m < rows, n < N
    src = numbers + n.to(tl.int64)[:, None] * ROW + j[None, :]
    prefetch(numbers, n, n_ok, ROW * numbers.dtype.element_ty.primitive_bitwidth // 8, LINES, PDL)
    if GATED:
        prefetch(numbers, n + N, n_ok, ROW * numbers.dtype.element_ty.primitive_bitwidth // 8, LINES, PDL)
    wait_for_previous(PDL)
    x_src = x + m[None, :].to(tl.int64) * x_row + j[:, None]
    even_n: tl.constexpr = N % BN == 0
    even_w: tl.constexpr = ROW % (BK * SPLITS) == 0 and even_n
    even_k: tl.constexpr = K == ROW * TOTAL and ROW % (BK * SPLITS) == 0
    acc = tl.zeros([BN, BM], tl.float32)
    acc_up = tl.zeros([BN, BM], tl.float32)
    steps: tl.constexpr = (ROW + BK * SPLITS - 1) // (BK * SPLITS)  # of each part
    for step in tl.range(part * steps, (part + 1) * steps, num_stages=STAGES):
        column = step * BK
        k0 = column
        if TOTAL > 1:
            k0 = tl.multiple_of(column // WIDTH * (WIDTH * TOTAL) + column % WIDTH, BK)
        w_ok = n_ok[:, None] & (column + j < ROW)[None, :]
        w = tl.load(src + column, mask=None if even_w else w_ok, other=None if even_w else 0)
        if GATED:
            u = tl.load(src + N * ROW + column, mask=None if even_w else w_ok, other=None if even_w else 0)
        for field in tl.static_range(TOTAL):
            k = k0 + field * WIDTH
            x_ok = m_ok[None, :] if even_k else m_ok[None, :] & (k + j < K)[:, None]
            v = tl.load(x_src + k, mask=x_ok, other=0.0)
            at = n[:, None] // BLOCK_ROWS * SCALE_N
            if GROUP > 0:
                at += tl.minimum(k // GROUP, (K - 1) // GROUP) * SCALE_G
            acc = accumulate(
                acc, w, v, scales, offsets, at, n_ok[:, None], 4 * field, KIND, SCALE, OFFSETS, GROUP, SCALED, SUMS, ASM
            )
            if GATED:
                at += N // BLOCK_ROWS * SCALE_N
                acc_up = accumulate(
                    acc_up,
                    u,
                    v,
                    scales,
                    offsets,
                    at,
                    n_ok[:, None],
                    4 * field,
                    KIND,
                    SCALE,
                    OFFSETS,
                    GROUP,
                    SCALED,
                    SUMS,
                    ASM,
                )
    if GROUP == 0:
        acc *= scale_of(tl.load(scales + n, mask=n_ok, other=0), SCALE)[:, None]
        if GATED:
            acc_up *= scale_of(tl.load(scales + N + n, mask=n_ok, other=0), SCALE)[:, None]
    if BIAS:
        acc += tl.load(bias + n, mask=n_ok, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc_up += tl.load(bias + N + n, mask=n_ok, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * acc_up
    ok = n_ok[:, None] & m_ok[None, :]
    if ADD:
        acc += tl.load(residual + m[None, :].to(tl.int64) * residual_row + n[:, None], mask=ok, other=0.0).to(
            tl.float32
        )
    out += part.to(tl.int64) * rows * out_row
    tl.store(out + m[None, :].to(tl.int64) * out_row + n[:, None], acc.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _sum(parts, n, ok, row, rows, parts_row, SPLITS: tl.constexpr):
    total = tl.zeros([n.shape[0]], tl.float32)
    for part in tl.static_range(SPLITS):
        total += tl.load(parts + (row + part * rows) * parts_row + n, mask=ok, other=0.0)
    return total


@triton.jit
def _add_kernel(
    parts,
    bias,
    residual,
    out,
    parts_row,
    residual_row,
    out_row,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    n = tl.program_id(1) * 1024 + tl.arange(0, 1024)
    ok = n < N
    launch_next_and_wait(PDL)
    y = _sum(parts, n, ok, row, rows, parts_row, SPLITS)
    if BIAS:
        y += tl.load(bias + n, mask=ok, other=0.0).to(tl.float32)
    if GATED:
        u = _sum(parts + N, n, ok, row, rows, parts_row, SPLITS)
        if BIAS:
            u += tl.load(bias + N + n, mask=ok, other=0.0).to(tl.float32)
        y = y / (1.0 + tl.exp(-y)) * u
    if ADD:
        y += tl.load(residual + row * residual_row + n, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + n, y.to(out.dtype.element_ty), mask=ok)


def product(
    x: Tensor,
    weight: DeviceWeight,
    tile: Tile,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Computes x @ weight.T. Returns [R, N], or [R, N / 2] if gated.

    Args:
        x: [R, K] in the dtype `weight.compute`, columns in the order of the weight's, any row stride.
        bias, residual, gated, out: as in `engine.kernels.gemm.skinny_gemm`.
    """
    rows, k = x.shape
    n = weight.outputs // (2 if gated else 1)
    assert k == weight.inputs
    assert x.dtype == weight.compute
    assert x.stride(1) == 1
    assert not (gated and residual is not None)
    assert not (gated and weight.block and n % BLOCK), "a block has rows of gate and of up"
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device) if out is None else out
    if tile.splits > 1:
        parts = torch.empty(tile.splits * rows, weight.outputs, dtype=torch.float32, device=x.device)
        _launch(x, weight, tile, None, None, False, parts, rows)
        return _add_parts(parts, tile.splits, bias, residual, gated, out)
    _launch(x, weight, tile, bias, residual, gated, out, rows)
    return out


def _launch(
    x: Tensor,
    weight: DeviceWeight,
    tile: Tile,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
    out: Tensor,
    rows: int,
) -> None:
    k, n = weight.inputs, weight.outputs // (2 if gated else 1)
    total = FIELDS if weight.kind == "int4" else 1
    numbers = weight.numbers if weight.kind == "int4" else weight.numbers.view(torch.uint8)
    offsets, addend = weight.offsets, x if residual is None else residual
    constant = -(FIXED_ZERO + magic(x.dtype)) if weight.kind == "int4" else 0
    words = min(tile.words, weight.width) if weight.group or total > 1 else tile.words
    sizes: dict[str, Any] = {"N": n, "K": k, "ROW": numbers.shape[1], "KIND": weight.kind}
    sizes |= {"SCALE_G": weight.scales.stride(0), "SCALE_N": weight.scales.stride(1)}
    sizes |= {"SCALE": str(weight.scale_dtype).removeprefix("torch."), "OFFSETS": constant if offsets is None else 1}
    sizes |= {"GROUP": weight.group, "BLOCK_ROWS": BLOCK if weight.block else 1, "WIDTH": weight.width}
    sizes |= {"BM": tile.rows, "BN": tile.outputs, "BK": words, "TOTAL": total}
    sizes |= {"SCALED": tile.scaled and weight.group > 0 and total > 1}
    sizes |= {"STAGES": tile.stages, "LINES": tile.lines, "SPLITS": tile.splits, "SUMS": tile.sums}
    sizes |= {"BIAS": bias is not None, "ADD": residual is not None}
    sizes |= {"GATED": gated, "ASM": has_assembly(x.dtype), **pdl_args(x.device)}
    optional = weight.scales if offsets is None else offsets, weight.scales if bias is None else bias, addend
    _product_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(n, tile.outputs), tile.splits)](
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


def _add_parts(
    parts: Tensor, splits: int, bias: Tensor | None, residual: Tensor | None, gated: bool, out: Tensor
) -> Tensor:
    """Adds the results [splits * R, N] of the parts of K, then does what `product` does after a product."""
    rows, n = out.shape
    addend = out if residual is None else residual
    sizes = {"N": n, "SPLITS": splits, "BIAS": bias is not None, "ADD": residual is not None, "GATED": gated}
    grid = rows, triton.cdiv(n, 1024)
    _add_kernel[grid](
        parts,
        parts if bias is None else bias,
        addend,
        out,
        parts.stride(0),
        addend.stride(0),
        out.stride(0),
        **sizes,
        **pdl_args(out.device),
        num_warps=4,
    )
    return out
