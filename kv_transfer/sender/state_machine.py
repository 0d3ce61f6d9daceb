"""The sending side of one transfer: a pure state machine, told the time, that owns every limit of its side.

    CONNECTING --connected--> OPENING --acknowledged--> OPEN --finish--> COMMITTING --acknowledged--> DONE
         |                       |                       |                       |
         `-----------------------+-----------------------+-failure, abort, drain-'
                                                         v
                                       STOPPING --every posted piece terminal--> STOPPED

The commit is announced when so little is left to post that the call travels while the bytes do. The receiver
acknowledges it only when every range's notification arrived; after a moment without the last of them it answers "not
yet", and the commit is asked again. DONE needs the acknowledgement and the end of every piece. After RENOTIFY_AFTER
such answers to a sender whose writes are all done a notification counts as lost, and one for everything goes with each
further try, which then says the truth.

Nothing is posted before the receiver acknowledged the open, nor in STOPPING. A piece's source blocks are given back
(Release of its push) only when every posted piece of the push is terminal, or after proof that the peer's process
ended and a grace: an in-flight write cannot be recalled.

Every method returns what is to be done, in order. Exactly one of Done and Failed is ever returned, exactly once; each
push is released exactly once; Stopped follows Failed once nothing of the transfer is or will be under way.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import BatonError, DeadlineExceeded, InternalError, TransferFailed, Unavailable, UnknownTransfer
from common.types import KvTarget
from kv_transfer.messages import Commit

GRACE_S = 2.0
OPEN_PATIENCE_S = 3.0  # how long an unreachable receiver may delay the open
_MAX_TICK_S = 0.25
RENOTIFY_AFTER = 2
_OPEN_RETRY_S = 0.05
_COMMIT_RETRY_S = 0.002
_MAX_RETRY_S = 1.0


class SenderState(enum.Enum):
    """Where the transfer is."""

    CONNECTING = "connecting"
    OPENING = "opening"
    OPEN = "open"
    COMMITTING = "committing"
    DONE = "done"
    STOPPING = "stopping"
    STOPPED = "stopped"


_ENDED = (SenderState.DONE, SenderState.STOPPING, SenderState.STOPPED)


@dataclass(frozen=True, slots=True)
class BlockWrite:
    """One bounded write: logical blocks [first, first + len(local)) from local to remote physical blocks."""

    number: int
    push: int
    first: int
    local: tuple[int, ...]
    remote: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendOpen:
    """Announce the transfer; report by opened() or call_failed()."""


@dataclass(frozen=True, slots=True)
class SendCommit:
    """Everything is posted, or about to be; report by committed() or call_failed()."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class RenotifyRanges:
    """Tell the receiver again that every block was written."""


@dataclass(frozen=True, slots=True)
class ReleasePush:
    """Give up the hold of this push."""

    push: int


@dataclass(frozen=True, slots=True)
class BlocksDelivered:
    """So many blocks are delivered in all."""

    blocks: int


@dataclass(frozen=True, slots=True)
class SendDone:
    """The receiver has it all."""


@dataclass(frozen=True, slots=True)
class SendFailed:
    """It ended for the caller; posted pieces may still be under way."""

    error: BatonError


@dataclass(frozen=True, slots=True)
class WritesStopped:
    """No write is or will be under way. clean: every one ended well."""

    clean: bool


SenderAction = (
    SendOpen | SendCommit | RenotifyRanges | ReleasePush | BlocksDelivered | SendDone | SendFailed | WritesStopped
)


