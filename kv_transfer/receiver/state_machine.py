"""The receiving side of one transfer: a pure state machine, told the time, that owns every limit of its side.

    RESERVED --open--> OPEN --ranges cover everything and commit--> READY
       |                 |
       |                 `--deadline, release, failure--> DRAINING --every range accounted for--> CLOSED
       `--deadline, release--> CLOSED              (never opened: no writer can exist)

In DRAINING the request is over but the writer may still write. A range of blocks is given back only
 (a) on its own notification, in OPEN too: a request waits for the last one, and little is left to do then;
 (b) when the same writer answers Drained: at once if all its writes ended well, after the grace if one ended by error;
 (c) after proof that the writer's process ended, and then the grace.
A commit usually comes before the last range. It is stored, and acknowledged in READY only: whoever owns the machine
answers it then, or after a while with Unavailable, so that the writer asks again. READY is the end: a release after it,
or the same commit again, is for the owner of the machines to answer.

The grace is GRACE_S seconds in which this machine was ticked: time in which our own transfer thread stood still does
not count. No deadline ends DRAINING.

Every method returns what is to be done, in order. Exactly one of Ready and Failed is ever returned, exactly once, and
each logical block is returned in exactly one Free.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from common.errors import (
    BatonError,
    BlockDamaged,
    Cancelled,
    DeadlineExceeded,
    TransferFailed,
    UnknownTransfer,
)
from common.types import TransferId
from kv_transfer.messages import Commit, Writer

GRACE_S = 2.0
_MAX_TICK_S = 0.25  # the most of the grace that one tick may use up
_DRAIN_RETRY_S = (0.05, 2.0)


class ReceiverState(enum.Enum):
    """Where the transfer is."""

    RESERVED = "reserved"
    OPEN = "open"
    READY = "ready"
    DRAINING = "draining"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """These logical blocks cannot be written any more: give up their hold."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CheckChecksums:
    """Everything is there: compare checksums, then call checked()."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class TransferReady:
    """The KV is complete; every hold was given up before."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class ReceiveFailed:
    """The request will not get its KV."""

    error: BatonError


@dataclass(frozen=True, slots=True)
class RequestDrain:
    """Ask the writer to confirm that it stopped; report by drained() or drain_failed()."""

    writer: Writer


ReceiverAction = FreeBlocks | CheckChecksums | TransferReady | ReceiveFailed | RequestDrain


