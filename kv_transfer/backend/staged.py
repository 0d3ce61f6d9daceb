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

A lost message is sent again: LAND is answered again, never done twice. A window belongs to one session of one writer.
It goes to another writer only after the writer's end and GRACE_S in which this thread made progress.
"""

from __future__ import annotations

import itertools
import json
import logging
import struct
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.errors import TransferFailed, describe
from kv_transfer.backend.interface import STAGED, Backend, Notification, Transport, WriteState
from kv_transfer.backend.staging_area import BlockCopier, Ended, StagingArea
from kv_transfer.memory import PeerMemory, PoolMemory

_log = logging.getLogger(__name__)

HOST_AGENT = "-host"  # Suffix of the name of an agent for host memory
WINDOW_BYTES = 32 << 20
WINDOW_PIECES = 4  # A window holds so many pieces: two are copied, one moves, one lands
MAX_WINDOW_SLOTS = 1024  # LAND names each slot and block of a piece
GRACE_S = 2.0  # Between the end of a writer and the reuse of its window
REPEAT_S = (0.1, 2.0)  # First and longest wait before a message without an answer is sent again
SILENCE_S = 15.0  # A piece without an answer for this long has failed
_MAX_TICK_S = 0.25  # Max grace that one call uses up: a standstill of the thread proves nothing
_REMEMBERED = 1024  # Landed writes per writer, to answer a repeated LAND
_HELLO, _GRANT, _LAND, _LANDED = b"BTH1", b"BTH2", b"BTH3", b"BTH4"
_SESSION = struct.Struct(">4sQ")
_WINDOW = struct.Struct(">4sQII")
_PIECE = struct.Struct(">4sQQHHI")  # Magic, session, write, piece, number of pieces, number of blocks
_RESULT = struct.Struct(">4sQQHB")


@dataclass(eq=False, slots=True)
class _Piece:
    """A part of a write."""

    number: int
    local: Sequence[int]
    remote: Sequence[int]
    window: list[int] = field(default_factory=list)  # Slots of the receiver
    own: list[int] = field(default_factory=list)  # Slots of this pod; empty with a shared area
    copied: Ended | None = None
    moving: int | None = None  # Handle of the network write
    sent: bool = False  # The receiver has the bytes and was told so
    landed: bool = False
    repeat_at: float = 0.0
    repeat_s: float = REPEAT_S[0]
    silent_at: float = 0.0

    @property
    def reads_source(self) -> bool:
        """A copy from the pool, or the network write of its copy, may be under way."""
        return self.copied is not None or self.moving is not None


@dataclass(eq=False, slots=True)
class _StagedWrite:
    number: int
    peer: str
    notification: bytes
    pieces: list[_Piece]
    next_piece: int = 0
    state: WriteState = WriteState.PENDING
    error: str = ""


@dataclass(eq=False, slots=True)
class _Receiver:
    """A peer that gets staged writes."""

    session: int
    area: StagingArea | None  # The peer's area, if it is shared
    piece_blocks: int  # Max blocks of a piece
    free: list[int] = field(default_factory=list)  # Free slots of the window
    granted: bool = False
    refused: str = ""
    hello_at: float = 0.0
    silent_at: float = 0.0
    writes: deque[_StagedWrite] = field(default_factory=deque)  # Those with pieces that have not landed


@dataclass(eq=False, slots=True)
class _Landing:
    """A write on its way into this pod's pool."""

    pieces: int
    notification: bytes
    landed: set[int] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class _Writer:
    """A peer that writes into its window of this pod's area."""

    window: int | None = None  # Number of the window
    session: int = 0
    hello: int | None = None  # A session that waits for the copies of the former one
    landing: dict[int, _Landing] = field(default_factory=dict)  # By write
    copies: dict[tuple[int, int], Ended] = field(default_factory=dict)  # By write and piece
    over: OrderedDict[int, None] = field(default_factory=OrderedDict)  # Landed writes
    grace_left: float | None = None  # The writer has ended


