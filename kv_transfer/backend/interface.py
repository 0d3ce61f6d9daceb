"""What moves bytes. A backend posts writes and reports what became of them; it has no time limits and no policy.

Lifecycle: start -> connect/write/poll/notifications... -> close, all on the one transfer thread that owns it. A write
is PENDING until DONE or FAILED; only a terminal one may be released. DONE means that the bytes are in the peer's
memory; the notification of a write arrives after its bytes, in no order with other notifications.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.memory import PeerMemory, PoolMemory


class WriteState(enum.Enum):
    """Where a write is."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Transport:
    """What carries the payload to a peer (cma, tcp, shm, cuda_ipc, rdma, loopback, unknown) and how that is known.

    source: "reported" by the transport library's own protocol selection for this agent, or "derived" from hosts and
    settings.
    """

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class Notification:
    """Arrived from the agent `peer`."""

    peer: str
    payload: bytes


class Backend(Protocol):
    """One agent. Peers are known by their agent names; handles are opaque numbers."""

    @property
    def kind(self) -> str:
        """ "nixl" or "loopback"."""

    def start(self, name: str, memory: PoolMemory) -> None:
        """Creates the agent under a name that was never used before and registers the pool. Raises TransferFailed."""

    def metadata(self) -> bytes:
        """What a peer needs to connect."""

    def connect(self, peer: str, metadata: bytes, memory: PeerMemory) -> None:
        """Makes the peer's pool writable. Raises TransferFailed, also if the metadata belongs to another agent."""

    def disconnect(self, peer: str) -> None:
        """Forgets the peer and what was prepared for it, but for an introduction; unknown peers are fine. Call with no
        write pending to it.
        """

    def add_peer(self, peer: str, metadata: bytes) -> None:
        """Makes `notify` reach a peer that is not connected. Raises like connect."""

    def remove_peer(self, peer: str) -> None:
        """Takes introduce() back; a peer that is connected stays so."""

    def write(self, peer: str, local: Sequence[int], remote: Sequence[int], notification: bytes) -> int:
        """Posts local[i] -> remote[i] (not empty), with a notification after the bytes (none if empty). May copy
        inline; never raises for what the peer did: such a write is FAILED.
        """

    def notify(self, peer: str, payload: bytes) -> None:
        """Sends a notification without bytes. Raises TransferFailed."""

    def poll(self, handle: int) -> WriteState:
        """Makes progress and says where the write is. May copy inline."""

    def error(self, handle: int) -> str:
        """Why a FAILED write failed."""

    def release(self, handle: int) -> None:
        """Forgets a terminal write."""

    def notifications(self) -> list[Notification]:
        """Makes progress and takes what arrived."""

    def transport(self, peer: str, *, same_host: bool) -> Transport:
        """What carries writes to a peer; meaningful after a first one."""

    def close(self) -> None:
        """Ends the agent. Writes that are still pending stay with the process until it ends."""
