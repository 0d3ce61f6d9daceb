"""Rank 0's part of a tensor-parallel engine: stand-ins for model, KV pool and attention that make every other rank do
the same.

What the engine asks of a model or of its pool, it asks of these; the runner, the scheduler and the sampler know of no
other rank. Each call is told to the ranks before it is made here, and calls are made on the engine's thread alone, so
all ranks do the same things in one order. States are equal on every rank after a sum; logits are made here only.

A step that fails here halfway leaves the ranks apart, so it is the end of the group (see Members.fail).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.errors import ConfigError, InternalError
from common.kv_layout import KVLayout
from engine.attention.base import AttentionBackend, StepShape
from engine.config import EngineConfig
from engine.kv.blocks import BlockCopy
from engine.kv.kv_pool import TORCH_DTYPES, KVPool
from engine.kv.layer_kv import LayerKV
from engine.models.base import LayerHook, Model
from engine.models.decoder import Decoder
from engine.models.loader import ModelSource, load_shard
from engine.models.shard import SHARD_FIELD, Shard
from engine.parallel import step_messages
from engine.parallel.collectives import AllReduceOps, Collectives, open_store
from engine.parallel.rank_group import RankGroup

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MirroredMetadata:
    """A step's shape, and what the backend made of it."""

    shape: StepShape
    metadata: Any


class MirroredAttention:
    """`own` on this rank's heads; remembers each step's shape, which the other ranks need."""

    def __init__(self, own: AttentionBackend[Any]) -> None:
        self.own = own

    @property
    def reads_unwritten_slots(self) -> bool:
        return self.own.reads_unwritten_slots

    def prepare(self, step_messages: StepShape) -> MirroredMetadata:
        return MirroredMetadata(step_messages, self.own.prepare(step_messages))

    def select_rows(self, metadata: MirroredMetadata, rows: Tensor, positions: Tensor) -> MirroredMetadata:
        raise InternalError("each rank picks from its own metadata")

    def write(self, kv: Tensor, cache: LayerKV, metadata: MirroredMetadata) -> None:
        self.own.write(kv, cache, metadata.metadata)

    def attend(
        self, query: Tensor, kv: Tensor, cache: LayerKV, metadata: MirroredMetadata, window: int | None
    ) -> Tensor:
        return self.own.attend(query, kv, cache, metadata.metadata, window)


class MirroredModel:
    """The model over all ranks. Graphs cannot hold it: each step is told to the others from the host."""

    capturable = False

    def __init__(self, own: Decoder, members: RankGroup, collectives: Collectives) -> None:
        self._own, self._members, self._collectives = own, members, collectives

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Sequence[LayerKV],
        backend: AttentionBackend[Any],
        metadata: Any,
        rows: Tensor | None = None,
        *,
        layer_hook: LayerHook | None = None,
    ) -> Tensor:
        assert isinstance(backend, MirroredAttention)
        assert isinstance(metadata, MirroredMetadata)
        self._members.send(
            "step",
            step_messages.pack_step(metadata.shape, cache[0].block_size),
            tokens=len(tokens),
            rows=None if rows is None else len(rows),
        )
        try:
            self._collectives.broadcast(step_messages.join_ids(tokens, positions, rows))
            return self._own.forward(tokens, positions, cache, backend.own, metadata.metadata, rows, layer_hook=layer_hook)
        except Exception as error:
            raise self._members.fail(f"a step failed on rank 0: {error}") from error

    def write_kv(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Sequence[LayerKV],
        backend: AttentionBackend[Any],
        metadata: Any,
    ) -> None:
        raise InternalError("a draft model is not computed by several ranks")

    def final_norm(self, hidden: Tensor) -> Tensor:
        return self._own.final_norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._own.logits(hidden)


class MirroredPool(KVPool):
    """This rank's pool; the others' have as many blocks, and the same is done to them."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device, members: RankGroup) -> None:
        members.call("pool", layout=dataclasses.asdict(layout), num_blocks=num_blocks)
        super().__init__(layout, num_blocks, device)
        self._members = members

    def zero(self, blocks: Sequence[int]) -> None:
        if blocks:
            self._members.send("zero", step_messages.pack_ints(blocks))
        super().zero(blocks)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        if copies:
            self._members.send("copy", step_messages.pack_ints([block for pair in copies for block in pair]))
        super().copy(copies)


class TensorParallelBuilder:
    """Makes the stand-ins. The ranks have joined; they load while this one does."""

    def __init__(self, members: RankGroup, config: EngineConfig, source: ModelSource, device: torch.device) -> None:
        self._members, self._config, self._source, self._device = members, config, source, device
        self.shard = Shard(0, config.tensor_parallel_size)
        self._host = members.host

    @staticmethod
    def check(config: EngineConfig, source: ModelSource, device: torch.device) -> None:
        """ConfigError when the model cannot be cut so, or this machine lacks a device; before anybody is started."""
        Shard(0, config.tensor_parallel_size).shard_spec(source.spec)
        there = torch.cuda.device_count() - device.index if device.type == "cuda" else config.local_ranks
        if there < config.local_ranks:
            raise ConfigError(
                f"{SHARD_FIELD}: {config.local_ranks} devices of this machine are needed, there are {there}",
                field=SHARD_FIELD,
            )

    def load(self, max_len: int, dtype: str) -> Model:
        """This rank's part of the model, while the others load theirs. ConfigError when one of them cannot."""
        members, config, device = self._members, self._config, self._device
        revision = self._source.revision(device)
        for rank, channel in enumerate(members.channels(), 1):
            channel.send(
                "open",
                device="cpu" if device.type == "cpu" else f"cuda:{device.index + rank % config.local_ranks}",
                model_dir=str(config.model_dir.resolve()),
                revision=revision,
                load_format=config.load_format,
                weights_seed=config.weights_seed,
                threads=config.threads_per_rank,
            )
        members.receive()
        store, port = open_store(self._host)
        members.send(
            "load",
            size=self.shard.size,
            dtype=dtype,
            max_len=max_len,
            store=port,
            host=self._host,
        )
        collectives = Collectives(store, 0, self.shard.size, device, self._host)
        members.on_failure = collectives.abort
        own = load_shard(
            self._source, self.shard, max_len, device, TORCH_DTYPES[dtype], lambda ops: AllReduceOps(ops, collectives)
        )
        members.receive()
        log.info("%d tensor-parallel ranks have their weights", members.size)
        return MirroredModel(own, members, collectives)

    def pool(self, layout: KVLayout, num_blocks: int, device: torch.device) -> KVPool:
        return MirroredPool(layout, num_blocks, device, self._members)

    def attention(self, own: AttentionBackend[Any]) -> AttentionBackend[Any]:
        return MirroredAttention(own)
