"""The decisions of the fleet planner: how many pods of which role. Pure: no clock, no socket.

    readings -> need per role -> hysteresis and limits -> actions, with one sentence each

    prefill need = (forecast * uncached prompt tokens + backlog / BACKLOG_S) / (measured rate * target)
    decode need  = forecast * output tokens / (tokens per second of a pod at the ITL goal * target)

A pod is added as soon as it is needed. A pod is removed only if it was not needed at any decision of the last `calm_s`
seconds, one at a time. A pod that one role has too many and the other too few changes its role, which takes a second
instead of a start. The planner holds still while data are missing, stale or contradictory.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from common.types import PodLoad, Role
from fleet.forecast import RateForecast

BACKLOG_S = 20.0  #: A backlog is to be gone after so many seconds.
MAX_GAP_S = 60.0  #: Longest time between two readings whose difference still is a rate.


@dataclass(frozen=True, slots=True)
class PodReading:
    """One pod. `load` is its last report."""

    name: str
    role: Role
    load: PodLoad
    age_s: float  # Age of the report
    num_blocks: int
    block_size: int
    starting: bool = False  # It was added and does not serve yet


@dataclass(frozen=True, slots=True)
class DemandReading:
    """What the clients ask for, from all gateways. Counters since any moment; they never go back."""

    arrivals: float  # Requests, refused ones included
    prompt_tokens: float  # Prompt tokens of requests that were served
    uncached_tokens: float  # Of these, tokens that no cache held
    output_tokens: float
    served: float  # Requests that ended with an answer
    in_time: float  # Of these, requests within the objective
    waiting_tokens: float  # Prompt tokens that wait in the gateways now
    age_s: float


@dataclass(frozen=True, slots=True)
class FleetReading:
    """All figures of one moment."""

    at: float  # Seconds of the planner's clock
    pods: tuple[PodReading, ...]
    demand: DemandReading | None  # None if no gateway reports


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLimits:
    """Settings of the planner."""

    itl_s: float = 0.05  # Longest mean time between tokens of a request
    min_prefill: int = 1
    max_prefill: int = 16
    min_decode: int = 1
    max_decode: int = 16
    max_pods: int = 32
    scales: bool = True  # Pods can be started and stopped; False: only their roles change
    #: Share of its capacity that a pod should work at. Pods are started whole, so their mean is lower. In the sine of
    #: benchmarks/planner.py 1.08 with this margin takes 5% fewer GPU hours than 1.0 with 0.03, and keeps 95% of the
    #: requests in time, not 99%.
    target: float = 1.08
    margin: float = 0.1  # A pod is removed only if the rest would work at `target` with so much more load, and ...
    doubt: float = 3.0  # ... with so many standard deviations of the measured rate
    start_s: float = 30.0  # Time from the decision to add a pod until it serves
    calm_s: float = 40.0  # A pod is removed only if it was not needed for so long
    cooldown_s: float = 10.0  # Between two removals or role switches
    stale_s: float = 10.0  # Figures older than this are not used
    season_s: float = 0.0  # Length of a season of the load; 0: none is known


class ActionKind(StrEnum):
    """What the planner does; label of a metric."""

    ADD = "add"
    REMOVE = "remove"
    SWITCH = "switch"
    HOLD = "hold"


@dataclass(frozen=True, slots=True)
class FleetAction:
    """One change of the fleet, or none (HOLD)."""

    kind: ActionKind
    why: str  # One sentence for the log
    role: Role | None = None  # ADD, REMOVE: of the pods. SWITCH: the new role
    number: int = 0  # ADD: pods to start
    pod: str = ""  # REMOVE, SWITCH: this pod


@dataclass(frozen=True, slots=True)
class RoleNeed:
    """Pods of one role that the load needs, as fractions."""

    exact: float
    sure: float  # Less what chance may have added to the measured rate: what a pod is added for
    generous: float  # With the margin: what a pod is not removed for


@dataclass(slots=True)
class _Means:
    """Means per request, of the recent past."""

    uncached: float = 0.0
    prompt: float = 0.0
    output: float = 0.0


@dataclass
class FleetDecider:
    """Decides from one reading after the other. Call `decide` every few seconds."""

    limits: FleetLimits

    def __post_init__(self) -> None:
        self.forecast = RateForecast(self.limits.season_s)
        self.needs: dict[Role, RoleNeed] = {}  # Of the last decision
        self.usable = False  # The last reading had all figures
        self.in_time: float | None = None  # Share of the recent requests within the objective
        self._last: FleetReading | None = None
        self._means = _Means()
        self._past: dict[Role, deque[tuple[float, int]]] = {role: deque() for role in (Role.PREFILL, Role.DECODE)}
        self._removed_at = -math.inf
        self._began: float | None = None
        self._missing_since: float | None = None  # When a role was first without a pod

    def decide(self, reading: FleetReading) -> list[FleetAction]:
        """Returns the actions to take now, or one HOLD with its reason."""
        why = self._unusable(reading)
        self.usable = not why
        if why:
            self._past = {role: deque() for role in self._past}  # a gap tells nothing about what was needed in it
            return [FleetAction(ActionKind.HOLD, why)]
        if missing := self._fill_empty_roles(reading):
            return missing
        assert reading.demand is not None
        if why := self._observe(reading, reading.demand):
            return [FleetAction(ActionKind.HOLD, why)]
        self.needs = {
            Role.PREFILL: self._prefill_need(reading, reading.demand),
            Role.DECODE: self._decode_need(reading),
        }
        return self._act(reading)

    # -- what is known

    def _unusable(self, reading: FleetReading) -> str:
        """Returns why nothing can be decided; "" if all figures are there."""
        limit, demand = self.limits.stale_s, reading.demand
        if demand is None:
            return "no gateway reports its requests, or one serves several models"
        if demand.age_s > limit:
            return f"the gateways' last report is {demand.age_s:.0f} s old"
        if any(pod.role is Role.BOTH for pod in reading.pods):
            return "pods of role both are not planned: give each pod the role prefill or decode"
        late = [pod.name for pod in reading.pods if not pod.starting and pod.age_s > limit]
        if late:
            return f"the last report of {', '.join(sorted(late)[:3])} is older than {limit:g} s"
        if any(not math.isfinite(value) or value < 0 for value in _figures(demand)):
            return "a gateway reports a figure that is not a number of requests or tokens"
        if _empty_roles(reading):
            return ""
        if not any(pod.load.prefill_rate > 0 for pod in _of(reading, Role.PREFILL)):
            return "no prefill pod has measured its rate"
        if not any(pod.load.has_decode_times for pod in _of(reading, Role.DECODE)):
            return "no decode pod has measured its steps"
        return ""

    def _fill_empty_roles(self, reading: FleetReading) -> list[FleetAction]:
        """Returns the start of pods for a role without a pod, or why there is none; [] if each role has pods.

        No request is served without both roles, so there is nothing to forecast from. Pods that lose Redis register
        again within seconds: the role has to be empty for `stale_s`.
        """
        empty, limits = _empty_roles(reading), self.limits
        if not empty:
            self._missing_since = None
            return []
        self.usable, self._past = False, {role: deque() for role in self._past}
        self._missing_since = reading.at if self._missing_since is None else self._missing_since
        names = " and ".join(empty)
        if reading.at - self._missing_since < limits.stale_s:
            return [FleetAction(ActionKind.HOLD, f"no pod has the role {names}")]
        actions, room = [], limits.max_pods - len(reading.pods)
        for role in empty:
            low, high = self._bounds(role)
            why = f"no pod has the role {role} for {reading.at - self._missing_since:.0f} s"
            number = min(max(1, low), high, room) if limits.scales else 0
            if number > 0:
                room -= number
                actions.append(FleetAction(ActionKind.ADD, why, role, number))
                continue
            other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
            ready = [pod for pod in _of(reading, other) if not pod.starting]
            if high > 0 and len(ready) > max(1, self._bounds(other)[0]):
                actions.append(FleetAction(ActionKind.SWITCH, why, role, pod=_least_loaded(reading, other)))
        return actions or [FleetAction(ActionKind.HOLD, f"no pod has the role {names}, and the limits allow none")]

    def _observe(self, reading: FleetReading, demand: DemandReading) -> str:
        """Adds the difference to the last reading. Returns why nothing can be decided yet; "" if it can."""
        before, self._last = self._last, reading
        if before is None or before.demand is None:
            return "the first reading: a rate needs two"
        seconds, then = reading.at - before.at, before.demand
        deltas = [new - old for new, old in zip(_figures(demand)[:6], _figures(then)[:6], strict=True)]
        if not 0 < seconds <= MAX_GAP_S or min(deltas) < 0:
            return "a gateway restarted, or the last reading is too old: counters begin again"
        arrivals, prompt, uncached, output, served, in_time = deltas
        self.forecast.add(reading.at, seconds, arrivals)
        if served > 0:
            share, means = min(1.0, served / 50), self._means
            first = not means.prompt
            means.prompt += (1.0 if first else share) * (prompt / served - means.prompt)
            means.uncached += (1.0 if first else share) * (uncached / served - means.uncached)
            means.output += (1.0 if first else share) * (output / served - means.output)
            now = in_time / served
            self.in_time = now if self.in_time is None else self.in_time + share * (now - self.in_time)
        if not self.forecast.known:
            return "the load was observed for too short a time"
        if not self._means.prompt:
            return "no request has ended yet"
        return ""

    # -- what is needed

    def _prefill_need(self, reading: FleetReading, demand: DemandReading) -> RoleNeed:
        limits, pods = self.limits, _of(reading, Role.PREFILL)
        rates = [pod.load.prefill_rate for pod in pods if pod.load.prefill_rate > 0]
        rate = sum(rates) / len(rates)
        arrivals = self.forecast.peak(reading.at, limits.start_s)
        # A prompt pays its tokens at the measured rate, and its fixed time.
        overhead = max(pod.load.prefill_overhead_s for pod in pods)
        busy = arrivals * (self._means.uncached / rate + overhead)
        queue = demand.waiting_tokens + sum(pod.load.queued_tokens for pod in pods)
        backlog = max(0.0, queue / rate - len(pods)) / BACKLOG_S  # one second of work per pod is no backlog
        return self._need(busy, backlog)

    def _need(self, busy: float, backlog: float) -> RoleNeed:
        """Returns the need of pods that are busy all the time with the load, and with the backlog."""
        limits = self.limits
        more = 1 + limits.margin + limits.doubt * self.forecast.noise
        less = max(0.0, 1 - self.forecast.noise)
        needs = (busy + backlog, busy * less + backlog, busy * more + backlog)
        return RoleNeed(*(need / limits.target for need in needs))

    def _decode_need(self, reading: FleetReading) -> RoleNeed:
        limits, pods, means = self.limits, _of(reading, Role.DECODE), self._means
        measured = [pod for pod in pods if pod.load.has_decode_times]
        step = sum(pod.load.step_s for pod in measured) / len(measured)
        slope = sum(pod.load.step_slope_s for pod in measured) / len(measured)
        context = means.prompt + means.output
        room = min(pod.num_blocks * pod.block_size for pod in measured) / max(1.0, context)
        by_itl = (limits.itl_s - step) / slope if slope > 0 else math.inf
        sequences = max(1.0, min(room, by_itl))
        per_pod = sequences / (step + slope * sequences)
        arrivals = self.forecast.peak(reading.at, limits.start_s)
        busy = arrivals * means.output / per_pod
        waiting = sum(pod.load.waiting for pod in pods)
        backlog = waiting * means.output / per_pod / BACKLOG_S
        return self._need(busy, backlog)

    # -- what is done

    def _bounds(self, role: Role) -> tuple[int, int]:
        limits = self.limits
        if role is Role.PREFILL:
            return limits.min_prefill, limits.max_prefill
        return limits.min_decode, limits.max_decode

    def _act(self, reading: FleetReading) -> list[FleetAction]:
        now, limits = reading.at, self.limits
        have = {role: len(_of(reading, role)) for role in self._past}
        self._began = now if self._began is None else self._began
        want: dict[Role, int] = {}
        spare: dict[Role, int] = {}
        for role, past in self._past.items():
            low, high = self._bounds(role)
            want[role] = min(high, max(low, math.ceil(self.needs[role].sure - 1e-9)))
            past.append((now, min(high, max(low, math.ceil(self.needs[role].generous - 1e-9)))))
            while past and past[0][0] < now - limits.calm_s:
                past.popleft()
            calm = now - max(self._began, past[0][0]) >= 0.9 * limits.calm_s
            spare[role] = max(0, have[role] - max(need for _, need in past)) if calm else 0
        actions = self._switches(reading, have, want)
        for role in (Role.PREFILL, Role.DECODE):
            room = limits.max_pods - sum(have.values()) if limits.scales else 0
            if (missing := min(want[role] - have[role], room)) > 0:
                have[role] += missing
                actions.append(FleetAction(ActionKind.ADD, self._sentence(role, have[role]), role, missing))
        if limits.scales and not actions and now - self._removed_at >= limits.cooldown_s:
            for role in (Role.PREFILL, Role.DECODE):
                if spare[role] and have[role] > self._bounds(role)[0]:
                    self._removed_at = now
                    # A pod that still starts goes first: it may never serve, and the others do the work.
                    starting = [pod.name for pod in _of(reading, role) if pod.starting]
                    pod = starting[0] if starting else _least_loaded(reading, role)
                    actions.append(FleetAction(ActionKind.REMOVE, self._sentence(role, have[role] - 1), role, pod=pod))
                    break
        return actions or [FleetAction(ActionKind.HOLD, self._sentence(None, sum(have.values())))]

    def _switches(self, reading: FleetReading, have: dict[Role, int], want: dict[Role, int]) -> list[FleetAction]:
        """Returns a role switch if one role has a pod too many at this moment, and the other one too few."""
        now = reading.at
        if now - self._removed_at < self.limits.cooldown_s:
            return []
        for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
            extra = have[other] - max(self._bounds(other)[0], math.ceil(self.needs[other].generous - 1e-9))
            ready = sum(not pod.starting for pod in _of(reading, other))
            if want[role] > have[role] and extra > 0 and ready > self._bounds(other)[0]:
                self._removed_at = now
                have[role], have[other] = have[role] + 1, have[other] - 1
                pod = _least_loaded(reading, other)
                return [FleetAction(ActionKind.SWITCH, self._sentence(role, have[role]), role, pod=pod)]
        return []

    def _sentence(self, role: Role | None, number: int) -> str:
        """Says what the decision rests on."""
        needs = ", ".join(f"{each} {self.needs[each].exact:.2f}" for each in self._past)
        share = "unknown" if self.in_time is None else f"{self.in_time:.0%}"
        ahead = self.forecast.peak(self._last.at, self.limits.start_s) if self._last is not None else 0.0
        pods = f"{number} {role} pods" if role is not None else f"{number} pods"
        return (
            f"{pods}: {self.forecast.rate:.1f} requests/s, {ahead:.1f} expected in {self.limits.start_s:.0f} s, "
            f"{share} in time, needed pods: {needs}"
        )


def _empty_roles(reading: FleetReading) -> list[Role]:
    """Returns the roles that no pod has, starting ones included."""
    return [role for role in (Role.PREFILL, Role.DECODE) if not any(pod.role is role for pod in reading.pods)]


def _figures(demand: DemandReading) -> tuple[float, ...]:
    return (
        *(demand.arrivals, demand.prompt_tokens, demand.uncached_tokens, demand.output_tokens),
        *(demand.served, demand.in_time, demand.waiting_tokens, demand.age_s),
    )


def _of(reading: FleetReading, role: Role) -> list[PodReading]:
    return [pod for pod in reading.pods if pod.role is role and not pod.load.draining]


def _least_loaded(reading: FleetReading, role: Role) -> str:
    """Returns the pod of the role with the least work. Never a pod that still starts, if there is another."""

    def work(pod: PodReading) -> tuple[bool, int, int]:
        load = pod.load
        return pod.starting, load.running + load.waiting + load.reserved, load.queued_tokens

    return min(_of(reading, role), key=work).name
