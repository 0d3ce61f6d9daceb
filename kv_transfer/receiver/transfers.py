"""Transfers into this pod: the table of receiver machines, and the execution of their actions.

    pull: add to the table -> Pull call -> Open, writes, Commit by the holder -> complete

Every method but new_transfer_id and pull runs on the transfer thread. A transfer leaves the table when it is READY or
CLOSED. The receiver remembers a bounded number of committed transfers, to answer a repeated commit.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from common.errors import BatonError, BlockDamaged, TransferFailed, Unavailable, UnknownTransfer
from common.types import KvTarget, TransferId
from kv_transfer.memory import PinnedBlocks, PoolMemory, release_and_log_errors
from kv_transfer.messages import Commit, DroppedMessages, PullResult, WantedBlocks, Writer
from kv_transfer.notifications import CommitNotification, CommittedNotification, RangeWritten
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
#: Seconds that a commit waits for the last ranges before it is answered with Unavailable ("ask again").
COMMIT_WAIT_S = 0.05
_REMEMBERED = 65536
_TICK_S = 0.01
_PROCESS_CHECK_S = 0.1


@dataclass(frozen=True, slots=True)
class _WaitingCommit:
    """A commit without an answer."""

    answer: Future[float] | None  # The call's answer; None for a commit notification
    until: float


@dataclass(slots=True, eq=False)
class _IncomingTransfer:
    """Entry of the table."""

    machine: ReceiverMachine
    request_id: str
    first_block: int
    blocks: tuple[int, ...]  # Physical blocks
    pin: PinnedBlocks
    on_ready: Callable[[Commit], None]
    on_failed: Callable[[BatonError], None]
    waiting: list[_WaitingCommit] = field(default_factory=list)
    asked_at: float = 0.0  # The first commit arrived; 0 before


@dataclass(eq=False)
class TransferReceiver:
    """All incoming transfers of this pod."""

    thread: TransferThread
    rpc: PeerRpcClient
    memory: PoolMemory
    clock: Callable[[], float]
    dropped: DroppedMessages

    def __post_init__(self) -> None:
        self.received_transfers = self.damaged_transfers = 0
        self._notification_peers: set[str] = set()  # Agents of writers that shook hands. The servicer forgets old ones.
        self._numbers = itertools.count(1)
        self._table: dict[TransferId, _IncomingTransfer] = {}
        self._committed: OrderedDict[TransferId, int] = OrderedDict()  # Committed transfer -> the writer's generation
        self._watches: dict[str, ProcessWatch | None] = {}  # By agent; None for a process that cannot be watched
        self._next_tick = 0.0
        self._next_process_check = 0.0

    def new_transfer_id(self, generation: int) -> TransferId:
        """Returns a transfer id that was never used. Any thread."""
        return TransferId(generation, next(self._numbers))  # next() of a count is atomic

    def add(
        self,
        transfer_id: TransferId,
        request_id: str,
        first_block: int,
        blocks: Sequence[int],
        pin: PinnedBlocks,
        deadline: float,
        on_ready: Callable[[Commit], None],
        on_failed: Callable[[BatonError], None],
    ) -> None:
        """Adds a transfer that waits for its writer, and owns the pin. See TransferNode.expect_transfer."""
        machine = ReceiverMachine(transfer_id, first_block=first_block, num_blocks=len(blocks), deadline=deadline)
        self._table[transfer_id] = _IncomingTransfer(
            machine, request_id, first_block, tuple(blocks), pin, on_ready, on_failed
        )

    def pull(self, address: str, target: KvTarget, wanted: WantedBlocks) -> asyncio.Task[PullResult]:
        """Starts a task that asks the pod at `address` to write the blocks to `target`. Event loop.

        The task raises BatonError. When this method returns, the table owns the pin, and the end of the task releases
        the transfer. The coroutine owns nothing, because a task that is cancelled before its first step never runs its
        `finally` blocks.
        """
        transfer_id, deadline = target.transfer_id, self.clock() + wanted.timeout_s
        over: Future[None] = Future()
        self.thread.submit(
            lambda: self.add(
                transfer_id,
                wanted.request_id,
                wanted.first_block,
                wanted.blocks,
                wanted.pin,
                deadline,
                lambda _: over.set_result(None),
                over.set_exception,
            )
        )

        async def ask_holder() -> PullResult:
            answer = await self.rpc.pull(address, target, wanted)
            if answer.blocks:
                if answer.blocks < len(wanted.blocks):
                    self.thread.submit(partial(self.update, transfer_id, lambda m, _: m.shrink_to(answer.blocks)))
                await asyncio.shield(asyncio.wrap_future(over))
            return PullResult(answer.blocks, answer.reason, answer.gb_s)

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
        return any(entry.machine.commit_waits_for_ranges and entry.asked_at > since for entry in self._table.values())

    @property
    def quarantined_blocks(self) -> int:
        return sum(entry.machine.num_quarantined for entry in list(self._table.values()))

    def is_watched(self, agent: str) -> bool:
        """Returns whether watch() was called for this writer."""
        return agent in self._watches

    def watch(self, agent: str, watch: ProcessWatch | None) -> None:
        """Sets how the end of this writer's process is detected; None: not at all. The first watch is kept."""
        if agent in self._watches:
            if watch is not None:
                watch.close()
            return
        self._watches[agent] = watch

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

    def remove_peer(self, agent: str) -> None:
        """Sends no more notifications to this writer."""
        if agent in self._notification_peers:
            self._notification_peers.remove(agent)
            self.thread.backend.remove_peer(agent)

    def forget_writer(self, agent: str) -> None:
        """Forgets a writer that ended or has a successor. Its process stays watched while it has an open transfer."""
        self.remove_peer(agent)
        watch = self._watches.get(agent)
        if watch is None or agent not in self._in_use():
            self._watches.pop(agent, None)
            if watch is not None:
                watch.close()

    def _in_use(self) -> set[str]:
        """Returns the agents of writers of open transfers."""
        return {entry.machine.writer.agent for entry in self._table.values() if entry.machine.writer is not None}

    def open_transfer(self, transfer_id: TransferId, request_id: str, writer: Writer) -> None:
        """Raises UnknownTransfer if the writer may not write."""
        entry = self._table.get(transfer_id)
        if entry is None or entry.request_id != request_id:
            self.dropped.count("open_unknown")
            raise UnknownTransfer(f"transfer {transfer_id} of request {request_id} is not expected by this pod")
        entry.machine.open(writer, self.clock())

    def commit(self, transfer_id: TransferId, generation: int, commit: Commit, answer: Future[float]) -> None:
        """Handles a Commit call. Idempotent.

        The answer comes once every range arrived: the seconds that the first commit waited for them. Errors:
        Unavailable if a range takes longer than COMMIT_WAIT_S; UnknownTransfer or TransferFailed if the KV will not be
        used.
        """
        entry = self._table.get(transfer_id)
        if entry is None:
            if self._committed.get(transfer_id) == generation:
                _resolve(answer, 0.0)
            else:
                self.dropped.count("commit_unknown")
                _resolve(answer, UnknownTransfer(f"transfer {transfer_id} has ended"))
            return
        try:
            actions = entry.machine.commit(generation, commit, self.clock())
        except UnknownTransfer as error:
            _resolve(answer, error)
            return
        self._wait(entry, answer)
        self._apply(entry, actions)

    def _wait(self, entry: _IncomingTransfer, answer: Future[float] | None) -> None:
        now = self.clock()
        entry.asked_at = entry.asked_at or now
        entry.waiting.append(_WaitingCommit(answer, now + COMMIT_WAIT_S))

    def on_notification(self, peer: str, message: RangeWritten | CommitNotification) -> None:
        """Handles a range or a commit that arrived. One that does not fit is dropped and counted.

        A commit notification that fails gets no answer: the call that follows gets the error.
        """
        entry = self._table.get(message.transfer_id)
        if entry is None:
            self.dropped.count("notification_late")
            return
        machine = entry.machine
        if isinstance(message, RangeWritten):
            actions = machine.range_written(peer, message.first, message.count, self.clock())
        elif machine.writer is None or machine.writer.agent != peer:
            actions = None
        else:
            try:
                actions = machine.commit(machine.writer.generation, message.commit, self.clock())
            except UnknownTransfer:
                actions = None
            else:
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
        """Handles that the request has ended on this pod. No effect after READY."""
        self.update(transfer_id, ReceiverMachine.release)

    def _request_drain(self, transfer_id: TransferId, writer: Writer) -> None:
        """Calls Drain on the writer, and reports the outcome to the machine."""

        async def ask() -> None:
            try:
                answer = await self.rpc.drain(writer, transfer_id, DRAIN_CALL_S)
            except BatonError as e:
                _log.info("%s did not answer Drain of transfer %s: %s", writer.pod, transfer_id, e)
            else:
                if answer.generation == writer.generation:
                    self.thread.submit(
                        partial(
                            self.update, transfer_id, lambda m, now: m.drained(answer.generation, answer.clean, now)
                        )
                    )
                    return
            replaced = await self.rpc.is_replaced(writer, DRAIN_CALL_S)

            def no_answer(machine: ReceiverMachine, now: float) -> list[ReceiverAction]:
                # A newer generation at the writer's address proves the writer's end, unless the process can be watched.
                proven = replaced and self._watches.get(writer.agent) is None
                return machine.writer_ended(now) if proven else machine.drain_failed(now)

            self.thread.submit(partial(self.update, transfer_id, no_answer))

        self.rpc.run_on_loop(ask)

    def tick(self, now: float) -> None:
        if now < self._next_tick:
            return
        self._next_tick = now + _TICK_S
        for entry in list(self._table.values()):
            self._apply(entry, entry.machine.tick(now))
            if entry.waiting and entry.waiting[0].until <= now:
                missing, transfer_id = entry.machine.num_missing, entry.machine.transfer_id
                self._answer_all(entry, Unavailable(f"{missing} blocks of transfer {transfer_id} have not arrived yet"))
        if now < self._next_process_check:
            return
        self._next_process_check = now + _PROCESS_CHECK_S
        ended = {agent for agent, watch in self._watches.items() if watch is not None and watch.ended()}
        for entry in list(self._table.values()):
            if entry.machine.writer is not None and entry.machine.writer.agent in ended:
                self._apply(entry, entry.machine.writer_ended(now))
        for agent in ended - self._in_use():
            self.forget_writer(agent)

    def close(self) -> None:
        """Fails every transfer: this pod ends. Blocks that may be written stay pinned until the process ends."""
        for entry in list(self._table.values()):
            self._apply(entry, entry.machine.release(self.clock()))
        for watch in self._watches.values():
            if watch is not None:
                watch.close()
        self._watches.clear()

    def _apply(self, entry: _IncomingTransfer, actions: Sequence[ReceiverAction]) -> None:
        machine = entry.machine
        for action in actions:
            match action:
                case FreeBlocks(blocks):
                    release_and_log_errors(entry.pin, [entry.blocks[block - entry.first_block] for block in blocks])
                case CheckChecksums(commit):
                    error = self._mismatch(entry, commit)
                    self.damaged_transfers += error is not None
                    self._apply(entry, machine.checked(error, self.clock()))
                case TransferReady(commit):
                    assert machine.writer is not None, "ready without a writer"
                    self._remember_committed(machine.transfer_id, machine.writer.generation)
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

    def _answer_all(self, entry: _IncomingTransfer, error: BatonError | None = None) -> None:
        """Answers every waiting commit. Commit notifications get no errors: the calls that follow get them."""
        waiting, entry.waiting = entry.waiting, []
        awaited_s = self.clock() - entry.asked_at
        if error is None and any(one.answer is None for one in waiting):
            self._notify_committed(entry, awaited_s)
        for one in waiting:
            if one.answer is not None:
                _resolve(one.answer, awaited_s if error is None else error)

    def _notify_committed(self, entry: _IncomingTransfer, awaited_s: float) -> None:
        writer = entry.machine.writer
        assert writer is not None, "a commit without a writer"
        if writer.agent not in self._notification_peers:
            return  # the peer's call follows
        try:
            self.thread.backend.notify(
                writer.agent, CommittedNotification(entry.machine.transfer_id, int(awaited_s * 1e6)).pack()
            )
        except TransferFailed as e:
            _log.warning("%s cannot be notified: %s", writer.pod, e.message)

    def _mismatch(self, entry: _IncomingTransfer, commit: Commit) -> str | None:
        blocks = entry.blocks[: entry.machine.num_blocks]
        if len(commit.checksums) != len(blocks):
            return f"{len(commit.checksums)} checksums for {len(blocks)} blocks"
        for index, (block, expected) in enumerate(zip(blocks, commit.checksums, strict=True)):
            if zlib.crc32(self.memory.read_block(block)) != expected:
                return f"block {entry.first_block + index} arrived damaged"
        return None

    def _remember_committed(self, transfer_id: TransferId, generation: int) -> None:
        self._committed[transfer_id] = generation
        if len(self._committed) > _REMEMBERED:
            self._committed.popitem(last=False)


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
