"""Breadth-first search over all states of a world, with a shortest schedule to the first violated invariant."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass

from tests.modelcheck.world import State, Step, World, describe


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that does not hold, and a shortest way to it."""

    what: str
    schedule: tuple[str, ...]

    def __str__(self) -> str:
        steps = [f"{number:>3}. {step}" for number, step in enumerate(self.schedule, 1)]
        return "\n".join([f"{self.what}, after {len(steps)} steps:", *steps])


@dataclass(frozen=True, slots=True)
class Result:
    """What an exploration found."""

    states: int
    transitions: int
    pod_steps: int  # Steps that the real code computed
    depth: int  # Longest shortest way to a state
    ends: int  # States in which nothing is left to do
    complete: bool  # Every state within the bounds was visited
    seconds: float
    violation: Violation | None = None


class _Search:
    """Visited states, each with the step that first led to it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.states: list[State] = []
        self.numbers: dict[State, int] = {}
        self.parents = array("q")
        self.depths = array("h")
        self.fair = array("q")  # The step that a fair network takes next; -1 if nothing is left to do
        self.labels: list[tuple[object, ...]] = []
        self.num_transitions = 0
        self.stuck: Violation | None = None  # The first state in which nothing moves, but something has not ended

    def add(self, state: State, parent: int, label: tuple[object, ...]) -> int:
        number = self.numbers.setdefault(state, len(self.states))
        if number == len(self.states):
            self.states.append(state)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)
            self.fair.append(-1)
            self.labels.append(label)
        return number

    def schedule(self, number: int) -> list[str]:
        """Returns the steps to a state, in words."""
        found = []
        while number > 0:
            found.append(describe(self.labels[number]))
            number = self.parents[number]
        return found[::-1]

    def visit(self, number: int) -> Violation | None:
        """Adds the states after this one. Returns the violation of a step."""
        order, best = 1 << 30, -1
        for step in self.world.steps(self.states[number]):
            self.num_transitions += 1
            if step.fault:
                return self._violation(number, step)
            follower = self.add(step.state, number, step.label)
            if 0 < step.fair < order:
                order, best = step.fair, follower
        self.fair[number] = best
        if best < 0 and self.stuck is None and (left := self.world.leftovers(self.states[number])):
            self.stuck = Violation(f"nothing moves any more, and {left[0]}", tuple(self.schedule(number)))
        return None

    def _violation(self, number: int, step: Step) -> Violation:
        return Violation(step.fault, (*self.schedule(number), describe(step.label)))

    def endless(self) -> Violation | None:
        """Returns a violation if a fair network does not lead from each state to one where everything has ended."""
        if self.stuck is not None:
            return self.stuck
        ends = bytearray(len(self.states))  # 1: ends, 2: on the current way
        for number in range(len(self.states)):
            way = []
            while not ends[number] and self.fair[number] >= 0:
                ends[number] = 2
                way.append(number)
                number = self.fair[number]
            if ends[number] == 2:
                left = self.world.leftovers(self.states[number])
                what = f"a fair network repeats itself, and {left[0] if left else 'messages have no end'}"
                return Violation(what, tuple(self.schedule(number)))
            for passed in way:
                ends[passed] = 1
            ends[number] = 1
        return None


def explore(world: World, *, max_states: int = 1 << 30) -> Result:
    """Visits every state, or at most about max_states, and stops at the first violated invariant.

    The invariants of steps are those of the pods. After the last state comes the invariant of progress: from every
    state, a network that delivers everything, deadlines that pass and processes that start again lead to an end in
    which every request has ended on both pods and every block is free.
    """
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
        ends=sum(1 for following in search.fair if following < 0) if complete else 0,
        complete=complete,
        seconds=time.perf_counter() - began,
        violation=violation,
    )
