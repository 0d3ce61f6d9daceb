"""GEMM for 1 to 16 rows, limited by reading the weights, with a fused residual add or SiLU x mul.

A program computes all rows of BN outputs over all of K. So there are no partial sums, and a row's result does not
depend on the other rows. Tile sizes are selected so that all programs are resident at once and have enough bytes in
flight (90 to 150 KB if a program has an SM to itself); then all programs finish together. The first tile of weights is
loaded before the wait for the kernel that computes x (PDL, pdl.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.pdl import pdl_args, wait_for_previous

MAX_ROWS = 16  # Largest number of rows: the smallest tile of a tensor core.
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


def _shape(n: int, gated: bool, itemsize: int) -> tuple[int, int, int]:
    """Returns BN, BK and pipeline stages, the fastest on an H100 for the matrices of an 8B model in bf16."""
    if gated:
        return 32, 512 // itemsize, 4
    if n <= 32 * ONE_WAVE:
        return 32, 512 // itemsize, 6
    return (64, 256 // itemsize, 5) if n <= 64 * ONE_WAVE else (128, 256 // itemsize, 3)


def skinny_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    shape: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """Computes x @ weight.T for 1 to MAX_ROWS rows. Returns [R, N], or [R, N / 2] if gated.

    Args:
        x: [R, K], any row stride.
        weight: [N, K], any row stride.
        bias: [N].
        residual: [R, N], added to the result. Not with `gated`.
        gated: the first half of weight's rows is gate, the second is up; the result is silu(gate) * up.
        out: result. None allocates it; may be residual.
        shape: BN, BK and pipeline stages. None selects them.
    """
    rows, k = x.shape
    n = weight.shape[0] // (2 if gated else 1)
    assert 1 <= rows <= MAX_ROWS
    assert weight.shape[1] == k
    assert x.stride(1) == 1
    assert weight.stride(1) == 1
    assert not (gated and residual is not None)
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device) if out is None else out
    addend = x if residual is None else residual
    bn, bk, stages = shape or _shape(n, gated, x.element_size())
    _skinny_kernel[(triton.cdiv(n, bn),)](
        x,
        weight,
        weight if bias is None else bias,
        addend,
        out,
        rows,
        x.stride(0),
        weight.stride(0),
        addend.stride(0),
        out.stride(0),
        N=n,
        K=k,
        BM=MAX_ROWS,
        BN=bn,
        BK=bk,
        STAGES=stages,
        BIAS=bias is not None,
        ADD=residual is not None,
        GATED=gated,
        num_warps=4,
        **pdl_args(x.device),
    )
    return out
