"""The memory of the host tier, and the thread that makes its copies.

After `stop` or a failed copy the tier is closed and the memory is unlocked; the pool works without a host tier then.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from common.errors import BlockDamaged, ConfigError, InternalError, describe
from engine.device import make_current
from engine.kv.kv_pool import KVPool
from engine.kv.tiers.host_tier import HostCopy, HostTier

log = logging.getLogger(__name__)
STOP_S = 10.0  # Longest wait of `stop` for the copy under way


class HostCopier:
    """Takes copies from the host tier and makes them, on a thread of its own."""

    def __init__(self, host_tier: HostTier, memory: HostKVPool, *, checksums: bool = False) -> None:
        """Starts the thread. With `checksums` it compares a CRC-32 of each host block when it is filled and loaded.

        The CRC-32 is that of the copy and not of its source: a step in flight may still write to a partial block behind
        the tokens that are saved.
        """
        self.tier, self.memory = host_tier, memory
        self._checksums: dict[int, int] | None = {} if checksums else None  # CRC-32 of each host block in use
        self._thread = threading.Thread(target=self._run, name="host-tier", daemon=True)
        self._thread.start()

    def record_checksums(self, host_blocks: Sequence[int]) -> None:
        """Notes the checksums of filled host blocks; before the host tier knows them."""
        if self._checksums is not None:
            self._checksums.update({host: self.memory.checksum(host) for host in host_blocks})

    def stop(self) -> None:
        """Ends the thread. Idempotent."""
        self.tier.stop()
        if self._thread is not threading.current_thread():  # a garbage collection on that thread may call this
            self._thread.join(STOP_S)

    def _run(self) -> None:
        reason = "the host tier has ended"
        try:
            make_current(self.memory.pool.data.device)
            while (copy := self.tier.next_copy()) is not None:
                self.tier.finish_copy(copy, self._copy(copy))
        except Exception as error:
            log.exception("the host tier failed; the pool continues without it")
            reason = f"the host tier failed: {describe(error)}"
        self.tier.close(InternalError(reason))
        self.memory.close()

    def _copy(self, copy: HostCopy) -> BlockDamaged | None:
        """Makes the copy; returns an error if blocks from the host have a wrong checksum."""
        memory, sums = self.memory, self._checksums
        pairs = list(zip(copy.blocks, copy.host_blocks, strict=True))
        if copy.host_load is None:
            memory.save(copy.blocks, copy.host_blocks)
            memory.wait()
            self.record_checksums(copy.host_blocks)
            return None
        memory.load(copy.host_blocks, copy.blocks)
        memory.wait()
        damaged = memory.damaged_elsewhere()
        damaged += 0 if sums is None else sum(checksum(memory.pool, block) != sums[host] for block, host in pairs)
        if not damaged:
            return None
        return BlockDamaged(f"{damaged} of {len(pairs)} KV blocks came back damaged from host memory")


class HostKVPool:
    """Host memory for blocks: uint8 [num_host_blocks, block_bytes], page-locked if the pool is on a GPU.

    Copies run on a stream of their own and are not ordered with the steps. Until `wait` returns, no step and no thread
    may read the target blocks or write to the source and target blocks.
    """

    def __init__(self, pool: KVPool, num_host_blocks: int) -> None:
        """Allocates the memory. ConfigError if it cannot be page-locked."""
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
            error = int(cudart.cudaHostRegister(self.data.data_ptr(), self.data.nbytes, 0))
            size = self.data.nbytes / (1 << 30)
            if error != 0:
                text = f"{size:.1f} GiB of host memory cannot be page-locked (CUDA error {error}); lower host_cache"
                raise ConfigError(text, field="host_cache")
            self._locked = True
            log.info("%.1f GiB of host memory page-locked in %.1f s", size, time.monotonic() - began)
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

    def checksum(self, host_block: int) -> int:
        """Returns the CRC-32 of a host block that no copy writes to."""
        return zlib.crc32(self.data[host_block].numpy().tobytes())

    def damaged_elsewhere(self) -> int:
        """Returns how many blocks of the last load came back damaged on other ranks."""
        return 0

    def close(self) -> None:
        """Unlocks the memory. No copy may be under way. Idempotent."""
        if self._locked:
            self._locked = False
            torch.cuda.cudart().cudaHostUnregister(self.data.data_ptr())  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def _copy(self, source: torch.Tensor, sources: Sequence[int], target: torch.Tensor, targets: Sequence[int]) -> None:
        with torch.cuda.stream(self._stream):  # None on a CPU
            for first_source, first_target, count in _contiguous_ranges(sources, targets):
                content = source[first_source : first_source + count]
                target[first_target : first_target + count].copy_(content, non_blocking=True)


def checksum(pool: KVPool, block: int) -> int:
    """Returns the CRC-32 of a block of the pool that no step writes to."""
    return zlib.crc32(pool.read_block(block))


def _contiguous_ranges(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields (first source, first target, length) of each range that is contiguous in both."""
    pairs = np.array([sources, targets])
    pairs = pairs[:, np.argsort(pairs[0])]
    starts = np.flatnonzero(np.concatenate([[True], (np.diff(pairs) != 1).any(axis=0)]))
    ends = np.append(starts[1:], pairs.shape[1])
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        yield int(pairs[0, start]), int(pairs[1, start]), end - start
