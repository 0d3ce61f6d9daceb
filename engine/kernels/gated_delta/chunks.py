"""The gated delta rule for rows of many tokens, in chunks; the formulas are in engine/models/gated_delta/rule.py.

    prepare   one program per chunk and head, all chunks at once: W, U, and what else the scan reads
    scan      one program per row, head and part of the values, chunk after chunk: results and states

(I + A)^-1 is computed by inverting blocks of 1, 2, 4, ... rows, because the inverse of a lower triangular matrix of two
blocks is [[P, 0], [-R B P, R]] for the blocks' inverses P and R. Powers of A are not used: with equal keys they grow
like binomials, and a sum of them has no correct digit in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import card
from engine.kernels.gated_delta.decode import log_decay, sigmoid, unit
from engine.kernels.gated_delta.rows import CHUNK, DeviceChunks

VALUES = 32  # Values of a head in one program of the scan.
#: Smallest number of columns of a product. Triton 3.6 compiles products of `_prepare_kernel` with 16 or 32 columns of
#: bf16 wrongly for sm_90: results are wrong, and shared memory is read out of range.
MIN_DOT = 64
FLOAT32_SHARED_BYTES = 128 << 10  # Shared memory that `_prepare_kernel` needs for float32 and keys of 128 numbers.
MAX_STAGES = 3  # Chunks that the scan loads ahead, if shared memory allows it.
#: Of products of float32: three products of tensor cores, with nearly all bits. Without tensor cores Triton compiles
#: a product of this size for minutes.
PRECISION = "tf32x3"


class Prepared(NamedTuple):
    """What the scan reads of the chunks. Rows of a chunk without a token are zero."""

    seen: Tensor  # [C, heads, CHUNK, key_dim], W.
    new: Tensor  # [C, heads, CHUNK, value_dim], U.
    query: Tensor  # [C, heads, CHUNK, key_dim], exp(G) Q.
    key: Tensor  # [C, heads, CHUNK, key_dim], exp(G_end - G) K.
    pairs: Tensor  # [C, heads, CHUNK, CHUNK], Q K^T * D.
    decay: Tensor  # float32 [C, heads], exp(G_end).


@triton.jit
def _prepare_kernel(
    qkv, gates, decay_log, decay_bias, chunks, out, gates_row, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr,
    KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    t = tl.arange(0, CHUNK)
    d = tl.arange(0, KEY_PAD)[None, :]
    v = tl.arange(0, VALUE_PAD)[None, :]
    live = t < tl.load(chunks.length + chunk)
    token = (tl.load(chunks.first_token + chunk) + t).to(tl.int64)
    source = qkv + token[:, None] * (2 * KEY_HEADS * KEY + HEADS * VALUE)
    k_ok, v_ok = live[:, None] & (d < KEY), live[:, None] & (v < VALUE)
    work = qkv.dtype.element_ty
    query = unit(tl.load(source + key_head * KEY + d, mask=k_ok, other=0.0).to(tl.float32), 1) * scale
    key = unit(tl.load(source + (KEY_HEADS + key_head) * KEY + d, mask=k_ok, other=0.0).to(tl.float32), 1)
    value = tl.load(source + 2 * KEY_HEADS * KEY + head * VALUE + v, mask=v_ok, other=0.0).to(tl.float32)
    gate = gates + token * gates_row + head
    beta = tl.where(live, sigmoid(tl.load(gate, mask=live, other=0.0).to(tl.float32)), 0.0)
    decay = log_decay(
        tl.load(gate + HEADS, mask=live, other=0.0).to(tl.float32),
        tl.load(decay_log + head),
        tl.load(decay_bias + head),
    )
    total = tl.cumsum(tl.where(live, decay, 0.0), 0)
    end = tl.sum(tl.where(live, decay, 0.0), 0)
    i, j = t[:, None], t[None, :]
    pairs = tl.exp(tl.where(i >= j, total[:, None] - total[None, :], float("-inf")))
    short_key = key.to(work)
    keys = tl.dot(short_key, tl.trans(short_key), input_precision=PRECISION)
    system = tl.where(i > j, beta[:, None] * keys * pairs, 0.0)
    # The inverse of blocks of 2 ** level rows becomes that of blocks of twice the size.
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where((i // 2 == j // 2) & (i > j), system, 0.0)
    for level in range(1, 6):
        lower = (i >> (level + 1) == j >> (level + 1)) & (i >> level > j >> level)
        product = tl.dot(tl.where(lower, system, 0.0), inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, product, input_precision=PRECISION)
    short = inverse.to(work)
    grown = tl.exp(total)[:, None]
    seen = tl.dot(short, (key * grown * beta[:, None]).to(work), input_precision=PRECISION)
    new = tl.dot(short, (value * beta[:, None]).to(work), input_precision=PRECISION)
    scores = tl.dot(query.to(work), tl.trans(short_key), input_precision=PRECISION) * pairs
    place = (chunk * HEADS + head) * CHUNK + t[:, None]
    keys_of, values_of = place * KEY + d, place * VALUE + v
    tl.store(out.seen + keys_of, seen.to(work), mask=d < KEY)
    tl.store(out.new + values_of, new.to(work), mask=v < VALUE)
    tl.store(out.query + keys_of, (query * grown).to(work), mask=d < KEY)
    tl.store(out.key + keys_of, (key * tl.exp(end - total)[:, None]).to(work), mask=d < KEY)
    tl.store(out.pairs + place * CHUNK + t[None, :], scores.to(work))
    tl.store(out.decay + chunk * HEADS + head, tl.exp(end))


@triton.jit
def _scan_kernel(
    prepared, states, chunks, out, state_slot,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr, BV: tl.constexpr,
    KEY_PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    t = tl.arange(0, CHUNK)
    d = tl.arange(0, KEY_PAD)
    v = tl.program_id(2) * BV + tl.arange(0, BV)
    d_ok, v_ok = d < KEY, v < VALUE
    both = d_ok[:, None] & v_ok[None, :]
    cell = (head * VALUE + v[None, :]) * KEY + d[:, None]
    live = states + tl.load(chunks.row_slot + row).to(tl.int64) * state_slot + cell
    matrix = tl.load(live, mask=both, other=0.0)  # of the value's rows, transposed: [key_dim, BV]
    work = prepared.seen.dtype.element_ty
    first = tl.load(chunks.first_chunk + row).to(tl.int64)
    for chunk in range(first, tl.load(chunks.first_chunk + row + 1).to(tl.int64)):
        place = (chunk * HEADS + head) * CHUNK + t[:, None]
        keys_of, values_of = place * KEY + d[None, :], place * VALUE + v[None, :]
        seen = tl.load(prepared.seen + keys_of, mask=d_ok[None, :], other=0.0)
        new = tl.load(prepared.new + values_of, mask=v_ok[None, :], other=0.0).to(tl.float32)
        query = tl.load(prepared.query + keys_of, mask=d_ok[None, :], other=0.0)
        key = tl.load(prepared.key + keys_of, mask=d_ok[None, :], other=0.0)
        pairs = tl.load(prepared.pairs + place * CHUNK + t[None, :])
        short = matrix.to(work)
        new -= tl.dot(seen, short, input_precision=PRECISION)
        short_new = new.to(work)
        result = tl.dot(query, short, input_precision=PRECISION)
        result += tl.dot(pairs, short_new, input_precision=PRECISION)
        matrix *= tl.load(prepared.decay + chunk * HEADS + head)
        matrix += tl.dot(tl.trans(key), short_new, input_precision=PRECISION)
        token = tl.load(chunks.first_token + chunk).to(tl.int64) + t[:, None]
        ok = (t[:, None] < tl.load(chunks.length + chunk)) & v_ok[None, :]
        tl.store(out + (token * HEADS + head) * VALUE + v[None, :], result.to(out.dtype.element_ty), mask=ok)
        slot = tl.load(chunks.save_slot + chunk).to(tl.int64)
        if slot >= 0:
            tl.store(states + slot * state_slot + cell, matrix, mask=both)
    tl.store(live, matrix, mask=both)


def delta_chunks(
    qkv: Tensor,
    gates: Tensor,
    decay_log: Tensor,
    decay_bias: Tensor,
    states: Tensor,
    chunks: DeviceChunks,
    out: Tensor,
    *,
    key_heads: int,
) -> None:
    """Computes the rows in chunks, and advances their states. The arguments are those of `delta_decode`."""
    _, heads, value_dim, key_dim = states.shape
    assert states.stride()[1:] == (value_dim * key_dim, key_dim, 1)
    assert qkv.is_contiguous()
    assert gates.stride(1) == 1
    count = len(chunks.length)

    def empty(size: int) -> Tensor:
        return torch.empty(count, heads, CHUNK, size, dtype=qkv.dtype, device=qkv.device)

    decay = torch.empty(count, heads, dtype=torch.float32, device=qkv.device)
    prepared = Prepared(empty(key_dim), empty(value_dim), empty(key_dim), empty(key_dim), empty(CHUNK), decay)
    key_pad, value_pad = (max(MIN_DOT, triton.next_power_of_2(size)) for size in (key_dim, value_dim))
    sizes: dict[str, Any] = {"HEADS": heads, "KEY": key_dim, "VALUE": value_dim, "CHUNK": CHUNK}
    sizes |= {"KEY_PAD": key_pad, "PRECISION": PRECISION}
    _prepare_kernel[(count, heads)](
        qkv, gates, decay_log, decay_bias, chunks, prepared, gates.stride(0), key_dim**-0.5,
        KEY_HEADS=key_heads, VALUE_PAD=value_pad, **sizes, num_warps=4,
    )  # fmt: skip
    stage_bytes = CHUNK * (3 * key_pad + CHUNK + VALUES) * qkv.element_size()
    stages = max(1, min(MAX_STAGES, card.shared_bytes(qkv.device) // stage_bytes - 1))
    _scan_kernel[(len(chunks.row_slot), heads, triton.cdiv(value_dim, VALUES))](
        prepared, states, chunks, out, states.stride(0), BV=VALUES, **sizes, num_warps=4, num_stages=stages
    )
