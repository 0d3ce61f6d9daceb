"""Transfers out of this pod: the caller's handle, the table of sender machines, and the execution of their actions.

Any thread may use an OutgoingTransfer. Every other method but TransferSender.start runs on the transfer thread.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from common.errors import BatonError, Cancelled, InvalidRequest, LayoutMismatch, TransferFailed, UnknownTransfer
from common.types import FinishReason, KvTarget, TransferId
from kv_transfer.memory import MemoryKind, PinnedBlocks, PoolMemory, release_and_log_errors
from kv_transfer.messages import Commit, ExposedParts, TransferReport
from kv_transfer.notifications import CommitNotification, CommittedNotification, RangeWritten
from kv_transfer.peers.connections import PeerConnection
from kv_transfer.peers.traffic import PairTrafficTable
from kv_transfer.sender.state_machine import (
    BlocksDelivered,
    BlockWrite,
    ReleasePush,
    RenotifyRanges,
    SendCommit,
    SendDone,
    SenderAction,
    SenderMachine,
    SenderState,
    SendFailed,
    SendOpen,
    WritesStopped,
)
from kv_transfer.transfer_thread import HOT_POLL_LIMIT_S, TransferThread

_log = logging.getLogger(__name__)

CALL_S = 5.0
#: Seconds that a commit notification waits for its acknowledgement before the Commit call follows.
COMMIT_NOTIFICATION_WAIT_S = 0.02
#: After this many unanswered commit notifications in a row the peer gets only calls for NOTIFICATION_PAUSE_S seconds.
MAX_MISSED_ACKS = 3
NOTIFICATION_PAUSE_S = 10.0
_REMEMBERED = 65536


@dataclass(frozen=True, slots=True)
class WriteLimits:
    """Sizes of writes."""

    #: Most bytes of a push's first write.
    first_bytes: int
    #: Most bytes of one write.
    max_bytes: int
    #: Most posted writes per connection.
    max_in_flight: int


# Host memory: posting a write may copy all of its bytes inline. GPU: posting a write takes a tenth of a millisecond of
# this thread, which must be little beside the copy. A write cannot be recalled; 128 MiB take two milliseconds at most.
DEFAULT_WRITE_LIMITS: dict[MemoryKind, WriteLimits] = {
    "DRAM": WriteLimits(8 << 20, 8 << 20, 4),
    "VRAM": WriteLimits(32 << 20, 128 << 20, 4),
}


class ReceiverCalls(Protocol):
    """Calls to the receiver on the event loop. The coroutines raise BatonError."""

    async def connect(self, target: KvTarget, timeout_s: float) -> PeerConnection: ...

    async def open(self, target: KvTarget, request_id: str, polled: bool, timeout_s: float) -> None: ...

    async def commit(self, target: KvTarget, commit: Commit, timeout_s: float) -> float: ...

    def run_on_loop(self, work: Callable[[], Awaitable[None]]) -> None:
        """Runs a coroutine on the event loop. Any thread."""


class OutgoingTransfer:
    """The KV of one prompt on its way to a decode pod. Any thread."""

    def __init__(self, owner: TransferSender, target: KvTarget, num_prompt_blocks: int) -> None:
        self.target = target
        #: Called on the transfer thread with the number of delivered blocks after each write. It must not block.
        self.on_progress: Callable[[int], None] | None = None
        self._owner = owner
        self._num_prompt_blocks = num_prompt_blocks
        #: Blocks that are in the target's memory.
        self.delivered_blocks = 0
        #: The owner sets it once.
        self.outcome: Future[TransferReport] = Future()

    @property
    def ended(self) -> bool:
        """done() would not wait."""
        return self.outcome.done()

    def push(self, first_block: int, blocks: Sequence[int], pin: PinnedBlocks) -> None:
        """Sends the physical `blocks`, which hold the finished logical blocks from first_block on.

        `pin` keeps them from reuse. It is released at the latest when every posted write of this push is terminal.
        Blocks that the target already has are skipped. Raises InvalidRequest for blocks outside the prompt, and
        releases the pin.
        """
        if first_block < 0 or first_block + len(blocks) > self._num_prompt_blocks:
            release_and_log_errors(pin)
            raise InvalidRequest(
                f"blocks {first_block}..{first_block + len(blocks) - 1} of a prompt of {self._num_prompt_blocks}",
                field="first_block",
            )
        self._owner.push(self, first_block, tuple(blocks), pin)

    def finish(self, first_tokens: Sequence[int], finish_reasons: Sequence[FinishReason | None]) -> None:
        """Sends the commit with these first tokens, because the last chunk is computed.

        The receiver acknowledges the commit once every block arrived.
        """
        self._owner.finish(self, Commit(tuple(first_tokens), tuple(finish_reasons)), self.delivered_blocks)

    def abort(self, reason: str) -> None:
        """Ends the transfer: nothing more is posted, and done() raises Cancelled. Idempotent."""
        self._owner.abort(self, Cancelled(reason))

    def set_delivered(self, blocks: int) -> None:
        """Sets the number of delivered blocks, for the owner."""
        self.delivered_blocks = blocks
        if self.on_progress is not None:
            try:
                self.on_progress(blocks)
            except Exception:
                _log.exception("a transfer's progress callback failed")

    async def done(self) -> TransferReport:
        """Waits until the decode pod acknowledged the commit.

        Raises TransferFailed, DeadlineExceeded, LayoutMismatch, Unavailable, Unauthenticated or Cancelled. Source
        blocks may stay pinned after that, until no write reads them.
        """
        return await asyncio.shield(asyncio.wrap_future(self.outcome))


@dataclass(slots=True, eq=False)
class _OutgoingTransferState:
    """Entry of the table. The transfer thread owns it. Times are of the sender's clock."""

    transfer: OutgoingTransfer
    machine: SenderMachine
    request_id: str
    #: The target asked for cached blocks.
    for_pull: bool
    connection: PeerConnection | None = None
    #: By push number.
    pins: dict[int, PinnedBlocks] = field(default_factory=dict)
    #: CRC-32 by logical block.
    checksums: dict[int, int] = field(default_factory=dict)
    delivered_before_finish: int = 0
    #: finish() was called.
    finished_at: float = 0.0
    #: The transfer thread handled finish().
    noticed_at: float = 0.0
    #: The newest write was posted.
    posted_at: float = 0.0
    #: The newest write ended.
    written_at: float = 0.0
    #: The first commit was sent; 0 before.
    committed_at: float = 0.0
    #: Seconds that the commit waited on the receiver for the last range.
    awaited_s: float = 0.0
    #: The commit of a notification that is not acknowledged.
    unacknowledged_commit: Commit | None = None
    #: Answers to Drain calls.
    drains: list[Future[bool]] = field(default_factory=list)


