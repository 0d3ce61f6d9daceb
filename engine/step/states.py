"""The recurrent states of the sequences of a step: the slots of their live states, and the copies around a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.device import upload
from engine.kv.groups.state_blocks import require_states
from engine.kv.groups.state_pool import StatePool, StateRow, StepStates
from engine.kv.groups.state_slots import Snapshot
from engine.schedule.scheduler import ScheduledSequence


class StateTable:
    """Maps each slot of the scheduler to the pool's slot with its live state. CUDA graphs read a copy on the device."""

    def __init__(self, pool: StatePool, slots: int, *, fused: bool) -> None:
        """fused: the model computes with Triton kernels."""
        self._pool, self._fused, self._device = pool, fused, pool.data.device
        self._table = np.full(slots + 1, pool.dummy_slot)  # int64; the last entry is for padding rows
        self._device_table = torch.full((slots + 1,), pool.dummy_slot, dtype=torch.int64, device=self._device)

    def copy_before(self, scheduled: Sequence[ScheduledSequence]) -> None:
        """Queues the copies that the step needs before it computes."""
        for entry in scheduled:
            for source, target in entry.state_copies:
                self._pool.copy(source, target)

    def copy_after(self, scheduled: Sequence[ScheduledSequence]) -> None:
        """Queues the snapshots of the states at the end of the step."""
        for entry in scheduled:
            for length, slot in entry.snapshots[-1:]:
                if length == entry.start + entry.num_new:
                    self._pool.copy(require_states(entry.seq.lease).slot, slot)

    def of_step(self, scheduled: Sequence[ScheduledSequence]) -> StepStates:
        """Returns the states of a step that runs layer by layer."""
        rows: list[StateRow] = []
        for entry in scheduled:
            inner = [Snapshot(length - entry.start, slot) for length, slot in entry.snapshots]
            inner = [snapshot for snapshot in inner if snapshot.length < entry.num_new]
            rows.append(StateRow(entry.num_new, require_states(entry.seq.lease).slot, tuple(inner)))
        return self._of_rows(rows)

    def of_dummies(self, num_new: Sequence[int]) -> StepStates:
        """Returns states of rows that belong to no sequence."""
        return self._of_rows([StateRow(count, self._pool.dummy_slot) for count in num_new])

    def stage(self, scheduled: Sequence[ScheduledSequence]) -> None:
        """Brings the slots of a step to the device, for `of_graph`."""
        slots = np.array([entry.seq.slot for entry in scheduled])
        states = np.array([require_states(entry.seq.lease).slot for entry in scheduled])
        changed = self._table[slots] != states
        if changed.any():
            self._table[slots] = states
            places, values = upload([slots[changed], states[changed]], self._device)
            self._device_table.index_copy_(0, places, values)

    def of_graph(self, row_slots: Tensor) -> StepStates:
        """Returns the states of rows of one token each, in these slots of the scheduler, int64 [rows]."""
        from engine.kernels.gated_delta.rows import DeviceRows

        return StepStates(self._pool.layers, (), DeviceRows(self._device_table.index_select(0, row_slots)))

    def _of_rows(self, rows: Sequence[StateRow]) -> StepStates:
        if not self._fused:
            return StepStates(self._pool.layers, rows)
        from engine.kernels.gated_delta.rows import device_rows

        return StepStates(self._pool.layers, rows, device_rows(rows, self._device))
