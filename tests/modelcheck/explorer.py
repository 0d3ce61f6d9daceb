"""Breadth-first search over all states of a world. It ends with a shortest schedule to the first violated invariant.

A schedule is a list of steps. Each step of a pod checks the invariants of that pod. The search ends with one more
invariant, progress: from each state, the steps of a fair network lead to an end in which every request has ended on
both pods and every block is free. A fair network delivers every message, lets every deadline pass, and starts every
process again.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass

from tests.modelcheck.world import State, Step, World, describe


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that does not hold."""

    what: str  #: The invariant, in words.
    schedule: tuple[str, ...]  #: A shortest list of steps that violates it, in words.

    def __str__(self) -> str:
        steps = [f"{number:>3}. {step}" for number, step in enumerate(self.schedule, 1)]
        return "\n".join([f"{self.what}, after {len(steps)} steps:", *steps])


@dataclass(frozen=True, slots=True)
class Result:
    """What an exploration found."""

    states: int  #: Different states that were reached.
    transitions: int  #: Steps from one state to another.
    pod_steps: int  #: Steps that the real code computed.
    depth: int  #: Number of steps to the state that is farthest from the first one.
    ends: int  #: States from which a fair network takes no further step.
    complete: bool  #: Every state within the bounds was visited.
    seconds: float  #: Duration of the exploration.
    violation: Violation | None = None


class _Search:
    """The states that were reached, numbered in the order of their discovery."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.states: list[State] = []
        self.numbers: dict[State, int] = {}
        self.parents = array("q")  #: The state from which each state was reached first; -1 for the first state.
        self.depths = array("h")  #: Steps from the first state.
        self.fair_steps = array("q")  #: The state to which a fair network goes next; -1 if it takes no step.
        self.labels: list[tuple[object, ...]] = []  #: The step by which each state was reached first.
        self.num_transitions = 0
        self.dead_end: Violation | None = None  #: The first state without a fair step in which something has not ended.

    def add(self, state: State, parent: int, label: tuple[object, ...]) -> int:
        """Returns the number of a state, which is a new one if the state is new."""
        number = self.numbers.setdefault(state, len(self.states))
        if number == len(self.states):
            self.states.append(state)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)
            self.fair_steps.append(-1)
            self.labels.append(label)
        return number

    def schedule(self, number: int) -> list[str]:
        """Returns a shortest list of steps to a state, in words."""
        found = []
        while number > 0:
            found.append(describe(self.labels[number]))
            number = self.parents[number]
        return found[::-1]

    def visit(self, number: int) -> Violation | None:
        """Adds the states that follow this one. Returns the violation if a step violates an invariant."""
        order, best = 1 << 30, -1
        for step in self.world.steps(self.states[number]):
            self.num_transitions += 1
            if step.fault:
                return self._violation(number, step)
            follower = self.add(step.state, number, step.label)
            if 0 < step.fair_order < order:
                order, best = step.fair_order, follower
        self.fair_steps[number] = best
        if best < 0 and self.dead_end is None and (left := self.world.leftovers(self.states[number])):
            self.dead_end = Violation(f"nothing moves any more, and {left[0]}", tuple(self.schedule(number)))
        return None

    def _violation(self, number: int, step: Step) -> Violation:
        return Violation(step.fault, (*self.schedule(number), describe(step.label)))

    def endless(self) -> Violation | None:
        """Returns a violation if the steps of a fair network do not lead from every state to an end."""
        if self.dead_end is not None:
            return self.dead_end
        ends = bytearray(len(self.states))  # by state: 1: leads to an end, 2: is on the way that is followed now
        for number in range(len(self.states)):
            way = []
            while not ends[number] and self.fair_steps[number] >= 0:
                ends[number] = 2
                way.append(number)
                number = self.fair_steps[number]
            if ends[number] == 2:
                left = self.world.leftovers(self.states[number])
                what = f"a fair network repeats itself, and {left[0] if left else 'messages have no end'}"
                return Violation(what, tuple(self.schedule(number)))
            for passed in way:
                ends[passed] = 1
            ends[number] = 1
        return None


def explore(world: World, *, max_states: int = 1 << 30) -> Result:
    """Visits every state, and stops at the first violated invariant or at about `max_states` states."""
    began = time.perf_counter()
    search = _Search(world)
    search.add(world.initial(), -1, ())
    violation, number = None, 0
    while violation is None and number < len(search.states) and len(search.states) < max_states:
        violation = search.visit(number)
        number += 1
    complete = violation is None and number == len(search.states)
    if complete:
        violation = search.endless()
    return Result(
        states=len(search.states),
        transitions=search.num_transitions,
        pod_steps=world.senders.num_steps + world.receivers.num_steps,
        depth=search.depths[-1],
        ends=sum(1 for following in search.fair_steps if following < 0) if complete else 0,
        complete=complete,
        seconds=time.perf_counter() - began,
        violation=violation,
    )
