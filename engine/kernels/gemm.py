"""Products with the model's weights, x @ weight.T, with the operations around them fused: a kernel for each batch size.

- `gemv`, 1 row: RMSNorm before; residual add or SiLU x mul after. A program reads ROWS whole rows of the weight in
  tiles of BLOCK_K. RMSNorm needs no extra pass: the program reads all of x, so it also sums x^2 and scales the result,
  W (x * rstd * g) = rstd * (W (x * g)).
- `skinny_gemm`, 2 to 16 rows: residual add or SiLU x mul after. A program computes all rows of BN outputs over all K.
  Tile sizes are selected so that all programs are resident at once and have enough bytes in flight (90 to 150 KB if a
  program has an SM to itself); then all programs finish together.
- `gemm_swiglu`, many rows: SiLU x mul after, persistent, on TMA descriptors (Hopper). A tile computes BN columns of
  gate and the same BN columns of up as one product of twice the width. So both numbers of a pair are in one thread's
  registers, and the kernel stores half of the computed numbers. A program computes every SMS-th tile and loads for the
  next tile while it finishes one. For the L2 cache, tiles are ordered in bands of GROUP tile rows, column by column.

The first two have no atomics and no partial sums, so a row's result is always the same and does not depend on the other
rows. They load their first tile of weights before they wait for the kernel that computes x (PDL, pdl.py).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels import card
from engine.kernels.adapters.changes import (
    NO_CHANGE,
    NO_CHUNK_CHANGE,
    ChunkChange,
    RowChange,
    add_change_of_pair,
    rows_of_b,
    states_of_row,
)
from engine.kernels.adapters.products import RANK_MULTIPLE
from engine.kernels.card import SHARED_BYTES
from engine.kernels.pdl import pdl_args, wait_for_previous

MAX_SKINNY_ROWS = 16  # Largest number of rows of `skinny_gemm`: the smallest tile of a tensor core.
ONE_WAVE = 132  # Number of programs that run at once if each needs more than half of an SM's shared memory.


@triton.jit
def load_tile(src, ok, k, start, K: tl.constexpr, EVEN: tl.constexpr):
    """Loads the tile at column `start` of a matrix with K columns. EVEN: all of the tile lies in the matrix."""
    return tl.load(src + start, mask=None if EVEN else ok & (start + k < K), other=None if EVEN else 0.0)


@triton.jit(do_not_specialize=["rows"])
def _skinny_kernel(
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
    PDL: tl.constexpr,
):
    m = tl.arange(0, BM)[:, None]
    n = tl.program_id(0) * BN + tl.arange(0, BN)[None, :]
    m_ok = m < rows
    n_ok = n < N
    k = tl.arange(0, BK)
    src = weight + n.to(tl.int64) * w_row + k[:, None]
    up_src = src + N * w_row
    even: tl.constexpr = K % BK == 0 and N % BN == 0
    w = load_tile(src, n_ok, k[:, None], 0, K, even)
    if GATED:
        u = load_tile(up_src, n_ok, k[:, None], 0, K, even)
    wait_for_previous(PDL)
    x_src = x + m * x_row + k[None, :]
    v = load_tile(x_src, m_ok, k[None, :], 0, K, False)
    acc = tl.dot(v, w, input_precision="ieee")
    acc_up = tl.zeros([BM, BN], tl.float32)
    if GATED:
        acc_up = tl.dot(v, u, input_precision="ieee")
    for start in tl.range(BK, K, BK, num_stages=STAGES):
        w = load_tile(src, n_ok, k[:, None], start, K, even)
        v = load_tile(x_src, m_ok, k[None, :], start, K, False)
        acc = tl.dot(v, w, acc, input_precision="ieee")
        if GATED:
            u = load_tile(up_src, n_ok, k[:, None], start, K, even)
            acc_up = tl.dot(v, u, acc_up, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + n, mask=n_ok, other=0.0).to(tl.float32)
    if GATED:
        if BIAS:
            acc_up += tl.load(bias + N + n, mask=n_ok, other=0.0).to(tl.float32)
        acc = acc / (1.0 + tl.exp(-acc)) * acc_up
    if ADD:
        acc += tl.load(residual + m * residual_row + n, mask=m_ok & n_ok, other=0.0).to(tl.float32)
    tl.store(out + m * out_row + n, acc.to(out.dtype.element_ty), mask=m_ok & n_ok)


def _shape(n: int, gated: bool, itemsize: int, shared: int) -> tuple[int, int, int]:
    """Returns BN, BK and pipeline stages, the fastest on an H100 for the matrices of an 8B model in bf16.

    Cards with less shared memory (`shared` bytes a program) get smaller tiles.
    """
    if shared < SHARED_BYTES[80]:
        return (32, 256 // itemsize, 4) if gated else (64, 256 // itemsize, 3)
    if gated:
        return 32, 512 // itemsize, 4
    if n <= 32 * ONE_WAVE:
        return 32, 512 // itemsize, 6
    return (64, 256 // itemsize, 5) if n <= 64 * ONE_WAVE else (128, 256 // itemsize, 3)


def skinny_gemm(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    shape: tuple[int, int, int] | None = None,
) -> Tensor:
    """Computes x @ weight.T for 1 to MAX_SKINNY_ROWS rows. Returns [R, N], or [R, N / 2] if gated.

    Args:
        x, weight: [R, K] and [N, K], any row stride.
        bias: [N].
        residual: [R, N], added to the result. Not with `gated`.
        gated: the first half of weight's rows is gate, the second is up; the result is silu(gate) * up.
        out: result. None allocates it; may be residual.
        shape: BN, BK and pipeline stages. None selects them.
    """
    rows, k = x.shape
    n = weight.shape[0] // (2 if gated else 1)
    assert 1 <= rows <= MAX_SKINNY_ROWS
    assert weight.shape[1] == k
    assert x.stride(1) == weight.stride(1) == 1
    assert not (gated and residual is not None)
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device) if out is None else out
    addend = x if residual is None else residual
    bn, bk, stages = shape or _shape(n, gated, x.element_size(), card.shared_bytes(x.device))
    strides = [matrix.stride(0) for matrix in (x, weight, addend, out)]
    sizes = {"N": n, "K": k, "BM": MAX_SKINNY_ROWS, "BN": bn, "BK": bk, "STAGES": stages}
    options = {"BIAS": bias is not None, "ADD": residual is not None, "GATED": gated, **pdl_args(x.device)}
    _skinny_kernel[(triton.cdiv(n, bn),)](
        x, weight, weight if bias is None else bias, addend, out, rows, *strides, **sizes, **options, num_warps=4
    )
    return out


BLOCK_K = 2048  # Largest number of columns in a tile of `gemv`.


@triton.jit
def _gemv_kernel(
    x,
    weight,
    bias,
    norm,
    residual,
    out,
    change,  # ChangeTensors, or None
    eps,
    w_row,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    CHANGED: tl.constexpr,  # 0: no change. 1: a `RowChange` with the constants below; 2: whose states lack rstd
    SITES: tl.constexpr,
    CAPACITY: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLIT_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_ok = rows < N
    k = tl.arange(0, BK)
    src = weight + rows.to(tl.int64)[:, None] * w_row + k[None, :]
    even: tl.constexpr = K % BK == 0 and N % ROWS == 0
    w = load_tile(src, row_ok[:, None], k[None, :], 0, K, even)
    if GATED:
        up = load_tile(src + N * w_row, row_ok[:, None], k[None, :], 0, K, even)
    if CHANGED:
        second, third = tl.program_id(0) * ROWS >= N0, tl.program_id(0) * ROWS >= N0 + N1
        if GATED:
            b, shift, rank = rows_of_b(change, rows, row_ok, 0, 0, SITES, CAPACITY, RANK)
            b_up, shift_up, rank_up = rows_of_b(change, rows, row_ok, 1, 0, SITES, CAPACITY, RANK)
        else:
            part = second.to(tl.int32) + third.to(tl.int32)
            column = tl.where(third, N0 + N1, tl.where(second, N0, 0))
            b, shift, rank = rows_of_b(change, rows, row_ok, part, column, SITES, CAPACITY, RANK)
    # Weights are constant, so their first tile is loaded before the kernel that computes x has finished.
    wait_for_previous(PDL)
    if CHANGED:
        state = states_of_row(change, shift, rank, SPLIT, SPLIT_PAD, WIDTH, RANK)
        if GATED:
            state_up = states_of_row(change, shift_up, rank_up, SPLIT, SPLIT_PAD, WIDTH, RANK)
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
        acc += w.to(tl.float32) * v[None, :]
        if GATED:
            acc_up += up.to(tl.float32) * v[None, :]
        if K > BK:
            w = load_tile(src, row_ok[:, None], k[None, :], start + BK, K, False)
            if GATED:
                up = load_tile(src + N * w_row, row_ok[:, None], k[None, :], start + BK, K, False)
    y = tl.sum(acc, 1)
    if CHANGED == 2:
        y += tl.sum(b * state[None, :], 1)
    if NORM:
        rstd = tl.rsqrt(tl.sum(square, 0) / K + eps)
        y *= rstd
    if CHANGED == 1:
        y += tl.sum(b * state[None, :], 1)
    if BIAS:
        y += tl.load(bias + rows, mask=row_ok, other=0.0).to(tl.float32)
    if GATED:
        u = tl.sum(acc_up, 1)
        if CHANGED == 2:
            u += tl.sum(b_up * state_up[None, :], 1)
        if NORM:
            u *= rstd
        if CHANGED == 1:
            u += tl.sum(b_up * state_up[None, :], 1)
        if BIAS:
            u += tl.load(bias + N + rows, mask=row_ok, other=0.0).to(tl.float32)
        y = y / (1.0 + tl.exp(-y)) * u
    if ADD:
        y += added
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=row_ok)


def gemv(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    change: RowChange | None = None,
    shape: tuple[int, int] | None = None,
    block: int | None = None,
) -> Tensor:
    """Computes x @ weight.T for one row [1, K]. Returns [1, N], or [1, N / 2] if gated.

    `norm`, [K], is the weight of an RMSNorm that is applied to x first. `change` is that by a LoRA adapter. `shape` is
    the outputs and warps of a program, `block` the columns of its tile. Other arguments are those of `skinny_gemm`.
    """
    n, k = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    assert x.shape == (1, k)
    assert x.stride(1) == weight.stride(1) == 1
    assert not (gated and residual is not None)
    out = torch.empty(1, n, dtype=x.dtype, device=x.device) if out is None else out
    rows, warps = shape or ((2, 8) if norm is not None and not gated else (4, 4))
    # A program of `gated` has the same outputs of both parts; any other has outputs of one part.
    assert change is None or gated or all(n % rows == 0 for n in change.outputs[:-1]), "outputs of two parts"
    optional = weight if bias is None else bias, x if norm is None else norm, x if residual is None else residual
    sizes = {"N": n, "K": k, "ROWS": rows, "BK": block or min(BLOCK_K, triton.next_power_of_2(k))}
    options = {"NORM": norm is not None, "BIAS": bias is not None, "ADD": residual is not None, "GATED": gated}
    options |= pdl_args(x.device)
    constants = change.sizes(norm is not None) if change else NO_CHANGE
    tensors = change.tensors() if change else None
    _gemv_kernel[(triton.cdiv(n, rows),)](
        x, weight, *optional, out, tensors, eps, weight.stride(0), **sizes, **options, **constants, num_warps=warps
    )
    return out


MIN_SWIGLU_ROWS = 2048  # Smallest number of rows for `gemm_swiglu`. With fewer, cuBLAS and `silu_mul` are as fast.
#: Rows, columns and depth of a tile, pipeline stages, and tile rows of a band.
BM, BN, BK, STAGES, GROUP = 128, 128, 64, 4, 16


@triton.jit(do_not_specialize=["rows"])
def _swiglu_kernel(
    x,
    weight,
    out,
    change,  # ChangeTensors, or None
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    SMS: tl.constexpr,
    STAGES: tl.constexpr,
    RANK: tl.constexpr,  # Largest rank of the change, 0 without one. The others are constants of `ChunkChange`
    SITES: tl.constexpr,
    CAPACITY: tl.constexpr,
    WIDTH: tl.constexpr,
):
    tiles_m = tl.cdiv(rows, BM)
    tiles_n: tl.constexpr = (N + BN - 1) // BN
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, SMS, flatten=True):
        first = tile // (GROUP * tiles_n) * GROUP
        size = tl.minimum(tiles_m - first, GROUP)
        m0 = (first + tile % (GROUP * tiles_n) % size) * BM
        n0 = tile % (GROUP * tiles_n) // size * BN
        acc = tl.zeros([BM, 2 * BN], tl.float32)
        for k0 in tl.range(0, K, BK, num_stages=STAGES):
            a = x.load([m0, k0])
            w = weight.load([0, n0, k0]).reshape(2 * BN, BK)
            acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
        for rank in tl.static_range(0, RANK, RANK_MULTIPLE):
            acc = add_change_of_pair(acc, change, rank, m0, n0, rows, N, BM, BN, SITES, CAPACITY, WIDTH)
        gate, up = acc.reshape(BM, 2, BN).permute(0, 2, 1).split()
        out.store([m0, n0], (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype))


@cache
def supports_gemm_swiglu(device: torch.device) -> bool:
    """Returns whether `gemm_swiglu` is faster than cuBLAS on this device. Cached: a device does not change."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def gemm_swiglu(
    x: Tensor,
    weight: Tensor,
    *,
    change: ChunkChange | None = None,
    tile: tuple[int, int, int] = (BM, BN, BK),
    group: int = GROUP,
) -> Tensor:
    """Computes silu(x @ gate.T) * (x @ up.T), [rows, N].

    Args:
        x: [rows, K], contiguous rows. Rows of x, of weight and of N outputs are multiples of 16 bytes.
        weight: [2 * N, K], the N rows of gate, then the N rows of up; contiguous rows.
        change: that of both products by the LoRA adapter of all rows.
        tile: values of BM, BN and BK.
        group: number of tile rows in a band.
    """
    rows, k = x.shape
    n = weight.shape[0] // 2
    assert weight.shape[1] == k
    assert weight.stride(1) == x.stride(1) == 1
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    bm, bn, bk = tile
    strides = [n * weight.stride(0), weight.stride(0), 1]
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
    x_tiles, out_tiles = TensorDescriptor.from_tensor(x, [bm, bk]), TensorDescriptor.from_tensor(out, [bm, bn])
    weight_tiles = TensorDescriptor(weight, [2, n, k], strides, [2, bn, bk])
    sizes = {"N": n, "K": k, "BM": bm, "BN": bn, "BK": bk, "GROUP": group, "SMS": programs}
    sizes["STAGES"] = STAGES - 1 if change else STAGES  # the change's operands need shared memory
    tensors, constants = (change.tensors(), change.sizes()) if change else (None, NO_CHUNK_CHANGE)
    _swiglu_kernel[(programs,)](x_tiles, weight_tiles, out_tiles, tensors, rows, **sizes, **constants, num_warps=8)
    return out
