"""Copies of blocks between a pool and staging areas: of a pool in host memory, and of a pool that is a tensor."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from common.errors import TransferFailed
from kv_transfer.backend.staging.area import StagingArea
from kv_transfer.memory import PoolMemory

Ended = Callable[[], bool]  #: Returns whether a copy has ended. May raise the error of the copy.


class BlockCopier(Protocol):
    """Copies blocks between the pool and staging areas. The transfer thread makes and uses it."""

    def attach(self, area: StagingArea) -> None:
        """Prepares an area for copies. Raises TransferFailed."""

    def detach(self, area: StagingArea) -> None:
        """Ends the use of an area, to which no copy is under way."""

    def save(self, blocks: Sequence[int], area: StagingArea, slots: Sequence[int]) -> Ended:
        """Starts to copy blocks of the pool to slots."""

    def load(self, area: StagingArea, slots: Sequence[int], blocks: Sequence[int]) -> Ended:
        """Starts to copy slots to blocks of the pool."""


@dataclass(eq=False)
class MemoryCopier:
    """Copies of a pool in host memory. A copy has ended when the call returns."""

    memory: PoolMemory

    def attach(self, area: StagingArea) -> None:
        pass

    def detach(self, area: StagingArea) -> None:
        pass

    def save(self, blocks: Sequence[int], area: StagingArea, slots: Sequence[int]) -> Ended:
        for block, slot, count in contiguous_ranges(blocks, slots):
            self._move(area.address(slot), self._address(block), count)
        return _at_once

    def load(self, area: StagingArea, slots: Sequence[int], blocks: Sequence[int]) -> Ended:
        for slot, block, count in contiguous_ranges(slots, blocks):
            self._move(self._address(block), area.address(slot), count)
        return _at_once

    def _address(self, block: int) -> int:
        return self.memory.base + block * self.memory.block_bytes

    def _move(self, target: int, source: int, count: int) -> None:
        ctypes.memmove(target, source, count * self.memory.block_bytes)


def _at_once() -> bool:
    return True


class TorchCopier:
    """Copies of a pool that is a tensor, uint8 [blocks, block_bytes]. On CUDA they run on two streams.

    Areas are page-locked while they are attached. Neither the transfer thread nor the engine waits for a copy.
    """

    def __init__(self, pool: Any) -> None:
        import torch  # lazy: kv_transfer itself must not load torch

        cuda: Any = torch.cuda
        self._torch, self._cuda = torch, cuda
        self._pool = pool
        self._areas: dict[StagingArea, Any] = {}  #: Each as uint8 [slots, slot_bytes].
        self._streams: tuple[Any, Any] | None = None
        if pool.device.type == "cuda":
            cuda.set_device(pool.device)  # of the transfer thread
            self._streams = cuda.Stream(pool.device), cuda.Stream(pool.device)

    def attach(self, area: StagingArea) -> None:
        data = self._torch.frombuffer(area.buffer(), dtype=self._torch.uint8).view(area.slots, area.slot_bytes)
        if self._streams is not None:
            error = int(self._cuda.cudart().cudaHostRegister(data.data_ptr(), data.nbytes, 0))
            if error != 0:
                size = data.nbytes >> 20
                raise TransferFailed(f"{size} MiB of host memory cannot be page-locked (CUDA error {error})")
        self._areas[area] = data

    def detach(self, area: StagingArea) -> None:
        data = self._areas.pop(area, None)
        if data is not None and self._streams is not None:
            self._cuda.cudart().cudaHostUnregister(data.data_ptr())

    def save(self, blocks: Sequence[int], area: StagingArea, slots: Sequence[int]) -> Ended:
        return self._copy(0, self._pool, blocks, self._areas[area], slots)

    def load(self, area: StagingArea, slots: Sequence[int], blocks: Sequence[int]) -> Ended:
        return self._copy(1, self._areas[area], slots, self._pool, blocks)

    def _copy(self, stream: int, source: Any, sources: Sequence[int], target: Any, targets: Sequence[int]) -> Ended:
        torch, streams = self._torch, self._streams
        with torch.inference_mode(), torch.cuda.stream(streams[stream] if streams is not None else None):
            for first, to, count in contiguous_ranges(sources, targets):
                target[to : to + count].copy_(source[first : first + count], non_blocking=True)
        if streams is None:
            return _at_once
        copied = torch.cuda.Event()
        copied.record(streams[stream])
        ended: Ended = copied.query
        return ended


def make_copier(memory: PoolMemory) -> BlockCopier:
    """Returns the copier of a pool. Call it on the transfer thread."""
    return MemoryCopier(memory) if memory.tensor is None else TorchCopier(memory.tensor)


def contiguous_ranges(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields (first source, first target, length) of each range that is contiguous in both, in order."""
    start = 0
    for end in range(1, len(sources) + 1):
        follows = end < len(sources) and sources[end] == sources[end - 1] + 1 and targets[end] == targets[end - 1] + 1
        if not follows:
            yield sources[start], targets[start], end - start
            start = end
