"""Values that pass between the two sides of a transfer, and between a transfer and its caller."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from common.types import FinishReason
from kv_transfer.memory import PinnedBlocks


@dataclass(frozen=True, slots=True)
class Commit:
    """The sender's final message: every block is written or on its way, and the prompt's first tokens exist."""

    first_tokens: tuple[int, ...]  # One per sequence of the request
    #: One per sequence. A sequence with a reason ends with its first token.
    finish_reasons: tuple[FinishReason | None, ...]
    checksums: tuple[int, ...] = ()  # CRC-32 of each pushed block in logical order; empty without --checksums


@dataclass(frozen=True, slots=True)
class ExposedParts:
    """When each part of the exposed time ended, in seconds after finish(); 0 for a part that ended before finish().

    kv_transfer/node.py draws the time line.
    """

    noticed_s: float  # The transfer thread handled finish()
    posted_s: float  # The last write was posted
    written_s: float  # Every write had ended
    committed_s: float  # The commit was sent
    awaited_s: float  # Seconds that the commit waited on the receiver for the last range


@dataclass(frozen=True, slots=True)
class TransferReport:
    """Cost of a completed transfer, as its sender measured it."""

    blocks: int
    bytes: int
    delivered_before_finish: int  # Blocks that were written at finish(), when the last chunk was computed
    exposed_s: float  # Seconds from finish() to the acknowledged commit
    transport: str  # The transport that carried the bytes
    parts: ExposedParts = ExposedParts(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Writer:
    """The process that opened a transfer."""

    pod: str
    generation: int
    agent: str  # Name of its transfer agent
    address: str  # host:port of its gRPC server
    polled: bool = False  # Its bytes move only while the receiver polls


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedBlocks:
    """Blocks to pull from a holder into this pod's pool."""

    request_id: str
    hashes: Sequence[bytes]  # Block hashes from the start of the prompt to the last wanted block
    first_block: int  # First wanted logical block
    blocks: Sequence[int]  # Physical blocks of this pool, for the logical blocks from first_block on
    pin: PinnedBlocks  # Keeps `blocks` from reuse
    timeout_s: float


@dataclass(frozen=True, slots=True)
class PullResult:
    """Outcome of a pull that did not fail."""

    blocks: int  # This many of the wanted blocks, from the first on, are complete
    reason: str  # "none", or the reason why some are missing
    gb_s: float  # Rate at which the holder lately wrote to this pod, in 1e9 bytes per second; 0 while unknown


@dataclass(frozen=True, slots=True)
class PeerStats:
    """A connection that passed its probe."""

    pod: str
    generation: int
    address: str
    transport: str
    transport_source: str  # "reported" or "derived", see backend.interface.Transport
    gb_s: float  # Rate of the probe, a warm write of many blocks, in 1e9 bytes per second


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Counters since the start, and gauges."""

    sent_blocks: int
    sent_transfers: int
    failed_transfers: int
    received_transfers: int
    damaged_transfers: int  # Received transfers with a wrong checksum
    open_incoming: int
    quarantined_blocks: int  # Blocks of ended incoming transfers that wait for proof that their writer stopped
    open_outgoing: int
    loans: int  # Open loans of cached blocks to other pods
    pending_writes: int  # Posted writes that have not ended
    dropped: dict[str, int]  # Messages that did not fit the state of their transfer, by reason
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
