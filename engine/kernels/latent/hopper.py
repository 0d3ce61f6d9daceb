"""Attention over paged latents with the tensor cores of Hopper (wgmma), written in Gluon.

Triton's own pipeline cannot do two things that this kernel needs. It copies a tile of keys while another one is used,
with room for two tiles only, and it reads a tile for the scores and for the values without a copy in registers.

A program has one of two forms. Few rows (pairs of token and head): the tile of keys is the left operand, so no row of
a product is padding, and sums are [rank, rows]. Many rows: the queries are the left operand, two warp groups
share the keys of the scores and the columns of the values, and sums are [rows, rank].
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from engine.kernels import card
from engine.kernels.decode_tiles import EMPTY
from engine.kernels.paged_decode import DecodePlan, DecodeTile, DecodeWorkspace
from engine.kernels.pdl import pdl_args, wait_for_previous
from engine.kv.kv_pool import LayerKV


@dataclass(frozen=True)
class LatentTile:
    """The tile of a program."""

    rows: int  # (token, head) pairs.
    keys: int
    stages: int  # Of Triton's pipeline. Block ids take half of them.
    warps: int
    programs: int  # Programs of an SM that run at once.
    hopper: bool = False  # The kernels of this module compute it.


@dataclass(frozen=True)
class HopperTile(DecodeTile):
    """A tile of the decode kernel of this module."""


MAX_FEW = 32  # Largest number of rows in the form for few rows.
MIN_RANK, MAX_RANK, MAX_ROPE = 64, 512, 64
MIN_BLOCK = 16  # Each warp copies keys of one block.
BUFFERS = gl.constexpr(2)  # Tiles of keys in shared memory. Two tiles of 64 keys and 64 rows of queries fill it.
empty = gl.constexpr(EMPTY.value)
_wait_for_previous = gluon.jit(wait_for_previous.fn)
# Triton 3.6 has other names than later versions for a barrier of all threads and for an asynchronous copy.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_async_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@gluon.constexpr_function
def _product(columns: int, warps: int) -> gl.NVMMADistributedLayout:
    """Returns the layout of a product with so many columns. A second warp group has half of the columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, columns * 4 // warps, 16])


@gluon.jit
def _warp_ids(table, start, warp, N: gl.constexpr, BS: gl.constexpr, limit):
    """Loads the id of the block that has each warp's N keys of the tile at start. Keys from the limit on have any."""
    return gl.load(table + gl.minimum(start + warp * N, gl.maximum(limit - 1, 0)) // BS)


@gluon.jit
def _copy(
    dst, kv, ids, start, limit, warp, kv_block, TOKEN: gl.constexpr, COLUMNS: gl.constexpr, N: gl.constexpr,
    BS: gl.constexpr, LAYOUT: gl.constexpr, LAYOUT3: gl.constexpr,
):  # fmt: skip
    """Starts the copy of the keys start.. to a tile in shared memory. Keys from the limit on become zeros.

    LAYOUT: of the tile. LAYOUT3: the same layout of a tile [warps, N, columns].
    """
    KEYS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    WARP: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT3))
    c = gl.arange(0, dst.shape[1], gl.SliceLayout(0, LAYOUT))
    i = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT3)))
    ids = gl.convert_layout(ids, WARP, assert_trivial=True)
    first = start + gl.convert_layout(warp, WARP, assert_trivial=True) * N
    place = ids.to(gl.int64) * kv_block + (first % BS) * TOKEN
    place = gl.reshape(place[:, None] + (i * TOKEN)[None, :], [dst.shape[0]])
    place = gl.multiple_of(gl.convert_layout(place, KEYS, assert_trivial=True), 8)
    seen = gl.reshape(first[:, None] + i[None, :], [dst.shape[0]]) < limit
    ok = gl.convert_layout(seen, KEYS, assert_trivial=True)[:, None] & (c < COLUMNS)[None, :]
    _async_load(dst, kv + (place[:, None] + c[None, :]), mask=ok)


