"""Products of LoRA adapters for rows with different adapters: shrink (A x), then expand (B of that, added).

Rows are sorted by adapter and cut into tiles (engine/adapters/rows.py), as in Punica's SGMV (Chen et al. 2023,
arXiv:2310.18547) and S-LoRA's MBGMM (Sheng et al. 2023, arXiv:2311.03285). A program computes one tile, so the rows of
an adapter share the loads of its weights.

- `shrink`: one product for all parts of a site (queries, keys, values), because A of the parts lie one after the other.
  Programs split the inputs and store their sums apart: no atomics, so a result is the same in each run. An RMSNorm
  before the product needs no pass of its own: A norm(x) = rstd * A (x * g), and the programs sum x^2 on the way.
- `expand`: all parts of a site in one launch. It adds the sums of the splits up, multiplies by B and adds to the base's
  product in place, or applies SiLU x mul to both. The base's own kernel can do this instead, see changes.py.

Programs of tiles without rows or without an adapter end early. Both kernels load their first weights before they wait
for the kernel before them, and the kernel after `shrink`, a product, loads its own meanwhile (PDL, pdl.py). The weights
are in slots, see engine/adapters/packed.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.pdl import launch_next_and_wait, pdl_args, wait_for_previous

RANK_MULTIPLE = tl.constexpr(16)  # Padded ranks are multiples of it, see engine/adapters/packed.py
MAX_SPLIT = 16


class ShrinkShape(NamedTuple):
    """Sizes of a program of `shrink`."""

    outputs: int
    inputs: int  # Of a step of its loop
    stages: int
    split: int  # Parts of the inputs, which different programs sum up


class SlotWeights(NamedTuple):
    """The adapters of all slots."""

    numbers: Tensor  # [slots, capacity]
    table: Tensor  # int64 [slots, sites, 8]: place of A, padded ranks of 3 parts, places of B of 3 parts
    scales: Tensor  # float32 [slots, sites, 3]
    max_rank: int  # Largest padded rank of a part


@triton.jit(do_not_specialize=["site", "rows"])
def _shrink_kernel(
    x,
    norm,
    numbers,
    table,
    states,
    squares,
    order,
    tiles,
    site,
    rows,
    x_row,
    capacity,
    SITES: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    place = tiles + tl.program_id(0) * 3
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    split = tl.program_id(2)
    slot = tl.load(place).to(tl.int64)
    first = tl.load(place + 1)
    count = tl.load(place + 2)
    count = tl.where(slot < 0, 0, count)
    slot = tl.maximum(slot, 0)
    entry = table + (slot * SITES + site) * 8
    width = tl.load(entry + 1) + tl.load(entry + 2) + tl.load(entry + 3)
    count = tl.where(tl.program_id(1) * BN < width, count, 0)
    width = tl.where(count > 0, width, 0)
    k = tl.arange(0, BK)
    a_src = numbers + slot * capacity + tl.load(entry) + n.to(tl.int64)[None, :] * K + k[:, None]
    a_ok = (n < width)[None, :]
    start = split * BK
    a = tl.load(a_src + start, mask=a_ok & (start + k < K)[:, None], other=0.0)
    m = tl.arange(0, BM)
    m_ok = m < count
    row = tl.load(order + first + m, mask=m_ok, other=0)
    launch_next_and_wait(PDL)
    if count > 0:
        x_src = x + row.to(tl.int64)[:, None] * x_row + k[None, :]
        acc = tl.zeros([BM, BN], tl.float32)
        square = tl.zeros([BM], tl.float32)
        for start in tl.range(split * BK, K, SPLIT * BK, num_stages=STAGES):
            v = tl.load(x_src + start, mask=m_ok[:, None] & (start + k < K)[None, :], other=0.0)
            if NORM:
                wide = v.to(tl.float32)
                square += tl.sum(wide * wide, 1)
                weight = tl.load(norm + start + k, mask=start + k < K, other=0.0).to(tl.float32)
                v = (wide * weight[None, :]).to(v.dtype)
            acc = tl.dot(v, a, acc, input_precision="ieee")
            following = start + SPLIT * BK
            a = tl.load(a_src + following, mask=a_ok & (following + k < K)[:, None], other=0.0)
        out = states + (split * rows + row)[:, None] * WIDTH + n[None, :]
        tl.store(out, acc, mask=m_ok[:, None] & (n < width)[None, :])
        if NORM:
            tl.store(squares + split * rows + row, square, mask=m < tl.where(tl.program_id(1) == 0, count, 0))


def shrink(
    x: Tensor,
    weights: SlotWeights,
    order: Tensor,
    tiles: Tensor,
    *,
    norm: Tensor | None,
    site: int,
    parts: int,
    tile: int,
    shape: ShrinkShape | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes A x for the rows of each adapter, or A (x * norm). Rows without an adapter stay undefined.

    Args:
        x: [rows, inputs], any row stride.
        order, tiles: int32 [rows] and [3 * tiles]: the rows of each tile, see `rows.tile_rows`.
        norm: [inputs], the weight of an RMSNorm.
        site, parts: the site, and its number of parts.
        tile: rows of a tile.
        shape: None selects it.

    Returns float32 [splits, rows, parts * max_rank], and with a norm the sums of x^2, float32 [splits, rows].
    """
    rows, k = x.shape
    assert x.stride(1) == 1
    width = parts * weights.max_rank
    count = len(tiles) // 3
    bn, bk, stages, split = shape or _shrink_shape(rows, k, width, tile, x.element_size())
    states = torch.empty(split, rows, width, dtype=torch.float32, device=x.device)
    squares = None if norm is None else torch.empty(split, rows, dtype=torch.float32, device=x.device)
    sizes = {"SITES": weights.table.shape[1], "K": k, "WIDTH": width}
    tiling = {"BM": tile, "BN": bn, "BK": bk, "SPLIT": split, "STAGES": stages}
    optional = x if norm is None else norm, states if squares is None else squares
    _shrink_kernel[(count, triton.cdiv(width, bn), split)](
        x,
        optional[0],
        weights.numbers,
        weights.table,
        states,
        optional[1],
        order,
        tiles,
        site,
        rows,
        x.stride(0),
        weights.numbers.stride(0),
        **sizes,
        **tiling,
        NORM=norm is not None,
        **pdl_args(x.device),
        num_warps=4,
    )
    return states, squares


