"""Reading lent blocks from a holder: a pure state machine, told the time.

    READING --every piece done--> DONE
       `--a piece failed, given up, deadline, the holder ended--> STOPPING --nothing can land any more--> STOPPED

Who reads writes into its own blocks, so it needs nobody's word for when that is over: its own handles say so. They are
given back (Free) once every posted piece is terminal; after one that ended by error, or proof that the holder's process
ended, a grace of GRACE_S later, in which this machine was ticked, because bytes may trail behind an error.
Whether what was read is what was lent is another matter, and the holder's to confirm: see lending.py.

Every method returns what is to be done, in order. Exactly one of Done and Failed is ever returned, exactly once, and
exactly one Free.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import BatonError, DeadlineExceeded, TransferFailed

GRACE_S = 2.0
_MAX_TICK_S = 0.25


class ReadState(enum.Enum):
    """Where the read is."""

    READING = "reading"
    DONE = "done"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ReadPiece:
    """One bounded read of remote into local physical blocks."""

    number: int
    local: tuple[int, ...]
    remote: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Free:
    """Nothing can land in the blocks any more: give up their hold."""


@dataclass(frozen=True, slots=True)
class Done:
    """Every block was read."""


@dataclass(frozen=True, slots=True)
class Failed:
    """It ended for the caller; posted pieces may still land."""

    error: BatonError


ReadAction = Free | Done | Failed


class ReadMachine:
    """Reads remote[i] into local[i] in pieces of at most piece_blocks blocks."""

    def __init__(
        self, pod: str, local: Sequence[int], remote: Sequence[int], *, piece_blocks: int, deadline: float
    ) -> None:
        assert local
        assert len(local) == len(remote)
        self.pod = pod
        self.state = ReadState.READING
        self.deadline = deadline
        self._queue = deque(
            ReadPiece(at, tuple(local[at : at + piece_blocks]), tuple(remote[at : at + piece_blocks]))
            for at in range(0, len(local), piece_blocks)
        )
        self._posted: set[int] = set()
        self._clean = True
        self._lost = False
        self._grace_left = GRACE_S
        self._last_tick = 0.0

    def next_piece(self) -> ReadPiece | None:
        """The next piece to post; from now on it counts as posted."""
        if self.state is not ReadState.READING or not self._queue:
            return None
        piece = self._queue.popleft()
        self._posted.add(piece.number)
        return piece

    def piece_ended(self, number: int, error: str | None, now: float) -> list[ReadAction]:
        """A posted piece is terminal."""
        if number not in self._posted:  # already written off with the holder
            return []
        self._posted.discard(number)
        if error is not None:
            self._clean = False
            return [*self.fail(TransferFailed(f"a read from {self.pod} failed: {error}"), now), *self._stop()]
        if self.state is ReadState.READING and not self._queue and not self._posted:
            self.state = ReadState.DONE
            return [Free(), Done()]
        return self._stop()

    def fail(self, error: BatonError, now: float) -> list[ReadAction]:
        """Ends it for the caller; idempotent."""
        if self.state is not ReadState.READING:
            return []
        self.state, self._last_tick = ReadState.STOPPING, now
        self._queue.clear()
        return [Failed(error), *self._stop()]

    def holder_ended(self, now: float) -> list[ReadAction]:
        """Proof that the holder's process ended: after the grace no piece can land."""
        actions = self.fail(TransferFailed(f"{self.pod} ended"), now)
        if self.state is ReadState.STOPPING:
            self._lost = True
        return actions

    def tick(self, now: float) -> list[ReadAction]:
        """Called often; what time alone brings about."""
        if self.state is ReadState.READING and now >= self.deadline:
            return self.fail(DeadlineExceeded(f"{self.pod} could not be read in time"), now)
        if self.state is not ReadState.STOPPING:
            return []
        elapsed, self._last_tick = now - self._last_tick, now
        if self._lost or not self._posted:
            self._grace_left -= min(elapsed, _MAX_TICK_S)
            if self._grace_left <= 0:
                self._posted.clear()
                self._clean = True
        return self._stop()

    def _stop(self) -> list[ReadAction]:
        if self.state is not ReadState.STOPPING or self._posted or not self._clean:
            return []
        self.state = ReadState.STOPPED
        return [Free()]
