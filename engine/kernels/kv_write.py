"""Writes new keys and values into the paged KV pool: `kv_write` unchanged, `rope_kv_write` after applying RoPE."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.pdl import pdl_args, supports_pdl, wait_for_previous
from engine.kernels.pool import encode, magnitude, pool_args, scale_of
from engine.kv.kv_pool import LayerKV


@triton.jit
def _kv_write_kernel(
    new,
    pool,
    slot_mapping,
    new_row,
    new_which,
    new_head,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BS: tl.constexpr,
    FP8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1)  # 0: keys or latents, 1: values
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:
        heads = tl.arange(0, triton.next_power_of_2(HEADS))
        h = heads[:, None]
        d = tl.arange(0, triton.next_power_of_2(D))[None, :]
        ok = (h < HEADS) & (d < D)
        x = tl.load(new + token * new_row + which * new_which + h * new_head + d, mask=ok, other=0.0)
        block, offset = slot // BS, slot % BS
        cell = pool.kv + block * pool.kv_block + which * pool.kv_which + offset * pool.kv_token + h * pool.kv_head + d
        if FP8:
            x = x.to(tl.float32)
            scale = scale_of(magnitude(x))
            place = pool.scales + block * pool.scale_block + offset * pool.scale_token + heads * pool.scale_head + which
            tl.store(place, (scale >> 16).to(tl.int16), mask=heads < HEADS)
            tl.store(cell, encode(x, scale[:, None]), mask=ok)
        else:
            tl.store(cell, x.to(pool.kv.dtype.element_ty), mask=ok)


def kv_write(new: Tensor, layer: LayerKV, slot_mapping: Tensor) -> None:
    """Writes rotated keys and values, new [tokens, 2, kv_heads, D], or latents, new [tokens, 1, 1, D].

    `slot_mapping` is that of `rope_kv_write`.
    """
    assert new.stride(3) == 1
    sizes, fp8 = {"HEADS": layer.num_kv_heads, "D": layer.head_dim, "BS": layer.block_size}, layer.scales is not None
    _kv_write_kernel[new.shape[:2]](
        new, pool_args(layer, torch.int16), slot_mapping, *new.stride()[:3], **sizes, FP8=fp8, num_warps=4
    )


@triton.jit
def _rotate(base, norm, cos, sin, eps, HEADS: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr):
    """Normalises (if NORM), rotates and stores heads in place; dim i rotates with i + D / 2.

    Returns the first half and the second half, and the indices and the mask of the first half.
    """
    h = tl.arange(0, triton.next_power_of_2(HEADS) if HEADS > 0 else 1)[:, None]
    i = tl.arange(0, triton.next_power_of_2(D // 2))[None, :]
    ok = (h < HEADS) & (i < D // 2)
    head = base + h * D
    a = tl.load(head + i, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(head + D // 2 + i, mask=ok, other=0.0).to(tl.float32)
    if NORM:
        rstd = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        half_ok = i < D // 2
        a *= rstd * tl.load(norm + i, mask=half_ok, other=0.0).to(tl.float32)
        b *= rstd * tl.load(norm + D // 2 + i, mask=half_ok, other=0.0).to(tl.float32)
    first = a * cos - b * sin
    second = b * cos + a * sin
    tl.store(head + i, first.to(base.dtype.element_ty), mask=ok)
    tl.store(head + D // 2 + i, second.to(base.dtype.element_ty), mask=ok)
    return first, second, h, i, ok


PREFETCH_CHUNK, PREFETCH_THREADS = tl.constexpr(4096), tl.constexpr(128)  # Bytes of a thread, threads of a program.


@triton.jit
def _prefetch(address, pid, stop):
    """Brings the bytes pid * PREFETCH_THREADS * PREFETCH_CHUNK and following, up to `stop`, to the L2 cache."""
    chunk = (pid * PREFETCH_THREADS + tl.arange(0, PREFETCH_THREADS)).to(tl.int64) * PREFETCH_CHUNK
    # Threads beyond the end fetch the last chunk, which others fetch too.
    place = address.to(tl.int64) + tl.minimum(chunk, stop - PREFETCH_CHUNK)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 4096; mov.b32 $0, 0;",
        "=r,l",
        [place],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _rope_kv_kernel(
    qkv,
    pool,
    positions,
    slot_mapping,
    cos_table,
    sin_table,
    q_norm,
    k_norm,
    soon,
    qkv_row,
    table_row,
    soon_bytes,
    eps,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BS: tl.constexpr,
    NORM: tl.constexpr,
    FP8: tl.constexpr,
    SOON: tl.constexpr,
    PDL: tl.constexpr,
):
    if SOON and tl.program_id(1) > 1:
        _prefetch(soon, tl.program_id(1) - 2, soon_bytes)
        return
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    pair = tl.arange(0, triton.next_power_of_2(D // 2))[None, :]
    cos = tl.load(cos_table + position * table_row + pair, mask=pair < D // 2, other=0.0).to(tl.float32)
    sin = tl.load(sin_table + position * table_row + pair, mask=pair < D // 2, other=0.0).to(tl.float32)
    # positions and slot_mapping are made once per step, before the GEMM that computes qkv.
    wait_for_previous(PDL)
    row = qkv + token * qkv_row
    if HQ > 0 and tl.program_id(1) == 0:
        _rotate(row, q_norm, cos, sin, eps, HQ, D, NORM)
    else:
        ka, kb, h, i, k_ok = _rotate(row + HQ * D, k_norm, cos, sin, eps, HKV, D, NORM)
        if slot >= 0:
            block, offset = slot // BS, slot % BS
            cell = pool.kv + block * pool.kv_block + offset * pool.kv_token + h * pool.kv_head
            d = tl.arange(0, triton.next_power_of_2(D))[None, :]
            v_ok = (h < HKV) & (d < D)
            v = tl.load(row + (HQ + HKV) * D + h * D + d, mask=v_ok, other=0.0)
            if FP8:  # rounds keys to the model's dtype first, so that every path to the cache writes the same bits
                fa = ka.to(qkv.dtype.element_ty).to(tl.float32)
                fb = kb.to(qkv.dtype.element_ty).to(tl.float32)
                fv = v.to(tl.float32)
                k_scale = scale_of(tl.maximum(magnitude(fa), magnitude(fb)))
                v_scale = scale_of(magnitude(fv))
                heads = tl.arange(0, triton.next_power_of_2(HKV))
                place = pool.scales + block * pool.scale_block + offset * pool.scale_token + heads * pool.scale_head
                tl.store(place, (k_scale >> 16).to(tl.int16), mask=heads < HKV)
                tl.store(place + 1, (v_scale >> 16).to(tl.int16), mask=heads < HKV)
                tl.store(cell + i, encode(fa, k_scale[:, None]), mask=k_ok)
                tl.store(cell + D // 2 + i, encode(fb, k_scale[:, None]), mask=k_ok)
                tl.store(cell + pool.kv_which + d, encode(fv, v_scale[:, None]), mask=v_ok)
            else:
                tl.store(cell + i, ka.to(pool.kv.dtype.element_ty), mask=k_ok)
                tl.store(cell + D // 2 + i, kb.to(pool.kv.dtype.element_ty), mask=k_ok)
                tl.store(cell + pool.kv_which + d, v.to(pool.kv.dtype.element_ty), mask=v_ok)


def rope_kv_write(
    qkv: Tensor,
    layer: LayerKV,
    positions: Tensor,
    slot_mapping: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    soon: Tensor | None = None,
) -> None:
    """Rotates q and k in place inside qkv, and writes K and V to the pool.

    With PDL (pdl.py), only qkv may come from the kernel before this one; all other arguments must be older.

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * D], the heads of q, of k and of v; any row stride.
        positions: integer [tokens].
        slot_mapping: integer [tokens], block * block_size + offset of each token; -1 writes nothing.
        cos, sin: [max_position, D / 2]. The first half of a head rotates against the second half (GPT-NeoX order).
        num_heads: query heads in qkv, may be 0.
        q_norm, k_norm: [D], weights of an RMSNorm of each head before the rotation; both or none.
        soon: contiguous weight of at least 4 KiB that a kernel after the attention reads. With one token on a device
            with PDL it is brought to the L2 cache, because attention over few keys leaves the memory idle.
    """
    num_kv_heads, dim = layer.num_kv_heads, layer.head_dim
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * dim
    assert cos.shape[1] == dim // 2
    assert (q_norm is None) == (k_norm is None)
    assert cos.stride() == sin.stride()
    assert qkv.stride(1) == cos.stride(1) == 1
    norms = cos if q_norm is None else q_norm, cos if k_norm is None else k_norm
    tensors = qkv, pool_args(layer, torch.int16), positions, slot_mapping, cos, sin, *norms
    early = soon if soon is not None and len(qkv) == 1 and num_heads and supports_pdl(qkv.device) else None
    size = 0 if early is None else early.nbytes // 16 * 16
    programs = triton.cdiv(size, PREFETCH_CHUNK.value * PREFETCH_THREADS.value)
    sizes = {"HQ": num_heads, "HKV": num_kv_heads, "D": dim, "BS": layer.block_size}
    options = {"NORM": q_norm is not None, "FP8": layer.scales is not None, **pdl_args(qkv.device)}
    _rope_kv_kernel[(qkv.shape[0], programs + (2 if num_heads else 1))](
        *tensors, cos if early is None else early, qkv.stride(0), cos.stride(0), size, eps,
        **sizes, **options, SOON=early is not None, num_warps=4,
    )  # fmt: skip
