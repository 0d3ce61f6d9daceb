"""What a product of the base adds for a LoRA adapter in its own kernel, instead of `expand` (products.py).

    RowChange     a product of one row (gemm.gemv): each program also multiplies its rows of B by the row's states
    ChunkChange   gate and up of a prompt with one adapter (gemm.gemm_swiglu): B is some more depth of the product

The states are those of `shrink`. All but the states is constant in a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.adapters.products import RANK_MULTIPLE, SlotWeights


@dataclass(frozen=True, slots=True)
class RowChange:
    """What a product of one row adds to its result, in the same kernel: scale * B states. See `rows_of_b`."""

    states: Tensor  # Of `shrink`
    weights: SlotWeights
    tiles: Tensor  # The first tile is the row
    site: int
    outputs: tuple[int, ...]  # Of the parts
    normed: bool  # The inputs of `shrink` were normed, else its states lack the rstd of a norm

    def tensors(self) -> ChangeTensors:
        """Returns the tensors that the kernel reads; those with an entry for each site begin at the site."""
        numbers, table, scales = self.weights[:3]
        return ChangeTensors(self.states, numbers, table[:, self.site], scales[:, self.site], self.tiles)

    def sizes(self, norm: bool) -> dict[str, int]:
        """Returns the constants of a kernel with or without a norm."""
        split, _, width = self.states.shape
        first, second = (*self.outputs, 0, 0)[:2]
        sizes = {"SITES": self.weights.table.shape[1], "CAPACITY": self.weights.numbers.stride(0), "WIDTH": width}
        sizes |= {"SPLIT": split, "SPLIT_PAD": triton.next_power_of_2(split)}
        sizes["CHANGED"] = 2 if norm and not self.normed else 1
        return sizes | {"RANK": triton.next_power_of_2(self.weights.max_rank), "N0": first, "N1": second}


NO_CHANGE = dict.fromkeys(("CHANGED", "SITES", "CAPACITY", "WIDTH", "SPLIT", "SPLIT_PAD", "RANK", "N0", "N1"), 0)


@dataclass(frozen=True, slots=True)
class ChunkChange:
    """What a product of gate and up adds to both in the same kernel, if all its rows have one adapter."""

    x: Tensor  # [rows, inputs], the inputs of the product, which were those of `shrink`
    states: Tensor  # Of `shrink`
    weights: SlotWeights
    tiles: Tensor  # The first tile has the adapter's slot
    site: int

    def tensors(self) -> ChangeTensors:
        """As `RowChange.tensors`, but the splits of the states are summed up, times their scales."""
        numbers, table, scales = self.weights[:3]
        states = _sum_states(self.states, self.weights, self.tiles, self.site)
        return ChangeTensors(states, numbers, table[:, self.site], scales[:, self.site], self.tiles)

    def sizes(self) -> dict[str, int]:
        """Returns the constants of the kernel."""
        sizes = {"SITES": self.weights.table.shape[1], "CAPACITY": self.weights.numbers.stride(0)}
        return sizes | {"RANK": self.weights.max_rank, "WIDTH": self.states.shape[2]}


NO_CHUNK_CHANGE = dict.fromkeys(("SITES", "CAPACITY", "RANK", "WIDTH"), 0)
MAX_CHUNK_RANK = 64  # Largest rank of a `ChunkChange`: the kernel has code for each part of 16


class ChangeTensors(NamedTuple):
    """The tensors of a `RowChange` or `ChunkChange` for a kernel."""

    states: Tensor
    numbers: Tensor
    table: Tensor
    scales: Tensor
    tiles: Tensor


@triton.jit
def rows_of_b(change, n, ok, part, column, SITES: tl.constexpr, CAPACITY: tl.constexpr, RANK: tl.constexpr):
    """Loads B of the outputs n of a part that begins at `column`, times the scale, float32 [outputs, RANK].

    Also returns the place of the part's states and its rank; 0 if the row has no adapter. All of it is constant in a
    step.
    """
    slot = tl.load(change.tiles).to(tl.int64)
    has_adapter = slot >= 0
    slot = tl.maximum(slot, 0)
    entry = change.table + slot * SITES * 8
    rank = tl.where(has_adapter, tl.load(entry + 1 + part), 0)
    rank = tl.multiple_of(rank, RANK_MULTIPLE)
    shift = tl.load(entry + 1, mask=part > 0, other=0) + tl.load(entry + 2, mask=part > 1, other=0)
    r = tl.arange(0, RANK)[None, :]
    source = change.numbers + slot * CAPACITY + tl.load(entry + 4 + part) + (n - column)[:, None] * rank + r
    b = tl.load(source, mask=ok[:, None] & (r < rank), other=0.0).to(tl.float32)
    return b * tl.load(change.scales + slot * SITES * 3 + part), shift, rank


@triton.jit
def states_of_row(
    change, shift, rank, SPLIT: tl.constexpr, SPLIT_PAD: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr
):
    """Returns the states of a part, float32 [RANK]: what the rows of `rows_of_b` are multiplied by."""
    r, split = tl.arange(0, RANK)[None, :], tl.arange(0, SPLIT_PAD)[:, None]
    source = change.states + split * WIDTH + shift + r
    return tl.sum(tl.load(source, mask=(split < SPLIT) & (r < rank), other=0.0), 0)


@triton.jit
def add_change_of_pair(
    acc, change, start: tl.constexpr, m0, n0, rows,
    N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SITES: tl.constexpr, CAPACITY: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Returns acc [BM, 2 * BN], columns of gate and then of up, plus the ranks start .. start + 15 of both parts.

    One product computes both parts: the inputs are the states of gate and of up, and B is zero off its two blocks.
    """
    slot = tl.load(change.tiles).to(tl.int64)
    entry = change.table + slot * SITES * 8
    ranks = tl.multiple_of(tl.load(entry + 1), RANK_MULTIPLE), tl.multiple_of(tl.load(entry + 2), RANK_MULTIPLE)
    j, c = tl.arange(0, 2 * BN)[:, None], tl.arange(0, 2 * RANK_MULTIPLE)[None, :]
    is_up, of_up = j >= BN, c >= RANK_MULTIPLE
    n, r = n0 + j % BN, start + c % RANK_MULTIPLE
    rank = tl.where(is_up, ranks[1], ranks[0])
    place = tl.where(is_up, tl.load(entry + 5), tl.load(entry + 4)) + n * rank + r
    b = tl.load(change.numbers + slot * CAPACITY + place, mask=(is_up == of_up) & (n < N) & (r < rank), other=0.0)
    m = m0 + tl.arange(0, BM)[:, None]
    state_rank = tl.where(of_up, ranks[1], ranks[0])
    column = tl.where(of_up, ranks[0], 0) + r
    states = tl.load(change.states + m.to(tl.int64) * WIDTH + column, mask=(m < rows) & (r < state_rank), other=0.0)
    return tl.dot(states, tl.trans(b), acc, input_precision="ieee")


