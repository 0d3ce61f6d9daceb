"""Attention over paged latents (MLA in the absorbed form): decode with split keys, and prompts.

All query heads attend to one vector of each token: a latent of `rank` numbers and a rotated key of a few more. The
latent is also the value, so a tile of keys is read once for scores and values, and for all heads of a token.

The rows of a program are (token, head) pairs. Decode splits the keys into equal shares of a line of tiles, with the
plan and the merge of `paged_decode`. Prompts have one program for each tile of rows, or a list of tiles in a captured
step, as in `paged_prefill`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.decode_tiles import EMPTY, LOG2E
from engine.kernels.latent import hopper
from engine.kernels.latent.hopper import LatentTile
from engine.kernels.paged_decode import DecodePlan, DecodeTile, DecodeWorkspace, merge_parts
from engine.kernels.pdl import pdl_args, wait_for_previous
from engine.kv.kv_pool import LayerKV

EXTRA_PROGRAMS = 8  # Programs of a list of tiles, beyond those that one row with all tokens needs.


#: Tiles of the kernel for Hopper, by the largest number of rows that they serve.
HOPPER_TILES = {
    16: LatentTile(16, 64, 2, 4, 1, hopper=True),
    32: LatentTile(32, 64, 2, 4, 1, hopper=True),
    1 << 30: LatentTile(64, 64, 2, 4, 1, hopper=True),
}
#: Tiles of the kernels of this module for bf16 and fp16.
OTHER_TILES = {16: LatentTile(16, 32, 3, 4, 1), 1 << 30: LatentTile(32, 32, 3, 8, 1)}
FLOAT32_TILE = LatentTile(16, 16, 2, 4, 1)


def latent_tile(rows: int, layer: LayerKV) -> LatentTile:
    """Returns the tile for `rows` (token, head) pairs of a sequence."""
    if layer.kv.element_size() == 4:
        return FLOAT32_TILE
    tiles = HOPPER_TILES if hopper.serves(layer) else OTHER_TILES
    return next(tile for most, tile in tiles.items() if rows <= most)


@triton.jit
def _tiles(
    acc, total, best, q_latent, q_rope, base, kv_block, kv_token, table, scale_log2, lo, hi, length, position,
    MASKED: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, BS: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Continues the online softmax over the keys lo..hi."""
    r = tl.arange(0, RP)
    p = tl.arange(0, PP)
    n = tl.arange(0, BN)
    for start in tl.range(lo, hi, BN, num_stages=STAGES):
        pos = start + n
        if MASKED:
            block = tl.load(table + pos // BS, mask=pos < length, other=0).to(tl.int64)
        else:
            block = tl.load(table + pos // BS).to(tl.int64)
        row = base + (block * kv_block + (pos % BS) * kv_token)[:, None]
        if MASKED:
            ok = (pos < length)[:, None]
            latent = tl.load(row + r[None, :], mask=ok & (r < R)[None, :], other=0.0)
            rope = tl.load(row + R + p[None, :], mask=ok & (p < P)[None, :], other=0.0)
        else:
            latent = tl.load(row + r[None, :]) if R == RP else tl.load(row + r[None, :], mask=(r < R)[None, :], other=0)
            rope = tl.load(row + R + p[None, :], mask=(p < P)[None, :], other=0.0)
        s = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        s = tl.dot(q_rope, tl.trans(rope), s, input_precision="ieee")
        s *= scale_log2
        if MASKED:
            s = tl.where(pos[None, :] <= position[:, None], s, -float("inf"))
        top = tl.maximum(best, tl.max(s, 1))
        safe = tl.where(top == -float("inf"), 0.0, top) if MASKED else top
        weights = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(best - safe)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * shrink[:, None], input_precision="ieee")
        best = top
    return acc, total, best


@triton.jit
def _query(q_rows, ok, R: tl.constexpr, RP: tl.constexpr, P: tl.constexpr, PP: tl.constexpr):
    """Loads the rows of queries: [M, RP] for the latents and [M, PP] for the rotated keys."""
    r = tl.arange(0, RP)
    p = tl.arange(0, PP)
    q_latent = tl.load(q_rows[:, None] + r[None, :], mask=ok[:, None] & (r < R)[None, :], other=0.0)
    q_rope = tl.load(q_rows[:, None] + R + p[None, :], mask=ok[:, None] & (p < P)[None, :], other=0.0)
    return q_latent, q_rope


@triton.jit(do_not_specialize=["num_seqs", "table_row"])
def _decode_kernel(
    q, kv, tables, cu_q, seq_lens, cum, first_seq, out, part, part_lse, q_row, q_head, kv_block, kv_token, table_row,
    out_row, out_head, num_seqs, num_programs, scale_log2,
    HEADS: tl.constexpr, M: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
    BS: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes one share for one tile of rows. The shares are those of `paged_decode`."""
    pid = tl.program_id(1)
    work = tl.load(cum + num_seqs).to(tl.int64)
    shares = tl.maximum(tl.minimum(num_programs, work), 1)
    cursor = (pid * work // shares).to(tl.int32)
    end = tl.minimum((pid + 1) * work // shares, work).to(tl.int32)
    b = tl.load(first_seq + pid)
    m = tl.program_id(0) * M + tl.arange(0, M)
    r = tl.arange(0, RP)
    token = m // HEADS
    # The plan is older than the kernel before this one, but queries and new latents come from that kernel.
    wait_for_previous(PDL)
    while cursor < end:
        base = tl.load(cum + b)
        tile_count = tl.load(cum + b + 1) - base
        first = cursor - base
        count = tl.minimum(tile_count - first, end - cursor)
        length = tl.load(seq_lens + b)
        q0 = tl.load(cu_q + b)
        queries = tl.load(cu_q + b + 1) - q0
        m_ok = token < queries
        position = length - queries + token
        rows = q + (q0 + token).to(tl.int64) * q_row + (m % HEADS) * q_head
        q_latent, q_rope = _query(rows, m_ok, R, RP, P, PP)
        acc = tl.zeros([M, RP], tl.float32)
        total = tl.zeros([M], tl.float32)
        best = tl.full([M], -float("inf"), tl.float32)
        stop = tl.where(tl.program_id(0) * M < queries * HEADS, first + count, first)  # without rows: no tiles
        table = tables + b.to(tl.int64) * table_row
        acc, total, best = _tiles(
            acc, total, best, q_latent, q_rope, kv, kv_block, kv_token, table, scale_log2, first * BN,
            stop * BN, length, position, True, R, RP, P, PP, BS, BN, STAGES,
        )  # fmt: skip
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        if count == tile_count:
            place = (q0 + token).to(tl.int64) * out_row + (m % HEADS) * out_head
            tl.store(
                out + place[:, None] + r[None, :], acc.to(out.dtype.element_ty), mask=m_ok[:, None] & (r < R)[None, :]
            )
        else:
            # A share has at most two parts: one that starts in an earlier share, one that continues in a later share.
            slot = (2 * pid + (first == 0).to(tl.int32)).to(tl.int64) * (tl.num_programs(0) * M)
            tl.store(part_lse + slot + m, tl.where(total > 0, best + tl.log2(tl.where(total > 0, total, 1.0)), EMPTY))
            tl.store(part + (slot + m)[:, None] * RP + r[None, :], acc, mask=m_ok[:, None])
        cursor += count
        b += (first + count == tile_count).to(tl.int32)


@triton.jit
def _prompt_tile(
    b, m0, q, kv, tables, cu_q, seq_lens, out, q_row, q_head, kv_block, kv_token, table_row, out_row, out_head,
    scale_log2, HEADS: tl.constexpr, M: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, P: tl.constexpr,
    PP: tl.constexpr, BS: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes the rows m0 .. m0 + M of sequence b."""
    q0 = tl.load(cu_q + b)
    queries = tl.load(cu_q + b + 1) - q0
    length = tl.load(seq_lens + b)
    m = m0 + tl.arange(0, M)
    r = tl.arange(0, RP)
    token = m // HEADS
    position = length - queries + token
    m_ok = token < queries
    rows = q + (q0 + token).to(tl.int64) * q_row + (m % HEADS) * q_head
    q_latent, q_rope = _query(rows, m_ok, R, RP, P, PP)
    # All rows see the keys below full_hi. The keys full_hi..last are causal.
    full_hi = (length - queries + m0 // HEADS + 1) // BN * BN
    last = tl.minimum(length - queries + (m0 + M - 1) // HEADS + 1, length)
    acc = tl.zeros([M, RP], tl.float32)
    total = tl.zeros([M], tl.float32)
    best = tl.full([M], -float("inf"), tl.float32)
    table = tables + b.to(tl.int64) * table_row
    acc, total, best = _tiles(
        acc, total, best, q_latent, q_rope, kv, kv_block, kv_token, table, scale_log2, 0, full_hi, length,
        position, False, R, RP, P, PP, BS, BN, STAGES,
    )  # fmt: skip
    acc, total, best = _tiles(
        acc, total, best, q_latent, q_rope, kv, kv_block, kv_token, table, scale_log2, full_hi, last, length,
        position, True, R, RP, P, PP, BS, BN, STAGES,
    )  # fmt: skip
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    place = (q0 + token).to(tl.int64) * out_row + (m % HEADS) * out_head
    tl.store(out + place[:, None] + r[None, :], acc.to(out.dtype.element_ty), mask=m_ok[:, None] & (r < R)[None, :])


@triton.jit(do_not_specialize=["table_row"])
def _prompt_kernel(
    q, kv, tables, cu_q, seq_lens, out, q_row, q_head, kv_block, kv_token, table_row, out_row, out_head, scale_log2,
    HEADS: tl.constexpr, M: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
    BS: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1)
    queries = tl.load(cu_q + b + 1) - tl.load(cu_q + b)
    # The last tokens see the most keys, so they start first.
    m0 = (tl.cdiv(queries * HEADS, M) - 1 - tl.program_id(0)) * M
    if m0 >= 0:
        _prompt_tile(
            b, m0, q, kv, tables, cu_q, seq_lens, out, q_row, q_head, kv_block, kv_token, table_row, out_row,
            out_head, scale_log2, HEADS, M, R, RP, P, PP, BS, BN, STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["table_row"])
def _listed_kernel(
    q, kv, tables, cu_q, seq_lens, tiles, out, q_row, q_head, kv_block, kv_token, table_row, out_row, out_head,
    scale_log2, HEADS: tl.constexpr, M: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, P: tl.constexpr,
    PP: tl.constexpr, BS: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes a list of tiles. The number of programs does not depend on the list."""
    count = tl.load(tiles)
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        b = tl.load(tiles + 1 + 2 * i)
        m0 = tl.load(tiles + 2 + 2 * i)
        _prompt_tile(
            b, m0, q, kv, tables, cu_q, seq_lens, out, q_row, q_head, kv_block, kv_token, table_row, out_row,
            out_head, scale_log2, HEADS, M, R, RP, P, PP, BS, BN, STAGES,
        )  # fmt: skip


def latent_workspace(tile: LatentTile, heads: int, max_query: int, rank: int, device: torch.device) -> DecodeWorkspace:
    """Allocates the partial results of a decode launch, for up to max_query new tokens of a sequence.

    Several tiles of rows divide the programs among them. On a GPU the programs of a tile are a power of two: with equal
    sequences a share then ends where a sequence ends.
    """
    row_tiles = triton.cdiv(heads * max_query, tile.rows)
    if device.type == "cuda":
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        shares = max(1, tile.programs * sms // row_tiles)
        shares = 1 << shares.bit_length() - 1
    else:
        shares = max(1, 8 // row_tiles)
    size = 2 * shares, row_tiles * tile.rows
    part = torch.empty(*size, _padded(rank), dtype=torch.float32, device=device)
    return DecodeWorkspace(shares, tile.rows, part, torch.empty(size, dtype=torch.float32, device=device))


def decode_tile(tile: LatentTile) -> DecodeTile:
    """Returns the tile as an argument of `plan_decode`."""
    kind = hopper.HopperTile if tile.hopper else DecodeTile
    return kind(tile.keys, tile.stages, tile.warps)


def latent_decode(
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
    out: Tensor,
) -> Tensor:
    """Computes causal attention of the last tokens of each sequence over its paged latents; returns out.

    Args:
        q: [tokens, heads, rank + rope], any token and head strides.
        block_tables: int32 [B, max_blocks].
        cu_q: int32 [B + 1], number of tokens before each sequence.
        seq_lens: int32 [B], number of keys, new tokens included.
        plan: the plan of `paged_decode.plan_decode` with `decode_tile` of the workspace's tile.
        max_query: largest number of tokens of a sequence.
        out: [tokens, heads, rank]. Tokens that belong to no sequence are not written.
    """
    heads, programs, tile = q.shape[1], plan.first_seq.shape[0], plan.tile
    rows, num_seqs = workspace.part.shape[1], seq_lens.shape[0]
    assert heads * max_query <= rows
    if isinstance(tile, hopper.HopperTile):
        hopper.decode(q, layer, block_tables, cu_q, seq_lens, plan, workspace, scale_log2=scale * LOG2E, out=out)
    else:
        _decode_kernel[(rows // workspace.row_tile, programs)](
            q, layer.kv, block_tables, cu_q, seq_lens, plan.cum, plan.first_seq, out, workspace.part,
            workspace.part_lse, *q.stride()[:2], layer.kv.stride(0), layer.kv.stride(3), block_tables.stride(0),
            *out.stride()[:2], num_seqs, programs, scale * LOG2E,
            M=workspace.row_tile, BN=tile.keys, STAGES=tile.stages, num_warps=tile.warps, **_sizes(q, layer),
            **pdl_args(q.device),
        )  # fmt: skip
    merge_parts(plan, workspace, cu_q, out, num_seqs=num_seqs, num_kv_heads=1, max_query=max_query)
    return out


def latent_prefill(
    q: Tensor,
    layer: LayerKV,
    block_tables: Tensor,
    cu_q: Tensor,
    seq_lens: Tensor,
    *,
    max_query: int,
    scale: float,
    out: Tensor,
    tile: LatentTile | None = None,
) -> Tensor:
    """Computes the attention of `latent_decode` for any number of new tokens, without a split of keys."""
    rows = q.shape[1] * max_query
    tile = tile or latent_tile(rows, layer)
    inputs, programs = (q, layer, block_tables, cu_q, seq_lens), triton.cdiv(rows, tile.rows)
    if tile.hopper:
        hopper.prefill(*inputs, programs, tile=tile, scale_log2=scale * LOG2E, out=out)
        return out
    _prompt_kernel[(programs, seq_lens.shape[0])](
        q, layer.kv, block_tables, cu_q, seq_lens, out, *_strides(q, layer, block_tables, out), scale * LOG2E,
        M=tile.rows, BN=tile.keys, STAGES=tile.stages, num_warps=tile.warps, **_sizes(q, layer),
    )  # fmt: skip
    return out


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
    out: Tensor,
) -> Tensor:
    """Computes the attention of `latent_prefill` for a list of tiles on the device, as `paged_prefill.listed_prefill`.

    Args:
        tiles: int32, the result of `paged_prefill.list_tiles` with the rows of `prompt_rows`.
        max_tokens: largest number of tokens in all tiles together.
    """
    rows = q.shape[1] * max_tokens
    tile = latent_tile(rows, layer)
    inputs, programs = (q, layer, block_tables, cu_q, seq_lens), triton.cdiv(rows, tile.rows) + EXTRA_PROGRAMS
    if tile.hopper:
        hopper.prefill(*inputs, programs, tile=tile, scale_log2=scale * LOG2E, out=out, tiles=tiles)
        return out
    _listed_kernel[(programs,)](
        q, layer.kv, block_tables, cu_q, seq_lens, tiles, out, *_strides(q, layer, block_tables, out), scale * LOG2E,
        M=tile.rows, BN=tile.keys, STAGES=tile.stages, num_warps=tile.warps, **_sizes(q, layer),
    )  # fmt: skip
    return out


def _padded(numbers: int) -> int:
    return max(16, int(triton.next_power_of_2(numbers)))


def _sizes(q: Tensor, layer: LayerKV) -> dict[str, int]:
    """Returns the constants of a kernel that follow from the shapes."""
    rank, rope = layer.latent_dim, layer.head_dim - layer.latent_dim
    assert layer.scales is None
    assert q.stride(2) == 1
    assert q.shape[2] == rank + rope
    sizes = {"R": rank, "RP": _padded(rank), "P": rope, "PP": _padded(rope)}
    return {"HEADS": q.shape[1], "BS": layer.block_size, **sizes}


def _strides(q: Tensor, layer: LayerKV, block_tables: Tensor, out: Tensor) -> tuple[int, ...]:
    return *q.stride()[:2], layer.kv.stride(0), layer.kv.stride(3), block_tables.stride(0), *out.stride()[:2]
