"""Matrix times a few rows (2 to 16), bound by reading the matrix: residual add or SiLU x mul in its end.

A program computes all rows of BN outputs over the whole of K, so no partial sums meet and the result of a row depends
neither on its neighbours nor on what runs beside. The tile is chosen so that all programs are resident at once and
hold enough bytes in flight together (a program alone on an SM 90 to 150 KB); memory then serves them alike and they end
together, whatever their number. The first tile of weights is loaded before the wait for the kernel that makes x (see
pdl.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.pdl import pdl_flags, supports_pdl

MAX_ROWS = 16  # the least that a tensor core multiplies at once
ONE_WAVE = 132  # programs of more than half of an SM's shared memory that run at once


@triton.jit
def _tile(src, ok, k, start, K: tl.constexpr, EVEN: tl.constexpr):
    """[BK, BN] of the matrix, transposed, or [16, BK] of the rows."""
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
    w = _tile(src, n_ok, k[:, None], 0, K, even)
    if GATED:
        u = _tile(up_src, n_ok, k[:, None], 0, K, even)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x_src = x + m * x_row + k[None, :]
    v = _tile(x_src, m_ok, k[None, :], 0, K, False)
    acc = tl.dot(v, w, input_precision="ieee")
    acc_up = tl.zeros([BM, BN], tl.float32)
    if GATED:
        acc_up = tl.dot(v, u, input_precision="ieee")
    for start in tl.range(BK, K, BK, num_stages=STAGES):
        w = _tile(src, n_ok, k[:, None], start, K, even)
        v = _tile(x_src, m_ok, k[None, :], start, K, False)
        acc = tl.dot(v, w, acc, input_precision="ieee")
        if GATED:
            u = _tile(up_src, n_ok, k[:, None], start, K, even)
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
    """BN, BK and loads in flight: the fastest found on an H100 for the matrices of an 8B model in bf16."""
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
    """x @ weight.T for 1 to MAX_ROWS rows: x [R, K], weight [N, K] (row strides free), bias [N]; returns [R, N], or
    [R, N / 2] when gated.

    gated: rows 0..N/2 of weight are a gate, the rest its partner: silu(gate) * up. residual: [R, N], added to the
    result; out may be residual. shape: outputs and depth of a tile, and tiles in flight.
    """
    rows, k = x.shape
    n = weight.shape[0] // (2 if gated else 1)
    assert 1 <= rows <= MAX_ROWS
    assert weight.shape[1] == k
    assert x.stride(1) == 1
    assert weight.stride(1) == 1
    assert not (gated and residual is not None)
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device) if out is None else out
    added = x if residual is None else residual
    bn, bk, stages = shape or _shape(n, gated, x.element_size())
    pdl = supports_pdl(x.device)
    _skinny_kernel[(triton.cdiv(n, bn),)](
        x,
        weight,
        weight if bias is None else bias,
        added,
        out,
        rows,
        x.stride(0),
        weight.stride(0),
        added.stride(0),
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
        PDL=pdl,
        num_warps=4,
        **pdl_flags(pdl),
    )
    return out
