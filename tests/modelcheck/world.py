"""The world of the model: a prefill pod (sender), a decode pod (receiver), their network, and all possible next steps.

- Real code: state machines, tables and block pools of both pods, and the check of generations (`product.MODULES`).
- Network: a set of messages. They arrive in any order; some are lost, late or doubled.
- Clock: it stands still. Any timer may fire at any step.
- Transfer thread and event loops: they run one command at a time. Handshake and probe are one step.
- Engine and gateway: they reserve, push, abort and finish at any time.

Two requests show a block that changes its owner. With three blocks in a pool, the second request must take a block of
the first. With two blocks in a request, ranges and pushes overtake each other. One assumption is not checked: a write
lands before the grace ends if it has failed or if its process is gone.

A state is four numbers. The real code computes each pair of pod state and event once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.modelcheck.abilities import NOTHING, Abilities, Numbers, PodStates, receiver_abilities, sender_abilities
from tests.modelcheck.pods import Bounds, Event, Message, letter
from tests.modelcheck.product import Product
from tests.modelcheck.receiver_pod import ReceiverPod
from tests.modelcheck.sender_pod import SenderPod

#: The whole bounds, by name; benchmarks/reliability/modelcheck.py explores them. The explorations of one request have a
#: restart of each pod, and the first one has all faults. Two requests take coarse steps, without faults and restarts,
#: because all of it together has too many states.
FULL = {
    "one request, ends of processes are seen": Bounds(requests=1, watched=True),
    "one request, restarts only": Bounds(requests=1, message_faults=0, failed_writes=0),
    "two requests": Bounds(coarse=True, message_faults=0, failed_writes=0, sender_restarts=0, receiver_restarts=0),
}
DOWN = -1  #: Number of the state of a pod that does not run.

State = tuple[int, int, int, int]  #: Numbers of the states of sender, receiver, network, environment.


class Environment(NamedTuple):
    """Both processes, the number of faults that are left, and the KV targets that the gateway knows."""

    sender: int = 1  #: Newest generation of the sender.
    sender_up: bool = True  #: The sender's process runs.
    sender_exiting: bool = False  #: A killed process of the sender has not ended: the grace does not bound its writes.
    receiver: int = 1  #: Newest generation of the receiver.
    receiver_up: bool = True  #: The receiver's process runs.
    message_faults: int = 0  #: Message faults that are left.
    failed_writes: int = 0  #: Failed writes that are left.
    #: KV target of each request: the receiver's generation and the blocks. None before its reservation.
    targets: tuple[tuple[int, tuple[int, ...]] | None, ...] = ()


@dataclass(slots=True)
class Step:
    """One possible step."""

    label: tuple[Any, ...]  #: What happens, and to what; `describe` makes a text of it.
    state: State  #: The state after the step.
    #: A fair network always takes the possible step with the lowest order. 0: it never takes this step, because the
    #: step is a fault or new work.
    fair_order: int = 0
    fault: str = ""  #: The invariant that the step violates; "" for none.


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
        """Returns the state in which both pods run and no request has come."""
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
        return filter(None, _NextSteps(self, state).all())


class _NextSteps:
    """The possible steps from one state. Methods yield None for a step that changes nothing."""

    def __init__(self, world: World, state: State) -> None:
        self.world, self.before = world, state
        self.sender, self.receiver = state[0], state[1]
        self.network = world.networks.values[state[2]]
        self.environment = world.environments.values[state[3]]
        self.sender_can = None if self.sender == DOWN else world.senders.abilities[self.sender]
        self.receiver_can = None if self.receiver == DOWN else world.receivers.abilities[self.receiver]

    def _step(
        self,
        label: tuple[Any, ...],
        fair_order: int = 0,
        *,
        sender: Event | None = None,
        receiver: Event | None = None,
        take: Message | None = None,
        put: tuple[Message, ...] = (),
        environment: Environment | None = None,
    ) -> Step | None:
        """Returns one step, or None if it changes nothing.

        Args:
            sender, receiver: event that this pod handles.
            take: message that leaves the network.
            put: messages that enter the network, besides those that the pods send.
            environment: the environment after the step; None if it stays.
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
        return Step(label, next_state, fair_order, fault) if fault or next_state != self.before else None

    def _state(self, sender: int, receiver: int, network: frozenset[Message], environment: Environment) -> State:
        """Returns the numbers of a state. Messages that no process would notice are left out of the network."""
        world = self.world
        sender_can = NOTHING if sender == DOWN else world.senders.abilities[sender]
        receiver_can = NOTHING if receiver == DOWN else world.receivers.abilities[receiver]
        useless = [message for message in network if not _matters(message, environment, sender_can, receiver_can)]
        left = network.difference(useless) if useless else network
        return sender, receiver, world.networks.of(left), world.environments.of(environment)

    def _faulty(self, label: tuple[Any, ...], **change: Any) -> Step | None:
        """Returns a step that is a message fault; None if no message faults are left."""
        left = self.environment.message_faults
        if not left:
            return None
        step = self._step(label, environment=self.environment._replace(message_faults=left - 1), **change)
        # A fault without an effect only lowers the number of faults that are left, so its followers need no visit.
        return None if step is not None and not step.fault and step.state[:3] == self.before[:3] else step

    def all(self) -> Iterator[Step | None]:
        """Yields all steps."""
        for message in self.world.sorted_messages(self.before[2]):
            yield from self._write(message) if message[0] == "write" else self._message(message)
        if self.sender_can is not None:
            yield from self._sender(self.sender_can)
        if self.receiver_can is not None:
            yield from self._receiver(self.receiver_can)
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
        environment = self.environment
        events: dict[str, Any] = {}
        if kind in ("open", "commit"):
            if not environment.receiver_up:
                events["put"] = _failed(message, environment)
            elif kind == "open":
                watch = self.world.bounds.watched and environment.sender_up and environment.sender == sender
                events["receiver"] = ("on_open", request, receiver, sender, watch)
            else:
                events["receiver"] = ("on_commit", request, receiver, sender)
        elif kind == "drain":
            if environment.sender_up:
                events["sender"] = ("drain", request, receiver, sender)
            else:
                events["put"] = _failed(message, environment)
        elif kind in ("opened", "committed"):
            events["sender"] = (kind, request, receiver, *more)
        elif kind == "drained":
            replaced = environment.sender_up and environment.sender > sender
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
        environment = self.environment
        for request, target in enumerate(environment.targets):
            if target is not None and request not in can.known:
                yield self._start(request, *target)
        for request, receiver in can.connecting:
            if environment.receiver_up and environment.receiver == receiver:
                events = {"sender": ("connected", request, receiver), "receiver": ("handshake", environment.sender)}
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
            ended = receiver < environment.receiver or not environment.receiver_up
            if ended and (self.world.bounds.watched or environment.receiver_up):
                yield self._step(("proof for sender", receiver), 7, sender=("peer_gone", receiver))
        for request in can.grace:
            yield self._step(("sender's grace", request), 9, sender=("grace", request))
        for answer in can.waiting:
            yield self._faulty(("time limit", answer), put=(answer,))
        yield self._step(("sender's timers",), 10, sender=("tick",))

    def _start(self, request: int, receiver: int, blocks: tuple[int, ...]) -> Step | None:
        """The gateway sends the prompt to the prefill pod. Without `odd_prefills` it does that once per KV target."""
        environment, bounds, change = self.environment, self.world.bounds, dict[str, Any]()
        target_lives = self.receiver_can is not None and environment.receiver == receiver
        if not bounds.odd_prefills:
            ended = self.receiver_can is not None and target_lives and request not in self.receiver_can.reserved
            if not blocks or ended:
                return None
            targets = (*environment.targets[:request], (receiver, ()), *environment.targets[request + 1 :])
            change["environment"] = environment._replace(targets=targets)
        if bounds.coarse:
            if not target_lives:
                return None  # the transfer would end at once
            change["receiver"] = ("handshake", environment.sender)
        step = self._step(("start", request), sender=("start", request, receiver, blocks), **change)
        return None if step is not None and step.state[0] == self.sender and not step.fault else step

    def _receiver(self, can: Abilities) -> Iterator[Step | None]:
        environment = self.environment
        for request, target in enumerate(environment.targets):
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
            if (sender < environment.sender or not environment.sender_up) and not environment.sender_exiting:
                yield self._step(("proof for receiver", sender), 7, receiver=("writer_gone", sender))
        for request in can.grace:
            yield self._grace(request)
        for answer in can.waiting:
            yield self._faulty(("time limit", answer), put=(answer,))
        yield self._step(("receiver's timers",), 10, receiver=("tick",))

    def _grace(self, request: int) -> Step | None:
        """The grace ends. A write that failed, or whose process is gone, has landed by now or never lands."""
        late = {m for m in self.network if m[:3] == ("write", request, self.environment.receiver) and m[-1] == "late"}
        receiver, sent, fault = self.world.receivers.step(self.receiver, ("grace", request))
        network = self.network.difference(late).union(sent)
        state = self._state(self.sender, receiver, network, self.environment)
        return Step(("receiver's grace", request), state, 9, fault)

    # -- processes ----------------------------------------------------------------------------------------------------
    def _processes(self) -> Iterator[Step | None]:
        environment, bounds = self.environment, self.world.bounds
        if environment.sender_up and environment.sender <= bounds.sender_restarts:
            yield self._kill_sender()
        if environment.receiver_up and environment.receiver <= bounds.receiver_restarts:
            yield self._kill_receiver()
        if environment.sender_exiting:
            yield self._exit()
        if not environment.sender_up:
            after = environment._replace(sender=environment.sender + 1, sender_up=True)
            pod = self.world.senders.number(SenderPod(self.world.product, bounds, after.sender))
            yield self._change(("sender starts", after.sender), 6, after, self.network, sender=pod)
        if not environment.receiver_up:
            after = environment._replace(receiver=environment.receiver + 1, receiver_up=True)
            pod = self.world.receivers.number(ReceiverPod(self.world.product, bounds, after.receiver))
            yield self._change(("receiver starts", after.receiver), 6, after, self.network, receiver=pod)

    def _change(
        self,
        label: tuple[Any, ...],
        fair_order: int,
        after: Environment,
        network: frozenset[Message],
        *,
        sender: int | None = None,
        receiver: int | None = None,
    ) -> Step:
        pods = self.sender if sender is None else sender, self.receiver if receiver is None else receiver
        return Step(label, self._state(*pods, network, after), fair_order)

    def _kill_sender(self) -> Step:
        """The process is killed. Its posted writes may still land, and its callers get their answers."""
        environment, watched = self.environment, self.world.bounds.watched
        assert self.sender_can is not None
        network = {
            (*message[:-1], "dying" if watched else "late")
            if message[0] == "write" and message[-1] == "posted"
            else message
            for message in self.network
            if message[-1] != "landed"
        }
        after = environment._replace(sender_up=False, sender_exiting=watched)
        label = ("sender is killed", environment.sender)
        return self._change(label, 0, after, frozenset(network.union(self.sender_can.waiting)), sender=DOWN)

    def _kill_receiver(self) -> Step:
        """The process is killed, and its memory is gone."""
        assert self.receiver_can is not None
        after = self.environment._replace(receiver_up=False)
        label = ("receiver is killed", after.receiver)
        return self._change(label, 0, after, self.network.union(self.receiver_can.waiting), receiver=DOWN)

    def _exit(self) -> Step:
        """The kernel has ended the killed process. From now on the grace bounds its writes."""
        network = frozenset((*m[:-1], "late") if m[-1] == "dying" else m for m in self.network)
        after = self.environment._replace(sender_exiting=False)
        return self._change(("sender's process is gone", after.sender), 6, after, network)


