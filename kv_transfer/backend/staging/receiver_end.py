"""The receiver's end of staged writes: gives windows to writers and copies their pieces into the pool.

A lost message is sent again by the writer: LAND is answered again, never done twice. A window belongs to one session of
one writer. It goes to another writer only after the writer's end and GRACE_S in which this thread made progress.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field

from kv_transfer.backend.interface import Notification
from kv_transfer.backend.staging.agent import StagingAgent, host_agent
from kv_transfer.backend.staging.copiers import Ended
from kv_transfer.backend.staging.messages import Grant, Hello, Land, Landed, unpack_description

_log = logging.getLogger(__name__)

GRACE_S = 2.0  #: Between the end of a writer and the reuse of its window.
_MAX_TICK_S = 0.25  #: Max grace that one call uses up: a standstill of the thread proves nothing.
_REMEMBERED = 1024  #: Landed writes per writer, to answer a repeated LAND.


@dataclass(eq=False, slots=True)
class _Landing:
    """A write on its way into this pod's pool."""

    pieces: int  #: Number of its pieces.
    notification: bytes
    landed: set[int] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class _Writer:
    """A peer that writes into its window of this pod's area."""

    window: int | None = None  #: Number of its window; None before the first session.
    session: int = 0  #: The session that owns the window.
    hello: int | None = None  #: A session that waits for the copies of the former one.
    landing: dict[int, _Landing] = field(default_factory=dict)  #: Writes with pieces to come, by number.
    copies: dict[tuple[int, int], Ended] = field(default_factory=dict)  #: Copies under way, by write and piece.
    over: OrderedDict[int, None] = field(default_factory=OrderedDict)  #: The last landed writes.
    grace_left: float | None = None  #: Seconds until the window is free; None while the writer lives.


class ReceiverEnd:
    """All staged writes of peers into this pod's pool. The transfer thread owns it."""

    def __init__(self, agent: StagingAgent) -> None:
        self._agent = agent
        self._free_windows = list(range(agent.num_windows))
        self._writers: dict[str, _Writer] = {}
        self._delivered: list[Notification] = []

    def accept(self, peer: str, metadata: bytes) -> None:
        """Accepts staged writes of a peer. Raises TransferFailed."""
        _, inner_metadata = unpack_description(metadata)
        if peer in self._writers:
            self._agent.inner.remove_peer(host_agent(peer))  # the connection for answers may be broken too
        self._agent.inner.add_peer(host_agent(peer), inner_metadata)
        self._writers.setdefault(peer, _Writer()).grace_left = None

    def remove_writer(self, peer: str) -> None:
        """Takes the window of a writer that ended or has a successor, after the grace."""
        writer = self._writers.get(peer)
        if writer is not None and writer.grace_left is None:
            writer.grace_left = GRACE_S

    def take_delivered(self) -> list[Notification]:
        """Returns the notifications of the writes that have landed since the last call."""
        delivered, self._delivered = self._delivered, []
        return delivered

    @property
    def busy(self) -> bool:
        """A copy is under way."""
        return any(writer.copies for writer in self._writers.values())

    # -- messages -----------------------------------------------------------------------------------------------------
    def on_hello(self, peer: str, hello: Hello) -> None:
        if (writer := self._writers.get(peer)) is not None:
            writer.hello = hello.session

    def on_land(self, peer: str, land: Land) -> None:
        """Starts to copy a piece into the pool. Answers again if it was copied before."""
        writer, agent = self._writers.get(peer), self._agent
        if writer is None or writer.window is None or land.session != writer.session or writer.hello is not None:
            return  # of a former session: its writer gave it up
        first = agent.first_slot(writer.window)
        inside = all(first <= slot < first + agent.window_slots for slot in land.slots)
        if not inside or max(land.blocks, default=0) >= agent.pool.total_blocks or land.piece >= land.num_pieces:
            _log.warning("a message of %s about staged KV has a slot, block or piece that is out of range", peer)
            return
        if land.write in writer.over:
            self._answer(peer, writer, land.write, land.piece, ok=True)
            return
        landing = writer.landing.setdefault(land.write, _Landing(land.num_pieces, land.notification))
        if land.piece in landing.landed:
            self._answer(peer, writer, land.write, land.piece, ok=True)
        elif (land.write, land.piece) not in writer.copies:
            writer.copies[land.write, land.piece] = agent.copier.load(agent.area, land.slots, land.blocks)

    def _answer(self, peer: str, writer: _Writer, write: int, piece: int, *, ok: bool) -> None:
        self._agent.notify(peer, Landed(writer.session, write, piece, ok))

    # -- progress -----------------------------------------------------------------------------------------------------
    def advance(self, elapsed: float) -> None:
        """Continues whatever can continue, `elapsed` seconds after the last call."""
        for peer, writer in list(self._writers.items()):
            self._end_copies(peer, writer)
            if writer.hello is not None and not writer.copies:
                self._begin_session(peer, writer, writer.hello)
            if writer.grace_left is not None and not writer.copies:
                writer.grace_left -= min(elapsed, _MAX_TICK_S)
                if writer.grace_left <= 0:
                    self._forget(peer, writer)

    def _end_copies(self, peer: str, writer: _Writer) -> None:
        for (write, piece), ended in list(writer.copies.items()):
            try:
                if not ended():
                    continue
            except Exception:
                _log.exception("staged KV of %s could not be copied into the pool", peer)
                del writer.copies[write, piece]
                self._answer(peer, writer, write, piece, ok=False)
                continue
            del writer.copies[write, piece]
            self._on_copied(peer, writer, write, piece)

    def _on_copied(self, peer: str, writer: _Writer, write: int, piece: int) -> None:
        landing = writer.landing[write]
        landing.landed.add(piece)
        if len(landing.landed) == landing.pieces:
            del writer.landing[write]
            writer.over[write] = None
            if len(writer.over) > _REMEMBERED:
                writer.over.popitem(last=False)
            if landing.notification:
                self._delivered.append(Notification(peer, landing.notification))
        self._answer(peer, writer, write, piece, ok=True)

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
            self._agent.notify(peer, Grant(session, 0, 0))
        else:
            self._agent.notify(peer, Grant(session, self._agent.first_slot(writer.window), self._agent.window_slots))

    def _forget(self, peer: str, writer: _Writer) -> None:
        del self._writers[peer]
        self._agent.inner.remove_peer(host_agent(peer))
        if writer.window is not None:
            self._free_windows.append(writer.window)
