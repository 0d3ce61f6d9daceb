"""The causal convolution before the gated delta rule: each channel over the last TAPS tokens of its sequence, and silu.

The state of a sequence has its last TAPS - 1 inputs, oldest first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gated_delta.rows import CHUNK, DeviceChunks, DeviceRows

BLOCK = 256  # Channels of a program that decodes or stores.
CHUNK_BLOCK = 64  # Channels of a program that convolves a chunk.


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _decode_kernel(
    x, weight, state, slots, out, x_row, state_slot, CHANNELS: tl.constexpr, TAPS: tl.constexpr, BC: tl.constexpr
):
    """Convolves BC channels of a row of one token, and moves the row's state by this token."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    ok = c < CHANNELS
    kept = state + tl.load(slots + row).to(tl.int64) * state_slot + c
    newest = tl.load(x + row * x_row + c, mask=ok, other=0.0)
    total = newest.to(tl.float32) * tl.load(weight + c * TAPS + TAPS - 1, mask=ok, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS - 1):
        value = tl.load(kept + tap * CHANNELS, mask=ok, other=0.0)
        total += value.to(tl.float32) * tl.load(weight + c * TAPS + tap, mask=ok, other=0.0).to(tl.float32)
        if tap > 0:
            tl.store(kept + (tap - 1) * CHANNELS, value, mask=ok)
    tl.store(kept + (TAPS - 2) * CHANNELS, newest, mask=ok)
    tl.store(out + row * CHANNELS + c, _silu(total).to(out.dtype.element_ty), mask=ok)


@triton.jit
def _chunk_kernel(
    x, weight, state, chunks, out, x_row, state_slot,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Convolves BC channels of one chunk. It reads the states and does not change them."""
    chunk = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    t = tl.arange(0, CHUNK)[:, None]
    ok = (c < CHANNELS) & (t < tl.load(chunks.length + chunk))
    row = tl.load(chunks.row + chunk)
    token = tl.load(chunks.first_token + chunk) + t
    first = tl.load(chunks.row_token + row)
    kept = state + tl.load(chunks.row_slot + row).to(tl.int64) * state_slot
    total = tl.zeros((CHUNK, BC), dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        source = token - (TAPS - 1 - tap)
        new = ok & (source >= first)
        old = ok & (source < first)
        value = tl.load(x + source.to(tl.int64) * x_row + c, mask=new, other=0.0)
        value += tl.load(kept + (source - first + TAPS - 1) * CHANNELS + c, mask=old, other=0.0)
        total += value.to(tl.float32) * tl.load(weight + c * TAPS + tap, mask=c < CHANNELS, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * CHANNELS + c, _silu(total).to(out.dtype.element_ty), mask=ok)


@triton.jit
def _store_inputs(x, kept, target, first, end, c, ok, x_row, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """Stores the inputs of the TAPS - 1 tokens before `end`; `kept` has those before the row's token `first`.

    `target` may be `kept`: an input moves to an earlier place, which was read before.
    """
    for tap in tl.static_range(TAPS - 1):
        source = tl.zeros_like(c) + (end - (TAPS - 1) + tap)
        value = tl.load(x + source.to(tl.int64) * x_row + c, mask=ok & (source >= first), other=0.0)
        value += tl.load(kept + (source - first + TAPS - 1) * CHANNELS + c, mask=ok & (source < first), other=0.0)
        tl.store(target + tap * CHANNELS + c, value, mask=ok)


@triton.jit
def _store_kernel(x, state, chunks, x_row, state_slot, CHANNELS: tl.constexpr, TAPS: tl.constexpr, BC: tl.constexpr):
    """Stores the state of BC channels of a row: at the ends of its chunks with a snapshot, and at its own end."""
    row = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    ok = c < CHANNELS
    first = tl.load(chunks.row_token + row)
    kept = state + tl.load(chunks.row_slot + row).to(tl.int64) * state_slot
    end = first
    for chunk in range(tl.load(chunks.first_chunk + row), tl.load(chunks.first_chunk + row + 1)):
        end = tl.load(chunks.first_token + chunk) + tl.load(chunks.length + chunk)
        slot = tl.load(chunks.save_slot + chunk).to(tl.int64)
        if slot >= 0:
            _store_inputs(x, kept, state + slot * state_slot, first, end, c, ok, x_row, CHANNELS, TAPS)
    _store_inputs(x, kept, kept, first, end, c, ok, x_row, CHANNELS, TAPS)


def convolve(x: Tensor, weight: Tensor, state: Tensor, rows: DeviceRows) -> Tensor:
    """Returns silu of the convolution of x, [T, channels], and advances the states.

    Args:
        x: [T, channels], any row stride.
        weight: [channels, taps], the newest token's tap last.
        state: [slots, taps - 1, channels], any slot stride.
    """
    channels, taps = weight.shape
    assert x.stride(1) == 1
    assert state.stride()[1:] == (channels, 1)
    out = torch.empty(len(x), channels, dtype=x.dtype, device=x.device)
    sizes = {"CHANNELS": channels, "TAPS": taps}
    strides = x.stride(0), state.stride(0)
    if decodes := len(rows.decode_slots):
        grid = decodes, triton.cdiv(channels, BLOCK)
        _decode_kernel[grid](x, weight, state, rows.decode_slots, out, *strides, **sizes, BC=BLOCK, num_warps=4)
    if (chunks := rows.chunks) is not None:
        _convolve_chunks(x, weight, state, chunks, out, sizes)
    return out


def _convolve_chunks(
    x: Tensor, weight: Tensor, state: Tensor, chunks: DeviceChunks, out: Tensor, sizes: dict[str, int]
) -> None:
    channels, strides = sizes["CHANNELS"], (x.stride(0), state.stride(0))
    grid = len(chunks.length), triton.cdiv(channels, CHUNK_BLOCK)
    blocks = {"CHUNK": CHUNK, "BC": CHUNK_BLOCK}
    _chunk_kernel[grid](x, weight, state, chunks, out, *strides, **sizes, **blocks, num_warps=4)
    # After all chunks have read the states.
    grid = len(chunks.row_slot), triton.cdiv(channels, BLOCK)
    _store_kernel[grid](x, state, chunks, *strides, **sizes, BC=BLOCK, num_warps=4)
