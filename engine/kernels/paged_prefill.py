"""Attention of new tokens over the paged pool: causal, any lengths, prefix and new tokens in one kernel.

A program computes BLOCK_M query rows of one sequence and one kv head. The rows are (token, query head of the group), so
a tile of keys is read once for the whole group. Tiles of keys that all rows see need no mask (FlashAttention-2, Dao
2023). The kernel supports any head dim, grouping, batch and window. For shapes that `dense_prefill.py` computes faster,
`TritonAttention` uses that module instead. In a captured step the tiles come as a list: the number of programs is fixed
there, and rows differ in length.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.decode_tiles import scaled_tanh, softcap_args
from engine.kernels.paged_decode import add_sink
from engine.kernels.pool import decode, key_scale, pool_args, value_scale
from engine.kv.kv_pool import LayerKV

SMALL_TILE_ROWS = 2048  # Steps of up to this many query rows per kv head get small tiles.
EXTRA_PROGRAMS = 8  # Programs of a list of tiles, beyond those that one row with all tokens needs.


@triton.jit
def _tiles(
    acc, total, best, qs, pool, base_k, base_s, table, scale_log2, cap, lo, hi, length, position, floor,
    MASKED: tl.constexpr, FP8: tl.constexpr, CAP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Continues the online softmax over the keys lo..hi."""
    d = tl.arange(0, DP)
    n = tl.arange(0, BN)
    for start in tl.range(lo, hi, BN, num_stages=STAGES):
        pos = start + n
        if MASKED:
            block = tl.load(table + pos // BS, mask=pos < length, other=0).to(tl.int64)
        else:
            block = tl.load(table + pos // BS).to(tl.int64)
        off = base_k + (block * pool.kv_block + (pos % BS) * pool.kv_token)[:, None] + d[None, :]
        if MASKED:
            ok = (pos < length)[:, None] & (d < D)[None, :]
            k = tl.load(off, mask=ok, other=0)
        elif D == DP:
            k = tl.load(off)
        else:
            k = tl.load(off, mask=(d < D)[None, :], other=0)
        if FP8:
            place = base_s + block * pool.scale_block + (pos % BS) * pool.scale_token
            pair = tl.load(place, mask=pos < length, other=0)
            k = decode(k, qs.dtype)
        s = tl.dot(qs, tl.trans(k), input_precision="ieee")
        if FP8:
            s *= key_scale(pair)[None, :]
        if CAP:
            s = scaled_tanh(s, cap)
        if MASKED:
            seen = (pos[None, :] <= position[:, None]) & (pos[None, :] > floor[:, None])
            s = tl.where(seen, s, -float("inf"))
        top = tl.maximum(best, tl.max(s, 1) * scale_log2)
        safe = tl.where(top == -float("inf"), 0.0, top) if MASKED else top
        p = tl.exp2(s * scale_log2 - safe[:, None])
        shrink = tl.exp2(best - safe)
        if MASKED:
            v = tl.load(off + pool.kv_which, mask=ok, other=0)
        elif D == DP:
            v = tl.load(off + pool.kv_which)
        else:
            v = tl.load(off + pool.kv_which, mask=(d < D)[None, :], other=0)
        total = total * shrink + tl.sum(p, 1)
        if FP8:
            v = decode(v, qs.dtype)
            p *= value_scale(pair)[None, :]
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        best = top
    return acc, total, best


@triton.jit
def _prefill_tile(
    b, m0, q, pool, tables, cu_q, seq_lens, sinks, out, q_row, q_head, table_row, out_row, out_head, window, scale_log2,
    cap, GROUP: tl.constexpr, FP8: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, BM: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes the query rows m0 .. m0 + BM of sequence b and this program's kv head."""
    head = tl.program_id(0)
    q0 = tl.load(cu_q + b)
    queries = tl.load(cu_q + b + 1) - q0
    length = tl.load(seq_lens + b)
    m = m0 + tl.arange(0, BM)
    d = tl.arange(0, DP)
    token = m // GROUP
    position = length - queries + token
    floor = tl.where(window > 0, position - window, -1)
    mask = (token < queries)[:, None] & (d < D)[None, :]
    q_off = (q0 + token).to(tl.int64) * q_row + (head * GROUP + m % GROUP) * q_head
    qs = tl.load(q + q_off[:, None] + d[None, :], mask=mask, other=0.0)

    # Keys lo..full_lo are masked by the window, full_lo..full_hi are seen by all rows, full_hi..last are causal.
    first = length - queries + m0 // GROUP
    last = tl.minimum(length - queries + (m0 + BM - 1) // GROUP + 1, length)
    lo = tl.where(window > 0, tl.maximum(first - window + 1, 0), 0) // BN * BN
    full_lo = tl.where(window > 0, tl.cdiv(tl.maximum(last - window, 0), BN) * BN, 0)
    full_hi = (first + 1) // BN * BN
    full_lo = tl.minimum(tl.maximum(full_lo, lo), last)
    full_hi = tl.maximum(full_hi, full_lo)

    best = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    table = tables + b.to(tl.int64) * table_row
    base_k = pool.kv + head.to(tl.int64) * pool.kv_head
    base_s = pool.scales + head.to(tl.int64) * pool.scale_head
    if window > 0:
        acc, total, best = _tiles(
            acc, total, best, qs, pool, base_k, base_s, table, scale_log2, cap, lo, full_lo, length, position,
            floor, True, FP8, CAP, D, DP, BS, BN, STAGES,
        )  # fmt: skip
    acc, total, best = _tiles(
        acc, total, best, qs, pool, base_k, base_s, table, scale_log2, cap, full_lo, full_hi, length, position,
        floor, False, FP8, CAP, D, DP, BS, BN, STAGES,
    )  # fmt: skip
    acc, total, best = _tiles(
        acc, total, best, qs, pool, base_k, base_s, table, scale_log2, cap, full_hi, last, length, position, floor,
        True, FP8, CAP, D, DP, BS, BN, STAGES,
    )  # fmt: skip
    total = tl.where(total > 0, total, 1.0)
    if SINKS:
        total = add_sink(total, best, sinks, head * GROUP + m % GROUP)
    acc = acc / total[:, None]
    o_off = (q0 + token).to(tl.int64) * out_row + (head * GROUP + m % GROUP) * out_head
    tl.store(out + o_off[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["table_row"])
def _prefill_kernel(
    q, pool, tables, cu_q, seq_lens, sinks, out, q_row, q_head, table_row, out_row, out_head, window, scale_log2, cap,
    GROUP: tl.constexpr, FP8: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, BM: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, BS: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(2)
    queries = tl.load(cu_q + b + 1) - tl.load(cu_q + b)
    # The last tokens see the most keys, so they start first.
    m0 = (tl.cdiv(queries * GROUP, BM) - 1 - tl.program_id(1)) * BM
    if m0 >= 0:
        _prefill_tile(
            b, m0, q, pool, tables, cu_q, seq_lens, sinks, out, q_row, q_head, table_row, out_row, out_head, window,
            scale_log2, cap, GROUP, FP8, CAP, SINKS, BM, D, DP, BS, BN, STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["table_row"])
def _listed_kernel(
    q, pool, tables, cu_q, seq_lens, tiles, sinks, out, q_row, q_head, table_row, out_row, out_head, window, scale_log2,
    cap, GROUP: tl.constexpr, FP8: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, BM: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes a list of tiles. The number of programs does not depend on the list."""
    count = tl.load(tiles)
    for i in range(tl.program_id(1), count, tl.num_programs(1)):
        b = tl.load(tiles + 1 + 2 * i)
        m0 = tl.load(tiles + 2 + 2 * i)
        _prefill_tile(
            b, m0, q, pool, tables, cu_q, seq_lens, sinks, out, q_row, q_head, table_row, out_row, out_head, window,
            scale_log2, cap, GROUP, FP8, CAP, SINKS, BM, D, DP, BS, BN, STAGES,
        )  # fmt: skip


def _tile_shape(rows: int, kv_heads: int, row_bytes: int, block_m: int | None) -> tuple[int, int, int]:
    """Returns query rows of a tile, keys of a tile, and warps.

    With few query tiles, each gets larger tiles of keys and more warps. fp32 does not use tensor cores and gets small
    tiles.

    Args:
        rows: query rows of a sequence.
        row_bytes: bytes of a padded query row.
    """
    if row_bytes > 512:
        return block_m or 32, 32, 8
    block_m = block_m or 128
    if row_bytes > 256:
        return block_m, 64, 8
    return (block_m, 64, 4) if triton.cdiv(rows, block_m) * kv_heads >= 256 else (block_m, 128, 8)


def paged_prefill(
    q: Tensor,
    layer: LayerKV,
    block_tables: Tensor,
    cu_q: Tensor,
    seq_lens: Tensor,
    *,
    max_query: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    block_m: int | None = None,
) -> Tensor:
    """Computes causal attention of the last cu_q[b + 1] - cu_q[b] tokens of each sequence over all its paged keys.

    Returns out, [rows, heads, D]. Rows that belong to no sequence are not written. Arguments are those of
    `paged_decode`, with any max_query, and:

    Args:
        window: number of keys that a token sees, itself included. 0: all.
        block_m: number of query rows in a tile. None selects it.
    """
    num_heads, dim = q.shape[1], q.shape[2]
    num_kv_heads, num_seqs = layer.num_kv_heads, seq_lens.shape[0]
    group = num_heads // num_kv_heads
    assert num_heads == group * num_kv_heads
    assert q.stride(2) == 1
    padded = max(16, int(triton.next_power_of_2(dim)))
    rows = max_query * group
    block_m, block_n, warps = _tile_shape(rows, num_kv_heads * num_seqs, padded * q.element_size(), block_m)
    out = torch.empty_like(q) if out is None else out
    _prefill_kernel[(num_kv_heads, triton.cdiv(rows, block_m), num_seqs)](
        q, pool_args(layer, torch.int32), block_tables, cu_q, seq_lens, q if sinks is None else sinks, out,
        *q.stride()[:2], block_tables.stride(0), *out.stride()[:2], window, *softcap_args(scale, softcap),
        GROUP=group, FP8=layer.scales is not None, CAP=softcap > 0, SINKS=sinks is not None, BM=block_m, D=dim,
        DP=padded, BS=layer.block_size, BN=block_n, STAGES=2, num_warps=warps,
    )  # fmt: skip
    return out


def listed_rows(group: int, head_dim: int, max_tokens: int) -> int:
    """Returns the query rows of a tile of `listed_prefill`. Few tokens get small tiles, which keep more SMs busy.

    Args:
        group: number of query heads of a kv head.
        max_tokens: largest number of tokens in all tiles together.
    """
    return 64 if head_dim > 128 or max_tokens * group <= SMALL_TILE_ROWS else 128


def list_tiles(starts: np.ndarray, num_new: np.ndarray, first_row: int, group: int, block_m: int) -> np.ndarray:
    """Returns the tiles of rows in the order of their work, for `listed_prefill`: int32 [1 + 2 * tiles].

    The first number is the number of tiles. Each tile is a row of the step and the first of its query rows.

    Args:
        starts, num_new: cached and new tokens of each row.
        first_row: number of the first row in the step.
    """
    counts = -(-num_new * group // block_m)
    row_of = np.repeat(np.arange(len(counts)), counts)
    firsts = (np.arange(len(row_of)) - np.repeat(np.cumsum(counts) - counts, counts)) * block_m
    order = np.argsort(-(starts[row_of] + firsts // group), kind="stable")
    tiles = np.empty(1 + 2 * len(row_of), dtype=np.int32)
    tiles[0] = len(row_of)
    tiles[1::2], tiles[2::2] = row_of[order] + first_row, firsts[order]
    return tiles


def max_tiles(max_tokens: int, max_rows: int, group: int, block_m: int) -> int:
    """Returns the largest number of tiles of up to `max_rows` rows with together up to `max_tokens` tokens."""
    return int(triton.cdiv(max_tokens * group, block_m)) + min(max_rows, max_tokens)


def listed_prefill(
    q: Tensor,
    layer: LayerKV,
    block_tables: Tensor,
    cu_q: Tensor,
    seq_lens: Tensor,
    tiles: Tensor,
    *,
    max_tokens: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor,
) -> Tensor:
    """Computes the attention of `paged_prefill` for a list of tiles on the device. The list may change between replays.

    Arguments are those of `paged_prefill`, and:

    Args:
        tiles: int32, the result of `list_tiles` with tiles of `listed_rows`.
        max_tokens: largest number of tokens in all tiles together.
    """
    num_heads, dim = q.shape[1], q.shape[2]
    num_kv_heads = layer.num_kv_heads
    group = num_heads // num_kv_heads
    assert num_heads == group * num_kv_heads
    assert q.stride(2) == 1
    padded = max(16, int(triton.next_power_of_2(dim)))
    block_m, row_bytes = listed_rows(group, dim, max_tokens), padded * q.element_size()
    block_n, warps = 32 if row_bytes > 512 else 64, 8 if block_m == 128 or row_bytes > 256 else 4
    programs = triton.cdiv(max_tokens * group, block_m) + EXTRA_PROGRAMS
    _listed_kernel[(num_kv_heads, programs)](
        q, pool_args(layer, torch.int32), block_tables, cu_q, seq_lens, tiles, q if sinks is None else sinks, out,
        *q.stride()[:2], block_tables.stride(0), *out.stride()[:2], window, *softcap_args(scale, softcap),
        GROUP=group, FP8=layer.scales is not None, CAP=softcap > 0, SINKS=sinks is not None, BM=block_m, D=dim,
        DP=padded, BS=layer.block_size, BN=block_n, STAGES=2, num_warps=warps,
    )  # fmt: skip
    return out
