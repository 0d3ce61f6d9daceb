"""Builds model and KV pool on one device. `TensorParallelBuilder` builds them on several devices."""

from __future__ import annotations

import torch

from common.kv_layout import KVLayout
from engine.kv.kv_pool import TORCH_DTYPES, KVPool
from engine.models.base import Model
from engine.models.loader import ModelSource
from engine.models.shard import UNSHARDED, Shard


class EngineBuilder:
    """Builds the parts of an engine that differ between one and several devices: here all of them on one device."""

    shard: Shard = UNSHARDED  # The part of the model in this process.

    def __init__(self, source: ModelSource, device: torch.device) -> None:
        self._source, self._device = source, device

    def load(self, max_len: int, dtype: str) -> Model:
        """Loads the model for sequences of up to `max_len` tokens."""
        return self._source.load(max_len, self._device, TORCH_DTYPES[dtype])

    def pool(self, layout: KVLayout, num_blocks: int, device: torch.device) -> KVPool:
        """Makes a KV pool on every device."""
        return KVPool(layout, num_blocks, device)
