"""The interface between models and attention implementations.

A backend is created once per KV pool. Each step calls `prepare` once, which uploads the metadata of the step, and
`attend` once per layer with this metadata. A row is a sequence of the step. The new tokens of all rows are concatenated
in one flat dimension T. Row r computes num_new[r] tokens after the starts[r] tokens that are in the cache. Its i-th new
token sees the first starts[r] + i + 1 tokens of its sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from torch import Tensor

from engine.kv.kv_pool import LayerKV

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class StepShape:
    """The rows of one step, on the host."""

    starts: Sequence[int]  # Number of each row's tokens that are in the cache before the step.
    num_new: Sequence[int]  # Number of each row's new tokens, at least 1.
    blocks: Sequence[Sequence[int] | np.ndarray]  # Each row's physical blocks in order, for starts + num_new tokens.
    groups: Sequence[Sequence[np.ndarray]] = ()  # For each KV group but the first, the same of this group.


class StepLayout(NamedTuple):
    """The arrays of a step shape, int64: starts [R], num_new [R], tables [R, n], row_of [T] and positions [T]."""

    starts: np.ndarray
    num_new: np.ndarray
    tables: np.ndarray  # The physical blocks of each row.
    row_of: np.ndarray  # The row of each token.
    positions: np.ndarray


def layout_step(step: StepShape, block_size: int, pad_block: int) -> StepLayout:
    """Returns the arrays of a step. Block tables are padded with `pad_block`."""
    starts, num_new = np.asarray(step.starts, dtype=np.int64), np.asarray(step.num_new, dtype=np.int64)
    counts = -(-(starts + num_new) // block_size)
    tables = np.full((len(starts), int(counts.max())), pad_block, dtype=np.int64)
    for row, (blocks, count) in enumerate(zip(step.blocks, counts.tolist(), strict=True)):
        tables[row, :count] = blocks[:count]
    row_of = np.repeat(np.arange(len(starts)), num_new)
    firsts = np.cumsum(num_new) - num_new
    return StepLayout(starts, num_new, tables, row_of, np.arange(len(row_of)) + (starts - firsts)[row_of])


class AttentionBackend(Protocol[M]):
    """Paged causal attention with grouped heads.

    Scores are q . k * scale, then softcap * tanh(score / softcap) if the model has a softcap. A backend may have a
    `first_position`: no query sees a key before it. All keys and values are read from the cache, also those of new
    tokens, so splitting a prompt into chunks changes no result with an 8-bit cache.
    """

    @property
    def reads_unwritten_slots(self) -> bool:
        """Whether `attend` reads and masks the unused slots after a row's last token. They must then be finite."""

    def prepare(self, step: StepShape) -> M:
        """Makes the metadata of one step, on the device."""

    def select_tokens(self, metadata: M, tokens: Tensor, positions: Tensor) -> M:
        """Makes the metadata for attending with some tokens of a step.

        The keys and values of these tokens are in the cache. Attention with this metadata writes nothing.

        Args:
            metadata: metadata of the step.
            tokens: int64 [R], indices of the tokens in the step.
            positions: int64 [T], the positions of all tokens of the step.
        """

    def write(self, kv: Tensor, cache: LayerKV, metadata: M) -> None:
        """Writes new keys and values without attending. `metadata` may be of another backend over the same blocks."""

    def attend(
        self,
        query: Tensor,
        kv: Tensor,
        cache: LayerKV,
        metadata: M,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Writes new keys and values, then attends. Returns [T, heads, value_dim].

        Args:
            query: [T, heads, head_dim]; may be a strided view.
            kv: [T, 2, kv_heads, head_dim] with rotated keys, or latents [T, 1, 1, head_dim]; may be a strided view.
            cache: one layer of the pool.
            window: number of tokens that a query sees, itself included. None: all.
            sinks: [heads], a logit of each head that takes part in the softmax, without a value. None: there is none.
        """
