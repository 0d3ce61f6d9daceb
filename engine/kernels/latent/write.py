"""Writes new latents into the paged KV pool, and rotates the queries that will attend to them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.pdl import pdl_args, wait_for_previous
from engine.kv.kv_pool import LayerKV

HEAD_TILE = 32  # Query heads that a program rotates.


@triton.jit
def _rotated(x, cos, sin, ok, P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Loads pairs of dimensions from pointers x (to the first dimension of heads). Returns both halves, rotated."""
    i = tl.arange(0, triton.next_power_of_2(P // 2))[None, :]
    step: tl.constexpr = 2 if INTERLEAVED else 1
    other: tl.constexpr = 1 if INTERLEAVED else P // 2
    a = tl.load(x + step * i, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(x + step * i + other, mask=ok, other=0.0).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _write_kernel(
    latent, norm, kv, query, rotated, positions, slot_mapping, cos_table, sin_table, latent_row, kv_block, kv_token,
    query_row, query_head, rotated_row, rotated_head, table_row, eps,
    HEADS: tl.constexpr, HB: tl.constexpr, R: tl.constexpr, P: tl.constexpr, BS: tl.constexpr,
    INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first program of a token writes its latent, the others rotate queries."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, triton.next_power_of_2(P // 2))[None, :]
    half = i < P // 2
    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    cos = tl.load(cos_table + position * table_row + i, mask=half, other=0.0).to(tl.float32)
    sin = tl.load(sin_table + position * table_row + i, mask=half, other=0.0).to(tl.float32)
    # positions and slot_mapping are made once per step, before the products that compute latent and query.
    wait_for_previous(PDL)
    if tl.program_id(1) == 0:
        if slot >= 0:
            r = tl.arange(0, triton.next_power_of_2(R))
            x = tl.load(latent + token * latent_row + r, mask=r < R, other=0.0).to(tl.float32)
            x = (x * tl.rsqrt(tl.sum(x * x, 0) / R + eps)).to(latent.dtype.element_ty).to(tl.float32)
            x *= tl.load(norm + r, mask=r < R, other=0.0).to(tl.float32)
            cell = kv + slot // BS * kv_block + slot % BS * kv_token
            tl.store(cell + r, x.to(kv.dtype.element_ty), mask=r < R)
            first, second = _rotated(latent + token * latent_row + R, cos, sin, half, P, INTERLEAVED)
            tl.store(cell + R + i, first.to(kv.dtype.element_ty), mask=half)
            tl.store(cell + R + P // 2 + i, second.to(kv.dtype.element_ty), mask=half)
    else:
        h = (tl.program_id(1) - 1) * HB + tl.arange(0, HB)[:, None]
        ok = (h < HEADS) & half
        first, second = _rotated(query + token * query_row + h * query_head, cos, sin, ok, P, INTERLEAVED)
        place = rotated + token * rotated_row + h * rotated_head
        tl.store(place + i, first.to(rotated.dtype.element_ty), mask=ok)
        tl.store(place + P // 2 + i, second.to(rotated.dtype.element_ty), mask=ok)


def latent_write(
    latent: Tensor,
    norm: Tensor,
    eps: float,
    layer: LayerKV,
    positions: Tensor,
    slot_mapping: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool,
    query: Tensor | None = None,
    rotated: Tensor | None = None,
) -> None:
    """Normalises latents, rotates their keys, and writes both to the pool; rotates queries.

    With PDL (pdl.py), only latent and query may come from the kernel before this one; all other arguments are older.

    Args:
        latent: [tokens, rank + rope], the projection.
        norm: [rank], weight of the norm.
        positions: integer [tokens].
        slot_mapping: integer [tokens], block * block_size + offset of each token; -1 writes nothing.
        cos, sin: [max_position, rope / 2].
        interleaved: dimension 2 * i rotates with 2 * i + 1 and they become i and i + rope / 2. False: i rotates with
            i + rope / 2.
        query: [tokens, heads, rope], the part of each query head that rotates. None: there are no queries.
        rotated: [tokens, heads, rope], gets the rotated queries. It may be a part of a larger tensor.
    """
    rank = layer.latent_dim
    rope = layer.head_dim - rank
    assert latent.shape[1] == rank + rope
    assert latent.stride(1) == norm.stride(0) == cos.stride(1) == sin.stride(1) == 1
    assert (query is None) == (rotated is None)
    heads = 0 if query is None else query.shape[1]
    query, rotated = (latent, latent) if query is None or rotated is None else (query, rotated)
    tile = min(HEAD_TILE, int(triton.next_power_of_2(max(1, heads))))
    _write_kernel[(latent.shape[0], 1 + triton.cdiv(heads, tile))](
        latent, norm, layer.kv, query, rotated, positions, slot_mapping, cos, sin, latent.stride(0),
        layer.kv.stride(0), layer.kv.stride(3), *query.stride()[:2], *rotated.stride()[:2], cos.stride(0), eps,
        HEADS=heads, HB=tile, R=rank, P=rope, BS=layer.block_size, INTERLEAVED=interleaved, num_warps=4,
        **pdl_args(latent.device),
    )  # fmt: skip
