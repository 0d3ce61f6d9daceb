"""Expands the host's packed rows of a decode step into all inputs of its kernels, in one launch.

    packed row, int32:  slot | start | first | num_new | tokens[query] | blocks[blocks_touched(query, block_size)]

With KV groups there are blocks of each group, and one launch per group; the first blocks are those of the full group.
`first` is the row's first token in the flat dimension T. `blocks` hold positions start .. start + num_new. The other
blocks of the row's block table are on the device: slot_tables has one table per slot, and this kernel updates it. Token
-1 stands for the token that was sampled last in the slot, which the host may not have received yet.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

#: The first words of a packed row. HEADER is their number.
SLOT, START, FIRST, NUM_NEW, HEADER = range(5)
_HEADER = tl.constexpr(HEADER)
_TABLE_TILE = tl.constexpr(256)  # Block table entries that the kernel copies at once.


def packed_width(query: int, block_size: int, groups: int = 1) -> int:
    """Returns the number of int32 words of a packed row with up to `query` tokens."""
    return HEADER + query + groups * blocks_touched(query, block_size)


def blocks_touched(query: int, block_size: int) -> int:
    """Returns the largest number of blocks in which `query` consecutive tokens can lie."""
    return (query + block_size - 2) // block_size + 1


@triton.jit(do_not_specialize=["rows", "pad", "pad_block"])
def _decode_inputs_kernel(
    packed,
    slot_tables,
    last_tokens,
    out,
    rows,
    pad,
    pad_block,
    slot_row,
    table_row,
    Q: tl.constexpr,
    WIDTH: tl.constexpr,
    BS: tl.constexpr,
    FRESH: tl.constexpr,
    TAIL: tl.constexpr,
):
    row = tl.program_id(0)
    mine = packed + row * WIDTH
    slot = tl.load(mine).to(tl.int64)
    start = tl.load(mine + 1)
    first = tl.load(mine + 2)
    num_new = tl.load(mine + 3)
    final = packed + (rows - 1) * WIDTH
    total = tl.load(final + 2) + tl.load(final + 3)
    fresh = mine + _HEADER + Q + FRESH
    base = start // BS
    QP: tl.constexpr = triton.next_power_of_2(Q)
    j = tl.arange(0, QP)
    live = j < num_new

    token = tl.load(mine + _HEADER + j, mask=live, other=0).to(tl.int64)
    token = tl.where(token < 0, tl.load(last_tokens + slot), token)
    position = start + j
    block = tl.load(fresh + position // BS - base, mask=live, other=0)
    tl.store(out.tokens + first + j, token, mask=live)
    tl.store(out.positions + first + j, position, mask=live)
    tl.store(out.slot_mapping + first + j, block * BS + position % BS, mask=live)
    tl.store(out.token_slots + first + j, tl.zeros([QP], tl.int64) + slot, mask=live)
    tl.store(out.sample_positions + first + j, position + 1, mask=live)
    tl.store(out.offsets + first + j, j, mask=live)
    # Padding tokens follow the tokens of the last row. They are computed, but slot -1 and the pad slot discard their
    # results.
    spare = row * Q + j
    unowned = (j < Q) & (spare >= total)
    tl.store(out.tokens + spare, tl.zeros([QP], tl.int64), mask=unowned)
    tl.store(out.positions + spare, tl.zeros([QP], tl.int32), mask=unowned)
    tl.store(out.slot_mapping + spare, tl.full([QP], -1, tl.int32), mask=unowned)
    tl.store(out.token_slots + spare, tl.zeros([QP], tl.int64) + pad, mask=unowned)
    tl.store(out.sample_positions + spare, tl.zeros([QP], tl.int32), mask=unowned)
    tl.store(out.offsets + spare, tl.zeros([QP], tl.int32), mask=unowned)

    end = start + num_new
    tl.store(out.row_slots + row, slot)
    tl.store(out.seq_lens + row, tl.where(num_new > 0, end, 0))
    tl.store(out.cu_q + row, first)
    if row == rows - 1:
        tl.store(out.cu_q + rows, total)

    count = tl.where(num_new > 0, (end + BS - 1) // BS, 0)
    line = slot_tables + slot * slot_row
    for t in range(0, count, _TABLE_TILE):
        i = t + tl.arange(0, _TABLE_TILE)
        ok = i < count
        new = ok & (i >= base)
        entry = tl.load(line + i, mask=ok & (i < base), other=0)
        entry = tl.where(new, tl.load(fresh + i - base, mask=new, other=0), entry)
        if TAIL >= 0:  # the blocks before the window may belong to other sequences
            entry = tl.where(i < base - TAIL, pad_block, entry)
        tl.store(out.tables + row * table_row + i, entry, mask=ok)
        tl.store(line + i, entry, mask=new)


class DecodeInputs(NamedTuple):
    """The device inputs of a decode step with B rows and T = B * query tokens.

    The tokens of the rows are concatenated, then padding tokens fill T.
    """

    tokens: Tensor  # int64 [T], the token ids.
    positions: Tensor  # int32 [T], the position of each token.
    slot_mapping: Tensor  # int32 [T], block * block_size + offset of each token's KV; -1 for padding tokens.
    token_slots: Tensor  # int64 [T], the slot of each token's row; the last slot for padding tokens.
    sample_positions: Tensor  # int32 [T], the position after each token.
    offsets: Tensor  # int32 [T], the index of each token in its row.
    row_slots: Tensor  # int64 [B], the slot of each row.
    seq_lens: Tensor  # int32 [B], keys with the new tokens; 0 for a row without tokens.
    tables: Tensor  # int32 [B, n], the block table of each row.
    cu_q: Tensor  # int32 [B + 1], the first token of each row.

    @classmethod
    def empty(cls, rows: int, tokens: int, table_width: int, device: torch.device) -> DecodeInputs:
        """Allocates the inputs for steps of up to `rows` rows and `tokens` tokens in total."""
        shapes = [(tokens,)] * 6 + [(rows,), (rows,), (rows, table_width), (rows + 1,)]
        long = ("tokens", "token_slots", "row_slots")
        dtypes = [torch.int64 if name in long else torch.int32 for name in cls._fields]
        return cls(*(torch.zeros(s, dtype=d, device=device) for s, d in zip(shapes, dtypes, strict=True)))

    def slice_for(self, rows: int, query: int) -> DecodeInputs:
        """Returns views of these inputs for a smaller step."""
        lengths = [rows * query] * 6 + [rows] * 3 + [rows + 1]
        return DecodeInputs._make(x[:length] for x, length in zip(self, lengths, strict=True))


def decode_inputs(
    packed: Tensor,
    slot_tables: Tensor,
    last_tokens: Tensor,
    out: DecodeInputs,
    *,
    query: int,
    block_size: int,
    group: int = 0,
    groups: int = 1,
    tail: int | None = None,
    pad_block: int = 0,
) -> None:
    """Fills `out` and updates slot_tables. Rows without tokens must be the last rows.

    Args:
        packed: contiguous int32 [B, packed_width(query, block_size, groups)].
        slot_tables: int32 [slots, n]. The last slot is the pad slot, which no sequence uses.
        last_tokens: int64 [slots], the token sampled last in each slot.
        query: largest number of tokens in a row.
        group: the KV group whose blocks go to `out` and slot_tables.
        tail: blocks before the block of `start` that a window sees; those before become pad_block. None: no window.
    """
    rows, width = packed.shape
    assert width == packed_width(query, block_size, groups)
    assert packed.is_contiguous()
    tensors, pads = (packed, slot_tables, last_tokens, out), (slot_tables.shape[0] - 1, pad_block)
    strides, sizes = (slot_tables.stride(0), out.tables.stride(0)), {"Q": query, "WIDTH": width, "BS": block_size}
    sizes |= {"FRESH": group * blocks_touched(query, block_size), "TAIL": -1 if tail is None else tail}
    _decode_inputs_kernel[(rows,)](*tensors, rows, *pads, *strides, **sizes, num_warps=4)
