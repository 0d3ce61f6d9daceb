"""Adapters of a step in Triton kernels, two launches for each site. This module needs triton at import.

Static buffers hold order and tiles of the rows, so CUDA graphs can capture the launches. Rows that no sequence has
belong to no adapter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.adapters.rows import NO_ADAPTER, SlotMemory, max_tiles, tile_rows
from engine.adapters.sites import Site
from engine.device import ALIGNMENT, pinned_copy
from engine.kernels.adapters.changes import MAX_CHUNK_RANK, ChunkChange, RowChange
from engine.kernels.adapters.products import SlotWeights, expand, gather_states, shrink
from engine.kernels.norm import rms_norm
from engine.models.layers import RMSNorm

FEW_ROWS = 256  # Up to this many rows have small tiles: most adapters of a decode step have few rows
SMALL_TILE, LARGE_TILE = 16, 64


class _TritonShrunk(NamedTuple):
    """A x of one site, see `engine.kernels.adapters.products.shrink`."""

    site: Site
    x: Tensor  # The inputs of `shrink`, normed if `squares` is None
    states: Tensor
    squares: Tensor | None
    eps: float


class TritonRows:
    """Implements `AdapterRows` on a GPU.

    order: int32 [rows]. tiles: int32 [3 * max_tiles]; the argument may be longer. See `rows.tile_rows`.
    """

    def __init__(
        self, memory: SlotMemory, order: Tensor, tiles: Tensor, tile: int, slots: np.ndarray | None = None
    ) -> None:
        self.sites, self.slots = memory.sites, slots
        self.order, self._tile, count = order, tile, max_tiles(len(order), tile, memory.num_slots)
        self.tiles = tiles[: 3 * count]
        self._fuses = memory.fuses
        self._weights = SlotWeights(memory.numbers, memory.table, memory.scales, memory.max_rank)

    def shrink(self, x: Tensor, site: Site, norm: RMSNorm | None) -> _TritonShrunk:
        # Each program of the kernel would norm its inputs; float16 may not hold x times the norm's weight.
        if norm is not None and (len(x) > 1 or x.dtype == torch.float16):
            x, norm = rms_norm(x, norm.weight, norm.eps), None
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        rows: dict[str, Any] = {"order": self.order, "tiles": self.tiles, "tile": self._tile}
        states, squares = shrink(x, self._weights, norm=weight, site=site.index, parts=len(site.names), **rows)
        return _TritonShrunk(site, x, states, squares, eps)

    def expand(self, shrunk: _TritonShrunk, out: Tensor, *, first_part: int = 0, factor: float = 1.0) -> None:
        self._expand(shrunk, out, out, first_part=first_part, factor=factor)

    def expand_swiglu(self, shrunk: _TritonShrunk, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        self._expand(shrunk, gate_up, out, gated=True)
        return out

    def row_change(self, shrunk: _TritonShrunk) -> RowChange | None:
        if len(self.order) > 1 or not self._fuses:
            return None
        site = shrunk.site
        return RowChange(
            shrunk.states,
            self._weights,
            self.tiles,
            site=site.index,
            outputs=site.outputs,
            normed=shrunk.squares is None,
        )

    def chunk_change(self, shrunk: _TritonShrunk) -> ChunkChange | None:
        one = (
            self._fuses
            and self.slots is not None
            and self.slots[0] != NO_ADAPTER
            and bool((self.slots == self.slots[0]).all())
        )
        if not one or shrunk.squares is not None or self._weights.max_rank > MAX_CHUNK_RANK:
            return None
        return ChunkChange(shrunk.x, shrunk.states, self._weights, self.tiles, shrunk.site.index)

    def add_embedding(self, out: Tensor, tokens: Tensor) -> None:
        site = self.sites.embedding
        states = gather_states(tokens, self._weights, site.index, self.order, self.tiles, tile=self._tile)
        self._expand(_TritonShrunk(site, tokens, states, None, 0.0), out, out)

    def _expand(
        self,
        shrunk: _TritonShrunk,
        base: Tensor,
        out: Tensor,
        *,
        first_part: int = 0,
        factor: float = 1.0,
        gated: bool = False,
    ) -> None:
        site = shrunk.site
        expand(
            shrunk.states,
            self._weights,
            base,
            out,
            self.order,
            self.tiles,
            squares=shrunk.squares,
            eps=shrunk.eps,
            inputs=site.inputs,
            site=site.index,
            outputs=site.outputs[first_part:],
            first_part=first_part,
            factor=factor,
            gated=gated,
            tile=self._tile,
        )


class RowBuffer:
    """Order and tiles of up to `max_rows` rows at a fixed address."""

    def __init__(self, memory: SlotMemory, max_rows: int) -> None:
        self._memory = memory
        most = max(max_tiles(max_rows, tile, memory.num_slots) for tile in (SMALL_TILE, LARGE_TILE))
        self._packed = torch.zeros(tiles_start(max_rows) + 3 * most, dtype=torch.int32, device=memory.numbers.device)

    def stage(self, slots: np.ndarray, count: int) -> None:
        """Copies the rows of a step to the device: `slots` of the first rows of `count`, the others have no adapter."""
        packed = pack_rows(slots, count, tile_of(count), self._memory.num_slots)
        self._packed[: len(packed)].copy_(pinned_copy(packed, self._packed.device), non_blocking=True)

    def rows(self, count: int) -> TritonRows:
        """Returns the first `count` rows; `count` is that of `stage`."""
        return TritonRows(self._memory, self._packed[:count], self._packed[tiles_start(count) :], tile_of(count))


def tile_of(rows: int) -> int:
    """Returns the rows of a tile in a step of `rows` rows."""
    return SMALL_TILE if rows <= FEW_ROWS else LARGE_TILE


def pack_rows(slots: np.ndarray, count: int, tile: int, num_slots: int) -> np.ndarray:
    """Returns order and tiles of `count` rows, int32 [tiles_start + 3 * max_tiles]; unused tiles have no rows."""
    padded = np.full(count, NO_ADAPTER, dtype=np.int64)
    padded[: len(slots)] = slots
    order, tiles = tile_rows(padded, tile)
    start = tiles_start(count)
    packed = np.zeros(start + 3 * max_tiles(count, tile, num_slots), dtype=np.int32)
    packed[:count] = order
    packed[start : start + tiles.size] = tiles.reshape(-1)
    return packed


def tiles_start(rows: int) -> int:
    """Returns the place of the tiles behind the order of `rows` rows: kernels are compiled for aligned addresses."""
    step = ALIGNMENT // 4
    return -(-rows // step) * step
