"""The block tables of all slots on the device, for steps in static buffers."""

from __future__ import annotations

import numpy as np
import torch

from engine.device import upload
from engine.schedule.sequence import BlockTables


class SlotTables:
    """The device's copy of `BlockTables`; its last row is for padding and names no block of a sequence.

    A step brings the blocks of its new tokens along. `num_on_device` says how many entries before them are current.
    """

    def __init__(self, tables: BlockTables, device: torch.device) -> None:
        slots, self.width = tables.blocks.shape
        self.tables = tables
        self.device_tables = torch.zeros(slots + 1, self.width, dtype=torch.int32, device=device)  # [slots + 1, width]

    def copy(self, slots: np.ndarray, width: int) -> None:
        """Copies the first `width` entries of these slots to the device."""
        rows = [self.tables.blocks[slots, :width], slots.astype(np.int32)]
        entries, device_slots = upload(rows, self.device_tables.device)
        self.device_tables[:, :width].index_copy_(0, device_slots.long(), entries)
