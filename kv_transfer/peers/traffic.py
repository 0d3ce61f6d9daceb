"""What this pod has exchanged with each other pod since its start, by the other's name: it outlives connections.

Written on the transfer thread, read by any: a reader sees recent counts, not all of one moment.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from common.pb import transfer_pb2
from kv_transfer.messages import PairStats, PeerStats

MAX_PAIRS = 1024  # names of pods that are gone are forgotten beyond this, the longest unused first
RATE_DECAY = 0.9  # weight of what was moved before, per busy spell
RATE_TTL_S = 120.0  # a rate begins afresh after so long without a write


class _RateMeter:
    """The rate while something was under way, lately. Times are the caller's clock."""

    __slots__ = ("_bytes", "_since", "_under_way", "busy_s", "ended_at", "recent_bytes", "recent_s")

    def __init__(self) -> None:
        self.busy_s = self.recent_s = 0.0
        self.recent_bytes = 0.0
        self.ended_at = float("-inf")
        self._since = 0.0
        self._under_way = self._bytes = 0

    def begin(self, now: float) -> None:
        if not self._under_way:
            self._since = now
            if now - self.ended_at >= RATE_TTL_S:
                self.recent_bytes = self.recent_s = 0.0
        self._under_way += 1

    def end(self, num_bytes: int, now: float) -> None:
        self._under_way -= 1
        self._bytes += num_bytes
        if not self._under_way:
            seconds, self.ended_at = now - self._since, now
            self.busy_s += seconds
            self.recent_s = RATE_DECAY * self.recent_s + seconds
            self.recent_bytes = RATE_DECAY * self.recent_bytes + self._bytes
            self._bytes = 0

    @property
    def gb_s(self) -> float:
        """1e9 bytes per second; 0 while nothing was moved."""
        return self.recent_bytes / self.recent_s / 1e9 if self.recent_s > 0 else 0.0


class PairTraffic:
    """Counts of one other pod. `begin` and `end` go around every write."""

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
        """A write is posted."""
        self._meter.begin(self._clock())

    def end(self, blocks: int, num_bytes: int, *, pulled: bool) -> None:
        """It is terminal; what it moved, zeros when it failed."""
        self.blocks += blocks
        self.pulled_blocks += blocks if pulled else 0
        self.bytes += num_bytes
        self._meter.end(num_bytes, self._clock())

    @property
    def busy_s(self) -> float:
        """Seconds in which something was under way."""
        return self._meter.busy_s

    @property
    def gb_s(self) -> float:
        """1e9 bytes per second while something was written, lately; 0 before."""
        return self._meter.gb_s


class PairTrafficTable:
    """See the top of this file."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pairs: dict[str, PairTraffic] = {}  # the last used at the end

    def get(self, pod: str) -> PairTraffic:
        """The counts for this pod."""
        with self._lock:
            pair = self._pairs.pop(pod) if pod in self._pairs else PairTraffic(self._clock)
            self._pairs[pod] = pair
            if len(self._pairs) > MAX_PAIRS:
                del self._pairs[next(iter(self._pairs))]
            return pair

    def stats(self, peers: tuple[PeerStats, ...]) -> tuple[PairStats, ...]:
        """Every pod that something was written to, or that is connected (peers), by name."""
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
    """A pod's traffic with another one for the wire."""
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
