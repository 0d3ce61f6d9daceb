"""Rank 0 of a tensor-parallel engine: a model, KV pool and attention that the other ranks mirror.

The engine uses them like a model, pool and attention on one device. Runner, scheduler and sampler know of no other
rank. Each call is sent to the other ranks before it runs here. All calls come from the engine thread, so all ranks run
the same calls in the same order. Hidden states are equal on every rank after an all-reduce. Only rank 0 computes
logits.

A step that fails here after it was sent leaves the ranks in different steps, so it ends the group (`RankGroup.fail`).
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

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MirroredMetadata:
    """Metadata of one step on rank 0."""

    #: The shape of the step. It is sent to the other ranks, which prepare metadata of their own.
    shape: StepShape
    #: Metadata of the local backend.
    metadata: Any


class MirroredAttention:
    """The local backend, with metadata that keeps the shape of each step for the other ranks.

    Args:
        local: attention over the heads of this rank.
    """

    def __init__(self, local: AttentionBackend[Any]) -> None:
        self.local = local

    @property
    def reads_unwritten_slots(self) -> bool:
        return self.local.reads_unwritten_slots

    def prepare(self, step: StepShape) -> MirroredMetadata:
        return MirroredMetadata(step, self.local.prepare(step))

    def select_rows(self, metadata: MirroredMetadata, rows: Tensor, positions: Tensor) -> MirroredMetadata:
        raise InternalError("rows of a step are selected by each rank from its own metadata")

    def write(self, kv: Tensor, cache: LayerKV, metadata: MirroredMetadata) -> None:
        self.local.write(kv, cache, metadata.metadata)

    def attend(
        self, query: Tensor, kv: Tensor, cache: LayerKV, metadata: MirroredMetadata, window: int | None
    ) -> Tensor:
        return self.local.attend(query, kv, cache, metadata.metadata, window)


class MirroredModel:
    """The model over all ranks. It cannot be captured in a graph, because the host sends each step to the other ranks.

    Args:
        local: the shard of this rank.
    """

    capturable = False

    def __init__(self, local: Decoder, rank_group: RankGroup, collectives: Collectives) -> None:
        self._local, self._rank_group, self._collectives = local, rank_group, collectives

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
        self._rank_group.send(
            "step",
            step_messages.pack_step(metadata.shape, cache[0].block_size),
            tokens=len(tokens),
            rows=None if rows is None else len(rows),
        )
        try:
            self._collectives.broadcast(step_messages.join_ids(tokens, positions, rows))
            return self._local.forward(
                tokens, positions, cache, backend.local, metadata.metadata, rows, layer_hook=layer_hook
            )
        except Exception as error:
            raise self._rank_group.fail(f"a step failed on rank 0: {error}") from error

    def write_kv(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Sequence[LayerKV],
        backend: AttentionBackend[Any],
        metadata: Any,
    ) -> None:
        raise InternalError("a tensor-parallel engine supports no draft model")

    def final_norm(self, hidden: Tensor) -> Tensor:
        return self._local.final_norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._local.logits(hidden)


class MirroredPool(KVPool):
    """The KV pool of this rank. The pools of the other ranks have the same blocks and run the same operations."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device, rank_group: RankGroup) -> None:
        rank_group.call("pool", layout=dataclasses.asdict(layout), num_blocks=num_blocks)
        super().__init__(layout, num_blocks, device)
        self._rank_group = rank_group

    def zero(self, blocks: Sequence[int]) -> None:
        if blocks:
            self._rank_group.send("zero", step_messages.pack_ints(blocks))
        super().zero(blocks)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        if copies:
            self._rank_group.send("copy", step_messages.pack_ints([block for pair in copies for block in pair]))
        super().copy(copies)


class TensorParallelBuilder:
    """The builder of the mirrored model, pool and attention, for a group that all ranks have joined."""

    def __init__(self, rank_group: RankGroup, config: EngineConfig, source: ModelSource, device: torch.device) -> None:
        self._rank_group, self._config, self._source, self._device = rank_group, config, source, device
        self.shard = Shard(0, config.tensor_parallel_size)
        self._host = rank_group.host

    @staticmethod
    def check(config: EngineConfig, source: ModelSource, device: torch.device) -> None:
        """Checks the configuration before a rank is started.

        Raises:
            ConfigError: the model cannot be sharded like this, or this machine has too few devices.
        """
        Shard(0, config.tensor_parallel_size).shard_spec(source.spec)
        devices = torch.cuda.device_count() - device.index if device.type == "cuda" else config.local_ranks
        if devices < config.local_ranks:
            raise ConfigError(
                f"{SHARD_FIELD}: {config.local_ranks} devices of this machine are needed, but only {devices} exist",
                field=SHARD_FIELD,
            )

    def load(self, max_len: int, dtype: str) -> Model:
        """Loads the shard of this rank while the other ranks load theirs.

        Raises:
            InternalError: another rank failed to load.
        """
        rank_group, config, device = self._rank_group, self._config, self._device
        revision = self._source.revision(device)
        for rank, channel in enumerate(rank_group.channels(), 1):
            channel.send(
                "open",
                device="cpu" if device.type == "cpu" else f"cuda:{device.index + rank % config.local_ranks}",
                model_dir=str(config.model_dir.resolve()),
                revision=revision,
                load_format=config.load_format,
                weights_seed=config.weights_seed,
                threads=config.threads_per_rank,
            )
        rank_group.receive()
        store, port = open_store(self._host)
        rank_group.send(
            "load",
            size=self.shard.size,
            dtype=dtype,
            max_len=max_len,
            store=port,
            host=self._host,
        )
        collectives = Collectives(store, 0, self.shard.size, device, self._host)
        rank_group.on_failure = collectives.abort
        local = load_shard(
            self._source, self.shard, max_len, device, TORCH_DTYPES[dtype], lambda ops: AllReduceOps(ops, collectives)
        )
        rank_group.receive()
        _log.info("%d tensor-parallel ranks have loaded their weights", rank_group.size)
        return MirroredModel(local, rank_group, collectives)

    def pool(self, layout: KVLayout, num_blocks: int, device: torch.device) -> KVPool:
        return MirroredPool(layout, num_blocks, device, self._rank_group)

    def attention(self, local: AttentionBackend[Any]) -> AttentionBackend[Any]:
        return MirroredAttention(local)
