"""Binary notifications between transfer agents.

RangeWritten follows each write. CommitNotification and CommittedNotification are a Commit call and its answer without
the event loops and the gRPC of two pods. They are used where both sides poll often. The call follows if one is lost.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from common.types import TransferId
from common.wire import finish_reason_from_pb, finish_reason_to_pb
from kv_transfer.messages import Commit

_RANGE = struct.Struct(">4sQQII")
_COMMIT = struct.Struct(">4sQQH")
_FIRST = struct.Struct(">IB")  # First token, finish reason
_COMMITTED = struct.Struct(">4sQQI")
_RANGE_MAGIC, _COMMIT_MAGIC, _COMMITTED_MAGIC = b"BTN1", b"BTN2", b"BTN3"


@dataclass(frozen=True, slots=True)
class RangeWritten:
    """Logical blocks [first, first + count) of a transfer are in the target's memory."""

    transfer_id: TransferId
    first: int
    count: int

    def pack(self) -> bytes:
        return _RANGE.pack(_RANGE_MAGIC, self.transfer_id.generation, self.transfer_id.number, self.first, self.count)


@dataclass(frozen=True, slots=True)
class CommitNotification:
    """The writer's commit of a transfer. It carries no checksums."""

    transfer_id: TransferId
    commit: Commit

    def pack(self) -> bytes:
        firsts = zip(self.commit.first_tokens, self.commit.finish_reasons, strict=True)
        packed = [_FIRST.pack(token, finish_reason_to_pb(finish)) for token, finish in firsts]
        return b"".join([_COMMIT.pack(_COMMIT_MAGIC, *_pair(self.transfer_id), len(packed)), *packed])


@dataclass(frozen=True, slots=True)
class CommittedNotification:
    """Every block and the commit of a transfer arrived."""

    transfer_id: TransferId
    awaited_us: int  # Microseconds from the arrival of the commit to the arrival of the last range

    def pack(self) -> bytes:
        return _COMMITTED.pack(_COMMITTED_MAGIC, *_pair(self.transfer_id), min(self.awaited_us, 0xFFFFFFFF))


TransferNotification = RangeWritten | CommitNotification | CommittedNotification


def parse_notification(payload: bytes) -> TransferNotification | None:
    """Returns None for a payload that is not one of these notifications."""
    try:
        match payload[:4]:
            case b"BTN1":
                _, generation, number, first, count = _RANGE.unpack(payload)
                return RangeWritten(TransferId(generation, number), first, count) if count else None
            case b"BTN2":
                _, generation, number, n = _COMMIT.unpack_from(payload)
                firsts = list(_FIRST.iter_unpack(payload[_COMMIT.size :]))
                if len(firsts) != n:
                    return None
                commit = Commit(tuple(t for t, _ in firsts), tuple(finish_reason_from_pb(f) for _, f in firsts))
                return CommitNotification(TransferId(generation, number), commit)
            case b"BTN3":
                _, generation, number, awaited_us = _COMMITTED.unpack(payload)
                return CommittedNotification(TransferId(generation, number), awaited_us)
    except struct.error:
        pass
    return None


def _pair(transfer_id: TransferId) -> tuple[int, int]:
    return transfer_id.generation, transfer_id.number
