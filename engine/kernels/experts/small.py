"""The experts of a few rows: each copy reads its own expert, with no sort and no padding.

    `_gate_up_kernel`  all copies: gate and up with the activation, times the routing weight
    `_down_kernel`     for each row the sum over its copies, and the residual add

A program computes BN outputs of one row. It has one row in a tile of 16, because the tile's weights then come through
the pipelined loads of a matrix product; the time is that of the weights. Sums are in the order of the slots, so a
row's result is always the same and does not depend on the other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.experts.grouped import _block_scale, _weight_tile, fitting_stages
from engine.kernels.experts.weight import FP8, MXFP4, ExpertWeight, activate
from engine.kernels.pdl import pdl_args, wait_for_previous

_DOWN = tl.constexpr(2.0**64)  # See grouped.py.
MAX_SLOTS, MAX_EXPERTS = 8, 255  # The most experts of a token and of a rank that `_down_kernel` supports.
BM = 16  # The smallest tile of a tensor core.


@triton.jit
def _gate_up_kernel(
    x, weights, experts, w, scales, bias, out, x_row, first, local,
    N: tl.constexpr, K: tl.constexpr, TOPK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr, BIAS: tl.constexpr, GPT_OSS: tl.constexpr,
    SN: tl.constexpr, SK: tl.constexpr, SROWS: tl.constexpr, SGROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    copy = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    n_ok = n < N
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    wait_for_previous(PDL)
    expert = tl.load(experts + copy).to(tl.int64) - first
    if (expert < 0) | (expert >= local):
        return
    rows = x + (copy // TOPK).to(tl.int64) * x_row + m[:, None] * 0
    base = expert * (2 * N)
    dtype: tl.constexpr = x.dtype.element_ty
    even: tl.constexpr = K % BK == 0 and N % BN == 0
    by_step: tl.constexpr = KIND == FP8 and SGROUPS > 1
    acc = tl.zeros([BM, BN], tl.float32)
    acc_up = tl.zeros([BM, BN], tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        v = tl.load(rows + start + k[None, :], mask=(m == 0)[:, None] & (start + k < K)[None, :], other=0.0)
        g = _weight_tile(w, scales, base, n, n_ok, start, K, BN, BK, KIND, NATIVE, even, SGROUPS, dtype)
        u = _weight_tile(w, scales, base + N, n, n_ok, start, K, BN, BK, KIND, NATIVE, even, SGROUPS, dtype)
        if by_step:
            s = _block_scale(scales, expert, n, n_ok, start, SN, SK, SROWS, SGROUPS)
            acc += tl.dot(v, g, input_precision="ieee") * s[None, :]
            s = _block_scale(scales, expert, n + N, n_ok, start, SN, SK, SROWS, SGROUPS)
            acc_up += tl.dot(v, u, input_precision="ieee") * s[None, :]
        else:
            acc = tl.dot(v, g, acc, input_precision="ieee")
            acc_up = tl.dot(v, u, acc_up, input_precision="ieee")
    y = tl.sum(acc, 0)  # the other rows are zero
    z = tl.sum(acc_up, 0)
    if KIND == MXFP4 and dtype != tl.float16:
        y *= _DOWN
        z *= _DOWN
    if KIND == FP8 and SGROUPS == 1:
        y *= _block_scale(scales, expert, n, n_ok, 0, SN, SK, SROWS, SGROUPS)
        z *= _block_scale(scales, expert, n + N, n_ok, 0, SN, SK, SROWS, SGROUPS)
    if BIAS:
        y += tl.load(bias + base + n, mask=n_ok, other=0.0).to(tl.float32)
        z += tl.load(bias + base + N + n, mask=n_ok, other=0.0).to(tl.float32)
    y = activate(y, z, GPT_OSS) * tl.load(weights + copy)
    tl.store(out + copy.to(tl.int64) * N + n, y.to(out.dtype.element_ty), mask=n_ok)


@triton.jit
def _slot_expert(packed, slot, local, K: tl.constexpr):
    """Returns a slot's expert, and its number of inputs: 0 for an expert of another rank."""
    expert = (packed >> (slot * 8)) & 255
    return tl.where(expert < local, expert, 0), tl.where(expert < local, K, 0)


