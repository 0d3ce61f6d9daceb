"""The memory of recurrent states: one state of all gated delta layers per slot, live ones and snapshots alike.

    slot          0 ............................ num_states | zero | dummy
    recurrent     float32 [layers, heads, value_dim, key_dim]
    conv          [layers, taps - 1, channels] in the model's dtype

A live state belongs to a running sequence, and each of its steps overwrites it. A snapshot is a copy of it. The zero
slot stays zero: a copy of it starts a sequence without a prefix. Padding rows write to the dummy slot.
`engine/kv/groups/state_blocks.py` decides which slot is used for what.

The states have slots of their own, because they do not fit pages: a state of Qwen3.5-35B-A3B has 61 MiB, a page of its
ten layers with KV has 320 KiB, and 197 neighbouring pages would have to be free at once. An engine's slots lie in the
memory of the KV pool, which is registered for transfers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.kv.groups.state_slots import Snapshot

ALIGNMENT = 256  # Bytes; of each segment of a slot.
EXTRA_SLOTS = 2  # The zero slot and the dummy slot.
STATES_PER_SEQUENCE = 4  # Default: the live state, the newest two of an answer, and the end of a prompt
MEMORY_SHARE = 3  # By default states take at most 1 / MEMORY_SHARE of the memory for KV and states


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """The recurrent state of one sequence in all gated delta layers."""

    layers: int
    heads: int  # Value heads; each has a matrix of its own.
    value_dim: int
    key_dim: int
    channels: int  # Of the convolution: queries, keys and values of all heads.
    taps: int  # Tokens that the convolution sees; the state has the last taps - 1 of them.

    @property
    def recurrent_bytes(self) -> int:
        """Bytes of the matrices of all layers, padded."""
        return _padded(self.layers * self.heads * self.value_dim * self.key_dim * 4)

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of one slot for a model of this dtype."""
        return self.recurrent_bytes + _padded(self.layers * (self.taps - 1) * self.channels * dtype.itemsize)

    def describe(self, dtype: str) -> str:
        """Returns the arrays of a slot in words, for the KV layout."""
        matrices = f"{self.layers} x {self.heads} x {self.value_dim} x {self.key_dim} float32"
        return f"{matrices}, {self.layers} x {self.taps - 1} x {self.channels} {dtype}"


class LayerState(NamedTuple):
    """Views of one layer's states in all slots; strided over slots."""

    recurrent: Tensor  # float32 [slots, heads, value_dim, key_dim].
    conv: Tensor  # [slots, taps - 1, channels]: the last inputs of the convolution, oldest first.


class StateRow(NamedTuple):
    """One sequence of a step. Its tokens follow those of the rows before it."""

    num_new: int
    slot: int  # Its live state.
    #: Copies to make within the step: `length` counts from the row's first token and is below num_new.
    snapshots: tuple[Snapshot, ...] = ()


class StepStates(NamedTuple):
    """The states of a step."""

    layers: Sequence[LayerState]
    rows: Sequence[StateRow]  # Empty if only the device knows them, as in a CUDA graph.
    device: Any = None  # The `DeviceRows` of the Triton kernels. None: the step is computed by torch.


class StatePool:
    """Owns the memory of the states."""

    def __init__(
        self,
        shape: StateShape,
        num_states: int,
        device: torch.device,
        dtype: torch.dtype,
        memory: Tensor | None = None,  # Zeroed, uint8 [num_states + EXTRA_SLOTS, at least slot_bytes]; None: its own
    ) -> None:
        self.shape, self.num_states = shape, num_states
        self.zero_slot, self.dummy_slot = num_states, num_states + 1
        size = num_states + EXTRA_SLOTS, shape.slot_bytes(dtype)
        self.data = torch.zeros(size, dtype=torch.uint8, device=device) if memory is None else memory
        sizes = shape.layers, shape.heads, shape.value_dim, shape.key_dim
        recurrent = self.data[:, : math.prod(sizes) * 4].view(torch.float32).view(-1, *sizes)
        inputs = shape.layers, shape.taps - 1, shape.channels
        first = shape.recurrent_bytes
        conv = self.data[:, first : first + math.prod(inputs) * dtype.itemsize].view(dtype).view(-1, *inputs)
        self.layers = tuple(map(LayerState, recurrent.unbind(1), conv.unbind(1)))

    def copy(self, source: int, target: int) -> None:
        """Queues the copy of one slot to another."""
        self.data[target].copy_(self.data[source])


def default_num_states(slot_bytes: int, memory: int, max_seqs: int) -> int:
    """Returns the slots for recurrent states if `num_states` is not set; `memory` is for KV and states, in bytes."""
    return max(2, min(STATES_PER_SEQUENCE * max_seqs, memory // MEMORY_SHARE // slot_bytes))


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
