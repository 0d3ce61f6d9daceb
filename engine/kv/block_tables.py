"""Block tables of the running sequences, kept as arrays from step to step."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from engine.kv.blocks import Lease


class RunningSequence(Protocol):
    """The parts of a sequence that its block table depends on."""

    slot: int
    lease: Lease | None
    block_size: int

    @property
    def length(self) -> int:
        """Tokens of the sequence."""


class BlockTables:
    """One row of block numbers for each slot; a row is updated from the lease when it is read.

    Only new blocks are copied, unless the slot has another lease or the lease has replaced blocks. Blocks behind the
    sequence's tokens were for drafts and may have been exchanged, so these are copied each time.
    """

    def __init__(self, slots: int, width: int) -> None:
        self.blocks = np.zeros((slots, width), dtype=np.int32)  # int32 [slots, width]
        #: Lead entries of each row that are equal on the device. The code that copies rows there raises this number;
        #: `row` lowers it.
        self.num_on_device = np.zeros(slots, dtype=np.int64)
        self._leases: list[Lease | None] = [None] * slots
        self._num_replaced = [0] * slots
        #: Lead entries of each row that are up to date as long as the lease is the same.
        self._num_current = [0] * slots

    def row(self, seq: RunningSequence) -> np.ndarray:
        """Returns the blocks of a running sequence's lease, int32."""
        slot, lease = seq.slot, seq.lease
        assert lease is not None
        count = len(lease.blocks)
        row: np.ndarray = self.blocks[slot]
        if self._leases[slot] is not lease or self._num_replaced[slot] != lease.num_replaced:
            row[:count] = lease.blocks
            self._leases[slot], self._num_replaced[slot] = lease, lease.num_replaced
            self.num_on_device[slot] = 0
        elif count > self._num_current[slot]:
            row[self._num_current[slot] : count] = lease.blocks[self._num_current[slot] :]
            self.num_on_device[slot] = min(self.num_on_device[slot], self._num_current[slot])
        self._num_current[slot] = min(count, -(-seq.length // seq.block_size))
        return row[:count]
