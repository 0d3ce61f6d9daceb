"""What an engine is made of when it computes on one device; `Leader` is the same over several."""

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
    """Makes the parts of an engine. shard: what of the model this process holds."""

    @property
    def shard(self) -> Shard: ...

    def load(self, max_len: int, dtype: str) -> Model: ...

    def pool(self, layout: KVLayout, num_blocks: int, device: torch.device) -> KVPool: ...

    def attention(self, own: AttentionBackend[Any]) -> AttentionBackend[Any]: ...


class SingleDeviceBuilder:
    """The whole model on one device."""

    shard = UNSHARDED

    def __init__(self, source: ModelSource, device: torch.device) -> None:
        self._source, self._device = source, device

    def load(self, max_len: int, dtype: str) -> Model:
        return self._source.load(max_len, self._device, TORCH_DTYPES[dtype])

    def pool(self, layout: KVLayout, num_blocks: int, device: torch.device) -> KVPool:
        return KVPool(layout, num_blocks, device)

    def attention(self, own: AttentionBackend[Any]) -> AttentionBackend[Any]:
        return own
