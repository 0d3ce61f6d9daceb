"""Graphs on a CPU: a replay calls the recorded function again, and the ranks compute device steps with torch.

Rank 0 runs its static steps in Triton's interpreter on the main thread. The other ranks are threads, which must not use
the interpreter.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.adapters.rows import NO_ADAPTER
from engine.adapters.slots import AdapterSlots
from engine.adapters.torch_rows import TorchRows
from engine.attention.base import StepShape
from engine.attention.torch_backend import TorchAttention
from engine.attention.triton_backend import DecodeRows, TritonAttention
from engine.engine import Engine
from engine.kv.kv_pool import KVPool, LayerKV
from engine.parallel.adapters import RankAdapters
from engine.parallel.graphs import DeviceStep, LeaderGraphs
from engine.schedule.limits import SchedulerConfig
from engine.step.runner import ModelRunner

_replaying = threading.local()


class FakeGraph:
    """A recorded function. A replay writes to the tensors that the recording returned."""

    def __init__(self, compute: Callable[[], Any], output: Any) -> None:
        self._compute, self._output = compute, output

    def replay(self) -> None:
        _replaying.now = True
        try:
            again = self._compute()
        finally:
            _replaying.now = False
        for old, new in zip(self._output or (), again or (), strict=True):
            if old is not None and old is not new:
                old.copy_(new)


class FakeRecorder:
    """Replaces `GraphRecorder`. A recording computes the step once more."""

    def __init__(self, _device: torch.device) -> None:
        self.stream = contextlib.nullcontext

    @staticmethod
    def replaying() -> bool:
        """Whether this thread replays a graph."""
        return getattr(_replaying, "now", False)

    def record(self, compute: Callable[[], Any]) -> tuple[FakeGraph, Any]:
        output = compute()
        return FakeGraph(compute, output), output


class DeviceStepAttention(TorchAttention):
    """`TorchAttention` that reads the numbers of a device step. It writes and attends for tokens that have a row."""

    def decode_metadata(
        self, slot_mapping: Tensor, cu_q: Tensor, seq_lens: Tensor, tables: Tensor, *, max_new: int
    ) -> Any:
        num_new = cu_q.diff()
        assert int(num_new.max()) <= max_new
        rows, count = num_new > 0, int(cu_q[-1])
        assert (slot_mapping[count:] == -1).all()
        if not count:
            return (0, None)
        starts = (seq_lens - num_new)[rows]
        made = self.prepare(StepShape(starts.tolist(), num_new[rows].tolist(), list(tables[rows].numpy())))
        assert made.block is not None
        assert torch.equal(made.block * self._block_size + made.offset, slot_mapping[:count].long())
        return count, made

    def listed_metadata(
        self,
        slot_mapping: Tensor,
        cu_q: Tensor,
        seq_lens: Tensor,
        tables: Tensor,
        tiles: Tensor,
        decode: DecodeRows | None = None,
    ) -> Any:
        listed = int(tiles[0])
        if decode is not None:
            rows = decode.cu_q.diff() > 0
            assert torch.equal(decode.seq_lens[rows], seq_lens[rows])
            assert listed or int(decode.cu_q[-1]) == int(cu_q[-1])
        else:
            assert listed or not int(cu_q[-1])
        return self.decode_metadata(slot_mapping, cu_q, seq_lens, tables, max_new=len(slot_mapping))

    def attend(
        self,
        query: Tensor,
        kv: Tensor,
        cache: LayerKV,
        metadata: Any,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if not isinstance(metadata, tuple):
            return super().attend(query, kv, cache, metadata, window, sinks)
        count, made = metadata
        out = query.new_zeros(*query.shape[:2], self._value_dim)
        if count:
            out[:count] = super().attend(query[:count], kv[:count], cache, made, window, sinks)
        return out


class FakeRows(TorchRows):
    """Rows of a static buffer that rank 0 computes with torch. Their numbers are those of `TritonRows`."""

    def __init__(self, slots: AdapterSlots, of_rows: np.ndarray, packed: np.ndarray) -> None:
        super().__init__(slots.sites, slots.adapters, of_rows)
        from engine.adapters.triton_rows import tiles_start

        count, numbers = len(of_rows), torch.from_numpy(packed)
        self.order, self.tiles = numbers[:count], numbers[tiles_start(count) :]


class FakeRowBuffer:
    """Replaces `RowBuffer`, which needs the memory of a GPU."""

    def __init__(self, slots: AdapterSlots) -> None:
        self._slots, self._staged = slots, np.zeros(0, dtype=np.int64)

    def stage(self, slots: np.ndarray, count: int) -> None:
        self._staged = np.full(count, NO_ADAPTER, dtype=np.int64)
        self._staged[: len(slots)] = slots

    def rows(self, count: int) -> FakeRows:
        from engine.adapters.triton_rows import pack_rows, tile_of

        assert len(self._staged) == count
        packed = pack_rows(self._staged, count, tile_of(count), self._slots.count)
        return FakeRows(self._slots, self._staged, packed)


def _rows_of_numbers(self: RankAdapters, order: Tensor, tiles: Tensor) -> TorchRows:
    """Reads the numbers of adapters on another rank."""
    assert self._slots is not None
    slots = np.full(len(order), NO_ADAPTER - 1)
    for slot, first, count in tiles.view(-1, 3).tolist():
        slots[order[first : first + count].numpy()] = slot
    assert (slots >= NO_ADAPTER).all(), "a row has no tile"
    return TorchRows(self._slots.sites, self._slots.adapters, slots)


@contextmanager
def fake_graphs() -> Iterator[list[tuple[str, Any]]]:
    """Engines on a CPU run their steps from fake graphs on all ranks.

    Yields the messages of rank 0 that belong to graphs: kind, then name or sizes.
    """
    messages: list[tuple[str, Any]] = []
    announce = LeaderGraphs.announce

    def announce_once(self: LeaderGraphs, step: DeviceStep) -> None:
        if not FakeRecorder.replaying():
            messages.append(("device_step", step) if self._capturing is None else ("capture", self._capturing))
            announce(self, step)

    replaying = LeaderGraphs.replaying

    def replaying_named(self: LeaderGraphs, name: str) -> Any:
        messages.append(("replay", name))
        return replaying(self, name)

    with pytest.MonkeyPatch.context() as patch:
        for module in ("engine.cuda_graphs", "engine.parallel.graphs"):
            patch.setattr(f"{module}.GraphRecorder", FakeRecorder)
        for module in ("decode_step", "prompt_step", "sample_step"):
            patch.setattr(f"engine.step.{module}.unowned_view", lambda tensor: tensor)
        patch.setattr(LeaderGraphs, "announce", announce_once)
        patch.setattr(LeaderGraphs, "replaying", replaying_named)
        patch.setattr("engine.parallel.rank.TorchAttention", DeviceStepAttention)
        patch.setattr(AdapterSlots, "buffer", lambda self, _max_rows: FakeRowBuffer(self))
        patch.setattr(RankAdapters, "_device_rows", _rows_of_numbers)
        original = Engine._build_runner

        def build_runner(self: Engine, *parts: Any) -> ModelRunner:
            return (_build_runner if self.config.tensor_parallel_graphs else original)(self, *parts)

        patch.setattr(Engine, "_build_runner", build_runner)
        yield messages


def _build_runner(
    self: Engine, limits: SchedulerConfig, model: Any, make_draft: Any, _graphs: bool, kv: KVPool
) -> ModelRunner:
    """Builds the runner that an engine has on a GPU."""
    from engine.sampling.device_sampler import DeviceSampler

    spec = self._builder.shard.shard_spec(self.spec)
    backend = TritonAttention(
        kv.layers(), spec.num_heads, spec.windows, kv.dummy_block, scale=spec.scale, softcap=spec.softcap
    )
    sampler = DeviceSampler(limits.max_seqs, self.vocab_size, self.device, max_drafts=self._max_drafts)
    return ModelRunner(
        model,
        kv,
        backend,
        max_seqs=limits.max_seqs,
        max_blocks=self.layout.blocks_for(limits.max_model_len) + 1,
        sampler=sampler,
        use_cuda_graphs=True,
        max_step_tokens=limits.prompt_step_tokens or limits.chunk_tokens,
        max_seq_drafts=self._max_seq_drafts,
        max_drafts=self._max_drafts,
        draft_model=None if make_draft is None else make_draft(kv, TritonAttention),
        adapters=self._slots,
        mirror=self._builder.graph_mirror(model),
    )
