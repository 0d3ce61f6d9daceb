"""A pod of the simulated cluster under its stable name, through deaths and restarts.

Lifecycle: start (generation 1) -> kill -> restart (next generation, empty cache) -> ... A gateway notices a death by a
failed call or its next poll; the index notices it when the lease expires.
"""

from __future__ import annotations

from collections.abc import Callable

from common.types import Role
from simulator.decode_pod import SimulatedDecodePod
from simulator.hardware_rates import HardwareRates
from simulator.index import SimIndex, SimPublisher
from simulator.prefill_pod import PodShape, SimulatedPrefillPod


class NetworkLink:
    """A network adapter that sends one transfer after another. Times in seconds."""

    def __init__(self) -> None:
        self.free_at = 0.0  # When everything given to the link has been sent.

    def send(self, now: float, seconds: float) -> float:
        """Queues a transfer that takes `seconds`. Returns when it is done."""
        self.free_at = max(now, self.free_at) + seconds
        return self.free_at


class SimulatedPod:
    """A pod that can die and start again under the same name, with its network link and its requests."""

    def __init__(self, index: SimIndex, name: str, role: Role, rates: HardwareRates, shape: PodShape) -> None:
        self.name = name
        self.role = role
        self.shape = shape
        self.rates = rates
        self.generation = 0  # Number of the process, from 1.
        #: Called with the pod when it dies, by the id of the request that is lost.
        self.on_lost: dict[str, Callable[[SimulatedPod], None]] = {}
        self.prompts = 0  # Prompts that the pod was given.
        self.link = NetworkLink()
        self._computed_before = 0
        self._index = index
        self._publisher, self.process = self._start_process()

    @property
    def alive(self) -> bool:
        return self.process.alive

    @property
    def prefill(self) -> SimulatedPrefillPod:
        assert isinstance(self.process, SimulatedPrefillPod)
        return self.process

    @property
    def decode(self) -> SimulatedDecodePod:
        assert isinstance(self.process, SimulatedDecodePod)
        return self.process

    def _start_process(self) -> tuple[SimPublisher, SimulatedPrefillPod | SimulatedDecodePod]:
        """Starts a process of the next generation."""
        self.generation += 1
        self.link = NetworkLink()
        publisher = self._index.publisher(self.name, self.generation)
        kind = SimulatedPrefillPod if self.role is Role.PREFILL else SimulatedDecodePod
        process = kind(self._index.clock, self.rates, self.shape, publisher)
        publisher.start(process.pool.cached_hashes)
        return publisher, process

    def kill(self) -> None:
        """Ends the process. Its requests are notified, its cache is lost, its index entries stay until they expire."""
        if not self.process.alive:
            return
        self.process.kill()
        self._publisher.stop()
        lost, self.on_lost = list(self.on_lost.values()), {}
        for on_lost in lost:
            on_lost(self)

    def restart(self) -> None:
        """Starts a new process under the same name."""
        assert not self.process.alive
        self._computed_before = self.total_computed_tokens
        self._publisher, self.process = self._start_process()

    @property
    def total_computed_tokens(self) -> int:
        """Prompt tokens that all processes of this name computed."""
        process = self.process
        return self._computed_before + (process.computed_tokens if isinstance(process, SimulatedPrefillPod) else 0)
