"""What dense attention needs around it: keys and values gathered from the paged pool, and two parts merged by log-
sum-exp.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.e4m3 import decode, key_scale, scale_pairs, value_scale
from engine.layer_kv import LayerKV


@triton.jit(do_not_specialize=["length"])
def _gather_kernel(
    kv,
    scales,
    table,
    keys,
    values,
    kv_block,
    kv_which,
    kv_head,
    kv_token,
    sc_block,
    sc_head,
    sc_token,
    out_row,
    length,
    D: tl.constexpr,
    DP: tl.constexpr,
    BS: tl.constexpr,
    BN: tl.constexpr,
    FP8: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    pos = tl.program_id(0) * BN + tl.arange(0, BN)
    d = tl.arange(0, DP)
    ok = pos < length
    block = tl.load(table + pos // BS, mask=ok, other=0).to(tl.int64)
    src = kv + head * kv_head + (block * kv_block + (pos % BS) * kv_token)[:, None] + d[None, :]
    dst = pos.to(tl.int64)[:, None] * out_row + head * D + d[None, :]
    mask = ok[:, None] & (d < D)[None, :]
    k = tl.load(src, mask=mask, other=0)
    v = tl.load(src + kv_which, mask=mask, other=0)
    if FP8:
        pair = tl.load(scales + head * sc_head + block * sc_block + (pos % BS) * sc_token, mask=ok, other=0)
        k = (decode(k, tl.float32) * key_scale(pair)[:, None]).to(keys.dtype.element_ty)
        v = (decode(v, tl.float32) * value_scale(pair)[:, None]).to(keys.dtype.element_ty)
    tl.store(keys + dst, k, mask=mask)
    tl.store(values + dst, v, mask=mask)


def gather_kv(
    layer: LayerKV, block_table: torch.Tensor, length: int, *, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one sequence's first `length` tokens, each contiguous [length, kv_heads, D] of `dtype`.

    block_table: int32 [max_blocks]; dtype: the cache's own, or the model's where the cache has 8 bits. Tokens come
    first so that strides do not depend on the length: cuDNN's plans are for strides too.
    """
    kv, (scales, *scale_strides) = layer.kv, scale_pairs(layer)
    heads, dim = layer.num_kv_heads, layer.head_dim
    assert length > 0
    assert layer.scales is not None or kv.dtype == dtype
    keys, values = torch.empty(2, length, heads, dim, dtype=dtype, device=kv.device).unbind(0)
    _gather_kernel[(triton.cdiv(length, 64), heads)](
        kv,
        scales,
        block_table,
        keys,
        values,
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        kv.stride(3),
        *scale_strides,
        keys.stride(0),
        length,
        D=dim,
        DP=triton.next_power_of_2(dim),
        BS=layer.block_size,
        BN=64,
        FP8=layer.scales is not None,
        num_warps=4,
    )
    return keys, values


@triton.jit(do_not_specialize=["rows"])
def _merge_kernel(
    a,
    b,
    lse_a,
    lse_b,
    out,
    rows,
    heads,
    a_row,
    a_head,
    b_row,
    b_head,
    la_row,
    la_head,
    lb_row,
    lb_head,
    out_row,
    out_head,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
):
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, DP)
    ok = i < rows * heads
    row = (i // heads).to(tl.int64)
    head = i % heads
    la = tl.load(lse_a + row * la_row + head * la_head, mask=ok, other=0.0)
    lb = tl.load(lse_b + row * lb_row + head * lb_head, mask=ok, other=0.0)
    weight = 1.0 / (1.0 + tl.exp(lb - la))
    mask = ok[:, None] & (d < D)[None, :]
    x = tl.load(a + (row * a_row + head * a_head)[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(b + (row * b_row + head * b_head)[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    merged = x * weight[:, None] + y * (1.0 - weight)[:, None]
    tl.store(out + (row * out_row + head * out_head)[:, None] + d[None, :], merged.to(out.dtype.element_ty), mask=mask)


def merge_parts(
    a: torch.Tensor, lse_a: torch.Tensor, b: torch.Tensor, lse_b: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Attention over the union of two disjoint sets of keys, from attention over each.

    a, b, out: [rows, heads, D] (any row and head strides); lse_a, lse_b: fp32 [rows, heads], natural logarithm,
    finite in lse_a.
    """
    rows, heads, dim = out.shape
    _merge_kernel[(triton.cdiv(rows * heads, 16),)](
        a,
        b,
        lse_a,
        lse_b,
        out,
        rows,
        heads,
        a.stride(0),
        a.stride(1),
        b.stride(0),
        b.stride(1),
        lse_a.stride(0),
        lse_a.stride(1),
        lse_b.stride(0),
        lse_b.stride(1),
        out.stride(0),
        out.stride(1),
        D=dim,
        DP=triton.next_power_of_2(dim),
        BM=16,
        num_warps=4,
    )
    return out
