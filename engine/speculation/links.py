"""What a head that pairs tokens with states needs of a step that the host has planned: where the states before its rows
lie, and where those that it makes go. decode_step.py does the same on the device.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import StepShape
from engine.kv_pool import KVPool
from engine.speculation.drafter import Drafter, Links
from engine.speculation.kept import kept
from engine.upload import upload


def links_of(shape: StepShape, kv: KVPool) -> Links:
    """Of a step's rows; a sequence that begins has the dummy block behind it."""
    size, ends = kv.layout.block_size, np.cumsum(shape.num_new)
    before = [
        int(blocks[(start - 1) // size]) if start else kv.dummy_block
        for start, blocks in zip(shape.starts, shape.blocks, strict=True)
    ]
    return Links(*upload([ends - np.array(shape.num_new), np.array(before)], kv.data.device))


def note_states(
    draft: Drafter,
    states: Tensor,
    shape: StepShape,
    sampled: Tensor,
    ids: Tensor,
    last_of: np.ndarray,
    counts: np.ndarray,
    *,
    kv: KVPool,
    query: int,
) -> None:
    """Leaves the states of tokens that count in their blocks: of a row's last one, and of every full block's.

    states: [T, hidden] of the step's tokens; ids: int64 [T], these. last_of: int64 [rows], those after which something
    is sampled, and the last one of a row that samples nothing; sampled: int64 [rows], what follows each; counts: such
    tokens of each row of the step, at most `query`.
    """
    size, ends = kv.layout.block_size, np.cumsum(shape.num_new)
    positions = np.arange(int(ends[-1])) + np.repeat(np.array(shape.starts) - (ends - shape.num_new), shape.num_new)
    full = (positions + 1) % size == 0
    ended = full[last_of].astype(np.int64)
    full[last_of] = False
    written = np.concatenate([last_of, np.flatnonzero(full)])
    rows = np.searchsorted(ends, written, side="right")
    places = zip(rows.tolist(), (positions[written] // size).tolist(), strict=True)
    blocks = np.array([int(shape.blocks[row][place]) for row, place in places])
    offsets = np.arange(len(last_of)) - np.repeat(np.cumsum(counts) - counts, counts)
    at, into, there, full_there = upload([written, blocks, offsets, ended], kv.data.device)
    if len(last_of) > len(counts):
        counted, final = kept(sampled, ids.index_select(0, at[: len(last_of)]), there, query)
        here = into[: len(last_of)].masked_fill(~(final | (counted & (full_there > 0))), kv.dummy_block)
        into = torch.cat([here, into[len(last_of) :]])
    draft.store_states(states, at, into)
