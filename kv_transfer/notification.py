"""The message after each write: fixed binary (magic, transfer generation and number, first logical block, count)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from common.types import TransferId

_FORMAT = struct.Struct(">4sQQII")
_MAGIC = b"BTN1"


@dataclass(frozen=True, slots=True)
class RangeWritten:
    """Logical blocks [first, first + count) of a transfer are in the target's memory."""

    transfer_id: TransferId
    first: int
    count: int

    def pack(self) -> bytes:
        return _FORMAT.pack(_MAGIC, self.transfer_id.generation, self.transfer_id.number, self.first, self.count)

    @classmethod
    def parse(cls, payload: bytes) -> RangeWritten | None:
        """None for anything that is not one of ours."""
        if len(payload) != _FORMAT.size:
            return None
        magic, generation, number, first, count = _FORMAT.unpack(payload)
        if magic != _MAGIC or count == 0:
            return None
        return cls(TransferId(generation, number), first, count)
