"""A wrapper around any transfer backend that injects faults, for tests of transfers and of services."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.errors import TransferFailed
from common.kv_slices import BlockSpan
from kv_transfer.backend.interface import Backend, Notification, Transport, WriteState
from kv_transfer.memory import PeerMemory, PoolMemory


@dataclass(frozen=True, slots=True)
class WriteFaultPlan:
    """Fault of one write."""

    #: The write is posted this much later.
    delay_s: float = 0.0
    #: The write fails with this reason after the delay, and no byte lands.
    fail: str | None = None
    #: Index of a block to damage. It is copied to the probe block and sent from there, so the source stays intact. At
    #: most one block is damaged at a time.
    corrupt: int | None = None


@dataclass(slots=True)
class _FaultyWrite:
    due: float
    peer: str
    local: list[int]
    remote: list[int]
    notification: bytes
    fail: str | None
    inner: int | None = None


class FaultyBackend:
    """Wraps `inner`; without plans it changes nothing."""

    def __init__(self, inner: Backend, clock: Callable[[], float] = time.monotonic) -> None:
        #: (peer, local blocks, remote blocks) -> fault of the write.
        self.on_write: Callable[[str, Sequence[int], Sequence[int]], WriteFaultPlan] = lambda _p, _l, _r: (
            WriteFaultPlan()
        )
        #: Delays in seconds of an arriving notification, one per copy; [] drops it.
        self.on_notification: Callable[[Notification], Sequence[float]] = lambda _n: (0.0,)
        self.corrupted = 0
        self._inner = inner
        self._clock = clock
        self._memory: PoolMemory | None = None
        self._numbers = itertools.count(1)
        self._writes: dict[int, _FaultyWrite] = {}
        self._late: list[tuple[float, int, Notification]] = []

    def start(self, name: str, memory: PoolMemory) -> None:
        self._memory = memory
        self._inner.start(name, memory)

    def metadata(self) -> bytes:
        return self._inner.metadata()

    def connect(self, peer: str, metadata: bytes, memory: PeerMemory, span: BlockSpan | None = None) -> None:
        self._inner.connect(peer, metadata, memory, span)

    def disconnect(self, peer: str) -> None:
        self._inner.disconnect(peer)

    def add_peer(self, peer: str, metadata: bytes) -> None:
        self._inner.add_peer(peer, metadata)

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        return self._inner.checksums(blocks)

    def remove_peer(self, peer: str) -> None:
        self._inner.remove_peer(peer)

    def staging_metadata(self) -> bytes:
        return self._inner.staging_metadata()

    def connect_staged(self, peer: str, metadata: bytes) -> None:
        self._inner.connect_staged(peer, metadata)

    def accept_staged(self, peer: str, metadata: bytes) -> None:
        self._inner.accept_staged(peer, metadata)

    def write(self, peer: str, local: Sequence[int], remote: Sequence[int], notification: bytes) -> int:
        handle = next(self._numbers)
        # A write without a notification is a probe; readiness is not what these faults are about.
        fault = self.on_write(peer, local, remote) if notification else WriteFaultPlan()
        write = _FaultyWrite(self._clock() + fault.delay_s, peer, list(local), list(remote), notification, fault.fail)
        if fault.corrupt is not None:
            write.local[fault.corrupt] = self._damaged(local[fault.corrupt])
        self._writes[handle] = write
        self._advance(write)
        return handle

    def notify(self, peer: str, payload: bytes) -> None:
        self._inner.notify(peer, payload)

    def poll(self, handle: int) -> WriteState:
        write = self._writes[handle]
        self._advance(write)
        if write.inner is not None:
            return self._inner.poll(write.inner)
        return WriteState.FAILED if write.fail is not None and self._clock() >= write.due else WriteState.PENDING

    def error(self, handle: int) -> str:
        write = self._writes[handle]
        return write.fail or ("" if write.inner is None else self._inner.error(write.inner))

    def release(self, handle: int) -> None:
        write = self._writes.pop(handle)
        if write.inner is not None:
            self._inner.release(write.inner)

    def notifications(self) -> list[Notification]:
        now = self._clock()
        arrived = []
        for notification in self._inner.notifications():
            for delay_s in self.on_notification(notification):
                if delay_s <= 0:
                    arrived.append(notification)
                else:
                    heapq.heappush(self._late, (now + delay_s, next(self._numbers), notification))
        while self._late and self._late[0][0] <= now:
            arrived.append(heapq.heappop(self._late)[2])
        return arrived

    def transport(self, peer: str, *, same_host: bool) -> Transport:
        return self._inner.transport(peer, same_host=same_host)

    def close(self) -> None:
        self._inner.close()

    def _advance(self, write: _FaultyWrite) -> None:
        if write.inner is None and write.fail is None and self._clock() >= write.due:
            write.inner = self._inner.write(write.peer, write.local, write.remote, write.notification)

    def _damaged(self, block: int) -> int:
        if self._memory is None:
            raise TransferFailed("the backend is not started")
        data = bytes(byte ^ 0xFF for byte in self._memory.read_block(block))
        self._memory.write_block(self._memory.probe_block, data)
        self.corrupted += 1
        return self._memory.probe_block