def _matters(message: Message, environment: Environment, sender_can: Abilities, receiver_can: Abilities) -> bool:
    """Returns whether a process could notice this message, now or later.

    A message of a transfer that is over matters only if a caller waits for the answer, because no transfer id is used
    twice.
    """
    kind, request, receiver, sender, *_ = message
    receiver_lives = environment.receiver_up and environment.receiver == receiver
    sender_lives = environment.sender_up and environment.sender == sender
    transfer = (request, receiver)
    match kind:
        case "opened" | "committed":
            return sender_lives and (_CALLS[kind], *transfer) in sender_can.calls
        case "drained":
            return receiver_lives and ("drain", *transfer) in receiver_can.calls
        case "range":
            return receiver_lives and transfer in receiver_can.transfers
        case "open" | "commit":
            waiting = sender_lives and (kind, *transfer) in sender_can.calls
            return waiting or (receiver_lives and transfer in receiver_can.transfers)
        case "drain":
            waiting = receiver_lives and ("drain", *transfer) in receiver_can.calls
            return waiting or transfer in sender_can.transfers or request not in sender_can.known
    return receiver_lives or message[-1] in ("posted", "landed")


_CALLS = {"opened": "open", "committed": "commit"}  #: Answer -> call.


def _failed(message: Message, environment: Environment) -> tuple[Message, ...]:
    """Returns the answer that a caller gets when its call, or the answer to it, is lost or late."""
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
