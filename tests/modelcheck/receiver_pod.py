"""The decode pod of the model. It receives KV."""

from __future__ import annotations

import math
from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from common.errors import BatonError, UnknownTransfer
from common.pb import transfer_pb2
from common.types import KvTarget
from kv_transfer.messages import Commit, RangeWritten, Writer
from kv_transfer.peers.connection import agent_name
from tests.modelcheck.pods import (
    FINGERPRINT,
    IGNORED,
    MEMORY,
    NOW,
    RECEIVER,
    SENDER,
    SIGNATURE,
    TICK_S,
    Bounds,
    Pod,
    Watch,
    WatchedPin,
    first_token,
    frozen,
    leaks,
    letter,
    stopped_clock,
    transfer_id,
)
from tests.modelcheck.product import Product

HandOff = Literal["reserved", "running", "ended"]


@dataclass(eq=False, slots=True)
class ReceivedRequest:
    """One request on the decode pod."""

    lease: Any
    pin: WatchedPin
    machine: Any
    state: HandOff = "reserved"
    release_due: bool = False  #: The request has ended, and the transfer thread has not heard of it.
    ended: bool = False  #: The transfer has called on_ready or on_failed.
    draining: bool = False  #: A Drain call waits for its answer.


class ReceiverPod(Pod):
    """A decode pod: the real TransferReceiver with its state machines, the check of generations, and a block pool.

    `content` says for each block what the last write put there: request, logical block and the sender's generation.
    None for a block without a writer's pin.
    """

    def __init__(self, product: Product, bounds: Bounds, generation: int) -> None:
        super().__init__(product, bounds, generation)
        self.table = product.TransferReceiver(self.thread, self.calls, stopped_clock, IGNORED)
        self.servicer = product.TransferServicer(
            thread=self.thread,
            incoming=self.table,
            memory=MEMORY,
            dropped=IGNORED,
            clock=stopped_clock,
            **dict.fromkeys(("outgoing", "lend", "pairs", "info", "signer")),
        )
        self.requests: dict[int, ReceivedRequest] = {}
        self.content: list[tuple[int, int, int] | None] = [None] * bounds.blocks
        self.commits: list[tuple[Future[float], int, int]] = []  #: Answer, request, generation of the sender.
        self.newest = 0  #: Newest generation of the sender that shook hands.

    # -- events -------------------------------------------------------------------------------------------------------
    def reserve(self, request: int) -> None:
        lease = self._lease()
        if lease is None:
            return
        count = self.bounds.blocks_per_request
        pin = WatchedPin(self, lease.pin_for_write(0, count))
        of, blocks = transfer_id(request, self.generation), tuple(lease.blocks)
        target = KvTarget(of, RECEIVER, "receiver:1", 0, blocks, FINGERPRINT, signature=SIGNATURE)
        machine = self.product.ReceiverMachine(of, first_block=0, num_blocks=count, deadline=math.inf)
        ends = (partial(self._on_ready, request), partial(self._on_failed, request))
        self.requests[request] = ReceivedRequest(lease, pin, machine)
        self.table.add(self.product.IncomingTransfer(machine, letter(request), target, pin, *ends))
        self.messages.append(("target", request, self.generation, blocks))

    def _on_ready(self, request: int, commit: Commit) -> None:
        received = self.requests[request]
        self._called_back(received, request)
        if received.state != "reserved":
            return
        received.state = "running"
        writer = received.machine.writer.generation
        if commit.first_tokens != (first_token(request, writer),):
            self.faults.append(f"request {letter(request)} is ready with the tokens of another generation")
        for logical, block in enumerate(received.lease.blocks):
            if self.content[block] != (request, logical, writer):
                wanted = f"block {logical} of request {letter(request)}"
                self.faults.append(f"{wanted} is used, but block {block} holds {_describe(self.content[block])}")

    def _on_failed(self, request: int, _error: BatonError) -> None:
        received = self.requests[request]
        self._called_back(received, request)
        if received.state == "reserved":
            received.state = "ended"
            received.lease.finish("failed")

    def _called_back(self, received: ReceivedRequest, request: int) -> None:
        if received.ended:
            self.faults.append(f"the transfer of request {letter(request)} ends twice")
        received.ended = True

    def handshake(self, sender: int) -> None:
        if self.newest > sender:
            return
        known = self.servicer._writers.get(SENDER)
        if known is not None and known.generation < sender:
            self.table.forget_writer(agent_name(known))
        self.newest = sender
        self.servicer._mark_recent(SENDER, _info(sender))
        self.table.add_peer(agent_name(_info(sender)), b"")

    def on_open(self, request: int, receiver: int, sender: int, watch: bool) -> None:
        """Handles an Open call. watch: this pod can see the end of the sender's process."""
        before, error, agent = self._guarded_state(sender), "", agent_name(_info(sender))
        writer = Writer(SENDER, sender, agent, "sender:1")
        try:
            self.servicer._writer(SENDER, sender)
            if agent not in self.table.watches:
                self.table.watch(agent, Watch() if watch else None)
            self.table.open_transfer(transfer_id(request, receiver), letter(request), SIGNATURE, writer)
        except UnknownTransfer as e:
            error = "forgotten" if e.field == "pod" else "unknown"
        self.messages.append(("opened", request, receiver, sender, error))
        self._require_same(before, sender)

    def on_commit(self, request: int, receiver: int, sender: int) -> None:
        before = self._guarded_state(sender)
        answer: Future[float] = Future()
        commit = Commit((first_token(request, sender),), (None,))
        try:
            self.servicer._writer(SENDER, sender)
            self.table.commit(transfer_id(request, receiver), sender, SIGNATURE, commit, answer)
        except UnknownTransfer as e:
            self.messages.append(("committed", request, receiver, sender, "forgotten" if e.field else "unknown"))
        else:
            self.commits.append((answer, request, sender))
        self._require_same(before, sender)

    def on_range(self, request: int, receiver: int, sender: int, first: int, count: int) -> None:
        message = RangeWritten(transfer_id(request, receiver), first, count)
        self.table.on_notification(agent_name(_info(sender)), message)

    def on_bytes(self, request: int, sender: int, first: int, remote: tuple[int, ...]) -> None:
        """The bytes of a write reach the pool. A block that the transfer does not own is a fault."""
        received = self.requests.get(request)
        for logical, block in enumerate(remote, first):
            if received is None or block not in received.pin.pinned:
                what = f"block {logical} of request {letter(request)} from generation {sender}"
                owner = self._owner(block)
                self.faults.append(f"{what} is written to block {block}, which this transfer does not own ({owner})")
            self.content[block] = request, logical, sender

    def drain_answer(self, request: int, writer: int, answering: int, clean: bool, replaced: bool) -> None:
        """Handles an answer to Drain.

        Args:
            writer: the generation that was asked.
            answering: the generation that answered; 0 for no answer.
            clean: every write of the transfer succeeded.
            replaced: a newer generation answers Info.
        """
        received = self.requests.get(request)
        of = transfer_id(request, self.generation)
        entry = self.table._table.get(of)
        if received is None or not received.draining or entry is None:
            return
        received.draining = False
        before = (set(entry.machine.missing), entry.machine._grace_left)
        self.calls.drain_answer = answering, clean, replaced
        self.table._request_drain(of, entry.machine.writer)
        proven = replaced and self.table.watches.get(entry.machine.writer.agent) is None
        changed = before != (entry.machine.missing, entry.machine._grace_left)
        if answering not in (0, writer) and not proven and changed:
            self.faults.append(f"generation {answering} answers Drain for {writer}, and the quarantine changes")

    def abort(self, request: int) -> None:
        """The client left. The lease ends now, and the transfer thread hears of that later."""
        received = self.requests[request]
        received.release_due = received.state == "reserved"
        received.state = "ended"
        received.lease.finish("aborted")
        if self.bounds.coarse:
            self.release(request)

    def release(self, request: int) -> None:
        self.requests[request].release_due = False
        self.table.release(transfer_id(request, self.generation))

    def finish(self, request: int) -> None:
        """The engine has computed the last token."""
        self.requests[request].state = "ended"
        self.requests[request].lease.finish("finished")

    def deadline(self, request: int) -> None:
        self.requests[request].machine.deadline = NOW
        self.table.tick(NOW)

    def writer_gone(self, sender: int) -> None:
        """The watch sees that the sender's process has ended."""
        self.table.watches[agent_name(_info(sender))].gone = True
        self.table.tick(NOW)

    def grace(self, request: int) -> None:
        self.requests[request].machine._last_tick = NOW - TICK_S
        self.table.tick(NOW)

    def tick(self) -> None:
        self.table.tick(NOW)

    # -- state --------------------------------------------------------------------------------------------------------
    def _guarded_state(self, sender: int) -> Hashable:
        """Returns the table, which a call of an old generation must not change; None for the newest generation."""
        return None if sender >= self.newest else frozen(self.table._table)

    def _require_same(self, before: Hashable, sender: int) -> None:
        if before is not None and before != frozen(self.table._table):
            self.faults.append(f"a call of generation {sender} changes a transfer after {self.newest} shook hands")

    def _owner(self, block: int) -> str:
        owners = [letter(request) for request, received in self.requests.items() if block in received.lease.blocks]
        return f"request {owners[0]} has it" if owners else "it is free"

    def _collect(self) -> None:
        for kind, request, receiver in self.calls.sent:
            received = self.requests[request]
            received.draining = True
            self.messages.append((kind, request, receiver, received.machine.writer.generation))
        self.calls.sent.clear()
        for answer, request, sender in self.commits:
            if answer.done():
                error = "" if answer.exception() is None else _wire_error(answer.exception())
                self.messages.append(("committed", request, self.generation, sender, error))
        self.commits = [entry for entry in self.commits if not entry[0].done()]
        for block, writers in enumerate(self.pool._writers):
            if not writers:
                self.content[block] = None

    def state(self) -> Hashable:
        """Returns everything on which the next steps of the pod depend."""
        parts = (self.table._table, self.table._committed, self.table.watches, self.requests, self.pool)
        states = (frozen(part) for part in parts)
        commits = frozenset((request, sender) for _, request, sender in self.commits)
        return (self.generation, self.newest, tuple(self.content), commits, *states)

    def leftovers(self) -> list[str]:
        """Returns what has not ended, one sentence each."""
        found = [f"the receiver still has transfer {of}" for of in self.table._table]
        found += [
            f"request {letter(request)} has not ended on the receiver"
            for request, received in self.requests.items()
            if received.state != "ended"
        ]
        found += ["a commit has no answer"] * bool(self.commits)
        return found + leaks(self)


def _info(sender: int) -> transfer_pb2.InfoResponse:
    return _INFOS[sender]


_INFOS = {
    generation: transfer_pb2.InfoResponse(pod=SENDER, generation=generation, role=transfer_pb2.ROLE_PREFILL)
    for generation in (1, 2, 3)
}


def _describe(content: tuple[int, int, int] | None) -> str:
    if content is None:
        return "nothing"
    request, logical, sender = content
    return f"block {logical} of request {letter(request)} from generation {sender}"


def _wire_error(error: BaseException | None) -> str:
    return "unknown" if isinstance(error, UnknownTransfer) else "unavailable"
