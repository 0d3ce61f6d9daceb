"""One connection to a peer: what its handshake said, its state, and the trouble of a pair without a connection."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import InvalidRequest, LayoutMismatch
from common.pb import transfer_pb2
from common.process.lifecycle import host_boot_id
from common.wire import layout_from_pb, role_from_pb
from kv_transfer.memory import MemoryKind, PeerMemory
from kv_transfer.messages import PeerStats
from kv_transfer.peers.process_watch import ProcessWatch, watch_process

HANDSHAKE_S = 10.0  #: Time limit of each call that makes a connection.


@dataclass(slots=True, eq=False)
class PeerConnection:
    """A connection to one generation of a peer."""

    pod: str
    generation: int
    address: str
    agent: str
    num_blocks: int
    probe_block: int
    memory: PeerMemory
    metadata: bytes
    same_host: bool
    watch: ProcessWatch | None  #: Detects the end of the peer's process; None where that is not possible.
    accepts_commit_notifications: bool = False  #: The peer acknowledges commit notifications.
    transport: str = ""
    transport_source: str = ""
    gb_s: float = 0.0  #: Rate of the probe in 1e9 bytes per second.
    #: The last block went through at this time of the connector's clock. Any thread sets it.
    block_at: float = 0.0
    #: Why the last probe has not passed; "" if it has. The event loop sets it, any thread reads it.
    trouble: str = ""
    probe_at: float = 0.0  #: The next probe is not before this time.
    # The transfer thread owns the fields below.
    broken: bool = False  #: No new transfer may use the connection.
    process_ended: bool = False  #: The peer's process is proven to have ended. The sender ends its transfers then.
    in_flight: int = 0  #: Posted writes.
    missed_acks: int = 0  #: Commit notifications in a row that were not acknowledged in time.
    notifications_resume_at: float = 0.0  #: No commit notification is sent before this time.

    def takes(self, block: int) -> bool:
        """Returns whether transfers may write to the block: one of the pool, or of a slot of a recurrent state."""
        return block < self.num_blocks or self.probe_block + 1 < block < self.memory.total_blocks

    def stats(self, now: float) -> PeerStats:
        who = (self.pod, self.generation, self.address)
        age_s = max(0.0, now - self.block_at)
        return PeerStats(*who, self.transport, self.transport_source, self.gb_s, age_s, self.trouble)

    def close_watch(self) -> None:
        if self.watch is not None:
            self.watch.close()


@dataclass(slots=True)
class PairTrouble:
    """Why this pod has no connection to a peer."""

    pod: str
    generation: int  #: Generation that was wanted; 0 for any.
    address: str
    why: str
    wanted_at: float  #: When the pair was last known to be wanted.
    retry_at: float  #: The prober tries again at this time.
    tries: int = 0

    @property
    def stats(self) -> PeerStats:
        return PeerStats(self.pod, self.generation, self.address, "", "", 0.0, None, self.why)


def describe_connection(address: str, answer: transfer_pb2.HandshakeResponse) -> PeerConnection:
    """Returns the connection that a handshake describes. It blocks while it looks for the peer's process."""
    info = answer.info
    if answer.pool_memory not in ("DRAM", "VRAM"):
        raise LayoutMismatch(f"invalid pool_memory {answer.pool_memory!r}: expected DRAM or VRAM", field="pool_memory")
    kind: MemoryKind = "VRAM" if answer.pool_memory == "VRAM" else "DRAM"
    total = max(info.num_blocks, answer.probe_block + 1, answer.total_blocks)
    return PeerConnection(
        pod=info.pod,
        generation=info.generation,
        address=address,
        agent=agent_name(info),
        num_blocks=info.num_blocks,
        probe_block=answer.probe_block,
        memory=PeerMemory(answer.pool_base, info.layout.block_bytes, total, answer.pool_device, kind),
        metadata=answer.agent_metadata,
        same_host=info.boot_id == host_boot_id(),
        watch=watch_process(info.pid, info.boot_id, address),
        accepts_commit_notifications=answer.notes,
    )


def agent_name(info: transfer_pb2.InfoResponse) -> str:
    """Returns role-pod-generation: unique over all processes, because a generation is never reused.

    The role is that of the pod's start, because a running agent keeps its name.
    """
    return f"{role_from_pb(info.first_role or info.role).value}-{info.pod}-{info.generation}"


def probed_bytes(mine: transfer_pb2.InfoResponse, theirs: transfer_pb2.InfoResponse) -> int:
    """Returns how many bytes of a block go from rank 0 of one pod to rank 0 of the other."""
    return min(mine.layout.block_bytes, theirs.layout.block_bytes)


def require_compatible(mine: transfer_pb2.InfoResponse, theirs: transfer_pb2.InfoResponse) -> None:
    """Raises LayoutMismatch with the first field that differs, or InvalidRequest if the peer has no identity."""
    if not theirs.pod or not theirs.generation:
        raise InvalidRequest("the peer's info has no pod name or generation", field="info")
    if (own := mine.protocol_version) != (other := theirs.protocol_version):
        differ = f"protocol versions differ: {own} on this pod, {other} on {theirs.pod}"
        raise LayoutMismatch(differ, field="protocol_version")
    own_layout, other_layout = layout_from_pb(mine.layout), layout_from_pb(theirs.layout)
    own_layout.require_equal(other_layout)
    same_size = own_layout.tensor_parallel == other_layout.tensor_parallel
    own = mine.layout.block_bytes if same_size else other_layout.block_bytes  # as this pod computes them
    if own != (other := theirs.layout.block_bytes):
        ranks = "" if same_size else f" for tensor_parallel_size {other_layout.tensor_parallel}"
        differ = f"KV layouts differ in block_bytes{ranks}: {own} on this pod, {other} on {theirs.pod}"
        raise LayoutMismatch(differ, field="block_bytes")
    if mine.fingerprint != theirs.fingerprint:
        raise LayoutMismatch("KV fingerprints differ although every field is equal", field="fingerprint")
