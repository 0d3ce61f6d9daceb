"""The writer's end of staged writes.

    write -> pieces:  slots free -> copy from the pool -> [network write] -> LAND -> LANDED -> slots free

A piece takes slots of its receiver's window, and without a shared area slots of this pod as well. A write is DONE when
the receiver has copied its last piece. A write with an error is FAILED only when nothing reads its source any more, and
no piece of it can be copied later. Silence proves nothing about a piece that was sent: a new session does, because the
receiver drops the pieces of the former one. An error ends the whole session, as its other writes lack the lost slots.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.errors import TransferFailed, describe
from kv_transfer.backend.interface import STAGED, Transport, WriteState
from kv_transfer.backend.staging.agent import WINDOW_PIECES, StagingAgent, host_agent
from kv_transfer.backend.staging.area import StagingArea
from kv_transfer.backend.staging.copiers import Ended
from kv_transfer.backend.staging.messages import Grant, Hello, Land, Landed, unpack_description
from kv_transfer.memory import PeerMemory

_log = logging.getLogger(__name__)

REPEAT_S = (0.1, 2.0)  #: First and longest wait before a message without an answer is sent again.
SILENCE_S = 15.0  #: A piece without an answer for this long has failed.
#: A receiver that does not begin the session that ends a failed one is gone after this time: no transport keeps a
#: message that long. TCP gives up after nixl.TCP_SILENCE_S.
END_S = 60.0


@dataclass(eq=False, slots=True)
class _Piece:
    """A part of a write."""

    number: int
    local: Sequence[int]
    remote: Sequence[int]
    window: list[int] = field(default_factory=list)  #: Slots of the receiver.
    own: list[int] = field(default_factory=list)  #: Slots of this pod; empty with a shared area.
    copied: Ended | None = None  #: The copy from the pool, while it is under way.
    moving: int | None = None  #: Handle of the network write, while it is under way.
    sent: bool = False  #: The receiver has the bytes and was told so.
    landed: bool = False  #: The receiver has copied the bytes into its pool.
    repeat_at: float = 0.0  #: LAND is sent again at this time.
    repeat_s: float = REPEAT_S[0]
    silent_at: float = 0.0  #: Without an answer the piece has failed at this time.

    @property
    def reads_source(self) -> bool:
        """A copy from the pool, or the network write of its copy, may be under way."""
        return self.copied is not None or self.moving is not None

    @property
    def may_land(self) -> bool:
        """The receiver may still copy the bytes into its pool."""
        return self.sent and not self.landed


@dataclass(eq=False, slots=True)
class StagedWrite:
    """A write through host memory."""

    number: int
    peer: str
    notification: bytes
    pieces: list[_Piece]
    next_piece: int = 0  #: Pieces that have begun.
    state: WriteState = WriteState.PENDING
    error: str = ""


@dataclass(eq=False, slots=True)
class _Receiver:
    """A peer that gets staged writes."""

    session: int
    area: StagingArea | None  #: The peer's area, if it is shared.
    piece_blocks: int  #: Max blocks of a piece.
    free: list[int] = field(default_factory=list)  #: Free slots of the window.
    granted: bool = False  #: The window was granted.
    refused: str = ""  #: Why the peer gets no staged writes; "" if it does.
    ending: bool = False  #: `session` is a new one, which ends the session of the refused writes.
    ended: bool = False  #: No piece of the refused writes can land any more.
    hello_at: float = 0.0  #: HELLO is sent again at this time.
    silent_at: float = 0.0  #: Without a grant the peer is refused, or its session has ended, at this time.
    writes: deque[StagedWrite] = field(default_factory=deque)  #: Writes that are not terminal.


class WriterEnd:
    """All staged writes of this pod. The transfer thread owns it."""

    def __init__(self, agent: StagingAgent) -> None:
        self.receivers: dict[str, _Receiver] = {}  #: By peer.
        self._agent = agent
        self._own = agent.own_slots  #: Slots of this pod that are free.
        self._sessions = itertools.count(time.time_ns())  #: Numbers of sessions. They rise over restarts too.

    def connect(self, peer: str, metadata: bytes, now: float) -> None:
        """Makes writes to the peer staged. Raises TransferFailed."""
        theirs, inner_metadata = unpack_description(metadata)
        agent, size = self._agent, self._agent.pool.block_bytes
        if theirs.slot_bytes != size:
            raise TransferFailed(f"{peer} stages blocks of {theirs.slot_bytes} bytes, this pod {size}")
        agent.inner.connect(host_agent(peer), inner_metadata, PeerMemory(theirs.base, size, theirs.slots, 0, "DRAM"))
        token = bytes.fromhex(theirs.token)
        area = StagingArea.attach(agent.directory, theirs.file, token, theirs.slots, theirs.slot_bytes)
        if area is not None:
            try:
                agent.copier.attach(area)
            except TransferFailed as e:
                _log.warning("the shared memory of %s is not used: %s", peer, e.message)
                area.close()
                area = None
        piece_blocks = max(1, min(agent.window_slots, theirs.window) // WINDOW_PIECES)
        self.receivers[peer] = _Receiver(next(self._sessions), area, piece_blocks, silent_at=now + SILENCE_S)

    def disconnect(self, peer: str) -> None:
        """Ends staged writes to a peer. None may be pending."""
        receiver = self.receivers.pop(peer, None)
        if receiver is None:
            return
        assert not receiver.writes, "a peer with pending writes was disconnected"
        self._agent.inner.disconnect(host_agent(peer))
        self._release_area(receiver)

    def _release_area(self, receiver: _Receiver) -> None:
        if receiver.area is not None:
            self._agent.copier.detach(receiver.area)
            receiver.area.close()

    def transport(self, peer: str, *, same_host: bool) -> Transport:
        if self.receivers[peer].area is not None:
            return Transport(f"{STAGED}shm", "reported")
        moved = self._agent.inner.transport(host_agent(peer), same_host=same_host)
        return Transport(f"{STAGED}{moved.name}", moved.source)

    def write(
        self, number: int, peer: str, local: Sequence[int], remote: Sequence[int], notification: bytes
    ) -> StagedWrite:
        """Queues a write. `advance` begins it."""
        receiver = self.receivers[peer]
        size = receiver.piece_blocks
        pieces = [
            _Piece(i, local[start : start + size], remote[start : start + size])
            for i, start in enumerate(range(0, len(local), size))
        ]
        write = StagedWrite(number, peer, notification, pieces)
        receiver.writes.append(write)
        return write

    @property
    def busy(self) -> bool:
        """A copy or a network write is under way."""
        writes = [write for receiver in self.receivers.values() for write in receiver.writes]
        return any(piece.reads_source for write in writes for piece in write.pieces)

    def release_areas(self) -> None:
        """Ends the use of the peers' areas. No copy may be under way."""
        for receiver in self.receivers.values():
            self._release_area(receiver)

    # -- progress -----------------------------------------------------------------------------------------------------
    def advance(self, now: float) -> None:
        """Continues whatever can continue."""
        for peer, receiver in self.receivers.items():
            self._ask_for_window(peer, receiver, now)
            self._end_session(peer, receiver, now)
            for write in list(receiver.writes):
                self._advance_write(receiver, write, now)
                if write.state is not WriteState.PENDING:
                    receiver.writes.remove(write)

    def _ask_for_window(self, peer: str, receiver: _Receiver, now: float) -> None:
        if receiver.granted or receiver.refused:
            return
        if now >= receiver.silent_at:
            receiver.refused = f"{peer} granted no staging window within {SILENCE_S:g} s"
        elif now >= receiver.hello_at:
            receiver.hello_at = now + REPEAT_S[0]
            self._agent.notify(peer, Hello(receiver.session))

    def _end_session(self, peer: str, receiver: _Receiver, now: float) -> None:
        """Begins a new session if a piece of a refused write may land, and asks until the receiver has begun it too."""
        if not receiver.refused or receiver.ended:
            return
        if not receiver.ending:
            if not any(piece.may_land for write in receiver.writes for piece in write.pieces):
                return
            receiver.ending, receiver.session = True, next(self._sessions)
            receiver.hello_at, receiver.silent_at = now, now + END_S
        if now >= receiver.hello_at:
            receiver.hello_at = now + REPEAT_S[0]
            sent = self._agent.notify(peer, Hello(receiver.session))  # without a way to the peer no piece arrives
            receiver.ended = not sent or now >= receiver.silent_at

    def _advance_write(self, receiver: _Receiver, write: StagedWrite, now: float) -> None:
        if receiver.refused and not write.error:
            write.error = receiver.refused
        try:
            if not write.error:
                self._begin_pieces(receiver, write)
            for piece in write.pieces[: write.next_piece]:
                if piece.reads_source or not piece.landed:
                    self._advance_piece(receiver, write, piece, now)
        except Exception as e:  # of a copy: CUDA's errors have no common base class
            _log.exception("a staged write to %s failed", write.peer)
            write.error = write.error or describe(e)
        receiver.refused = receiver.refused or write.error
        if any(piece.reads_source for piece in write.pieces):
            return
        if write.error:
            if not receiver.ended and any(piece.may_land for piece in write.pieces):
                return
            write.state = WriteState.FAILED
            for piece in write.pieces:
                self._free_own(piece)
        elif all(piece.landed for piece in write.pieces):
            write.state = WriteState.DONE

    def _begin_pieces(self, receiver: _Receiver, write: StagedWrite) -> None:
        """Starts the copies of the pieces for which there are slots."""
        while write.next_piece < len(write.pieces):
            piece = write.pieces[write.next_piece]
            count = len(piece.local)
            if len(receiver.free) < count or (receiver.area is None and len(self._own) < count):
                return
            write.next_piece += 1
            piece.window = [receiver.free.pop() for _ in range(count)][::-1]
            if receiver.area is not None:
                piece.copied = self._agent.copier.save(piece.local, receiver.area, piece.window)
            else:
                piece.own = [self._own.pop() for _ in range(count)][::-1]
                piece.copied = self._agent.copier.save(piece.local, self._agent.area, piece.own)

    def _advance_piece(self, receiver: _Receiver, write: StagedWrite, piece: _Piece, now: float) -> None:
        if piece.copied is not None:
            try:
                if not piece.copied():
                    return
            except Exception:
                piece.copied = None  # the copy has ended: its write must not stay pending
                raise
            piece.copied = None
            if write.error:
                self._free_own(piece)
            elif receiver.area is None:
                payload = _land(receiver, write, piece).pack()
                piece.moving = self._agent.inner.write(host_agent(write.peer), piece.own, piece.window, payload)
            else:
                self._send(receiver, write, piece, now)
        if piece.moving is not None and not self._end_network_write(write, piece, now):
            return
        if piece.may_land and not write.error and now >= piece.repeat_at:
            if now >= piece.silent_at:
                write.error = f"no answer for {SILENCE_S:g} s after the bytes were staged"
            else:
                self._send(receiver, write, piece, now)

    def _end_network_write(self, write: StagedWrite, piece: _Piece, now: float) -> bool:
        """Returns whether the network write of a piece has ended."""
        assert piece.moving is not None, "no network write is under way"
        inner = self._agent.inner
        state = inner.poll(piece.moving)
        if state is WriteState.PENDING:
            return False
        error, handle, piece.moving = "", piece.moving, None
        if state is WriteState.FAILED:
            error = inner.error(handle)
        inner.release(handle)
        self._free_own(piece)
        write.error = write.error or error
        if not error:
            _mark_sent(piece, now)
        return True

    def _free_own(self, piece: _Piece) -> None:
        self._own += piece.own
        piece.own = []

    # -- messages -----------------------------------------------------------------------------------------------------
    def _send(self, receiver: _Receiver, write: StagedWrite, piece: _Piece, now: float) -> None:
        """Sends LAND, again if it was sent before."""
        if not self._agent.notify(write.peer, _land(receiver, write, piece)):
            write.error = "the peer cannot be notified"
        elif not piece.sent:
            _mark_sent(piece, now)
        else:
            piece.repeat_s = min(2 * piece.repeat_s, REPEAT_S[1])
            piece.repeat_at = now + piece.repeat_s

    def on_grant(self, peer: str, grant: Grant) -> None:
        receiver = self.receivers.get(peer)
        if receiver is None or receiver.session != grant.session:
            return
        receiver.ended = receiver.ending
        if receiver.granted or receiver.refused:
            return
        if not grant.count:
            receiver.refused = f"{peer} has no staging window left; raise its staging_memory"
            return
        receiver.granted, receiver.free = True, list(range(grant.first, grant.first + grant.count))

    def on_landed(self, peer: str, landed: Landed) -> None:
        receiver = self.receivers.get(peer)
        if receiver is None or receiver.session != landed.session:
            return
        write = next((write for write in receiver.writes if write.number == landed.write), None)
        if write is None or landed.piece >= write.next_piece or write.pieces[landed.piece].landed:
            return
        piece = write.pieces[landed.piece]
        if not piece.window or piece.copied is not None:
            return
        if landed.ok:
            piece.landed = True
            receiver.free += piece.window
        else:
            write.error = write.error or "the receiver could not copy the blocks into its pool"


def _land(receiver: _Receiver, write: StagedWrite, piece: _Piece) -> Land:
    slots, blocks = tuple(piece.window), tuple(piece.remote)
    return Land(receiver.session, write.number, piece.number, len(write.pieces), slots, blocks, write.notification)


def _mark_sent(piece: _Piece, now: float) -> None:
    piece.sent, piece.repeat_at, piece.silent_at = True, now + piece.repeat_s, now + SILENCE_S
