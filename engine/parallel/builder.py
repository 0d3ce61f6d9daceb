"""Builds model, KV pool and attention on one device. `TensorParallelBuilder` builds them on several devices."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from common.kv_layout import KVLayout
from engine.attention.base import AttentionBackend
from engine.kv.kv_pool import TORCH_DTYPES, KVPool
from engine.models.base import Model
from engine.models.loader import ModelSource
from engine.models.shard import UNSHARDED, Shard


class EngineBuilder(Protocol):
    """The builder of the parts of an engine that differ between one and several devices."""

    @property
    def shard(self) -> Shard:
        """The part of the model in this process."""

    def load(self, max_len: int, dtype: str) -> Model:
        """Loads the model for sequences of up to `max_len` tokens."""

    def pool(self, layout: KVLayout, num_blocks: int, device: torch.device) -> KVPool:
        """Makes a KV pool on every device."""

    def attention(self, local: AttentionBackend[Any]) -> AttentionBackend[Any]:
        """Makes the attention on every device.

        Args:
            local: the attention on this device.
        """


class SingleDeviceBuilder:
    """The builder of an engine with the whole model on one device."""

    shard = UNSHARDED

    def __init__(self, source: ModelSource, device: torch.device) -> None:
        self._source, self._device = source, device

    def load(self, max_len: int, dtype: str) -> Model:
        return self._source.load(max_len, self._device, TORCH_DTYPES[dtype])

    def pool(self, layout: KVLayout, num_blocks: int, device: torch.device) -> KVPool:
        return KVPool(layout, num_blocks, device)

    def attention(self, local: AttentionBackend[Any]) -> AttentionBackend[Any]:
        return local
