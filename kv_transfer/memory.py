"""The pool as transfers see it: addresses, block size and a way to read or write one block.

Registered once with the backend and never freed while peers exist: a remote write to memory that was deregistered still
lands and still reports success.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

_log = logging.getLogger(__name__)

MemoryKind = Literal["DRAM", "VRAM"]


class PinnedBlocks(Protocol):
    """References on physical blocks that keep them from reuse; owned by whoever was given it, released exactly once."""

    @property
    def blocks(self) -> Sequence[int]: ...

    def release(self, blocks: Sequence[int] | None = None) -> None:
        """Gives up the named physical blocks (None: all that are left). Idempotent."""


def release_pin(hold: PinnedBlocks, blocks: Sequence[int] | None = None) -> None:
    """Releases; an owner that fails is logged, because the transfer still has others to tell."""
    try:
        hold.release(blocks)
    except Exception:
        _log.exception("a hold could not be released")


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """This process's pool: total_blocks blocks (probe and dummy block included) of block_bytes bytes from `base` on.

    read_block and write_block copy whole blocks and may be called from the transfer thread; the object keeps the
    memory alive.
    """

    base: int
    block_bytes: int
    total_blocks: int
    device: int
    kind: MemoryKind
    probe_block: int
    read_block: Callable[[int], bytes]
    write_block: Callable[[int, bytes], None]


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """A peer's pool, as numbers from its handshake."""

    base: int
    block_bytes: int
    total_blocks: int
    device: int
    kind: MemoryKind


def host_pool(num_blocks: int, block_bytes: int) -> PoolMemory:
    """A zeroed pool of num_blocks + 1 blocks in host memory, the last one for probes: for tests and machine checks."""
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
    """num_blocks + 1 zeroed blocks on the first visible GPU, the last one for probes. Raises RuntimeError."""
    import torch  # not with this package

    data = torch.zeros((num_blocks + 1, block_bytes), dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()

    def read_block(block: int) -> bytes:
        content: bytes = data[block].cpu().numpy().tobytes()
        return content

    def write_block(block: int, content: bytes) -> None:
        if len(content) != block_bytes:
            raise ValueError(f"a block has {block_bytes} bytes, got {len(content)}")
        data[block].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        torch.cuda.synchronize()

    return PoolMemory(data.data_ptr(), block_bytes, num_blocks + 1, 0, "VRAM", num_blocks, read_block, write_block)
