"""The loops over tiles of keys in split-KV attention: of bf16, fp16 or fp32 keys, of e4m3 keys, and with keys per warp.

A tile of BLOCK_N keys is multiplied with M query rows of one (sequence, kv head) pair. In `tiles` and `tiles_e4m3` all
warps of a program work on one tile, so each step of the softmax crosses warps through shared memory. In `warp_tiles` a
warp owns BLOCK_N / warps keys of each tile and has a softmax of its own; the warps are merged once, at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.pool import key_scale, unpack, value_scale

LOG2E = 1.4426950408889634
EMPTY = tl.constexpr(-1e30)  # Log-sum-exp over an empty set of keys. Finite, so that differences are never NaN.
#: Exponent added to weights of values in fp16, whose smallest number is 2^-24: a weight of 1 becomes 2^14.
WEIGHT_BITS = tl.constexpr(14.0)
#: Biased exponent of the smallest scale of V that counts as it is, 2^-80. It keeps sums of weights below 2^127.
LEAST_SCALE = tl.constexpr(47)


@triton.jit
def scaled_tanh(s, cap):
    """Returns tanh(s * cap). The absolute error is 1e-7; the softcap multiplies it into the error of a score."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(s * (cap * 2.8853900817779268)))


def softcap_args(scale: float, softcap: float) -> tuple[float, float]:
    """Returns the kernel arguments (scale_log2, cap), with which scores are in units of log2.

    Without a softcap the score is (q . k) * scale_log2, otherwise scaled_tanh(q . k, cap) * scale_log2.
    """
    return (softcap * LOG2E, scale / softcap) if softcap > 0 else (scale * LOG2E, 0.0)


@triton.jit
def _softmax(s, best, total):
    """Makes one step of online softmax over a tile of scores in units of log2.

    Returns the tile's weights, the new maxima, the new sums, and the factor on earlier results.
    """
    top = tl.maximum(best, tl.max(s, 1))
    safe = tl.where(top == -float("inf"), 0.0, top)
    p = tl.exp2(s - safe[:, None])
    shrink = tl.exp2(best - safe)
    return p, top, total * shrink + tl.sum(p, 1), shrink


