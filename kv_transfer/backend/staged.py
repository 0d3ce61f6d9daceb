"""Writes through host memory, for peers that the direct backend cannot reach: GPU pods of one machine without RDMA.

    writer                                              receiver
      HELLO session                    -->                a window of slots in its staging area
                                       <--  GRANT window
      copy blocks to host memory
        shared area: into the window
        else: own slots, network write ==>  window
      LAND slots, blocks, notification -->                copy slots to blocks of the pool
                                       <--  LANDED        deliver the notification of the write to the pod

A write is cut into pieces of a quarter of the window, so the copies of both ends and the network work at the same time.
A write is DONE when the receiver has copied its last piece; only then does the receiver's pod see its notification. So
the rules of direct writes hold: DONE means that the bytes are in the pool, and a notification follows its bytes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

from common.kv_slices import BlockSpan
from kv_transfer.backend.interface import Backend, Notification, Transport, WriteState
from kv_transfer.backend.staging.agent import StagingAgent, StagingOptions
from kv_transfer.backend.staging.copiers import BlockCopier
from kv_transfer.backend.staging.messages import Grant, Hello, Land, Landed, StagingMessage
from kv_transfer.backend.staging.receiver_end import ReceiverEnd
from kv_transfer.backend.staging.writer_end import StagedWrite, WriterEnd
from kv_transfer.memory import PeerMemory, PoolMemory


class StagedBackend:
    """`direct`, and writes through host memory to the peers of connect_staged.

    Nothing is allocated before the first such peer. `make_inner` makes the backend that moves host memory and messages;
    `make_copier` the copies between the pool and host memory.
    """

    def __init__(
        self,
        direct: Backend,
        make_inner: Callable[[], Backend],
        make_copier: Callable[[PoolMemory], BlockCopier],
        options: StagingOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._direct, self._make_inner, self._make_copier = direct, make_inner, make_copier
        self._options, self._clock = options, clock
        self._name = ""
        self._memory: PoolMemory | None = None
        self._staging: _Staging | None = None
        self._numbers = itertools.count(1)
        self._handles: dict[int, int | StagedWrite] = {}  #: Number -> handle of `direct`, or a staged write.
        self._refused: dict[int, str] = {}  #: Direct writes that the options do not allow.

    # -- direct ---------------------------------------------------------------------------------------------------
    def start(self, name: str, memory: PoolMemory) -> None:
        self._name, self._memory = name, memory
        self._direct.start(name, memory)

    def metadata(self) -> bytes:
        return self._direct.metadata()

    def connect(self, peer: str, metadata: bytes, memory: PeerMemory, span: BlockSpan | None = None) -> None:
        self._direct.connect(peer, metadata, memory, span)

    def disconnect(self, peer: str) -> None:
        if self._staging is not None:
            self._staging.writer_end.disconnect(peer)
        self._direct.disconnect(peer)

    def add_peer(self, peer: str, metadata: bytes) -> None:
        self._direct.add_peer(peer, metadata)

    def remove_peer(self, peer: str) -> None:
        if self._staging is not None:
            self._staging.receiver_end.remove_writer(peer)
        self._direct.remove_peer(peer)

    def notify(self, peer: str, payload: bytes) -> None:
        self._direct.notify(peer, payload)

    # -- staging --------------------------------------------------------------------------------------------------
    def staging_metadata(self) -> bytes:
        assert self._memory is not None, "the backend is not started"
        offered = self._options.always or self._memory.kind == "VRAM"
        return self._started().agent.metadata() if offered else b""

    def connect_staged(self, peer: str, metadata: bytes) -> None:
        self._started().connect(peer, metadata)

    def accept_staged(self, peer: str, metadata: bytes) -> None:
        self._started().receiver_end.accept(peer, metadata)

    def _started(self) -> _Staging:
        if self._staging is None:
            assert self._memory is not None, "the backend is not started"
            inner, copier = self._make_inner(), self._make_copier(self._memory)
            self._staging = _Staging(StagingAgent(self._name, self._memory, inner, copier, self._options), self._clock)
        return self._staging

    # -- both -----------------------------------------------------------------------------------------------------
    def write(self, peer: str, local: Sequence[int], remote: Sequence[int], notification: bytes) -> int:
        number = next(self._numbers)
        if self._staging is not None and peer in self._staging.writer_end.receivers:
            self._handles[number] = self._staging.write(number, peer, local, remote, notification)
        elif self._options.always:
            self._refused[number] = "every write of this pod is staged, and the peer does not accept that yet"
        else:
            self._handles[number] = self._direct.write(peer, local, remote, notification)
        return number

    def poll(self, handle: int) -> WriteState:
        if handle in self._refused:
            return WriteState.FAILED
        made = self._handles[handle]
        if isinstance(made, int):
            return self._direct.poll(made)
        assert self._staging is not None
        self._staging.advance()
        return made.state

    def error(self, handle: int) -> str:
        if handle in self._refused:
            return self._refused[handle]
        made = self._handles[handle]
        return self._direct.error(made) if isinstance(made, int) else made.error

    def release(self, handle: int) -> None:
        if self._refused.pop(handle, None) is not None:
            return
        made = self._handles.pop(handle)
        if isinstance(made, int):
            self._direct.release(made)
        else:
            assert made.state is not WriteState.PENDING, "a pending write was released"

    def notifications(self) -> list[Notification]:
        arrived = self._direct.notifications()
        return arrived if self._staging is None else [*arrived, *self._staging.notifications()]

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        return self._direct.checksums(blocks)

    def transport(self, peer: str, *, same_host: bool) -> Transport:
        if self._staging is not None and peer in self._staging.writer_end.receivers:
            return self._staging.writer_end.transport(peer, same_host=same_host)
        return self._direct.transport(peer, same_host=same_host)

    def close(self) -> None:
        if self._staging is not None:
            self._staging.close()
        self._direct.close()


class _Staging:
    """Both ends of staged writes of one pod, which share an agent and a clock."""

    def __init__(self, agent: StagingAgent, clock: Callable[[], float]) -> None:
        self.agent, self.writer_end, self.receiver_end = agent, WriterEnd(agent), ReceiverEnd(agent)
        self._clock = clock
        self._now = clock()  #: Time of the last advance.

    def connect(self, peer: str, metadata: bytes) -> None:
        """Makes writes to the peer staged. Raises TransferFailed."""
        self.writer_end.connect(peer, metadata, self._clock())
        self.advance()

    def write(
        self, number: int, peer: str, local: Sequence[int], remote: Sequence[int], notification: bytes
    ) -> StagedWrite:
        write = self.writer_end.write(number, peer, local, remote, notification)
        self.advance()
        return write

    def advance(self) -> None:
        """Continues whatever can continue."""
        now = self._clock()
        elapsed, self._now = now - self._now, now
        self.writer_end.advance(now)
        self.receiver_end.advance(elapsed)

    def notifications(self) -> list[Notification]:
        """Makes progress. Returns the notifications of writes that have landed."""
        for peer, message in self.agent.messages():
            self._on_message(peer, message)
        self.advance()
        return self.receiver_end.take_delivered()

    def _on_message(self, peer: str, message: StagingMessage) -> None:
        match message:
            case Hello():
                self.receiver_end.on_hello(peer, message)
            case Grant():
                self.writer_end.on_grant(peer, message)
            case Land():
                self.receiver_end.on_land(peer, message)
            case Landed():
                self.writer_end.on_landed(peer, message)

    def close(self) -> None:
        """Ends the agent and frees the areas, unless a copy or a network write is under way."""
        busy = self.writer_end.busy or self.receiver_end.busy
        if not busy:
            self.writer_end.release_areas()
        self.agent.close(free_area=not busy)
