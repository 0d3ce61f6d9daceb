"""What the simulator needs of a prefix index: a publisher per pod process, a reader per gateway, and to break it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from common.index_records import Candidate, PodLoad, Reserved


class PublisherPort(Protocol):
    """Keeps one process's entries current, on the virtual clock."""

    def start(self, snapshot: Callable[[], list[bytes]], load: Callable[[], PodLoad]) -> None:
        """Registers and sends a snapshot (all hashes that the pod holds), then heartbeats and batches until stop()."""

    async def stop(self) -> None:
        """The process has died: nothing more is sent."""

    def stored(self, hashes: list[bytes]) -> None: ...

    def evicted(self, hashes: list[bytes]) -> None: ...


class ReaderPort(Protocol):
    """One gateway's look-ups. seconds: real time that they took in all, calls: how many."""

    calls: int
    seconds: float

    async def lookup(self, chain: Sequence[bytes], pods: Sequence[tuple[str, int]]) -> dict[str, int]:
        """Blocks of the chain that each (pod, generation) holds, from its start; those that hold none may be left out.

        Raises IndexUnavailable.
        """

    async def reserve(self, request_id: str, candidates: Sequence[Candidate]) -> Reserved:
        """Books a request on the cheapest candidate, atomically among gateways. Raises IndexUnavailable."""

    def time(self) -> float:
        """Seconds, of the clock by which bookings age."""

    async def unbook(self, pod: str, request_id: str) -> None:
        """Ends a booking. Raises IndexUnavailable."""

    async def poll(self) -> None:
        """Reads who the pods are, when that is needed for look-ups."""

    async def close(self) -> None: ...


class IndexBackend(Protocol):
    """away: while true, it answers nobody."""

    away: bool

    def publisher(self, pod: str, generation: int, block_size: int, num_blocks: int) -> PublisherPort: ...

    def reader(self) -> ReaderPort: ...
