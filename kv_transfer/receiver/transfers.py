"""Transfers into this pod: the table of receiver machines, and the execution of their actions.

    pull: add to the table -> Pull call -> Open, writes, Commit by the holder -> complete

Every method but new_transfer_id and pull runs on the transfer thread. A transfer leaves the table when it is READY or
CLOSED. The receiver remembers a bounded number of committed transfers, to answer a repeated commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from common.errors import BatonError, BlockDamaged, TransferFailed, Unavailable, UnknownTransfer
from common.types import KvTarget, TransferId
from kv_transfer.memory import PinnedBlocks, release_and_log_errors
from kv_transfer.messages import (
    Commit,
    CommitNotification,
    CommittedNotification,
    DroppedMessages,
    PullResult,
    RangeWritten,
    WantedBlocks,
    Writer,
)
from kv_transfer.peers.process_watch import ProcessWatch
from kv_transfer.peers.rpc_client import PeerRpcClient
from kv_transfer.receiver.state_machine import (
    CheckChecksums,
    FreeBlocks,
    ReceiveFailed,
    ReceiverAction,
    ReceiverMachine,
    ReceiverState,
    RequestDrain,
    TransferReady,
)
from kv_transfer.transfer_thread import HOT_POLL_LIMIT_S, TransferThread

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

DRAIN_CALL_S = 2.0
COMMIT_WAIT_S = 0.05  #: A commit waits this long for the last ranges, then the answer is Unavailable ("ask again").
_REMEMBERED = 65536
_TICK_S = 0.01
_PROCESS_CHECK_S = 0.1


@dataclass(slots=True, eq=False)
class IncomingTransfer:
    """Entry of the table."""

    machine: ReceiverMachine
    request_id: str
    target: KvTarget  #: The signed blocks; the machine's blocks may be fewer.
    pin: PinnedBlocks
    on_ready: Callable[[Commit], None]
    on_failed: Callable[[BatonError], None]
    #: Commits without an answer: the time limit, and the answer of the call (None for a commit notification).
    waiting: list[tuple[float, Future[float] | None]] = field(default_factory=list)
    commit_at: float = 0.0  #: Time of the first commit; 0 before.


@dataclass(eq=False)
class TransferReceiver:
    """All incoming transfers of this pod."""

    thread: TransferThread
    rpc: PeerRpcClient
    clock: Callable[[], float]
    dropped: DroppedMessages

    def __post_init__(self) -> None:
        self.received_transfers = self.damaged_transfers = 0
        self._notification_peers: set[str] = set()  #: Agents of writers that shook hands. The servicer forgets old ones
        self._numbers = itertools.count(1)
        self._table: dict[TransferId, IncomingTransfer] = {}
        self._committed: OrderedDict[TransferId, int] = OrderedDict()  #: Committed transfer -> the writer's generation.
        self.watches: dict[str, ProcessWatch | None] = {}  #: By agent; None for a process that cannot be watched.
        self._next_tick = 0.0
        self._next_process_check = 0.0

    def new_transfer_id(self, generation: int) -> TransferId:
        """Returns a transfer id that was never used. Any thread."""
        return TransferId(generation, next(self._numbers))  # next() of a count is atomic

    def add(self, entry: IncomingTransfer) -> None:
        """Adds a transfer that waits for its writer, and owns the pin. See TransferNode.expect_transfer."""
        self._table[entry.machine.transfer_id] = entry

    def pull(self, address: str, pod: str, target: KvTarget, wanted: WantedBlocks) -> asyncio.Task[PullResult]:
        """Starts a task that asks `pod` at `address` to write the blocks to `target`. Event loop.

        The task raises BatonError. When this method returns, the table owns the pin, and the end of the task releases
        the transfer. The coroutine owns nothing, because a task that is cancelled before its first step never runs its
        `finally` blocks.
        """
        transfer_id, first, count = target.transfer_id, target.first_block, len(target.blocks)
        over: Future[Commit] = Future()
        deadline = self.clock() + wanted.timeout_s
        machine = ReceiverMachine(transfer_id, first_block=first, num_blocks=count, deadline=deadline)
        ends = (over.set_result, over.set_exception)
        self.thread.submit(partial(self.add, IncomingTransfer(machine, wanted.request_id, target, wanted.pin, *ends)))

        async def ask_holder() -> PullResult:
            answer = await self.rpc.pull(address, pod, target, wanted)
            if answer.blocks:
                if answer.blocks < len(wanted.blocks):
                    self.thread.submit(partial(self.update, transfer_id, lambda m, _: m.shrink_to(answer.blocks)))
                await asyncio.shield(asyncio.wrap_future(over))
            return PullResult(answer.blocks, answer.reason, answer.gb_s, answer.held)

        task = asyncio.get_running_loop().create_task(ask_holder())
        task.add_done_callback(lambda _: self.thread.submit(partial(self.release, transfer_id)))
        return task

    @property
    def num_open(self) -> int:
        """Transfers that expect messages."""
        return len(self._table)

    @property
    def poll_fast(self) -> bool:
        """Bytes are arriving that move only while this side polls, or the notification of a range is overdue."""
        return any(
            ((writer := entry.machine.writer) is not None and writer.polled) or entry.machine.commit_waits_for_ranges
            for entry in self._table.values()
        )

    @property
    def poll_hot(self) -> bool:
        """A commit arrived before the last bytes, less than HOT_POLL_LIMIT_S ago."""
        since = self.clock() - HOT_POLL_LIMIT_S
        return any(entry.machine.commit_waits_for_ranges and entry.commit_at > since for entry in self._table.values())

    @property
    def quarantined_blocks(self) -> int:
        return sum(entry.machine.num_quarantined for entry in list(self._table.values()))

    def watch(self, agent: str, watch: ProcessWatch | None) -> None:
        """Sets how the end of this writer's process is detected; None: not at all. The first watch is kept."""
        if self.watches.setdefault(agent, watch) is not watch and watch is not None:
            watch.close()

    def add_peer(self, agent: str, metadata: bytes) -> bool:
        """Accepts commit notifications of this writer and acknowledges them. Returns whether that works.

        A repeated handshake replaces the peer's metadata, because the old connection may be broken in this direction
        too.
        """
        self.remove_peer(agent)
        try:
            self.thread.backend.add_peer(agent, metadata)
        except TransferFailed as e:
            _log.warning("%s cannot be notified, its commits are answered by calls: %s", agent, e.message)
            return False
        self._notification_peers.add(agent)
        return True

    def accept_staged(self, agent: str, metadata: bytes) -> bytes:
        """Accepts writes of this peer through host memory. Returns this pod's staging metadata; empty if it refuses."""
        try:
            staging = self.thread.backend.staging_metadata()
            if staging:
                self.thread.backend.accept_staged(agent, metadata)
        except TransferFailed as e:
            _log.warning("%s cannot write through host memory: %s", agent, e.message)
            return b""
        return staging

    def remove_peer(self, agent: str) -> None:
        """Sends no more notifications to this writer."""
        if agent in self._notification_peers:
            self._notification_peers.remove(agent)
            self.thread.backend.remove_peer(agent)

    def forget_writer(self, agent: str) -> None:
        """Forgets a writer that ended or has a successor. Its process stays watched while it has an open transfer."""
        self.remove_peer(agent)
        watch = self.watches.get(agent)
        if watch is None or agent not in self._in_use():
            self.watches.pop(agent, None)
            if watch is not None:
                watch.close()

    def _in_use(self) -> set[str]:
        """Returns the agents of writers of open transfers."""
        return {writer.agent for entry in self._table.values() if (writer := entry.machine.writer) is not None}

    def open_transfer(self, transfer_id: TransferId, request_id: str, signature: bytes, writer: Writer) -> None:
        """Raises UnknownTransfer if the writer may not write. signature: of the KV target."""
        entry = self._table.get(transfer_id)
        if entry is None or entry.request_id != request_id:
            self.dropped.count("open_unknown")
            raise UnknownTransfer(f"transfer {transfer_id} of request {request_id} is not expected by this pod")
        self._require_signature(entry, signature)
        entry.machine.open(writer, self.clock())

    def _require_signature(self, entry: IncomingTransfer, signature: bytes) -> None:
        if not hmac.compare_digest(entry.target.signature, signature):
            self.dropped.count("wrong_capability")
            unproven = f"the writer of transfer {entry.machine.transfer_id} does not know its KV target's signature"
            raise UnknownTransfer(unproven)

    def signature_of(self, _peer: str, transfer_id: TransferId) -> bytes | None:
        """Returns the signature of a transfer's KV target; None for an unknown transfer."""
        entry = self._table.get(transfer_id)
        return None if entry is None else entry.target.signature

    def commit(
        self, transfer_id: TransferId, generation: int, signature: bytes, commit: Commit, answer: Future[float]
    ) -> None:
        """Handles a Commit call. Idempotent. The answer is the seconds that the first commit waited for all ranges.

        Errors: Unavailable if a range takes longer than COMMIT_WAIT_S; UnknownTransfer or TransferFailed if the KV will
        not be used.
        """
        entry = self._table.get(transfer_id)
        if entry is None and self._committed.get(transfer_id) == generation:
            _resolve(answer, 0.0)
            return
        try:
            if entry is None:
                self.dropped.count("commit_unknown")
                raise UnknownTransfer(f"transfer {transfer_id} has ended")
            self._require_signature(entry, signature)
            actions = entry.machine.commit(generation, commit, self.clock())
        except UnknownTransfer as error:
            _resolve(answer, error)
        else:
            self._wait(entry, answer)
            self._apply(entry, actions)

    def _wait(self, entry: IncomingTransfer, answer: Future[float] | None) -> None:
        now = self.clock()
        entry.commit_at = entry.commit_at or now
        entry.waiting.append((now + COMMIT_WAIT_S, answer))

    def on_notification(self, peer: str, message: RangeWritten | CommitNotification) -> None:
        """Handles a range or a commit that arrived, with a right mac. One that does not fit is dropped and counted.

        A commit notification that fails gets no answer: the call that follows gets the error.
        """
        entry = self._table.get(message.transfer_id)
        if entry is None:
            self.dropped.count("notification_late")
            return
        machine = entry.machine
        actions: list[ReceiverAction] | None = None
        if isinstance(message, RangeWritten):
            actions = machine.range_written(peer, message.first, message.count, self.clock())
        elif machine.writer is not None and machine.writer.agent == peer:
            with contextlib.suppress(UnknownTransfer):
                actions = machine.commit(machine.writer.generation, message.commit, self.clock())
                self._wait(entry, None)
        if actions is None:
            self.dropped.count("notification_misfit")
        else:
            self._apply(entry, actions)

    def update(
        self, transfer_id: TransferId, event: Callable[[ReceiverMachine, float], Sequence[ReceiverAction]]
    ) -> None:
        """Reports an event to the machine of a transfer, with the time. Ignores unknown ids."""
        entry = self._table.get(transfer_id)
        if entry is not None:
            self._apply(entry, event(entry.machine, self.clock()))

    def release(self, transfer_id: TransferId) -> None:
        """Called when the request has ended on this pod. No effect after READY."""
        self.update(transfer_id, ReceiverMachine.release)

    def _request_drain(self, transfer_id: TransferId, writer: Writer) -> None:
        """Calls Drain on the writer, and reports the outcome to the machine."""

        async def ask() -> None:
            try:
                answer = await self.rpc.drain(writer, transfer_id, DRAIN_CALL_S)
            except BatonError as e:
                _log.info("%s did not answer Drain of transfer %s: %s", writer.pod, transfer_id, e)
                answer = None
            drained = answer is not None and answer.generation == writer.generation
            replaced = not drained and await self.rpc.is_replaced(writer, DRAIN_CALL_S)

            def report(machine: ReceiverMachine, now: float) -> list[ReceiverAction]:
                # A newer generation at the writer's address proves the writer's end. A watched process is not judged by
                # that: its watch sees the real end.
                if replaced and self.watches.get(writer.agent) is None:
                    return machine.writer_ended(now)
                if answer is None:
                    return machine.drain_failed(now)
                return machine.drained(answer.generation, answer.clean, now)

            self.thread.submit(partial(self.update, transfer_id, report))

        self.rpc.run_on_loop(ask)

    def tick(self, now: float) -> None:
        if now < self._next_tick:
            return
        self._next_tick = now + _TICK_S
        for entry in list(self._table.values()):
            self._apply(entry, entry.machine.tick(now))
            if entry.waiting and entry.waiting[0][0] <= now:
                missing, transfer_id = len(entry.machine.missing), entry.machine.transfer_id
                self._answer_all(entry, Unavailable(f"{missing} blocks of transfer {transfer_id} have not arrived yet"))
        if now < self._next_process_check:
            return
        self._next_process_check = now + _PROCESS_CHECK_S
        ended = {agent for agent, watch in self.watches.items() if watch is not None and watch.ended()}
        for entry in list(self._table.values()):
            if entry.machine.writer is not None and entry.machine.writer.agent in ended:
                self._apply(entry, entry.machine.writer_ended(now))
        for agent in ended - self._in_use():
            self.forget_writer(agent)

    def close(self) -> None:
        """Fails every transfer: this pod ends. Blocks that may be written stay pinned until the process ends."""
        for entry in list(self._table.values()):
            self._apply(entry, entry.machine.release(self.clock()))
        for watch in self.watches.values():
            if watch is not None:
                watch.close()
        self.watches.clear()

    def _apply(self, entry: IncomingTransfer, actions: Sequence[ReceiverAction]) -> None:
        machine = entry.machine
        for action in actions:
            match action:
                case FreeBlocks(blocks):
                    release_and_log_errors(
                        entry.pin, [entry.target.blocks[block - machine.first_block] for block in blocks]
                    )
                case CheckChecksums(commit):
                    error = self._mismatch(entry, commit)
                    self.damaged_transfers += error is not None
                    self._apply(entry, machine.checked(error, self.clock()))
                case TransferReady(commit):
                    assert machine.writer is not None, "ready without a writer"
                    self._committed[machine.transfer_id] = machine.writer.generation
                    if len(self._committed) > _REMEMBERED:
                        self._committed.popitem(last=False)
                    del self._table[machine.transfer_id]
                    self.received_transfers += 1
                    self._answer_all(entry)  # before on_ready, which takes a while: the writer waits
                    _notify(entry.on_ready, commit)
                case ReceiveFailed(error):
                    over = f"transfer {machine.transfer_id} has ended: {error.message}"
                    damaged = isinstance(error, BlockDamaged)
                    self._answer_all(entry, TransferFailed(over) if damaged else UnknownTransfer(over))
                    _notify(entry.on_failed, error)
                case RequestDrain(writer):
                    self._request_drain(machine.transfer_id, writer)
        if machine.state is ReceiverState.CLOSED:
            self._table.pop(machine.transfer_id, None)

    def _answer_all(self, entry: IncomingTransfer, error: BatonError | None = None) -> None:
        """Answers every waiting commit. Commit notifications get no errors: the calls that follow get them."""
        waiting, entry.waiting = [answer for _, answer in entry.waiting], []
        awaited_s = self.clock() - entry.commit_at
        if error is None and None in waiting:
            self._notify_committed(entry, awaited_s)
        for answer in filter(None, waiting):
            _resolve(answer, awaited_s if error is None else error)

    def _notify_committed(self, entry: IncomingTransfer, awaited_s: float) -> None:
        message = CommittedNotification(entry.machine.transfer_id, int(awaited_s * 1e6))
        writer = entry.machine.writer
        assert writer is not None, "a commit without a writer"
        if writer.agent not in self._notification_peers:
            return  # the peer's call follows
        try:
            self.thread.backend.notify(writer.agent, message.pack(entry.target.signature))
        except TransferFailed as e:
            _log.warning("%s cannot be notified: %s", writer.pod, e.message)

    def _mismatch(self, entry: IncomingTransfer, commit: Commit) -> str | None:
        blocks = entry.target.blocks[: entry.machine.num_blocks]
        if len(commit.checksums) != len(blocks):
            return f"{len(commit.checksums)} checksums for {len(blocks)} blocks"
        arrived = self.thread.backend.checksums(blocks)
        for index, (found, expected) in enumerate(zip(arrived, commit.checksums, strict=True)):
            if found != expected:
                return f"block {entry.machine.first_block + index} arrived damaged"
        return None


def _resolve(answer: Future[float], outcome: float | BatonError) -> None:
    """Completes a future unless its caller has left."""
    if answer.set_running_or_notify_cancel():
        answer.set_exception(outcome) if isinstance(outcome, BatonError) else answer.set_result(outcome)


def _notify(callback: Callable[[_T], None], value: _T) -> None:
    """Calls a callback. Its failure must not end other transfers."""
    try:
        callback(value)
    except Exception:
        _log.exception("a transfer's callback failed")
