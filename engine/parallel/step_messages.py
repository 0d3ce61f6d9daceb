"""The messages by which rank 0 sends a step to the other ranks.

The shape of the step is packed as plain integers. Tokens, positions and rows travel between the devices by a broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

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


def join_ids(tokens: Tensor, positions: Tensor, rows: Tensor | None) -> Tensor:
    """Returns tokens, positions and rows as one int64 tensor, for one broadcast."""
    return torch.cat([tokens, positions] if rows is None else [tokens, positions, rows])


def split_ids(joined: Tensor, tokens: int, rows: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the tokens, positions and rows that `join_ids` joined.

    Args:
        tokens: number of tokens.
        rows: number of rows. None: there are none.
    """
    return joined[:tokens], joined[tokens : 2 * tokens], None if rows is None else joined[2 * tokens :]


def pack_ints(values: Sequence[int]) -> bytes:
    """Packs block ids as int32."""
    return np.array(values, dtype=np.int32).tobytes()


def unpack_ints(packed: bytes) -> list[int]:
    """Returns the block ids that `pack_ints` packed."""
    values: list[int] = np.frombuffer(packed, dtype=np.int32).tolist()
    return values
