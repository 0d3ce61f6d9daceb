"""State machine of one transfer on the sending side. Pure: the caller passes the time and runs the returned actions.

    CONNECTING --connected--> OPENING --opened--> OPEN --finish--> COMMITTING --committed--> DONE
         |                       |                  |                  |
         '-----------------------+------------------+------------------+-- failure, abort, drain
                                                    v
                                                 STOPPING --every posted write ended--> STOPPED

The commit is sent while the last writes are in flight. The receiver refuses it with Unavailable until every range
arrived, and it is sent again. A write cannot be recalled: its source blocks stay pinned until every write of the push
ended, or until GRACE_S after proof that the peer's process ended.

Each push is released exactly once. SendDone or SendFailed is returned exactly once. WritesStopped follows SendFailed.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import BatonError, DeadlineExceeded, InternalError, TransferFailed, Unavailable, UnknownTransfer
from common.types import KvTarget
from kv_transfer.messages import Commit

GRACE_S = 2.0  #: Wait between proof that the peer's process ended and the release of blocks that its writes read.
OPEN_RETRY_LIMIT_S = 3.0  #: An unreachable receiver fails the transfer after this long in OPENING.
_MAX_TICK_S = 0.25  #: Max grace that one tick uses up: a standstill of the transfer thread proves nothing.
RENOTIFY_AFTER = 2  #: Refused commits, with every write done, after which the ranges are notified again.
_OPEN_RETRY_S = 0.05
_COMMIT_RETRY_S = 0.002
_MAX_RETRY_S = 1.0


class SenderState(enum.Enum):
    """State of the transfer."""

    CONNECTING = "connecting"  #: Handshake and probe with the peer are under way.
    OPENING = "opening"  #: The Open call is under way. Nothing is written before the receiver acknowledged it.
    OPEN = "open"  #: Writes are posted as blocks are pushed.
    COMMITTING = "committing"  #: The commit is sent; the last writes may still be in flight.
    DONE = "done"  #: The receiver acknowledged the commit and every write ended.
    STOPPING = "stopping"  #: Failed for the caller. Nothing more is posted, but posted writes may be in flight.
    STOPPED = "stopped"  #: Failed, and no write is in flight.


_ENDED = (SenderState.DONE, SenderState.STOPPING, SenderState.STOPPED)


@dataclass(frozen=True, slots=True)
class BlockWrite:
    """One bounded write of logical blocks [first, first + len(local)), from local to remote physical blocks."""

    number: int
    push: int
    first: int
    local: tuple[int, ...]
    remote: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendOpen:
    """Announce the transfer to the receiver. The caller reports with opened() or call_failed()."""


@dataclass(frozen=True, slots=True)
class SendCommit:
    """Send the commit. Every write is posted or about to be. The caller reports with committed() or call_failed()."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class RenotifyRanges:
    """Notify the receiver once more that every block was written."""


@dataclass(frozen=True, slots=True)
class ReleasePush:
    """Release the pin of this push."""

    push: int


@dataclass(frozen=True, slots=True)
class BlocksDelivered:
    """Total number of blocks that are delivered so far."""

    blocks: int


@dataclass(frozen=True, slots=True)
class SendDone:
    """The receiver has every block and the commit."""


@dataclass(frozen=True, slots=True)
class SendFailed:
    """The transfer failed for its caller. Posted writes may still be in flight."""

    error: BatonError


@dataclass(frozen=True, slots=True)
class WritesStopped:
    """No write is or will be in flight."""

    clean: bool  #: No write failed.


SenderAction = (
    SendOpen | SendCommit | RenotifyRanges | ReleasePush | BlocksDelivered | SendDone | SendFailed | WritesStopped
)


