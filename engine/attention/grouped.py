"""Attention of a model with KV groups: each group has block tables of its own, and a backend for its window.

The metadata of a step is one metadata per group. A layer attends with that of its group (`LayerKV.group`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from common.kv_layout import KVLayout
from engine.attention.base import StepShape
from engine.attention.torch_backend import TorchAttention
from engine.attention.triton_backend import DecodeRows, TritonAttention
from engine.kv.kv_pool import LayerKV

Backend = TorchAttention | TritonAttention


def make_attention(
    layout: KVLayout, windows: Sequence[int | None], make: Callable[[Sequence[int | None]], Backend]
) -> Backend | GroupedAttention:
    """Returns the attention of a model's layers, which have these windows. `make` makes a backend without groups."""
    if not layout.groups:
        return make(windows)
    return GroupedAttention([group.window for group in layout.groups], lambda window: make([window]))


class GroupedMetadata(NamedTuple):
    """The metadata of one step, for each KV group."""

    groups: tuple[Any, ...]


class GroupedAttention:
    """AttentionBackend over KV groups. Methods that only `TritonAttention` has need backends of that class."""

    def __init__(self, windows: Sequence[int], make: Callable[[int | None], Backend]) -> None:
        """`windows` has the window of each group, 0 for none; `make` makes the backend of layers with a window."""
        made = {window: make(window or None) for window in windows}
        self._backends: list[Any] = [made[window] for window in windows]
        self._distinct: list[Any] = list(made.values())

    @property
    def reads_unwritten_slots(self) -> bool:
        return bool(self._backends[0].reads_unwritten_slots)

    def prepare(self, step: StepShape) -> GroupedMetadata:
        steps = [StepShape(step.starts, step.num_new, blocks) for blocks in (step.blocks, *step.groups)]
        return GroupedMetadata(tuple(b.prepare(s) for b, s in zip(self._backends, steps, strict=True)))

    def select_tokens(self, metadata: GroupedMetadata, tokens: Tensor, positions: Tensor) -> GroupedMetadata:
        pairs = zip(self._backends, metadata.groups, strict=True)
        return GroupedMetadata(tuple(b.select_tokens(group, tokens, positions) for b, group in pairs))

    def decode_metadata(
        self, slot_mappings: Sequence[Tensor], cu_q: Tensor, seq_lens: Tensor, tables: Sequence[Tensor], *, max_new: int
    ) -> GroupedMetadata:
        """`TritonAttention.decode_metadata` with a slot mapping and block tables for each group."""
        each = zip(self._backends, slot_mappings, tables, strict=True)
        return GroupedMetadata(tuple(b.decode_metadata(s, cu_q, seq_lens, t, max_new=max_new) for b, s, t in each))

    def listed_metadata(
        self,
        slot_mappings: Sequence[Tensor],
        cu_q: Tensor,
        seq_lens: Tensor,
        tables: Sequence[Tensor],
        tiles: Tensor,
        decode: DecodeRows | None = None,
    ) -> GroupedMetadata:
        """`TritonAttention.listed_metadata` with a slot mapping and block tables for each group."""
        each = zip(self._backends, slot_mappings, tables, strict=True)
        return GroupedMetadata(tuple(b.listed_metadata(s, cu_q, seq_lens, t, tiles, decode) for b, s, t in each))

    def list_tiles(self, starts: np.ndarray, num_new: np.ndarray, first_row: int, max_tokens: int) -> np.ndarray:
        tiles: np.ndarray = self._backends[0].list_tiles(starts, num_new, first_row, max_tokens)
        return tiles

    def tile_list_size(self, max_tokens: int, max_rows: int) -> int:
        return int(self._backends[0].tile_list_size(max_tokens, max_rows))

    def warm_up(self, step: StepShape) -> None:
        for backend in self._distinct:
            backend.warm_up(step)

    def slot_mapping(self, metadata: GroupedMetadata, cache: LayerKV) -> Tensor:
        slots: Tensor = metadata.groups[cache.group].slot_mapping
        return slots

    def write(self, kv: Tensor, cache: LayerKV, metadata: GroupedMetadata) -> None:
        self._backends[cache.group].write(kv, cache, metadata.groups[cache.group])

    def attend(
        self,
        query: Tensor,
        kv: Tensor,
        cache: LayerKV,
        metadata: GroupedMetadata,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        group = cache.group
        out: Tensor = self._backends[group].attend(query, kv, cache, metadata.groups[group], window, sinks)
        return out

    def attend_written(
        self,
        query: Tensor,
        kv: Tensor,
        cache: LayerKV,
        metadata: GroupedMetadata,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        group = cache.group
        out: Tensor = self._backends[group].attend_written(query, kv, cache, metadata.groups[group], window, sinks)
        return out