@triton.jit(do_not_specialize=["site", "rows"])
def _sum_kernel(
    states, out, table, scales, tiles, site, rows,
    SITES: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    n = tl.arange(0, BN)[None, :]
    ok = (row < rows) & (n < WIDTH)
    slot = tl.load(tiles).to(tl.int64)
    scale = scales + (slot * SITES + site) * 3
    factor = tl.where(n < tl.load(table + (slot * SITES + site) * 8 + 1), tl.load(scale), tl.load(scale + 1))
    total = tl.zeros([BM, BN], tl.float32)
    for split in tl.static_range(SPLIT):
        total += tl.load(states + split * rows * WIDTH + row * WIDTH + n, mask=ok, other=0.0)
    tl.store(out + row * WIDTH + n, (total * factor).to(out.dtype.element_ty), mask=ok)


def _sum_states(states: Tensor, weights: SlotWeights, tiles: Tensor, site: int) -> Tensor:
    """Returns the states of gate and up times their scales, [rows, width] in the dtype of the weights."""
    split, rows, width = states.shape
    out = torch.empty(rows, width, dtype=weights.numbers.dtype, device=states.device)
    sizes = {"SITES": weights.table.shape[1], "WIDTH": width, "SPLIT": split}
    tiling = {"BM": 32, "BN": triton.next_power_of_2(width)}
    grid = (triton.cdiv(rows, 32),)
    _sum_kernel[grid](states, out, weights.table, weights.scales, tiles, site, rows, **sizes, **tiling)
    return out
