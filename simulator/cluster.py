"""Runs a trace on a cluster of simulated pods and gateways, with faults.

Invariant: every request of the trace ends exactly once, done or refused. The run stops when all have ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from common.errors import ConfigError
from common.types import Role
from loadtest.workload.trace import WorkloadTrace
from simulator.clock import VirtualClock
from simulator.gateway import SimulatedGateway
from simulator.hardware_rates import HardwareRates
from simulator.index import SimIndex
from simulator.outcome import RequestOutcome, RunSummary, summarise
from simulator.pod import SimulatedPod
from simulator.policies import POLICIES
from simulator.prefill_pod import PodShape
from simulator.request import SimulatedRequest

MAX_PODS = 1024


@dataclass(frozen=True, slots=True)
class SimulatedFault:
    """An outage from `at_s` for `for_s` seconds."""

    at_s: float
    for_s: float
    #: Name of a pod that dies and restarts with an empty cache; "" is an outage of the index.
    pod: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A cluster to simulate."""

    rates: HardwareRates
    #: Number of prefill pods.
    prefill: int
    #: Number of decode pods. With 0 a request ends with its first token.
    decode: int = 0
    gateways: int = 1
    policy: str = "cost"
    #: Prefill pods pull prefixes from other pods.
    pull: bool = False
    block_size: int = 512
    chunk_tokens: int = 2048
    #: KV blocks of a pod; 0 takes as many as the KV memory of `rates` holds.
    prefill_blocks: int = 0
    decode_blocks: int = 0
    #: Sequences that a pod runs at once.
    prefill_seqs: int = 64
    decode_seqs: int = 256
    #: Delay of a change on its way to the index, on top of the publisher's batching.
    lag_s: float = 0.0
    #: Period in which a gateway polls the pods.
    report_s: float = 0.5
    #: Time that the gateway adds to a request.
    overhead_s: float = 0.001
    #: Requests that arrive earlier do not count in the summary's times and rates.
    warm_s: float = 0.0
    seed: int = 0
    faults: tuple[SimulatedFault, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, not {self.policy}", field="policy")
        for name in ("prefill", "gateways", "block_size", "chunk_tokens", "prefill_seqs", "decode_seqs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", field=name)
        if self.decode < 0 or self.prefill + self.decode > MAX_PODS:
            raise ConfigError(f"at most {MAX_PODS} pods can be simulated", field="prefill")

    def shape(self, role: Role) -> PodShape:
        own, seqs = {
            Role.PREFILL: (self.prefill_blocks, self.prefill_seqs),
            Role.DECODE: (self.decode_blocks, self.decode_seqs),
        }[role]
        blocks = own or self.rates.pool_blocks(self.block_size)
        return PodShape(block_size=self.block_size, num_blocks=blocks, chunk_tokens=self.chunk_tokens, max_seqs=seqs)


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of one run."""

    summary: RunSummary
    #: In order of arrival.
    outcomes: tuple[RequestOutcome, ...]
    #: Share of the run in which each pod computed, by name.
    busy: dict[str, float]
    #: Actions that the clock ran.
    events: int


class SimulatedCluster:
    """One run of a trace."""

    def __init__(self, spec: ClusterSpec, trace: WorkloadTrace, index: SimIndex | None = None) -> None:
        """
        Args:
            index: The cluster uses its clock; None creates an index with a clock of its own.
        """
        if trace.block_size != spec.block_size:
            raise ConfigError(f"the trace has blocks of {trace.block_size} tokens", field="block_size")
        self.index = SimIndex(VirtualClock(), lag_s=spec.lag_s) if index is None else index
        self.clock = self.index.clock
        self._spec = spec
        self._trace = trace
        names = [("prefill", Role.PREFILL, i) for i in range(spec.prefill)]
        names += [("decode", Role.DECODE, i) for i in range(spec.decode)]
        self.pods = [
            SimulatedPod(self.index, f"{kind}-{i}", role, spec.rates, spec.shape(role)) for kind, role, i in names
        ]
        self.gateways = [
            SimulatedGateway(
                self.index,
                self.pods,
                policy=spec.policy,
                seed=spec.seed * 1000 + i,
                block_size=spec.block_size,
                overhead_s=spec.overhead_s,
                pull=spec.pull,
            )
            for i in range(spec.gateways)
        ]
        self.requests: list[SimulatedRequest] = []
        self._left = len(trace.requests)

    def run(self, stop: Callable[[RequestOutcome], bool] | None = None) -> SimulationResult:
        """Runs until every request has ended, or `stop` returns True for a request that has just ended."""
        began = time.process_time()
        stopped = False

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
        summary = summarise(
            [outcome for outcome in outcomes if outcome.arrival_s >= self._spec.warm_s],
            [pod.prompts for pod in prefills],
            computed_tokens=sum(pod.total_computed_tokens for pod in prefills),
            sim_s=self.clock.now,
            cpu_s=time.process_time() - began,
        )
        busy = {pod.name: pod.process.busy_s / max(self.clock.now, 1e-9) for pod in self.pods}
        return SimulationResult(summary, outcomes, busy, self.clock.events)

    def check(self) -> None:
        """Checks after a run that no live pod holds blocks of ended requests. Raises an error or asserts."""
        for pod in self.pods:
            if pod.alive:
                pool = pod.process.pool
                pool.check_integrity()
                assert pool.counts().leased == 0, f"{pod.name}: {pool.counts()}"

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
        if not fault.pod:
            self.clock.call_at(fault.at_s, lambda: self._set_index_unreachable(True))
            self.clock.call_at(fault.at_s + fault.for_s, lambda: self._set_index_unreachable(False))
            return
        pod = next((pod for pod in self.pods if pod.name == fault.pod), None)
        if pod is None:
            raise ConfigError(f"faults: there is no pod {fault.pod!r}", field="faults")
        self.clock.call_at(fault.at_s, pod.kill)
        self.clock.call_at(fault.at_s + fault.for_s, pod.restart)

    def _set_index_unreachable(self, unreachable: bool) -> None:
        self.index.unreachable = unreachable
