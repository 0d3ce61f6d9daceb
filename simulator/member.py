"""A pod of the simulated cluster under its stable name, through deaths and restarts.

Lifecycle: start (generation 1) -> kill -> restart (next generation, empty cache) -> ... A gateway only learns of a
death by a failed call or its next poll; the index only by the lease.
"""

from __future__ import annotations

from common.types import Role
from simulator.decode_pod import DecodePod
from simulator.flight import Flight
from simulator.link import Link
from simulator.prefill_pod import PodShape, PrefillPod
from simulator.rates import Rates
from simulator.sim_index import SimIndex, SimPublisher


class Member:
    """flights: the requests that are lost when it dies. prompts: how many it was given."""

    def __init__(self, index: SimIndex, name: str, role: Role, rates: Rates, shape: PodShape) -> None:
        self.name = name
        self.role = role
        self.shape = shape
        self.rates = rates
        self.generation = 0
        self.requests: dict[str, Flight] = {}
        self.prompts = 0
        self._computed_before = 0
        self.link = Link()
        self._index = index
        self._publisher, self.pod = self._begin()

    @property
    def alive(self) -> bool:
        return self.pod.alive

    @property
    def prefill(self) -> PrefillPod:
        assert isinstance(self.pod, PrefillPod)
        return self.pod

    @property
    def decode(self) -> DecodePod:
        assert isinstance(self.pod, DecodePod)
        return self.pod

    def _begin(self) -> tuple[SimPublisher, PrefillPod | DecodePod]:
        """Starts a process of the next generation."""
        self.generation += 1
        self.link = Link()
        publisher = self._index.publisher(self.name, self.generation)
        kind = PrefillPod if self.role is Role.PREFILL else DecodePod
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
        return self._computed_before + (self.pod.computed_tokens if isinstance(self.pod, PrefillPod) else 0)

    def restart(self) -> None:
        """A new process under the same name."""
        assert not self.pod.alive
        self._computed_before = self.total_computed_tokens
        self._publisher, self.pod = self._begin()
