"""What the two sides of a transfer tell each other and their callers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from common.types import FinishReason
from kv_transfer.memory import PinnedBlocks


@dataclass(frozen=True, slots=True)
class Commit:
    """The sender's last word: every block is on its way and the prompt's first tokens exist.

    first_tokens and finish_reasons have one entry per sequence of the request; a reason other than None ends it
    there. checksums: CRC-32 of each pushed block in logical order, or empty.
    """

    first_tokens: tuple[int, ...]
    finish_reasons: tuple[FinishReason | None, ...]
    checksums: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ExposedParts:
    """What the seconds of exposed_s were, each from finish(): until the transfer thread took it, the last piece was
    posted, every write had ended, and the commit was sent; 0 for what was over before. awaited_s: of the receiver,
    how long the commit waited there for the last range.
    """

    noticed_s: float
    posted_s: float
    written_s: float
    committed_s: float
    awaited_s: float


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What a hand-off cost.

    delivered_before_finish: blocks whose writes were done when finish() was called, that is when the last chunk's
    compute had ended.
    exposed_s: seconds from finish() until the commit was acknowledged. transport: what carried the bytes.
    """

    blocks: int
    bytes: int
    delivered_before_finish: int
    exposed_s: float
    transport: str
    parts: ExposedParts = ExposedParts(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Writer:
    """The process that opened a transfer: its pod, generation, agent and gRPC address.

    polled: its bytes move only while this side polls.
    """

    pod: str
    generation: int
    agent: str
    address: str
    polled: bool = False


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """A pod that is thought to hold a prefix; generation 0: whichever lives there."""

    pod: str
    generation: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedBlocks:
    """Logical blocks first_block... of the chain of `hashes` (from its start), to go to these physical blocks."""

    request_id: str
    hashes: Sequence[bytes]
    first_block: int
    blocks: Sequence[int]
    hold: PinnedBlocks
    timeout_s: float


@dataclass(frozen=True, slots=True)
class PullResult:
    """blocks: so many of the wanted ones, from the first on, are complete. reason: none, or why not all. gbps: at
    which the holder lately wrote here; 0 while unknown.
    """

    blocks: int
    reason: str
    gb_s: float


@dataclass(frozen=True, slots=True)
class PeerStats:
    """A connection that a probe went through. gbps: 1e9 bytes per second of its probe, a warm write of many blocks."""

    pod: str
    generation: int
    address: str
    transport: str
    transport_source: str
    gb_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairStats:
    """This pod's traffic with another one since the start; see Pair in transfer.proto. gbps: of what was written
    lately, of the probe while there was nothing. generation, address and transport are empty while the pods are not
    connected.
    """

    pod: str
    generation: int
    address: str
    transport: str
    transport_source: str
    gb_s: float
    transfers: int
    pulls: int
    blocks: int
    pulled_blocks: int
    bytes: int
    busy_s: float
    exposed_s: float
    failures: int


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Counters since the start and gauges of now.

    damaged_transfers: whose checksums were wrong. dropped: messages that did not fit, by reason. quarantined_blocks: of
    incoming transfers, which wait for proof that nobody writes them any more. loans: of cached blocks to other pods
    that are not over. pending_writes: writes that are posted and not terminal. turns: of the transfer thread.
    """

    sent_blocks: int
    sent_bytes: int
    sent_transfers: int
    failed_transfers: int
    received_transfers: int
    received_blocks: int
    damaged_transfers: int
    open_incoming: int
    quarantined_blocks: int
    open_outgoing: int
    loans: int
    pending_writes: int
    iterations: int
    dropped: dict[str, int]
    peers: tuple[PeerStats, ...]


class DroppedMessages:
    """A thread-safe counter per reason."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, reason: str) -> None:
        with self._lock:
            self._counts[reason] += 1

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
