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

    #: One per sequence of the request.
    first_tokens: tuple[int, ...]
    #: One per sequence. A sequence with a reason ends with its first token.
    finish_reasons: tuple[FinishReason | None, ...]
    #: CRC-32 of each pushed block in logical order; empty without --checksums.
    checksums: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ExposedParts:
    """When each part of the exposed time ended, in seconds after finish(); 0 for a part that ended before finish().

    kv_transfer/node.py draws the time line.
    """

    #: The transfer thread handled finish().
    noticed_s: float
    #: The last write was posted.
    posted_s: float
    #: Every write had ended.
    written_s: float
    #: The commit was sent.
    committed_s: float
    #: Seconds that the commit waited on the receiver for the last range.
    awaited_s: float


@dataclass(frozen=True, slots=True)
class TransferReport:
    """Cost of a completed transfer, as its sender measured it."""

    blocks: int
    bytes: int
    #: Blocks that were written at finish(), when the last chunk was computed.
    delivered_before_finish: int
    #: Seconds from finish() to the acknowledged commit.
    exposed_s: float
    #: The transport that carried the bytes.
    transport: str
    parts: ExposedParts = ExposedParts(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Writer:
    """The process that opened a transfer."""

    pod: str
    generation: int
    #: Name of its transfer agent.
    agent: str
    #: host:port of its gRPC server.
    address: str
    #: Its bytes move only while the receiver polls.
    polled: bool = False


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """A pod that is expected to hold a prefix."""

    pod: str
    #: 0: any generation.
    generation: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedBlocks:
    """Blocks to pull from a holder into this pod's pool."""

    request_id: str
    #: Block hashes from the start of the prompt to the last wanted block.
    hashes: Sequence[bytes]
    #: First wanted logical block.
    first_block: int
    #: Physical blocks of this pool, for the logical blocks from first_block on.
    blocks: Sequence[int]
    #: Keeps `blocks` from reuse.
    pin: PinnedBlocks
    timeout_s: float


@dataclass(frozen=True, slots=True)
class PullResult:
    """Outcome of a pull that did not fail."""

    #: This many of the wanted blocks, from the first on, are complete.
    blocks: int
    #: "none", or the reason why some are missing.
    reason: str
    #: Rate at which the holder lately wrote to this pod, in 1e9 bytes per second; 0 while unknown.
    gb_s: float


@dataclass(frozen=True, slots=True)
class PeerStats:
    """A connection that passed its probe."""

    pod: str
    generation: int
    address: str
    transport: str
    #: "reported" or "derived", see backend.interface.Transport.
    transport_source: str
    #: Rate of the probe, a warm write of many blocks, in 1e9 bytes per second.
    gb_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairStats:
    """This pod's traffic to another pod since this pod's start; see Pair in transfer.proto.

    generation, address and transport are empty while the pods are not connected.
    """

    pod: str
    generation: int
    address: str
    transport: str
    transport_source: str
    #: 1e9 bytes per second of recent writes; of the probe before the first write.
    gb_s: float
    transfers: int
    pulls: int
    blocks: int
    pulled_blocks: int
    bytes: int
    #: Seconds in which a write was in flight.
    busy_s: float
    exposed_s: float
    failures: int


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Counters since the start, and gauges."""

    sent_blocks: int
    sent_bytes: int
    sent_transfers: int
    failed_transfers: int
    received_transfers: int
    received_blocks: int
    #: Received transfers with a wrong checksum.
    damaged_transfers: int
    open_incoming: int
    #: Blocks of ended incoming transfers that wait for proof that their writer stopped.
    quarantined_blocks: int
    open_outgoing: int
    #: Open loans of cached blocks to other pods.
    loans: int
    #: Posted writes that have not ended.
    pending_writes: int
    #: Iterations of the transfer thread.
    iterations: int
    #: Messages that did not fit the state of their transfer, by reason.
    dropped: dict[str, int]
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
