"""Writes new keys and values into the paged pool, where RoPE was applied elsewhere."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _kv_write_kernel(
    new, kv, slots, new_row, new_which, new_head, kv_block, kv_which, kv_head, kv_token,
    HEADS: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        h = tl.arange(0, HP)[:, None]
        d = tl.arange(0, DP)[None, :]
        ok = (h < HEADS) & (d < D)
        x = tl.load(new + token * new_row + which * new_which + h * new_head + d, mask=ok)
        cell = kv + slot // BS * kv_block + which * kv_which + slot % BS * kv_token
        tl.store(cell + h * kv_head + d, x.to(kv.dtype.element_ty), mask=ok)


def kv_write(new: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    """new: [tokens, 2, kv_heads, D]; kv: one layer, [num_blocks, 2, kv_heads, block_size, D]; slots: [tokens], -1:
    skip.
    """
    heads, block_size, dim = kv.shape[2], kv.shape[3], kv.shape[4]
    assert new.stride(3) == 1
    assert kv.stride(4) == 1
    _kv_write_kernel[(new.shape[0], 2)](
        new, kv, slots, new.stride(0), new.stride(1), new.stride(2),
        kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3),
        HEADS=heads, HP=triton.next_power_of_2(heads), D=dim, DP=triton.next_power_of_2(dim), BS=block_size,
        num_warps=4,
    )  # fmt: skip