@triton.jit
def tiles(
    q_rows, rows_ok, pool, base_k, table, scale_log2, cap, begin, stop, length, position, floor,
    M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Attends to the tiles begin..stop of keys. Returns the weighted sum of values, the sum of weights, the maxima."""
    d = tl.arange(0, DP)
    n = tl.arange(0, BN)
    qs = tl.load(q_rows[:, None] + d[None, :], mask=rows_ok[:, None] & (d < D)[None, :], other=0.0)
    best = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DP], tl.float32)
    for t in tl.range(begin, stop, num_stages=STAGES):
        pos = t * BN + n
        ok = pos < length
        block = tl.load(table + pos // BS, mask=ok, other=0).to(tl.int64)
        off = block * pool.kv_block + (pos % BS) * pool.kv_token
        mask = ok[:, None] & (d < D)[None, :]
        k = tl.load(base_k + off[:, None] + d[None, :], mask=mask, other=0.0)
        s = tl.dot(qs, tl.trans(k), input_precision="ieee")
        if CAP:
            s = scaled_tanh(s, cap)
        s *= scale_log2
        seen = (pos[None, :] <= position[:, None]) & (pos[None, :] > floor[:, None])
        p, best, total, shrink = _softmax(tl.where(seen, s, -float("inf")), best, total)
        v = tl.load(base_k + pool.kv_which + off[:, None] + d[None, :], mask=mask, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, total, best


@triton.jit
def tiles_e4m3(
    q_rows, rows_ok, pool, base_k, base_s, table, scale_log2, cap, begin, stop, length, position, floor,
    M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    CAP: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Does what `tiles` does, over e4m3 as int16 pairs.

    Even and odd dims are multiplied separately, in fp16 (fp32 if q is fp32).

    The range of fp16 is too small for scales: each row of q is divided by a power of two, and the scales of V are
    divided by the largest of the tile.
    """
    math: tl.constexpr = tl.float32 if q_rows.dtype.element_ty == tl.float32 else tl.float16
    kv_token = pool.kv_token
    if D % 16 == 0:  # Triton detects strides that 16 divides only; this shows it that 8 divides the stride in pairs
        kv_token = kv_token // 8 * 8
    h = tl.arange(0, DP // 2)
    n = tl.arange(0, BN)
    q_ok = rows_ok[:, None] & (h < D // 2)[None, :]
    q_even = tl.load(q_rows[:, None] + 2 * h[None, :], mask=q_ok, other=0.0).to(tl.float32)
    q_odd = tl.load(q_rows[:, None] + 2 * h[None, :] + 1, mask=q_ok, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(q_even), 1), tl.max(tl.abs(q_odd), 1))
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1), 253)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    q_scale = (exponent << 23).to(tl.float32, bitcast=True)
    q_even = (q_even * inverse[:, None]).to(math)
    q_odd = (q_odd * inverse[:, None]).to(math)

    best = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    even = tl.zeros([M, DP // 2], tl.float32)
    odd = tl.zeros([M, DP // 2], tl.float32)
    for t in tl.range(begin, stop, num_stages=STAGES):
        pos = t * BN + n
        ok = pos < length
        block = tl.load(table + pos // BS, mask=ok, other=0).to(tl.int64)
        off = block * pool.kv_block + (pos % BS) * kv_token
        mask = ok[:, None] & (h < D // 2)[None, :]
        k_even, k_odd = unpack(tl.load(base_k + off[:, None] + h[None, :], mask=mask, other=0), NATIVE)
        pair = tl.load(base_s + block * pool.scale_block + (pos % BS) * pool.scale_token, mask=ok, other=0)
        s = tl.dot(q_even, tl.trans(k_even.to(math)), input_precision="ieee")
        s = tl.dot(q_odd, tl.trans(k_odd.to(math)), s, input_precision="ieee")
        s *= q_scale[:, None] * key_scale(pair)[None, :]
        if CAP:
            s = scaled_tanh(s, cap)
        s *= scale_log2
        seen = (pos[None, :] <= position[:, None]) & (pos[None, :] > floor[:, None])
        p, best, total, shrink = _softmax(tl.where(seen, s, -float("inf")), best, total)
        v_even, v_odd = unpack(tl.load(base_k + pool.kv_which + off[:, None] + h[None, :], mask=mask, other=0), NATIVE)
        v_scale = value_scale(pair)
        v_top = tl.max(v_scale, 0)
        v_top = tl.where(v_top > 0, v_top, 1.0)
        p = (p * (v_scale / v_top)[None, :]).to(math)
        even = even * shrink[:, None] + tl.dot(p, v_even.to(math), input_precision="ieee") * v_top
        odd = odd * shrink[:, None] + tl.dot(p, v_odd.to(math), input_precision="ieee") * v_top
    return tl.interleave(even, odd), total, best


@triton.jit
def warp_tiles(
    q_rows, rows_ok, pool, base_k, base_s, table, scale_log2, cap, begin, stop, length, position, floor,
    N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    CAP: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr, ONE: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Does what `tiles` and `tiles_e4m3` do, with WARPS parts of each tile along a batch dimension, one per warp.

    Triton gives each warp one index of the batch dimension of `tl.dot`, so no step of the loop crosses warps. Products
    are transposed, K q and V p, because a matrix instruction has 16 x 8 results and the N query rows are often 4 or 8.

    With e4m3 the weights of values are 2^(score + log2(scale of V)), so the maxima include these scales. The weights
    never exceed 1, whatever the scales, and the sum of weights is corrected by the inverse scale.

    Args:
        ONE: all rows see the same keys (one new token).
    """
    KN: tl.constexpr = BN // WARPS
    W: tl.constexpr = DP // 2 if FP8 else DP  # width of a row of the cache in elements
    LIVE: tl.constexpr = D // 2 if FP8 else D
    math: tl.constexpr = tl.float32 if q_rows.dtype.element_ty == tl.float32 else tl.float16
    kv_token = pool.kv_token
    if D % 16 == 0:  # Triton detects strides that 16 divides only; this shows it that 8 divides the stride in pairs
        kv_token = kv_token // 8 * 8
    h = tl.arange(0, W)
    n = (tl.arange(0, WARPS) * KN)[:, None] + tl.arange(0, KN)[None, :]
    q_ok = rows_ok[None, :] & (h < LIVE)[:, None]
    if FP8:
        first = tl.load(q_rows[None, :] + 2 * h[:, None], mask=q_ok, other=0.0).to(tl.float32)
        second = tl.load(q_rows[None, :] + 2 * h[:, None] + 1, mask=q_ok, other=0.0).to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(first), 0), tl.max(tl.abs(second), 0))
        exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1), 253)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)[None, :]
        row_scale = ((exponent << 23).to(tl.float32, bitcast=True) * (1.0 if CAP else scale_log2))[None, None, :]
        q_even = tl.broadcast_to((first * inverse).to(math)[None], [WARPS, W, N])
        q_odd = tl.broadcast_to((second * inverse).to(math)[None], [WARPS, W, N])
    else:
        qs = tl.load(q_rows[None, :] + h[:, None], mask=q_ok, other=0.0)
        qs = tl.broadcast_to(qs[None], [WARPS, W, N])

    best = tl.full([WARPS, N], -float("inf"), tl.float32)
    total = tl.zeros([WARPS, N], tl.float32)
    even = tl.zeros([WARPS, W, N], tl.float32)  # all dims if not FP8
    odd = tl.zeros([WARPS, W, N], tl.float32)
    for t in tl.range(begin, stop, num_stages=STAGES):
        pos = t * BN + n
        inside = tl.minimum(pos, length - 1)  # keys past the end are read as the last key, and masked below
        block = tl.load(table + inside // BS).to(tl.int64)
        off = block * pool.kv_block + (inside % BS) * kv_token
        k_src = base_k + off[:, :, None] + h[None, None, :]
        if D == DP:
            k = tl.load(k_src)
        else:
            k = tl.load(k_src, mask=(h < LIVE)[None, None, :], other=0)
        if FP8:
            pair = tl.load(base_s + block * pool.scale_block + (inside % BS) * pool.scale_token)
            k_even, k_odd = unpack(k, NATIVE)
            s = tl.dot(k_even.to(math), q_even, input_precision="ieee")
            s = tl.dot(k_odd.to(math), q_odd, s, input_precision="ieee")
            s *= row_scale
            bits = tl.maximum((pair >> 23) & 0xFF, LEAST_SCALE)
            # The exponent as a number: the bits of 2^23 + exponent, minus 2^23 + 127. A NaN scale stays NaN.
            log_scale = (bits | 0x4B000000).to(tl.float32, bitcast=True) - 8388735.0 + value_scale(pair) * 0.0
            v_inverse = ((254 - bits) << 23).to(tl.float32, bitcast=True)
            if CAP:
                s = scaled_tanh(s * key_scale(pair)[:, :, None], cap) * scale_log2 + log_scale[:, :, None]
            else:
                s = s * key_scale(pair)[:, :, None] + log_scale[:, :, None]
        else:
            s = tl.dot(k, qs, input_precision="ieee")
            if CAP:
                s = scaled_tanh(s, cap)
            s *= scale_log2
        if ONE:
            seen = ((pos < length) & (pos > tl.min(floor, 0)))[:, :, None]  # the first row is of the new token
        else:
            seen = (pos[:, :, None] <= position[None, None, :]) & (pos[:, :, None] > floor[None, None, :])
        s = tl.where(seen, s, -float("inf"))
        top = tl.maximum(best, tl.max(s, 1))
        safe = tl.where(top == -float("inf"), 0.0, top)
        shrink = tl.exp2(best - safe)
        best = top
        # Transposed by its addresses: a transposed register tile would go through shared memory a second time.
        v_src = base_k + pool.kv_which + off[:, None, :] + h[None, :, None]
        if D == DP:
            v = tl.load(v_src)
        else:
            v = tl.load(v_src, mask=(h < LIVE)[None, :, None], other=0)
        if FP8:
            p = tl.exp2(s - (safe - WEIGHT_BITS)[:, None, :])
            total = total * shrink + tl.sum(p * v_inverse[:, :, None], 1)
            v_even, v_odd = unpack(v, NATIVE)
            even = tl.dot(v_even.to(math), p.to(math), even * shrink[:, None, :], input_precision="ieee")
            odd = tl.dot(v_odd.to(math), p.to(math), odd * shrink[:, None, :], input_precision="ieee")
        else:
            p = tl.exp2(s - safe[:, None, :])
            total = total * shrink + tl.sum(p, 1)
            even = tl.dot(v, p.to(v.dtype), even * shrink[:, None, :], input_precision="ieee")

    top = tl.max(best, 0)
    weight = tl.exp2(best - tl.where(top == -float("inf"), 0.0, top)[None, :])
    total = tl.sum(total * weight, 0)
    acc = tl.trans(tl.sum(even * weight[:, None, :], 0))
    if FP8:
        acc = tl.interleave(acc, tl.trans(tl.sum(odd * weight[:, None, :], 0)))
        top -= WEIGHT_BITS
    return acc, total, top
