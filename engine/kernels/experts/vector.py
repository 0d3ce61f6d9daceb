"""MXFP4 experts of a few rows, as products with vectors: numbers are multiplied in fp32 where they are unpacked.

The kernels have the structure of small.py. A thread has 32 inputs of a row, which share a scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.experts.weight import ExpertWeight, activate, unpack_floats
from engine.kernels.pdl import pdl_args, wait_for_previous

#: Inputs and sums are multiplied by powers of two, because the numbers are 2^126 times too small: subnormal products
#: would lose bits.
_UP, _DOWN = tl.constexpr(2.0**64), tl.constexpr(2.0**62)


@triton.jit
def _load(w, scales, row, ok, start, K: tl.constexpr, BK: tl.constexpr, SGROUPS: tl.constexpr):
    """Loads words [R, BK / 8] and scales [R, BK / 32] of rows."""
    i = start // 8 + tl.arange(0, BK // 8)
    g = start // 32 + tl.arange(0, BK // 32)
    words = tl.load(w + (row * (K // 8))[:, None] + i[None, :], mask=ok[:, None] & (i < K // 8)[None, :], other=0)
    scale = tl.load(scales + (row * SGROUPS)[:, None] + g[None, :], mask=ok[:, None] & (g < K // 32)[None, :], other=0)
    return words, (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _product(words, scale, v, R: tl.constexpr, BK: tl.constexpr):
    """Returns the sums of the products with inputs v [BK], for each row and group: [R, BK / 32]."""
    products = unpack_floats(words, R, BK) * (v * _UP)[None, :]
    return tl.sum(products.reshape(R, BK // 32, 32), 2) * scale


@triton.jit
def _vector_gate_up_kernel(
    x, weights, experts, w, scales, bias, out, x_row, first, local,
    N: tl.constexpr, K: tl.constexpr, TOPK: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr,
    GPT_OSS: tl.constexpr, SGROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    copy = tl.program_id(1)
    n = tl.program_id(0) * R + tl.arange(0, R)
    wait_for_previous(PDL)
    expert = tl.load(experts + copy).to(tl.int64) - first
    if (expert < 0) | (expert >= local):
        return
    n_ok = n < N
    row = expert * (2 * N) + n
    gate = tl.zeros([R, BK // 32], tl.float32)
    up = tl.zeros([R, BK // 32], tl.float32)
    for start in tl.static_range(0, K, BK):
        g, gs = _load(w, scales, row, n_ok, start, K, BK, SGROUPS)
        u, us = _load(w, scales, row + N, n_ok, start, K, BK, SGROUPS)
        k = start + tl.arange(0, BK)
        v = tl.load(x + (copy // TOPK).to(tl.int64) * x_row + k, mask=k < K, other=0.0).to(tl.float32)
        gate += _product(g, gs, v, R, BK)
        up += _product(u, us, v, R, BK)
    y = tl.sum(gate, 1) * _DOWN
    z = tl.sum(up, 1) * _DOWN
    if BIAS:
        y += tl.load(bias + row, mask=n_ok, other=0.0).to(tl.float32)
        z += tl.load(bias + row + N, mask=n_ok, other=0.0).to(tl.float32)
    y = activate(y, z, GPT_OSS) * tl.load(weights + copy)
    tl.store(out + copy.to(tl.int64) * N + n, y.to(out.dtype.element_ty), mask=n_ok)


@triton.jit
def _vector_down_kernel(
    x, weights, experts, w, scales, bias, residual, out, residual_row, out_row, first, local,
    N: tl.constexpr, K: tl.constexpr, TOPK: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr,
    ADD: tl.constexpr, SGROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * R + tl.arange(0, R)
    acc = tl.zeros([R, BK // 32], tl.float32)
    added = tl.zeros([R], tl.float32)
    for slot in tl.static_range(TOPK):
        # The choice of experts is older than the kernel before this one, so the first loads need not wait for it.
        expert = tl.load(experts + token * TOPK + slot).to(tl.int64) - first
        n_ok = n < tl.where((expert >= 0) & (expert < local), N, 0)
        inputs = tl.where((expert >= 0) & (expert < local), K, 0)
        row = expert * N + n
        for start in tl.static_range(0, K, BK):
            words, scale = _load(w, scales, row, n_ok, start, K, BK, SGROUPS)
            if slot + start == 0:
                wait_for_previous(PDL)
            k = start + tl.arange(0, BK)
            v = tl.load(x + (token * TOPK + slot) * K + k, mask=k < inputs, other=0.0).to(tl.float32)
            acc += _product(words, scale, v, R, BK)
        if BIAS:
            share = tl.load(weights + token * TOPK + slot)
            added += share * tl.load(bias + row, mask=n_ok, other=0.0).to(tl.float32)
    y = tl.sum(acc, 1) * _DOWN + added
    if ADD:
        y += tl.load(residual + token * residual_row + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + token * out_row + n, y.to(out.dtype.element_ty), mask=n < N)


#: Rows, inputs and warps of a program.
VectorTile = tuple[int, int, int]
TILES: tuple[VectorTile, VectorTile] = (8, 1024, 4), (8, 1024, 4)  #: Of both kernels, the fastest on an H200.


def vector_rows(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    *,
    gpt_oss: bool = False,
    first: int = 0,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    tiles: tuple[VectorTile, VectorTile] | None = None,
) -> Tensor:
    """Computes MXFP4 experts of few rows. Arguments are those of `few_rows`."""
    (tokens, hidden), top_k, device = x.shape, weights.shape[1], x.device
    local, outputs, _ = gate_up.shape
    inner = outputs // 2
    assert gate_up.scales is not None
    assert down.scales is not None
    act = torch.empty(tokens * top_k, inner, dtype=x.dtype, device=device)
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=device) if out is None else out
    added = x if residual is None else residual
    (r1, k1, warps1), (r2, k2, warps2) = tiles or TILES
    _vector_gate_up_kernel[(triton.cdiv(inner, r1), tokens * top_k)](
        x, weights, experts, gate_up.numbers, gate_up.scales, x if gate_up_bias is None else gate_up_bias, act,
        x.stride(0), first, local,
        N=inner, K=hidden, TOPK=top_k, R=r1, BK=k1, BIAS=gate_up_bias is not None, GPT_OSS=gpt_oss,
        SGROUPS=gate_up.scales.shape[2], num_warps=warps1, **pdl_args(device),
    )  # fmt: skip
    _vector_down_kernel[(triton.cdiv(hidden, r2), tokens)](
        act, weights, experts, down.numbers, down.scales, x if down_bias is None else down_bias, added, out,
        added.stride(0), out.stride(0), first, local,
        N=hidden, K=inner, TOPK=top_k, R=r2, BK=k2, BIAS=down_bias is not None, ADD=residual is not None,
        SGROUPS=down.scales.shape[2], num_warps=warps2, **pdl_args(device),
    )  # fmt: skip
    return out
