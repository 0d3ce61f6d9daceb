"""The experts of a few rows, as products with vectors: each copy reads its own expert, with no sort and no padding.

    router logits -> `_gate_up_kernel`: all copies, gate and up with the activation
                  -> `_down_kernel`: for each row the sum over its copies, and the residual add

Both kernels choose the experts from the router's logits themselves. So the logits are the only thing between the
residual stream and the first weights, and `_down_kernel` loads weights while the kernel before it still runs (PDL).
Sums are in the order of the slots, so a row's result is always the same and does not depend on the other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.experts.routing import RoutingRule, select_experts
from engine.kernels.experts.weight import FP8, MXFP4, ExpertWeight, activate, decode_e4m3, high, low, unpack_pairs
from engine.kernels.pdl import pdl_args, wait_for_previous

#: Inputs and partial sums of mxfp4 products are multiplied by a power of two, because their numbers are 2^126 times too
#: small and would be subnormal.
_UP, _DOWN = tl.constexpr(2.0**64), tl.constexpr(2.0**62)


@triton.jit
def _load_row(x, norm, start, K: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr):
    """Loads BK inputs as fp32 and, with NORM, the weight of the norm times the inputs and the sum of squares."""
    k = start + tl.arange(0, BK)
    v = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    square = v * v
    if NORM:
        v *= tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
    return v, square


@triton.jit
def _split8(x, G: tl.constexpr):
    """Splits fp32 [G * 32] into eight [G, 4]: number p of each mxfp4 word."""
    even, odd = tl.split(x.reshape(G, 4, 2, 2, 2))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x2, x6 = tl.split(x26)
    x1, x5 = tl.split(x15)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _scales(
    scales, expert, n, n_ok, k, N: tl.constexpr, SN: tl.constexpr, SK: tl.constexpr, SROWS: tl.constexpr,
    SGROUPS: tl.constexpr,
):  # fmt: skip
    """Loads the fp32 scales of rows n: [R, 1] if each row has one, else [R, BK]."""
    row = scales + (expert * SROWS + n // SN) * SGROUPS
    if SGROUPS == 1:
        s = tl.load(row, mask=n_ok, other=0.0)[:, None]
    else:
        ok = n_ok[:, None] & (k // SK < SGROUPS)[None, :]
        s = tl.load(row[:, None] + (k // SK)[None, :], mask=ok, other=0.0)
    return s


@triton.jit
def _load_tile(
    w, scales, expert, n, n_ok, start, N: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr,
    SN: tl.constexpr, SK: tl.constexpr, SROWS: tl.constexpr, SGROUPS: tl.constexpr,
):  # fmt: skip
    """Loads rows n of an expert, numbers and scales as they are in memory.

    Returns [R, BK] with scales [R, 1] or [R, BK]; mxfp4: words [R, BK / 32, 4] with scales [R, BK / 32].
    """
    row = expert * N + n
    if KIND == MXFP4:
        g = start // 32 + tl.arange(0, BK // 32)
        i = tl.arange(0, 4)
        g_ok = n_ok[:, None] & (g < K // 32)[None, :]
        src = w + (row * (K // 8))[:, None, None] + (g * 4)[None, :, None] + i[None, None, :]
        tile = tl.load(src, mask=g_ok[:, :, None], other=0)
        s = tl.load(scales + (row * SGROUPS)[:, None] + g[None, :], mask=g_ok, other=0)
    else:
        k = start + tl.arange(0, BK)
        ok = n_ok[:, None] & (k < K)[None, :]
        tile = tl.load(w + (row * K)[:, None] + k[None, :], mask=ok, other=0)
        s = 1.0
        if KIND == FP8:
            s = _scales(scales, expert, n, n_ok, k, N, SN, SK, SROWS, SGROUPS)
    return tile, s


@triton.jit
def _multiply(acc, tile, s, v, BK: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """Adds the products of a tile with the inputs v [BK] to acc: [R, BK], or [R, BK / 32] for mxfp4."""
    if KIND == MXFP4:
        x0, x1, x2, x3, x4, x5, x6, x7 = _split8(v * _UP, BK // 32)
        p0, p1, p2, p3 = unpack_pairs(tile)
        part = low(p0) * x0[None, :, :] + high(p0) * x1[None, :, :]
        part += low(p1) * x2[None, :, :] + high(p1) * x3[None, :, :]
        part += low(p2) * x4[None, :, :] + high(p2) * x5[None, :, :]
        part += low(p3) * x6[None, :, :] + high(p3) * x7[None, :, :]
        acc += tl.sum(part, 2) * (s.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    elif KIND == FP8:
        acc += decode_e4m3(tile, NATIVE) * s * v[None, :]
    else:
        acc += tile.to(tl.float32) * v[None, :]
    return acc


@triton.jit
def _gate_up_kernel(
    x, norm, logits, correction, w, scales, bias, out, x_row, eps, first, local,
    I: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, GPT_OSS: tl.constexpr,
    SN: tl.constexpr, SK: tl.constexpr, SROWS: tl.constexpr, SGROUPS: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, TOPK: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, CORRECTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    copy = tl.program_id(1)
    token = copy // TOPK
    n = tl.program_id(0) * R + tl.arange(0, R)
    wait_for_previous(PDL)
    rank, _ = select_experts(
        logits + token * E, correction, E, EP, TOPK, SIGMOID, NORMALIZE, SCALE, GROUPS, TOP_GROUPS, CORRECTED
    )
    expert = tl.sum(tl.where(rank == copy % TOPK, tl.arange(0, EP), 0), 0).to(tl.int64) - first
    n_ok = n < tl.where((expert >= 0) & (expert < local), I, 0)
    row: tl.constexpr = BK // 32 if KIND == MXFP4 else BK
    gate = tl.zeros([R, row], tl.float32)
    up = tl.zeros([R, row], tl.float32)
    squares = tl.zeros([BK], tl.float32)
    for start in tl.static_range(0, K, BK):
        g, gs = _load_tile(w, scales, expert, n, n_ok, start, 2 * I, K, BK, KIND, SN, SK, SROWS, SGROUPS)
        u, us = _load_tile(w, scales, expert, n + I, n_ok, start, 2 * I, K, BK, KIND, SN, SK, SROWS, SGROUPS)
        v, square = _load_row(x + token.to(tl.int64) * x_row, norm, start, K, BK, NORM)
        squares += square
        gate = _multiply(gate, g, gs, v, BK, KIND, NATIVE)
        up = _multiply(up, u, us, v, BK, KIND, NATIVE)
    y = tl.sum(gate, 1)
    z = tl.sum(up, 1)
    if KIND == MXFP4:
        y *= _DOWN
        z *= _DOWN
    if NORM:
        rstd = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y *= rstd
        z *= rstd
    if BIAS:
        y += tl.load(bias + expert * (2 * I) + n, mask=n_ok, other=0.0).to(tl.float32)
        z += tl.load(bias + expert * (2 * I) + I + n, mask=n_ok, other=0.0).to(tl.float32)
    tl.store(out + copy.to(tl.int64) * I + n, activate(y, z, GPT_OSS).to(out.dtype.element_ty), mask=n_ok)


@triton.jit
def _down_kernel(
    x, logits, correction, w, scales, bias, residual, out, residual_row, out_row, first, local,
    N: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr,
    SN: tl.constexpr, SK: tl.constexpr, SROWS: tl.constexpr, SGROUPS: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, TOPK: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, CORRECTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, EP)
    n = tl.program_id(0) * R + tl.arange(0, R)
    # The logits are older than the kernel before this one.
    rank, weight = select_experts(
        logits + token * E, correction, E, EP, TOPK, SIGMOID, NORMALIZE, SCALE, GROUPS, TOP_GROUPS, CORRECTED
    )
    expert = tl.sum(tl.where(rank == 0, i, 0), 0).to(tl.int64) - first
    n_ok = n < tl.where((expert >= 0) & (expert < local), N, 0)
    tile, s = _load_tile(w, scales, expert, n, n_ok, 0, N, K, BK, KIND, SN, SK, SROWS, SGROUPS)
    wait_for_previous(PDL)
    row: tl.constexpr = BK // 32 if KIND == MXFP4 else BK
    acc = tl.zeros([R, row], tl.float32)
    added = tl.zeros([R], tl.float32)
    for slot in tl.static_range(TOPK):
        if slot > 0:
            expert = tl.sum(tl.where(rank == slot, i, 0), 0).to(tl.int64) - first
            n_ok = n < tl.where((expert >= 0) & (expert < local), N, 0)
        share = tl.sum(tl.where(rank == slot, weight, 0.0), 0)
        inputs = tl.where((expert >= 0) & (expert < local), K, 0)
        for start in tl.static_range(0, K, BK):
            if slot + start > 0:
                tile, s = _load_tile(w, scales, expert, n, n_ok, start, N, K, BK, KIND, SN, SK, SROWS, SGROUPS)
            k = start + tl.arange(0, BK)
            v = tl.load(x + (token * TOPK + slot) * K + k, mask=k < inputs, other=0.0).to(tl.float32)
            acc = _multiply(acc, tile, s, v * share, BK, KIND, NATIVE)
        if BIAS:
            added += share * tl.load(bias + expert * N + n, mask=n_ok, other=0.0).to(tl.float32)
    y = tl.sum(acc, 1)
    if KIND == MXFP4:
        y *= _DOWN
    y += added
    if ADD:
        y += tl.load(residual + token * residual_row + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + token * out_row + n, y.to(out.dtype.element_ty), mask=n < N)


def _row_block(inputs: int, largest: int) -> int:
    """Returns BK, the largest power of two up to `largest` whose tiles exceed the inputs by at most 7%."""
    block = min(largest, int(triton.next_power_of_2(inputs)))
    while block > 128 and -(-inputs // block) * block > 1.07 * inputs:
        block //= 2
    return block


def few_rows(
    x: Tensor,
    logits: Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    rule: RoutingRule,
    *,
    gpt_oss: bool = False,
    correction: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    native: bool = False,
    tiles: tuple[tuple[int, int, int], tuple[int, int, int]] | None = None,
) -> Tensor:
    """Computes the experts of few rows. Arguments are those of `mixture` in layer.py, and:

    Args:
        native: the device converts e4m3.
        tiles: rows, inputs and warps of a program of `_gate_up_kernel` and of `_down_kernel`. None selects them.
    """
    tokens, hidden = x.shape
    local, outputs, _ = gate_up.shape
    inner = outputs // 2
    assert x.stride(1) == 1
    assert gate_up.shape[2] == hidden
    assert down.shape == (local, hidden, inner)
    (r1, k1, warps1), (r2, k2, warps2) = tiles or _tiles(gate_up.kind, hidden, inner)
    act = torch.empty(tokens * rule.top_k, inner, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device) if out is None else out
    routing = rule.constants(logits.shape[1], correction is not None) | pdl_args(x.device)
    corrected, added = logits if correction is None else correction, x if residual is None else residual
    _gate_up_kernel[(triton.cdiv(inner, r1), tokens * rule.top_k)](
        x, x if norm is None else norm, logits, corrected, gate_up.numbers, _or(gate_up.scales, logits),
        _or(gate_up_bias, x), act, x.stride(0), eps, rule.first, local,
        I=inner, K=hidden, R=r1, BK=k1, KIND=gate_up.kind, NATIVE=native, NORM=norm is not None,
        BIAS=gate_up_bias is not None, GPT_OSS=gpt_oss, **gate_up.scale_args(), **routing, num_warps=warps1,
    )  # fmt: skip
    _down_kernel[(triton.cdiv(hidden, r2), tokens)](
        act, logits, corrected, down.numbers, _or(down.scales, logits), _or(down_bias, x), added, out,
        added.stride(0), out.stride(0), rule.first, local,
        N=hidden, K=inner, R=r2, BK=k2, KIND=down.kind, NATIVE=native, BIAS=down_bias is not None,
        ADD=residual is not None, **down.scale_args(), **routing, num_warps=warps2,
    )  # fmt: skip
    return out


def _or(tensor: Tensor | None, placeholder: Tensor) -> Tensor:
    return placeholder if tensor is None else tensor


def _tiles(kind: int, hidden: int, inner: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Returns rows, inputs and warps of a program of both kernels."""
    if kind == MXFP4.value:
        return (8, _row_block(hidden, 1024), 4), (8, _row_block(inner, 1024), 4)
    if kind == FP8.value:
        return (4, _row_block(hidden, 2048), 4), (4, _row_block(inner, 2048), 4)
    return (4, _row_block(hidden, 2048), 4), (4, _row_block(inner, 1024), 4)
