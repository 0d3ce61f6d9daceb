"""Transfers out of this pod: their table, and the execution of the actions of the sender machines."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial

from common.errors import BatonError, Cancelled, InvalidRequest, LayoutMismatch, TransferFailed, UnknownTransfer
from common.types import FinishReason, KvTarget, TransferId
from kv_transfer.backend.interface import STAGED, TCP_OR_UNKNOWN
from kv_transfer.memory import PinnedBlocks, PoolMemory, release_and_log_errors, release_unless_handed_on
from kv_transfer.messages import (
    Commit,
    CommitNotification,
    CommittedNotification,
    ExposedParts,
    RangeWritten,
    TransferNotification,
    TransferReport,
)
from kv_transfer.peers.connection import PeerConnection
from kv_transfer.peers.connector import PeerConnector
from kv_transfer.peers.rpc_client import PeerRpcClient
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
from kv_transfer.sender.write_limits import WriteLimits, WriteSilence
from kv_transfer.transfer_thread import HOT_POLL_LIMIT_S, TransferThread

_log = logging.getLogger(__name__)

CALL_S = 5.0
COMMIT_NOTIFICATION_WAIT_S = 0.02  #: A commit notification waits this long for its acknowledgement, then a call follows
#: After this many unanswered commit notifications in a row the peer gets only calls for NOTIFICATION_PAUSE_S seconds.
MAX_MISSED_ACKS = 3
NOTIFICATION_PAUSE_S = 10.0
_REMEMBERED = 65536
_Actions = Sequence[SenderAction]
_Call = Callable[[float], Awaitable[None]]  #: A call to the peer, with its timeout in seconds.


@dataclass(eq=False, slots=True)
class OutgoingTransfer:
    """The KV of one prompt on its way to another pod. Any thread may call its methods.

    The transfer thread owns the fields from `connection` on. Times are of the sender's clock.
    """

    sender: TransferSender
    target: KvTarget
    machine: SenderMachine
    request_id: str
    num_prompt_blocks: int
    for_pull: bool  #: The target asked for cached blocks.
    outcome: Future[TransferReport] = field(default_factory=Future)  #: The sender sets it once.
    delivered_blocks: int = 0  #: Blocks that are in the target's memory.
    connection: PeerConnection | None = None
    pins: dict[int, PinnedBlocks] = field(default_factory=dict)  #: By push number.
    checksums: dict[int, int] = field(default_factory=dict)  #: CRC-32 by logical block.
    delivered_before_finish: int = 0
    finished_at: float = 0.0  #: finish() was called.
    noticed_at: float = 0.0  #: The transfer thread handled finish().
    posted_at: float = 0.0  #: The newest write was posted.
    written_at: float = 0.0  #: The newest write ended.
    committed_at: float = 0.0  #: The first commit was sent; 0 before.
    awaited_s: float = 0.0  #: Seconds that the commit waited at the receiver for the last range.
    unacknowledged_commit: Commit | None = None  #: The commit of a notification that is not acknowledged.
    drains: list[Future[bool]] = field(default_factory=list)  #: Answers to Drain calls.

    @property
    def key(self) -> tuple[str, TransferId]:
        """Receiver and id: a receiver makes its ids, so an id is unique only together with the receiver's name."""
        return self.target.pod, self.target.transfer_id

    def push(self, first_block: int, blocks: Sequence[int], pin: PinnedBlocks) -> None:
        """Sends the physical `blocks`, which hold the finished logical blocks from first_block on.

        `pin` keeps them from reuse. The transfer owns the pin from this call on, also if it raises. It releases the pin
        at the latest when every posted write of this push is terminal. Blocks that the target already has are skipped.
        Raises InvalidRequest for blocks outside the prompt.
        """
        with release_unless_handed_on(pin) as scope:
            end = first_block + len(blocks)
            if first_block < 0 or end > self.num_prompt_blocks:
                wrong = f"blocks {first_block}..{end - 1} of a prompt of {self.num_prompt_blocks}"
                raise InvalidRequest(wrong, field="first_block")
            if self.sender.thread.running:
                self.sender.thread.submit(partial(self.sender.on_push, self, first_block, tuple(blocks), pin))
                scope.pop_all()

    def finish(self, first_tokens: Sequence[int], finish_reasons: Sequence[FinishReason | None]) -> None:
        """Sends the commit with these first tokens. The receiver acknowledges it once every block arrived."""
        commit, now = Commit(tuple(first_tokens), tuple(finish_reasons)), self.sender.clock()
        self.sender.thread.submit(partial(self.sender.on_finish, self, commit, self.delivered_blocks, now))

    def abort(self, reason: str) -> None:
        """Ends the transfer: nothing more is posted, and done() raises Cancelled. Idempotent."""
        self.sender.thread.submit(partial(self.sender.fail, self, Cancelled(reason)))

    async def done(self) -> TransferReport:
        """Waits until the decode pod acknowledged the commit.

        Raises TransferFailed, DeadlineExceeded, LayoutMismatch, Unavailable, Unauthenticated or Cancelled. Source
        blocks may stay pinned after that, until no write reads them.
        """
        return await asyncio.shield(asyncio.wrap_future(self.outcome))


