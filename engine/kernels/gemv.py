"""Matrix-vector product with RMSNorm fused before it, and residual add or SiLU x mul fused after it.

A program reads ROWS whole rows of the weight in tiles of BLOCK_K. RMSNorm needs no extra pass: the program reads all of
x, so it also sums x^2 and scales the result, W (x * rstd * g) = rstd * (W (x * g)). There are no atomics, so the order
of summation, and with it the result, is always the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.pdl import pdl_args, wait_for_previous
from engine.kernels.skinny_gemm import load_tile

BLOCK_K = 2048  # Largest number of columns in a tile of the weight.


@triton.jit
def _gemv_kernel(
    x,
    weight,
    bias,
    norm,
    residual,
    out,
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
    # Weights are constant, so their first tile is loaded before the kernel that computes x has finished.
    wait_for_previous(PDL)
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
    if NORM:
        rstd = tl.rsqrt(tl.sum(square, 0) / K + eps)
        y *= rstd
    if BIAS:
        y += tl.load(bias + rows, mask=row_ok, other=0.0).to(tl.float32)
    if GATED:
        u = tl.sum(acc_up, 1)
        if NORM:
            u *= rstd
        if BIAS:
            u += tl.load(bias + N + rows, mask=row_ok, other=0.0).to(tl.float32)
        y = y / (1.0 + tl.exp(-y)) * u
    if ADD:
        y += added
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=row_ok)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes x @ weight.T for one row. Returns [1, N], or [1, N / 2] if gated.

    Args:
        x: [1, K].
        weight: [N, K], any row stride.
        bias: [N].
        norm: [K], the weight of an RMSNorm that is applied to x first.
        residual: [1, N], added to the result. Not with `gated`.
        gated: the first half of weight's rows is gate, the second is up; the result is silu(gate) * up.
        out: result. None allocates it; may be residual.
    """
    n, k = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    assert x.shape == (1, k)
    assert x.stride(1) == 1
    assert weight.stride(1) == 1
    assert not (gated and residual is not None)
    out = torch.empty(1, n, dtype=x.dtype, device=x.device) if out is None else out
    rows, warps = (2, 8) if norm is not None and not gated else (4, 4)
    _gemv_kernel[(triton.cdiv(n, rows),)](
        x,
        weight,
        weight if bias is None else bias,
        x if norm is None else norm,
        x if residual is None else residual,
        out,
        eps,
        weight.stride(0),
        N=n,
        K=k,
        ROWS=rows,
        BK=min(BLOCK_K, triton.next_power_of_2(k)),
        NORM=norm is not None,
        BIAS=bias is not None,
        ADD=residual is not None,
        GATED=gated,
        num_warps=warps,
        **pdl_args(x.device),
    )
    return out
