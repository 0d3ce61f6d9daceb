"""Transfer agents inside one process, with injected faults.

A LoopbackFabric owns every write and notification in flight. They move only while some agent polls, by the fabric's
clock. A delayed write writes its bytes at its due time even if the transfer ended meanwhile: the quarantine protects
against exactly this late write. An agent that died answers nothing: writes to it fail, and its own writes are lost. A
frozen agent neither receives nor polls: writes to it stay pending.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from common.errors import TransferFailed
from common.kv_slices import BlockSpan
from kv_transfer.backend.interface import Notification, Transport, WriteState
from kv_transfer.memory import PeerMemory, PoolMemory, whole_checksums


@dataclass(frozen=True, slots=True)
class LoopbackFault:
    """Fault of one write."""

    delay_s: float = 0.0  #: The write ends this much later.
    fail: str | None = None  #: The write fails with this reason and writes no byte.


@dataclass(slots=True)
class _LoopbackWrite:
    source: str
    peer: str
    local_blocks: tuple[int, ...]
    remote_blocks: tuple[int, ...]
    notification: bytes
    span: BlockSpan | None = None
    state: WriteState = WriteState.PENDING
    error: str = ""


@dataclass(slots=True)
class _LoopbackAgent:
    memory: PoolMemory
    inbox: list[Notification] = field(default_factory=list)
    dead: bool = False
    frozen: bool = False


class LoopbackFabric:
    """Connects LoopbackBackends. Faults may be set at any time from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        #: (source, peer, payload) -> delays in seconds, one per delivered copy: [] drops it, [0, 0] doubles it, unequal
        #: delays reorder it.
        self.on_notify: Callable[[str, str, bytes], Sequence[float]] = lambda _source, _peer, _payload: (0.0,)
        #: (source, peer, number of blocks) -> fault of the write.
        self.on_write: Callable[[str, str, int], LoopbackFault] = lambda _source, _peer, _count: LoopbackFault()
        self.transport = "loopback"  #: Transport that the agents report.
        self._clock = clock
        self._lock = threading.RLock()
        self._agents: dict[str, _LoopbackAgent] = {}
        self._order = itertools.count(1)
        #: Heap of (due time, order, peer, delivery).
        self._scheduled: list[tuple[float, int, str, Callable[[], None]]] = []

    def add_agent(self, name: str, memory: PoolMemory) -> None:
        """Adds an agent. Raises TransferFailed if the name exists."""
        with self._lock:
            if name in self._agents:
                raise TransferFailed(f"agent {name} exists already")
            self._agents[name] = _LoopbackAgent(memory)

    def kill(self, name: str) -> None:
        """Simulates the death of an agent's process; the agent's own writes are lost."""
        with self._lock:
            self._agents[name].dead = True

    def freeze(self, name: str) -> None:
        with self._lock:
            self._agents[name].frozen = True

    def thaw(self, name: str) -> None:
        with self._lock:
            self._agents[name].frozen = False

    def require_alive(self, name: str) -> None:
        """Raises TransferFailed if the agent does not exist or is dead."""
        with self._lock:
            agent = self._agents.get(name)
            if agent is None or agent.dead:
                raise TransferFailed(f"agent {name} does not exist")

    def post(self, write: _LoopbackWrite) -> None:
        """Schedules a write with its fault."""
        fault = self.on_write(write.source, write.peer, len(write.local_blocks))
        with self._lock:
            self._schedule(fault.delay_s, write.peer, partial(self._land, write, fault.fail))

    def notify(self, source: str, peer: str, payload: bytes) -> None:
        with self._lock:
            deliver = partial(self._agents[peer].inbox.append, Notification(source, payload))
            for delay_s in self.on_notify(source, peer, payload):
                if delay_s <= 0:
                    deliver()
                else:
                    self._schedule(delay_s, peer, deliver)

    def take_notifications(self, name: str) -> list[Notification]:
        self.advance()
        with self._lock:
            agent = self._agents[name]
            if agent.frozen or agent.dead:
                return []
            taken = list(agent.inbox)
            agent.inbox.clear()
            return taken

    def advance(self) -> None:
        """Delivers every write and notification that is due."""
        with self._lock:
            now, frozen = self._clock(), []
            while self._scheduled and self._scheduled[0][0] <= now:
                entry = heapq.heappop(self._scheduled)
                peer = self._agents[entry[2]]
                if peer.frozen and not peer.dead:
                    frozen.append(entry)
                else:
                    entry[3]()
            for entry in frozen:
                heapq.heappush(self._scheduled, entry)

    def _schedule(self, delay_s: float, peer: str, deliver: Callable[[], None]) -> None:
        heapq.heappush(self._scheduled, (self._clock() + delay_s, next(self._order), peer, deliver))

    def _land(self, write: _LoopbackWrite, planned_failure: str | None) -> None:
        source, peer = self._agents[write.source], self._agents[write.peer]
        if source.dead:
            return
        if peer.dead or planned_failure is not None:
            write.state, write.error = WriteState.FAILED, planned_failure or f"agent {write.peer} is gone"
            return
        for mine, theirs in zip(write.local_blocks, write.remote_blocks, strict=True):
            data = source.memory.read_block(mine)
            if (span := write.span) is not None:
                block = bytearray(peer.memory.read_block(theirs))
                block[span.target : span.target + span.nbytes] = data[span.source : span.source + span.nbytes]
                data = bytes(block)
            peer.memory.write_block(theirs, data)
        write.state = WriteState.DONE
        if write.notification:
            self.notify(write.source, write.peer, write.notification)


