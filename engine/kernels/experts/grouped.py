"""The experts of many rows: one product for all blocks of copies, in which a program multiplies one tile of one expert.

    first product   rows of x (gathered) x gate and up -> activation, in the order of `SortedCopies`
    second product  x down, times the routing weight   -> one row per copy, at the copy's own place
    sum             over the copies of each token in the order of slots, plus the residual

No atomics: a result does not depend on the order of programs. mxfp4 numbers become bfloat16 in registers, with their
scales applied, so the product is that of bfloat16 weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import card
from engine.kernels.experts.routing import SortedCopies
from engine.kernels.experts.weight import (
    FP8,
    INT4,
    MXFP4,
    PLAIN,
    ExpertWeight,
    activate,
    decode_e4m3,
    unpack_floats,
    unpack_nibbles,
    unpack_pairs,
)
from engine.kernels.pdl import pdl_args, wait_for_previous

#: mxfp4 weights are 2^64 times too small in bfloat16 and float32, so that all scales fit their range.
_DOWN = tl.constexpr(2.0**64)


@triton.jit
def _half(pair, shift: tl.constexpr):
    """Returns one bfloat16 of an int32 pair."""
    return (pair >> shift).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _scaled(pair, factors):
    """Multiplies both bfloat16 of int32 pairs by those of factors. Before sm_90 there is only the fused form."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }",
        "=r,r,r",
        [pair, factors],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _join_pairs(p0, p1, p2, p3, BN: tl.constexpr, BK: tl.constexpr):
    """Joins four int32 pairs [BN, BK / 8] to bfloat16 [BN, BK]. A thread keeps its registers."""
    lows = tl.join(tl.join(_half(p0, 0), _half(p2, 0)), tl.join(_half(p1, 0), _half(p3, 0)))
    highs = tl.join(tl.join(_half(p0, 16), _half(p2, 16)), tl.join(_half(p1, 16), _half(p3, 16)))
    return tl.join(lows, highs).reshape(BN, BK)


