"""Values that pass between the two sides of a transfer (also as binary notifications), and to and from its caller."""

from __future__ import annotations

import hmac
import struct
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from common.types import FinishReason, TransferId
from common.wire import finish_reason_from_pb, finish_reason_to_pb
from kv_transfer.memory import PinnedBlocks

_RANGE = struct.Struct(">4sQQII")
_COMMIT = struct.Struct(">4sQQH")
_FIRST = struct.Struct(">IB")  #: First token, finish reason.
_COMMITTED = struct.Struct(">4sQQI")
_RANGE_MAGIC, _COMMIT_MAGIC, _COMMITTED_MAGIC = b"BTN4", b"BTN5", b"BTN6"  #: 1 to 3 had no mac.
_MAC_BYTES = 16


@dataclass(frozen=True, slots=True)
class Commit:
    """The sender's final message: every block is written or on its way, and the prompt's first tokens exist."""

    first_tokens: tuple[int, ...]  #: One per sequence of the request.
    #: One per sequence. A sequence with a reason ends with its first token.
    finish_reasons: tuple[FinishReason | None, ...]
    checksums: tuple[int, ...] = ()  #: CRC-32 of each pushed block in logical order; empty without --checksums.


@dataclass(frozen=True, slots=True)
class ExposedParts:
    """When each part of the exposed time (see node.py) ended, in seconds after finish(); 0 if it ended before."""

    noticed_s: float  #: The transfer thread handled finish().
    posted_s: float  #: The last write was posted.
    written_s: float  #: Every write had ended.
    committed_s: float  #: The commit was sent.
    awaited_s: float  #: Seconds that the commit waited at the receiver for the last range.


@dataclass(frozen=True, slots=True)
class TransferReport:
    """Cost of a completed transfer, as its sender measured it."""

    blocks: int
    bytes: int
    delivered_before_finish: int  #: Blocks that were written at finish(), when the last chunk was computed.
    exposed_s: float  #: Seconds from finish() to the acknowledged commit.
    transport: str  #: The transport that carried the bytes.
    parts: ExposedParts = ExposedParts(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Writer:
    """The process that opened a transfer."""

    pod: str
    generation: int
    agent: str  #: Name of its transfer agent.
    address: str  #: host:port of its gRPC server.
    polled: bool = False  #: Its bytes move only while the receiver polls.


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedBlocks:
    """Blocks to pull from a holder into this pod's pool."""

    request_id: str
    hashes: Sequence[bytes]  #: Block hashes from the start of the prompt to the last wanted block.
    first_block: int  #: First wanted logical block.
    blocks: Sequence[int]  #: Physical blocks of this pool, for the logical blocks from first_block on.
    pin: PinnedBlocks  #: Keeps `blocks` from reuse.
    timeout_s: float


@dataclass(frozen=True, slots=True)
class PullResult:
    """Outcome of a pull that did not fail."""

    blocks: int  #: This many of the wanted blocks, from the first on, are complete.
    reason: str  #: "none", or the reason why some are missing.
    gb_s: float  #: Rate at which the holder lately wrote to this pod, in 1e9 bytes per second; 0 while unknown.
    held: int = 0  #: If `blocks` is 0: blocks of the longest prefix that the holder would send.


@dataclass(frozen=True, slots=True)
class PeerStats:
    """A connection to a peer, or a pair in trouble without a connection."""

    pod: str
    generation: int
    address: str
    transport: str  #: "" without a connection.
    transport_source: str  #: "reported" or "derived", see backend.interface.Transport.
    gb_s: float  #: Rate of the probe, a warm write of many blocks, in 1e9 bytes per second.
    block_age_s: float | None = None  #: Seconds since the last block arrived; None without a connection.
    trouble: str = ""  #: Why no KV can be sent to the pod now; "" if it can.


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Counters since the start, and gauges."""

    sent_blocks: int
    sent_transfers: int
    failed_transfers: int
    received_transfers: int
    damaged_transfers: int  #: Received transfers with a wrong checksum.
    open_incoming: int
    quarantined_blocks: int  #: Blocks of ended incoming transfers that wait for proof that their writer stopped.
    open_outgoing: int
    loans: int  #: Open loans of cached blocks to other pods.
    pending_writes: int  #: Posted writes that have not ended.
    dropped: dict[str, int]  #: Messages that did not fit the state of their transfer, by reason.
    peers: tuple[PeerStats, ...]


class DroppedMessages:
    """Counts dropped messages by reason. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, reason: str) -> None:
        with self._lock:
            self._counts[reason] += 1

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


