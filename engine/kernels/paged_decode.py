"""Split-KV attention of 1 to 8 new tokens per sequence over the paged pool: decode, and verification of drafts.

    sequence, head | 0, 0      | 0, 1      | 1, 0| 1, 1| 2, 0         | 2, 1         |
    tiles of keys  [ ][ ][ ][ ][ ][ ][ ][ ][ ][ ][ ][ ][ ][ ][ ][ ][ ][ ][ ][ ][ ][ ]
    programs       | 0              | 1              | 2              | 3            |

The tiles of BLOCK_N keys are split evenly among a fixed number of programs, so every SM reads the same number of bytes
for any batch (the work split of Stream-K, Osama et al. 2023, applied to FlashDecoding). If a (sequence, head) pair is
split, each part is stored normalised with its log-sum-exp, and a second kernel merges the parts. If the rows (query
heads of a group x new tokens) exceed a tile, several programs take one share, each for one tile of rows.
`DecodePlan` holds the split. It depends on the lengths only, so it is computed once per step for all layers. The host
reads no length, so a captured graph serves any lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import card
from engine.kernels.decode_tiles import EMPTY, add_sink, softcap_args, tiles, tiles_e4m3, warp_tiles
from engine.kernels.pdl import pdl_args, wait_for_previous
from engine.kernels.pool import has_native_e4m3, pool_args
from engine.kv.kv_pool import LayerKV

MAX_QUERY = 8  # Largest number of new tokens of a sequence.
MAX_ROWS = 64  # Largest number of rows in a tile of queries. Head dims above 128 use half of it.
#: Bytes of shared memory of a program for keys and values in flight, where an SM has those of an H100.
#: Two programs share an SM.
SHARED_BYTES = 96 * card.KIB
SHARED_BYTES_OF_H100 = card.SHARED_BYTES[90]
MERGE_TILE = 2048  # How many numbers of partial results one program of the merge holds at once.
MERGE_PROGRAMS = 512  # Number of programs of a merge, if its work can be split into this many.


@triton.jit(do_not_specialize=["num_seqs"])
def _plan_kernel(
    cu_q,
    seq_lens,
    cum,
    first_seq,
    num_seqs,
    num_programs,
    window,
    HEADS: tl.constexpr,
    BN: tl.constexpr,
    B: tl.constexpr,
):
    """Computes the plan: the running sum of tiles per sequence (cum), and each program's first sequence."""
    b = tl.arange(0, B)
    live = b < num_seqs
    length = tl.load(seq_lens + b, mask=live, other=0)
    queries = tl.load(cu_q + b + 1, mask=live, other=0) - tl.load(cu_q + b, mask=live, other=0)
    low = tl.where(window > 0, tl.maximum(length - queries - window + 1, 0), 0) // BN
    # A row without new tokens has no tiles. It must come after all rows with tokens: no share may begin in it.
    tiles = tl.where(live & (queries > 0), tl.maximum(tl.cdiv(length, BN) - low, 1), 0) * HEADS
    ends = tl.cumsum(tiles, 0)
    pid = tl.program_id(0)
    if pid == 0:
        tl.store(cum, 0)
        tl.store(cum + 1 + b, ends, mask=live)
    work = tl.sum(tiles, 0).to(tl.int64)
    start = pid * work // tl.maximum(tl.minimum(num_programs, work), 1)
    tl.store(first_seq + pid, tl.sum((live & (ends <= start)).to(tl.int32), 0))