@triton.jit
def _down_kernel(
    x, weights, experts, w, scales, bias, residual, out, residual_row, out_row, first, local,
    N: tl.constexpr, K: tl.constexpr, TOPK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    SN: tl.constexpr, SK: tl.constexpr, SROWS: tl.constexpr, SGROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    n_ok = n < N
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    dtype: tl.constexpr = x.dtype.element_ty
    steps: tl.constexpr = (K + BK - 1) // BK
    chosen = experts + token * TOPK
    # The local experts of all slots in one number, 8 bits each, 255 for those of other ranks. A load in the loop that
    # gives the address of another would halve the depth of its pipeline.
    i = tl.arange(0, 8)
    e = tl.load(chosen + i, mask=i < TOPK, other=-1) - first
    e = tl.where((e >= 0) & (e < local), e, 255).to(tl.int64)
    packed = tl.sum(e << (8 * i).to(tl.int64), 0)
    rows = x + token * TOPK * K + k[None, :] + m[:, None] * 0
    row_ok = (m == 0)[:, None]
    # The choice of experts is older than the kernel before this one, so the first weights need not wait for it.
    expert, inputs = _slot_expert(packed, 0, local, K)
    g = _weight_tile(w, scales, expert * N, n, n_ok, 0, K, BN, BK, KIND, NATIVE, False, SGROUPS, dtype)
    wait_for_previous(PDL)
    v = tl.load(rows, mask=row_ok & (k < inputs)[None, :], other=0.0)
    acc = tl.dot(v, g, input_precision="ieee")
    if KIND == FP8:
        acc *= _block_scale(scales, expert, n, n_ok, 0, SN, SK, SROWS, SGROUPS)[None, :]
    # One loop over the inputs of all slots, so that its pipeline never runs empty.
    for step in tl.range(1, TOPK * steps, num_stages=STAGES):
        start = step % steps * BK
        expert, inputs = _slot_expert(packed, step // steps, local, K)
        v = tl.load(rows + step // steps * K + start, mask=row_ok & (start + k < inputs)[None, :], other=0.0)
        g = _weight_tile(w, scales, expert * N, n, n_ok, start, K, BN, BK, KIND, NATIVE, False, SGROUPS, dtype)
        if KIND == FP8:
            s = _block_scale(scales, expert, n, n_ok, start, SN, SK, SROWS, SGROUPS)
            acc += tl.dot(v, g, input_precision="ieee") * s[None, :]
        else:
            acc = tl.dot(v, g, acc, input_precision="ieee")
    y = tl.sum(acc, 0)
    if KIND == MXFP4 and dtype != tl.float16:
        y *= _DOWN
    if BIAS:
        for slot in tl.static_range(TOPK):
            expert = tl.load(chosen + slot).to(tl.int64) - first
            width = tl.where((expert >= 0) & (expert < local), N, 0)
            share = tl.load(weights + token * TOPK + slot)
            y += share * tl.load(bias + expert * N + n, mask=n < width, other=0.0).to(tl.float32)
    if ADD:
        y += tl.load(residual + token * residual_row + n, mask=n_ok, other=0.0).to(tl.float32)
    tl.store(out + token * out_row + n, y.to(out.dtype.element_ty), mask=n_ok)


#: BN, BK, stages and warps of a program.
FewTile = tuple[int, int, int, int]


def few_rows(
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
    native: bool = False,
    tiles: tuple[FewTile, FewTile] | None = None,
) -> Tensor:
    """Computes the experts of few rows. Arguments are those of `many_rows`, and:

    Args:
        tiles: of `_gate_up_kernel` and of `_down_kernel`. None selects them.
    """
    (tokens, hidden), top_k, device = x.shape, weights.shape[1], x.device
    local, outputs, _ = gate_up.shape
    inner = outputs // 2
    assert x.stride(1) == 1
    assert gate_up.shape[2] == hidden
    assert down.shape == (local, hidden, inner)
    act = torch.empty(tokens * top_k, inner, dtype=x.dtype, device=device)
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=device) if out is None else out
    added = x if residual is None else residual
    (bn, bk, stages, warps), down_tile = tiles or _tiles(gate_up.kind)
    bk = gate_up.largest_step(bk)
    stages = fitting_stages((BM, bn, bk, stages, warps), gate_up, True, x.element_size(), device)
    shared = {"TOPK": top_k, "BM": BM, "NATIVE": native, **pdl_args(device)}
    _gate_up_kernel[(triton.cdiv(inner, bn), tokens * top_k)](
        x, weights, experts, gate_up.numbers, gate_up.scale_tensor(weights), _or(gate_up_bias, x), act, x.stride(0),
        first, local,
        N=inner, K=hidden, BN=bn, BK=bk, STAGES=stages, KIND=gate_up.kind, BIAS=gate_up_bias is not None,
        GPT_OSS=gpt_oss, **gate_up.scale_args(), **shared, num_warps=warps,
    )  # fmt: skip
    bn, bk, stages, warps = down_tile
    bk = down.largest_step(bk)
    stages = fitting_stages((BM, bn, bk, stages, warps), down, False, x.element_size(), device)
    _down_kernel[(triton.cdiv(hidden, bn), tokens)](
        act, weights, experts, down.numbers, down.scale_tensor(weights), _or(down_bias, x), added, out,
        added.stride(0), out.stride(0), first, local,
        N=hidden, K=inner, BN=bn, BK=bk, STAGES=stages, KIND=down.kind, BIAS=down_bias is not None,
        ADD=residual is not None, **down.scale_args(), **shared, num_warps=warps,
    )  # fmt: skip
    return out


def _or(tensor: Tensor | None, placeholder: Tensor) -> Tensor:
    return placeholder if tensor is None else tensor


def _tiles(kind: int) -> tuple[FewTile, FewTile]:
    """Returns the tiles of both kernels, the fastest of benchmarks/experts/kernels.py on an H200."""
    if kind == MXFP4.value:
        return (64, 128, 4, 4), (32, 128, 4, 4)
    return (64, 128, 5 if kind == FP8.value else 4, 4), (16, 256, 6, 2)
