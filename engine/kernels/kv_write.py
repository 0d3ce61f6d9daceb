"""Writes new keys and values into the paged KV pool: `kv_write` unchanged, `rope_kv_write` after applying RoPE."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.e4m3 import encode, magnitude, scale_halves, scale_of
from engine.kernels.pdl import pdl_flags, supports_pdl
from engine.kv.layer_kv import LayerKV


@triton.jit
def _kv_write_kernel(
    new,
    kv,
    scales,
    slot_mapping,
    new_row,
    new_which,
    new_head,
    kv_block,
    kv_which,
    kv_head,
    kv_token,
    sc_block,
    sc_head,
    sc_token,
    HEADS: tl.constexpr,
    HP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BS: tl.constexpr,
    FP8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1)  # 0: keys, 1: values
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:
        h = tl.arange(0, HP)[:, None]
        d = tl.arange(0, DP)[None, :]
        ok = (h < HEADS) & (d < D)
        x = tl.load(new + token * new_row + which * new_which + h * new_head + d, mask=ok, other=0.0)
        cell = kv + slot // BS * kv_block + which * kv_which + slot % BS * kv_token + h * kv_head + d
        if FP8:
            x = x.to(tl.float32)
            scale = scale_of(magnitude(x))
            heads = tl.arange(0, HP)
            place = scales + slot // BS * sc_block + slot % BS * sc_token + heads * sc_head + which
            tl.store(place, (scale >> 16).to(tl.int16), mask=heads < HEADS)
            tl.store(cell, encode(x, scale[:, None]), mask=ok)
        else:
            tl.store(cell, x.to(kv.dtype.element_ty), mask=ok)


def kv_write(new: torch.Tensor, layer: LayerKV, slot_mapping: torch.Tensor) -> None:
    """Writes keys and values that are already rotated.

    Args:
        new: [tokens, 2, kv_heads, D].
        slot_mapping: integer [tokens], block * block_size + offset of each token; -1 writes nothing.
    """
    kv, (scales, *scale_strides) = layer.kv, scale_halves(layer)
    assert new.stride(3) == 1
    _kv_write_kernel[(new.shape[0], 2)](
        new,
        kv,
        scales,
        slot_mapping,
        new.stride(0),
        new.stride(1),
        new.stride(2),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        kv.stride(3),
        *scale_strides,
        HEADS=layer.num_kv_heads,
        HP=triton.next_power_of_2(layer.num_kv_heads),
        D=layer.head_dim,
        DP=triton.next_power_of_2(layer.head_dim),
        BS=layer.block_size,
        FP8=layer.scales is not None,
        num_warps=4,
    )


@triton.jit
def _rotate(
    base,
    norm,
    cos,
    sin,
    eps,
    offset,
    HEADS: tl.constexpr,
    HP: tl.constexpr,
    D: tl.constexpr,
    ROT: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    NORM: tl.constexpr,
):
    """Normalises (if NORM) and rotates the first ROT dims of each head; dim i rotates with i + ROT / 2.

    Returns the first half, the second half, the dims from ROT on, and the indices and masks to store them.
    """
    h = tl.arange(0, HP)[:, None]
    i = tl.arange(0, HALF)[None, :]
    ok = (h < HEADS) & (i < ROT // 2)
    a = tl.load(base + h * D + i, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(base + h * D + ROT // 2 + i, mask=ok, other=0.0).to(tl.float32)
    r = tl.arange(0, REST)[None, :]
    rest_ok = (h < HEADS) & (r < D - ROT)
    if NORM or ROT < D:
        rest = tl.load(base + h * D + ROT + r, mask=rest_ok, other=0.0).to(tl.float32)
    else:
        rest = tl.zeros([HP, REST], tl.float32)
    if NORM:
        square = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(rest * rest, 1)
        rstd = tl.rsqrt(square / D + eps)[:, None]
        half_ok = i < ROT // 2
        a *= rstd * (tl.load(norm + i, mask=half_ok, other=0.0).to(tl.float32) + offset)
        b *= rstd * (tl.load(norm + ROT // 2 + i, mask=half_ok, other=0.0).to(tl.float32) + offset)
        rest *= rstd * (tl.load(norm + ROT + r, mask=r < D - ROT, other=0.0).to(tl.float32) + offset)
    return a * cos - b * sin, b * cos + a * sin, rest, h, i, r, ok, rest_ok


@triton.jit
def _rope_kv_kernel(
    qkv,
    kv,
    scales,
    positions,
    slot_mapping,
    cos_table,
    sin_table,
    q_norm,
    k_norm,
    qkv_row,
    kv_block,
    kv_which,
    kv_head,
    kv_token,
    sc_block,
    sc_head,
    sc_token,
    table_row,
    eps,
    offset,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    HQP: tl.constexpr,
    HKVP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROT: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    BS: tl.constexpr,
    NORM: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    pair = tl.arange(0, HALF)[None, :]
    cos = tl.load(cos_table + position * table_row + pair, mask=pair < ROT // 2, other=0.0).to(tl.float32)
    sin = tl.load(sin_table + position * table_row + pair, mask=pair < ROT // 2, other=0.0).to(tl.float32)
    if PDL:  # positions and slot_mapping are made once per step, before the GEMM that computes qkv
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = qkv + token * qkv_row
    if HQ > 0 and tl.program_id(1) == 0:
        a, b, rest, h, i, r, ok, rest_ok = _rotate(
            row, q_norm, cos, sin, eps, offset, HQ, HQP, D, ROT, HALF, REST, NORM
        )
        dst = row + h * D
        tl.store(dst + i, a.to(qkv.dtype.element_ty), mask=ok)
        tl.store(dst + ROT // 2 + i, b.to(qkv.dtype.element_ty), mask=ok)
        if NORM and ROT < D:
            tl.store(dst + ROT + r, rest.to(qkv.dtype.element_ty), mask=rest_ok)
    else:
        base = row + HQ * D
        ka, kb, kept, kh, ki, kr, k_ok, kept_ok = _rotate(
            base, k_norm, cos, sin, eps, offset, HKV, HKVP, D, ROT, HALF, REST, NORM
        )
        key = base + kh * D
        tl.store(key + ki, ka.to(qkv.dtype.element_ty), mask=k_ok)
        tl.store(key + ROT // 2 + ki, kb.to(qkv.dtype.element_ty), mask=k_ok)
        if NORM and ROT < D:
            tl.store(key + ROT + kr, kept.to(qkv.dtype.element_ty), mask=kept_ok)
        if slot >= 0:
            cell = kv + slot // BS * kv_block + slot % BS * kv_token + kh * kv_head
            d = tl.arange(0, DP)[None, :]
            v_ok = (kh < HKV) & (d < D)
            v = tl.load(row + (HQ + HKV) * D + kh * D + d, mask=v_ok, other=0.0)
            if FP8:  # rounds keys to the model's dtype first, so that every path to the cache writes the same bits
                fa = ka.to(qkv.dtype.element_ty).to(tl.float32)
                fb = kb.to(qkv.dtype.element_ty).to(tl.float32)
                rest = kept.to(qkv.dtype.element_ty).to(tl.float32)
                fv = v.to(tl.float32)
                k_scale = scale_of(tl.maximum(tl.maximum(magnitude(fa), magnitude(fb)), magnitude(rest)))
                v_scale = scale_of(magnitude(fv))
                heads = tl.arange(0, HKVP)
                place = scales + slot // BS * sc_block + slot % BS * sc_token + heads * sc_head
                tl.store(place, (k_scale >> 16).to(tl.int16), mask=heads < HKV)
                tl.store(place + 1, (v_scale >> 16).to(tl.int16), mask=heads < HKV)
                tl.store(cell + ki, encode(fa, k_scale[:, None]), mask=k_ok)
                tl.store(cell + ROT // 2 + ki, encode(fb, k_scale[:, None]), mask=k_ok)
                if ROT < D:
                    tl.store(cell + ROT + kr, encode(rest, k_scale[:, None]), mask=kept_ok)
                tl.store(cell + kv_which + d, encode(fv, v_scale[:, None]), mask=v_ok)
            else:
                tl.store(cell + ki, ka.to(kv.dtype.element_ty), mask=k_ok)
                tl.store(cell + ROT // 2 + ki, kb.to(kv.dtype.element_ty), mask=k_ok)
                if ROT < D:
                    tl.store(cell + ROT + kr, kept.to(kv.dtype.element_ty), mask=kept_ok)
                tl.store(cell + kv_which + d, v.to(kv.dtype.element_ty), mask=v_ok)


def rope_kv_write(
    qkv: torch.Tensor,
    layer: LayerKV,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    num_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    norm_offset: float = 0.0,
) -> None:
    """Rotates q and k in place inside qkv, and writes K and V to the pool.

    With PDL (pdl.py), only qkv may come from the kernel before this one; all other arguments must be older.

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * D], the heads of q, of k and of v; any row stride.
        positions: integer [tokens].
        slot_mapping: integer [tokens], block * block_size + offset of each token; -1 writes nothing.
        cos, sin: [max_position, rot / 2]. The first rot <= D dims rotate, the first half against the second half
            (GPT-NeoX order).
        num_heads: query heads in qkv, may be 0.
        q_norm, k_norm: [D], weights of an RMSNorm of each head before the rotation; both or none.
        norm_offset: added to the norms' weights.
    """
    tokens, kv, (scales, *scale_strides) = qkv.shape[0], layer.kv, scale_halves(layer)
    num_kv_heads, dim = layer.num_kv_heads, layer.head_dim
    half = cos.shape[1]
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * dim
    assert (q_norm is None) == (k_norm is None)
    assert qkv.stride(1) == 1
    assert cos.stride() == sin.stride()
    assert cos.stride(1) == 1
    norm = q_norm is not None
    pdl = supports_pdl(qkv.device)
    _rope_kv_kernel[(tokens, 2 if num_heads else 1)](
        qkv,
        kv,
        scales,
        positions,
        slot_mapping,
        cos,
        sin,
        q_norm if q_norm is not None else cos,
        k_norm if k_norm is not None else cos,
        qkv.stride(0),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        kv.stride(3),
        *scale_strides,
        cos.stride(0),
        eps,
        norm_offset,
        HQ=num_heads,
        HKV=num_kv_heads,
        HQP=triton.next_power_of_2(max(1, num_heads)),
        HKVP=triton.next_power_of_2(num_kv_heads),
        D=dim,
        DP=triton.next_power_of_2(dim),
        ROT=2 * half,
        HALF=triton.next_power_of_2(half),
        REST=triton.next_power_of_2(max(1, dim - 2 * half)),
        BS=layer.block_size,
        NORM=norm,
        FP8=layer.scales is not None,
        PDL=pdl,
        num_warps=4,
        **pdl_flags(pdl),
    )