@dataclass(eq=False)
class TransferSender:
    """All outgoing transfers of this pod. Every method but `start` runs on the transfer thread."""

    thread: TransferThread
    connector: PeerConnector
    rpc: PeerRpcClient
    memory: PoolMemory
    clock: Callable[[], float]
    pairs: PairTrafficTable
    _: KW_ONLY
    fingerprint: Callable[[], str]  #: Of this pod's KV layout.
    with_checksums: bool  #: Commits carry a CRC-32 of every block.
    write_limits: WriteLimits
    commit_notifications: bool  #: See TransferNode.

    def __post_init__(self) -> None:
        self.sent_blocks = self.sent_transfers = self.failed_transfers = 0
        self._pushes = 0
        self._silence = WriteSilence(self.write_limits.max_bytes)
        self._table: dict[tuple[str, TransferId], OutgoingTransfer] = {}  #: Transfers that are not over, by key.
        #: Transfers that ended or that a drain refused -> whether every write succeeded.
        self._over: OrderedDict[tuple[str, TransferId], bool] = OrderedDict()

    def start(
        self, target: KvTarget, request_id: str, num_prompt_blocks: int, deadline_s: float, *, for_pull: bool = False
    ) -> OutgoingTransfer:
        """Starts to connect and open in the background. Event loop. for_pull: the target asked for cached blocks.

        The caller has verified the target's signature.
        """
        limits, block_bytes = self.write_limits, self.memory.block_bytes
        machine = SenderMachine(
            target,
            max_write_blocks=max(1, limits.max_bytes // block_bytes),
            first_write_blocks=max(1, limits.first_bytes // block_bytes),
            deadline=self.clock() + deadline_s,
            commit_ahead=limits.max_in_flight,
        )
        transfer = OutgoingTransfer(self, target, machine, request_id, num_prompt_blocks, for_pull)
        self.thread.submit(lambda: self._add(transfer))

        async def connect() -> None:
            try:
                connection = await self.connector.connect(
                    target.address, target.pod, deadline_s, target.transfer_id.generation
                )
            except BatonError as e:
                self.thread.submit(partial(self.fail, transfer, e))
            else:
                self.thread.submit(lambda: self._connected(transfer, connection))

        if target.fingerprint == self.fingerprint():
            self.rpc.run_on_loop(connect)
        return transfer

    @property
    def num_open(self) -> int:
        """Transfers that are not over."""
        return len(self._table)

    @property
    def poll_fast(self) -> bool:
        """A commit is under way: its call may be due again. On some transports notifications leave by polls only."""
        return any(transfer.machine.state is SenderState.COMMITTING for transfer in self._table.values())

    @property
    def poll_hot(self) -> bool:
        """A commit was sent less than HOT_POLL_LIMIT_S ago."""
        since = self.clock() - HOT_POLL_LIMIT_S
        return any(t.machine.state is SenderState.COMMITTING and t.committed_at > since for t in self._table.values())

    def post_writes(self) -> bool:
        """Posts at most one write of each transfer. Returns whether it posted any."""
        posted = False
        for transfer in list(self._table.values()):
            connection = transfer.connection
            if connection is None or connection.in_flight >= self.write_limits.max_in_flight:
                continue
            write = transfer.machine.next_write()
            if write is not None:
                posted = True
                self._post(transfer, connection, write)
                self._apply(transfer, transfer.machine.posted())
        return posted

    def drain(self, pod: str, transfer_id: TransferId) -> Future[bool]:
        """Ends this transfer, because the receiver `pod` gave it up.

        The future completes once no write of the transfer is or will be in flight. Its result says whether every write
        succeeded.
        """
        answer: Future[bool] = Future()
        transfer = self._table.get((pod, transfer_id))
        if transfer is None:
            clean = self._over.get((pod, transfer_id), False)
            self._remember((pod, transfer_id), clean)
            answer.set_result(clean)
        else:
            transfer.drains.append(answer)
            self.fail(transfer, TransferFailed(f"{pod} gave the transfer up"))
        return answer

    def signature_of(self, peer: str, transfer_id: TransferId) -> bytes | None:
        """Returns the signature of the KV target of a transfer to the agent `peer`; None for an unknown transfer."""
        for (_, known), transfer in self._table.items():
            if known == transfer_id and transfer.connection is not None and transfer.connection.agent == peer:
                return transfer.target.signature
        return None

    def on_committed(self, peer: str, message: CommittedNotification) -> None:
        """Called when the receiver acknowledged a commit. Ignored if the answer to the call ended the transfer."""
        for transfer in list(self._table.values()):
            connection = transfer.connection
            if transfer.target.transfer_id != message.transfer_id or connection is None:
                continue
            if connection.agent == peer and transfer.committed_at:
                connection.missed_acks = 0
                transfer.unacknowledged_commit, transfer.awaited_s = None, message.awaited_us / 1e6
                self._apply(transfer, transfer.machine.committed(self.clock()))

    def tick(self, now: float) -> None:
        self._silence.look(now)
        for transfer in list(self._table.values()):
            connection, machine = transfer.connection, transfer.machine
            self._apply(transfer, machine.tick(now))
            if connection is not None and connection.process_ended:
                self._apply(transfer, machine.peer_ended(now))
            elif connection is not None and not machine.ended:
                self._fail_if_silent(transfer, connection, now)
            overdue = now >= transfer.committed_at + COMMIT_NOTIFICATION_WAIT_S
            if transfer.unacknowledged_commit is not None and overdue and not transfer.machine.ended:
                self._on_missed_ack(transfer, transfer.unacknowledged_commit, now)

    def _fail_if_silent(self, transfer: OutgoingTransfer, connection: PeerConnection, now: float) -> None:
        """Fails a transfer whose posted writes do not end, or which a broken connection will never let post one."""
        stuck = connection.broken and connection.in_flight >= self.write_limits.max_in_flight
        why = self._silence.trouble(connection, transfer.posted_at, now) if transfer.machine.num_posted else ""
        if stuck or why:
            connection.broken = True
            why = why or f"the connection to {connection.pod} broke"
            self._apply(transfer, transfer.machine.fail(TransferFailed(why), now))

    def close(self, error: BatonError) -> None:
        """Fails every transfer with `error`, because this pod ends."""
        for transfer in list(self._table.values()):
            self.fail(transfer, error)

    def on_push(self, transfer: OutgoingTransfer, first: int, blocks: tuple[int, ...], pin: PinnedBlocks) -> None:
        self._pushes += 1
        transfer.pins[self._pushes] = pin
        if self.with_checksums and not transfer.machine.ended:  # taken now: a change before the write is damage too
            wanted = range(len(transfer.target.blocks))
            pushed = {i: b for i, b in enumerate(blocks, first) if i - transfer.target.first_block in wanted}
            transfer.checksums |= zip(pushed, self.thread.backend.checksums(list(pushed.values())), strict=True)
        self._apply(transfer, transfer.machine.push(self._pushes, first, blocks, self.clock()))

    def on_finish(self, transfer: OutgoingTransfer, commit: Commit, delivered: int, now: float) -> None:
        transfer.delivered_before_finish, transfer.finished_at = delivered, now
        transfer.noticed_at = self.clock()
        self._apply(transfer, transfer.machine.finish(commit, transfer.noticed_at))

    def fail(self, transfer: OutgoingTransfer, error: BatonError) -> None:
        self._apply(transfer, transfer.machine.fail(error, self.clock()))

    def _add(self, transfer: OutgoingTransfer) -> None:
        target, key, num_blocks = transfer.target, transfer.key, transfer.num_prompt_blocks
        first = target.first_block
        error: BatonError | None = None
        if key in self._over or key in self._table:
            error = TransferFailed(f"transfer {target.transfer_id} was given up or used before")
        else:
            self._table[key] = transfer
        if target.fingerprint != self.fingerprint():
            error = LayoutMismatch(f"the KV layout of {target.pod} has another fingerprint", field="fingerprint")
        elif target.blocks and first + len(target.blocks) != num_blocks:
            wrong = f"the target has {len(target.blocks)} blocks from block {first} on, the prompt has {num_blocks}"
            error = InvalidRequest(wrong, field="target.blocks")
        if error is not None:
            self.fail(transfer, error)

    def _connected(self, transfer: OutgoingTransfer, connection: PeerConnection) -> None:
        transfer.connection = connection
        if not all(map(connection.takes, transfer.target.blocks)):
            self.fail(transfer, InvalidRequest("the target has a block outside the pool", field="target.blocks"))
        elif connection.broken:
            self.fail(transfer, TransferFailed(f"the connection to {connection.pod} broke"))
        else:
            self._apply(transfer, transfer.machine.connected(self.clock()))

    def _post(self, transfer: OutgoingTransfer, connection: PeerConnection, write: BlockWrite) -> None:
        written = RangeWritten(transfer.target.transfer_id, write.first, len(write.local))
        pair = self.pairs.get(connection.pod)

        def ended(error: str | None) -> None:
            connection.in_flight -= 1
            moved = len(write.local) if error is None else 0
            pair.end(moved, moved * self.memory.counted_bytes, pulled=transfer.for_pull)
            self.sent_blocks += moved
            if error is not None:
                connection.broken = True
            transfer.written_at = now = self.clock()
            if error is None:
                connection.block_at = now
            self._apply(transfer, transfer.machine.write_ended(write.number, error, transfer.written_at))

        connection.in_flight += 1
        pair.begin()
        notification = written.pack(transfer.target.signature)
        self.thread.write(connection.agent, write.local, write.remote, notification, ended)
        transfer.posted_at = self.clock()

    def _apply(self, transfer: OutgoingTransfer, actions: Sequence[SenderAction]) -> None:
        machine, target = transfer.machine, transfer.target
        for action in actions:
            match action:
                case SendOpen():
                    call = partial(self.rpc.open, target, transfer.request_id, self._needs_target_polls(transfer))
                    self._call(transfer, call, machine.opened)
                case SendCommit(commit):
                    sums = tuple(transfer.checksums[block] for block in sorted(transfer.checksums))
                    self._commit(transfer, replace(commit, checksums=sums))
                case RenotifyRanges():
                    everything = RangeWritten(target.transfer_id, target.first_block, len(target.blocks))
                    connection = transfer.connection
                    if (
                        connection is not None
                        and not connection.broken
                        and self._notify(connection, transfer, everything)
                    ):
                        _log.info("notified %s of transfer %s again", target.pod, target.transfer_id)
                case ReleasePush(push):
                    release_and_log_errors(transfer.pins.pop(push))
                case BlocksDelivered(blocks):
                    transfer.delivered_blocks = blocks
                case SendDone():
                    self.sent_transfers += 1
                    self._forget(transfer, clean=True)
                    report, pair = self._report(transfer), self.pairs.get(target.pod)
                    if transfer.for_pull:
                        pair.pulls += 1
                    else:
                        pair.transfers += 1
                        pair.exposed_s += report.exposed_s
                    transfer.outcome.set_result(report)
                case SendFailed(error):
                    if not isinstance(error, Cancelled):
                        self.failed_transfers += 1
                        self.pairs.get(target.pod).failures += 1
                    transfer.outcome.set_exception(error)
                case WritesStopped(clean):
                    self._forget(transfer, clean=clean)

    def _commit(self, transfer: OutgoingTransfer, commit: Commit) -> None:
        """Commits by notification where the receiver polls often, else by call, which takes both pods' event loops."""
        connection, first, now = transfer.connection, not transfer.committed_at, self.clock()
        assert connection is not None, "a commit without a connection"
        transfer.committed_at = transfer.committed_at or now
        use_notification = (
            first
            and self.commit_notifications
            and connection.accepts_commit_notifications
            and now >= connection.notifications_resume_at
            and self._needs_target_polls(transfer)
            and not commit.checksums
        )
        notification = CommitNotification(transfer.target.transfer_id, commit)
        if use_notification and self._notify(connection, transfer, notification):
            transfer.unacknowledged_commit = commit
        else:
            self._call_commit(transfer, commit)

    def _on_missed_ack(self, transfer: OutgoingTransfer, commit: Commit, now: float) -> None:
        """Calls Commit: the notification was not acknowledged in time. A peer that misses several gets only calls."""
        connection, transfer.unacknowledged_commit = transfer.connection, None
        assert connection is not None, "a commit notification without a connection"
        connection.missed_acks += 1
        if connection.missed_acks >= MAX_MISSED_ACKS:
            connection.missed_acks, connection.notifications_resume_at = 0, now + NOTIFICATION_PAUSE_S
            unanswered = "%s does not answer commit notifications: it gets calls for %.0f s"
            _log.info(unanswered, connection.pod, NOTIFICATION_PAUSE_S)
        self._call_commit(transfer, commit)

    def _call_commit(self, transfer: OutgoingTransfer, commit: Commit) -> None:
        async def call(timeout_s: float) -> None:
            transfer.awaited_s = await self.rpc.commit(transfer.target, commit, timeout_s)

        self._call(transfer, call, transfer.machine.committed)

    def _needs_target_polls(self, transfer: OutgoingTransfer) -> bool:
        """Returns whether a write ends only while the target polls. Assumed of unknown transports.

        From GPU to GPU the bytes move by themselves, but UCX reports the write as done when the target's polls have
        answered.
        """
        if self.memory.kind == "VRAM":
            return True
        transport = "" if transfer.connection is None else transfer.connection.transport
        return transport in TCP_OR_UNKNOWN or transport.startswith(STAGED)

    def _notify(
        self, connection: PeerConnection, transfer: OutgoingTransfer, notification: TransferNotification
    ) -> bool:
        """Sends a notification. Returns whether the backend accepted it."""
        try:
            self.thread.backend.notify(connection.agent, notification.pack(transfer.target.signature))
        except TransferFailed as e:
            _log.warning("%s cannot be notified: %s", connection.pod, e)
            return False
        return True

    def _call(self, transfer: OutgoingTransfer, call: _Call, acknowledged: Callable[[float], _Actions]) -> None:
        """Makes a call on the event loop and reports its end to the machine."""

        async def work() -> None:
            try:
                await call(min(CALL_S, transfer.machine.deadline - self.clock()))
            except BatonError as e:
                self.thread.submit(partial(self._call_failed, transfer, e))
            else:
                self.thread.submit(lambda: self._apply(transfer, acknowledged(self.clock())))

        self.rpc.run_on_loop(work)

    def _call_failed(self, transfer: OutgoingTransfer, error: BatonError) -> None:
        if isinstance(error, UnknownTransfer) and error.field == "pod" and transfer.connection is not None:
            transfer.connection.broken = True  # the peer has forgotten this pod: the next transfer shakes hands again
        self._apply(transfer, transfer.machine.call_failed(error, self.clock()))

    def _report(self, transfer: OutgoingTransfer) -> TransferReport:
        blocks = len(transfer.target.blocks)

        def after(at: float) -> float:
            return max(0.0, at - transfer.finished_at)

        return TransferReport(
            blocks=blocks,
            bytes=blocks * self.memory.counted_bytes,
            delivered_before_finish=transfer.delivered_before_finish,
            exposed_s=after(self.clock()),
            transport=transfer.connection.transport if transfer.connection is not None else "",
            parts=ExposedParts(
                noticed_s=after(transfer.noticed_at),
                posted_s=after(transfer.posted_at),
                written_s=after(transfer.written_at),
                committed_s=after(transfer.committed_at),
                awaited_s=transfer.awaited_s,
            ),
        )

    def _forget(self, transfer: OutgoingTransfer, *, clean: bool) -> None:
        if self._table.get(transfer.key) is transfer:
            del self._table[transfer.key]
            self._remember(transfer.key, clean)
        for answer in transfer.drains:
            if not answer.cancelled():
                answer.set_result(clean)

    def _remember(self, key: tuple[str, TransferId], clean: bool) -> None:
        self._over[key] = clean
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)
