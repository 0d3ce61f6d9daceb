"""Runs a trace on a cluster of simulated pods and gateways, with faults.

Invariant: every request of the trace ends exactly once, done or refused. The run stops when all have ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from common.errors import ConfigError
from common.types import Role
from loadtest.workload.trace import WorkloadTrace
from simulator.clock import VirtualClock
from simulator.gateway import SimulatedGateway, SimulatedRequest
from simulator.index import SimIndex
from simulator.pod import SimulatedPod
from simulator.spec import ClusterSpec, RequestOutcome, RunSummary, SimulatedFault, summarise


@dataclass(frozen=True, slots=True)
class SimulationResult:
    summary: RunSummary
    outcomes: tuple[RequestOutcome, ...]  # In order of arrival.
    busy: dict[str, float]  # Share of the run in which each pod computed, by name.


class SimulatedCluster:
    """One run of a trace."""

    def __init__(self, spec: ClusterSpec, trace: WorkloadTrace, index: SimIndex | None = None) -> None:
        """The cluster uses the clock of the index. Without an index, it creates one."""
        if trace.block_size != spec.block_size:
            raise ConfigError(f"the trace has blocks of {trace.block_size} tokens", field="block_size")
        self.index = SimIndex(VirtualClock(), lag_s=spec.lag_s) if index is None else index
        self.clock = self.index.clock
        self._spec = spec
        self._trace = trace
        self.pods = [
            SimulatedPod(self.index, f"{role.value}-{i}", role, spec.rates, spec.shape(role))
            for role, count in ((Role.PREFILL, spec.prefill), (Role.DECODE, spec.decode))
            for i in range(count)
        ]
        self.gateways = [
            SimulatedGateway(self.index, self.pods, spec, seed=spec.seed * 1000 + i) for i in range(spec.gateways)
        ]
        self.requests: list[SimulatedRequest] = []
        self._left = len(trace.requests)

    def run(self, stop: Callable[[RequestOutcome], bool] | None = None) -> SimulationResult:
        """Runs until every request has ended, or `stop` returns True for a request that has just ended."""
        began, stopped = time.process_time(), False

        def on_end(request: SimulatedRequest) -> None:
            nonlocal stopped
            self._left -= 1
            stopped = stopped or (stop is not None and stop(request.outcome))

        self._schedule_arrivals(on_end)
        for i, gateway in enumerate(self.gateways):
            self._poll(gateway, self._spec.report_s * i / len(self.gateways))
        for fault in self._spec.faults:
            self._schedule_fault(fault)
        self.clock.run(lambda: self._left == 0 or stopped)
        outcomes = tuple(request.outcome for request in self.requests)
        prefills = [pod for pod in self.pods if pod.role is Role.PREFILL]
        counted = [outcome for outcome in outcomes if outcome.arrival_s >= self._spec.warm_s]
        computed = sum(pod.computed_before + pod.process.computed_tokens for pod in prefills)
        own = {"computed_tokens": computed, "cpu_s": time.process_time() - began}
        summary = summarise(counted, [pod.prompts for pod in prefills], **own)
        busy = {pod.name: pod.process.busy_s / max(self.clock.now, 1e-9) for pod in self.pods}
        return SimulationResult(summary, outcomes, busy)

    def check(self) -> None:
        """Checks after a run that no live pod holds blocks of ended requests. Raises an error or asserts."""
        for pod in (pod for pod in self.pods if pod.alive):
            pod.process.pool.check_integrity()
            assert pod.process.pool.counts().leased == 0, f"{pod.name}: {pod.process.pool.counts()}"

    def _schedule_arrivals(self, on_end: Callable[[SimulatedRequest], None]) -> None:
        """Schedules the first arrival. Each arrival schedules the next one, so that the clock's heap stays small."""
        arrivals = self._trace.requests

        def arrive(i: int) -> None:
            gateway = self.gateways[i % len(self.gateways)]
            request = SimulatedRequest(self.clock, gateway, f"r{i}", arrivals[i], self._spec.block_size, on_end)
            self.requests.append(request)
            self.clock.call_at(self.clock.now, lambda: gateway.route(request))
            if i + 1 < len(arrivals):
                self.clock.call_at(arrivals[i + 1].arrival_s, lambda: arrive(i + 1))

        self.clock.call_at(arrivals[0].arrival_s, lambda: arrive(0))

    def _poll(self, gateway: SimulatedGateway, delay_s: float) -> None:
        def poll() -> None:
            gateway.poll()
            self.clock.call_after(self._spec.report_s, poll)

        self.clock.call_after(delay_s, poll)

    def _schedule_fault(self, fault: SimulatedFault) -> None:
        pod = next((pod for pod in self.pods if pod.name == fault.pod), None)
        begin: Callable[[], None]
        end: Callable[[], None]
        if pod is not None and fault.slower:
            begin, end = partial(pod.slow_down, fault.slower), partial(pod.slow_down, 1.0)
        elif pod is not None:
            begin, end = pod.kill, pod.restart
        elif not fault.pod:
            begin, end = (partial(setattr, self.index, "unreachable", away) for away in (True, False))
        else:
            raise ConfigError(f"faults: there is no pod {fault.pod!r}", field="faults")
        self.clock.call_at(fault.at_s, begin)
        self.clock.call_at(fault.at_s + fault.for_s, end)
