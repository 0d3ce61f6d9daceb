"""The common part of both pods of the model: bounds, messages, and doubles of thread, clock and calls.

The transfer tables, state machines and block pools are real. Nothing moves by itself: a pod changes only by
`apply(event)`, which leaves the messages that the pod sent in `messages`. So the next state depends on the state and
the event only, and the explorer computes each pair once.

A message is a tuple: kind, request, receiver's generation, sender's generation, and by kind:

    open, commit, drain    (nothing more)                    calls
    opened, committed      error, "" for none                answer to a call
    drained                answering generation, clean       answer to Drain; generation 0: no answer came
    range                  first logical block, count        notification of a write
    write                  first logical block, blocks, status: posted, landed, late (may land within the grace), dying
    target                 blocks, in place of the sender's generation; the gateway gets it at once
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from common.errors import DeadlineExceeded, Unavailable
from common.types import KvTarget, TransferId
from kv_transfer.memory import PeerMemory
from kv_transfer.messages import Commit, RangeWritten, Writer, parse_notification
from kv_transfer.peers.connection import PeerConnection
from tests.modelcheck.product import Product
from tests.modelcheck.snapshot import freeze

NOW = 1.0  #: The clock of the model stands still.
TICK_S = 0.25  #: One tick uses up at most this much of a grace. In the model the grace is no longer.
SENDER, RECEIVER = "prefill-0", "decode-0"
FINGERPRINT, SIGNATURE = "f", b"signature"
MEMORY = PeerMemory(0, 1, 0, 0, "DRAM")

Event = tuple[Any, ...]  #: Name of a method of the pod, and its arguments.
Message = tuple[Any, ...]  #: See the module's docstring.


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The limits of one exploration."""

    requests: int = 2
    blocks: int = 3  #: Blocks of each pod's pool.
    blocks_per_request: int = 2
    sender_restarts: int = 1
    receiver_restarts: int = 1
    message_faults: int = 1  #: Messages that are lost, doubled, or later than their call's time limit, all together.
    failed_writes: int = 1  #: Writes that fail although the receiver lives.
    watched: bool = False  #: Each pod sees the end of the other's process, as on one host.
    #: The gateway may send a prompt after its reservation has ended, and to both generations of the prefill pod.
    odd_prefills: bool = False
    #: Steps that usually follow each other at once are one step: the start of a transfer, its connection and its first
    #: push; an event of the sender and the writes that it posts then; the end of a write and the sender's notice of
    #: that; an abort on the receiver and the release of its transfer.
    coarse: bool = False


def letter(request: int) -> str:
    """Returns the name of a request in schedules."""
    return "ABCD"[request]


def transfer_id(request: int, generation: int) -> TransferId:
    return TransferId(generation, request + 1)


def stopped_clock() -> float:
    return NOW


def fingerprint() -> str:
    return FINGERPRINT


class _Suspended(BaseException):
    """Leaves a coroutine at a call. The explorer answers the call later, by an event."""


class _NoLock:
    """One thread needs no lock."""

    SHARED = True

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class _Ignored:
    """A double of statistics and of notified peers. They are no part of the state."""

    SHARED = True

    def count(self, _reason: str) -> None: ...

    def begin(self) -> None: ...

    def end(self, *_: object, **__: object) -> None: ...

    def add_peer(self, _peer: str, _metadata: bytes) -> None: ...

    def remove_peer(self, _peer: str) -> None: ...

    def get(self, _pod: str) -> _Ignored:
        return self

    pulls = transfers = failures = exposed_s = 0


class _Connector:
    """A connector without connections. The event `connected` gives a transfer its connection."""

    SHARED = True

    async def connect(self, *_: object) -> PeerConnection:
        raise _Suspended


NO_LOCK, IGNORED, CONNECTOR = _NoLock(), _Ignored(), _Connector()


class Watch:
    """A double of ProcessWatch. The event `writer_gone` sets `gone`."""

    def __init__(self) -> None:
        self.gone = False

    def ended(self) -> bool:
        return self.gone

    def close(self) -> None: ...


