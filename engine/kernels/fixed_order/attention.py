"""Paged attention whose bits do not depend on the batch, the chunk or the number of new tokens.

The keys of a sequence are cut at multiples of SPLIT tokens. A query attends to each split alone, in tiles of TILE keys
in ascending order. The results of the splits are merged in ascending order:

    keys       [ split 0: tile tile .. tile ][ split 1: tile tile .. ][ split 2: tile .. ]
    one query  (result, log-sum-exp)     (+)  (result, log-sum-exp) (+)     ...

Decode computes splits in different programs and merges them in a second kernel. The prompt kernel computes and merges
all splits of its queries in one program. Both use `_split` and `_merge`, so a query gets the same bits in both. A tile
whose keys are all masked for a query leaves its result as it is.

The functions have the names and arguments of `paged_decode.py` and `paged_prefill.py`, which `TritonAttention` calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import paged_prefill as listing
from engine.kernels.decode_tiles import EMPTY, scaled_tanh, softcap_args
from engine.kernels.paged_decode import MAX_QUERY, _plan_kernel
from engine.kernels.pdl import pdl_args, wait_for_previous
from engine.kernels.pool import pool_args
from engine.kv.kv_pool import LayerKV

# All tiles have 64 rows per 4 warps, so that the sum over a tile's weights is made by the same threads in the same
# order (on Hopper a row of a wgmma tile belongs to four threads of one warp). A compiler could fuse a product and a sum
# in one kernel and not in the other, so `enable_fp_fusion` is off and `tl.fma` stands where both are one operation.

SPLIT = 512  # Keys of a split.
TILE = 64  # Keys of a tile.
ROWS = 64  # Query rows of a tile of 4 warps.
MAX_HEAD_DIM = 128  # Two accumulators of a larger head do not fit the registers.
DECODE_STAGES = 5  # Pipeline stages of a program that decodes: two tiles are loaded ahead.
PROMPT_STAGES = 2
PROGRAMS_PER_SM = 2  # Programs that decode.
_TILES = tl.constexpr(SPLIT // TILE)
_BN = tl.constexpr(TILE)


@triton.jit
def _split(
    qs, pool, base_k, table, scale_log2, cap, begin, stop, length, position, floor,
    MASKED: tl.constexpr, CAP: tl.constexpr, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attends to the tiles begin..stop, all in one split. Returns the result and its log-sum-exp in units of log2.

    MASKED: some rows do not see some of these keys.
    """
    d = tl.arange(0, DP)
    n = tl.arange(0, _BN)
    best = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DP], tl.float32)
    for t in tl.range(begin, stop, num_stages=STAGES):
        pos = t * _BN + n
        if MASKED:
            block = tl.load(table + pos // BS, mask=pos < length, other=0).to(tl.int64)
        else:
            block = tl.load(table + pos // BS).to(tl.int64)
        off = base_k + (block * pool.kv_block + (pos % BS) * pool.kv_token)[:, None] + d[None, :]
        if MASKED:
            ok = (pos < length)[:, None] & (d < D)[None, :]
            k = tl.load(off, mask=ok, other=0.0)
        elif D == DP:
            k = tl.load(off)
        else:
            k = tl.load(off, mask=(d < D)[None, :], other=0.0)
        s = tl.dot(qs, tl.trans(k), input_precision="ieee")
        if CAP:
            s = scaled_tanh(s, cap)
        if MASKED:
            seen = (pos[None, :] <= position[:, None]) & (pos[None, :] > floor[:, None])
            s = tl.where(seen, s, -float("inf"))
        top = tl.maximum(best, tl.max(s, 1) * scale_log2)
        safe = tl.where(top == -float("inf"), 0.0, top)
        p = tl.exp2(tl.fma(s, scale_log2, -safe[:, None]))
        shrink = tl.exp2(best - safe)
        total = tl.fma(total, shrink, tl.sum(p, 1))
        if MASKED:
            v = tl.load(off + pool.kv_which, mask=ok, other=0.0)
        elif D == DP:
            v = tl.load(off + pool.kv_which)
        else:
            v = tl.load(off + pool.kv_which, mask=(d < D)[None, :], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        best = top
    some = total > 0
    safe_total = tl.where(some, total, 1.0)
    return acc / safe_total[:, None], tl.where(some, best + tl.log2(safe_total), EMPTY)


@triton.jit
def _merge(merged, weight, top, part, lse):
    """Adds the result of the next split to the merged ones. Returns the new sum, sum of weights and largest lse.

    merged and part: [M, DP]; the others [M].
    """
    new_top = tl.maximum(top, lse)
    shrink = tl.exp2(top - new_top)
    factor = tl.where(lse > EMPTY, tl.exp2(lse - new_top), 0.0)
    merged = tl.fma(part, factor[:, None], merged * shrink[:, None])
    return merged, tl.fma(weight, shrink, factor), new_top


@triton.jit(do_not_specialize=["num_seqs", "table_row", "max_splits"])
def _decode_kernel(
    q, pool, tables, cu_q, seq_lens, cum, first_seq, out, part, part_lse, q_row, q_head, table_row, out_row, out_head,
    num_seqs, num_programs, max_splits, window, first_key, scale_log2, cap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BS: tl.constexpr, STAGES: tl.constexpr, CAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes all splits whose first tile lies in the program's share of the tiles."""
    pid = tl.program_id(1)
    work = tl.load(cum + num_seqs).to(tl.int64)
    shares = tl.maximum(tl.minimum(num_programs, work), 1)
    cursor = (pid * work // shares).to(tl.int32)
    end = tl.minimum((pid + 1) * work // shares, work).to(tl.int32)
    b = tl.load(first_seq + pid)
    m = tl.program_id(0) * M + tl.arange(0, M)
    d = tl.arange(0, DP)
    # The plan is older than the kernel before this one, but q and the new keys come from that kernel.
    wait_for_previous(PDL)
    while cursor < end:
        base = tl.load(cum + b)
        tiles = (tl.load(cum + b + 1) - base) // HEADS
        head = (cursor - base) // tiles
        first = (cursor - base) % tiles
        length = tl.load(seq_lens + b)
        q0 = tl.load(cu_q + b)
        queries = tl.load(cu_q + b + 1) - q0
        low = tl.where(window > 0, tl.maximum(length - queries - window + 1, 0), 0) // _BN
        begin = low + first
        split = begin // _TILES
        stop = tl.minimum((split + 1) * _TILES, low + tiles)
        if begin == tl.maximum(split * _TILES, low):  # else the split belongs to the program before
            token = m // GROUP
            m_ok = token < queries
            position = length - queries + token
            floor = tl.maximum(tl.where(window > 0, position - window, -1), first_key - 1)
            q_off = (q0 + token).to(tl.int64) * q_row + (head * GROUP + m % GROUP) * q_head
            ok = m_ok[:, None] & (d < D)[None, :]
            qs = tl.load(q + q_off[:, None] + d[None, :], mask=ok, other=0.0)
            result, lse = _split(
                qs, pool, pool.kv + head.to(tl.int64) * pool.kv_head, tables + b.to(tl.int64) * table_row, scale_log2,
                cap, begin, stop, length, position, floor, True, CAP, M, D, DP, BS, STAGES,
            )  # fmt: skip
            if stop - begin == tiles:
                o_off = (q0 + token).to(tl.int64) * out_row + (head * GROUP + m % GROUP) * out_head
                tl.store(out + o_off[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=ok)
            else:
                slot = ((b * HEADS + head).to(tl.int64) * max_splits + split) * PARTS + m
                tl.store(part_lse + slot, lse, mask=m_ok)
                tl.store(part + slot[:, None] * DP + d[None, :], result, mask=m_ok[:, None])
        cursor += stop - begin
        b += (head * tiles + first + stop - begin == HEADS * tiles).to(tl.int32)


@triton.jit(do_not_specialize=["max_splits"])
def _merge_kernel(
    cum, cu_q, seq_lens, out, part, part_lse, out_row, out_head, max_splits, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    head = tl.program_id(1)
    m = tl.program_id(2) + tl.arange(0, 1)
    d = tl.arange(0, DP)
    length = tl.load(seq_lens + b)
    q0 = tl.load(cu_q + b)
    queries = tl.load(cu_q + b + 1) - q0
    tiles = (tl.load(cum + b + 1) - tl.load(cum + b)) // HEADS
    low = tl.where(window > 0, tl.maximum(length - queries - window + 1, 0), 0) // _BN
    begin = low // _TILES
    stop = tl.cdiv(low + tiles, _TILES)
    wait_for_previous(PDL)
    if (tl.program_id(2) // GROUP < queries) & (stop - begin > 1):
        merged = tl.zeros([1, DP], tl.float32)
        weight = tl.zeros([1], tl.float32)
        top = tl.full([1], EMPTY, tl.float32)
        base = (b * HEADS + head).to(tl.int64) * max_splits
        for split in tl.range(begin, stop):
            slot = (base + split) * PARTS + m
            lse = tl.load(part_lse + slot)
            result = tl.load(part + slot[:, None] * DP + d[None, :])
            merged, weight, top = _merge(merged, weight, top, result, lse)
        merged = merged / tl.where(weight > 0, weight, 1.0)[:, None]
        o_off = (q0 + m // GROUP).to(tl.int64) * out_row + (head * GROUP + m % GROUP) * out_head
        tl.store(out + o_off[:, None] + d[None, :], merged.to(out.dtype.element_ty), mask=(d < D)[None, :])


@triton.jit
def _prompt_tile(
    b, m0, q, pool, tables, cu_q, seq_lens, out, q_row, q_head, table_row, out_row, out_head, window, scale_log2, cap,
    GROUP: tl.constexpr, CAP: tl.constexpr, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Computes the query rows m0 .. m0 + M of sequence b and this program's kv head."""
    head = tl.program_id(0)
    q0 = tl.load(cu_q + b)
    queries = tl.load(cu_q + b + 1) - q0
    length = tl.load(seq_lens + b)
    m = m0 + tl.arange(0, M)
    d = tl.arange(0, DP)
    token = m // GROUP
    position = length - queries + token
    floor = tl.where(window > 0, position - window, -1)
    mask = (token < queries)[:, None] & (d < D)[None, :]
    q_off = (q0 + token).to(tl.int64) * q_row + (head * GROUP + m % GROUP) * q_head
    qs = tl.load(q + q_off[:, None] + d[None, :], mask=mask, other=0.0)
    table = tables + b.to(tl.int64) * table_row
    base_k = pool.kv + head.to(tl.int64) * pool.kv_head

    # The rows of this tile see keys up to `last`. All rows see all keys of the splits before `full`.
    first = length - queries + m0 // GROUP
    last = tl.cdiv(tl.minimum(length - queries + (m0 + M - 1) // GROUP + 1, length), _BN)
    low = tl.where(window > 0, tl.maximum(first - window + 1, 0), 0) // _BN
    begin = low // _TILES
    full = tl.where(window > 0, begin, (first + 1) // (_BN * _TILES))
    merged = tl.zeros([M, DP], tl.float32)
    weight = tl.zeros([M], tl.float32)
    top = tl.full([M], EMPTY, tl.float32)
    for split in range(begin, full):
        tile = split * _TILES
        result, lse = _split(
            qs, pool, base_k, table, scale_log2, cap, tile, tile + _TILES, length, position, floor,
            False, CAP, M, D, DP, BS, STAGES,
        )  # fmt: skip
        merged, weight, top = _merge(merged, weight, top, result, lse)
    for split in range(full, tl.cdiv(last, _TILES)):
        tile = split * _TILES
        result, lse = _split(
            qs, pool, base_k, table, scale_log2, cap, tl.maximum(tile, low), tl.minimum(tile + _TILES, last), length,
            position, floor, True, CAP, M, D, DP, BS, STAGES,
        )  # fmt: skip
        merged, weight, top = _merge(merged, weight, top, result, lse)
    merged = merged / tl.where(weight > 0, weight, 1.0)[:, None]
    o_off = (q0 + token).to(tl.int64) * out_row + (head * GROUP + m % GROUP) * out_head
    tl.store(out + o_off[:, None] + d[None, :], merged.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["table_row"])
def _prompt_kernel(
    q, pool, tables, cu_q, seq_lens, tiles, out, q_row, q_head, table_row, out_row, out_head, window, scale_log2, cap,
    LISTED: tl.constexpr, GROUP: tl.constexpr, CAP: tl.constexpr, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes prompts. LISTED: a list of tiles; the number of programs does not depend on the list."""
    if LISTED:
        for i in range(tl.program_id(1), tl.load(tiles), tl.num_programs(1)):
            _prompt_tile(
                tl.load(tiles + 1 + 2 * i), tl.load(tiles + 2 + 2 * i), q, pool, tables, cu_q, seq_lens, out, q_row,
                q_head, table_row, out_row, out_head, window, scale_log2, cap, GROUP, CAP, M, D, DP, BS, STAGES,
            )  # fmt: skip
    else:
        b = tl.program_id(2)
        queries = tl.load(cu_q + b + 1) - tl.load(cu_q + b)
        # The last tokens see the most keys, so they start first.
        m0 = (tl.cdiv(queries * GROUP, M) - 1 - tl.program_id(1)) * M
        if m0 >= 0:
            _prompt_tile(
                b, m0, q, pool, tables, cu_q, seq_lens, out, q_row, q_head, table_row, out_row, out_head, window,
                scale_log2, cap, GROUP, CAP, M, D, DP, BS, STAGES,
            )  # fmt: skip


@dataclass(frozen=True)
class FixedDecodePlan:
    """The tiles of one step's decode work, for one window. Fields are those of `DecodePlan`."""

    cum: Tensor
    first_seq: Tensor
    window: int


def _padded(head_dim: int) -> int:
    assert head_dim <= MAX_HEAD_DIM
    return max(16, int(triton.next_power_of_2(head_dim)))


def plan_decode(
    cu_q: Tensor, seq_lens: Tensor, *, num_programs: int, num_kv_heads: int, window: int = 0
) -> FixedDecodePlan:
    """Divides the tiles of a step among programs. Arguments are those of `paged_decode.plan_decode`."""
    num_seqs = seq_lens.shape[0]
    cum = torch.empty(num_seqs + 1, dtype=torch.int32, device=seq_lens.device)
    first_seq = torch.empty(num_programs, dtype=torch.int32, device=seq_lens.device)
    sizes = {"HEADS": num_kv_heads, "BN": TILE, "B": triton.next_power_of_2(num_seqs)}
    _plan_kernel[(num_programs,)](cu_q, seq_lens, cum, first_seq, num_seqs, num_programs, window, **sizes, num_warps=4)
    return FixedDecodePlan(cum, first_seq, window)


def paged_decode(
    q: Tensor,
    layer: LayerKV,
    block_tables: Tensor,
    cu_q: Tensor,
    seq_lens: Tensor,
    plan: FixedDecodePlan,
    *,
    max_query: int,
    scale: float,
    softcap: float = 0.0,
    first: int = 0,
    out: Tensor,
    stages: int = DECODE_STAGES,
) -> Tensor:
    """Computes the attention of 1 to 8 new tokens of each sequence. Arguments are those of `paged_decode.paged_decode`.

    Each launch allocates float32 [B, splits of the longest table, query heads * max_query, D] for partial results.
    """
    assert 1 <= max_query <= MAX_QUERY
    num_kv_heads, dim, num_seqs = layer.num_kv_heads, q.shape[2], seq_lens.shape[0]
    group, padded = q.shape[1] // num_kv_heads, _padded(dim)
    rows = group * max_query
    splits = triton.cdiv(block_tables.shape[1] * layer.block_size, SPLIT)
    part = torch.empty(num_seqs * num_kv_heads * splits * rows, padded, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(part.shape[0], dtype=torch.float32, device=q.device)
    programs = plan.first_seq.shape[0]
    _decode_kernel[(triton.cdiv(rows, ROWS), programs)](
        q, pool_args(layer, torch.int32), block_tables, cu_q, seq_lens, plan.cum, plan.first_seq, out, part, part_lse,
        *q.stride()[:2], block_tables.stride(0), *out.stride()[:2], num_seqs, programs, splits, plan.window, first,
        *softcap_args(scale, softcap),
        HEADS=num_kv_heads, GROUP=group, M=ROWS, PARTS=rows, D=dim, DP=padded, BS=layer.block_size, STAGES=stages,
        CAP=softcap > 0, num_warps=4, enable_fp_fusion=False, **pdl_args(q.device),
    )  # fmt: skip
    _merge_kernel[(num_seqs, num_kv_heads, rows)](
        plan.cum, cu_q, seq_lens, out, part, part_lse, *out.stride()[:2], splits, plan.window,
        HEADS=num_kv_heads, GROUP=group, PARTS=rows, D=dim, DP=padded, num_warps=1, enable_fp_fusion=False,
        **pdl_args(q.device),
    )  # fmt: skip
    return out


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
    sinks: None = None,
    out: Tensor | None = None,
    block_m: int | None = None,
    stages: int = PROMPT_STAGES,
) -> Tensor:
    """Computes causal attention of prompts. Arguments are those of `paged_prefill.paged_prefill`, without sinks."""
    out = torch.empty_like(q) if out is None else out
    rows = max_query * (q.shape[1] // layer.num_kv_heads)
    block_m = block_m or (2 * ROWS if rows > 8 * ROWS else ROWS)
    grid = layer.num_kv_heads, triton.cdiv(rows, block_m), seq_lens.shape[0]
    _launch_prompt(grid, q, layer, block_tables, cu_q, seq_lens, None, window, scale, softcap, out, block_m, stages)
    return out


listed_rows, list_tiles, max_tiles = listing.listed_rows, listing.list_tiles, listing.max_tiles


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
    sinks: None = None,
    out: Tensor,
) -> Tensor:
    """Computes a list of tiles. Arguments are those of `paged_prefill.listed_prefill`, without sinks."""
    group = q.shape[1] // layer.num_kv_heads
    block_m = listed_rows(group, q.shape[2], max_tokens)
    grid = layer.num_kv_heads, triton.cdiv(max_tokens * group, block_m) + listing.EXTRA_PROGRAMS
    sizes = window, scale, softcap, out, block_m, PROMPT_STAGES
    _launch_prompt(grid, q, layer, block_tables, cu_q, seq_lens, tiles, *sizes)
    return out


def _launch_prompt(
    grid: tuple[int, ...],
    q: Tensor,
    layer: LayerKV,
    block_tables: Tensor,
    cu_q: Tensor,
    seq_lens: Tensor,
    tiles: Tensor | None,
    window: int,
    scale: float,
    softcap: float,
    out: Tensor,
    block_m: int,
    stages: int,
) -> None:
    group, dim = q.shape[1] // layer.num_kv_heads, q.shape[2]
    assert q.stride(2) == 1
    _prompt_kernel[grid](
        q, pool_args(layer, torch.int32), block_tables, cu_q, seq_lens, cu_q if tiles is None else tiles, out,
        *q.stride()[:2], block_tables.stride(0), *out.stride()[:2], window, *softcap_args(scale, softcap),
        LISTED=tiles is not None, GROUP=group, CAP=softcap > 0, M=block_m, D=dim, DP=_padded(dim), BS=layer.block_size,
        STAGES=stages, num_warps=4 * block_m // ROWS, enable_fp_fusion=False,
    )  # fmt: skip
