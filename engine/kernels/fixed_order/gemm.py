"""Products with the model's weights, x @ weight.T, whose bits do not depend on the number of rows.

Each output is one sum over k in ascending order, in one float32 accumulator of the tensor cores, 16 products at a time.
Tiles, warps and pipeline stages change with the number of rows; the order of a sum does not. There is no split of K.

    rows     kernel           tile
    1..16    `_tile_kernel`   16 rows (mma.sync on Hopper)
    17..     `_tile_kernel`   64 or 128 rows (wgmma on Hopper)
    many     `_wide_kernel`   128 rows x 128 or 256 columns, persistent, on TMA descriptors (Hopper)

On an H200 all shapes give equal bits, mma.sync and wgmma too: `benchmarks/fixed_order.py` compares them. The operation
after the product is fused, in float32: bias, then SiLU x mul, or a residual add.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels.gemm import ONE_WAVE, load_tile
from engine.kernels.pdl import pdl_args, wait_for_previous

MAX_NARROW_ROWS = 1024  # Largest number of rows for which `_wide_kernel` may have tiles of 128 columns.


class TileShape(NamedTuple):
    """The shape of a program of `_tile_kernel`."""

    rows: int
    outputs: int  # With a gate: outputs of gate, and as many of up.
    depth: int  # Numbers of K that are loaded at once.
    stages: int  # Pipeline stages.
    warps: int = 4
    swap: bool = False  # The weights are the left operand of the product.
    early: bool = True  # The first tile of weights is loaded before the kernel that computes x has ended.


class WideShape(NamedTuple):
    """The shape of a program of `_wide_kernel`."""

    rows: int = 128
    columns: int = 256  # Columns of the accumulator. With a gate: half gate, half up.
    depth: int = 64
    stages: int = 4
    group: int = 16  # Tile rows of a band, see `engine/kernels/gemm.py`.


@triton.jit
def _add_product(acc, x, w, SWAP: tl.constexpr):
    """Returns acc plus the product of a tile of x and a tile of weights, which are the left operand if SWAP."""
    if SWAP:
        acc = tl.dot(w, x, acc, input_precision="ieee")
    else:
        acc = tl.dot(x, w, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["rows"])
def _tile_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    rows,
    x_row,
    w_row,
    residual_row,
    out_row,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    SWAP: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    # Programs of the same outputs follow each other, so that the weights are read from device memory once.
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    if SWAP:
        m = m[None, :]
        n = n[:, None]
        kn = k[None, :]
        km = k[:, None]
    else:
        m = m[:, None]
        n = n[None, :]
        kn = k[:, None]
        km = k[None, :]
    m_ok = m < rows
    n_ok = n < N
    src = weight + n.to(tl.int64) * w_row + kn
    up_src = src + N * w_row
    x_src = x + m.to(tl.int64) * x_row + km
    even: tl.constexpr = K % BK == 0 and N % BN == 0
    acc = tl.zeros([BN, BM] if SWAP else [BM, BN], tl.float32)
    acc_up = acc
    if EARLY:
        w = load_tile(src, n_ok, kn, 0, K, even)
        if GATED:
            u = load_tile(up_src, n_ok, kn, 0, K, even)
    wait_for_previous(PDL)
    if EARLY:
        v = load_tile(x_src, m_ok, km, 0, K, False)
        acc = _add_product(acc, v, w, SWAP)
        if GATED:
            acc_up = _add_product(acc_up, v, u, SWAP)
    for start in tl.range(BK if EARLY else 0, K, BK, num_stages=STAGES):
        w = load_tile(src, n_ok, kn, start, K, even)
        v = load_tile(x_src, m_ok, km, start, K, False)
        acc = _add_product(acc, v, w, SWAP)
        if GATED:
            u = load_tile(up_src, n_ok, kn, start, K, even)
            acc_up = _add_product(acc_up, v, u, SWAP)
    if BIAS:
        acc += tl.load(bias + n, mask=n_ok, other=0.0).to(tl.float32)
    if GATED:
        if BIAS:
            acc_up += tl.load(bias + N + n, mask=n_ok, other=0.0).to(tl.float32)
        acc = acc / (1.0 + tl.exp(-acc)) * acc_up
    ok = m_ok & n_ok
    if ADD:
        acc += tl.load(residual + m.to(tl.int64) * residual_row + n, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + m.to(tl.int64) * out_row + n, acc.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _finish(acc, bias, residual, out, m0, n0, N: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr):
    """Adds bias and residual to a tile of results, and stores it."""
    if BIAS:
        n = n0 + tl.arange(0, BN)
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if ADD:
        acc += residual.load([m0, n0]).to(tl.float32)
    out.store([m0, n0], acc.to(out.dtype))


@triton.jit(do_not_specialize=["rows"])
def _wide_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    SMS: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
):
    # A tile is BM rows and 2 * BN accumulators of each row: BN outputs of gate and of up, or 2 * BN outputs.
    width: tl.constexpr = BN if GATED else 2 * BN
    tiles_m = tl.cdiv(rows, BM)
    tiles_n: tl.constexpr = (N + width - 1) // width
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, SMS, flatten=True):
        first = tile // (GROUP * tiles_n) * GROUP
        size = tl.minimum(tiles_m - first, GROUP)
        m0 = (first + tile % (GROUP * tiles_n) % size) * BM
        n0 = tile % (GROUP * tiles_n) // size * width
        acc = tl.zeros([BM, 2 * BN], tl.float32)
        for k0 in tl.range(0, K, BK, num_stages=STAGES):
            a = x.load([m0, k0])
            if GATED:
                w = weight.load([0, n0, k0]).reshape(2 * BN, BK)
            else:
                w = weight.load([n0, k0])
            acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
        left, right = acc.reshape(BM, 2, BN).permute(0, 2, 1).split()
        if GATED:
            if BIAS:
                n = n0 + tl.arange(0, BN)
                left += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
                right += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
            out.store([m0, n0], (left / (1.0 + tl.exp(-left)) * right).to(out.dtype))
        else:
            _finish(left, bias, residual, out, m0, n0, N, BN, BIAS, ADD)
            _finish(right, bias, residual, out, m0, n0 + BN, N, BN, BIAS, ADD)


def tile_shape(rows: int, n: int, gated: bool) -> TileShape | WideShape:
    """Returns the shape for a product of `rows` rows and n outputs of an 8B model in bf16 on an H200.

    All tiles and numbers of warps are among those whose bits were compared on an H200; stages change no bit.

    Few rows take about as long as reading the weights, if every SM has 100 to 200 KB in flight.
    """
    few = n <= 32 * ONE_WAVE and not gated  # Programs of 32 outputs run at once.
    if rows <= 16:
        if few:
            return TileShape(16, 32, 256, 6)
        return TileShape(16, 64, 128, 5) if gated or n <= 64 * ONE_WAVE else TileShape(16, 128, 128, 3)
    if rows <= 64:
        if few:
            return TileShape(64, 32, 128, 6, early=False)
        return (
            TileShape(64, 64, 128, 6, early=False)
            if n <= 64 * ONE_WAVE and not gated
            else TileShape(64, 64, 64, 5, early=False)
        )
    if rows <= 128 and not gated:
        return TileShape(64, 64, 128, 6, early=False) if few else TileShape(128, 64, 64, 7, 8, early=False)
    if rows <= 256 and few:
        return TileShape(128, 64, 64, 7, 8, early=False)
    tiles = triton.cdiv(rows, 128) * triton.cdiv(2 * n if gated else n, 256)
    # A tile of 128 columns takes 0.7 of the time of one of 256 columns, and there are twice as many. Steps of more rows
    # have no graphs: one shape serves all of them, so that none is compiled while requests wait.
    narrow = rows <= MAX_NARROW_ROWS and 0.7 * triton.cdiv(2 * tiles, ONE_WAVE) < triton.cdiv(tiles, ONE_WAVE)
    return WideShape(columns=128 if narrow else 256)


def _can_be_wide(x: Tensor, weight: Tensor, out: Tensor, residual: Tensor | None) -> bool:
    """Returns whether TMA can read and write the matrices: rows of multiples of 16 bytes, results in the dtype of x."""
    matrices = [x, weight, out] + ([] if residual is None else [residual])
    aligned = all(m.stride(0) * m.element_size() % 16 == 0 and m.data_ptr() % 16 == 0 for m in matrices)
    return aligned and out.dtype == x.dtype


def fixed_order_gemm(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    shape: TileShape | WideShape | None = None,
) -> Tensor:
    """Computes x @ weight.T. Returns [R, N], or [R, N / 2] if gated. A row's bits do not depend on other rows.

    Args:
        x, weight: [R, K] and [N, K] of one dtype, any row stride.
        bias: [N].
        residual: [R, N], added to the result. Not with `gated`.
        gated: the first half of weight's rows is gate, the second is up; the result is silu(gate) * up.
        out: result. None allocates it; may be residual.
        shape: tiles. None selects them.
    """
    rows, k = x.shape
    n = weight.shape[0] // (2 if gated else 1)
    assert weight.shape[1] == k
    assert x.stride(1) == weight.stride(1) == 1
    assert not (gated and residual is not None)
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device) if out is None else out
    shape = tile_shape(rows, n, gated) if shape is None else shape
    flags = {"BIAS": bias is not None, "ADD": residual is not None, "GATED": gated}
    addends = weight if bias is None else bias, x if residual is None else residual
    if isinstance(shape, WideShape):
        if _can_be_wide(x, weight, out, residual):
            _launch_wide(x, weight, *addends, out, n, shape, flags)
            return out
        shape = TileShape(128, 64, 64, 4, early=False)
    strides = [matrix.stride(0) for matrix in (x, weight, addends[1], out)]
    sizes = {"N": n, "K": k, "BM": shape.rows, "BN": shape.outputs, "BK": shape.depth, "STAGES": shape.stages}
    _tile_kernel[(triton.cdiv(rows, shape.rows), triton.cdiv(n, shape.outputs))](
        x, weight, *addends, out, rows, *strides, **sizes, **flags, SWAP=shape.swap, EARLY=shape.early,
        num_warps=shape.warps,
        enable_fp_fusion=False, **pdl_args(x.device),
    )  # fmt: skip
    return out


def _launch_wide(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor,
    out: Tensor,
    n: int,
    shape: WideShape,
    flags: dict[str, bool],
) -> None:
    rows, k = x.shape
    bm, columns, bk = shape.rows, shape.columns, shape.depth
    bn = columns // 2
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
    if flags["GATED"]:
        weight_tiles = TensorDescriptor(weight, [2, n, k], [n * weight.stride(0), weight.stride(0), 1], [2, bn, bk])
    else:
        weight_tiles = TensorDescriptor.from_tensor(weight, [columns, bk])
    tiles = [TensorDescriptor.from_tensor(matrix, [bm, bn]) for matrix in (residual if flags["ADD"] else out, out)]
    sizes = {"N": n, "K": k, "BM": bm, "BN": bn, "BK": bk, "GROUP": shape.group, "SMS": programs}
    _wide_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [bm, bk]), weight_tiles, bias, *tiles, rows,
        **sizes, STAGES=min(shape.stages, 3) if flags["ADD"] else shape.stages, **flags, num_warps=8,
        enable_fp_fusion=False,
    )  # fmt: skip