@gluon.jit
def _load_queries(
    dst, q, q0, queries, m0, q_row, q_head, HEADS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr
):
    """Loads a part of the queries of the rows from m0 on into shared memory."""
    m = m0 + gl.arange(0, dst.shape[0], gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, dst.shape[1], gl.SliceLayout(0, LAYOUT))
    row = (q0 + m // HEADS).to(gl.int64) * q_row + (m % HEADS) * q_head
    ok = (m // HEADS < queries)[:, None] & (c < COLUMNS)[None, :]
    dst.store(gl.load(q + (row[:, None] + c[None, :]), mask=ok, other=0.0))


@gluon.jit
def _attend(
    q, kv, table, q0, queries, length, m0, lo, hi, q_row, q_head, kv_block, scale_log2,
    HEADS: gl.constexpr, M: gl.constexpr, R: gl.constexpr, RP: gl.constexpr, P: gl.constexpr, PP: gl.constexpr,
    TOKEN: gl.constexpr, BS: gl.constexpr, BN: gl.constexpr, FEW: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Computes the rows m0 .. m0 + M of a sequence over its keys lo .. hi, a multiple of BN.

    Returns normalised sums, the largest score and the sum of weights for each row. A row without keys has zeros.
    FEW: the form for few rows. Its two tiles are both in flight while it waits, because memory is the limit. The other
    form starts the next copy while the product of the scores runs.
    """
    # Axis of the keys in scores. The other axis is that of rows.
    KEYS: gl.constexpr = 0 if FEW else 1
    ROWS: gl.constexpr = 1 - KEYS
    SCORES: gl.constexpr = _product(M if FEW else BN, WARPS)
    SUMS: gl.constexpr = _product(M if FEW else RP, WARPS)
    N: gl.constexpr = BN // WARPS  # Keys that a warp copies.
    LATENT: gl.constexpr = gl.BlockedLayout([N, 8], [1, 32], [WARPS, 1], [1, 0])
    LATENT3: gl.constexpr = gl.BlockedLayout([1, N, 8], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])
    T: gl.constexpr = PP // 8  # Threads that copy the rotated part of a key.
    ROPE: gl.constexpr = gl.BlockedLayout([N * T // 32, 8], [32 // T, T], [WARPS, 1], [1, 0])
    ROPE3: gl.constexpr = gl.BlockedLayout([1, N * T // 32, 8], [1, 32 // T, T], [WARPS, 1, 1], [2, 1, 0])
    dtype: gl.constexpr = kv.dtype.element_ty
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(min(128, 2 * PP), 16)
    latents = gl.allocate_shared_memory(dtype, [BUFFERS, BN, RP], WIDE)
    ropes = gl.allocate_shared_memory(dtype, [BUFFERS, BN, PP], NARROW)
    q_latent = gl.allocate_shared_memory(dtype, [M, RP], WIDE)
    q_rope = gl.allocate_shared_memory(dtype, [M, PP], NARROW)
    shared_weights = gl.allocate_shared_memory(
        dtype, [BN, M] if FEW else [M, BN], gl.NVMMASharedLayout(min(128, 2 * M), 16) if FEW else WIDE
    )

    limit = gl.minimum(length, hi)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LATENT3)))
    ids = _warp_ids(table, lo, warp, N, BS, limit)
    _copy(latents.index(0), kv, ids, lo, limit, warp, kv_block, TOKEN, R, N, BS, LATENT, LATENT3)
    _copy(ropes.index(0), kv + R, ids, lo, limit, warp, kv_block, TOKEN, P, N, BS, ROPE, ROPE3)
    async_copy.commit_group()
    after = lo + BN
    ids = _warp_ids(table, after, warp, N, BS, limit)
    if FEW:
        _copy(latents.index(1), kv, ids, after, limit, warp, kv_block, TOKEN, R, N, BS, LATENT, LATENT3)
        _copy(ropes.index(1), kv + R, ids, after, limit, warp, kv_block, TOKEN, P, N, BS, ROPE, ROPE3)
        async_copy.commit_group()
        after += BN
        ids = _warp_ids(table, after, warp, N, BS, limit)

    QL: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    QR: gl.constexpr = gl.BlockedLayout([1, 8], [32 // T, T], [WARPS, 1], [1, 0])
    _load_queries(q_latent, q, q0, queries, m0, q_row, q_head, HEADS, R, QL)
    _load_queries(q_rope, q + R, q0, queries, m0, q_row, q_head, HEADS, P, QR)
    fence_async_shared()

    score_n = gl.arange(0, BN, gl.SliceLayout(ROWS, SCORES))
    score_m = m0 + gl.arange(0, M, gl.SliceLayout(KEYS, SCORES))
    position = gl.expand_dims(length - queries + score_m // HEADS, KEYS)
    acc = gl.zeros([RP, M] if FEW else [M, RP], gl.float32, SUMS)
    no_scores = gl.zeros([BN, M] if FEW else [M, BN], gl.float32, SCORES)
    total = no_scores  # Each thread has sums of its own keys.
    best = gl.full([M], -float("inf"), gl.float32, gl.SliceLayout(KEYS, SCORES))
    turn = 0
    for start in range(lo, hi, BN):
        async_copy.wait_group(1 if FEW else 0)
        _barrier()  # All copies have arrived, and all warps have read the tile before.
        fence_async_shared()
        latent = latents.index(turn)
        rope = ropes.index(turn)
        if FEW:
            s = warpgroup_mma(latent, q_latent.permute((1, 0)), no_scores, use_acc=False, is_async=True)
            s = warpgroup_mma(rope, q_rope.permute((1, 0)), s, is_async=True)
        else:
            s = warpgroup_mma(q_latent, latent.permute((1, 0)), no_scores, use_acc=False, is_async=True)
            s = warpgroup_mma(q_rope, rope.permute((1, 0)), s, is_async=True)
            other = turn ^ 1
            _copy(latents.index(other), kv, ids, after, limit, warp, kv_block, TOKEN, R, N, BS, LATENT, LATENT3)
            _copy(ropes.index(other), kv + R, ids, after, limit, warp, kv_block, TOKEN, P, N, BS, ROPE, ROPE3)
            async_copy.commit_group()
            after += BN
            ids = _warp_ids(table, after, warp, N, BS, limit)
        s = warpgroup_mma_wait(0, deps=[s])
        s = gl.where(gl.expand_dims(start + score_n, ROWS) <= position, s, -float("inf"))
        top = gl.maximum(best, gl.max(s, KEYS) * scale_log2)
        safe = gl.where(top == -float("inf"), 0.0, top)
        weights = gl.exp2(s * scale_log2 - gl.expand_dims(safe, KEYS))
        shrink = gl.exp2(best - safe)
        best = top
        shared_weights.store(weights.to(dtype))
        fence_async_shared()
        total = total * gl.expand_dims(shrink, KEYS) + weights
        acc *= gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(KEYS, SUMS)), KEYS)
        if FEW:
            acc = warpgroup_mma(latent.permute((1, 0)), shared_weights, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            _barrier()
            _copy(latents.index(turn), kv, ids, after, limit, warp, kv_block, TOKEN, R, N, BS, LATENT, LATENT3)
            _copy(ropes.index(turn), kv + R, ids, after, limit, warp, kv_block, TOKEN, P, N, BS, ROPE, ROPE3)
            async_copy.commit_group()
            after += BN
            ids = _warp_ids(table, after, warp, N, BS, limit)
        else:
            acc = warpgroup_mma(shared_weights, latent, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
        turn = turn ^ 1
    async_copy.wait_group(0)
    _barrier()  # The caller may reuse shared memory.
    total_of_row = gl.sum(total, KEYS)
    divisor = gl.where(total_of_row > 0, total_of_row, 1.0)
    acc = acc / gl.expand_dims(gl.convert_layout(divisor, gl.SliceLayout(KEYS, SUMS)), KEYS)
    return acc, best, total_of_row


@gluon.jit
def _store_rows(
    acc, out, q0, queries, m0, out_row, out_head, HEADS: gl.constexpr, M: gl.constexpr, R: gl.constexpr,
    RP: gl.constexpr, FEW: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Stores the sums of the rows m0 .. m0 + M."""
    KEYS: gl.constexpr = 0 if FEW else 1
    SUMS: gl.constexpr = _product(M if FEW else RP, WARPS)
    m = m0 + gl.arange(0, M, gl.SliceLayout(KEYS, SUMS))
    r = gl.expand_dims(gl.arange(0, RP, gl.SliceLayout(1 - KEYS, SUMS)), 1 - KEYS)
    place = (q0 + m // HEADS).to(gl.int64) * out_row + (m % HEADS) * out_head
    ok = gl.expand_dims(m // HEADS < queries, KEYS) & (r < R)
    gl.store(out + (gl.expand_dims(place, KEYS) + r), acc.to(out.dtype.element_ty), mask=ok)


@gluon.jit(do_not_specialize=["num_seqs", "table_row"])
def _decode_kernel(
    q, kv, tables, cu_q, seq_lens, cum, first_seq, out, part, part_lse, q_row, q_head, kv_block, table_row, out_row,
    out_head, num_seqs, num_programs, scale_log2,
    HEADS: gl.constexpr, M: gl.constexpr, R: gl.constexpr, RP: gl.constexpr, P: gl.constexpr, PP: gl.constexpr,
    TOKEN: gl.constexpr, BS: gl.constexpr, BN: gl.constexpr, FEW: gl.constexpr, WARPS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Computes one share for one tile of rows. The shares are those of `paged_decode`."""
    KEYS: gl.constexpr = 0 if FEW else 1
    pid = gl.program_id(1)
    m0 = gl.program_id(0) * M
    work = gl.load(cum + num_seqs).to(gl.int64)
    shares = gl.maximum(gl.minimum(num_programs, work), 1)
    cursor = (pid * work // shares).to(gl.int32)
    end = gl.minimum((pid + 1) * work // shares, work).to(gl.int32)
    b = gl.load(first_seq + pid)
    # The plan is older than the kernel before this one, but queries and new latents come from that kernel.
    _wait_for_previous(PDL)
    while cursor < end:
        base = gl.load(cum + b)
        tile_count = gl.load(cum + b + 1) - base
        first = cursor - base
        count = gl.minimum(tile_count - first, end - cursor)
        length = gl.load(seq_lens + b)
        q0 = gl.load(cu_q + b)
        queries = gl.load(cu_q + b + 1) - q0
        table = tables + b.to(gl.int64) * table_row
        lo = first * BN
        hi = gl.where(m0 < queries * HEADS, lo + count * BN, lo)  # without rows: no tiles
        acc, best, total = _attend(
            q, kv, table, q0, queries, length, m0, lo, hi, q_row, q_head, kv_block, scale_log2,
            HEADS, M, R, RP, P, PP, TOKEN, BS, BN, FEW, WARPS,
        )  # fmt: skip
        if count == tile_count:
            _store_rows(acc, out, q0, queries, m0, out_row, out_head, HEADS, M, R, RP, FEW, WARPS)
        else:
            # A share has at most two parts: one that starts in an earlier share, one that continues in a later share.
            slot = (2 * pid + (first == 0).to(gl.int32)).to(gl.int64) * (gl.num_programs(0) * M)
            m = m0 + gl.arange(0, M, gl.SliceLayout(KEYS, _product(M if FEW else BN, WARPS)))
            lse = gl.where(total > 0, best + gl.log2(gl.where(total > 0, total, 1.0)), empty)
            gl.store(part_lse + slot + m, lse)
            _store_rows(acc, part + slot * RP, 0, queries, m0, HEADS * RP, RP, HEADS, M, RP, RP, FEW, WARPS)
        cursor += count
        b += (first + count == tile_count).to(gl.int32)


@gluon.jit
def _prompt_tile(
    b, m0, q, kv, tables, cu_q, seq_lens, out, q_row, q_head, kv_block, table_row, out_row, out_head, scale_log2,
    HEADS: gl.constexpr, M: gl.constexpr, R: gl.constexpr, RP: gl.constexpr, P: gl.constexpr, PP: gl.constexpr,
    TOKEN: gl.constexpr, BS: gl.constexpr, BN: gl.constexpr, FEW: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Computes the rows m0 .. m0 + M of sequence b, over the keys that its last row sees."""
    q0 = gl.load(cu_q + b)
    queries = gl.load(cu_q + b + 1) - q0
    length = gl.load(seq_lens + b)
    last = gl.minimum(length - queries + (m0 + M - 1) // HEADS + 1, length)
    acc, _, _ = _attend(
        q, kv, tables + b.to(gl.int64) * table_row, q0, queries, length, m0, 0, (last + BN - 1) // BN * BN,
        q_row, q_head, kv_block, scale_log2, HEADS, M, R, RP, P, PP, TOKEN, BS, BN, FEW, WARPS,
    )  # fmt: skip
    _store_rows(acc, out, q0, queries, m0, out_row, out_head, HEADS, M, R, RP, FEW, WARPS)


@gluon.jit(do_not_specialize=["table_row"])
def _prompt_kernel(
    q, kv, tables, cu_q, seq_lens, out, q_row, q_head, kv_block, table_row, out_row, out_head, scale_log2,
    HEADS: gl.constexpr, M: gl.constexpr, R: gl.constexpr, RP: gl.constexpr, P: gl.constexpr, PP: gl.constexpr,
    TOKEN: gl.constexpr, BS: gl.constexpr, BN: gl.constexpr, FEW: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    b = gl.program_id(1)
    queries = gl.load(cu_q + b + 1) - gl.load(cu_q + b)
    # The last tokens see the most keys, so they start first.
    m0 = ((queries * HEADS + M - 1) // M - 1 - gl.program_id(0)) * M
    if m0 >= 0:
        _prompt_tile(
            b, m0, q, kv, tables, cu_q, seq_lens, out, q_row, q_head, kv_block, table_row, out_row, out_head,
            scale_log2, HEADS, M, R, RP, P, PP, TOKEN, BS, BN, FEW, WARPS,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["table_row"])
def _listed_kernel(
    q, kv, tables, cu_q, seq_lens, tiles, out, q_row, q_head, kv_block, table_row, out_row, out_head, scale_log2,
    HEADS: gl.constexpr, M: gl.constexpr, R: gl.constexpr, RP: gl.constexpr, P: gl.constexpr, PP: gl.constexpr,
    TOKEN: gl.constexpr, BS: gl.constexpr, BN: gl.constexpr, FEW: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Computes a list of tiles. The number of programs does not depend on the list."""
    count = gl.load(tiles)
    for i in range(gl.program_id(0), count, gl.num_programs(0)):
        b = gl.load(tiles + 1 + 2 * i)
        m0 = gl.load(tiles + 2 + 2 * i)
        _prompt_tile(
            b, m0, q, kv, tables, cu_q, seq_lens, out, q_row, q_head, kv_block, table_row, out_row, out_head,
            scale_log2, HEADS, M, R, RP, P, PP, TOKEN, BS, BN, FEW, WARPS,
        )  # fmt: skip


def serves(layer: LayerKV) -> bool:
    """Returns whether these kernels can read the layer, on this card."""
    if triton.knobs.runtime.interpret or not card.has_wgmma(layer.kv.device):
        return False
    rank, rope = layer.latent_dim, layer.head_dim - layer.latent_dim
    fits = MIN_RANK <= rank <= MAX_RANK and rope <= MAX_ROPE and rank % 8 == rope % 8 == 0
    return layer.kv.element_size() == 2 and fits and layer.block_size % MIN_BLOCK == 0


def decode(
    q: Tensor,
    layer: LayerKV,
    block_tables: Tensor,
    cu_q: Tensor,
    seq_lens: Tensor,
    plan: DecodePlan,
    workspace: DecodeWorkspace,
    *,
    scale_log2: float,
    out: Tensor,
) -> None:
    """Computes the shares of `latent_decode`. Its caller merges the parts.

    Args:
        scale_log2: scale of scores in units of log2.
    """
    programs, tile, rows = plan.first_seq.shape[0], plan.tile, workspace.part.shape[1]
    _decode_kernel[(rows // workspace.row_tile, programs)](
        q, layer.kv, block_tables, cu_q, seq_lens, plan.cum, plan.first_seq, out, workspace.part, workspace.part_lse,
        *_strides(q, layer, block_tables, out), seq_lens.shape[0], programs, scale_log2,
        **_sizes(q, layer, workspace.row_tile, tile.keys, tile.warps), **pdl_args(q.device),
    )  # fmt: skip


def prefill(
    q: Tensor,
    layer: LayerKV,
    block_tables: Tensor,
    cu_q: Tensor,
    seq_lens: Tensor,
    programs: int,
    *,
    tile: LatentTile,
    scale_log2: float,
    out: Tensor,
    tiles: Tensor | None = None,
) -> None:
    """Computes `latent_prefill`, or `listed_prefill` if there is a list of tiles.

    Args:
        programs: number of programs of a sequence, or of the list.
    """
    sizes = _sizes(q, layer, tile.rows, tile.keys, tile.warps)
    places = (*_strides(q, layer, block_tables, out), scale_log2)
    if tiles is None:
        grid = programs, seq_lens.shape[0]
        _prompt_kernel[grid](q, layer.kv, block_tables, cu_q, seq_lens, out, *places, **sizes)
    else:
        _listed_kernel[(programs,)](q, layer.kv, block_tables, cu_q, seq_lens, tiles, out, *places, **sizes)


def _sizes(q: Tensor, layer: LayerKV, rows: int, keys: int, warps: int) -> dict[str, int]:
    """Returns the constants of a kernel."""
    rank, rope = layer.latent_dim, q.shape[2] - layer.latent_dim
    assert q.stride(2) == 1
    assert q.dtype == layer.kv.dtype
    sizes = {"R": rank, "RP": triton.next_power_of_2(rank), "P": rope, "PP": max(32, triton.next_power_of_2(rope))}
    sizes |= {"HEADS": q.shape[1], "TOKEN": layer.kv.stride(3), "BS": layer.block_size}
    return {**sizes, "M": rows, "BN": keys, "FEW": rows <= MAX_FEW, "WARPS": warps, "num_warps": warps}


def _strides(q: Tensor, layer: LayerKV, block_tables: Tensor, out: Tensor) -> tuple[int, ...]:
    return *q.stride()[:2], layer.kv.stride(0), block_tables.stride(0), *out.stride()[:2]
