"""Checksums of blocks that lie on several ranks. Pods of different sizes compute the same one for the same KV.

Each part of a block (a KV head, or the draft segments) has a CRC-32 on the rank that holds it. The checksum of the
block is the CRC-32 of these, in the order of the parts. A head that several ranks hold must be equal on all of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import numpy as np

from kv_transfer.memory import PoolMemory


def part_checksums(memory: PoolMemory, blocks: Iterable[int], ranges: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns the CRC-32 of each range (offset, bytes) of each block of this rank, uint32 [blocks, ranges]."""
    contents = (memory.read_block(block) for block in blocks)
    sums = [[zlib.crc32(content[offset : offset + size]) for offset, size in ranges] for content in contents]
    return np.array(sums, dtype=np.uint32)


def join_checksums(parts: Sequence[Iterable[int]], sums: Sequence[np.ndarray]) -> list[int]:
    """Returns the checksum of each block.

    Args:
        parts: for each rank, the numbers of its parts.
        sums: for each rank, uint32 [blocks, parts]: their CRC-32.
    """
    by_part: dict[int, np.ndarray] = {}
    damaged = np.zeros(len(sums[0]), dtype=bool)
    for numbers, of_rank in zip(parts, sums, strict=True):
        for number, column in zip(numbers, of_rank.T, strict=True):
            damaged |= by_part.setdefault(number, column) != column
    joined = np.stack([by_part[number] for number in sorted(by_part)], axis=1)
    if joined.shape[1] > 1:
        whole = [zlib.crc32(row.tobytes()) for row in np.ascontiguousarray(joined)]
    else:
        whole = joined[:, 0].tolist()
    return [sum_ ^ 0xFFFFFFFF if bad else sum_ for sum_, bad in zip(whole, damaged.tolist(), strict=True)]
