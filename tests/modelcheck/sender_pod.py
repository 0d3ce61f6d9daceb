"""The prefill pod of the model. It sends KV."""

from __future__ import annotations

import math
from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from common.errors import BatonError, Unavailable, UnknownTransfer
from common.types import KvTarget
from kv_transfer.peers.connection import PeerConnection
from tests.modelcheck.pods import (
    CONNECTOR,
    FINGERPRINT,
    IGNORED,
    MEMORY,
    NOW,
    RECEIVER,
    SIGNATURE,
    TICK_S,
    Bounds,
    Pod,
    WatchedPin,
    fingerprint,
    first_token,
    frozen,
    leaks,
    letter,
    stopped_clock,
    transfer_id,
)
from tests.modelcheck.product import Product

#: Error in the message of an answer -> the exception that the caller gets.
_CALL_ERRORS: dict[str, BatonError] = {
    "unavailable": Unavailable("no answer"),
    "unknown": UnknownTransfer("the transfer is unknown"),
    "forgotten": UnknownTransfer("shake hands again", field="pod"),
}


@dataclass(eq=False, slots=True)
class SentRequest:
    """One request on the prefill pod."""

    transfer: Any
    lease: Any
    pushed: int = 0  #: Blocks that are computed and pushed.
    calling: str = ""  #: The call that waits for its answer: "open", "commit", or "" for none.


