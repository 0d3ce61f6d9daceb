"""Which rows of a step use which adapter slot: the input of the grouped products.

Rows are sorted by slot, as in Punica (Chen et al. 2023) and S-LoRA (Sheng et al. 2023). Each run of equal slots is cut
into tiles, and a program of a kernel computes one tile. The number of tiles has a bound that depends on the number of
rows only, so a CUDA graph has a fixed grid, and programs without a tile end early.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from engine.adapters.sites import DecoderSites, Site
from engine.models.layers import RMSNorm

if TYPE_CHECKING:
    from engine.kernels.adapters.changes import ChunkChange, RowChange

Shrunk = Any  #: The result of `AdapterRows.shrink`, for the same rows.
NO_ADAPTER = -1  #: The slot of rows that use the base alone.


class AdapterRows(Protocol):
    """The rows of one step, or some of them, with the adapter of each row. Other rows are not changed."""

    sites: DecoderSites
    slots: np.ndarray | None  #: The slot of each row, int64; None if a CUDA graph reads them from the device

    def shrink(self, x: Tensor, site: Site, norm: RMSNorm | None) -> Shrunk:
        """Computes A norm(x) for x [rows, inputs]. norm None: x as it is.

        It may come before the base's product of x, so that the product loads its weights meanwhile.
        """

    def expand(self, shrunk: Shrunk, out: Tensor, *, first_part: int = 0, factor: float = 1.0) -> None:
        """Adds factor * scale * B A norm(x) to `out` in place, [rows, outputs of the parts from `first_part` on]."""

    def expand_swiglu(self, shrunk: Shrunk, gate_up: Tensor) -> Tensor:
        """Adds as `expand` to gate_up [rows, 2 * n], and returns silu(gate) * up of all rows, [rows, n]."""

    def row_change(self, shrunk: Shrunk) -> RowChange | None:
        """Returns what a product of one row needs to do the work of `expand`; None if `expand` has to."""

    def chunk_change(self, shrunk: Shrunk) -> ChunkChange | None:
        """Returns what a product of gate and up needs to do that of `expand_swiglu`; None if `expand_swiglu` has to."""

    def add_embedding(self, out: Tensor, tokens: Tensor) -> None:
        """Adds the change of the embeddings of tokens [rows] to `out`, [rows, hidden]."""


class SlotMemory(NamedTuple):
    """The adapters of all slots on a GPU. `packed.Adapter` describes the parts of a slot."""

    sites: DecoderSites
    max_rank: int  # Largest padded rank
    numbers: Tensor  # [slots, capacity]
    table: Tensor  # int64 [slots, sites, TABLE_WIDTH]
    scales: Tensor  # float32 [slots, sites, MAX_PARTS]
    fuses: bool = False  # Products of one row and of chunks add the adapter's change themselves

    @property
    def num_slots(self) -> int:
        return len(self.numbers)


class StepAdapters:
    """The adapters of a step: of its tokens, and of the tokens that need hidden states (None: of all tokens)."""

    __slots__ = ("results", "tokens")

    def __init__(self, tokens: AdapterRows, results: AdapterRows | None = None) -> None:
        self.tokens = tokens
        self.results = tokens if results is None else results


def max_tiles(rows: int, tile: int, num_slots: int) -> int:
    """Returns the most tiles of `rows` rows: a run has at most one tile that is not full."""
    return min(rows, rows // tile + num_slots + 1)


def tile_rows(slots: np.ndarray, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorts rows by slot and cuts them into tiles of up to `tile` rows.

    Returns the order of the rows, int32 [rows], and the tiles, int32 [tiles, 3]: slot, first place in the order, rows.
    """
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[0] - 1)) if len(ordered) else np.zeros(0, np.int64)
    counts = np.diff(starts, append=len(ordered))
    per_run = -(-counts // tile)
    index = np.arange(per_run.sum()) - np.repeat(np.cumsum(per_run) - per_run, per_run)
    first = np.repeat(starts, per_run) + index * tile
    size = np.minimum(np.repeat(starts + counts, per_run) - first, tile)
    tiles = np.stack([ordered[first], first, size], axis=1)
    return order.astype(np.int32), tiles.astype(np.int32)