def _shrink_shape(rows: int, k: int, width: int, tile: int, itemsize: int) -> ShrinkShape:
    outputs = max(16, min(64, triton.next_power_of_2(width)))
    if tile > 16:  # few variants, because these steps have any number of rows and compile while they run
        return ShrinkShape(outputs, 256 // itemsize, 3, 8 if rows <= 2048 else 1)
    inputs = 512 // itemsize
    return ShrinkShape(outputs, inputs, 2, min(MAX_SPLIT, triton.cdiv(k, inputs)))


@triton.jit(do_not_specialize=["site", "rows"])
def _expand_kernel(
    states,
    squares,
    numbers,
    table,
    scales,
    base,
    out,
    order,
    tiles,
    site,
    rows,
    eps,
    factor,
    base_row,
    out_row,
    capacity,
    SITES: tl.constexpr,
    INPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    SPLIT: tl.constexpr,
    ALIGN: tl.constexpr,  # Columns of the parts are multiples of it
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    place = tiles + tl.program_id(0) * 3
    slot = tl.load(place).to(tl.int64)
    first = tl.load(place + 1)
    count = tl.load(place + 2)
    has_adapter = slot >= 0
    slot = tl.maximum(slot, 0)
    entry = table + (slot * SITES + site) * 8
    # The part of this block, and the first column of the part.
    block = tl.program_id(1)
    end0: tl.constexpr = (N0 + BN - 1) // BN
    end1: tl.constexpr = end0 + (N1 + BN - 1) // BN
    second = block >= end0
    third = block >= end1
    part = FIRST + second.to(tl.int32) + third.to(tl.int32)
    column = tl.multiple_of(tl.where(third, N0 + N1, tl.where(second, N0, 0)), ALIGN)
    size = tl.where(third, N2, tl.where(second, N1, N0))
    block -= tl.where(third, end1, tl.where(second, end0, 0))
    n = block * BN + tl.arange(0, BN)
    n_ok = n < size
    rank = tl.load(entry + 1 + part)
    shift = tl.load(entry + 1, mask=part > 0, other=0) + tl.load(entry + 2, mask=part > 1, other=0)
    rank = tl.multiple_of(tl.where(has_adapter & (count > 0), rank, 0), RANK_MULTIPLE)
    shift = tl.multiple_of(shift, RANK_MULTIPLE)
    m = tl.arange(0, BM)
    m_ok = m < count
    row = tl.load(order + first + m, mask=m_ok, other=0).to(tl.int64)
    r = tl.arange(0, BR)
    b_src = numbers + slot * capacity + tl.load(entry + 4 + part) + n.to(tl.int64)[None, :] * rank + r[:, None]
    b = tl.load(b_src, mask=n_ok[None, :] & (r < rank)[:, None], other=0.0)
    scale = tl.load(scales + (slot * SITES + site) * 3 + part) * factor
    if GATED:
        up_rank = tl.multiple_of(tl.where(has_adapter & (count > 0), tl.load(entry + 2), 0), RANK_MULTIPLE)
        up_src = numbers + slot * capacity + tl.load(entry + 5) + n.to(tl.int64)[None, :] * up_rank + r[:, None]
        up_scale = tl.load(scales + (slot * SITES + site) * 3 + 1) * factor
    wait_for_previous(PDL)
    active = count
    if not GATED:
        active = tl.where(rank > 0, count, 0)
    if active > 0:
        ok = m_ok[:, None] & n_ok[None, :]
        h_src = states + row[:, None] * WIDTH + r[None, :]
        rstd = tl.full([BM], 1.0, tl.float32)
        if NORM:
            square = tl.zeros([BM], tl.float32)
            adapted = tl.where(has_adapter, count, 0)
            for split in tl.static_range(SPLIT):
                square += tl.load(squares + split * rows + row, mask=m < adapted, other=0.0)
            rstd = tl.rsqrt(square / INPUTS + eps)
        acc = tl.zeros([BM, BN], tl.float32)
        for start in range(0, rank, BR):
            if start > 0:
                b = tl.load(b_src + start, mask=n_ok[None, :] & (start + r < rank)[:, None], other=0.0)
            h = tl.zeros([BM, BR], tl.float32)
            for split in tl.static_range(SPLIT):
                h_ok = m_ok[:, None] & (start + r < rank)[None, :]
                h += tl.load(h_src + split * rows * WIDTH + shift + start, mask=h_ok, other=0.0)
            acc = tl.dot((h * rstd[:, None]).to(b.dtype), b, acc, input_precision="ieee")
        acc *= scale
        source = base + row[:, None] * base_row + column + n[None, :]
        acc += tl.load(source, mask=ok, other=0.0).to(tl.float32)
        if GATED:
            up = tl.zeros([BM, BN], tl.float32)
            for start in range(0, up_rank, BR):
                u = tl.load(up_src + start, mask=n_ok[None, :] & (start + r < up_rank)[:, None], other=0.0)
                h = tl.zeros([BM, BR], tl.float32)
                for split in tl.static_range(SPLIT):
                    h_ok = m_ok[:, None] & (start + r < up_rank)[None, :]
                    h += tl.load(h_src + split * rows * WIDTH + rank + start, mask=h_ok, other=0.0)
                up = tl.dot((h * rstd[:, None]).to(u.dtype), u, up, input_precision="ieee")
            up *= up_scale
            up += tl.load(source + N0, mask=ok, other=0.0).to(tl.float32)
            acc = acc / (1.0 + tl.exp(-acc)) * up
        tl.store(out + row[:, None] * out_row + column + n[None, :], acc.to(out.dtype.element_ty), mask=ok)


def expand(
    states: Tensor,
    weights: SlotWeights,
    base: Tensor,
    out: Tensor,
    order: Tensor,
    tiles: Tensor,
    *,
    squares: Tensor | None,
    eps: float,
    inputs: int,
    site: int,
    outputs: tuple[int, ...],
    tile: int,
    first_part: int = 0,
    factor: float = 1.0,
    gated: bool = False,
    block: int | None = None,
) -> None:
    """Computes out = base + factor * scale * B states for the parts from `first_part` on.

    Args:
        states, squares: the results of `shrink` for `inputs` inputs.
        base: [rows, sum of outputs].
        out: base itself; with `gated` [rows, outputs[0]] for silu(gate) * up of all rows, the parts being gate and up.
        order, tiles, site, tile: as in `shrink`.
        outputs: of the parts from `first_part` on.
        eps: of the RMSNorm.
        block: outputs of a program. None selects it.
    """
    split, rows, width = states.shape
    assert base.stride(1) == out.stride(1) == 1
    assert gated or base is out
    bn = block or (64 if rows <= tile else 128)
    bn = max(16, min(bn, triton.next_power_of_2(max(outputs))))
    n0, n1, n2 = (*outputs, 0, 0)[:3]
    blocks = triton.cdiv(n0, bn) if gated else sum(triton.cdiv(n, bn) for n in outputs)
    sizes = {"SITES": weights.table.shape[1], "INPUTS": inputs, "WIDTH": width}
    parts = {"FIRST": first_part, "N0": n0, "N1": n1, "N2": n2}
    rank = max(16, min(64, triton.next_power_of_2(weights.max_rank)))
    tiling = {"BM": tile, "BN": bn, "BR": rank, "SPLIT": split, "ALIGN": math.gcd(16, n0, n1)}
    # Pipelined loops keep their loads in shared memory, and then one program has a processor for itself.
    launch = {"num_warps": 4, "num_stages": 1}
    _expand_kernel[(len(tiles) // 3, blocks)](
        states,
        states if squares is None else squares,
        *weights[:3],
        base,
        out,
        order,
        tiles,
        site,
        rows,
        eps,
        factor,
        base.stride(0),
        out.stride(0),
        weights.numbers.stride(0),
        **sizes,
        **parts,
        **tiling,
        NORM=squares is not None,
        GATED=gated,
        **pdl_args(base.device),
        **launch,
    )


@triton.jit(do_not_specialize=["site"])
def _gather_kernel(
    tokens,
    numbers,
    table,
    states,
    order,
    tiles,
    site,
    capacity,
    SITES: tl.constexpr,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    place = tiles + tl.program_id(0) * 3
    slot = tl.load(place).to(tl.int64)
    first = tl.load(place + 1)
    count = tl.where(slot < 0, 0, tl.load(place + 2))
    slot = tl.maximum(slot, 0)
    entry = table + (slot * SITES + site) * 8
    rank = tl.load(entry + 1)
    wait_for_previous(PDL)
    m = tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    row = tl.load(order + first + m, mask=m < count, other=0).to(tl.int64)
    ok = (m < count)[:, None] & (n < rank)[None, :]
    token = tl.load(tokens + row, mask=m < count, other=0).to(tl.int64)
    source = numbers + slot * capacity + tl.load(entry) + token[:, None] * rank + n[None, :]
    tl.store(states + row[:, None] * WIDTH + n[None, :], tl.load(source, mask=ok, other=0.0).to(tl.float32), mask=ok)


def gather_states(
    tokens: Tensor, weights: SlotWeights, site: int, order: Tensor, tiles: Tensor, *, tile: int
) -> Tensor:
    """Returns A of the embedding for tokens [rows], as the states that `shrink` returns."""
    width = weights.max_rank
    states = torch.empty(1, len(tokens), width, dtype=torch.float32, device=tokens.device)
    bn = min(64, triton.next_power_of_2(width))
    sizes = {"SITES": weights.table.shape[1], "WIDTH": width, "BM": tile, "BN": bn, **pdl_args(tokens.device)}
    _gather_kernel[(len(tiles) // 3, triton.cdiv(width, bn))](
        tokens, weights.numbers, weights.table, states, order, tiles, site, weights.numbers.stride(0), **sizes
    )
    return states
