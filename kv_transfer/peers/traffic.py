"""KV traffic from this pod to each other pod, by the other pod's name. It outlives connections.

The transfer thread writes, any thread reads. A reader sees recent counts, not one consistent moment.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from common.pb import transfer_pb2
from kv_transfer.messages import PairStats, PeerStats

#: Beyond this number the pod without traffic for the longest time is forgotten.
MAX_PAIRS = 1024
#: Weight of the older traffic, per busy period.
RATE_DECAY = 0.9
#: After this long without a write the rate starts again from zero.
RATE_TTL_S = 120.0


class _RateMeter:
    """Recent rate of writes, measured while at least one is in flight. Times are the caller's clock."""

    __slots__ = ("_bytes", "_in_flight", "_since", "busy_s", "ended_at", "recent_bytes", "recent_s")

    def __init__(self) -> None:
        self.busy_s = self.recent_s = 0.0
        self.recent_bytes = 0.0
        self.ended_at = float("-inf")
        self._since = 0.0
        self._in_flight = self._bytes = 0

    def begin(self, now: float) -> None:
        if not self._in_flight:
            self._since = now
            if now - self.ended_at >= RATE_TTL_S:
                self.recent_bytes = self.recent_s = 0.0
        self._in_flight += 1

    def end(self, num_bytes: int, now: float) -> None:
        self._in_flight -= 1
        self._bytes += num_bytes
        if not self._in_flight:
            seconds, self.ended_at = now - self._since, now
            self.busy_s += seconds
            self.recent_s = RATE_DECAY * self.recent_s + seconds
            self.recent_bytes = RATE_DECAY * self.recent_bytes + self._bytes
            self._bytes = 0

    @property
    def gb_s(self) -> float:
        """1e9 bytes per second; 0 before the first byte."""
        return self.recent_bytes / self.recent_s / 1e9 if self.recent_s > 0 else 0.0


class PairTraffic:
    """Traffic to one other pod. `begin` and `end` enclose every write."""

    __slots__ = (
        "_clock",
        "_meter",
        "blocks",
        "bytes",
        "exposed_s",
        "failures",
        "pulled_blocks",
        "pulls",
        "transfers",
    )

    def __init__(self, clock: Callable[[], float]) -> None:
        self.transfers = self.pulls = self.blocks = self.pulled_blocks = self.bytes = self.failures = 0
        self.exposed_s = 0.0
        self._clock = clock
        self._meter = _RateMeter()

    def begin(self) -> None:
        """Records that a write is posted."""
        self._meter.begin(self._clock())

    def end(self, blocks: int, num_bytes: int, *, pulled: bool) -> None:
        """Records that a write is terminal.

        Args:
            blocks: 0 for a failed write, as is num_bytes.
            pulled: the write serves a pull.
        """
        self.blocks += blocks
        self.pulled_blocks += blocks if pulled else 0
        self.bytes += num_bytes
        self._meter.end(num_bytes, self._clock())

    @property
    def busy_s(self) -> float:
        """Seconds with at least one write in flight."""
        return self._meter.busy_s

    @property
    def gb_s(self) -> float:
        """Recent rate in 1e9 bytes per second, while writes are in flight; 0 before the first."""
        return self._meter.gb_s


class PairTrafficTable:
    """PairTraffic of every other pod. get() runs on the transfer thread, stats() on any."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        #: By pod; the most recently used is the last.
        self._pairs: dict[str, PairTraffic] = {}

    def get(self, pod: str) -> PairTraffic:
        """Returns the traffic to this pod."""
        with self._lock:
            pair = self._pairs.pop(pod) if pod in self._pairs else PairTraffic(self._clock)
            self._pairs[pod] = pair
            if len(self._pairs) > MAX_PAIRS:
                del self._pairs[next(iter(self._pairs))]
            return pair

    def stats(self, peers: tuple[PeerStats, ...]) -> tuple[PairStats, ...]:
        """Returns every pod with traffic or in `peers` (the connected pods), sorted by name."""
        connected = {peer.pod: peer for peer in peers}
        with self._lock:
            pairs = dict(self._pairs)
        found = []
        for pod in sorted({*connected, *pairs}):
            pair, peer = pairs.get(pod) or PairTraffic(self._clock), connected.get(pod)
            found.append(
                PairStats(
                    pod=pod,
                    generation=peer.generation if peer else 0,
                    address=peer.address if peer else "",
                    transport=peer.transport if peer else "",
                    transport_source=peer.transport_source if peer else "",
                    gb_s=pair.gb_s or (peer.gb_s if peer else 0.0),
                    transfers=pair.transfers,
                    pulls=pair.pulls,
                    blocks=pair.blocks,
                    pulled_blocks=pair.pulled_blocks,
                    bytes=pair.bytes,
                    busy_s=pair.busy_s,
                    exposed_s=pair.exposed_s,
                    failures=pair.failures,
                )
            )
        return tuple(found)


def pair_to_pb(pair: PairStats) -> transfer_pb2.Pair:
    """Converts to the wire format."""
    return transfer_pb2.Pair(
        pod=pair.pod,
        generation=pair.generation,
        address=pair.address,
        transport=pair.transport,
        transport_source=pair.transport_source,
        gb_s=pair.gb_s,
        transfers=pair.transfers,
        pulls=pair.pulls,
        blocks=pair.blocks,
        pulled_blocks=pair.pulled_blocks,
        bytes=pair.bytes,
        busy_s=pair.busy_s,
        exposed_s=pair.exposed_s,
        failures=pair.failures,
    )
