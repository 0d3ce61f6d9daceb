"""What a pod of the model can do next in each of its states, and the states that were reached."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tests.modelcheck.pods import Event, Message, Pod
from tests.modelcheck.receiver_pod import ReceiverPod
from tests.modelcheck.sender_pod import SenderPod
from tests.modelcheck.snapshot import clone

T = TypeVar("T", bound=Hashable)


class Numbers(Generic[T]):
    """Gives equal values the same number, counted from 0."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._numbers: dict[T, int] = {}

    def of(self, value: T) -> int:
        """Returns the number of a value."""
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a pod in one state can do next. Entries are numbers of requests, if nothing else is said."""

    leftovers: tuple[str, ...]  #: What has not ended, one sentence each.
    known: frozenset[int] = frozenset()  #: All requests that this process has ever had.
    connecting: tuple[tuple[int, int], ...] = ()  #: Request and generation of the receiver to which it connects.
    pushing: tuple[int, ...] = ()  #: Requests with a block that is not computed yet.
    live: tuple[int, ...] = ()  #: Transfers that a deadline or an abort can end.
    grace: tuple[int, ...] = ()  #: Transfers whose grace runs.
    peers: tuple[int, ...] = ()  #: Generations of the other pod whose end this pod would notice.
    waiting: tuple[Message, ...] = ()  #: For each caller that waits: the answer that it gets when its time is over.
    running: tuple[int, ...] = ()  #: Requests that decode.
    reserved: tuple[int, ...] = ()  #: Requests that wait for their KV.
    release_due: tuple[int, ...] = ()  #: Ended requests of which the transfer thread has not heard.
    #: Transfers of this process that are not over, by request and generation of the receiver.
    transfers: frozenset[tuple[int, int]] = frozenset()
    calls: frozenset[tuple[str, int, int]] = frozenset()  #: Calls without an answer: kind, request, receiver.


@dataclass
class PodStates:
    """The states of one pod that were reached, and the steps between them."""

    abilities_of: Callable[[Any], Abilities]
    pods: list[Any] = field(default_factory=list)  #: The pod in each state. It is never changed, only copied.
    abilities: list[Abilities] = field(default_factory=list)  #: By state.
    _numbers: dict[Hashable, int] = field(default_factory=dict)
    _steps: dict[tuple[int, Event], tuple[int, tuple[Message, ...], str]] = field(default_factory=dict)

    def number(self, pod: Pod) -> int:
        """Returns the number of a pod's state. A pod in a new state is kept."""
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
        """Steps that the real code computed."""
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


NOTHING = Abilities(())  #: The abilities of a process that does not run.
