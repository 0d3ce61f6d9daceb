"""Interface of the backends that move bytes between the pools of two processes.

    start --> connect / write / poll / notifications ... --> close        all on the transfer thread

A write is PENDING until it is DONE or FAILED; only a terminal write may be released. DONE means that the bytes are in
the peer's memory. The notification of a write arrives after its bytes, in no order with other notifications. A backend
has no time limits and no policy.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.kv_slices import BlockSpan
from kv_transfer.memory import PeerMemory, PoolMemory

STAGED = "staged_"  #: The name of a transport through host memory begins with this.
TCP_OR_UNKNOWN = ("tcp", "unknown")  #: Transports that carry KV in GPU memory only with allow_tcp.


class WriteState(enum.Enum):
    """State of one write."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Transport:
    """The transport that carries writes to a peer."""

    #: cuda_ipc, rdma, shm, cma, tcp, loopback or unknown. Through host memory: STAGED and one of these names.
    name: str
    #: "reported" by the transport library's protocol selection for this agent, or "derived" from hosts and settings.
    source: str


@dataclass(frozen=True, slots=True)
class Notification:
    """A message from the agent `peer`."""

    peer: str
    payload: bytes


class Backend(Protocol):
    """One transfer agent. Peers are identified by agent names, writes by opaque handles."""

    def start(self, name: str, memory: PoolMemory) -> None:
        """Creates the agent and registers the pool. `name` must never have been used before. Raises TransferFailed."""

    def metadata(self) -> bytes:
        """Returns opaque bytes that a peer needs for `connect` and `add_peer`."""

    def connect(self, peer: str, metadata: bytes, memory: PeerMemory, span: BlockSpan | None = None) -> None:
        """Makes the peer's pool writable. Raises TransferFailed, also for the metadata of another agent.

        Writes to the peer copy these bytes of each block; None: whole blocks, which have one size on both sides.
        """

    def disconnect(self, peer: str) -> None:
        """Forgets the connection to a peer; `notify` still works after `add_peer`. Unknown peers are ignored.

        No write to the peer may be pending.
        """

    def add_peer(self, peer: str, metadata: bytes) -> None:
        """Makes `notify` reach a peer that is not connected. Raises TransferFailed."""

    def remove_peer(self, peer: str) -> None:
        """Reverts `add_peer`. A connected peer stays connected."""

    def staging_metadata(self) -> bytes:
        """Returns opaque bytes that a peer needs for `connect_staged` and `accept_staged`; empty without staging.

        The first call allocates the staging area. Raises TransferFailed.
        """

    def connect_staged(self, peer: str, metadata: bytes) -> None:
        """Sends later writes to a connected peer through host memory. Raises TransferFailed."""

    def accept_staged(self, peer: str, metadata: bytes) -> None:
        """Accepts writes through host memory from a peer of `add_peer`, until `remove_peer`. Raises TransferFailed."""

    def write(self, peer: str, local: Sequence[int], remote: Sequence[int], notification: bytes) -> int:
        """Posts a write of block local[i] to block remote[i] for every i (at least one), and returns its handle.

        A non-empty `notification` is sent after the bytes. The call may copy inline. It does not raise for a failure of
        the peer; the write is FAILED then.
        """

    def notify(self, peer: str, payload: bytes) -> None:
        """Sends a notification that belongs to no write. Raises TransferFailed."""

    def poll(self, handle: int) -> WriteState:
        """Makes progress and returns the state of a write. May copy inline."""

    def error(self, handle: int) -> str:
        """Returns the reason of a FAILED write."""

    def release(self, handle: int) -> None:
        """Forgets a terminal write."""

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        """Returns a checksum of each block of this pod, equal in pods of all sizes with the same KV. TransferFailed."""

    def notifications(self) -> list[Notification]:
        """Makes progress and returns the notifications that arrived since the last call."""

    def transport(self, peer: str, *, same_host: bool) -> Transport:
        """Returns the transport that carries writes to a peer. Meaningful after the first write."""

    def close(self) -> None:
        """Ends the agent. Pending writes stay with the process until it ends."""