@dataclass(frozen=True, slots=True)
class RangeWritten:
    """Logical blocks [first, first + count) of a transfer are in the target's memory."""

    transfer_id: TransferId
    first: int
    count: int

    def pack(self, signature: bytes) -> bytes:
        return _sealed(_RANGE.pack(_RANGE_MAGIC, *_pair(self.transfer_id), self.first, self.count), signature)


@dataclass(frozen=True, slots=True)
class CommitNotification:
    """The writer's commit of a transfer. It carries no checksums.

    This and CommittedNotification are a Commit call and its answer without the event loops and the gRPC of two pods.
    They are used where both sides poll often. The call follows if one is lost.
    """

    transfer_id: TransferId
    commit: Commit

    def pack(self, signature: bytes) -> bytes:
        firsts = zip(self.commit.first_tokens, self.commit.finish_reasons, strict=True)
        packed = [_FIRST.pack(token, finish_reason_to_pb(finish)) for token, finish in firsts]
        return _sealed(
            b"".join([_COMMIT.pack(_COMMIT_MAGIC, *_pair(self.transfer_id), len(packed)), *packed]), signature
        )


@dataclass(frozen=True, slots=True)
class CommittedNotification:
    """Every block and the commit of a transfer arrived."""

    transfer_id: TransferId
    awaited_us: int  #: Microseconds from the arrival of the commit to the arrival of the last range.

    def pack(self, signature: bytes) -> bytes:
        awaited_us = min(self.awaited_us, 0xFFFFFFFF)
        return _sealed(_COMMITTED.pack(_COMMITTED_MAGIC, *_pair(self.transfer_id), awaited_us), signature)


TransferNotification = RangeWritten | CommitNotification | CommittedNotification


def parse_notification(payload: bytes) -> TransferNotification | None:
    """Returns None for a payload that is not one of these notifications. Does not verify the mac: see is_sealed."""
    payload = payload[:-_MAC_BYTES]
    try:
        match payload[:4]:
            case b"BTN4":
                _, generation, number, first, count = _RANGE.unpack(payload)
                return RangeWritten(TransferId(generation, number), first, count) if count else None
            case b"BTN5":
                _, generation, number, n = _COMMIT.unpack_from(payload)
                firsts = list(_FIRST.iter_unpack(payload[_COMMIT.size :]))
                if len(firsts) != n:
                    return None
                commit = Commit(tuple(t for t, _ in firsts), tuple(finish_reason_from_pb(f) for _, f in firsts))
                return CommitNotification(TransferId(generation, number), commit)
            case b"BTN6":
                _, generation, number, awaited_us = _COMMITTED.unpack(payload)
                return CommittedNotification(TransferId(generation, number), awaited_us)
    except struct.error:
        pass
    return None


def is_sealed(payload: bytes, signature: bytes) -> bool:
    """Returns whether a process that knows the signature of the KV target packed this notification.

    NIXL does not authenticate notifications, and the signature itself does not travel over NIXL.
    """
    return bool(signature) and hmac.compare_digest(payload, _sealed(payload[:-_MAC_BYTES], signature))


def _sealed(body: bytes, signature: bytes) -> bytes:
    return body + hmac.digest(signature, body, "sha256")[:_MAC_BYTES]


def _pair(transfer_id: TransferId) -> tuple[int, int]:
    return transfer_id.generation, transfer_id.number