class ReceiverMachine:
    """One incoming transfer of logical blocks [first_block, first_block + num_blocks)."""

    def __init__(self, transfer_id: TransferId, *, first_block: int, num_blocks: int, deadline: float) -> None:
        self.transfer_id = transfer_id
        self.state = ReceiverState.RESERVED
        self.writer: Writer | None = None
        self.deadline = deadline
        self._held = set(range(first_block, first_block + num_blocks))  # not written, or not known to be
        # Written, and kept until the transfer is over: an owner that gives its blocks up may be heard of later than the
        # last of them, and what is checked must not be somebody else's by then.
        self._landed: set[int] = set()
        self._first = first_block
        self._end = first_block + num_blocks
        self._commit: Commit | None = None
        self._checking = False
        self._drain_asked = False
        self._next_drain = 0.0
        self._drain_wait = _DRAIN_RETRY_S[0]
        self._grace_left: float | None = None
        self._last_tick = 0.0

    @property
    def num_blocks(self) -> int:
        """Blocks that the writer is to send."""
        return self._end - self._first

    @property
    def num_quarantined(self) -> int:
        """Blocks that wait for proof."""
        return len(self._held) if self.state is ReceiverState.DRAINING else 0

    @property
    def num_missing(self) -> int:
        """Blocks that have not arrived."""
        return len(self._held)

    @property
    def commit_waits_for_ranges(self) -> bool:
        """The commit is here before the last notification: that is due."""
        return self.state is ReceiverState.OPEN and self._commit is not None and bool(self._held)

    def open(self, writer: Writer, now: float) -> None:
        """Remote: raises UnknownTransfer when nothing may be written (any more) or another writer opened it."""
        if self.state is ReceiverState.RESERVED and now < self.deadline:
            self.writer, self.state = writer, ReceiverState.OPEN
        elif self.state is not ReceiverState.OPEN or writer != self.writer:
            raise UnknownTransfer(f"transfer {self.transfer_id} is {self.state.value} or late")

    def range_written(self, agent: str, first: int, count: int, now: float) -> list[ReceiverAction] | None:
        """Remote: a range landed. None: it does not fit and is dropped."""
        if self.writer is None or self.writer.agent != agent or first < self._first or first + count > self._end:
            return None
        if self.state not in (ReceiverState.OPEN, ReceiverState.DRAINING):
            return None
        blocks = [block for block in range(first, first + count) if block in self._held]
        if self.state is ReceiverState.DRAINING:
            return self._free(blocks)
        self._held.difference_update(blocks)
        self._landed.update(blocks)
        return self._complete()

    def shrink_to(self, num_blocks: int) -> list[ReceiverAction]:
        """Local: the writer said that it sends the first num_blocks blocks alone, so nobody will write the others."""
        if self.state not in (ReceiverState.RESERVED, ReceiverState.OPEN) or num_blocks >= self.num_blocks:
            return []
        self._end = self._first + num_blocks
        return [*self._free([block for block in self._held if block >= self._end]), *self._complete()]

    def commit(self, generation: int, commit: Commit, now: float) -> list[ReceiverAction]:
        """Remote; of several the first counts, and it is kept until every range is here. Raises UnknownTransfer when
        the transfer is over or another writer's.
        """
        if self.state is not ReceiverState.OPEN or not self._is_writer(generation):
            raise UnknownTransfer(f"transfer {self.transfer_id} is {self.state.value}")
        if self._commit is None:
            self._commit = commit
        return self._complete()

    def _complete(self) -> list[ReceiverAction]:
        if self._held or self._commit is None or self._checking:
            return []
        if self._commit.checksums:
            self._checking = True
            return [CheckChecksums(self._commit)]
        return self._ready(self._commit)

    def checked(self, error: str | None, now: float) -> list[ReceiverAction]:
        """Local: the answer to Check."""
        assert self._checking, "nothing was to be checked"
        assert self._commit is not None, "checking without a commit"
        self._checking = False
        if self.state is not ReceiverState.OPEN:
            return []
        if error is not None:
            return self._fail(BlockDamaged(error), now)
        return self._ready(self._commit)

    def _ready(self, commit: Commit) -> list[ReceiverAction]:
        self.state = ReceiverState.READY
        return [*self._free_landed(), TransferReady(commit)]

    def release(self, now: float) -> list[ReceiverAction]:
        """Local: the request is over for this pod. Idempotent."""
        return self._fail(Cancelled("the request was ended"), now)

    def _fail(self, error: BatonError, now: float) -> list[ReceiverAction]:
        if self.state is ReceiverState.RESERVED:
            self.state = ReceiverState.CLOSED
            return [*self._free(list(self._held)), ReceiveFailed(error)]
        if self.state is not ReceiverState.OPEN:
            return []
        self.state, self._next_drain, self._last_tick = ReceiverState.DRAINING, now, now
        return [*self._free_landed(), ReceiveFailed(error), *self.tick(now)]

    def drained(self, generation: int, clean: bool, now: float) -> list[ReceiverAction]:
        """Remote: the answer to AskDrain. clean: every write of the transfer ended well, so none can be on its way."""
        self._drain_asked = False
        if self.state is not ReceiverState.DRAINING:
            return []
        if not self._is_writer(generation):
            return self.drain_failed(now)
        if not clean:
            return self.writer_ended(now)
        return self._free(list(self._held))

    def drain_failed(self, now: float) -> list[ReceiverAction]:
        """No answer, or somebody else's: ask again later."""
        self._drain_asked = False
        self._next_drain = now + self._drain_wait
        self._drain_wait = min(self._drain_wait * 2, _DRAIN_RETRY_S[1])
        return []

    def writer_ended(self, now: float) -> list[ReceiverAction]:
        """Proof that the writer's process ended, or its word that it posts nothing any more: the grace begins."""
        if self.state in (ReceiverState.RESERVED, ReceiverState.OPEN) and self.writer is not None:
            actions = self._fail(TransferFailed(f"the writer {self.writer.pod} ended"), now)
        else:
            actions = []
        if self.state is ReceiverState.DRAINING and self._grace_left is None:
            self._grace_left, self._last_tick = GRACE_S, now
        return [action for action in actions if not isinstance(action, RequestDrain)]

    def tick(self, now: float) -> list[ReceiverAction]:
        """Called often; what time alone brings about."""
        if self.state in (ReceiverState.RESERVED, ReceiverState.OPEN) and now >= self.deadline:
            return self._fail(DeadlineExceeded("the KV did not arrive in time"), now)
        if self.state is not ReceiverState.DRAINING:
            return []
        elapsed, self._last_tick = now - self._last_tick, now
        if self._grace_left is not None:
            self._grace_left -= min(elapsed, _MAX_TICK_S)
            return self._free(list(self._held)) if self._grace_left <= 0 else []
        if not self._drain_asked and now >= self._next_drain:
            assert self.writer is not None, "draining without a writer"
            self._drain_asked = True
            return [RequestDrain(self.writer)]
        return []

    def _free_landed(self) -> list[ReceiverAction]:
        landed, self._landed = list(self._landed), set()
        return self._free(landed)

    def _free(self, blocks: list[int]) -> list[ReceiverAction]:
        self._held.difference_update(blocks)
        if not self._held and self.state is ReceiverState.DRAINING:
            self.state = ReceiverState.CLOSED
        return [FreeBlocks(tuple(sorted(blocks)))] if blocks else []

    def _is_writer(self, generation: int) -> bool:
        return self.writer is not None and self.writer.generation == generation
