"""Prefill attention over contiguous keys and values: a Triton kernel on TMA descriptors, and cuDNN.

Both compute causal attention of the last S tokens of a sequence over its L >= S keys. cuDNN is faster, but it builds a
plan for every new (S, L), which takes 50 to 130 ms. So `TritonAttention` gives it only a few shapes, which repeat.
cuDNN runs twice, over the new keys (causal) and over the prefix (no mask), and `merge_attention` combines the results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels.decode_tiles import scaled_tanh, softcap_args
from engine.kernels.pool import decode, key_scale, pool_args, value_scale
from engine.kv.kv_pool import LayerKV

DENSE_DIMS = (64, 128)  # Head dims that `dense_prefill` supports.
BLOCK_M, BLOCK_N = 128, 128  # Number of query rows and number of keys in a tile.


@triton.jit
def _tiles(
    acc,
    total,
    best,
    qs,
    keys,
    values,
    column,
    scale_log2,
    cap,
    lo,
    hi,
    position,
    MASKED: tl.constexpr,
    CAP: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    n = tl.arange(0, BN)
    for start in tl.range(lo, hi, BN, num_stages=STAGES):
        k = keys.load([start, column])
        s = tl.dot(qs, tl.trans(k), input_precision="ieee")
        if CAP:
            s = scaled_tanh(s, cap)
        if MASKED:
            s = tl.where((start + n)[None, :] <= position[:, None], s, -float("inf"))
        top = tl.maximum(best, tl.max(s, 1) * scale_log2)
        p = tl.exp2(s * scale_log2 - top[:, None])
        shrink = tl.exp2(best - top)
        v = values.load([start, column])
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        best = top
    return acc, total, best


@triton.jit(do_not_specialize=["queries", "length"])
def _dense_kernel(
    q,
    keys,
    values,
    out,
    q_row,
    q_head,
    out_row,
    out_head,
    queries,
    length,
    scale_log2,
    cap,
    GROUP: tl.constexpr,
    CAP: tl.constexpr,
    BM: tl.constexpr,
    D: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    head = tl.program_id(0)
    # Rows are (token, query head of the group). The last rows see the most keys, so they start first.
    m0 = (tl.cdiv(queries * GROUP, BM) - 1 - tl.program_id(1)) * BM
    m = m0 + tl.arange(0, BM)
    d = tl.arange(0, D)
    token = m // GROUP
    ok = (token < queries)[:, None]
    position = length - queries + token
    q_off = token.to(tl.int64) * q_row + (head * GROUP + m % GROUP) * q_head
    qs = tl.load(q + q_off[:, None] + d[None, :], mask=ok, other=0.0)
    best = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    first = length - queries + m0 // GROUP
    full = (first + 1) // BN * BN
    last = tl.minimum(length - queries + (m0 + BM - 1) // GROUP + 1, length)
    column = head * D
    acc, total, best = _tiles(
        acc, total, best, qs, keys, values, column, scale_log2, cap, 0, full, position, False, CAP, BN, STAGES
    )
    acc, total, best = _tiles(
        acc, total, best, qs, keys, values, column, scale_log2, cap, full, last, position, True, CAP, BN, STAGES
    )
    acc = acc / total[:, None]
    o_off = token.to(tl.int64) * out_row + (head * GROUP + m % GROUP) * out_head
    tl.store(out + o_off[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=ok)


def dense_prefill(
    q: Tensor, keys: Tensor, values: Tensor, *, scale: float, softcap: float = 0.0, out: Tensor | None = None
) -> Tensor:
    """Computes causal attention in the Triton kernel. Returns out, [S, heads, D].

    Args:
        q: [S, heads, D], D in DENSE_DIMS.
        keys, values: contiguous [L, kv_heads, D], L >= S.
        softcap: bound of the scores. 0: unbounded.
        out: result, any row and head strides. None allocates it.
    """
    length, kv_heads, dim = keys.shape
    group = q.shape[1] // kv_heads
    assert dim in DENSE_DIMS
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    # TMA reads rows past the end as zeros.
    descriptors = [TensorDescriptor.from_tensor(x.view(length, -1), [BLOCK_N, dim]) for x in (keys, values)]
    strides, options = (*q.stride()[:2], *out.stride()[:2]), {"GROUP": group, "CAP": softcap > 0}
    tile = {"BM": BLOCK_M, "D": dim, "BN": BLOCK_N, "STAGES": 3}
    _dense_kernel[(kv_heads, triton.cdiv(q.shape[0] * group, BLOCK_M))](
        q, *descriptors, out, *strides, len(q), length, *softcap_args(scale, softcap), **options, **tile, num_warps=8
    )
    return out


def cudnn_prefill(
    q: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    prefix: tuple[Tensor, Tensor] | None,
    *,
    scale: float,
    count: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Computes causal attention in cuDNN. Returns out, [S, heads, D].

    Args:
        q: [S, heads, D], any row and head strides.
        new_keys, new_values: [S, kv_heads, D], any row and head strides.
        prefix: keys and values [P, kv_heads, D] before the new keys and values. None: no prefix.
        count: number of concatenated sequences of S / count tokens each; above 1 only without a prefix.
        out: result. None allocates it.
    """
    assert prefix is None or count == 1

    def attend(keys: Tensor, values: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        rows = [x.unflatten(0, (count, -1)).transpose(1, 2) for x in (q, keys, values)]
        result = torch.ops.aten._scaled_dot_product_cudnn_attention(*rows, None, True, 0.0, causal, False, scale=scale)
        return result[0].transpose(1, 2).flatten(0, 1), result[1]

    part, lse = attend(new_keys, new_values, True)
    if prefix is None:
        return part if out is None else out.copy_(part)
    prefix_part, prefix_lse = attend(*prefix, False)
    lses = [x.view(q.shape[1], q.shape[0]).T for x in (prefix_lse, lse)]
    return merge_attention(prefix_part, lses[0], part, lses[1], out=prefix_part if out is None else out)


@triton.jit(do_not_specialize=["length"])
def _gather_kernel(
    pool,
    table,
    keys,
    values,
    out_row,
    length,
    D: tl.constexpr,
    BS: tl.constexpr,
    BN: tl.constexpr,
    FP8: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    pos = tl.program_id(0) * BN + tl.arange(0, BN)
    d = tl.arange(0, triton.next_power_of_2(D))
    ok = pos < length
    block = tl.load(table + pos // BS, mask=ok, other=0).to(tl.int64)
    src = pool.kv + head * pool.kv_head + (block * pool.kv_block + (pos % BS) * pool.kv_token)[:, None] + d[None, :]
    dst = pos.to(tl.int64)[:, None] * out_row + head * D + d[None, :]
    mask = ok[:, None] & (d < D)[None, :]
    k = tl.load(src, mask=mask, other=0)
    v = tl.load(src + pool.kv_which, mask=mask, other=0)
    if FP8:
        place = pool.scales + head * pool.scale_head + block * pool.scale_block + (pos % BS) * pool.scale_token
        pair = tl.load(place, mask=ok, other=0)
        k = (decode(k, tl.float32) * key_scale(pair)[:, None]).to(keys.dtype.element_ty)
        v = (decode(v, tl.float32) * value_scale(pair)[:, None]).to(keys.dtype.element_ty)
    tl.store(keys + dst, k, mask=mask)
    tl.store(values + dst, v, mask=mask)


def gather_kv(layer: LayerKV, block_table: Tensor, length: int, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Copies the keys and values of a sequence's first `length` tokens, each to a contiguous [length, kv_heads, D].

    The token dimension is first, so that strides do not depend on the length: a cuDNN plan is for fixed strides.

    Args:
        block_table: int32 [max_blocks].
        dtype: dtype of the result: the dtype of the cache, or of the model if the cache has 8 bits.
    """
    heads, dim = layer.num_kv_heads, layer.head_dim
    assert length > 0
    assert layer.scales is not None or layer.kv.dtype == dtype
    keys, values = torch.empty(2, length, heads, dim, dtype=dtype, device=layer.kv.device).unbind(0)
    pool, options = pool_args(layer, torch.int32), {"D": dim, "BS": layer.block_size, "FP8": layer.scales is not None}
    _gather_kernel[(triton.cdiv(length, 64), heads)](
        pool, block_table, keys, values, keys.stride(0), length, BN=64, **options, num_warps=4
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
    BM: tl.constexpr,
):
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, triton.next_power_of_2(D))
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


def merge_attention(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor, out: Tensor) -> Tensor:
    """Merges the results of attention over two disjoint sets of keys into attention over their union.

    Args:
        a, b, out: [rows, heads, D], any row and head strides.
        lse_a, lse_b: fp32 [rows, heads], natural log-sum-exp of the scores; lse_a must be finite.
    """
    rows, heads, dim = out.shape
    strides = [stride for x in (a, b, lse_a, lse_b, out) for stride in x.stride()[:2]]
    _merge_kernel[(triton.cdiv(rows * heads, 16),)](
        a, b, lse_a, lse_b, out, rows, heads, *strides, D=dim, BM=16, num_warps=4
    )
    return out
