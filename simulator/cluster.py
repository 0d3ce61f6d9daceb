"""Runs a trace against a cluster of simulated pods and gateways, with faults.

Invariant: every request of the trace ends exactly once, done or refused; the run stops when all have.
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
    """At a time, for a while: a pod is dead (and then starts under its name with nothing), or, without a pod, the index
    is away.
    """

    at_s: float
    for_s: float
    pod: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """prefill, decode: pods; without decode pods a request ends with its first token.

    lag_s: what a change takes to reach the index beyond the publisher's batching. report_s: how often a gateway polls
    the pods. pull: prefill pods fetch prefixes from other pods. overhead_s: of the gateway, per request. warm_s: what
    arrives earlier is left out of the summary's times and rates.
    """

    rates: HardwareRates
    prefill: int
    decode: int = 0
    gateways: int = 1
    policy: str = "cost"
    pull: bool = False
    block_size: int = 512
    chunk_tokens: int = 2048
    prefill_blocks: int = 0  # 0: what the rates' KV memory holds
    decode_blocks: int = 0
    prefill_seqs: int = 64
    decode_seqs: int = 256
    lag_s: float = 0.0
    report_s: float = 0.5
    overhead_s: float = 0.001
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
    """outcomes: in order of arrival. busy: share of the run that each pod computed, by name."""

    summary: RunSummary
    outcomes: tuple[RequestOutcome, ...]
    busy: dict[str, float]
    events: int


class SimulatedCluster:
    """One run."""

    def __init__(self, spec: ClusterSpec, trace: WorkloadTrace, index: SimIndex | None = None) -> None:
        """The cluster runs on the index's clock; None makes an index with a clock of its own."""
        if trace.block_size != spec.block_size:
            raise ConfigError(f"the trace has blocks of {trace.block_size} tokens", field="block_size")
        self.index = SimIndex(VirtualClock(), lag_s=spec.lag_s) if index is None else index
        self.clock = self.index.clock
        self._spec = spec
        self._trace = trace
        names = [("prefill", Role.PREFILL, i) for i in range(spec.prefill)]
        names += [("decode", Role.DECODE, i) for i in range(spec.decode)]
        self.members = [
            SimulatedPod(self.index, f"{kind}-{i}", role, spec.rates, spec.shape(role)) for kind, role, i in names
        ]
        self.gateways = [
            SimulatedGateway(
                self.index,
                self.members,
                policy=spec.policy,
                seed=spec.seed * 1000 + i,
                block_size=spec.block_size,
                overhead_s=spec.overhead_s,
                pull=spec.pull,
            )
            for i in range(spec.gateways)
        ]
        self.flights: list[SimulatedRequest] = []
        self._left = len(trace.requests)

    def run(self, stop: Callable[[RequestOutcome], bool] | None = None) -> SimulationResult:
        """Runs until every request has ended, or `stop` returns True for a request that has just ended."""
        began = time.process_time()
        stopped = False

        def ended(flight: SimulatedRequest) -> None:
            nonlocal stopped
            self._left -= 1
            stopped = stopped or (stop is not None and stop(flight.outcome))

        self._launch(ended)
        for i, gateway in enumerate(self.gateways):
            self._poll(gateway, self._spec.report_s * i / len(self.gateways))
        for fault in self._spec.faults:
            self._plan_fault(fault)
        self.clock.run(lambda: self._left == 0 or stopped)
        outcomes = tuple(flight.outcome for flight in self.flights)
        prefills = [m for m in self.members if m.role is Role.PREFILL]
        summary = summarise(
            [outcome for outcome in outcomes if outcome.arrival_s >= self._spec.warm_s],
            [m.prompts for m in prefills],
            computed_tokens=sum(m.total_computed_tokens for m in prefills),
            sim_s=self.clock.now,
            cpu_s=time.process_time() - began,
        )
        busy = {m.name: m.pod.busy_s / max(self.clock.now, 1e-9) for m in self.members}
        return SimulationResult(summary, outcomes, busy, self.clock.events)

    def check(self) -> None:
        """Every pool adds up, and no live pod holds blocks of requests that ended. Raises InternalError, or asserts."""
        for member in self.members:
            if member.alive:
                member.pod.pool.check_integrity()
                assert member.pod.pool.counts().leased == 0, f"{member.name}: {member.pod.pool.counts()}"

    def _launch(self, ended: Callable[[SimulatedRequest], None]) -> None:
        """Arrivals schedule one another, so that the heap stays small."""
        requests = self._trace.requests

        def arrive(i: int) -> None:
            request = requests[i]
            gateway = self.gateways[i % len(self.gateways)]
            flight = SimulatedRequest(self.clock, gateway, f"r{i}", request, self._spec.block_size, ended)
            self.flights.append(flight)
            self.clock.call_at(self.clock.now, lambda: gateway.route(flight))
            if i + 1 < len(requests):
                self.clock.call_at(requests[i + 1].arrival_s, lambda: arrive(i + 1))

        self.clock.call_at(requests[0].arrival_s, lambda: arrive(0))

    def _poll(self, gateway: SimulatedGateway, delay_s: float) -> None:
        def poll() -> None:
            gateway.poll()
            self.clock.call_after(self._spec.report_s, poll)

        self.clock.call_after(delay_s, poll)

    def _plan_fault(self, fault: SimulatedFault) -> None:
        if not fault.pod:
            self.clock.call_at(fault.at_s, lambda: self._index_away(True))
            self.clock.call_at(fault.at_s + fault.for_s, lambda: self._index_away(False))
            return
        member = next((m for m in self.members if m.name == fault.pod), None)
        if member is None:
            raise ConfigError(f"there is no pod {fault.pod} that could fail", field="faults")
        self.clock.call_at(fault.at_s, member.kill)
        self.clock.call_at(fault.at_s + fault.for_s, member.restart)

    def _index_away(self, away: bool) -> None:
        self.index.away = away
