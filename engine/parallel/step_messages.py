"""A step as rank 0 tells it to the others: its shape as plain integers, its tokens by the devices' own path.

Which blocks a sequence has, and what is in a step, is decided on rank 0 alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import StepShape


def pack_step(shape: StepShape, block_size: int) -> bytes:
    """int32: the number of rows, then of each its start, new tokens and blocks, then all blocks."""
    starts, num_new = np.asarray(shape.starts, dtype=np.int32), np.asarray(shape.num_new, dtype=np.int32)
    counts = -(-(starts + num_new) // block_size)
    blocks = [np.asarray(row, dtype=np.int32)[:count] for row, count in zip(shape.blocks, counts, strict=True)]
    head = np.array([len(starts)], dtype=np.int32)
    return np.concatenate([head, starts, num_new, counts, *blocks]).tobytes()


def unpack_step(packed: bytes) -> StepShape:
    """What `pack_step` made it of, with no block more than the tokens need."""
    pack_ints = np.frombuffer(packed, dtype=np.int32)
    rows = int(pack_ints[0])
    starts, num_new, counts = pack_ints[1 : 1 + 3 * rows].reshape(3, rows)
    blocks = np.split(pack_ints[1 + 3 * rows :], np.cumsum(counts)[:-1])
    return StepShape(starts.tolist(), num_new.tolist(), blocks)


def join_ids(tokens: Tensor, positions: Tensor, rows: Tensor | None) -> Tensor:
    """int64: one tensor, for one message."""
    return torch.cat([tokens, positions] if rows is None else [tokens, positions, rows])


def split_ids(joined: Tensor, tokens: int, rows: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """tokens, positions and rows of `join_ids`, which had so many."""
    return joined[:tokens], joined[tokens : 2 * tokens], None if rows is None else joined[2 * tokens :]


def pack_ints(values: Sequence[int]) -> bytes:
    """Block ids for a message."""
    return np.array(values, dtype=np.int32).tobytes()


def unpack_ints(packed: bytes) -> list[int]:
    """What `pack_ints` made it of."""
    found: list[int] = np.frombuffer(packed, dtype=np.int32).tolist()
    return found
