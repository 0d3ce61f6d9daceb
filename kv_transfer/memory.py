"""The KV pool as transfers see it: base address, block size, and functions that read or write one block.

The backend registers the pool once and never deregisters it while peers exist: a remote write to deregistered memory
still lands and still reports success.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, Protocol

_log = logging.getLogger(__name__)

MemoryKind = Literal["DRAM", "VRAM"]


class PinnedBlocks(Protocol):
    """Pins on physical blocks. A pinned block is not reused. The owner releases each pin exactly once."""

    @property
    def blocks(self) -> Sequence[int]: ...

    def release(self, blocks: Sequence[int] | None = None) -> None:
        """Releases the pins of these physical blocks (None: of all remaining blocks). Idempotent."""


def release_and_log_errors(pin: PinnedBlocks, blocks: Sequence[int] | None = None) -> None:
    """Releases a pin. Logs an error and does not raise it, because the caller has other pins to release."""
    try:
        pin.release(blocks)
    except Exception:
        _log.exception("a pin could not be released")


def release_unless_handed_on(pin: PinnedBlocks) -> ExitStack:
    """Returns a scope that releases the pin at its end. `pop_all()` in the scope hands the pin on."""
    scope = ExitStack()
    scope.callback(release_and_log_errors, pin)
    return scope


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """A pool of total_blocks blocks of block_bytes bytes, contiguous from address `base`."""

    base: int
    block_bytes: int
    total_blocks: int  #: Includes, in an engine's pool, the dummy block and the states (engine/kv/kv_pool.py).
    device: int  #: CUDA device index; 0 for DRAM.
    kind: MemoryKind

    @property
    def counted_bytes(self) -> int:
        """Bytes of a block in counters and rates."""
        return self.block_bytes


@dataclass(frozen=True, slots=True)
class PoolMemory(PeerMemory):
    """This process's pool. The object keeps the memory alive."""

    probe_block: int  #: Connections are probed with writes from and to this block.
    #: Copy one whole block out of the pool or into it. The transfer thread may call both.
    read_block: Callable[[int], bytes]
    write_block: Callable[[int, bytes], None]
    #: The pool as a tensor, uint8 [total_blocks, block_bytes], for copies of device memory. None for host memory.
    tensor: Any = None
    #: Bytes of a block on all ranks of the pod, which counters and rates count. 0: this process has the whole block.
    all_ranks_bytes: int = 0

    @property
    def counted_bytes(self) -> int:
        """Bytes of a block in counters and rates. Pods of different sizes count the same block alike."""
        return self.all_ranks_bytes or self.block_bytes


def whole_checksums(memory: PoolMemory, blocks: Sequence[int]) -> list[int]:
    """Returns the CRC-32 of each block."""
    return [zlib.crc32(memory.read_block(block)) for block in blocks]


def host_pool(num_blocks: int, block_bytes: int) -> PoolMemory:
    """Builds a zeroed pool of num_blocks + 1 blocks in host memory, the last for probes. For tests and benchmarks."""
    total = num_blocks + 1
    area = mmap.mmap(-1, total * block_bytes)
    base = ctypes.addressof(ctypes.c_char.from_buffer(area))

    def read_block(block: int) -> bytes:
        return area[block * block_bytes : (block + 1) * block_bytes]

    def write_block(block: int, data: bytes) -> None:
        if len(data) != block_bytes:
            raise ValueError(f"a block has {block_bytes} bytes, got {len(data)}")
        area[block * block_bytes : (block + 1) * block_bytes] = data

    return PoolMemory(base, block_bytes, total, 0, "DRAM", num_blocks, read_block, write_block)


def device_pool(num_blocks: int, block_bytes: int) -> PoolMemory:
    """Builds a zeroed pool of num_blocks + 1 blocks on the first GPU, the last for probes. Raises RuntimeError."""
    import torch  # lazy: kv_transfer itself must not load torch

    pool = torch.zeros((num_blocks + 1, block_bytes), dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()

    def read_block(block: int) -> bytes:
        return bytes(pool[block].cpu().numpy())

    def write_block(block: int, data: bytes) -> None:
        if len(data) != block_bytes:
            raise ValueError(f"a block has {block_bytes} bytes, got {len(data)}")
        pool[block].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        torch.cuda.synchronize()

    where = (pool.data_ptr(), block_bytes, num_blocks + 1, 0)
    return PoolMemory(*where, "VRAM", num_blocks, read_block, write_block, pool)
