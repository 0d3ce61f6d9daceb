"""Paged attention of rows with one new token, which reads keys and values where they are."""

from __future__ import annotations

import numpy as np

from engine.kernels.cpu.compiled import compiled
from engine.kernels.cpu.exp import exp_in_place

HIDDEN = np.float32(-1e30)  #: The score of a slot that the token does not see.
VALUES_AT_ONCE = 4  # Values that one pass over the result adds. A block has a multiple of it.


@compiled(
    "void(float32[:, :, :], float32[:, ::1], UniTuple(int64, 3), int64, int64[:, ::1], int64[::1], int64, int64, "
    "int64, float32, float32[::1], float32[:, :, ::1])"
)
def attend_tokens(
    query: np.ndarray,
    vectors: np.ndarray,
    strides: tuple[int, int, int],
    kv_heads: int,
    tables: np.ndarray,
    positions: np.ndarray,
    size: int,
    lowest: int,
    window: int,
    scale: float,
    sinks: np.ndarray,
    out: np.ndarray,
) -> None:
    """Computes softmax(query @ keys * scale) @ values of each row, keys and values being those of its blocks.

    Args:
        query: [R, heads, D], rotated.
        vectors: [N, D], the memory of the KV pool from the layer's first block on. The keys of a block and head, or
            its values, are `size` vectors in a row.
        strides: vectors from one block to the next, from keys to their values, and from one kv head to the next.
        tables: [R, n], the blocks of each row.
        positions: [R], the position of each row's token, which is in its block already.
        size: tokens of a block, a multiple of VALUES_AT_ONCE. The slots behind the token must be finite.
        lowest: the first position that a token may see.
        window: the token sees this many tokens, itself included.
        sinks: [heads], a score of each head that takes part in its softmax without a value; or [0].
        out: [R, heads, D], the result.
    """
    rows, heads, dim = query.shape
    fold = heads // kv_heads
    context = tables.shape[1] * size
    scores, powers = np.empty((fold, context), np.float32), np.empty(context, np.float32)
    scaled, totals = np.empty((fold, dim), np.float32), np.empty((fold, dim), np.float32)
    weights = np.empty(fold, np.float32)
    block_stride, value_stride, head_stride = strides
    for row in range(rows):
        first = max(lowest, positions[row] - window + 1)
        start, end = first // size, positions[row] // size + 1  # the blocks that the token sees
        for key_head in range(kv_heads):
            for head in range(fold):
                for d in range(dim):
                    scaled[head, d] = query[row, key_head * fold + head, d] * scale
            for block in range(start, end):
                at = tables[row, block] * block_stride + key_head * head_stride
                for head in range(fold):
                    for slot in range(size):
                        vector = np.uintp(at + slot)  # an unsigned index needs no check whether it is negative
                        score = np.float32(0)
                        for d in range(dim):
                            score += scaled[head, d] * vectors[vector, d]
                        scores[head, block * size + slot] = score
            for head in range(fold):
                visible = scores[head, start * size : end * size]
                visible[: first - start * size] = HIDDEN
                visible[positions[row] + 1 - start * size :] = HIDDEN
                largest = sinks[key_head * fold + head] if len(sinks) else HIDDEN
                for i in range(len(visible)):
                    largest = max(largest, visible[i])
                for i in range(len(visible)):
                    visible[i] -= largest
                exp_in_place(visible, powers[: len(visible)])
                weight = np.exp(sinks[key_head * fold + head] - largest) if len(sinks) else np.float32(0)
                for i in range(len(visible)):
                    weight += visible[i]
                weights[head] = weight
                for d in range(dim):
                    totals[head, d] = 0
            for block in range(start, end):
                at = tables[row, block] * block_stride + key_head * head_stride + value_stride
                for head in range(fold):
                    for slot in range(0, size, VALUES_AT_ONCE):
                        vector = np.uintp(at + slot)
                        one = scores[head, block * size + slot]
                        two = scores[head, block * size + slot + 1]
                        three = scores[head, block * size + slot + 2]
                        four = scores[head, block * size + slot + 3]
                        for d in range(dim):
                            totals[head, d] += (
                                one * vectors[vector, d]
                                + two * vectors[vector + np.uintp(1), d]
                                + three * vectors[vector + np.uintp(2), d]
                                + four * vectors[vector + np.uintp(3), d]
                            )
            for head in range(fold):
                for d in range(dim):
                    out[row, key_head * fold + head, d] = totals[head, d] / weights[head]
