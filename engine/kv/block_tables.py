"""Block tables of the running sequences as arrays, one row for each slot. A row follows its lease: what the lease
gained since the last look is added, and only a lease that is new in the slot, or had blocks replaced, is copied whole.
Blocks beyond a sequence's tokens were for drafts and may have been exchanged since: those are looked at again.
"""

from __future__ import annotations

import numpy as np

from engine.kv.blocks import Lease
from engine.schedule.sequence import Sequence


class BlockTables:
    """blocks: int32 [slots, width]. copied[slot]: entries of the row that a copy elsewhere has, raised by whoever makes
    that copy and lowered to those that are still right.
    """

    def __init__(self, slots: int, width: int) -> None:
        self.blocks = np.zeros((slots, width), dtype=np.int32)
        self.num_on_device = np.zeros(slots, dtype=np.int64)
        self._leases: list[Lease | None] = [None] * slots
        self._swaps = [0] * slots
        self._known = [0] * slots

    def row(self, seq: Sequence) -> np.ndarray:
        """The blocks of a running sequence's lease."""
        slot, lease = seq.slot, seq.lease
        assert lease is not None
        count = len(lease.blocks)
        row: np.ndarray = self.blocks[slot]
        if self._leases[slot] is not lease or self._swaps[slot] != lease.num_replaced:
            row[:count] = lease.blocks
            self._leases[slot], self._swaps[slot] = lease, lease.num_replaced
            self.num_on_device[slot] = 0
        elif count > self._known[slot]:
            row[self._known[slot] : count] = lease.blocks[self._known[slot] :]
            self.num_on_device[slot] = min(self.num_on_device[slot], self._known[slot])
        self._known[slot] = min(count, -(-seq.length // seq.block_size))
        return row[:count]
