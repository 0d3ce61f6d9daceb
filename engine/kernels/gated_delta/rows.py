"""The rows of a step on the device, for the kernels of gated delta layers.

tokens     | d0 | d1 | d2 |      row 0       |    row 1    |
            one token each |  c0  |  c1  | c2 |   c3  |  c4 |   chunks of at most CHUNK tokens; none goes beyond
kernels        decode      |  chunks                        |   a snapshot
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.device import upload
from engine.kv.groups.state_pool import StateRow

CHUNK = 64  # Tokens of a chunk.


class DeviceChunks(NamedTuple):
    """The rows that are computed in chunks: R rows with C chunks, int32."""

    first_token: Tensor  # [C], in the step.
    length: Tensor  # [C], tokens.
    save_slot: Tensor  # [C], the slot of the snapshot after the chunk; -1 for none.
    row: Tensor  # [C]
    first_chunk: Tensor  # [R + 1]
    row_token: Tensor  # [R], the first token of each row.
    row_slot: Tensor  # [R], the live state.


class DeviceRows(NamedTuple):
    """The rows of a step: first those of one token, then those in chunks."""

    decode_slots: Tensor  # Integers [D], the live states of the first D tokens.
    chunks: DeviceChunks | None = None  # None: all tokens are decodes.


def device_rows(rows: Sequence[StateRow], device: torch.device) -> DeviceRows:
    """Copies the rows of a step to the device."""
    decodes = sum(1 for _ in itertools.takewhile(lambda row: row.num_new == 1, rows))
    slots = np.array([row.slot for row in rows[:decodes]], dtype=np.int32)
    chunks: list[tuple[int, int, int, int]] = []
    first_chunk, row_token, token = [0], [], decodes
    for number, row in enumerate(rows[decodes:]):
        row_token.append(token)
        saves = {snapshot.length: snapshot.slot for snapshot in row.snapshots}
        start = 0
        for stop in (*saves, row.num_new):
            while start < stop:
                length = min(CHUNK, stop - start)
                chunks.append((token + start, length, saves.get(start + length, -1), number))
                start += length
        token += row.num_new
        first_chunk.append(len(chunks))
    if not chunks:
        return DeviceRows(upload([slots], device)[0])
    columns = [np.array(column, dtype=np.int32) for column in zip(*chunks, strict=True)]
    row_slots = [row.slot for row in rows[decodes:]]
    columns += [np.array(values, dtype=np.int32) for values in (first_chunk, row_token, row_slots)]
    decode_slots, *uploaded = upload([slots, *columns], device)
    return DeviceRows(decode_slots, DeviceChunks(*uploaded))
