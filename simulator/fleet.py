"""A simulated cluster whose pods come, go and change roles, by decisions of the fleet planner or of a schedule.

The planner's own code decides (fleet/decision.py), from the figures that pods and gateways would report. A pod is paid
from the moment when it is started, which takes `start_s`, until its last request has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from common.types import Role
from fleet.decision import ActionKind, DemandReading, FleetAction, FleetDecider, FleetReading, PodReading
from loadtest.workload.trace import WorkloadTrace
from simulator.cluster import SimulatedCluster
from simulator.pod import SimulatedPod
from simulator.spec import ClusterSpec, RequestOutcome, Slo

DECIDE_S = 5.0  #: Period of the planner.
SWITCH_S = 0.5  #: Time of a role switch after the pod's last request.
IDLE_POLL_S = 0.1


class FleetController(Protocol):
    """Decides how the fleet changes."""

    def actions(self, fleet: SimulatedFleet) -> list[FleetAction]:
        """Returns what to do now."""


@dataclass
class PlannedFleet:
    """The fleet planner."""

    decider: FleetDecider

    def actions(self, fleet: SimulatedFleet) -> list[FleetAction]:
        return self.decider.decide(fleet.reading())


@dataclass
class ScheduledFleet:
    """A schedule that is known before: `pods(t)` are the prefill and decode pods that serve at time t."""

    pods: Callable[[float], tuple[int, int]]

    def actions(self, fleet: SimulatedFleet) -> list[FleetAction]:
        now, found = fleet.clock.now, list[FleetAction]()
        soon, present = self.pods(now + fleet.start_s + DECIDE_S), self.pods(now)
        for role, ahead, at_once in zip((Role.PREFILL, Role.DECODE), soon, present, strict=True):
            have = [pod for pod in fleet.members if pod.role is role]
            if (missing := max(ahead, at_once) - len(have)) > 0:
                found.append(FleetAction(ActionKind.ADD, "schedule", role, missing))
            for pod in have[: max(0, len(have) - max(ahead, at_once))]:
                found.append(FleetAction(ActionKind.REMOVE, "schedule", role, pod=pod.pod.name))
        return found


@dataclass(eq=False)
class FleetMember:
    """One pod of the fleet."""

    pod: SimulatedPod
    role: Role  # The role that it has or is about to have
    paid_from: float
    serving: bool = False


@dataclass(frozen=True, slots=True)
class FleetRun:
    """A run in figures."""

    slo_share: float  # Share of the requests within the objective, refused ones included
    gpu_hours: float
    oscillations: int  # Times that the number of pods of a role grew after it had fallen
    switches: int
    max_pods: int
    outcomes: tuple[RequestOutcome, ...]
    #: (time, prefill pods, decode pods) after each change
    history: tuple[tuple[float, int, int], ...]


class SimulatedFleet(SimulatedCluster):
    """One run of a trace on a changing fleet."""

    def __init__(
        self, spec: ClusterSpec, trace: WorkloadTrace, slo: Slo, controller: FleetController | None, *, start_s: float
    ) -> None:
        """Without a controller the fleet stays as in `spec`."""
        super().__init__(spec, trace)
        self.start_s = start_s
        self.members = [FleetMember(pod, pod.role, 0.0, serving=True) for pod in self.pods]
        self.history: list[tuple[float, int, int]] = []
        self.switches = 0
        self._slo, self._controller = slo, controller
        self._paid_s = 0.0
        self._started = len(self.pods)
        self._served = self._in_time = self._prompt = self._uncached = self._output = 0

    def simulate(self) -> FleetRun:
        """Runs the whole trace."""
        self._note()
        if self._controller is not None:
            self.clock.call_after(DECIDE_S, self._decide)
        result = self.run(self._on_outcome)
        end = self._trace.requests[-1].arrival_s
        paid = self._paid_s + sum(max(0.0, end - member.paid_from) for member in self.members)
        met = sum(map(self._slo.is_met_by, result.outcomes))
        return FleetRun(
            slo_share=met / len(result.outcomes),
            gpu_hours=paid / 3600,
            oscillations=sum(_reversals(counts) for counts in list(zip(*self.history, strict=True))[1:]),
            switches=self.switches,
            max_pods=max(prefill + decode for _, prefill, decode in self.history),
            outcomes=result.outcomes,
            history=tuple(self.history),
        )

    def reading(self) -> FleetReading:
        """Returns what pods and gateways report now."""
        pods = tuple(
            PodReading(
                name=member.pod.name,
                role=member.role,
                load=member.pod.process.load(),
                age_s=0.0,
                num_blocks=member.pod.shape.num_blocks,
                block_size=member.pod.shape.block_size,
                starting=not member.serving,
            )
            for member in self.members
        )
        demand = DemandReading(
            arrivals=len(self.requests),
            prompt_tokens=self._prompt,
            uncached_tokens=self._uncached,
            output_tokens=self._output,
            served=self._served,
            in_time=self._in_time,
            waiting_tokens=0,
            age_s=0.0,
        )
        return FleetReading(self.clock.now, pods, demand)

    def _on_outcome(self, outcome: RequestOutcome) -> bool:
        if outcome.done:
            self._served += 1
            self._in_time += self._slo.is_met_by(outcome)
            self._prompt += outcome.prompt_len
            self._uncached += outcome.prompt_len - outcome.hit_tokens
            self._output += outcome.output_len
        return False

    def _decide(self) -> None:
        assert self._controller is not None
        for action in self._controller.actions(self):
            if action.kind is ActionKind.ADD and action.role is not None:
                for _ in range(action.number):
                    self._add(action.role)
            elif action.kind is ActionKind.REMOVE:
                self._remove(self._member(action.pod))
            elif action.kind is ActionKind.SWITCH and action.role is not None:
                self._switch(self._member(action.pod), action.role)
        self._note()
        self.clock.call_after(DECIDE_S, self._decide)

    def _member(self, name: str) -> FleetMember:
        return next(member for member in self.members if member.pod.name == name)

    def _note(self) -> None:
        counts = [sum(member.role is role for member in self.members) for role in (Role.PREFILL, Role.DECODE)]
        if not self.history or self.history[-1][1:] != tuple(counts):
            self.history.append((self.clock.now, counts[0], counts[1]))

    def _add(self, role: Role) -> None:
        self._started += 1
        pod = SimulatedPod(self.index, f"{role.value}-{self._started}", role, self._spec.rates, self._spec.shape(role))
        member = FleetMember(pod, role, self.clock.now)
        self.members.append(member)
        self.pods.append(pod)
        self.clock.call_after(self.start_s, lambda: self._serve(member))

    def _serve(self, member: FleetMember) -> None:
        if member in self.members:
            member.serving = True
            for gateway in self.gateways:
                gateway.add_pod(member.pod)

    def _leave(self, member: FleetMember) -> None:
        member.serving = False
        for gateway in self.gateways:
            gateway.remove_pod(member.pod)

    def _remove(self, member: FleetMember) -> None:
        self.members.remove(member)
        self._leave(member)

        def end() -> None:
            member.pod.kill()
            self._paid_s += max(0.0, min(self.clock.now, self._trace.requests[-1].arrival_s) - member.paid_from)

        self._when_idle(member.pod, end)

    def _switch(self, member: FleetMember, role: Role) -> None:
        """Changes the role: prompts end on the pod, answers move to other pods."""
        self.switches += 1
        former, member.role = member.role, role
        self._leave(member)

        def become() -> None:
            member.pod.change_role(role, self._spec.shape(role))
            self._serve(member)

        def empty() -> None:
            member.pod.kill()
            self.clock.call_after(SWITCH_S, become)

        if former is Role.DECODE:
            empty()
        else:
            self._when_idle(member.pod, empty)

    def _when_idle(self, pod: SimulatedPod, action: Callable[[], None]) -> None:
        if pod.on_lost:
            self.clock.call_after(IDLE_POLL_S, lambda: self._when_idle(pod, action))
        else:
            action()


def _reversals(counts: Sequence[float]) -> int:
    """Returns how often the number grew after it had fallen."""
    steps = [b - a for a, b in pairwise(counts) if a != b]
    return sum(a < 0 < b for a, b in pairwise(steps))


def share_within(run: FleetRun, slo: Slo, start_s: float, end_s: float) -> float:
    """Returns the share of the requests that arrived in a time and were within the objective; NaN without any."""
    chosen = [outcome for outcome in run.outcomes if start_s <= outcome.arrival_s < end_s]
    return sum(map(slo.is_met_by, chosen)) / len(chosen) if chosen else math.nan