class SenderMachine:
    """One outgoing transfer to `target`.

    Args:
        max_write_blocks: max blocks of one write.
        first_write_blocks: max blocks of a push's first write (None: max_write_blocks). Each later write may be twice
            as large as the one before, so the first bytes move while more writes are posted.
        commit_ahead: the commit is sent while at most this many writes are still queued.
    """

    def __init__(
        self,
        target: KvTarget,
        *,
        max_write_blocks: int,
        deadline: float,
        first_write_blocks: int | None = None,
        commit_ahead: int = 0,
    ) -> None:
        self.target = target
        self.state = SenderState.CONNECTING
        self.deadline = deadline
        self.delivered = 0
        self.clean = True
        self._max_write_blocks = max_write_blocks
        self._first_write_blocks = first_write_blocks or max_write_blocks
        self._commit_ahead = commit_ahead
        self._first = target.first_block
        self._unpushed = set(range(self._first, self._first + len(target.blocks)))
        self._queue: deque[BlockWrite] = deque()
        self._posted: dict[int, BlockWrite] = {}
        self._num_unfinished: dict[int, int] = {}  #: Push -> number of its writes that are queued or posted.
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
        """The transfer has ended for its caller."""
        return self.state in _ENDED

    @property
    def num_posted(self) -> int:
        """Writes that are posted and not terminal."""
        return len(self._posted)

    def connected(self, now: float) -> list[SenderAction]:
        """Called when the connection to the peer passed its probe."""
        if self.state is not SenderState.CONNECTING:
            return []
        self.state, self._opening_since = SenderState.OPENING, now
        return self._call(SendOpen())

    def opened(self, now: float) -> list[SenderAction]:
        """Called when the receiver acknowledged the open."""
        if self.state is not SenderState.OPENING:
            return []
        self.state, self._calling = SenderState.OPEN, False
        return self._announce()

    def push(self, push: int, first: int, blocks: Sequence[int], now: float) -> list[SenderAction]:
        """Pushes physical `blocks` as the logical blocks from `first`; skips those before the target's first block."""
        if self.ended and self.state is not SenderState.DONE:
            return [ReleasePush(push)]
        skip = max(0, self._first - first)
        first, blocks = first + skip, blocks[skip:]
        pushed = range(first, first + len(blocks))
        if not self._unpushed.issuperset(pushed):
            wrong = f"blocks {pushed.start}..{pushed.stop - 1} were pushed before or are not in the target"
            return [ReleasePush(push), *self.fail(InternalError(wrong), now)]
        if not blocks:
            return [ReleasePush(push)]
        self._unpushed.difference_update(pushed)
        start, size = 0, self._first_write_blocks
        while start < len(blocks):
            local, at = tuple(blocks[start : start + size]), first + start - self._first
            remote = self.target.blocks[at : at + len(local)]
            self._queue.append(BlockWrite(self._num_writes, push, first + start, local, remote))
            self._num_writes += 1
            self._num_unfinished[push] = self._num_unfinished.get(push, 0) + 1
            start, size = start + size, min(2 * size, self._max_write_blocks)
        return []

    def next_write(self) -> BlockWrite | None:
        """Takes the next write to post; it counts as posted from now on. Call `posted` after posting it."""
        if self.state not in (SenderState.OPEN, SenderState.COMMITTING) or not self._queue:
            return None
        write = self._queue.popleft()
        self._posted[write.number] = write
        return write

    def posted(self) -> list[SenderAction]:
        """Called when the backend got the taken writes; then the commit may be due."""
        if self.state is not SenderState.OPEN or self._commit is None or self._unpushed:
            return []
        if len(self._queue) > self._commit_ahead:
            return []
        self.state, self._call_wait, self._failed_calls = SenderState.COMMITTING, _COMMIT_RETRY_S, 0
        return self._call(SendCommit(self._commit))

    def write_ended(self, number: int, error: str | None, now: float) -> list[SenderAction]:
        """Called when a posted write has become terminal. error: the reason of its failure."""
        write = self._posted.pop(number, None)
        if write is None:  # the grace after the peer's end released it already
            return []
        actions = self._settle(write.push)
        if error is None:
            self.delivered += len(write.local)
            actions.append(BlocksDelivered(self.delivered))
            actions += self._complete()
        else:
            self.clean = False
            actions += self.fail(TransferFailed(f"a write to {self.target.pod} failed: {error}"), now)
        return actions + self._stop()

    def finish(self, commit: Commit, now: float) -> list[SenderAction]:
        """Takes the commit with the first tokens. It is sent when at most commit_ahead writes are queued."""
        if self._commit is not None and not self.ended:
            return self.fail(InternalError("finish was called twice"), now)
        self._commit = commit
        return self._announce()

    def _announce(self) -> list[SenderAction]:
        """Sends the commit, unless writes are queued: they go first, because their bytes take longer."""
        return [] if self._queue else self.posted()

    def committed(self, now: float) -> list[SenderAction]:
        """Called when the receiver acknowledged the commit."""
        if self.state is not SenderState.COMMITTING:
            return []
        self._acknowledged = True
        return self._complete()

    def _complete(self) -> list[SenderAction]:
        if self.state is not SenderState.COMMITTING or not self._acknowledged or self._num_unfinished:
            return []
        self.state = SenderState.DONE
        return [SendDone()]

    def call_failed(self, error: BatonError, now: float) -> list[SenderAction]:
        """Called when Open or Commit failed. Only Unavailable and DeadlineExceeded are tried again."""
        self._calling = False
        if self.state not in (SenderState.OPENING, SenderState.COMMITTING):
            return []
        if isinstance(error, UnknownTransfer):
            return self.fail(TransferFailed(f"{self.target.pod} gave the transfer up: {error.message}"), now)
        if not isinstance(error, Unavailable | DeadlineExceeded):
            return self.fail(error, now)
        if self.state is SenderState.OPENING and now - self._opening_since >= OPEN_RETRY_LIMIT_S:
            return self.fail(Unavailable(f"{self.target.pod} cannot be reached: {error.message}"), now)
        self._next_call = now + self._call_wait
        if not self._num_unfinished:  # with writes in flight the receiver has to refuse the commit
            self._call_wait = min(self._call_wait * 2, _MAX_RETRY_S)
            self._failed_calls += 1
        return []

    def fail(self, error: BatonError, now: float) -> list[SenderAction]:
        """Ends the transfer for its caller, also on abort, drain and a failed connection. Idempotent."""
        if self.ended:
            return []
        self.state = SenderState.STOPPING
        actions: list[SenderAction] = []
        while self._queue:
            actions += self._settle(self._queue.popleft().push)
        return [*actions, SendFailed(error), *self._stop()]

    def peer_ended(self, now: float) -> list[SenderAction]:
        """Handles the proven end of the peer's process: its posted writes count as terminal after GRACE_S."""
        actions = self.fail(TransferFailed(f"{self.target.pod} ended"), now)
        if self.state is SenderState.STOPPING and self._grace_left is None:
            self._grace_left, self._last_tick = GRACE_S, now
        return actions

    def tick(self, now: float) -> list[SenderAction]:
        """Applies the deadline, the grace and call retries. Called often."""
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
            lost = self._failed_calls >= RENOTIFY_AFTER and self.target.blocks and not self._num_unfinished
            return [*([RenotifyRanges()] if lost else []), *self._call(SendCommit(self._commit))]
        return []

    def _call(self, action: SendOpen | SendCommit) -> list[SenderAction]:
        self._calling = True
        return [action]

    def _settle(self, push: int) -> list[SenderAction]:
        self._num_unfinished[push] -= 1
        if self._num_unfinished[push]:
            return []
        del self._num_unfinished[push]
        return [ReleasePush(push)]

    def _stop(self) -> list[SenderAction]:
        if self.state is not SenderState.STOPPING or self._posted:
            return []
        self.state = SenderState.STOPPED
        return [WritesStopped(self.clean)]