@dataclass
class _Calls:
    """A double of PeerRpcClient. A call is a message, and its answer comes as another event."""

    sent: list[Message] = field(default_factory=list)  #: Calls of the current event.
    #: The answer that the next Drain gets: generation (0: no answer), clean, whether a newer generation answers Info.
    drain_answer: tuple[int, bool, bool] | None = None
    replaced = False  #: Whether a newer generation answers Info.

    def run_on_loop(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with contextlib.suppress(StopIteration, _Suspended):
            work().send(None)

    def _send(self, kind: str, of: TransferId, timeout_s: float) -> None:
        if timeout_s <= 0:
            raise DeadlineExceeded("no time left")
        self.sent.append((kind, of.number - 1, of.generation))
        raise _Suspended

    async def open(self, target: KvTarget, _request_id: str, _polled: bool, timeout_s: float) -> None:
        self._send("open", target.transfer_id, timeout_s)

    async def commit(self, target: KvTarget, _commit: Commit, timeout_s: float) -> None:
        self._send("commit", target.transfer_id, timeout_s)

    async def drain(self, writer: Writer, of: TransferId, timeout_s: float) -> SimpleNamespace:
        if self.drain_answer is None:
            self._send("drain", of, timeout_s)
        assert self.drain_answer is not None
        (generation, clean, self.replaced), self.drain_answer = self.drain_answer, None
        if not generation:
            raise Unavailable("no answer")
        return SimpleNamespace(generation=generation, clean=clean)

    async def is_replaced(self, _writer: Writer, _timeout_s: float) -> bool:
        return self.replaced


@dataclass
class _Thread:
    """A double of the transfer thread and its backend. Commands run at once, and writes are messages."""

    running = True
    sent: list[Message] = field(default_factory=list)  #: Writes and notifications of the current event.
    #: Callback and local blocks of each pending write, by generation of the receiver, request and first logical block.
    pending: dict[tuple[int, int, int], tuple[Callable[[str | None], None], tuple[int, ...]]] = field(
        default_factory=dict
    )

    @property
    def backend(self) -> _Thread:
        return self

    def submit(self, command: Callable[[], object]) -> None:
        command()

    def write(
        self,
        _agent: str,
        local: Sequence[int],
        remote: Sequence[int],
        notification: bytes,
        on_ended: Callable[[str | None], None],
    ) -> None:
        written = parse_notification(notification)
        assert isinstance(written, RangeWritten)
        request, generation = written.transfer_id.number - 1, written.transfer_id.generation
        self.pending[generation, request, written.first] = on_ended, tuple(local)
        self.sent.append(("write", request, generation, written.first, tuple(remote)))

    def notify(self, _agent: str, payload: bytes) -> None:
        written = parse_notification(payload)
        assert isinstance(written, RangeWritten)
        request, generation = written.transfer_id.number - 1, written.transfer_id.generation
        self.sent.append(("range", request, generation, written.first, written.count))

    def add_peer(self, _peer: str, _metadata: bytes) -> None: ...

    def remove_peer(self, _peer: str) -> None: ...


@dataclass(eq=False)
class WatchedPin:
    """A pin of the block pool. A second release of a block, or an error, is a fault of the pod."""

    pod: Pod
    pin: Any

    @property
    def blocks(self) -> Sequence[int]:
        return self.pin.blocks  # type: ignore[no-any-return]

    @property
    def pinned(self) -> set[int]:
        return self.pin.pinned  # type: ignore[no-any-return]

    def release(self, blocks: Sequence[int] | None = None) -> None:
        again = set(() if blocks is None else blocks) - self.pinned
        if again:
            self.pod.faults.append(f"the transfer releases block {min(again)} twice")
        try:
            self.pin.release(blocks)
        except Exception as error:
            self.pod.faults.append(f"the pin cannot be released: {error!r}")


class Pod:
    """The common part of both pods: a block pool, the messages of the last event, and the pool's invariants."""

    def __init__(self, product: Product, bounds: Bounds, generation: int) -> None:
        self.product, self.bounds, self.generation = product, bounds, generation
        self.pool = product.BlockPool(bounds.blocks, 1)
        self.pool.lock = NO_LOCK
        self.calls, self.thread = _Calls(), _Thread()
        self.faults: list[str] = []  #: Violated invariants of the last event.
        self.messages: list[Message] = []  #: Messages of the last event.

    def apply(self, event: Event) -> None:
        """Handles an event. Sets `messages` and `faults`."""
        self.faults, self.messages = [], []
        self.product.log.errors.clear()
        try:
            getattr(self, event[0])(*event[1:])
            if self.bounds.coarse:
                self._follow_up()
            self._collect()
            self.pool.check_integrity()
        except Exception as error:
            self.faults.append(f"{type(error).__name__}: {error}")
        self.faults += self.product.log.errors

    def _follow_up(self) -> None:
        """With `coarse`: does what usually follows an event at once."""

    def _collect(self) -> None:
        """Moves the calls, writes and notifications of the event into `messages`, and checks invariants."""

    def _lease(self) -> Any:
        """Returns the lease of a new request; None if too few blocks are free.

        The lease gets the free blocks with the lowest numbers, which other requests had before. That causes the most
        conflicts. The order in which blocks became free is then no part of the state.
        """
        self.pool._free.sort(reverse=True)
        return self.pool.lease([], self.bounds.blocks_per_request)


def first_token(request: int, sender: int) -> int:
    """Returns the first token of a request. Each generation of the sender computes another one."""
    return 10 * request + sender


def frozen(thing: Any) -> Hashable:
    """Returns the state of a part of a pod as a hashable value."""
    return freeze(thing, _SPECIAL)


def leaks(pod: Pod) -> list[str]:
    """Returns a sentence if blocks of the pod's pool are not free."""
    counts = pod.pool.counts()
    leaked = counts.total - counts.free
    return [f"{leaked} blocks of {type(pod).__name__} are not free"] if leaked else []


def _machine(machine: Any, live: bool) -> Hashable:
    """Freezes a machine. The clock stands still, so its times do not count, except that the deadline has passed."""
    times = ("deadline", "_last_tick", "_next_drain", "_drain_wait", "_next_call", "_call_wait", "_opening_since")
    fields = {name: value for name, value in vars(machine).items() if name not in (*times, "delivered")}
    fields["late"] = live and machine.deadline <= NOW
    if "_failed_calls" in fields:
        fields["_failed_calls"] = min(machine._failed_calls, 2)  # compared with RENOTIFY_AFTER only
    return tuple((name, frozen(fields[name])) for name in sorted(fields))


def _transfer(transfer: Any) -> Hashable:
    machine, outcome = transfer.machine, frozen(transfer.outcome)
    if transfer.sender._table.get(transfer.key) is not transfer:
        return "over"
    connection = frozen(transfer.connection)
    others = (outcome, connection, frozenset(transfer.pins), bool(transfer.drains))
    return transfer.key, _machine(machine, not machine.ended), *others


def _incoming(entry: Any) -> Hashable:
    machine = entry.machine
    live = machine.state.value in ("reserved", "open")
    return _machine(machine, live), frozenset(entry.pin.pinned), bool(entry.waiting)


def _sent(sent: Any) -> Hashable:
    transfer = _transfer(sent.transfer)
    return (
        transfer
        if transfer == "over"
        else (transfer, tuple(sent.lease.blocks), sent.pushed, sent.calling * (not sent.transfer.machine.ended))
    )


def _received(received: Any) -> Hashable:
    over = received.machine.state.value in ("ready", "closed")
    progress = (received.state, received.release_due, received.ended, received.draining and not over)
    return tuple(received.lease.blocks), frozenset(received.pin.pinned), *progress


_SPECIAL: dict[str, Callable[[Any], Hashable]] = {
    "BlockPool": lambda pool: (frozenset(pool._free), *map(tuple, (pool._holds, pool._writers, pool._readers))),
    "Lease": lambda lease: tuple(lease.blocks),
    "Watch": lambda watch: watch.gone,
    "PeerConnection": lambda c: (c.generation, c.broken, c.process_ended, c.in_flight),
    "OutgoingTransfer": _transfer,
    "IncomingTransfer": _incoming,
    "SentRequest": _sent,
    "ReceivedRequest": _received,
}
