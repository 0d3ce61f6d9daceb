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

from engine.kernels.decode_tiles import EMPTY, softcap_args, tiles, tiles_e4m3, warp_tiles
from engine.kernels.pdl import pdl_args, wait_for_previous
from engine.kernels.pool import has_native_e4m3, pool_args
from engine.kv.kv_pool import LayerKV

MAX_QUERY = 8  # Largest number of new tokens of a sequence.
MAX_ROWS = 64  # Largest number of rows in a tile of queries. Head dims above 128 use half of it.
SHARED_BYTES = 96 * 1024  # Bytes of shared memory of a program for keys and values in flight. Two programs share an SM.
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


@triton.jit
def _prefetch(
    pool, base_k, table, begin, stop, length, BLOCKS: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, BN: tl.constexpr
):
    """Brings the first BLOCKS blocks of a share into the L2 cache. They need not be complete: L2 stays coherent."""
    i = tl.arange(0, 2 * BLOCKS)
    pos = begin * BN + i // 2 * BS
    ok = pos < tl.minimum(stop * BN, length)
    block = tl.load(table + pos // BS, mask=ok, other=0).to(tl.int64)
    place = (base_k + block * pool.kv_block + i % 2 * pool.kv_which).to(tl.int64)
    size = tl.where(ok, BS * D * (pool.kv.dtype.element_ty.primitive_bitwidth // 8), 0)
    tl.inline_asm_elementwise(
        """{
        .reg .pred live;
        setp.ne.b32 live, $2, 0;
        @live cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r",
        [place, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def add_sink(total, best, sinks, head):
    """Returns the sum of weights, relative to 2^best, with the sink of each row's head: a logit without a value."""
    return total + tl.exp2(tl.load(sinks + head).to(tl.float32) * 1.4426950408889634 - best)


@triton.jit
def _merge_parts(
    part, part_lse, p0, p1, m, m_ok, d, slot_rows, sinks, head,
    ROWS: tl.constexpr, DIMS: tl.constexpr, SPLITS: tl.constexpr, DP: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Returns attention of the rows m and the dims d over all keys, from the parts of the shares p0..p1."""
    i = tl.arange(0, SPLITS)
    best = tl.full([ROWS], EMPTY, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    for p in range(p0, p1 + 1, SPLITS):
        ok = (p + i <= p1)[:, None] & m_ok[None, :]
        slot = ((2 * (p + i) + (p + i == p0)) * slot_rows)[:, None] + m[None, :]
        # The parts come from other SMs, so this SM's L1 cache is passed over.
        lse = tl.load(part_lse + slot, mask=ok, other=EMPTY, cache_modifier=".cg")
        place = part + slot[:, :, None] * DP + d[None, None, :]
        rows = tl.load(place, mask=ok[:, :, None], other=0.0, cache_modifier=".cg")
        top = tl.maximum(best, tl.max(lse, 0))
        weight = tl.where(lse > EMPTY, tl.exp2(lse - top[None, :]), 0.0)
        shrink = tl.exp2(best - top)
        acc = acc * shrink[:, None] + tl.sum(rows * weight[:, :, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        best = top
    if SINKS:  # once per row, not once per part
        total = add_sink(total, best, sinks, head)
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit(do_not_specialize=["num_seqs", "num_programs", "table_row"])
def _decode_kernel(
    q, pool, tables, cu_q, seq_lens, cum, first_seq, sinks, out, part, part_lse, q_row, q_head, table_row, out_row,
    out_head, num_seqs, num_programs, window, first_key, scale_log2, cap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, FP8: tl.constexpr, CAP: tl.constexpr, NATIVE: tl.constexpr,
    ONE: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr, PREFETCH: tl.constexpr, SINKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Computes one share. WARPS > 0: by `warp_tiles`. A tile of queries has N rows of the M that it has in `part`."""
    pid = tl.program_id(1)
    work = tl.load(cum + num_seqs).to(tl.int64)
    shares = tl.maximum(tl.minimum(num_programs, work), 1)
    cursor = (pid * work // shares).to(tl.int32)
    end = tl.minimum((pid + 1) * work // shares, work).to(tl.int32)
    b = tl.load(first_seq + pid)

    m = tl.program_id(0) * M + tl.arange(0, N)
    d = tl.arange(0, DP)
    d_ok = d < D
    if PREFETCH > 0:
        if cursor < end:
            base = tl.load(cum + b)
            tile_count = (tl.load(cum + b + 1) - base) // HEADS
            length = tl.load(seq_lens + b)
            queries = tl.load(cu_q + b + 1) - tl.load(cu_q + b)
            begin = tl.where(window > 0, tl.maximum(length - queries - window + 1, 0), 0) // BN
            begin += (cursor - base) % tile_count
            base_k = pool.kv + ((cursor - base) // tile_count).to(tl.int64) * pool.kv_head
            stop = begin + tl.minimum(tile_count - (cursor - base) % tile_count, end - cursor)
            table = tables + b.to(tl.int64) * table_row
            _prefetch(pool, base_k, table, begin, stop, length, PREFETCH, D // 2 if FP8 else D, BS, BN)
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
        base_s = pool.scales + head.to(tl.int64) * pool.scale_head
        begin = low + first
        stop = tl.where(tl.program_id(0) * M < queries * GROUP, begin + count, begin)  # without rows: no tiles
        if WARPS > 0:
            acc, total, best = warp_tiles(
                q_rows, m_ok, pool, base_k, base_s, table, scale_log2, cap, begin, stop, length, position, floor,
                N, D, DP, BS, BN, STAGES, CAP, FP8, NATIVE, ONE, WARPS,
            )  # fmt: skip
        elif FP8:
            acc, total, best = tiles_e4m3(
                q_rows, m_ok, pool, base_k, base_s, table, scale_log2, cap, begin, stop, length, position, floor,
                N, D, DP, BS, BN, STAGES, CAP, NATIVE,
            )  # fmt: skip
        else:
            acc, total, best = tiles(
                q_rows, m_ok, pool, base_k, table, scale_log2, cap, begin, stop, length, position, floor,
                N, D, DP, BS, BN, STAGES, CAP,
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


@triton.jit(do_not_specialize=["num_seqs", "num_programs"])
def _merge_kernel(
    cum, cu_q, sinks, out, part, part_lse, out_row, out_head, num_seqs, num_programs,
    HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr,
    SPLITS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SINKS: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL and EARLY:  # the next kernel waits for this one, which waits for the parts
        tl.extra.cuda.gdc_launch_dependents()
    b = tl.program_id(0)
    head = tl.program_id(1)
    work = tl.load(cum + num_seqs).to(tl.int64)
    base = tl.load(cum + b)
    tile_count = (tl.load(cum + b + 1) - base) // HEADS
    shares = tl.minimum(num_programs, work)
    work = tl.maximum(work, 1)  # a step without rows has no shares
    start = (base + head * tile_count).to(tl.int64)
    p0 = (((start + 1) * shares - 1) // work).to(tl.int32)
    p1 = (((start + tile_count) * shares - 1) // work).to(tl.int32)
    q0 = tl.load(cu_q + b)
    m = tl.program_id(2) // (DP // DIMS) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(2) % (DP // DIMS) * DIMS + tl.arange(0, DIMS)
    m_ok = m // GROUP < tl.load(cu_q + b + 1) - q0
    wait_for_previous(PDL)
    if p0 != p1:
        acc = _merge_parts(
            part, part_lse, p0, p1, m, m_ok, d, M, sinks, head * GROUP + m % GROUP, ROWS, DIMS, SPLITS, DP, SINKS
        )
        o_off = (q0 + m // GROUP).to(tl.int64) * out_row + (head * GROUP + m % GROUP) * out_head
        tl.store(out + o_off[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=m_ok[:, None] & (d < D)[None, :])


@dataclass(frozen=True)
class DecodeTile:
    """How a program of the split-KV kernel computes its share."""

    keys: int  # Number of keys in a tile.
    stages: int  # Number of stages of the software pipeline.
    warps: int = 4  # Number of warps of a program.
    per_warp: bool = False  # Each warp has keys and a softmax of its own (`warp_tiles`).
    prefetch: int = 0  # Blocks of a share that are fetched to L2 before the kernel before this one has ended.
    early: bool = False  # The merge allows the next launch before the decode kernel has ended.
    max_registers: int | None = None  # Registers of a thread. None: the compiler decides.


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

    num_programs: int  # Number of shares of a launch.
    row_tile: int  # Number of rows in a tile of queries; divides `rows`.
    part: Tensor  # fp32 [2 * num_programs, rows, padded head dim], normalised weighted sums of values.
    part_lse: Tensor  # fp32 [2 * num_programs, rows], log-sum-exp in units of log2.


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
    part = torch.empty(2 * programs, row_tiles * row_tile, dim, dtype=torch.float32, device=device)
    part_lse = torch.empty(2 * programs, row_tiles * row_tile, dtype=torch.float32, device=device)
    return DecodeWorkspace(programs, row_tile, part, part_lse)


def decode_tile(rows: int, head_dim: int, itemsize: int) -> DecodeTile:
    """Returns the tile that was fastest on an H200 among those that fit the shared memory of half an SM.

    `rows` are the rows of a tile of queries, `itemsize` the bytes of a cache element.
    """

    def tile_bytes(keys: int) -> int:
        return 2 * keys * _padded(head_dim) * itemsize

    block_n = 128 if (rows > 16 or itemsize == 1) and tile_bytes(128) <= SHARED_BYTES else 64
    if tile_bytes(block_n) > SHARED_BYTES:
        block_n = 32
    return DecodeTile(block_n, 3 + max(1, min(3, SHARED_BYTES // tile_bytes(block_n))))


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
    programs: int | None = None,
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
        programs: number of shares, at most that of the workspace. None selects it.
    """
    num_seqs = seq_lens.shape[0]
    # With one sequence the shares are so short that filling the pipeline takes noticeable time: halve their number.
    if programs is None:
        programs = workspace.num_programs if num_seqs > 1 else max(1, workspace.num_programs // 2)
    assert programs <= workspace.num_programs
    tile = tile or decode_tile(workspace.row_tile, head_dim, itemsize)
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
    tile, pairs, query_rows = plan.tile, num_seqs * num_kv_heads, group * max_query
    pdl, block_bytes = pdl_args(q.device), layer.block_size * dim * layer.kv.element_size()
    prefetch = tile.prefetch if pdl["PDL"] and layer.kv.stride(3) == dim and block_bytes % 16 == 0 else 0
    rows_in_tile = min(row_tile, max(8, int(triton.next_power_of_2(query_rows)))) if tile.per_warp else row_tile
    options = {} if tile.max_registers is None else {"maxnreg": tile.max_registers}
    _decode_kernel[(rows // row_tile, programs)](
        q, pool_args(layer, torch.int32, torch.int16), block_tables, cu_q, seq_lens, plan.cum, plan.first_seq,
        q if sinks is None else sinks, out, workspace.part, workspace.part_lse, *q.stride()[:2], block_tables.stride(0),
        *out.stride()[:2], num_seqs, programs, plan.window, first, *softcap_args(scale, softcap),
        HEADS=num_kv_heads, GROUP=group, M=row_tile, D=dim, DP=dim_padded, BS=layer.block_size, BN=tile.keys,
        STAGES=tile.stages, FP8=layer.scales is not None, CAP=softcap > 0, NATIVE=has_native_e4m3(),
        ONE=max_query == 1, N=rows_in_tile, WARPS=tile.warps if tile.per_warp else 0, PREFETCH=prefetch,
        SINKS=sinks is not None,
        num_warps=tile.warps, **options, **pdl,
    )  # fmt: skip
    splits, merged, dims = _merge_shape(programs, pairs, query_rows, dim_padded)
    _merge_kernel[(num_seqs, num_kv_heads, triton.cdiv(query_rows, merged) * (dim_padded // dims))](
        plan.cum, cu_q, q if sinks is None else sinks, out, workspace.part, workspace.part_lse, *out.stride()[:2],
        num_seqs, programs,
        HEADS=num_kv_heads, GROUP=group, M=rows, ROWS=merged, DIMS=dims, SPLITS=splits, D=dim, DP=dim_padded,
        SINKS=sinks is not None, EARLY=tile.early, num_warps=1 if splits * merged * dims <= MERGE_TILE else 4,
        **pdl,
    )  # fmt: skip
    return out


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
