"""State machine of one transfer on the receiving side. Pure: the caller passes the time and runs the returned actions.

    RESERVED --open--> OPEN --every range and the commit arrived--> READY
       |                 |
       |                 '--deadline, release, failure--> DRAINING --every block accounted for--> CLOSED
       '--deadline, release--> CLOSED       (never opened, so no writer exists)

In DRAINING the request has ended, but the writer may still write, so its blocks are quarantined without a deadline. A
block is released only after one of these: (a) the notification of its own range, in OPEN too; (b) the writer's answer
to Drain: at once if all its writes succeeded, after GRACE_S if one failed; (c) proof that the writer's process ended,
and GRACE_S.

The commit usually arrives before the last range. It is stored, and acknowledged in READY. TransferReady or
ReceiveFailed is returned exactly once, and each logical block in exactly one FreeBlocks.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from common.errors import BatonError, BlockDamaged, Cancelled, DeadlineExceeded, TransferFailed, UnknownTransfer
from common.types import TransferId
from kv_transfer.messages import Commit, Writer

GRACE_S = 2.0  #: Wait between proof that a writer stopped and the reuse of its blocks.
_MAX_TICK_S = 0.25  #: Max grace that one tick uses up: a standstill of the transfer thread proves nothing.
_DRAIN_RETRY_S = (0.05, 2.0)  #: First and longest wait before Drain is called again.


class ReceiverState(enum.Enum):
    """State of the transfer."""

    RESERVED = "reserved"  #: The blocks wait for a writer.
    OPEN = "open"  #: A writer may write to the blocks.
    READY = "ready"  #: Every block and the commit arrived.
    DRAINING = "draining"  #: The request has ended, but the writer may still write.
    CLOSED = "closed"  #: No block can be written any more.


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """These logical blocks cannot be written any more: release their pin."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CheckChecksums:
    """Every block arrived: compare the checksums, then call checked()."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class TransferReady:
    """The KV is complete. Every pin was released before."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class ReceiveFailed:
    """The request will not get its KV."""

    error: BatonError


@dataclass(frozen=True, slots=True)
class RequestDrain:
    """Call Drain on the writer. The caller reports with drained() or drain_failed()."""

    writer: Writer


ReceiverAction = FreeBlocks | CheckChecksums | TransferReady | ReceiveFailed | RequestDrain


