"""Builds model and KV pool: on one device, or on rank 0 of a tensor-parallel engine, where the other ranks mirror them.

The engine uses both alike. Runner, scheduler and sampler know of no other rank. Each call is sent to the other ranks
before it runs here. All calls come from the engine thread, so all ranks run the same calls in the same order. Hidden
states are equal on every rank after an all-reduce. Only rank 0 computes logits and drafts.

A step with its shape on the host is sent with its shape. `engine.parallel.graphs` tells of the other steps.

A step that fails here after it was sent leaves the ranks in different steps, so it ends the group (`RankGroup.fail`).
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError, InternalError, describe
from common.kv_layout import KVLayout
from engine.adapters.slots import AdapterSlots, HostAdapters, sites_of
from engine.config import EngineConfig
from engine.cuda_graphs import GraphMirror
from engine.device import make_current
from engine.kv.kv_pool import TORCH_DTYPES, KVPool
from engine.kv.lease import BlockCopy
from engine.kv.tiers.host_copier import HostKVPool
from engine.models.base import ForwardContext, Model
from engine.models.decoder import Decoder
from engine.models.loader import ModelSource
from engine.models.spec import UNSHARDED, Shard, shard_error
from engine.parallel.adapters import MirroredAdapters, MirroredSlots, pack_slots
from engine.parallel.collectives import TIMEOUT_S, Collectives, load_shard, open_store, pack_step
from engine.parallel.graphs import LeaderGraphs
from engine.parallel.host_pool import MirroredHostPool
from engine.parallel.rank_group import RankGroup


class EngineBuilder:
    """Builds the parts of an engine that differ between one and several devices: here all of them on one device."""

    shard: Shard = UNSHARDED  # The part of the model in this process.

    def __init__(self, source: ModelSource, device: torch.device) -> None:
        self._source, self._device = source, device

    def load(self, max_len: int, dtype: str, *, keep_head: bool) -> Model:
        """Loads the model for sequences of up to `max_len` tokens. keep_head: a draft model reads the head's weight."""
        model = self._source.load(max_len, self._device, TORCH_DTYPES[dtype])
        if isinstance(model, Decoder):
            model.pack(keep_head=keep_head)
        return model

    def pool(self, layout: KVLayout, num_blocks: int, device: torch.device, state_slots: int = 0) -> KVPool:
        """Makes a KV pool on every device, with slots for recurrent states."""
        return KVPool(layout, num_blocks, device, state_slots)

    def host_pool(self, kv: KVPool, num_host_blocks: int, *, checksums: bool) -> HostKVPool:
        """Makes the host tier's memory for every device. checksums: other ranks check the blocks that they load."""
        return HostKVPool(kv, num_host_blocks)

    def adapters(
        self, model: Model, count: int, max_rank: int, dtype: str, *, fuses: bool
    ) -> tuple[HostAdapters, AdapterSlots]:
        """Makes host memory and `count` slots for adapters on every device. ConfigError if the model has none.

        fuses: see `SlotMemory`; several ranks never do.
        """
        sites, kind = sites_of(model), TORCH_DTYPES[dtype]
        names = HostAdapters(sites, kind, max_rank, pin=self._device.type == "cuda")
        return names, AdapterSlots(sites, count, max_rank, self._device, kind, fuses=fuses)

    def own_part(self, model: Model) -> Model:
        """Returns the part of the model in this process, which has the whole embedding and LM head."""
        return model

    def graph_mirror(self, model: Model) -> GraphMirror | None:
        """Returns what lets the other ranks capture and replay the graphs of this process. None: it is alone."""
        return None


_log = logging.getLogger(__name__)


class MirroredModel:
    """The model over all ranks. graphs: CUDA graphs capture it on every rank."""

    def __init__(self, local: Decoder, rank_group: RankGroup, collectives: Collectives, *, graphs: bool) -> None:
        self.local, self._rank_group, self._collectives = local, rank_group, collectives
        self.final_norm, self.logits = local.final_norm, local.logits
        self.capturable = graphs and local.capturable
        self.graphs = LeaderGraphs(rank_group, local.embedding.weight.device)

    def forward(self, tokens: Tensor, positions: Tensor, context: ForwardContext, rows: Tensor | None = None) -> Tensor:
        if context.metadata.step is None:
            step, numbers = self.graphs.pack(tokens, positions, context, rows)
            with self.graphs.running(step):
                self._collectives.broadcast(numbers)
                return self.local.forward(tokens, positions, context, rows)
        packed = pack_step(context.metadata.step, context.cache[0].block_size)
        slots, counts = pack_slots(context.adapters)
        sizes = {"tokens": len(tokens), "rows": None if rows is None else len(rows), "slots": counts}
        self._rank_group.send("step", packed + slots, **sizes, bound_s=self._rank_group.step_bound_s)
        try:
            ids = [tokens, positions] if rows is None else [tokens, positions, rows]
            self._collectives.broadcast(torch.cat(ids))
            return self.local.forward(tokens, positions, context, rows)
        except Exception as error:
            raise self._rank_group.fail(f"a step failed on rank 0: {describe(error)}") from error

    def write_kv(self, tokens: Tensor, positions: Tensor, context: ForwardContext) -> None:
        raise InternalError("a target has no KV writes without a step")


