"""Counts the KV traffic from this pod to each other pod, by the other pod's name. The counts outlive connections.

The transfer thread writes, and any thread reads. The counts that a reader gets may be of slightly different moments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass

from common.pb import transfer_pb2
from kv_transfer.messages import PeerStats

MAX_PAIRS = 1024  #: Beyond this number the pod without traffic for the longest time is forgotten.
RATE_DECAY = 0.9  #: Weight of the older traffic, per busy period.
RATE_TTL_S = 120.0  #: After this long without a write the rate starts again from zero.
_COUNTS = ("transfers", "pulls", "blocks", "pulled_blocks", "bytes", "busy_s", "exposed_s", "failures")


@dataclass(slots=True)
class PairTraffic:
    """Traffic to one other pod. `begin` and `end` enclose every write. The counts are those of Pair in transfer.proto.

    The rate is measured while at least one write is in flight.
    """

    clock: Callable[[], float]
    transfers: int = 0
    pulls: int = 0
    blocks: int = 0
    pulled_blocks: int = 0
    bytes: int = 0
    busy_s: float = 0.0
    exposed_s: float = 0.0
    failures: int = 0
    _in_flight: int = 0
    _busy_since: float = 0.0  #: Begin of the current or last busy period.
    _busy_until: float = float("-inf")  #: End of the last busy period.
    _busy_bytes: int = 0  #: Moved in the current busy period.
    _recent_bytes: float = 0.0
    _recent_s: float = 0.0

    def begin(self) -> None:
        """Records that a write is posted."""
        if not self._in_flight:
            self._busy_since = self.clock()
            if self._busy_since - self._busy_until >= RATE_TTL_S:
                self._recent_bytes = self._recent_s = 0.0
        self._in_flight += 1

    def end(self, blocks: int, num_bytes: int, *, pulled: bool) -> None:
        """Records that a write is terminal. blocks and num_bytes are 0 if it failed. pulled: it serves a pull."""
        self.blocks += blocks
        self.pulled_blocks += blocks if pulled else 0
        self.bytes += num_bytes
        self._busy_bytes += num_bytes
        self._in_flight -= 1
        if not self._in_flight:
            self._busy_until = self.clock()
            seconds = self._busy_until - self._busy_since
            self.busy_s += seconds
            self._recent_s = RATE_DECAY * self._recent_s + seconds
            self._recent_bytes = RATE_DECAY * self._recent_bytes + self._busy_bytes
            self._busy_bytes = 0

    @property
    def gb_s(self) -> float:
        """Recent rate in 1e9 bytes per second, while writes are in flight; 0 before the first."""
        return self._recent_bytes / self._recent_s / 1e9 if self._recent_s > 0 else 0.0


class PairTrafficTable:
    """PairTraffic of every other pod. get() runs on the transfer thread, stats() on any."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pairs: dict[str, PairTraffic] = {}  #: By pod; the most recently used is the last.

    def get(self, pod: str) -> PairTraffic:
        """Returns the traffic to this pod."""
        with self._lock:
            pair = self._pairs.pop(pod) if pod in self._pairs else PairTraffic(self._clock)
            self._pairs[pod] = pair
            if len(self._pairs) > MAX_PAIRS:
                del self._pairs[next(iter(self._pairs))]
            return pair

    def stats(self, peers: tuple[PeerStats, ...]) -> tuple[transfer_pb2.Pair, ...]:
        """Returns one Pair for each pod that has traffic or is in `peers`, sorted by name.

        peers: connections, and behind them the pairs in trouble. The last entry of a pod counts.
        """
        connected = {peer.pod: peer for peer in peers}
        with self._lock:
            pairs = dict(self._pairs)
        found = []
        for pod in sorted({*connected, *pairs}):
            pair, peer = pairs.get(pod) or PairTraffic(self._clock), connected.get(pod)
            described = transfer_pb2.Pair(pod=pod) if peer is None else transfer_pb2.Pair(**asdict(peer))
            described.gb_s = pair.gb_s or described.gb_s
            for name in _COUNTS:
                setattr(described, name, getattr(pair, name))
            found.append(described)
        return tuple(found)