@triton.jit
def _mxfp4_tile(words, scale, BN: tl.constexpr, BK: tl.constexpr, NATIVE: tl.constexpr):
    """Unpacks words [BN, BK / 8] with their scales, int32 [BN, BK / 128]: to bfloat16 [BN, BK], else (slower) fp32."""
    # A scale 2^(s - 127), times 2^126 for the numbers, times 2^-64 for the range.
    shifts = tl.arange(0, 4) * 8
    s = ((scale[:, :, None] >> shifts[None, None, :]) & 0xFF) + 62
    s = s.reshape(BN, BK // 32)[:, :, None].broadcast_to(BN, BK // 32, 4).reshape(BN, BK // 8)
    if NATIVE:
        p0, p1, p2, p3 = unpack_pairs(words)
        f = (s << 7) | (s << 23)
        tile = _join_pairs(_scaled(p0, f), _scaled(p1, f), _scaled(p2, f), _scaled(p3, f), BN, BK)
    else:
        f = (s << 23).to(tl.float32, bitcast=True)[:, :, None].broadcast_to(BN, BK // 8, 8).reshape(BN, BK)
        tile = unpack_floats(words, BN, BK) * f
    return tile


@triton.jit
def _spread(groups, BN: tl.constexpr, BK: tl.constexpr):
    """Repeats numbers [BN, BK / 32] of 32 inputs for each input: [BN, BK]."""
    return groups[:, :, None].broadcast_to(BN, BK // 32, 32).reshape(BN, BK)


@triton.jit
def _weight_tile(
    w, scales, zeros, base, n, n_ok, start, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr,
    NATIVE: tl.constexpr, EVEN: tl.constexpr, SK: tl.constexpr, SGROUPS: tl.constexpr, ZEROS: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Loads a tile of weights [BK, BN] in the inputs' dtype. Scales of fp8 blocks are left to the caller."""
    if KIND == MXFP4:
        i = start // 8 + tl.arange(0, BK // 8)
        j = start // 128 + tl.arange(0, BK // 128)
        words = tl.load(
            w + (base + n)[:, None] * (K // 8) + i[None, :], mask=n_ok[:, None] & (i < K // 8)[None, :], other=0
        )
        scale = tl.load(
            scales + (base + n)[:, None] * (SGROUPS // 4) + j[None, :],
            mask=n_ok[:, None] & (j < SGROUPS // 4)[None, :],
            other=0,
        )
        tile = _mxfp4_tile(words, scale, BN, BK, dtype == tl.bfloat16 and NATIVE)
        if dtype == tl.float16:  # its range has no room for numbers that are 2^64 times too small
            tile *= _DOWN
        tile = tl.trans(tile.to(dtype))
    elif KIND == INT4:
        i = start // 8 + tl.arange(0, BK // 8)
        words = tl.load(
            w + (base + n)[:, None] * (K // 8) + i[None, :], mask=n_ok[:, None] & (i < K // 8)[None, :], other=0
        )
        j = start + tl.arange(0, BK // 32) * 32
        place = (base + n)[:, None] * SGROUPS + (j // SK)[None, :]
        s_ok = n_ok[:, None] & (j < K)[None, :]
        tile = unpack_nibbles(words, BN, BK)
        if ZEROS:
            tile += _spread(8.0 - tl.load(zeros + place, mask=s_ok, other=8).to(tl.float32), BN, BK)
        tile *= _spread(tl.load(scales + place, mask=s_ok, other=0.0).to(tl.float32), BN, BK)
        tile = tl.trans(tile.to(dtype))
    else:
        k = start + tl.arange(0, BK)
        src = w + (base + n)[None, :] * K + k[:, None]
        if EVEN:
            tile = tl.load(src)
        else:
            tile = tl.load(src, mask=n_ok[None, :] & (k < K)[:, None], other=0)
        if KIND == FP8:
            tile = decode_e4m3(tile, NATIVE).to(dtype)
    return tile


@triton.jit
def _block_scale(
    scales, expert, n, n_ok, start, SN: tl.constexpr, SK: tl.constexpr, SROWS: tl.constexpr, SGROUPS: tl.constexpr
):
    """Loads the fp32 scales of outputs n at input `start`."""
    return tl.load(scales + (expert * SROWS + n // SN) * SGROUPS + start // SK, mask=n_ok, other=0.0)


@triton.jit
def _grouped_kernel(
    x, w, scales, zeros, bias, weights, order, blocks, out, x_row,
    N: tl.constexpr, K: tl.constexpr, TOPK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr, FIRST: tl.constexpr, BIAS: tl.constexpr,
    GPT_OSS: tl.constexpr, SN: tl.constexpr, SK: tl.constexpr, SROWS: tl.constexpr, SGROUPS: tl.constexpr,
    ZEROS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of a product. FIRST: gate and up with the activation (N is the size of each), else down.

    The output of FIRST is in sorted order, that of down in the order of copies.
    """
    block = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    n_ok = n < N
    m = tl.arange(0, BM)
    wait_for_previous(PDL)
    if block >= tl.load(blocks):
        return
    expert = tl.load(blocks + 1 + 3 * block).to(tl.int64)
    begin = tl.load(blocks + 2 + 3 * block)
    m_ok = m < tl.load(blocks + 3 + 3 * block)
    copy = tl.load(order + begin + m, mask=m_ok, other=0)
    if FIRST:
        rows = x + (copy // TOPK).to(tl.int64)[:, None] * x_row
        base = expert * (2 * N)
    else:
        rows = x + (begin + m).to(tl.int64)[:, None] * x_row
        base = expert * N
    dtype: tl.constexpr = x.dtype.element_ty
    even: tl.constexpr = K % BK == 0 and N % BN == 0
    by_step: tl.constexpr = KIND == FP8 and SGROUPS > 1
    acc = tl.zeros([BM, BN], tl.float32)
    acc_up = tl.zeros([BM, BN], tl.float32)
    k = tl.arange(0, BK)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        if K % BK == 0:
            v = tl.load(rows + start + k[None, :], mask=m_ok[:, None], other=0.0)
        else:
            v = tl.load(rows + start + k[None, :], mask=m_ok[:, None] & (start + k < K)[None, :], other=0.0)
        g = _weight_tile(
            w, scales, zeros, base, n, n_ok, start, K, BN, BK, KIND, NATIVE, even, SK, SGROUPS, ZEROS, dtype
        )
        if by_step:
            s = _block_scale(scales, expert, n, n_ok, start, SN, SK, SROWS, SGROUPS)
            acc += tl.dot(v, g, input_precision="ieee") * s[None, :]
        else:
            acc = tl.dot(v, g, acc, input_precision="ieee")
        if FIRST:
            u = _weight_tile(
                w, scales, zeros, base + N, n, n_ok, start, K, BN, BK, KIND, NATIVE, even, SK, SGROUPS, ZEROS, dtype
            )
            if by_step:
                s = _block_scale(scales, expert, n + N, n_ok, start, SN, SK, SROWS, SGROUPS)
                acc_up += tl.dot(v, u, input_precision="ieee") * s[None, :]
            else:
                acc_up = tl.dot(v, u, acc_up, input_precision="ieee")
    if KIND == MXFP4 and dtype != tl.float16:
        acc *= _DOWN
        acc_up *= _DOWN
    if KIND == FP8 and SGROUPS == 1:
        acc *= _block_scale(scales, expert, n, n_ok, 0, SN, SK, SROWS, SGROUPS)[None, :]
        if FIRST:
            acc_up *= _block_scale(scales, expert, n + N, n_ok, 0, SN, SK, SROWS, SGROUPS)[None, :]
    if BIAS:
        acc += tl.load(bias + base + n, mask=n_ok, other=0.0).to(tl.float32)[None, :]
        if FIRST:
            acc_up += tl.load(bias + base + N + n, mask=n_ok, other=0.0).to(tl.float32)[None, :]
    mask = m_ok[:, None] & n_ok[None, :]
    if FIRST:
        y = activate(acc, acc_up, GPT_OSS)
        tl.store(out + (begin + m).to(tl.int64)[:, None] * N + n[None, :], y.to(out.dtype.element_ty), mask=mask)
    else:
        y = acc * tl.load(weights + copy, mask=m_ok, other=0.0)[:, None]
        tl.store(out + copy.to(tl.int64)[:, None] * N + n[None, :], y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum_kernel(
    parts, experts, residual, out, residual_row, out_row, first, local,
    N: tl.constexpr, TOPK: tl.constexpr, BN: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)  # the first dimension of a grid has no limit of 65,535
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = n < N
    wait_for_previous(PDL)
    y = tl.zeros([BN], tl.float32)
    for slot in tl.static_range(TOPK):
        e = tl.load(experts + token * TOPK + slot) - first
        width = tl.where((e >= 0) & (e < local), N, 0)
        y += tl.load(parts + (token * TOPK + slot) * N + n, mask=n < width, other=0.0).to(tl.float32)
    if ADD:
        y += tl.load(residual + token * residual_row + n, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + token * out_row + n, y.to(out.dtype.element_ty), mask=ok)


#: BM, BN, BK, stages and warps of a program.
Tile = tuple[int, int, int, int, int]


def block_rows(copies: int, experts: int, kind: int) -> int:
    """Returns BM: about the mean number of copies of an expert, as far as tiles allow."""
    mean = copies / experts
    if kind in {MXFP4.value, INT4.value}:
        return 16 if mean <= 16 else 32 if mean <= 48 else 64
    return 16 if mean <= 16 else 32 if mean <= 32 else 64 if mean <= 96 else 128


def _tile(kind: int, block_m: int, first: bool, itemsize: int) -> Tile:
    """Returns the tile of a product for blocks of `block_m` copies."""
    if itemsize == 4:
        return block_m, 32, 128 if kind == MXFP4.value else 32, 2, 4
    if kind in {MXFP4.value, INT4.value}:
        return block_m, 64, 128, 3, 4
    if block_m <= 32:
        return block_m, 64, 128, 4, 4
    if block_m == 64:
        return block_m, 64 if first else 128, 64, 4, 4
    return block_m, 128, 64, 3, 8


def fitting_stages(tile: Tile, weight: ExpertWeight, first: bool, itemsize: int, device: torch.device) -> int:
    """Returns the pipeline stages of a tile that the card's shared memory has room for, at least 2.

    The interpreter and the compilation without a GPU count on the memory of an H100, see card.py.
    """
    bm, bn, bk, stages, _ = tile
    numbers = bn * bk * (2 if first else 1)
    inputs, unpacked = bm * bk * itemsize, 0
    if weight.kind == PLAIN.value:
        stored = numbers * itemsize
    elif weight.kind == FP8.value:
        stored, unpacked = numbers, numbers * itemsize
    else:
        stored, unpacked = numbers * 3 // 4, numbers * itemsize
    return max(2, min(stages, (card.shared_bytes(device) - unpacked) // (inputs + stored)))


def many_rows(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    copies: SortedCopies,
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
    tiles: tuple[Tile, Tile] | None = None,
) -> Tensor:
    """Computes the experts of rows that are routed and sorted. Arguments are those of `mixture` in layer.py, and:

    Args:
        x: [T, hidden], normalised.
        weights, experts: float32 and int32 [T, top_k], see `route`.
        copies: `sort_copies` of `experts`.
        native: the device converts e4m3 and multiplies bfloat16.
        tiles: of the first and the second product. None selects them.
    """
    (tokens, hidden), top_k = x.shape, weights.shape[1]
    local, outputs, _ = gate_up.shape
    inner, device, itemsize = outputs // 2, x.device, x.element_size()
    assert x.stride(1) == 1
    assert gate_up.shape[2] == hidden
    assert down.shape == (local, hidden, inner)
    act = torch.empty(tokens * top_k, inner, dtype=x.dtype, device=device)
    parts = torch.empty(tokens * top_k, hidden, dtype=x.dtype, device=device)
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=device) if out is None else out
    for source, weight, bias, target, is_first in (
        (x, gate_up, gate_up_bias, act, True),
        (act, down, down_bias, parts, False),
    ):
        chosen = None if tiles is None else tiles[0 if is_first else 1]
        bm, bn, bk, stages, warps = chosen or _tile(weight.kind, copies.block_m, is_first, itemsize)
        assert bm == copies.block_m
        bk = weight.largest_step(bk)
        stages = fitting_stages((bm, bn, bk, stages, warps), weight, is_first, itemsize, device)
        size = target.shape[1]
        numbers, scales = weight.numbers, weight.scale_tensor(weights)
        zeros = experts if weight.zeros is None else weight.zeros
        _grouped_kernel[(triton.cdiv(size, bn), copies.max_blocks)](
            source, numbers, scales, zeros, source if bias is None else bias, weights, copies.order, copies.blocks,
            target, source.stride(0),
            N=size, K=source.shape[1], TOPK=top_k, BM=bm, BN=bn, BK=bk, STAGES=stages, KIND=weight.kind, NATIVE=native,
            FIRST=is_first, BIAS=bias is not None, GPT_OSS=gpt_oss, ZEROS=weight.zeros is not None,
            **weight.scale_args(), **pdl_args(device), num_warps=warps,
        )  # fmt: skip
    added = x if residual is None else residual
    block = min(1024, int(triton.next_power_of_2(hidden)))
    _sum_kernel[(tokens, triton.cdiv(hidden, block))](
        parts, experts, added, out, added.stride(0), out.stride(0), first, local,
        N=hidden, TOPK=top_k, BN=block, ADD=residual is not None, num_warps=4, **pdl_args(device),
    )  # fmt: skip
    return out