class MirroredPool(KVPool):
    """The KV pool of this rank. The pools of the other ranks have the same blocks and run the same operations."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device, rank_group: RankGroup) -> None:
        rank_group.call("pool", layout=dataclasses.asdict(layout), num_blocks=num_blocks)
        super().__init__(layout, num_blocks, device)
        self._rank_group = rank_group

    def zero(self, blocks: Sequence[int]) -> None:
        if blocks:
            self._rank_group.send("zero", np.array(blocks, dtype=np.int32).tobytes())
        super().zero(blocks)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        if copies:
            self._rank_group.send("copy", np.array(copies, dtype=np.int32).tobytes())
        super().copy(copies)


class TensorParallelBuilder(EngineBuilder):
    """The builder of the mirrored model and pool, for a group that all ranks have joined."""

    def __init__(self, rank_group: RankGroup, config: EngineConfig, source: ModelSource, device: torch.device) -> None:
        super().__init__(source, device)
        self._rank_group, self._config = rank_group, config
        self.shard = Shard(0, config.tensor_parallel_size, config.expert_parallel)

    @staticmethod
    def check(config: EngineConfig, source: ModelSource, device: torch.device) -> None:
        """Raises ConfigError if the model cannot be sharded like this, or if this machine has too few devices."""
        Shard(0, config.tensor_parallel_size, config.expert_parallel).shard_spec(source.spec)
        devices = torch.cuda.device_count() - device.index if device.type == "cuda" else config.local_ranks
        if devices < config.local_ranks:
            raise shard_error(f"{config.local_ranks} devices of this machine are needed, but only {devices} exist")
        if config.tensor_parallel_reduce == "one_shot" and (config.tensor_parallel_nodes > 1 or device.type != "cuda"):
            problem = f"one_shot needs all {config.tensor_parallel_size} ranks on GPUs of one machine: use nccl"
            raise ConfigError(f"tensor_parallel_reduce: {problem}", field="tensor_parallel_reduce")

    def load(self, max_len: int, dtype: str, *, keep_head: bool) -> Model:
        """Loads the shard of this rank while the other ranks load theirs. Raises InternalError if one of them fails."""
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
                weights=config.weights,
                threads=config.threads_per_rank,
            )
        rank_group.receive()
        collectives = self._connect()
        rank_group.on_failure = collectives.abort
        rank_group.check_alive()  # a failure before this line aborted nothing
        whole_experts = self.shard.whole_experts
        rank_group.send("load", size=self.shard.size, whole_experts=whole_experts, dtype=dtype, max_len=max_len)
        local = load_shard(self._source, self.shard, collectives, max_len, device, TORCH_DTYPES[dtype])
        rank_group.receive()
        _log.info("%d tensor-parallel ranks have loaded their weights", rank_group.size)
        return MirroredModel(local, rank_group, collectives, graphs=config.tensor_parallel_graphs)

    def _connect(self) -> Collectives:
        """Connects the devices of all ranks. Raises InternalError as soon as one of the ranks fails.

        Rank 0 connects on a thread of its own: it would wait TIMEOUT_S for a rank that has ended.
        """
        rank_group, device, size = self._rank_group, self._device, self.shard.size
        host, config = rank_group.host, self._config
        options: dict[str, Any] = {
            "one_shot": config.tensor_parallel_reduce == "one_shot",
            "graphs": config.tensor_parallel_graphs,
        }
        store, port = open_store(host)
        connected: Future[Collectives] = Future()

        def connect() -> None:
            try:
                make_current(device)
                connected.set_result(Collectives(store, 0, size, device, host, **options))
            except BaseException as error:
                connected.set_exception(error)

        def check() -> None:
            if connected.done() and (error := connected.exception()) is not None:
                raise rank_group.fail(f"rank 0 cannot connect to the other ranks: {describe(error)}") from error

        rank_group.send("connect", size=size, store=port, host=host, **options)
        threading.Thread(target=connect, name="connect-ranks", daemon=True).start()
        rank_group.receive(check)
        wait([connected], TIMEOUT_S)  # the other ranks are connected, so rank 0 nearly is
        check()
        if not connected.done():
            raise rank_group.fail(f"rank 0 did not connect to the other ranks within {TIMEOUT_S:g} s")
        return connected.result()

    def adapters(
        self, model: Model, count: int, max_rank: int, dtype: str, *, fuses: bool
    ) -> tuple[HostAdapters, AdapterSlots]:
        sites = sites_of(self.own_part(model), self.shard)
        self._rank_group.call("adapters", count=count, max_rank=max_rank, dtype=dtype)
        names = MirroredAdapters(
            sites, TORCH_DTYPES[dtype], max_rank, self._rank_group, pin=self._device.type == "cuda"
        )
        place = sites, count, max_rank, self._device, TORCH_DTYPES[dtype]
        return names, MirroredSlots(names, self._rank_group, *place)

    def own_part(self, model: Model) -> Model:
        assert isinstance(model, MirroredModel)
        return model.local

    def graph_mirror(self, model: Model) -> GraphMirror | None:
        assert isinstance(model, MirroredModel)
        return model.graphs

    def host_pool(self, kv: KVPool, num_host_blocks: int, *, checksums: bool) -> HostKVPool:
        return MirroredHostPool(kv, num_host_blocks, self._rank_group, checksums=checksums)

    def pool(self, layout: KVLayout, num_blocks: int, device: torch.device, state_slots: int = 0) -> KVPool:
        assert not state_slots, "models with recurrent states run on one device"
        return MirroredPool(layout, num_blocks, device, self._rank_group)
