"""A pod of the simulated cluster under its stable name, through deaths and restarts.

Lifecycle: start (generation 1) -> kill -> restart (next generation, empty cache) -> ... A gateway only learns of a
death by a failed call or its next poll; the index only by the lease.
"""

from __future__ import annotations

from common.types import Role
from simulator.decode_pod import SimulatedDecodePod
from simulator.hardware_rates import HardwareRates
from simulator.index import SimIndex, SimPublisher
from simulator.prefill_pod import PodShape, SimulatedPrefillPod
from simulator.request import SimulatedRequest


class SimulatedPod:
    """flights: the requests that are lost when it dies. prompts: how many it was given."""

    def __init__(self, index: SimIndex, name: str, role: Role, rates: HardwareRates, shape: PodShape) -> None:
        self.name = name
        self.role = role
        self.shape = shape
        self.rates = rates
        self.generation = 0
        self.requests: dict[str, SimulatedRequest] = {}
        self.prompts = 0
        self._computed_before = 0
        self.link = NetworkLink()
        self._index = index
        self._publisher, self.pod = self._begin()

    @property
    def alive(self) -> bool:
        return self.pod.alive

    @property
    def prefill(self) -> SimulatedPrefillPod:
        assert isinstance(self.pod, SimulatedPrefillPod)
        return self.pod

    @property
    def decode(self) -> SimulatedDecodePod:
        assert isinstance(self.pod, SimulatedDecodePod)
        return self.pod

    def _begin(self) -> tuple[SimPublisher, SimulatedPrefillPod | SimulatedDecodePod]:
        """Starts a process of the next generation."""
        self.generation += 1
        self.link = NetworkLink()
        publisher = self._index.publisher(self.name, self.generation)
        kind = SimulatedPrefillPod if self.role is Role.PREFILL else SimulatedDecodePod
        pod = kind(self._index.clock, self.rates, self.shape, stored=publisher.stored, evicted=publisher.evicted)
        publisher.start(pod.pool.cached_hashes)
        return publisher, pod

    def kill(self) -> None:
        """The process dies: its requests learn it, its cache is gone, its index entries stay until they expire."""
        if not self.pod.alive:
            return
        self.pod.kill()
        self._publisher.stop()
        flights, self.requests = list(self.requests.values()), {}
        for flight in flights:
            flight.on_pod_lost(self)

    @property
    def total_computed_tokens(self) -> int:
        """By this process and those before it."""
        return self._computed_before + (self.pod.computed_tokens if isinstance(self.pod, SimulatedPrefillPod) else 0)

    def restart(self) -> None:
        """A new process under the same name."""
        assert not self.pod.alive
        self._computed_before = self.total_computed_tokens
        self._publisher, self.pod = self._begin()


class NetworkLink:
    """free_at: when everything given to it has been sent. Seconds."""

    __slots__ = ("busy_s", "free_at")

    def __init__(self) -> None:
        self.free_at = 0.0
        self.busy_s = 0.0

    def send(self, now: float, seconds: float) -> float:
        """Takes `seconds` of the link from now on, behind what it still sends; when that is done."""
        self.free_at = max(now, self.free_at) + seconds
        self.busy_s += seconds
        return self.free_at