class SenderPod(Pod):
    """A prefill pod: the real TransferSender with its state machines, and a block pool."""

    def __init__(self, product: Product, bounds: Bounds, generation: int) -> None:
        super().__init__(product, bounds, generation)
        self.table = product.TransferSender(
            *(self.thread, CONNECTOR, self.calls, MEMORY, stopped_clock, IGNORED),
            fingerprint=fingerprint,
            with_checksums=False,
            write_limits=product.WriteLimits(1, 1, 2),
            commit_notifications=False,
        )
        self.requests: dict[int, SentRequest] = {}
        self.connections: dict[int, PeerConnection] = {}  #: By generation of the receiver.
        self.drains: list[tuple[Future[bool], int, int, int]] = []  #: Answer, request, receiver, sender.

    # -- events -------------------------------------------------------------------------------------------------------
    def start(self, request: int, receiver: int, remote: tuple[int, ...]) -> None:
        lease = self._lease()
        if lease is None:
            return
        where = (RECEIVER, "receiver:1", 0, remote)
        target = KvTarget(transfer_id(request, receiver), *where, FINGERPRINT, signature=SIGNATURE)
        transfer = self.table.start(target, letter(request), len(remote), math.inf)
        self.requests[request] = SentRequest(transfer, lease)
        if self.bounds.coarse:
            self.connected(request, receiver)
            self.push(request)

    def connected(self, request: int, receiver: int) -> None:
        connection = self.connections.get(receiver)
        if connection is None or (connection.broken and not connection.in_flight):
            agent = f"decode-{RECEIVER}-{receiver}"
            pool = {"num_blocks": self.bounds.blocks, "probe_block": self.bounds.blocks, "memory": MEMORY}
            who = {"pod": RECEIVER, "generation": receiver, "address": "receiver:1", "agent": agent}
            connection = PeerConnection(**who, **pool, metadata=b"", same_host=self.bounds.watched, watch=None)
            self.connections[receiver] = connection
        elif connection.broken:
            return  # writes over the former connection have not ended
        self.table._connected(self.requests[request].transfer, connection)

    def connect_failed(self, request: int) -> None:
        self.table.fail(self.requests[request].transfer, Unavailable("no connection"))

    def push(self, request: int) -> None:
        """The engine has computed the next block. With the last one it gives the first token and ends the lease."""
        sent = self.requests[request]
        first = sent.pushed
        self.table._pushes = 8 * request + first
        sent.pushed += 1
        pin = WatchedPin(self, sent.lease.pin_for_read(first, 1))
        sent.transfer.push(first, pin.blocks, pin)
        if sent.pushed == self.bounds.blocks_per_request:
            sent.transfer.finish((first_token(request, self.generation),), (None,))
            sent.lease.finish("computed")

    def post(self) -> None:
        self.table.post_writes()

    def write_done(self, request: int, receiver: int, first: int) -> None:
        self.thread.pending.pop((receiver, request, first))[0](None)

    def write_failed(self, request: int, receiver: int, first: int) -> None:
        self.thread.pending.pop((receiver, request, first))[0]("the transport failed")

    def opened(self, request: int, receiver: int, error: str) -> None:
        self._answered("open", request, receiver, error)

    def committed(self, request: int, receiver: int, error: str) -> None:
        self._answered("commit", request, receiver, error)

    def _answered(self, call: str, request: int, receiver: int, error: str) -> None:
        sent = self.requests.get(request)
        if sent is None or sent.transfer.target.transfer_id.generation != receiver or sent.calling != call:
            return  # the call has ended for its caller
        sent.calling, machine = "", sent.transfer.machine
        if error:
            self.table._call_failed(sent.transfer, _CALL_ERRORS[error])
        else:
            self.table._apply(sent.transfer, (machine.opened if call == "open" else machine.committed)(NOW))

    def drain(self, request: int, receiver: int, writer: int) -> None:
        answer = self.table.drain(RECEIVER, transfer_id(request, receiver))
        self.drains.append((answer, request, receiver, writer))

    def abort(self, request: int) -> None:
        self.requests[request].transfer.abort("the client left")

    def deadline(self, request: int) -> None:
        self.requests[request].transfer.machine.deadline = NOW
        self.table.tick(NOW)

    def peer_gone(self, receiver: int) -> None:
        """The receiver's process is proven to have ended."""
        connection = self.connections[receiver]
        connection.process_ended = connection.broken = True
        self.table.tick(NOW)

    def grace(self, request: int) -> None:
        self.requests[request].transfer.machine._last_tick = NOW - TICK_S
        self.table.tick(NOW)

    def tick(self) -> None:
        self.table.tick(NOW)

    # -- state --------------------------------------------------------------------------------------------------------
    def _follow_up(self) -> None:
        while self.table.post_writes():
            pass

    def _collect(self) -> None:
        for kind, request, receiver, *more in (*self.calls.sent, *self.thread.sent):
            status = ("posted",) if kind == "write" else ()
            self.messages.append((kind, request, receiver, self.generation, *more, *status))
            if kind in ("open", "commit"):
                self.requests[request].calling = kind
        self.calls.sent.clear()
        self.thread.sent.clear()
        for answer, request, receiver, writer in self.drains:
            if answer.done():
                self.messages.append(("drained", request, receiver, writer, self.generation, answer.result()))
        self.drains = [entry for entry in self.drains if not entry[0].done()]
        for sent in self.requests.values():
            if sent.transfer.outcome.done():
                sent.lease.finish("handed off")  # the hand-off has ended: the engine gives the sequence up
        for (receiver, request, first), (_, local) in self.thread.pending.items():
            unpinned = [block for block in local if not self.pool._readers[block]]
            if unpinned and not self.connections[receiver].process_ended:
                of = f"block {first} of request {letter(request)}"
                self.faults.append(f"a write reads {of} from block {unpinned[0]}, which has no pin")

    def state(self) -> Hashable:
        """Returns everything on which the next steps of the pod depend."""
        parts = (self.table._table, self.table._over, self.requests, self.connections, self.pool)
        drains = frozenset((request, receiver, writer) for _, request, receiver, writer in self.drains)
        return (
            self.generation,
            *(frozen(part) for part in parts),
            frozenset(self.thread.pending),
            drains,
        )

    def leftovers(self) -> list[str]:
        """Returns what has not ended, one sentence each."""
        found = [f"the sender still has transfer {key[1]}" for key in self.table._table]
        found += [
            f"request {letter(request)} has no outcome on the sender"
            for request, sent in self.requests.items()
            if not sent.transfer.outcome.done()
        ]
        found += ["Drain has no answer"] * bool(self.drains)
        return found + leaks(self)