class ReceiverMachine:
    """One incoming transfer of logical blocks [first_block, first_block + num_blocks)."""

    def __init__(self, transfer_id: TransferId, *, first_block: int, num_blocks: int, deadline: float) -> None:
        self.transfer_id = transfer_id
        self.state = ReceiverState.RESERVED
        self.writer: Writer | None = None
        self.deadline = deadline
        self.missing = set(range(first_block, first_block + num_blocks))  #: Blocks that are not known to be written.
        #: Written blocks. They stay pinned until the transfer has ended, because a release may reach this machine
        #: later than the last range, and the checksums must be compared before another request gets the blocks.
        self._landed: set[int] = set()
        self.first_block = first_block
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
        """Blocks that the writer sends."""
        return self._end - self.first_block

    @property
    def num_quarantined(self) -> int:
        """Blocks of an ended transfer that may still be written."""
        return len(self.missing) if self.state is ReceiverState.DRAINING else 0

    @property
    def commit_waits_for_ranges(self) -> bool:
        """The commit arrived and the notification of a range is overdue."""
        return self.state is ReceiverState.OPEN and self._commit is not None and bool(self.missing)

    def open(self, writer: Writer, now: float) -> None:
        """Handles the writer's open. Raises UnknownTransfer if the transfer has ended or another writer opened it."""
        if self.state is ReceiverState.RESERVED and now < self.deadline:
            self.writer, self.state = writer, ReceiverState.OPEN
        elif self.state is not ReceiverState.OPEN or writer != self.writer or now >= self.deadline:
            raise UnknownTransfer(f"transfer {self.transfer_id} is {self.state.value} or late")

    def range_written(self, agent: str, first: int, count: int, now: float) -> list[ReceiverAction] | None:
        """Handles the writer's message that a range arrived. Returns None and drops it if it does not fit."""
        if self.writer is None or self.writer.agent != agent or first < self.first_block or first + count > self._end:
            return None
        if self.state not in (ReceiverState.OPEN, ReceiverState.DRAINING):
            return None
        blocks = [block for block in range(first, first + count) if block in self.missing]
        if self.state is ReceiverState.DRAINING:
            return self._free(blocks)
        self.missing.difference_update(blocks)
        self._landed.update(blocks)
        return self._complete() if now < self.deadline else []  # a late transfer fails at the next tick

    def shrink_to(self, num_blocks: int) -> list[ReceiverAction]:
        """Keeps the first num_blocks blocks, which the holder of a pulled prefix sends, and releases the others."""
        if self.state not in (ReceiverState.RESERVED, ReceiverState.OPEN) or num_blocks >= self.num_blocks:
            return []
        self._end = self.first_block + num_blocks
        return [*self._free([block for block in self.missing if block >= self._end]), *self._complete()]

    def commit(self, generation: int, commit: Commit, now: float) -> list[ReceiverAction]:
        """Handles the writer's commit. The first commit counts and is kept until every range arrived.

        Raises UnknownTransfer if the transfer has ended or belongs to another writer.
        """
        if self.state is not ReceiverState.OPEN or not self._is_writer(generation) or now >= self.deadline:
            raise UnknownTransfer(f"transfer {self.transfer_id} is {self.state.value} or late")
        if self._commit is None:
            self._commit = commit
        return self._complete()

    def _complete(self) -> list[ReceiverAction]:
        """Ends the transfer if the commit and every range have arrived. The model check removes each guard alone."""
        if self._commit is None or self._checking:
            return []
        if self.missing:
            return []
        if self._commit.checksums:
            self._checking = True
            return [CheckChecksums(self._commit)]
        return self._ready(self._commit)

    def checked(self, error: str | None, now: float) -> list[ReceiverAction]:
        """Handles the result of CheckChecksums; `error` is the first mismatch."""
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
        """Called when the request has ended on this pod. Idempotent."""
        return self._fail(Cancelled("the request was ended"), now)

    def _fail(self, error: BatonError, now: float) -> list[ReceiverAction]:
        if self.state is ReceiverState.RESERVED:
            self.state = ReceiverState.CLOSED
            return [*self._free(list(self.missing)), ReceiveFailed(error)]
        if self.state is not ReceiverState.OPEN:
            return []
        self.state, self._next_drain, self._last_tick = ReceiverState.DRAINING, now, now
        return [*self._free_landed(), ReceiveFailed(error), *self.tick(now)]

    def drained(self, generation: int, clean: bool, now: float) -> list[ReceiverAction]:
        """Handles the answer to Drain. clean: every write of the transfer succeeded, so no write can be in flight."""
        self._drain_asked = False
        if self.state is not ReceiverState.DRAINING:
            return []
        if not self._is_writer(generation):
            return self.drain_failed(now)
        if not clean:
            return self.writer_ended(now)
        return self._free(list(self.missing))

    def drain_failed(self, now: float) -> list[ReceiverAction]:
        """Schedules another Drain, because the writer did not answer or another generation did."""
        self._drain_asked = False
        self._next_drain = now + self._drain_wait
        self._drain_wait = min(self._drain_wait * 2, _DRAIN_RETRY_S[1])
        return []

    def writer_ended(self, now: float) -> list[ReceiverAction]:
        """Begins the grace: the writer's process is proven to have ended, or the writer posts no more writes."""
        actions: list[ReceiverAction] = []
        if self.state in (ReceiverState.RESERVED, ReceiverState.OPEN) and self.writer is not None:
            actions = self._fail(TransferFailed(f"the writer {self.writer.pod} ended"), now)
        if self.state is ReceiverState.DRAINING and self._grace_left is None:
            self._grace_left, self._last_tick = GRACE_S, now
        return [action for action in actions if not isinstance(action, RequestDrain)]

    def tick(self, now: float) -> list[ReceiverAction]:
        """Applies the deadline, the grace and drain retries. Called often."""
        if self.state in (ReceiverState.RESERVED, ReceiverState.OPEN) and now >= self.deadline:
            return self._fail(DeadlineExceeded("the KV did not arrive in time"), now)
        if self.state is not ReceiverState.DRAINING:
            return []
        elapsed, self._last_tick = now - self._last_tick, now
        if self._grace_left is not None:
            self._grace_left -= min(elapsed, _MAX_TICK_S)
            return self._free(list(self.missing)) if self._grace_left <= 0 else []
        if not self._drain_asked and now >= self._next_drain:
            assert self.writer is not None, "draining without a writer"
            self._drain_asked = True
            return [RequestDrain(self.writer)]
        return []

    def _free_landed(self) -> list[ReceiverAction]:
        landed, self._landed = list(self._landed), set()
        return self._free(landed)

    def _free(self, blocks: list[int]) -> list[ReceiverAction]:
        self.missing.difference_update(blocks)
        if not self.missing and self.state is ReceiverState.DRAINING:
            self.state = ReceiverState.CLOSED
        return [FreeBlocks(tuple(sorted(blocks)))] if blocks else []

    def _is_writer(self, generation: int) -> bool:
        return self.writer is not None and self.writer.generation == generation
