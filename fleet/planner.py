"""The fleet planner as a process: reads, decides, acts, and explains each decision in one log line and a metric."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from common.errors import BatonError
from common.telemetry import Metrics
from common.tls import TlsFiles
from common.types import PodLoad, Role
from fleet.decision import ActionKind, FleetAction, FleetDecider, FleetLimits, PodReading
from fleet.demand import FleetReader, ReadFleet
from fleet.lease import PlannerLease
from fleet.roles import PodAddress, operator_signer, switch_role
from fleet.scale import ScaleAdapter
from prefix_index.store import PodStatus

HOLD_LOG_S = 60.0  #: The same kind of decision to do nothing is logged again after this time.

_log = logging.getLogger(__name__)


class PlannerMetrics:
    """The metrics of the fleet planner."""

    def __init__(self) -> None:
        self.base = m = Metrics()
        m.add_process_metrics()
        self.decisions = m.counter("planner_decisions", "Decisions of the fleet planner", ["action", "role"])
        self.failures = m.counter("planner_failures", "Decisions that could not be carried out", ["action"])
        self.needed = m.gauge("planner_needed_pods", "Pods that the load needs, as a fraction", ["role"])
        self.pods = m.gauge("planner_pods", "Pods that the planner counts, starting ones included", ["role"])
        self.expected = m.gauge("planner_expected_requests_per_second", "Forecast of the arrivals")
        self.in_time = m.gauge("planner_in_time_ratio", "Share of the recent requests within the objective")
        self.read_at = m.gauge("planner_decided_timestamp_seconds", "When the planner last had all data")


@dataclass
class _Starting:
    """A pod that was ordered and is not in the index yet, if the scale adapter does not know."""

    role: Role
    until: float  # A pod that is not there by then does not count any more


class FleetPlanner:
    """Runs the decisions until it is cancelled."""

    def __init__(
        self,
        limits: FleetLimits,
        reader: FleetReader,
        scale: ScaleAdapter,
        metrics: PlannerMetrics,
        *,
        secret: str,
        tls: TlsFiles | None = None,
        drain_s: float = 30.0,
        acts: bool = True,
        lease: PlannerLease | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`acts`: False to change no roles either. `lease`: the planner decides only while it holds this lease."""
        self._lease = lease
        self._decider, self._limits = FleetDecider(limits), limits
        self._reader, self._scale, self._metrics = reader, scale, metrics
        self._signer = operator_signer(secret, f"planner-{secrets.token_hex(4)}")
        self._tls, self._drain_s, self._acts, self._clock = tls, drain_s, acts, clock
        self._starting: list[_Starting] = []
        self._switching: dict[str, tuple[Role, asyncio.Task[None]]] = {}  # By pod: its new role
        self._known: frozenset[str] = frozenset()
        self._held_since: float | None = None

    async def run(self, period_s: float) -> None:
        """Decides every `period_s` seconds, for ever."""
        try:
            while True:
                try:
                    await self.step()
                except BatonError as error:
                    self._hold(error.message)
                except Exception:
                    _log.exception("the planner could not decide")
                await asyncio.sleep(period_s)
        finally:
            for _, task in self._switching.values():
                task.cancel()  # the pod goes on with its change

    async def step(self) -> list[FleetAction]:
        """Reads, decides and acts once. Raises Unavailable if Redis does not answer."""
        if self._lease is not None and (other := await self._lease.hold()):
            self._hold(f"{other} decides; this planner waits")
            return []
        read = await self._reader.read(self._clock())
        reading = self._with_starting(read, await self._scale.pending(read.pods))
        actions = self._decider.decide(reading.reading)
        self._record(reading)
        for action in actions:
            if action.kind is ActionKind.HOLD:
                self._hold(action.why)
                continue
            self._held_since = None
            _log.info("%s %s: %s", action.kind, action.pod or f"{action.number} {action.role}", action.why)
            self._metrics.decisions.labels(action.kind.value, "" if action.role is None else action.role.value).inc()
            try:
                await self._act(action, read.pods)
            except BatonError as error:
                self._failed(action.kind, error)
        return actions

    def _with_starting(self, read: ReadFleet, pending: Mapping[Role, int] | None) -> ReadFleet:
        """Adds the ordered pods that are not registered yet, so that they are not ordered twice."""
        now = self._clock()
        if pending is not None:
            self._starting = [_Starting(role, math.inf) for role, number in pending.items() for _ in range(number)]
        for name in read.pods.keys() - self._known if self._known and pending is None else ():
            role = read.pods[name].record.role
            arrived = next((entry for entry in self._starting if entry.role is role), None)
            if arrived is not None:
                self._starting.remove(arrived)
        self._known = frozenset(read.pods)
        self._starting = [entry for entry in self._starting if entry.until > now]
        # A pod that changes its role counts in the new one. It takes no work until then.
        pods = tuple(
            replace(pod, role=self._switching[pod.name][0], load=PodLoad(), starting=True)
            if pod.name in self._switching
            else pod
            for pod in read.reading.pods
        )
        extra = tuple(
            PodReading(f"starting-{i}", entry.role, PodLoad(), 0.0, 0, 0, starting=True)
            for i, entry in enumerate(self._starting)
        )
        return replace(read, reading=replace(read.reading, pods=(*pods, *extra)))

    async def _act(self, action: FleetAction, pods: Mapping[str, PodStatus]) -> None:
        assert action.role is not None
        if action.kind is ActionKind.ADD:
            await self._scale.add(action.role, action.number)
            # A start that takes three times as long has failed, and the pod is ordered again.
            until = self._clock() + 3 * self._limits.start_s
            self._starting += [_Starting(action.role, until) for _ in range(action.number)]
        elif action.pod.startswith("starting-"):
            await self._scale.withdraw(action.role)
            self._starting.pop(int(action.pod.removeprefix("starting-")))
        elif action.kind is ActionKind.REMOVE:
            await self._scale.remove(action.pod, action.role)
        elif self._acts:
            record = pods[action.pod].record
            pod = PodAddress(record.pod, record.address, record.role, record.scope)
            # In the background: a drain takes longer than the time until the next decision.
            self._switching[pod.name] = action.role, asyncio.create_task(self._switch(pod, action.role))
        else:
            _log.info("would change the role of pod %s to %s", action.pod, action.role)

    async def _switch(self, pod: PodAddress, role: Role) -> None:
        try:
            await switch_role(pod, role, self._signer, drain_s=self._drain_s, tls=self._tls)
        except BatonError as error:
            self._failed(ActionKind.SWITCH, error)
        except Exception:
            self._metrics.failures.labels(ActionKind.SWITCH.value).inc()
            _log.exception("the role of pod %s could not be changed", pod.name)
        finally:
            del self._switching[pod.name]

    def _failed(self, kind: ActionKind, error: BatonError) -> None:
        self._metrics.failures.labels(kind.value).inc()
        _log.warning("the decision could not be carried out: %s", error.message)

    def _hold(self, why: str) -> None:
        """Counts a decision to do nothing, and logs it from time to time."""
        self._metrics.decisions.labels(ActionKind.HOLD.value, "").inc()
        now = self._clock()
        if self._held_since is None or now - self._held_since >= HOLD_LOG_S:
            self._held_since = now
            _log.info("hold: %s", why)

    def _record(self, read: ReadFleet) -> None:
        metrics, decider = self._metrics, self._decider
        for role, need in decider.needs.items():
            metrics.needed.labels(role.value).set(need.exact)
            metrics.pods.labels(role.value).set(sum(pod.role is role for pod in read.reading.pods))
        if decider.forecast.known:
            metrics.expected.set(decider.forecast.peak(read.reading.at, self._limits.start_s))
        if decider.in_time is not None:
            metrics.in_time.set(decider.in_time)
        if decider.usable:
            metrics.read_at.set_to_current_time()
