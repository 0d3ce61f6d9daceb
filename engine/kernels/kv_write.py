"""Writes new keys and values into the paged pool, where RoPE was applied elsewhere."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.e4m3 import encode, magnitude, scale_halves, scale_of
from engine.layer_kv import LayerKV


@triton.jit
def _kv_write_kernel(
    new,
    kv,
    scales,
    slots,
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
    which = tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
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


def kv_write(new: torch.Tensor, layer: LayerKV, slots: torch.Tensor) -> None:
    """new: [tokens, 2, kv_heads, D]; slots: integer [tokens], block * block_size + offset, -1: skip."""
    kv, (scales, *scale_strides) = layer.kv, scale_halves(layer)
    assert new.stride(3) == 1
    _kv_write_kernel[(new.shape[0], 2)](
        new,
        kv,
        scales,
        slots,
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