class LoopbackBackend:
    """One agent on a fabric. The methods are documented in interface.py."""

    def __init__(self, fabric: LoopbackFabric) -> None:
        self._fabric = fabric
        self._name = ""
        self._memory: PoolMemory | None = None
        self._connected: dict[str, BlockSpan | None] = {}
        self._notified_peers: set[str] = set()
        self._writes: dict[int, _LoopbackWrite] = {}
        self._handles = itertools.count(1)

    def start(self, name: str, memory: PoolMemory) -> None:
        self._fabric.add_agent(name, memory)
        self._name, self._memory = name, memory

    def metadata(self) -> bytes:
        return self._name.encode()

    def connect(self, peer: str, metadata: bytes, memory: PeerMemory, span: BlockSpan | None = None) -> None:
        self._require(peer, metadata)
        self._connected[peer] = span

    def add_peer(self, peer: str, metadata: bytes) -> None:
        self._require(peer, metadata)
        self._notified_peers.add(peer)

    def remove_peer(self, peer: str) -> None:
        self._notified_peers.discard(peer)

    def staging_metadata(self) -> bytes:
        return b""

    def connect_staged(self, peer: str, metadata: bytes) -> None:
        raise TransferFailed("this pod does not stage KV in host memory")

    def accept_staged(self, peer: str, metadata: bytes) -> None:
        raise TransferFailed("this pod does not stage KV in host memory")

    def _require(self, peer: str, metadata: bytes) -> None:
        if metadata != peer.encode():
            raise TransferFailed(f"the metadata belongs to {metadata!r}, not to {peer}")
        self._fabric.require_alive(peer)

    def disconnect(self, peer: str) -> None:
        self._connected.pop(peer, None)

    def write(self, peer: str, local: Sequence[int], remote: Sequence[int], notification: bytes) -> int:
        handle = next(self._handles)
        where = tuple(local), tuple(remote)
        write = _LoopbackWrite(self._name, peer, *where, notification, self._connected.get(peer))
        self._writes[handle] = write
        if peer in self._connected:
            self._fabric.post(write)
            self._fabric.advance()
        else:
            write.state, write.error = WriteState.FAILED, f"agent {peer} is not connected"
        return handle

    def notify(self, peer: str, payload: bytes) -> None:
        if peer not in self._connected.keys() | self._notified_peers:
            raise TransferFailed(f"agent {peer} is not connected")
        self._fabric.notify(self._name, peer, payload)

    def poll(self, handle: int) -> WriteState:
        self._fabric.advance()
        return self._writes[handle].state

    def error(self, handle: int) -> str:
        return self._writes[handle].error

    def release(self, handle: int) -> None:
        write = self._writes.pop(handle)
        assert write.state is not WriteState.PENDING, "a pending write was released"

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        assert self._memory is not None, "the backend is not started"
        return whole_checksums(self._memory, blocks)

    def notifications(self) -> list[Notification]:
        return self._fabric.take_notifications(self._name)

    def transport(self, peer: str, *, same_host: bool) -> Transport:
        return Transport(self._fabric.transport, "reported")

    def close(self) -> None:
        self._fabric.kill(self._name)