class TransferSender:
    """All outgoing transfers of this pod.

    Args:
        checksums: commits carry a CRC-32 of every block.
        fingerprint: of this pod's KV layout.
        write_limits: sizes of writes. None: DEFAULT_WRITE_LIMITS of the memory.
        commit_notifications: see TransferNode.
    """

    def __init__(
        self,
        thread: TransferThread,
        calls: ReceiverCalls,
        memory: PoolMemory,
        clock: Callable[[], float],
        pairs: PairTrafficTable,
        *,
        checksums: bool,
        fingerprint: Callable[[], str],
        write_limits: WriteLimits | None = None,
        commit_notifications: bool = True,
    ) -> None:
        self.sent_blocks = 0
        self.sent_bytes = 0
        self.sent_transfers = 0
        self.failed_transfers = 0
        self._thread = thread
        self._calls = calls
        self._memory = memory
        self._clock = clock
        self._pairs = pairs
        self._checksums = checksums
        self._fingerprint = fingerprint
        self._write_limits = write_limits or DEFAULT_WRITE_LIMITS[memory.kind]
        self._commit_notifications = commit_notifications
        self._pushes = 0
        self._table: dict[OutgoingTransfer, _OutgoingTransferState] = {}
        #: By receiver and id: a receiver makes its ids, so an id is unique only together with the receiver's name.
        self._by_id: dict[tuple[str, TransferId], _OutgoingTransferState] = {}
        #: Transfers that ended or that a drain refused -> whether every write succeeded.
        self._over: OrderedDict[tuple[str, TransferId], bool] = OrderedDict()

    def start(
        self, target: KvTarget, request_id: str, num_prompt_blocks: int, deadline_s: float, *, for_pull: bool = False
    ) -> OutgoingTransfer:
        """Starts to connect and open in the background. Event loop.

        Args:
            for_pull: the target asked for cached blocks.
        """
        transfer = OutgoingTransfer(self, target, num_prompt_blocks)
        deadline = self._clock() + deadline_s
        first, most = (
            max(1, size // self._memory.block_bytes)
            for size in (self._write_limits.first_bytes, self._write_limits.max_bytes)
        )
        machine = SenderMachine(
            target,
            max_write_blocks=most,
            first_write_blocks=first,
            deadline=deadline,
            commit_ahead=self._write_limits.max_in_flight,
        )
        entry = _OutgoingTransferState(transfer, machine, request_id, for_pull)
        self._thread.submit(lambda: self._add(entry, num_prompt_blocks))

        async def connect() -> None:
            try:
                connection = await self._calls.connect(target, deadline_s)
            except BatonError as e:
                error = e
                self._thread.submit(lambda: self._apply(entry, machine.fail(error, self._clock())))
            else:
                self._thread.submit(lambda: self._connected(entry, connection))

        if target.fingerprint == self._fingerprint():
            self._calls.run_on_loop(connect)
        return transfer

    # -- any thread, through OutgoingTransfer -------------------------------------------------------------------------
    def push(self, transfer: OutgoingTransfer, first: int, blocks: tuple[int, ...], pin: PinnedBlocks) -> None:
        if not self._thread.running:
            release_and_log_errors(pin)
            return
        self._thread.submit(lambda: self._push(transfer, first, blocks, pin))

    def finish(self, transfer: OutgoingTransfer, commit: Commit, delivered: int) -> None:
        now = self._clock()
        self._thread.submit(lambda: self._finish(transfer, commit, delivered, now))

    def abort(self, transfer: OutgoingTransfer, error: BatonError) -> None:
        self._thread.submit(lambda: self._fail(transfer, error))

    # -- transfer thread ----------------------------------------------------------------------------------------------
    @property
    def num_open(self) -> int:
        """Transfers that are not over."""
        return len(self._table)

    @property
    def poll_fast(self) -> bool:
        """A commit is under way: its call may be due again. On some transports notifications leave by polls only."""
        return any(entry.machine.state is SenderState.COMMITTING for entry in self._table.values())

    @property
    def poll_hot(self) -> bool:
        """A commit was sent less than HOT_POLL_LIMIT_S ago."""
        since = self._clock() - HOT_POLL_LIMIT_S
        return any(
            entry.machine.state is SenderState.COMMITTING and entry.committed_at > since
            for entry in self._table.values()
        )

    def post_writes(self) -> bool:
        """Posts at most one write of each transfer. Returns whether it posted any."""
        posted = False
        for entry in list(self._table.values()):
            connection = entry.connection
            if connection is None or connection.in_flight >= self._write_limits.max_in_flight:
                continue
            write = entry.machine.next_write()
            if write is not None:
                posted = True
                self._post(entry, connection, write)
                self._apply(entry, entry.machine.posted())
        return posted

    def drain(self, pod: str, transfer_id: TransferId) -> Future[bool]:
        """Ends this transfer, because the receiver `pod` gave it up.

        The future completes once no write of the transfer is or will be in flight. Its result says whether every write
        succeeded.
        """
        answer: Future[bool] = Future()
        key = (pod, transfer_id)
        entry = self._by_id.get(key)
        if entry is None:
            clean = self._over.setdefault(key, False)
            self._remember(key, clean)
            answer.set_result(clean)
        else:
            entry.drains.append(answer)
            self._apply(
                entry,
                entry.machine.fail(TransferFailed(f"{entry.machine.target.pod} gave the transfer up"), self._clock()),
            )
        return answer

    def peer_ended(self, connection: PeerConnection) -> None:
        """Handles that the process behind this connection is proven to have ended."""
        for entry in list(self._table.values()):
            if entry.connection is connection:
                self._apply(entry, entry.machine.peer_ended(self._clock()))

    def on_committed(self, peer: str, message: CommittedNotification) -> None:
        """Handles that the receiver acknowledged a commit. Ignored if the answer to the call ended the transfer."""
        for entry in list(self._table.values()):
            connection = entry.connection
            if entry.machine.target.transfer_id != message.transfer_id or connection is None:
                continue
            if connection.agent == peer and entry.committed_at:
                connection.missed_acks = 0
                entry.unacknowledged_commit, entry.awaited_s = None, message.awaited_us / 1e6
                self._apply(entry, entry.machine.committed(self._clock()))

    def tick(self, now: float) -> None:
        for entry in list(self._table.values()):
            self._apply(entry, entry.machine.tick(now))
            if (
                entry.unacknowledged_commit is not None
                and now >= entry.committed_at + COMMIT_NOTIFICATION_WAIT_S
                and not entry.machine.ended
            ):
                self._on_missed_ack(entry, entry.unacknowledged_commit, now)

    def close(self, error: BatonError) -> None:
        """Fails every transfer with `error`, because this pod ends."""
        for entry in list(self._table.values()):
            self._apply(entry, entry.machine.fail(error, self._clock()))

    def _add(self, entry: _OutgoingTransferState, num_prompt_blocks: int) -> None:
        target = entry.machine.target
        self._table[entry.transfer] = entry
        error: BatonError | None = None
        key = (target.pod, target.transfer_id)
        if key in self._over or key in self._by_id:
            error = TransferFailed(f"transfer {target.transfer_id} was given up or used before")
        else:
            self._by_id[key] = entry
        if target.fingerprint != self._fingerprint():
            error = LayoutMismatch(f"the KV layout of {target.pod} has another fingerprint", field="fingerprint")
        elif target.blocks and target.first_block + len(target.blocks) != num_prompt_blocks:
            error = InvalidRequest(
                f"a target of {len(target.blocks)} blocks from {target.first_block} on for {num_prompt_blocks} blocks",
                field="target.blocks",
            )
        if error is not None:
            self._apply(entry, entry.machine.fail(error, self._clock()))

    def _connected(self, entry: _OutgoingTransferState, connection: PeerConnection) -> None:
        entry.connection = connection
        now = self._clock()
        if any(block >= connection.num_blocks for block in entry.machine.target.blocks):
            self._apply(
                entry,
                entry.machine.fail(
                    InvalidRequest("the target has a block outside the pool", field="target.blocks"), now
                ),
            )
        elif connection.broken:
            error = TransferFailed(f"the connection to {connection.pod} broke")
            self._apply(entry, entry.machine.fail(error, now))
        else:
            self._apply(entry, entry.machine.connected(now))

    def _push(self, transfer: OutgoingTransfer, first: int, blocks: tuple[int, ...], pin: PinnedBlocks) -> None:
        entry = self._table.get(transfer)
        if entry is None:
            release_and_log_errors(pin)
            return
        self._pushes += 1
        entry.pins[self._pushes] = pin
        if self._checksums:  # taken now: a change before the write is damage too
            wanted = range(len(transfer.target.blocks))
            for index, block in enumerate(blocks, first):
                if index - transfer.target.first_block in wanted:
                    entry.checksums[index] = zlib.crc32(self._memory.read_block(block))
        self._apply(entry, entry.machine.push(self._pushes, first, blocks, self._clock()))

    def _finish(self, transfer: OutgoingTransfer, commit: Commit, delivered: int, now: float) -> None:
        entry = self._table.get(transfer)
        if entry is not None:
            entry.delivered_before_finish, entry.finished_at, entry.noticed_at = delivered, now, self._clock()
            self._apply(entry, entry.machine.finish(commit, entry.noticed_at))

    def _fail(self, transfer: OutgoingTransfer, error: BatonError) -> None:
        entry = self._table.get(transfer)
        if entry is not None:
            self._apply(entry, entry.machine.fail(error, self._clock()))

    def _post(self, entry: _OutgoingTransferState, connection: PeerConnection, write: BlockWrite) -> None:
        written = RangeWritten(entry.machine.target.transfer_id, write.first, len(write.local))
        pair = self._pairs.get(connection.pod)

        def ended(error: str | None) -> None:
            connection.in_flight -= 1
            moved = len(write.local) if error is None else 0
            pair.end(moved, moved * self._memory.block_bytes, pulled=entry.for_pull)
            self.sent_blocks += moved
            self.sent_bytes += moved * self._memory.block_bytes
            if error is not None:
                connection.broken = True
            entry.written_at = self._clock()
            self._apply(entry, entry.machine.write_ended(write.number, error, entry.written_at))

        connection.in_flight += 1
        pair.begin()
        self._thread.write(connection.agent, write.local, write.remote, written.pack(), ended)
        entry.posted_at = self._clock()

    def _apply(self, entry: _OutgoingTransferState, actions: Sequence[SenderAction]) -> None:
        machine = entry.machine
        for action in actions:
            match action:
                case SendOpen():
                    call = partial(self._calls.open, machine.target, entry.request_id, self._needs_target_polls(entry))
                    self._call(entry, call, machine.opened)
                case SendCommit(commit):
                    sums = tuple(entry.checksums[block] for block in sorted(entry.checksums))
                    self._commit(entry, replace(commit, checksums=sums))
                case RenotifyRanges():
                    self._renotify(entry)
                case ReleasePush(push):
                    release_and_log_errors(entry.pins.pop(push))
                case BlocksDelivered(blocks):
                    entry.transfer.set_delivered(blocks)
                case SendDone():
                    self.sent_transfers += 1
                    self._forget(entry, clean=True)
                    report = self._report(entry)
                    pair = self._pairs.get(machine.target.pod)
                    if entry.for_pull:
                        pair.pulls += 1
                    else:
                        pair.transfers += 1
                        pair.exposed_s += report.exposed_s
                    entry.transfer.outcome.set_result(report)
                case SendFailed(error):
                    if not isinstance(error, Cancelled):
                        self.failed_transfers += 1
                        self._pairs.get(machine.target.pod).failures += 1
                    entry.transfer.outcome.set_exception(error)
                case WritesStopped(clean):
                    self._forget(entry, clean=clean)

    def _commit(self, entry: _OutgoingTransferState, commit: Commit) -> None:
        """Commits by notification where the receiver polls often, else by call.

        A call passes through the event loops of both pods.
        """
        connection, first = entry.connection, not entry.committed_at
        assert connection is not None, "all is posted without a connection"
        entry.committed_at = entry.committed_at or self._clock()
        use_notification = (
            self._commit_notifications
            and connection.accepts_commit_notifications
            and self._clock() >= connection.notifications_resume_at
        )
        if first and use_notification and self._needs_target_polls(entry) and not commit.checksums:
            notification = CommitNotification(entry.machine.target.transfer_id, commit)
            try:
                self._thread.backend.notify(connection.agent, notification.pack())
            except TransferFailed as e:
                _log.warning("%s cannot be notified: %s", connection.pod, e)
            else:
                entry.unacknowledged_commit = commit
                return
        self._call_commit(entry, commit)

    def _on_missed_ack(self, entry: _OutgoingTransferState, commit: Commit, now: float) -> None:
        """Calls Commit, because the commit notification was not acknowledged in time.

        A peer that misses several in a row gets calls for a while, because each unanswered notification delays its
        call.
        """
        connection, entry.unacknowledged_commit = entry.connection, None
        assert connection is not None, "a commit notification without a connection"
        connection.missed_acks += 1
        if connection.missed_acks >= MAX_MISSED_ACKS:
            connection.missed_acks, connection.notifications_resume_at = 0, now + NOTIFICATION_PAUSE_S
            _log.info(
                "%s does not answer commit notifications: it gets calls for %.0f s",
                connection.pod,
                NOTIFICATION_PAUSE_S,
            )
        self._call_commit(entry, commit)

    def _call_commit(self, entry: _OutgoingTransferState, commit: Commit) -> None:
        target = entry.machine.target

        async def call(timeout_s: float) -> None:
            entry.awaited_s = await self._calls.commit(target, commit, timeout_s)

        self._call(entry, call, entry.machine.committed)

    def _needs_target_polls(self, entry: _OutgoingTransferState) -> bool:
        """Returns whether a write ends only while the target polls. Assumed of unknown transports.

        From GPU to GPU the bytes move by themselves, but UCX reports the write as done when the target's polls have
        answered.
        """
        if self._memory.kind == "VRAM":
            return True
        return entry.connection is not None and entry.connection.transport in ("tcp", "unknown")

    def _renotify(self, entry: _OutgoingTransferState) -> None:
        connection, target = entry.connection, entry.machine.target
        assert connection is not None, "all is written without a connection"
        if connection.broken:
            return
        everything = RangeWritten(target.transfer_id, target.first_block, len(target.blocks))
        try:
            self._thread.backend.notify(connection.agent, everything.pack())
        except TransferFailed as e:
            _log.warning("%s cannot be notified: %s", target.pod, e)
        else:
            _log.info("notified %s of transfer %s again", target.pod, target.transfer_id)

    def _call(
        self,
        entry: _OutgoingTransferState,
        call: Callable[[float], Awaitable[None]],
        acknowledged: Callable[[float], list[SenderAction]],
    ) -> None:
        """Makes a call on the event loop and reports its end to the machine."""
        machine = entry.machine

        async def work() -> None:
            try:
                await call(min(CALL_S, machine.deadline - self._clock()))
            except BatonError as e:
                error = e
                self._thread.submit(lambda: self._call_failed(entry, error))
            else:
                self._thread.submit(lambda: self._apply(entry, acknowledged(self._clock())))

        self._calls.run_on_loop(work)

    def _call_failed(self, entry: _OutgoingTransferState, error: BatonError) -> None:
        if isinstance(error, UnknownTransfer) and error.field == "pod" and entry.connection is not None:
            entry.connection.broken = True  # the peer has forgotten this pod: the next transfer repeats the handshake
        self._apply(entry, entry.machine.call_failed(error, self._clock()))

    def _report(self, entry: _OutgoingTransferState) -> TransferReport:
        blocks = len(entry.machine.target.blocks)

        def after(at: float) -> float:
            return max(0.0, at - entry.finished_at)

        return TransferReport(
            blocks=blocks,
            bytes=blocks * self._memory.block_bytes,
            delivered_before_finish=entry.delivered_before_finish,
            exposed_s=after(self._clock()),
            transport=entry.connection.transport if entry.connection is not None else "",
            parts=ExposedParts(
                noticed_s=after(entry.noticed_at),
                posted_s=after(entry.posted_at),
                written_s=after(entry.written_at),
                committed_s=after(entry.committed_at),
                awaited_s=entry.awaited_s,
            ),
        )

    def _forget(self, entry: _OutgoingTransferState, *, clean: bool) -> None:
        del self._table[entry.transfer]
        key = (entry.machine.target.pod, entry.machine.target.transfer_id)
        if self._by_id.get(key) is entry:
            del self._by_id[key]
            self._remember(key, clean)
        for answer in entry.drains:
            if not answer.cancelled():
                answer.set_result(clean)

    def _remember(self, key: tuple[str, TransferId], clean: bool) -> None:
        self._over[key] = clean
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)