class SenderMachine:
    """One outgoing transfer to `target`; pieces hold at most piece_blocks blocks, the first one of a push first_blocks
    (None: as many), and each later one up to twice those before it: the first bytes move while more are posted. ahead:
    pieces that may still be queued when the commit is announced.
    """

    def __init__(
        self,
        target: KvTarget,
        *,
        piece_blocks: int,
        deadline: float,
        first_blocks: int | None = None,
        ahead: int = 0,
    ) -> None:
        self.target = target
        self.state = SenderState.CONNECTING
        self.deadline = deadline
        self.delivered = 0
        self.clean = True
        self._piece_blocks = piece_blocks
        self._first_blocks = first_blocks or piece_blocks
        self._commit_ahead = ahead
        self._first = target.first_block
        self._end = target.first_block + len(target.blocks)
        self._unpushed = set(range(self._first, self._end))
        self._queue: deque[BlockWrite] = deque()
        self._posted: dict[int, BlockWrite] = {}
        self._left: dict[int, int] = {}  # push -> pieces of it that are queued or posted
        self._num_writes = 0
        self._commit: Commit | None = None
        self._calling = False
        self._acknowledged = False
        self._next_call = 0.0
        self._call_wait = _OPEN_RETRY_S
        self._failed_calls = 0
        self._opening_since = 0.0
        self._grace_left: float | None = None
        self._last_tick = 0.0

    @property
    def ended(self) -> bool:
        """It is over for the caller."""
        return self.state in _ENDED

    def connected(self, now: float) -> list[SenderAction]:
        """The peer can be written to."""
        if self.state is not SenderState.CONNECTING:
            return []
        self.state, self._opening_since = SenderState.OPENING, now
        return self._call(SendOpen())

    def opened(self, now: float) -> list[SenderAction]:
        """The receiver acknowledged the open."""
        if self.state is not SenderState.OPENING:
            return []
        self.state, self._calling = SenderState.OPEN, False
        return self._announce()

    def push(self, push: int, first: int, blocks: Sequence[int], now: float) -> list[SenderAction]:
        """Local: physical `blocks` hold logical blocks from `first` on; what the receiver has already is skipped."""
        if self.ended and self.state is not SenderState.DONE:
            return [ReleasePush(push)]
        skip = max(0, self._first - first)
        first, blocks = first + skip, blocks[skip:]
        wanted = range(first, first + len(blocks))
        if not self._unpushed.issuperset(wanted):
            error = InternalError(
                f"blocks {wanted.start}..{wanted.stop - 1} were pushed before or are not in the target"
            )
            return [ReleasePush(push), *self.fail(error, now)]
        if not blocks:
            return [ReleasePush(push)]
        self._unpushed.difference_update(wanted)
        start, size = 0, self._first_blocks
        while start < len(blocks):
            local = tuple(blocks[start : start + size])
            at = first + start - self._first
            self._queue.append(
                BlockWrite(self._num_writes, push, first + start, local, self.target.blocks[at : at + len(local)])
            )
            self._num_writes += 1
            self._left[push] = self._left.get(push, 0) + 1
            start, size = start + size, min(2 * size, self._piece_blocks)
        return []

    def next_write(self) -> BlockWrite | None:
        """The next piece to post; from now on it counts as posted. Call `posted` when that was done."""
        if self.state not in (SenderState.OPEN, SenderState.COMMITTING) or not self._queue:
            return None
        piece = self._queue.popleft()
        self._posted[piece.number] = piece
        return piece

    def posted(self) -> list[SenderAction]:
        """What was taken has been given to the backend: the commit may be announced."""
        if self.state is not SenderState.OPEN or self._commit is None or self._unpushed:
            return []
        if len(self._queue) > self._commit_ahead:
            return []
        self.state, self._call_wait, self._failed_calls = SenderState.COMMITTING, _COMMIT_RETRY_S, 0
        return self._call(SendCommit(self._commit))

    def write_ended(self, number: int, error: str | None, now: float) -> list[SenderAction]:
        """A posted piece is terminal."""
        piece = self._posted.pop(number, None)
        if piece is None:  # already written off with its peer
            return []
        actions = self._settle(piece.push)
        if error is None:
            self.delivered += len(piece.local)
            actions.append(BlocksDelivered(self.delivered))
            actions += self._complete()
        else:
            self.clean = False
            actions += self.fail(TransferFailed(f"a write to {self.target.pod} failed: {error}"), now)
        return actions + self._stop()

    def finish(self, commit: Commit, now: float) -> list[SenderAction]:
        """Local: the prompt's first tokens exist; the commit goes out once few blocks are to be posted."""
        if self._commit is not None and not self.ended:
            return self.fail(InternalError("finish was called twice"), now)
        self._commit = commit
        return self._announce()

    def _announce(self) -> list[SenderAction]:
        """What is queued is posted first: its bytes take longer than the commit."""
        return [] if self._queue else self.posted()

    def committed(self, now: float) -> list[SenderAction]:
        """The receiver acknowledged the commit."""
        if self.state is not SenderState.COMMITTING:
            return []
        self._acknowledged = True
        return self._complete()

    def _complete(self) -> list[SenderAction]:
        if self.state is not SenderState.COMMITTING or not self._acknowledged or self._left:
            return []
        self.state = SenderState.DONE
        return [SendDone()]

    def call_failed(self, error: BatonError, now: float) -> list[SenderAction]:
        """Open or commit was not acknowledged: try again while that may help."""
        self._calling = False
        if self.state not in (SenderState.OPENING, SenderState.COMMITTING):
            return []
        if isinstance(error, UnknownTransfer):
            return self.fail(TransferFailed(f"{self.target.pod} gave the transfer up: {error.message}"), now)
        if not isinstance(error, Unavailable | DeadlineExceeded):
            return self.fail(error, now)
        if self.state is SenderState.OPENING and now - self._opening_since >= OPEN_PATIENCE_S:
            return self.fail(Unavailable(f"{self.target.pod} cannot be reached: {error.message}"), now)
        self._next_call = now + self._call_wait
        if not self._left:  # else not all could have arrived
            self._call_wait = min(self._call_wait * 2, _MAX_RETRY_S)
            self._failed_calls += 1
        return []

    def fail(self, error: BatonError, now: float) -> list[SenderAction]:
        """Ends it for the caller (abort, drain and failed connections come here too); idempotent."""
        if self.ended:
            return []
        self.state = SenderState.STOPPING
        actions: list[SenderAction] = []
        while self._queue:
            actions += self._settle(self._queue.popleft().push)
        return [*actions, SendFailed(error), *self._stop()]

    def peer_ended(self, now: float) -> list[SenderAction]:
        """Proof that the peer's process ended: after a grace its pieces count as terminal."""
        actions = self.fail(TransferFailed(f"{self.target.pod} ended"), now)
        if self.state is SenderState.STOPPING and self._grace_left is None:
            self._grace_left, self._last_tick = GRACE_S, now
        return actions

    def tick(self, now: float) -> list[SenderAction]:
        """Called often; what time alone brings about."""
        elapsed, self._last_tick = now - self._last_tick, now
        if not self.ended and now >= self.deadline:
            return self.fail(DeadlineExceeded("the KV could not be handed over in time"), now)
        if self.state is SenderState.STOPPING and self._grace_left is not None:
            self._grace_left -= min(elapsed, _MAX_TICK_S)
            if self._grace_left <= 0:
                self.clean = False
                actions: list[SenderAction] = []
                for number in list(self._posted):
                    actions += self._settle(self._posted.pop(number).push)
                return actions + self._stop()
        if self._calling or now < self._next_call:
            return []
        if self.state is SenderState.OPENING:
            return self._call(SendOpen())
        if self.state is SenderState.COMMITTING:
            assert self._commit is not None, "committing without a commit"
            lost = self._failed_calls >= RENOTIFY_AFTER and self.target.blocks and not self._left
            return [*([RenotifyRanges()] if lost else []), *self._call(SendCommit(self._commit))]
        return []

    def _call(self, action: SendOpen | SendCommit) -> list[SenderAction]:
        self._calling = True
        return [action]

    def _settle(self, push: int) -> list[SenderAction]:
        self._left[push] -= 1
        if self._left[push]:
            return []
        del self._left[push]
        return [ReleasePush(push)]

    def _stop(self) -> list[SenderAction]:
        if self.state is not SenderState.STOPPING or self._posted:
            return []
        self.state = SenderState.STOPPED
        return [WritesStopped(self.clean)]
