"""The seam between models and attention implementations.

A backend is made once per KV pool. Per step, `prepare` turns the step's shape into whatever the backend needs on the
device (once, not per layer), and `attend` is called once per layer with that object. Rows are the items of a step in
order; tokens of all rows follow each other in one flat dimension T. Row r computes num_new[r] tokens after starts[r]
that are in the cache already, and sees exactly the first starts[r] + i + 1 tokens of its own sequence from its i-th.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from torch import Tensor

from engine.kv.layer_kv import LayerKV

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class StepShape:
    """Host-side shape of one step: blocks[r] are the physical blocks of row r in logical order.

    blocks[r] covers starts[r] + num_new[r] tokens and may be longer. Every num_new is at least 1.
    """

    starts: Sequence[int]
    num_new: Sequence[int]
    blocks: Sequence[Sequence[int] | np.ndarray]


class AttentionBackend(Protocol[M]):
    """Paged causal attention with grouped heads.

    Scores are q . k * scale, then softcap * tanh(score / softcap) where the model has a softcap. A backend may be made
    with a `first` token: those before it are seen by nobody. All that is seen is read from the cache, new tokens too:
    with an 8-bit cache a step's cut into chunks changes no number.
    """

    @property
    def reads_unwritten_slots(self) -> bool:
        """Slots past a row's end are read, and masked: they must be finite."""

    def prepare(self, step: StepShape) -> M:
        """Metadata of one step, on the device."""

    def select_rows(self, metadata: M, rows: Tensor, positions: Tensor) -> M:
        """Metadata of a step of the tokens `rows` (int64 [R]) of another one alone, whose keys and values are in the
        cache: it writes nothing.

        metadata, positions: of that step; positions int64 [T].
        """

    def write(self, kv: Tensor, cache: LayerKV, metadata: M) -> None:
        """Writes the new keys and values, and attends to nothing. metadata may be that of another backend over the same
        blocks.
        """

    def attend(self, query: Tensor, kv: Tensor, cache: LayerKV, metadata: M, window: int | None) -> Tensor:
        """Writes the new keys and values, then attends; returns [T, heads, head_dim].

        query: [T, heads, head_dim]; kv: [T, 2, kv_heads, head_dim], keys already rotated (both may be strided views);
        cache: one layer of the pool; window: tokens that a query sees, itself included, None for all.
        """