@triton.jit(do_not_specialize=["num_seqs", "table_row"])
def _decode_kernel(
    q, pool, tables, cu_q, seq_lens, cum, first_seq, sinks, out, part, part_lse, q_row, q_head, table_row, out_row,
    out_head, num_seqs, num_programs, window, first_key, scale_log2, cap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, FP8: tl.constexpr, CAP: tl.constexpr, NATIVE: tl.constexpr,
    SINKS: tl.constexpr, ONE: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes one share. WARPS > 0: each warp has keys of its own."""
    pid = tl.program_id(1)
    work = tl.load(cum + num_seqs).to(tl.int64)
    shares = tl.maximum(tl.minimum(num_programs, work), 1)
    cursor = (pid * work // shares).to(tl.int32)
    end = tl.minimum((pid + 1) * work // shares, work).to(tl.int32)
    b = tl.load(first_seq + pid)

    m = tl.program_id(0) * M + tl.arange(0, M)
    d = tl.arange(0, DP)
    d_ok = d < D
    # The plan is older than the kernel before this one, but q and the new keys come from that kernel.
    wait_for_previous(PDL)
    while cursor < end:
        base = tl.load(cum + b)
        tile_count = (tl.load(cum + b + 1) - base) // HEADS
        head = (cursor - base) // tile_count
        first = (cursor - base) % tile_count
        count = tl.minimum(tile_count - first, end - cursor)

        length = tl.load(seq_lens + b)
        q0 = tl.load(cu_q + b)
        queries = tl.load(cu_q + b + 1) - q0
        token = m // GROUP
        m_ok = token < queries
        position = length - queries + token
        low = tl.where(window > 0, tl.maximum(length - queries - window + 1, 0), 0) // BN
        floor = tl.maximum(tl.where(window > 0, position - window, -1), first_key - 1)
        q_rows = q + (q0 + token).to(tl.int64) * q_row + (head * GROUP + m % GROUP) * q_head
        table = tables + b.to(tl.int64) * table_row
        base_k = pool.kv + head.to(tl.int64) * pool.kv_head
        begin = low + first
        stop = tl.where(tl.program_id(0) * M < queries * GROUP, begin + count, begin)  # without rows: no tile_count
        base_s = pool.scales + head.to(tl.int64) * pool.scale_head
        if WARPS > 0:
            acc, total, best = warp_tiles(
                q_rows, m_ok, pool, base_k, base_s, table, scale_log2, cap, begin, stop, length, position, floor,
                M, D, DP, BS, BN, STAGES, CAP, FP8, NATIVE, ONE, WARPS,
            )  # fmt: skip
        elif FP8:
            acc, total, best = tiles_e4m3(
                q_rows, m_ok, pool, base_k, base_s, table, scale_log2, cap, begin, stop, length, position, floor,
                M, D, DP, BS, BN, STAGES, CAP, NATIVE,
            )  # fmt: skip
        else:
            acc, total, best = tiles(
                q_rows, m_ok, pool, base_k, table, scale_log2, cap, begin, stop, length, position, floor,
                M, D, DP, BS, BN, STAGES, CAP,
            )  # fmt: skip

        divisor = tl.where(total > 0, total, 1.0)
        if SINKS:  # parts have no sink; their merge adds it
            divisor = tl.where(count == tile_count, add_sink(divisor, best, sinks, head * GROUP + m % GROUP), divisor)
        acc = acc / divisor[:, None]
        if count == tile_count:
            o_off = (q0 + token).to(tl.int64) * out_row + (head * GROUP + m % GROUP) * out_head
            tl.store(
                out + o_off[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=m_ok[:, None] & d_ok[None, :]
            )
        else:
            # A share has at most two parts: one that starts in an earlier share, one that continues in a later share.
            slot = (2 * pid + (first == 0).to(tl.int32)).to(tl.int64) * (tl.num_programs(0) * M)
            tl.store(part_lse + slot + m, tl.where(total > 0, best + tl.log2(tl.where(total > 0, total, 1.0)), EMPTY))
            tl.store(part + (slot + m)[:, None] * DP + d[None, :], acc, mask=m_ok[:, None])
        cursor += count
        b += (head * tile_count + first + count == HEADS * tile_count).to(tl.int32)


@triton.jit(do_not_specialize=["num_seqs"])
def _merge_kernel(
    cum, cu_q, sinks, out, part, part_lse, out_row, out_head, num_seqs, num_programs,
    HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr,
    SPLITS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    head = tl.program_id(1)
    work = tl.load(cum + num_seqs).to(tl.int64)
    base = tl.load(cum + b)
    tiles = (tl.load(cum + b + 1) - base) // HEADS
    shares = tl.minimum(num_programs, work)
    work = tl.maximum(work, 1)  # a step without rows has no shares
    start = (base + head * tiles).to(tl.int64)
    p0 = (((start + 1) * shares - 1) // work).to(tl.int32)
    p1 = (((start + tiles) * shares - 1) // work).to(tl.int32)
    q0 = tl.load(cu_q + b)
    m = tl.program_id(2) // (DP // DIMS) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(2) % (DP // DIMS) * DIMS + tl.arange(0, DIMS)
    m_ok = m // GROUP < tl.load(cu_q + b + 1) - q0
    wait_for_previous(PDL)
    if p0 != p1:
        i = tl.arange(0, SPLITS)
        best = tl.full([ROWS], EMPTY, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIMS], tl.float32)
        for p in range(p0, p1 + 1, SPLITS):
            ok = (p + i <= p1)[:, None] & m_ok[None, :]
            slot = ((2 * (p + i) + (p + i == p0)) * M)[:, None] + m[None, :]
            lse = tl.load(part_lse + slot, mask=ok, other=EMPTY)
            rows = tl.load(part + slot[:, :, None] * DP + d[None, None, :], mask=ok[:, :, None], other=0.0)
            top = tl.maximum(best, tl.max(lse, 0))
            weight = tl.where(lse > EMPTY, tl.exp2(lse - top[None, :]), 0.0)
            shrink = tl.exp2(best - top)
            acc = acc * shrink[:, None] + tl.sum(rows * weight[:, :, None], 0)
            total = total * shrink + tl.sum(weight, 0)
            best = top
        if SINKS:  # once per row, not once per part
            total = add_sink(total, best, sinks, head * GROUP + m % GROUP)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        o_off = (q0 + m // GROUP).to(tl.int64) * out_row + (head * GROUP + m % GROUP) * out_head
        tl.store(out + o_off[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=m_ok[:, None] & (d < D)[None, :])


@dataclass(frozen=True)
class DecodeTile:
    """How a program of the split-KV kernel computes its share."""

    keys: int  # Number of keys in a tile.
    stages: int  # Number of stages of the software pipeline. Block ids take half of them.
    warps: int = 4  # Number of warps of a program.
    per_warp: bool = False  # Each warp has keys and a softmax of its own (`warp_tiles`).
    shares: float = 1.0  # Number of shares over `DecodeWorkspace.num_programs`, up to 2.


@dataclass(frozen=True)
class DecodePlan:
    """The split of one step's decode work into equal shares, for one window."""

    cum: Tensor  # int32 [B + 1], the number of tiles before each sequence.
    first_seq: Tensor  # int32 [programs], the sequence in which each program's share starts.
    window: int  # Number of tokens that a query sees, itself included. 0: all.
    tile: DecodeTile


@dataclass(frozen=True)
class DecodeWorkspace:
    """The buffers for the partial results of one launch, reused by all layers."""

    num_programs: int  # Number of programs of four warps that run at once.
    row_tile: int  # Number of rows in a tile of queries; divides `rows`.
    part: Tensor  # fp32 [4 * num_programs, rows, padded head dim], normalised weighted sums of values.
    part_lse: Tensor  # fp32 [4 * num_programs, rows], log-sum-exp in units of log2.


def _padded(head_dim: int) -> int:
    """Returns the head dim of a tile: a power of two. tl.dot accepts half of it as well."""
    return max(32, int(triton.next_power_of_2(head_dim)))


def decode_workspace(
    num_programs: int, num_heads: int, num_kv_heads: int, max_query: int, head_dim: int, device: torch.device
) -> DecodeWorkspace:
    """Allocates the workspace.

    Args:
        num_programs: number of programs that run concurrently. Several tiles of rows divide the programs among them.
        max_query: largest number of new tokens of a sequence.
    """
    assert 1 <= max_query <= MAX_QUERY
    rows, dim = num_heads // num_kv_heads * max_query, _padded(head_dim)
    row_tile = min(max(16, triton.next_power_of_2(rows)), MAX_ROWS if dim <= 128 else MAX_ROWS // 2)
    row_tiles = triton.cdiv(rows, row_tile)
    programs = max(1, num_programs // row_tiles)
    part = torch.empty(4 * programs, row_tiles * row_tile, dim, dtype=torch.float32, device=device)
    part_lse = torch.empty(4 * programs, row_tiles * row_tile, dtype=torch.float32, device=device)
    return DecodeWorkspace(programs, row_tile, part, part_lse)


def decode_tile(rows: int, head_dim: int, itemsize: int, shared_bytes: int, num_seqs: int) -> DecodeTile:
    """Returns the tile that was fastest on an H200 (`docs/kernels.md`). It leaves room for a second program.

    Args:
        rows: rows of a tile of queries.
        itemsize: bytes of a cache element.
        shared_bytes: bytes of shared memory that a program may have on this card.
        num_seqs: number of sequences.
    """
    budget = shared_bytes * SHARED_BYTES // SHARED_BYTES_OF_H100

    def tile_bytes(keys: int) -> int:
        return 2 * keys * _padded(head_dim) * itemsize

    if rows <= 16 and itemsize == 1 and head_dim <= 128:
        # One sequence: larger tiles and half of the shares, because filling the pipeline takes noticeable time.
        if num_seqs == 1 and 3 * tile_bytes(128) <= budget:
            return DecodeTile(128, 6, per_warp=True, shares=0.5)
        return DecodeTile(64, 6, warps=2, per_warp=True, shares=2.0)
    block_n = 128 if (rows > 16 or itemsize == 1) and tile_bytes(128) <= budget else 64
    if tile_bytes(block_n) > budget:
        block_n = 32
    shares = 0.5 if num_seqs == 1 and rows > 16 else 1.0
    return DecodeTile(block_n, 3 + max(1, min(3, budget // tile_bytes(block_n))), shares=shares)


def concurrent_programs(device: torch.device) -> int:
    """Returns the size of a launch: how many programs run concurrently, rounded down to a power of two.

    The power of two gains more than the unused SMs lose: with a uniform batch, shares then end where a pair ends.
    """
    if device.type != "cuda":
        return 8
    return 1 << (2 * torch.cuda.get_device_properties(device).multi_processor_count).bit_length() - 1


def plan_decode(
    cu_q: Tensor,
    seq_lens: Tensor,
    workspace: DecodeWorkspace,
    *,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    window: int = 0,
    tile: DecodeTile | None = None,
) -> DecodePlan:
    """Computes the split of a step, in one launch.

    On Hopper another kernel must run between this one and `paged_decode` (the KV write does), because `paged_decode`
    reads the plan before it waits for the kernel before it.

    Args:
        cu_q: int32 [B + 1], number of tokens before each sequence.
        seq_lens: int32 [B], number of keys, new tokens included.
        itemsize: bytes of an element of the KV cache.
        window: number of keys that a token sees, itself included. 0: all.
        tile: how programs compute their shares. None selects it.
    """
    num_seqs = seq_lens.shape[0]
    if tile is None:
        shared_bytes = card.shared_bytes(seq_lens.device)
        tile = decode_tile(workspace.row_tile, head_dim, itemsize, shared_bytes, num_seqs)
    assert tile.shares <= 2
    programs = max(1, int(workspace.num_programs * tile.shares))
    cum = torch.empty(num_seqs + 1, dtype=torch.int32, device=seq_lens.device)
    first_seq = torch.empty(programs, dtype=torch.int32, device=seq_lens.device)
    _plan_kernel[(programs,)](
        cu_q,
        seq_lens,
        cum,
        first_seq,
        num_seqs,
        programs,
        window,
        HEADS=num_kv_heads,
        BN=tile.keys,
        B=triton.next_power_of_2(num_seqs),
        num_warps=4,
    )
    return DecodePlan(cum, first_seq, window, tile)


def paged_decode(
    q: Tensor,
    layer: LayerKV,
    block_tables: Tensor,
    cu_q: Tensor,
    seq_lens: Tensor,
    plan: DecodePlan,
    workspace: DecodeWorkspace,
    *,
    max_query: int,
    scale: float,
    softcap: float = 0.0,
    first: int = 0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Computes causal attention of the last tokens of each sequence over its paged keys and values.

    The keys include the new tokens. Returns out, [tokens, heads, D]. Tokens that belong to no sequence are not written.

    Args:
        q: [tokens, heads, D], any token and head strides.
        block_tables: int32 [B, max_blocks].
        cu_q: int32 [B + 1], number of tokens before each sequence.
        seq_lens: int32 [B], number of keys, new tokens included.
        max_query: largest number of tokens of a sequence, 1..8.
        softcap: bound of the scores. 0: unbounded.
        first: position of the first key that queries see.
        sinks: [heads], a logit of each head that takes part in the softmax, without a value.
        out: result. None allocates it.
    """
    num_heads, dim = q.shape[1], q.shape[2]
    num_kv_heads = layer.num_kv_heads
    group = num_heads // num_kv_heads
    assert num_heads == group * num_kv_heads
    assert q.stride(2) == 1
    dim_padded, num_seqs, programs = _padded(dim), seq_lens.shape[0], plan.first_seq.shape[0]
    row_tile, rows = workspace.row_tile, workspace.part.shape[1]
    assert group * max_query <= rows
    assert workspace.part.shape[2] == dim_padded
    out = torch.empty_like(q) if out is None else out
    tile = plan.tile
    per_warp = tile.per_warp and q.dtype != torch.float32  # fp32 products have no tensor cores, so no tiles of warps
    _decode_kernel[(rows // row_tile, programs)](
        q, pool_args(layer, torch.int32, torch.int16), block_tables, cu_q, seq_lens, plan.cum, plan.first_seq,
        q if sinks is None else sinks, out, workspace.part, workspace.part_lse, *q.stride()[:2],
        block_tables.stride(0), *out.stride()[:2],
        num_seqs, programs, plan.window, first, *softcap_args(scale, softcap),
        HEADS=num_kv_heads, GROUP=group, M=row_tile, D=dim, DP=dim_padded, BS=layer.block_size, BN=tile.keys,
        STAGES=tile.stages, FP8=layer.scales is not None, CAP=softcap > 0, NATIVE=has_native_e4m3(),
        SINKS=sinks is not None, ONE=max_query == 1, WARPS=tile.warps if per_warp else 0,
        num_warps=tile.warps, **pdl_args(q.device),
    )  # fmt: skip
    merge_parts(
        plan, workspace, cu_q, out, num_seqs=num_seqs, num_kv_heads=num_kv_heads, max_query=max_query, sinks=sinks
    )
    return out


def merge_parts(
    plan: DecodePlan,
    workspace: DecodeWorkspace,
    cu_q: Tensor,
    out: Tensor,
    *,
    num_seqs: int,
    num_kv_heads: int,
    max_query: int,
    sinks: Tensor | None = None,
) -> None:
    """Merges the parts of split pairs into out [tokens, heads, D]. Arguments are those of `paged_decode`."""
    num_heads, dim = out.shape[1:]
    group, programs = num_heads // num_kv_heads, plan.first_seq.shape[0]
    rows, dim_padded = workspace.part.shape[1:]
    splits, merged, dims = _merge_shape(programs, num_seqs * num_kv_heads, group * max_query, dim_padded)
    _merge_kernel[(num_seqs, num_kv_heads, triton.cdiv(group * max_query, merged) * (dim_padded // dims))](
        plan.cum, cu_q, out if sinks is None else sinks, out, workspace.part, workspace.part_lse, *out.stride()[:2],
        num_seqs, programs,
        HEADS=num_kv_heads, GROUP=group, M=rows, ROWS=merged, DIMS=dims, SPLITS=splits, D=dim, DP=dim_padded,
        SINKS=sinks is not None, num_warps=1 if splits * merged * dims <= MERGE_TILE else 4, **pdl_args(out.device),
    )  # fmt: skip


def _merge_shape(programs: int, pairs: int, rows: int, dim: int) -> tuple[int, int, int]:
    """Returns parts, rows and dims of a tile of the merge.

    A tile has all parts of a pair (if pairs are equally long) and few rows, so that one warp computes it. With few
    pairs the tiles are smaller, so that more programs read the parts.
    """
    parts = min(64, max(2, int(triton.next_power_of_2(triton.cdiv(programs, pairs)))))
    tile, dims = int(triton.next_power_of_2(rows)), dim
    while tile > 1 and (parts * tile * dims > MERGE_TILE or triton.cdiv(rows, tile) * pairs < MERGE_PROGRAMS):
        tile //= 2
    while dims > 64 and parts * tile * dims > MERGE_TILE:
        dims //= 2
    return parts, tile, dims
