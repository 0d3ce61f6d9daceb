"""The gated delta rule for one token of each row, and the gated norm of the results.

A step reads and writes the matrices of all its rows: 2 * heads * value_dim * key_dim float32 numbers a row and layer.
Programs have few rows of a matrix, so that also one sequence keeps all processors of a card busy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

VALUES = 16  # Rows of a matrix in one program.
NORM_EPS = tl.constexpr(1e-6)  # Of the norms of queries and keys.


@triton.jit
def unit(x, axis: tl.constexpr):
    """Returns vectors of length one along an axis."""
    return x * tl.rsqrt(tl.sum(x * x, axis, keep_dims=True) + NORM_EPS)


@triton.jit
def log_decay(x, decay_log, decay_bias):
    """Returns -exp(decay_log) * softplus(x + decay_bias)."""
    x += decay_bias
    return -tl.exp(decay_log) * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _decode_kernel(
    qkv, gates, decay_log, decay_bias, states, slots, out, gates_row, state_slot, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    d = tl.arange(0, triton.next_power_of_2(KEY))[None, :]
    v = tl.program_id(2) * BV + tl.arange(0, BV)[:, None]
    d_ok, v_ok = d < KEY, v < VALUE
    source = qkv + row * (2 * KEY_HEADS * KEY + HEADS * VALUE)
    query = unit(tl.load(source + key_head * KEY + d, mask=d_ok, other=0.0).to(tl.float32), 1) * scale
    key = unit(tl.load(source + (KEY_HEADS + key_head) * KEY + d, mask=d_ok, other=0.0).to(tl.float32), 1)
    value = tl.load(source + 2 * KEY_HEADS * KEY + head * VALUE + v, mask=v_ok, other=0.0).to(tl.float32)
    beta = sigmoid(tl.load(gates + row * gates_row + head).to(tl.float32))
    decay = log_decay(
        tl.load(gates + row * gates_row + HEADS + head).to(tl.float32),
        tl.load(decay_log + head),
        tl.load(decay_bias + head),
    )
    place = states + tl.load(slots + row).to(tl.int64) * state_slot + (head * VALUE + v) * KEY + d
    matrix = tl.load(place, mask=d_ok & v_ok, other=0.0) * tl.exp(decay)
    new = (value - tl.sum(matrix * key, 1, keep_dims=True)) * beta
    matrix += new * key
    tl.store(place, matrix, mask=d_ok & v_ok)
    result = tl.sum(matrix * query, 1, keep_dims=True)
    tl.store(out + (row * HEADS + head) * VALUE + v, result.to(out.dtype.element_ty), mask=v_ok)


def delta_decode(
    qkv: Tensor,
    gates: Tensor,
    decay_log: Tensor,
    decay_bias: Tensor,
    states: Tensor,
    slots: Tensor,
    out: Tensor,
    *,
    key_heads: int,
) -> None:
    """Computes one token of each row, and advances the states.

    Args:
        qkv: contiguous [rows or more, channels], queries, keys and values after the convolution.
        gates: [rows or more, 2 * heads], the logits of beta and the inputs of the decay; any row stride.
        decay_log, decay_bias: float32 [heads].
        states: float32 [slots, heads, value_dim, key_dim], any slot stride.
        slots: integers [rows].
        out: contiguous [rows or more, heads, value_dim].
    """
    _, heads, value_dim, key_dim = states.shape
    assert states.stride()[1:] == (value_dim * key_dim, key_dim, 1)
    assert qkv.is_contiguous()
    assert gates.stride(1) == 1
    sizes = {"HEADS": heads, "KEY_HEADS": key_heads, "KEY": key_dim, "VALUE": value_dim, "BV": VALUES}
    _decode_kernel[(len(slots), heads, triton.cdiv(value_dim, VALUES))](
        qkv, gates, decay_log, decay_bias, states, slots, out, gates.stride(0), states.stride(0), key_dim**-0.5,
        **sizes, num_warps=2,
    )  # fmt: skip


@triton.jit
def _gated_norm_kernel(x, z, weight, out, z_row, eps, HEADS: tl.constexpr, VALUE: tl.constexpr, BH: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)[:, None]
    v = tl.arange(0, triton.next_power_of_2(VALUE))[None, :]
    ok = (h < HEADS) & (v < VALUE)
    place = h * VALUE + v
    result = tl.load(x + token * HEADS * VALUE + place, mask=ok, other=0.0).to(tl.float32)
    gate = tl.load(z + token * z_row + place, mask=ok, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(result * result, 1, keep_dims=True) / VALUE + eps)
    normed = result * rstd * tl.load(weight + v, mask=v < VALUE, other=0.0).to(tl.float32)
    tl.store(out + token * HEADS * VALUE + place, (normed * gate * sigmoid(gate)).to(out.dtype.element_ty), mask=ok)


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns silu(z) times the RMSNorm of each head, [T, heads * value_dim].

    Args:
        x: contiguous [T, heads, value_dim].
        z: [T, heads * value_dim], any row stride.
        weight: [value_dim].
    """
    tokens, heads, value_dim = x.shape
    assert x.is_contiguous()
    assert z.stride(1) == 1
    out = torch.empty(tokens, heads * value_dim, dtype=x.dtype, device=x.device)
    block = min(8, triton.next_power_of_2(heads))
    sizes = {"HEADS": heads, "VALUE": value_dim, "BH": block}
    _gated_norm_kernel[(tokens, triton.cdiv(heads, block))](x, z, weight, out, z.stride(0), eps, **sizes, num_warps=4)
    return out
