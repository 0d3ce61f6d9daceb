"""Both pods, the network between them, and every step that they can take next.

Real: the state machines, tables and block pools of both pods, and the check of generations (`product.MODULES`).
Replaced: the network (a set of messages, which may be lost, late, doubled and in any order), the clock (it stands
still, and any timer may fire at any step), the transfer thread and event loops (one command at a time), handshake and
probe (one step), signatures, engine and gateway (they reserve, push, abort and finish at any time; a prompt may be sent
to both generations of the prefill pod).

Bounds: two requests, because a block changes its owner between two; three blocks, so that the second request has to
take a block of the first; two blocks for each, so that ranges and pushes can overtake each other. One request alone
meets one restart of each pod, so that messages of an old generation meet a new one, one message fault and one failed
write, each at any time. A write that failed, or whose process is gone, lands before the grace has passed: the product
rests on this.

A state is four numbers. A step of a pod is computed once by the real code for each pair of state and event.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from tests.modelcheck.pods import Bounds, Event, Message, Pod, letter
from tests.modelcheck.product import Product
from tests.modelcheck.receiver_pod import ReceiverPod
from tests.modelcheck.sender_pod import SenderPod
from tests.modelcheck.snapshot import clone

#: The whole bounds, by name; benchmarks/reliability/modelcheck.py explores them. One request has a restart of each pod
#: and all faults. Two requests take coarse steps and have no faults and restarts: all together are too many states.
FULL = {
    "one request, ends of processes are seen": Bounds(requests=1, watched=True),
    "one request, restarts only": Bounds(requests=1, message_faults=0, failed_writes=0),
    "two requests": Bounds(coarse=True, message_faults=0, failed_writes=0, sender_restarts=0, receiver_restarts=0),
}
DOWN = -1  # Number of the state of a pod that does not run

State = tuple[int, int, int, int]  # Numbers of the states of sender, receiver, network, environment
T = TypeVar("T", bound=Hashable)


class Environment(NamedTuple):
    """Processes, faults that are left, and the KV targets that the gateway knows."""

    sender: int = 1  # Newest generation of the sender
    sender_up: bool = True
    sender_exiting: bool = False  # A killed process of the sender has not ended: the grace does not bound its writes
    receiver: int = 1
    receiver_up: bool = True
    message_faults: int = 0
    failed_writes: int = 0
    targets: tuple[tuple[int, tuple[int, ...]] | None, ...] = ()  # By request: the receiver's generation and the blocks


@dataclass(slots=True)
class Step:
    """One possible step."""

    label: tuple[Any, ...]
    state: State
    #: Order among the steps that a fair network takes without new work; 0 for all other steps.
    fair: int = 0
    fault: str = ""  # The violated invariant


class Numbers(Generic[T]):
    """Numbers values in the order in which they come."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._numbers: dict[T, int] = {}

    def of(self, value: T) -> int:
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a pod in one state can do next, by request or generation."""

    leftovers: tuple[str, ...]
    known: frozenset[int] = frozenset()  # Requests of this process
    connecting: tuple[tuple[int, int], ...] = ()  # Request, generation of the receiver
    pushing: tuple[int, ...] = ()
    live: tuple[int, ...] = ()  # Transfers that a deadline or an abort can end
    grace: tuple[int, ...] = ()
    peers: tuple[int, ...] = ()  # Generations of the other pod whose end would be noticed
    waiting: tuple[Message, ...] = ()  # Answers that callers wait for
    running: tuple[int, ...] = ()  # Requests that decode
    reserved: tuple[int, ...] = ()
    release_due: tuple[int, ...] = ()
    #: Transfers of this process that are not over, by request and generation of the receiver.
    transfers: frozenset[tuple[int, int]] = frozenset()
    calls: frozenset[tuple[str, int, int]] = frozenset()  # Calls without an answer: kind, request, receiver


@dataclass
class PodStates:
    """The states of one pod and the steps between them, as far as they were needed."""

    abilities_of: Callable[[Any], Abilities]
    pods: list[Any] = field(default_factory=list)
    abilities: list[Abilities] = field(default_factory=list)
    _numbers: dict[Hashable, int] = field(default_factory=dict)
    _steps: dict[tuple[int, Event], tuple[int, tuple[Message, ...], str]] = field(default_factory=dict)

    def number(self, pod: Pod) -> int:
        state = pod.state()  # type: ignore[attr-defined]
        number = self._numbers.setdefault(state, len(self.pods))
        if number == len(self.pods):
            self.pods.append(pod)
            self.abilities.append(self.abilities_of(pod))
        return number

    def step(self, number: int, event: Event) -> tuple[int, tuple[Message, ...], str]:
        """Returns the next state, the messages that the pod sends, and the violated invariant."""
        known = self._steps.get((number, event))
        if known is None:
            pod = clone(self.pods[number])
            pod.apply(event)
            known = self._steps[number, event] = self.number(pod), tuple(pod.messages), "; ".join(pod.faults)
        return known

    @property
    def num_steps(self) -> int:
        return len(self._steps)


def sender_abilities(pod: SenderPod) -> Abilities:
    connecting, pushing, live, grace = [], [], [], []
    for request, sent in pod.requests.items():
        machine = sent.transfer.machine
        if machine.state.value == "connecting":
            connecting.append((request, sent.transfer.target.transfer_id.generation))
        if not machine.ended:
            live.append(request)
            if sent.pushed < pod.bounds.blocks_per_request:
                pushing.append(request)
        if machine.state.value == "stopping" and machine._grace_left is not None:
            grace.append(request)
    open_to = {t.connection.generation for t in pod.table._table.values() if t.connection is not None}
    return Abilities(
        tuple(pod.leftovers()),
        known=frozenset(pod.requests),
        connecting=tuple(connecting),
        pushing=tuple(pushing),
        live=tuple(live),
        grace=tuple(grace),
        peers=tuple(sorted(g for g in open_to if not pod.connections[g].process_ended)),
        waiting=tuple(("drained", request, receiver, writer, 0, False) for _, request, receiver, writer in pod.drains),
        transfers=frozenset((key[1].number - 1, key[1].generation) for key in pod.table._table),
        calls=frozenset(
            (sent.calling, request, sent.transfer.target.transfer_id.generation)
            for request, sent in pod.requests.items()
            if sent.calling and not sent.transfer.machine.ended
        ),
    )


def receiver_abilities(pod: ReceiverPod) -> Abilities:
    live, grace = [], []
    for request, received in pod.requests.items():
        machine = received.machine
        if machine.state.value in ("reserved", "open"):
            live.append(request)
        if machine.state.value == "draining" and machine._grace_left is not None:
            grace.append(request)
    by_state: dict[str, list[int]] = {"reserved": [], "running": [], "ended": []}
    for request, received in pod.requests.items():
        by_state[received.state].append(request)
    watched = [agent for agent, watch in pod.table.watches.items() if watch is not None and not watch.gone]
    return Abilities(
        tuple(pod.leftovers()),
        known=frozenset(pod.requests),
        live=tuple(live),
        grace=tuple(grace),
        peers=tuple(sorted(int(agent.rpartition("-")[2]) for agent in watched)),
        waiting=tuple(
            ("committed", request, pod.generation, sender, "unavailable") for _, request, sender in pod.commits
        ),
        running=tuple(by_state["running"]),
        reserved=tuple(by_state["reserved"]),
        release_due=tuple(request for request, received in pod.requests.items() if received.release_due),
        transfers=frozenset((of.number - 1, of.generation) for of in pod.table._table),
        calls=frozenset(
            ("drain", request, pod.generation)
            for request, received in pod.requests.items()
            if received.draining and received.machine.state.value == "draining"
        ),
    )


NOTHING = Abilities(())  # Of a process that does not run


class World:
    """All states that are reachable within the bounds."""

    def __init__(self, product: Product, bounds: Bounds) -> None:
        self.product, self.bounds = product, bounds
        self.senders, self.receivers = PodStates(sender_abilities), PodStates(receiver_abilities)
        self.networks: Numbers[frozenset[Message]] = Numbers()
        self.environments: Numbers[Environment] = Numbers()
        self._sorted: dict[int, list[Message]] = {}

    def sorted_messages(self, network: int) -> list[Message]:
        """Returns the messages of a network in an order that is the same in every run."""
        if network not in self._sorted:
            self._sorted[network] = sorted(self.networks.values[network], key=repr)
        return self._sorted[network]

    def initial(self) -> State:
        bounds = self.bounds
        faults = {"message_faults": bounds.message_faults, "failed_writes": bounds.failed_writes}
        environment = Environment(**faults, targets=(None,) * bounds.requests)
        return (
            self.senders.number(SenderPod(self.product, bounds, 1)),
            self.receivers.number(ReceiverPod(self.product, bounds, 1)),
            self.networks.of(frozenset()),
            self.environments.of(environment),
        )

    def leftovers(self, state: State) -> list[str]:
        """Returns what has not ended, one sentence each."""
        sender, receiver = state[0], state[1]
        found = [] if sender == DOWN else list(self.senders.abilities[sender].leftovers)
        return found + ([] if receiver == DOWN else list(self.receivers.abilities[receiver].leftovers))

    def steps(self, state: State) -> Iterator[Step]:
        """Yields every step that changes the state."""
        return filter(None, _Choices(self, state).all())


class _Choices:
    """The steps from one state."""

    def __init__(self, world: World, state: State) -> None:
        self.world, self.before = world, state
        self.sender, self.receiver = state[0], state[1]
        self.network = world.networks.values[state[2]]
        self.environment = world.environments.values[state[3]]
        self.sends = None if self.sender == DOWN else world.senders.abilities[self.sender]
        self.receives = None if self.receiver == DOWN else world.receivers.abilities[self.receiver]

    def _step(
        self,
        label: tuple[Any, ...],
        fair: int = 0,
        *,
        sender: Event | None = None,
        receiver: Event | None = None,
        take: Message | None = None,
        put: tuple[Message, ...] = (),
        environment: Environment | None = None,
    ) -> Step | None:
        """Returns the step in which the pods handle the events and the network loses and gains messages.

        Returns None if nothing changes.
        """
        world, sent = self.world, put
        next_sender, next_receiver, fault = self.sender, self.receiver, ""
        if receiver is not None:
            next_receiver, messages, fault = world.receivers.step(self.receiver, receiver)
            sent += messages
        if sender is not None and not fault:
            next_sender, messages, fault = world.senders.step(self.sender, sender)
            sent += messages
        after = self.environment if environment is None else environment
        network = self.network
        if take is not None:
            network = network.difference((take,))
        for message in sent:
            if message[0] == "target":
                targets = list(after.targets)
                targets[message[1]] = (message[2], message[3])
                after = after._replace(targets=tuple(targets))
            else:
                network = network.union((message,))
        next_state = self._state(next_sender, next_receiver, network, after)
        return Step(label, next_state, fair, fault) if fault or next_state != self.before else None

    def _state(self, sender: int, receiver: int, network: frozenset[Message], around: Environment) -> State:
        """Returns a state without the messages that no process would notice any more."""
        world = self.world
        sends = NOTHING if sender == DOWN else world.senders.abilities[sender]
        receives = NOTHING if receiver == DOWN else world.receivers.abilities[receiver]
        useless = [message for message in network if not _matters(message, around, sends, receives)]
        left = network.difference(useless) if useless else network
        return sender, receiver, world.networks.of(left), world.environments.of(around)

    def _faulty(self, label: tuple[Any, ...], **change: Any) -> Step | None:
        """Returns a step that uses up one message fault."""
        left = self.environment.message_faults
        if not left:
            return None
        step = self._step(label, environment=self.environment._replace(message_faults=left - 1), **change)
        # A fault without an effect only uses up the faults that are left: no state beyond it is missed.
        return None if step is not None and not step.fault and step.state[:3] == self.before[:3] else step

    def all(self) -> Iterator[Step | None]:
        for message in self.world.sorted_messages(self.before[2]):
            yield from self._write(message) if message[0] == "write" else self._message(message)
        if self.sends is not None:
            yield from self._sender(self.sends)
        if self.receives is not None:
            yield from self._receiver(self.receives)
        yield from self._processes()

    # -- network ------------------------------------------------------------------------------------------------------
    def _message(self, message: Message) -> Iterator[Step | None]:
        failed = _failed(message, self.environment)
        yield self._deliver(message, take=message)
        if self.environment.message_faults:
            yield self._deliver(message, duplicate=True)
            yield self._faulty(("lose", message), take=message, put=failed)
            if message[0] in ("open", "commit", "drain"):
                yield self._faulty(("delay", message), put=failed)
            if message[0] == "drained" and message[4] not in (0, message[3]):  # Info, which would follow, is lost
                event = ("drain_answer", message[1], message[3], message[4], message[5], False)
                yield self._faulty(("deliver", message, "Info lost"), take=message, receiver=event)

    def _deliver(self, message: Message, *, take: Message | None = None, duplicate: bool = False) -> Step | None:
        kind, request, receiver, sender, *more = message
        around = self.environment
        events: dict[str, Any] = {}
        if kind in ("open", "commit"):
            if not around.receiver_up:
                events["put"] = _failed(message, around)
            elif kind == "open":
                watch = self.world.bounds.watched and around.sender_up and around.sender == sender
                events["receiver"] = ("on_open", request, receiver, sender, watch)
            else:
                events["receiver"] = ("on_commit", request, receiver, sender)
        elif kind == "drain":
            if around.sender_up:
                events["sender"] = ("drain", request, receiver, sender)
            else:
                events["put"] = _failed(message, around)
        elif kind in ("opened", "committed"):
            events["sender"] = (kind, request, receiver, *more)
        elif kind == "drained":
            replaced = around.sender_up and around.sender > sender
            events["receiver"] = ("drain_answer", request, sender, *more, replaced)
        else:
            events["receiver"] = ("on_range", request, receiver, sender, *more)
        if duplicate:
            return self._faulty(("duplicate", message), **events)
        return self._step(("deliver", message), 1, take=take, **events)

    def _write(self, message: Message) -> Iterator[Step | None]:
        _, request, receiver, sender, first, remote, status = message
        target_lives = self.environment.receiver_up and self.environment.receiver == receiver
        of = (request, receiver, first)
        if status == "landed":
            yield self._step(("write done", message), 2, take=message, sender=("write_done", *of))
            return
        if target_lives:
            change: dict[str, Any] = {"receiver": ("on_bytes", request, sender, first, remote)}
            notification = ("range", request, receiver, sender, first, len(remote))
            if status == "posted" and self.world.bounds.coarse:
                change |= {"put": (notification,), "sender": ("write_done", *of)}
            elif status == "posted":
                change["put"] = (*message[:-1], "landed"), notification
            yield self._step(("write lands", message), 2, take=message, **change)
        if status != "posted":
            return
        if not target_lives:  # not a step of a fair network: such a write may never become terminal
            yield self._step(("write fails", message), take=message, sender=("write_failed", *of))
        elif left := self.environment.failed_writes:
            late = ((*message[:-1], "late"),)
            after = self.environment._replace(failed_writes=left - 1)
            event = ("write_failed", *of)
            yield self._step(("write fails", message), take=message, put=late, sender=event, environment=after)

    # -- pods ---------------------------------------------------------------------------------------------------------
    def _sender(self, can: Abilities) -> Iterator[Step | None]:
        around = self.environment
        for request, target in enumerate(around.targets):
            if target is not None and request not in can.known:
                yield self._start(request, *target)
        for request, receiver in can.connecting:
            if around.receiver_up and around.receiver == receiver:
                events = {"sender": ("connected", request, receiver), "receiver": ("handshake", around.sender)}
                yield self._step(("connect", request), **events)
            else:
                yield self._step(("no connection", request), sender=("connect_failed", request))
        for request in can.pushing:
            yield self._step(("push", request), sender=("push", request))
        yield self._step(("post",), sender=("post",))
        for request in can.live:
            yield self._step(("sender's deadline", request), 8, sender=("deadline", request))
            yield self._step(("sender's abort", request), sender=("abort", request))
        for receiver in can.peers:
            ended = receiver < around.receiver or not around.receiver_up
            if ended and (self.world.bounds.watched or around.receiver_up):
                yield self._step(("proof for sender", receiver), 7, sender=("peer_gone", receiver))
        for request in can.grace:
            yield self._step(("sender's grace", request), 9, sender=("grace", request))
        for answer in can.waiting:
            yield self._faulty(("time limit", answer), put=(answer,))
        yield self._step(("sender's timers",), 10, sender=("tick",))

    def _start(self, request: int, receiver: int, blocks: tuple[int, ...]) -> Step | None:
        """The prompt is sent to the prefill pod. Without odd prefills this happens once, and takes the blocks away."""
        around, bounds, change = self.environment, self.world.bounds, dict[str, Any]()
        target_lives = self.receives is not None and around.receiver == receiver
        if not bounds.odd_prefills:
            ended = self.receives is not None and target_lives and request not in self.receives.reserved
            if not blocks or ended:
                return None
            targets = (*around.targets[:request], (receiver, ()), *around.targets[request + 1 :])
            change["environment"] = around._replace(targets=targets)
        if bounds.coarse:
            if not target_lives:
                return None  # the transfer would end at once
            change["receiver"] = ("handshake", around.sender)
        step = self._step(("start", request), sender=("start", request, receiver, blocks), **change)
        return None if step is not None and step.state[0] == self.sender and not step.fault else step

    def _receiver(self, can: Abilities) -> Iterator[Step | None]:
        around = self.environment
        for request, target in enumerate(around.targets):
            if target is None:  # requests are numbered in the order of their reservations
                yield self._step(("reserve", request), receiver=("reserve", request))
                break
        for request in can.running:
            yield self._step(("finish", request), 5, receiver=("finish", request))
        for request in can.reserved:
            yield self._step(("receiver's abort", request), receiver=("abort", request))
        for request in can.release_due:
            yield self._step(("release", request), 4, receiver=("release", request))
        for request in can.live:
            yield self._step(("receiver's deadline", request), 8, receiver=("deadline", request))
        for sender in can.peers:
            if (sender < around.sender or not around.sender_up) and not around.sender_exiting:
                yield self._step(("proof for receiver", sender), 7, receiver=("writer_gone", sender))
        for request in can.grace:
            yield self._grace(request)
        for answer in can.waiting:
            yield self._faulty(("time limit", answer), put=(answer,))
        yield self._step(("receiver's timers",), 10, receiver=("tick",))

    def _grace(self, request: int) -> Step | None:
        """The grace passes: a write that failed, or of a process that is gone, has landed by now or never does."""
        late = {m for m in self.network if m[:3] == ("write", request, self.environment.receiver) and m[-1] == "late"}
        receiver, sent, fault = self.world.receivers.step(self.receiver, ("grace", request))
        network = self.network.difference(late).union(sent)
        state = self._state(self.sender, receiver, network, self.environment)
        return Step(("receiver's grace", request), state, 9, fault)

    # -- processes ----------------------------------------------------------------------------------------------------
    def _processes(self) -> Iterator[Step | None]:
        around, bounds = self.environment, self.world.bounds
        if around.sender_up and around.sender <= bounds.sender_restarts:
            yield self._kill_sender()
        if around.receiver_up and around.receiver <= bounds.receiver_restarts:
            yield self._kill_receiver()
        if around.sender_exiting:
            yield self._exit()
        if not around.sender_up:
            after = around._replace(sender=around.sender + 1, sender_up=True)
            pod = self.world.senders.number(SenderPod(self.world.product, bounds, after.sender))
            yield self._change(("sender starts", after.sender), 6, after, self.network, sender=pod)
        if not around.receiver_up:
            after = around._replace(receiver=around.receiver + 1, receiver_up=True)
            pod = self.world.receivers.number(ReceiverPod(self.world.product, bounds, after.receiver))
            yield self._change(("receiver starts", after.receiver), 6, after, self.network, receiver=pod)

    def _change(
        self,
        label: tuple[Any, ...],
        fair: int,
        after: Environment,
        network: frozenset[Message],
        *,
        sender: int | None = None,
        receiver: int | None = None,
    ) -> Step:
        pods = self.sender if sender is None else sender, self.receiver if receiver is None else receiver
        return Step(label, self._state(*pods, network, after), fair)

    def _kill_sender(self) -> Step:
        """The process ends; posted writes may still land, and its calls are on their way."""
        around, watched = self.environment, self.world.bounds.watched
        assert self.sends is not None
        network = {
            (*message[:-1], "dying" if watched else "late")
            if message[0] == "write" and message[-1] == "posted"
            else message
            for message in self.network
            if message[-1] != "landed"
        }
        after = around._replace(sender_up=False, sender_exiting=watched)
        label = ("sender is killed", around.sender)
        return self._change(label, 0, after, frozenset(network.union(self.sends.waiting)), sender=DOWN)

    def _kill_receiver(self) -> Step:
        """The process ends, and its memory with it."""
        assert self.receives is not None
        after = self.environment._replace(receiver_up=False)
        label = ("receiver is killed", after.receiver)
        return self._change(label, 0, after, self.network.union(self.receives.waiting), receiver=DOWN)

    def _exit(self) -> Step:
        """The kernel has ended the killed process: what is still on its way is bounded by the grace."""
        network = frozenset((*m[:-1], "late") if m[-1] == "dying" else m for m in self.network)
        after = self.environment._replace(sender_exiting=False)
        return self._change(("sender's process is gone", after.sender), 6, after, network)


def _matters(message: Message, around: Environment, sends: Abilities, receives: Abilities) -> bool:
    """Returns whether a process could notice this message, now or later.

    Transfer ids are never used again, so a message of a transfer that is over matters only if its caller waits.
    """
    kind, request, receiver, sender, *_ = message
    receiver_lives = around.receiver_up and around.receiver == receiver
    sender_lives = around.sender_up and around.sender == sender
    transfer = (request, receiver)
    match kind:
        case "opened" | "committed":
            return sender_lives and (_CALLS[kind], *transfer) in sends.calls
        case "drained":
            return receiver_lives and ("drain", *transfer) in receives.calls
        case "range":
            return receiver_lives and transfer in receives.transfers
        case "open" | "commit":
            waiting = sender_lives and (kind, *transfer) in sends.calls
            return waiting or (receiver_lives and transfer in receives.transfers)
        case "drain":
            waiting = receiver_lives and ("drain", *transfer) in receives.calls
            return waiting or transfer in sends.transfers or request not in sends.known
    return receiver_lives or message[-1] in ("posted", "landed")


_CALLS = {"opened": "open", "committed": "commit"}  # Answer -> call


def _failed(message: Message, around: Environment) -> tuple[Message, ...]:
    """Returns the error that the caller gets when its call, or the answer, is lost or late."""
    kind, request, receiver, sender, *_ = message
    if kind in ("open", "opened"):
        return (("opened", request, receiver, sender, "unavailable"),)
    if kind in ("commit", "committed"):
        return (("committed", request, receiver, sender, "unavailable"),)
    if kind in ("drain", "drained"):
        return (("drained", request, receiver, sender, 0, False),)
    return ()


def describe(label: tuple[Any, ...]) -> str:
    """Returns a step in words."""
    what, *about = label
    if not about:
        return str(what)
    if isinstance(about[0], tuple):
        return f"{what}: {_message_text(about[0])}" + "".join(f" ({more})" for more in about[1:])
    of = f"request {letter(about[0])}" if what not in _GENERATIONS else f"generation {about[0]}"
    return f"{what}, {of}"


_GENERATIONS = (
    "proof for sender",
    "proof for receiver",
    "sender is killed",
    "receiver is killed",
    "sender starts",
    "receiver starts",
    "sender's process is gone",
)


def _message_text(message: Message) -> str:
    kind, request, receiver, sender, *more = message
    pair = f"request {letter(request)}, sender {sender}, receiver {receiver}"
    match kind:
        case "write":
            return f"{more[2]} write of block {more[0]} to block {more[1][0]} ({pair})"
        case "range":
            return f"notification of block {more[0]} ({pair})"
        case "drained":
            answer = f"generation {more[0]}, clean {more[1]}" if more[0] else "none"
            return f"answer to drain: {answer} ({pair})"
        case "opened" | "committed":
            return f"answer to {'open' if kind == 'opened' else 'commit'}: {more[0] or 'ok'} ({pair})"
    return f"{kind} ({pair})"
