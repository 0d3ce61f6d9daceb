"""Reads of blocks that other pods lend to this one: the table of read machines, and what their actions do.

Everything but start() runs on the transfer thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from common.errors import BatonError, TransferFailed
from kv_transfer.connector import Connection
from kv_transfer.memory import Hold, PoolMemory, let_go
from kv_transfer.outgoing import PIECES, Pieces
from kv_transfer.pairs import Pairs
from kv_transfer.read_machine import Done, Failed, Free, ReadAction, ReadMachine, ReadPiece, ReadState
from kv_transfer.transfer_thread import TransferThread

PIECE_S = 0.02  # that a read of one piece may take: what is posted goes on after its reader has given up


@dataclass(slots=True, eq=False)
class Read:
    """One read under way. outcome, and over (nothing can land any more) are each set once, on the transfer thread."""

    machine: ReadMachine
    connection: Connection
    hold: Hold
    outcome: Future[None]
    over: Future[None]


class Reading:
    """All reads of this pod."""

    def __init__(
        self,
        thread: TransferThread,
        memory: PoolMemory,
        clock: Callable[[], float],
        pairs: Pairs,
        *,
        pieces: Pieces | None = None,
    ) -> None:
        self._thread = thread
        self._memory = memory
        self._clock = clock
        self._pairs = pairs
        self._pieces = pieces or PIECES[memory.kind]
        self._reads: list[Read] = []

    def start(
        self,
        connection: Connection,
        local: Sequence[int],
        remote: Sequence[int],
        hold: Hold,
        deadline: float,
        gbps: float = 0.0,
    ) -> Read:
        """Any thread. The hold of the local blocks is given up once nothing can land in them any more. gbps: at which
        reads come, 0 while unknown: a slow one is cut into small pieces.
        """
        piece_bytes = min(self._pieces.most, int(gbps * 1e9 * PIECE_S)) if gbps else self._pieces.most
        piece_blocks = max(1, piece_bytes // self._memory.block_bytes)
        machine = ReadMachine(connection.pod, local, remote, piece_blocks=piece_blocks, deadline=deadline)
        read = Read(machine, connection, hold, Future(), Future())
        self._thread.submit(lambda: self._add(read))
        return read

    def give_up(self, read: Read, error: BatonError) -> None:
        """The caller does not wait any longer; any thread, idempotent."""
        self._thread.submit(lambda: self._apply(read, read.machine.fail(error, self._clock())))

    # On the transfer thread.

    @property
    def open(self) -> int:
        """Reads that are not over."""
        return len(self._reads)

    def post(self) -> bool:
        """Posts at most one piece of each read; whether it posted any."""
        posted = False
        for read in self._reads:
            if read.connection.in_flight < self._pieces.window and (piece := read.machine.next_piece()) is not None:
                posted = True
                self._post(read, piece)
        return posted

    def holder_ended(self, connection: Connection) -> None:
        """The process that this connection led to is proven gone."""
        for read in [r for r in self._reads if r.connection is connection]:
            self._apply(read, read.machine.holder_ended(self._clock()))

    def tick(self, now: float) -> None:
        for read in list(self._reads):
            self._apply(read, read.machine.tick(now))

    def close(self, error: BatonError) -> None:
        """This pod ends: whoever waits is told. What may still land stays held until the process is gone."""
        for read in list(self._reads):
            self._apply(read, read.machine.fail(error, self._clock()))

    def _add(self, read: Read) -> None:
        self._reads.append(read)
        if read.connection.broken:
            error = TransferFailed(f"the connection to {read.connection.pod} broke")
            self._apply(read, read.machine.fail(error, self._clock()))

    def _post(self, read: Read, piece: ReadPiece) -> None:
        connection, pair = read.connection, self._pairs.of(read.connection.pod)

        def ended(error: str | None) -> None:
            connection.in_flight -= 1
            moved = len(piece.local) if error is None else 0
            pair.end(moved, moved * self._memory.block_bytes, pulled=True, reads=True)
            if error is not None:
                connection.broken = True
            self._apply(read, read.machine.piece_ended(piece.number, error, self._clock()))

        connection.in_flight += 1
        pair.begin(reads=True)
        self._thread.read(connection.agent, piece.local, piece.remote, ended)

    def _apply(self, read: Read, actions: Sequence[ReadAction]) -> None:
        for action in actions:
            match action:
                case Free():
                    let_go(read.hold)
                    read.over.set_result(None)
                case Done():
                    self._pairs.of(read.connection.pod).pulls += 1
                    read.outcome.set_result(None)
                case Failed(error):
                    read.outcome.set_exception(error)
        if read.machine.state in (ReadState.DONE, ReadState.STOPPED) and read in self._reads:
            self._reads.remove(read)
