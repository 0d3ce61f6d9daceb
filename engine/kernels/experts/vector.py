"""The experts of a few rows as products with vectors: each copy reads its own expert, with no sort and no padding.

    `_gate_up_kernel`  all copies: gate and up with the activation, times the routing weight
    `_down_kernel`     for each row the sum over its copies, and the residual add

A program computes R outputs of a copy, or of a row. A thread multiplies 16 bytes of weights in fp32 where it loads and
unpacks them, so nothing goes through shared memory but the last sums. K is cut in tiles of B1 inputs and one of B2 for
the rest. Loads of `_down_kernel` are two steps ahead of its products. Sums are in the order of the slots, so
a row's result is always the same and does not depend on the other rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

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
)
from engine.kernels.pdl import pdl_args, wait_for_previous

MAX_TILE = 2048  # Largest number of inputs of a tile.
MIN_TILE = 32
#: Inputs and sums of mxfp4 are multiplied by powers of two, because the numbers are 2^126 times too small: subnormal
#: products would lose bits.
_UP, _DOWN = tl.constexpr(2.0**64), tl.constexpr(2.0**62)


@triton.jit
def _load(
    w, scales, zeros, expert, n, ok, start, K: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr,
    SN: tl.constexpr, SK: tl.constexpr, SROWS: tl.constexpr, SGROUPS: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Loads rows n of an expert, which has ROWS rows, from input `start` on.

    Returns the numbers [R, B] (of 4 bits: words [R, B / 8]), their scales and zeros, [R, 1] or for G inputs each.
    """
    row = (expert * ROWS + n)[:, None]
    if KIND >= MXFP4:  # mxfp4 and int4
        i = start // 8 + tl.arange(0, B // 8)
        numbers = tl.load(w + row * (K // 8) + i[None, :], mask=ok[:, None] & (i < K // 8)[None, :], other=0)
    else:
        i = start + tl.arange(0, B)
        numbers = tl.load(w + row * K + i[None, :], mask=ok[:, None] & (i < K)[None, :], other=0)
    if KIND == PLAIN:
        scale = tl.full([1, 1], 1.0, tl.float32)
        zero = scale
    else:
        srow = ((expert * SROWS + n // SN) * SGROUPS)[:, None]
        if SGROUPS == 1:
            scale = tl.load(scales + srow, mask=ok[:, None], other=0.0)
            zero = tl.load(zeros + srow, mask=ok[:, None], other=0) if ZEROS else scale
        else:
            G: tl.constexpr = 16 if KIND == FP8 else 32
            k = start + tl.arange(0, B // G) * G
            s_ok = ok[:, None] & (k < K)[None, :]
            scale = tl.load(scales + srow + (k // SK)[None, :], mask=s_ok, other=0)
            zero = tl.load(zeros + srow + (k // SK)[None, :], mask=s_ok, other=0) if ZEROS else scale
        if KIND == MXFP4:
            scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        scale = scale.to(tl.float32)
    return numbers, scale, zero


@triton.jit
def _inputs(x, start, stop, B: tl.constexpr, KIND: tl.constexpr):
    """Loads inputs start .. start + B as fp32; those from `stop` on are 0."""
    k = start + tl.arange(0, B)
    v = tl.load(x + k, mask=k < stop, other=0.0).to(tl.float32)
    return v * _UP if KIND == MXFP4 else v


@triton.jit
def _product(
    numbers, scale, zero, v, R: tl.constexpr, B: tl.constexpr, G: tl.constexpr, KIND: tl.constexpr,
    NATIVE: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Returns the sums of the products with inputs v [B], for each row and each G inputs: [R, B / G]."""
    if KIND == MXFP4:
        weight = unpack_floats(numbers, R, B)
    elif KIND == INT4:
        weight = unpack_nibbles(numbers, R, B)
    elif KIND == FP8:
        weight = decode_e4m3(numbers, NATIVE)
    else:
        weight = numbers.to(tl.float32)
    sums = tl.sum((weight * v[None, :]).reshape(R, B // G, G), 2)
    if ZEROS:
        sums += (8.0 - zero.to(tl.float32)) * tl.sum(v.reshape(B // G, G), 1)[None, :]
    return sums if KIND == PLAIN else sums * scale


@triton.jit
def _gate_up_kernel(
    x, weights, experts, w, scales, zeros, bias, out, x_row, first, local,
    N: tl.constexpr, K: tl.constexpr, TOPK: tl.constexpr, R: tl.constexpr, FULL: tl.constexpr, B1: tl.constexpr,
    B2: tl.constexpr, G: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr, BIAS: tl.constexpr,
    GPT_OSS: tl.constexpr, SN: tl.constexpr, SK: tl.constexpr, SROWS: tl.constexpr, SGROUPS: tl.constexpr,
    ZEROS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    copy = tl.program_id(1)
    n = tl.program_id(0) * R + tl.arange(0, R)
    wait_for_previous(PDL)
    expert = tl.load(experts + copy).to(tl.int64) - first
    if (expert < 0) | (expert >= local):
        return
    ok = n < N
    rows = x + (copy // TOPK).to(tl.int64) * x_row
    rest: tl.constexpr = FULL * B1
    if B2 > 0:
        g2, gs2, gz2 = _load(w, scales, zeros, expert, n, ok, rest, K, B2, 2 * N, KIND, SN, SK, SROWS, SGROUPS, ZEROS)
        u2, us2, uz2 = _load(
            w, scales, zeros, expert, n + N, ok, rest, K, B2, 2 * N, KIND, SN, SK, SROWS, SGROUPS, ZEROS
        )
    acc = tl.zeros([R, B1 // G], tl.float32)
    acc_up = tl.zeros([R, B1 // G], tl.float32)
    for tile in tl.static_range(FULL):
        g, gs, gz = _load(w, scales, zeros, expert, n, ok, tile * B1, K, B1, 2 * N, KIND, SN, SK, SROWS, SGROUPS, ZEROS)
        u, us, uz = _load(
            w, scales, zeros, expert, n + N, ok, tile * B1, K, B1, 2 * N, KIND, SN, SK, SROWS, SGROUPS, ZEROS
        )
        v = _inputs(rows, tile * B1, K, B1, KIND)
        acc += _product(g, gs, gz, v, R, B1, G, KIND, NATIVE, ZEROS)
        acc_up += _product(u, us, uz, v, R, B1, G, KIND, NATIVE, ZEROS)
    y = tl.sum(acc, 1)
    z = tl.sum(acc_up, 1)
    if B2 > 0:
        v = _inputs(rows, rest, K, B2, KIND)
        y += tl.sum(_product(g2, gs2, gz2, v, R, B2, G, KIND, NATIVE, ZEROS), 1)
        z += tl.sum(_product(u2, us2, uz2, v, R, B2, G, KIND, NATIVE, ZEROS), 1)
    if KIND == MXFP4:
        y *= _DOWN
        z *= _DOWN
    if BIAS:
        y += tl.load(bias + expert * (2 * N) + n, mask=ok, other=0.0).to(tl.float32)
        z += tl.load(bias + expert * (2 * N) + N + n, mask=ok, other=0.0).to(tl.float32)
    y = activate(y, z, GPT_OSS) * tl.load(weights + copy)
    tl.store(out + copy.to(tl.int64) * N + n, y.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _load_slot(
    w, scales, zeros, chosen, first, local, n, slot, start, N: tl.constexpr, K: tl.constexpr, B: tl.constexpr,
    KIND: tl.constexpr, SN: tl.constexpr, SK: tl.constexpr, SROWS: tl.constexpr, SGROUPS: tl.constexpr,
    ZEROS: tl.constexpr,
):  # fmt: skip
    """Returns `_load` of a slot's expert, and the end of its inputs: 0 for an expert of another rank."""
    expert = tl.load(chosen + slot).to(tl.int64) - first
    mine = (expert >= 0) & (expert < local)
    numbers, scale, zero = _load(
        w, scales, zeros, expert, n, n < tl.where(mine, N, 0), start, K, B, N, KIND, SN, SK, SROWS, SGROUPS, ZEROS
    )
    return numbers, scale, zero, tl.where(mine, K, 0)


@triton.jit
def _down_kernel(
    x, weights, experts, w, scales, zeros, bias, residual, out, residual_row, out_row, first, local,
    N: tl.constexpr, K: tl.constexpr, TOPK: tl.constexpr, R: tl.constexpr, FULL: tl.constexpr, B1: tl.constexpr,
    B2: tl.constexpr, G: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr, BIAS: tl.constexpr,
    ADD: tl.constexpr, SN: tl.constexpr, SK: tl.constexpr, SROWS: tl.constexpr, SGROUPS: tl.constexpr,
    ZEROS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * R + tl.arange(0, R)
    chosen = experts + token * TOPK
    rows = x + token * TOPK * K
    rest: tl.constexpr = FULL * B1
    steps: tl.constexpr = TOPK * FULL
    # The choice of experts is older than the kernel before this one, so the first loads need not wait for it.
    a, sa, za, ka = _load_slot(
        w, scales, zeros, chosen, first, local, n, 0, 0, N, K, B1, KIND, SN, SK, SROWS, SGROUPS, ZEROS
    )
    if B2 > 0:
        r, sr, zr, kr = _load_slot(
            w, scales, zeros, chosen, first, local, n, 0, rest, N, K, B2, KIND, SN, SK, SROWS, SGROUPS, ZEROS
        )
        acc_rest = tl.zeros([R, B2 // G], tl.float32)
    if steps > 1:
        b, sb, zb, kb = _load_slot(
            w, scales, zeros, chosen, first, local, n, 1 // FULL, 1 % FULL * B1, N, K, B1, KIND, SN, SK, SROWS,
            SGROUPS, ZEROS,
        )  # fmt: skip
    wait_for_previous(PDL)
    added = tl.zeros([R], tl.float32)
    if ADD:
        added = tl.load(residual + token * residual_row + n, mask=n < N, other=0.0).to(tl.float32)
    acc = tl.zeros([R, B1 // G], tl.float32)
    for step in tl.static_range(steps):
        if step + 2 < steps:
            c, sc, zc, kc = _load_slot(
                w, scales, zeros, chosen, first, local, n, (step + 2) // FULL, (step + 2) % FULL * B1, N, K, B1, KIND,
                SN, SK, SROWS, SGROUPS, ZEROS,
            )  # fmt: skip
        v = _inputs(rows + step // FULL * K, step % FULL * B1, ka, B1, KIND)
        acc += _product(a, sa, za, v, R, B1, G, KIND, NATIVE, ZEROS)
        if B2 > 0 and step % FULL == 0:
            if step + FULL < steps:
                t, st, zt, kt = _load_slot(
                    w, scales, zeros, chosen, first, local, n, step // FULL + 1, rest, N, K, B2, KIND, SN, SK, SROWS,
                    SGROUPS, ZEROS,
                )  # fmt: skip
            v2 = _inputs(rows + step // FULL * K, rest, kr, B2, KIND)
            acc_rest += _product(r, sr, zr, v2, R, B2, G, KIND, NATIVE, ZEROS)
            if step + FULL < steps:
                r, sr, zr, kr = t, st, zt, kt
        if step + 1 < steps:
            a, sa, za, ka = b, sb, zb, kb
        if step + 2 < steps:
            b, sb, zb, kb = c, sc, zc, kc
    y = tl.sum(acc, 1)
    if B2 > 0:
        y += tl.sum(acc_rest, 1)
    if KIND == MXFP4:
        y *= _DOWN
    if BIAS:
        for slot in tl.static_range(TOPK):
            expert = tl.load(chosen + slot).to(tl.int64) - first
            width = tl.where((expert >= 0) & (expert < local), N, 0)
            share = tl.load(weights + token * TOPK + slot)
            y += share * tl.load(bias + expert * N + n, mask=n < width, other=0.0).to(tl.float32)
    tl.store(out + token * out_row + n, (y + added).to(out.dtype.element_ty), mask=n < N)


#: Outputs and warps of a program.
VectorTile = tuple[int, int]


def _tiles(kind: int) -> tuple[VectorTile, VectorTile]:
    """Returns the tiles of both kernels: of plain and fp8 the fastest of benchmarks/experts/kernels.py on an H200."""
    if kind in {MXFP4.value, INT4.value}:
        return (8, 4), (8, 4)
    return (2, 4) if kind == FP8.value else (2, 2), (4, 4)


def _cuts(weight: ExpertWeight) -> dict[str, int]:
    """Returns how inputs are cut: FULL tiles of B1 and one of B2 for the rest; and the inputs of a thread, G."""
    inputs = weight.shape[2]
    b1 = max(MIN_TILE, min(MAX_TILE, 1 << (inputs.bit_length() - 1)))
    full = max(1, inputs // b1)
    rest = max(0, inputs - full * b1)
    b2 = max(MIN_TILE, int(triton.next_power_of_2(rest))) if rest else 0
    group = {PLAIN.value: 8, FP8.value: 16}.get(weight.kind, 32)
    return {"FULL": full, "B1": b1, "B2": b2, "G": group}


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
    native: bool = False,
    tiles: tuple[VectorTile, VectorTile] | None = None,
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
    (r1, warps1), (r2, warps2) = tiles or _tiles(gate_up.kind)
    shared: dict[str, Any] = {"TOPK": top_k, "NATIVE": native, **pdl_args(device)}
    _gate_up_kernel[(triton.cdiv(inner, r1), tokens * top_k)](
        x, weights, experts, gate_up.numbers, _or(gate_up.scales, weights), _or(gate_up.zeros, experts),
        _or(gate_up_bias, x), act, x.stride(0), first, local,
        N=inner, K=hidden, R=r1, KIND=gate_up.kind, BIAS=gate_up_bias is not None, GPT_OSS=gpt_oss,
        ZEROS=gate_up.zeros is not None, **gate_up.scale_args(), **_cuts(gate_up), **shared, num_warps=warps1,
    )  # fmt: skip
    _down_kernel[(triton.cdiv(hidden, r2), tokens)](
        act, weights, experts, down.numbers, _or(down.scales, weights), _or(down.zeros, experts), _or(down_bias, x),
        added, out, added.stride(0), out.stride(0), first, local,
        N=hidden, K=inner, R=r2, KIND=down.kind, BIAS=down_bias is not None, ADD=residual is not None,
        ZEROS=down.zeros is not None, **down.scale_args(), **_cuts(down), **shared, num_warps=warps2,
    )  # fmt: skip
    return out


def _or(tensor: Tensor | None, placeholder: Tensor) -> Tensor:
    return placeholder if tensor is None else tensor