@dataclass(frozen=True)
class StagingOptions:
    """How a pod stages KV."""

    memory_bytes: int  # Host memory for the area
    directory: str | None  # Where areas are shared with other pods of the machine; None: nowhere
    always: bool = False  # Nothing is written directly. For tests, and to measure


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
        self._handles: dict[int, int | _StagedWrite] = {}  # Number -> handle of `direct`, or a staged write
        self._refused: dict[int, str] = {}  # Direct writes that the options do not allow

    # -- direct ---------------------------------------------------------------------------------------------------
    def start(self, name: str, memory: PoolMemory) -> None:
        self._name, self._memory = name, memory
        self._direct.start(name, memory)

    def metadata(self) -> bytes:
        return self._direct.metadata()

    def connect(self, peer: str, metadata: bytes, memory: PeerMemory) -> None:
        self._direct.connect(peer, metadata, memory)

    def disconnect(self, peer: str) -> None:
        if self._staging is not None:
            self._staging.disconnect(peer)
        self._direct.disconnect(peer)

    def add_peer(self, peer: str, metadata: bytes) -> None:
        self._direct.add_peer(peer, metadata)

    def remove_peer(self, peer: str) -> None:
        if self._staging is not None:
            self._staging.remove_writer(peer)
        self._direct.remove_peer(peer)

    def notify(self, peer: str, payload: bytes) -> None:
        self._direct.notify(peer, payload)

    # -- staging --------------------------------------------------------------------------------------------------
    def staging_metadata(self) -> bytes:
        assert self._memory is not None, "the backend is not started"
        offered = self._options.always or self._memory.kind == "VRAM"
        return self._started().metadata() if offered else b""

    def connect_staged(self, peer: str, metadata: bytes) -> None:
        self._started().connect(peer, metadata)

    def accept_staged(self, peer: str, metadata: bytes) -> None:
        self._started().accept(peer, metadata)

    def _started(self) -> _Staging:
        if self._staging is None:
            assert self._memory is not None, "the backend is not started"
            inner, copier = self._make_inner(), self._make_copier(self._memory)
            self._staging = _Staging(self._name, self._memory, inner, copier, self._options, self._clock)
        return self._staging

    # -- both -----------------------------------------------------------------------------------------------------
    def write(self, peer: str, local: Sequence[int], remote: Sequence[int], notification: bytes) -> int:
        number = next(self._numbers)
        if self._staging is not None and peer in self._staging.receivers:
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

    def transport(self, peer: str, *, same_host: bool) -> Transport:
        if self._staging is not None and peer in self._staging.receivers:
            return self._staging.transport(peer, same_host=same_host)
        return self._direct.transport(peer, same_host=same_host)

    def close(self) -> None:
        if self._staging is not None:
            self._staging.close()
        self._direct.close()


