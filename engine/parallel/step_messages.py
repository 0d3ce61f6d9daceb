"""The message by which rank 0 sends the shape of a step to the other ranks, as plain integers."""

from __future__ import annotations

import numpy as np

from engine.attention.base import StepShape


def pack_step(shape: StepShape, block_size: int) -> bytes:
    """Packs a shape as int32: R | starts [R] | num_new [R] | numbers of blocks [R] | blocks of all rows."""
    starts, num_new = np.asarray(shape.starts, dtype=np.int32), np.asarray(shape.num_new, dtype=np.int32)
    counts = -(-(starts + num_new) // block_size)
    blocks = [np.asarray(row, dtype=np.int32)[:count] for row, count in zip(shape.blocks, counts, strict=True)]
    head = np.array([len(starts)], dtype=np.int32)
    return np.concatenate([head, starts, num_new, counts, *blocks]).tobytes()


def unpack_step(packed: bytes) -> StepShape:
    """Returns the shape that `pack_step` packed. It has only the blocks that its tokens need."""
    numbers = np.frombuffer(packed, dtype=np.int32)
    rows = int(numbers[0])
    starts, num_new, counts = numbers[1 : 1 + 3 * rows].reshape(3, rows)
    blocks = np.split(numbers[1 + 3 * rows :], np.cumsum(counts)[:-1])
    return StepShape(starts.tolist(), num_new.tolist(), blocks)
