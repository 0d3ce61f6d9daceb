"""Host memory for evicted KV blocks: uint8 [num_host_blocks, block_bytes], page-locked if the pool is on a GPU.

Copies run on a stream of their own and are not ordered with the steps. Until `wait` returns, no step and no thread may
read the target blocks or write to the source and target blocks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from common.errors import ConfigError
from engine.kv.kv_pool import KVPool

log = logging.getLogger(__name__)


class HostKVPool:
    """Host blocks of the size of the pool's blocks. ConfigError if the memory cannot be page-locked."""

    def __init__(self, pool: KVPool, num_host_blocks: int) -> None:
        self.data = torch.empty((num_host_blocks, pool.block_bytes), dtype=torch.uint8)
        self.pool = pool
        self._device = pool.data.device
        self._locked = False
        self._stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None
        if self._device.type == "cuda":
            # torch rounds page-locked allocations up to powers of two; registering a tensor does not.
            began = time.monotonic()
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            error = cudart.cudaHostRegister(self.data.data_ptr(), self.data.nbytes, 0)
            if int(error) != 0:
                raise ConfigError(
                    f"{self.data.nbytes / (1 << 30):.1f} GiB of host memory cannot be page-locked ({error}); "
                    "lower host_cache",
                    field="host_cache",
                )
            self._locked = True
            log.info(
                "%.1f GiB of host memory page-locked in %.1f s", self.data.nbytes / (1 << 30), time.monotonic() - began
            )
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def save(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Starts to copy blocks of the pool to host blocks."""
        self._copy(self.pool.data, blocks, self.data, host_blocks)

    def load(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Starts to copy host blocks to blocks of the pool."""
        self._copy(self.data, host_blocks, self.pool.data, blocks)

    def wait(self) -> None:
        """Blocks this thread until all started copies have ended; torch releases the GIL."""
        if self._stream is not None and self._done is not None:
            self._done.record(self._stream)
            self._done.synchronize()

    def close(self) -> None:
        """Unlocks the memory. No copy may be under way. Idempotent."""
        if self._locked:
            self._locked = False
            torch.cuda.cudart().cudaHostUnregister(self.data.data_ptr())  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def _copy(self, source: torch.Tensor, sources: Sequence[int], target: torch.Tensor, targets: Sequence[int]) -> None:
        with torch.cuda.stream(self._stream):  # None on a CPU
            for first_source, first_target, count in _contiguous_ranges(sources, targets):
                target[first_target : first_target + count].copy_(
                    source[first_source : first_source + count], non_blocking=True
                )


def _contiguous_ranges(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields (first source, first target, length) of each range that is contiguous in both."""
    pairs = np.array([sources, targets])
    pairs = pairs[:, np.argsort(pairs[0])]
    starts = np.flatnonzero(np.concatenate([[True], (np.diff(pairs) != 1).any(axis=0)]))
    ends = np.append(starts[1:], pairs.shape[1])
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        yield int(pairs[0, start]), int(pairs[1, start]), end - start