class _Staging:
    """Both sides of staged writes of one pod. The transfer thread owns it."""

    def __init__(
        self,
        name: str,
        memory: PoolMemory,
        inner: Backend,
        copier: BlockCopier,
        options: StagingOptions,
        clock: Callable[[], float],
    ) -> None:
        """Allocates the area and starts the agent for host memory. Raises TransferFailed."""
        self._memory, self._inner, self._copier, self._clock = memory, inner, copier, clock
        self._directory = options.directory
        size = memory.block_bytes
        slots = options.memory_bytes // size
        most = min(WINDOW_BYTES // size, slots // 4, MAX_WINDOW_SLOTS)
        self._window = max(WINDOW_PIECES, most)  # Slots of a window
        num_windows = slots // self._window - 1  # the last part is for this pod's own writes
        if num_windows < 1:
            need = 1 + (2 * self._window * size >> 20)
            raise TransferFailed(f"staging_memory has room for {slots} blocks of {size} bytes: it needs {need} MiB")
        self._area = area = StagingArea.create(options.directory, slots, size)
        try:
            self._inner.start(f"{name}{HOST_AGENT}", area.memory())
            copier.attach(area)
        except BaseException:
            area.close()
            raise
        shared = f", shared in {self._directory}" if area.file else ""
        _log.info("%d MiB of host memory for KV to and from pods without a direct way%s", slots * size >> 20, shared)
        self._free_windows = list(range(num_windows))
        self._own = list(range(num_windows * self._window, slots))  # Free slots for this pod's own writes
        self._sessions = itertools.count(time.time_ns())  # Rises over restarts too
        self.receivers: dict[str, _Receiver] = {}
        self._writers: dict[str, _Writer] = {}
        self._delivered: list[Notification] = []
        self._now = clock()

    # -- peers ----------------------------------------------------------------------------------------------------
    def metadata(self) -> bytes:
        """Returns the description of this pod's area and of the agent that writes to it over the network."""
        area = self._area
        head = {"base": area.base, "slots": area.slots, "slot_bytes": area.slot_bytes, "window": self._window}
        shared = {"file": area.file, "token": area.token.hex()}
        packed = json.dumps({**head, **shared}).encode()
        return len(packed).to_bytes(4, "little") + packed + self._inner.metadata()

    def connect(self, peer: str, metadata: bytes) -> None:
        """Makes writes to the peer staged. Raises TransferFailed."""
        head, agent = _unpack(metadata)
        base, slots, slot_bytes = (int(head[name]) for name in ("base", "slots", "slot_bytes"))
        if slot_bytes != self._memory.block_bytes:
            raise TransferFailed(f"{peer} stages blocks of {slot_bytes} bytes, this pod {self._memory.block_bytes}")
        self._inner.connect(peer + HOST_AGENT, agent, PeerMemory(base, slot_bytes, slots, 0, "DRAM"))
        where = (str(head["file"]), bytes.fromhex(str(head["token"])), slots, slot_bytes)
        area = StagingArea.attach(self._directory, *where)
        if area is not None:
            try:
                self._copier.attach(area)
            except TransferFailed as e:
                _log.warning("the shared memory of %s is not used: %s", peer, e.message)
                area.close()
                area = None
        piece_blocks = max(1, min(self._window, int(head["window"])) // WINDOW_PIECES)
        silent_at = self._clock() + SILENCE_S
        self.receivers[peer] = _Receiver(next(self._sessions), area, piece_blocks, silent_at=silent_at)
        self.advance()

    def disconnect(self, peer: str) -> None:
        """Ends staged writes to a peer. None may be pending."""
        receiver = self.receivers.pop(peer, None)
        if receiver is None:
            return
        assert not receiver.writes, "a peer with pending writes was disconnected"
        self._inner.disconnect(peer + HOST_AGENT)
        if receiver.area is not None:
            self._copier.detach(receiver.area)
            receiver.area.close()

    def accept(self, peer: str, metadata: bytes) -> None:
        """Accepts staged writes of a peer. Raises TransferFailed."""
        _, agent = _unpack(metadata)
        if peer in self._writers:
            self._inner.remove_peer(peer + HOST_AGENT)  # the connection for answers may be broken too
        self._inner.add_peer(peer + HOST_AGENT, agent)
        self._writers.setdefault(peer, _Writer()).grace_left = None

    def remove_writer(self, peer: str) -> None:
        """Takes the window of a writer that ended or has a successor, after the grace."""
        writer = self._writers.get(peer)
        if writer is not None and writer.grace_left is None:
            writer.grace_left = GRACE_S

    def transport(self, peer: str, *, same_host: bool) -> Transport:
        if self.receivers[peer].area is not None:
            return Transport(f"{STAGED}shm", "reported")
        moved = self._inner.transport(peer + HOST_AGENT, same_host=same_host)
        return Transport(f"{STAGED}{moved.name}", moved.source)

    # -- writer's side --------------------------------------------------------------------------------------------
    def write(
        self, number: int, peer: str, local: Sequence[int], remote: Sequence[int], notification: bytes
    ) -> _StagedWrite:
        size = self.receivers[peer].piece_blocks
        pieces = [
            _Piece(i, local[start : start + size], remote[start : start + size])
            for i, start in enumerate(range(0, len(local), size))
        ]
        write = _StagedWrite(number, peer, notification, pieces)
        self.receivers[peer].writes.append(write)
        self.advance()
        return write

    def advance(self) -> None:
        """Continues whatever can continue."""
        now = self._clock()
        elapsed, self._now = now - self._now, now
        for peer, receiver in self.receivers.items():
            self._advance_receiver(peer, receiver, now)
        for peer in list(self._writers):
            self._advance_writer(peer, self._writers[peer], min(elapsed, _MAX_TICK_S))

    def _advance_receiver(self, peer: str, receiver: _Receiver, now: float) -> None:
        if not receiver.granted and not receiver.refused and now >= receiver.silent_at:
            receiver.refused = f"{peer} granted no staging window within {SILENCE_S:g} s"
        if not receiver.granted and not receiver.refused and now >= receiver.hello_at:
            receiver.hello_at = now + REPEAT_S[0]
            self._notify(peer, _SESSION.pack(_HELLO, receiver.session))
        for write in list(receiver.writes):
            if receiver.refused and not write.error:
                write.error = receiver.refused
            try:
                if not write.error:
                    self._begin_pieces(receiver, write)
                for piece in write.pieces[: write.next_piece]:
                    if piece.reads_source or not piece.landed:
                        self._advance_piece(receiver, write, piece, now)
            except Exception as e:  # of a copy: CUDA's errors have no common base class
                _log.exception("a staged write to %s failed", peer)
                write.error = write.error or describe(e)
            if not any(piece.reads_source for piece in write.pieces):
                if write.error:
                    write.state = WriteState.FAILED
                elif all(piece.landed for piece in write.pieces):
                    write.state = WriteState.DONE
            if write.state is not WriteState.PENDING:
                receiver.writes.remove(write)

    def _begin_pieces(self, receiver: _Receiver, write: _StagedWrite) -> None:
        """Starts the copies of the pieces for which there are slots."""
        while write.next_piece < len(write.pieces):
            piece = write.pieces[write.next_piece]
            count = len(piece.local)
            if len(receiver.free) < count or (receiver.area is None and len(self._own) < count):
                return
            write.next_piece += 1
            piece.window = [receiver.free.pop() for _ in range(count)][::-1]
            if receiver.area is not None:
                piece.copied = self._copier.save(piece.local, receiver.area, piece.window)
            else:
                piece.own = [self._own.pop() for _ in range(count)][::-1]
                piece.copied = self._copier.save(piece.local, self._area, piece.own)

    def _advance_piece(self, receiver: _Receiver, write: _StagedWrite, piece: _Piece, now: float) -> None:
        host = write.peer + HOST_AGENT
        if piece.copied is not None:
            if not piece.copied():
                return
            piece.copied = None
            if write.error:
                self._free_own(piece)
            elif receiver.area is None:
                payload = self._land(receiver, write, piece)
                piece.moving = self._inner.write(host, piece.own, piece.window, payload)
            else:
                self._send(receiver, write, piece, now)
        if piece.moving is not None:
            state = self._inner.poll(piece.moving)
            if state is WriteState.PENDING:
                return
            error, handle, piece.moving = "", piece.moving, None
            if state is WriteState.FAILED:
                error = self._inner.error(handle)
            self._inner.release(handle)
            self._free_own(piece)
            write.error = write.error or error
            if not write.error:
                self._mark_sent(piece, now)
        if piece.sent and not piece.landed and not write.error and now >= piece.repeat_at:
            if now >= piece.silent_at:
                write.error = f"no answer for {SILENCE_S:g} s after the bytes were staged"
            else:
                self._send(receiver, write, piece, now)

    def _send(self, receiver: _Receiver, write: _StagedWrite, piece: _Piece, now: float) -> None:
        """Sends LAND, again if it was sent before."""
        if not self._notify(write.peer, self._land(receiver, write, piece)):
            write.error = "the peer cannot be notified"
        elif not piece.sent:
            self._mark_sent(piece, now)
        else:
            piece.repeat_s = min(2 * piece.repeat_s, REPEAT_S[1])
            piece.repeat_at = now + piece.repeat_s

    def _mark_sent(self, piece: _Piece, now: float) -> None:
        piece.sent, piece.repeat_at, piece.silent_at = True, now + piece.repeat_s, now + SILENCE_S

    def _free_own(self, piece: _Piece) -> None:
        self._own += piece.own
        piece.own = []

    def _land(self, receiver: _Receiver, write: _StagedWrite, piece: _Piece) -> bytes:
        count = len(piece.local)
        head = _PIECE.pack(_LAND, receiver.session, write.number, piece.number, len(write.pieces), count)
        return head + struct.pack(f">{2 * count}I", *piece.window, *piece.remote) + write.notification

    def _on_grant(self, peer: str, session: int, first: int, count: int) -> None:
        receiver = self.receivers.get(peer)
        if receiver is None or receiver.session != session or receiver.granted:
            return
        if not count:
            receiver.refused = f"{peer} has no staging window left; raise its staging_memory"
            return
        receiver.granted, receiver.free = True, list(range(first, first + count))

    def _on_landed(self, peer: str, session: int, number: int, index: int, ok: bool) -> None:
        receiver = self.receivers.get(peer)
        if receiver is None or receiver.session != session:
            return
        write = next((write for write in receiver.writes if write.number == number), None)
        if write is None or index >= write.next_piece or write.pieces[index].landed:
            return
        piece = write.pieces[index]
        if not piece.window or piece.copied is not None:
            return
        if ok:
            piece.landed = True
            receiver.free += piece.window
        else:
            write.error = write.error or "the receiver could not copy the blocks into its pool"

    # -- receiver's side ------------------------------------------------------------------------------------------
    def notifications(self) -> list[Notification]:
        """Makes progress. Returns the notifications of writes that have landed."""
        for notification in self._inner.notifications():
            peer = notification.peer.removesuffix(HOST_AGENT)
            try:
                self._on_message(peer, notification.payload)
            except (struct.error, IndexError, ValueError) as e:
                _log.warning("a message of %s about staged KV is malformed: %s", peer, e)
        self.advance()
        delivered, self._delivered = self._delivered, []
        return delivered

    def _on_message(self, peer: str, payload: bytes) -> None:
        match payload[:4]:
            case b"BTH1":
                if (writer := self._writers.get(peer)) is not None:
                    writer.hello = _SESSION.unpack(payload)[1]
            case b"BTH2":
                self._on_grant(peer, *_WINDOW.unpack(payload)[1:])
            case b"BTH3":
                self._on_land(peer, payload)
            case b"BTH4":
                _, session, number, index, ok = _RESULT.unpack(payload)
                self._on_landed(peer, session, number, index, bool(ok))
            case _:
                raise ValueError(f"unknown message {payload[:4]!r}")

    def _on_land(self, peer: str, payload: bytes) -> None:
        """Starts to copy a piece into the pool. Answers again if it was copied before."""
        _, session, number, index, pieces, count = _PIECE.unpack_from(payload)
        places = struct.unpack_from(f">{2 * count}I", payload, _PIECE.size)
        slots, blocks = places[:count], places[count:]
        writer = self._writers.get(peer)
        if writer is None or writer.window is None or session != writer.session or writer.hello is not None:
            return  # of a former session: its writer gave it up
        first = writer.window * self._window
        inside = all(first <= slot < first + self._window for slot in slots)
        if not inside or max(blocks, default=0) >= self._memory.total_blocks or index >= pieces:
            raise ValueError("a slot or a block is out of range")
        if number in writer.over:
            self._answer(peer, writer, number, index, ok=True)
            return
        landing = writer.landing.setdefault(number, _Landing(pieces, payload[_PIECE.size + 8 * count :]))
        if index in landing.landed:
            self._answer(peer, writer, number, index, ok=True)
        elif (number, index) not in writer.copies:
            writer.copies[number, index] = self._copier.load(self._area, slots, blocks)

    def _advance_writer(self, peer: str, writer: _Writer, elapsed: float) -> None:
        for (number, index), ended in list(writer.copies.items()):
            try:
                if not ended():
                    continue
            except Exception:
                _log.exception("staged KV of %s could not be copied into the pool", peer)
                del writer.copies[number, index]
                self._answer(peer, writer, number, index, ok=False)
                continue
            del writer.copies[number, index]
            self._on_copied(peer, writer, number, index)
        if writer.hello is not None and not writer.copies:
            self._begin_session(peer, writer, writer.hello)
        if writer.grace_left is not None and not writer.copies:
            writer.grace_left -= elapsed
            if writer.grace_left <= 0:
                del self._writers[peer]
                self._inner.remove_peer(peer + HOST_AGENT)
                if writer.window is not None:
                    self._free_windows.append(writer.window)

    def _on_copied(self, peer: str, writer: _Writer, number: int, index: int) -> None:
        landing = writer.landing[number]
        landing.landed.add(index)
        if len(landing.landed) == landing.pieces:
            del writer.landing[number]
            writer.over[number] = None
            if len(writer.over) > _REMEMBERED:
                writer.over.popitem(last=False)
            if landing.notification:
                self._delivered.append(Notification(peer, landing.notification))
        self._answer(peer, writer, number, index, ok=True)

    def _begin_session(self, peer: str, writer: _Writer, session: int) -> None:
        """Grants the window. A new session of a writer forgets the writes of the former one, which it gave up."""
        writer.hello = None
        if session < writer.session:
            return
        if session > writer.session:
            writer.landing.clear()
            writer.over.clear()
        if writer.window is None and self._free_windows:
            writer.window = self._free_windows.pop(0)
        elif writer.window is None and any(other.grace_left is not None for other in self._writers.values()):
            writer.hello = session  # answered when the window of a writer that ended is free
            return
        writer.session = session
        if writer.window is None:
            _log.warning("%s gets no staging window: all are in use", peer)
            self._notify(peer, _WINDOW.pack(_GRANT, session, 0, 0))
        else:
            self._notify(peer, _WINDOW.pack(_GRANT, session, writer.window * self._window, self._window))

    def _answer(self, peer: str, writer: _Writer, number: int, index: int, *, ok: bool) -> None:
        self._notify(peer, _RESULT.pack(_LANDED, writer.session, number, index, ok))

    def _notify(self, peer: str, payload: bytes) -> bool:
        """Sends a message. Returns whether the agent accepted it; what is lost is sent again."""
        try:
            self._inner.notify(peer + HOST_AGENT, payload)
        except TransferFailed as e:
            _log.debug("%s cannot be notified: %s", peer, e.message)
            return False
        return True

    def close(self) -> None:
        """Ends the agent and frees the area, unless a copy or a network write is under way."""
        writes = [write for receiver in self.receivers.values() for write in receiver.writes]
        busy = any(piece.reads_source for write in writes for piece in write.pieces)
        busy |= any(writer.copies for writer in self._writers.values())
        for receiver in self.receivers.values():
            if receiver.area is not None and not busy:
                self._copier.detach(receiver.area)
                receiver.area.close()
        self._inner.close()
        if not busy:
            self._copier.detach(self._area)
            self._area.close()


def _unpack(metadata: bytes) -> tuple[dict[str, Any], bytes]:
    """Returns the description of an area and the metadata of its agent. Raises TransferFailed."""
    try:
        end = 4 + int.from_bytes(metadata[:4], "little")
        head = json.loads(metadata[4:end])
        if not isinstance(head, dict) or not {"base", "slots", "slot_bytes", "window", "file", "token"} <= head.keys():
            raise ValueError("a field is missing")
    except ValueError as e:
        raise TransferFailed(f"the description of the staging area is malformed: {e}") from e
    return head, metadata[end:]
