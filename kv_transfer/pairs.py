"""What this pod has exchanged with each other pod since its start, by the other's name: it outlives connections.

Written on the transfer thread, read by any: a reader sees recent counts, not all of one moment.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from common.pb import transfer_pb2
from kv_transfer.messages import PairStats, PeerStats, ReadWay

MAX_PAIRS = 1024  # names of pods that are gone are forgotten beyond this, the longest unused first
KEEP = 0.9  # weight of what was moved before, per busy spell
FRESH_S = 120.0  # a rate is of use for so long: where it says that reads are slow, none would come to correct it


class _Meter:
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
            if now - self.ended_at >= FRESH_S:
                self.recent_bytes = self.recent_s = 0.0
        self._under_way += 1

    def end(self, num_bytes: int, now: float) -> None:
        self._under_way -= 1
        self._bytes += num_bytes
        if not self._under_way:
            seconds, self.ended_at = now - self._since, now
            self.busy_s += seconds
            self.recent_s = KEEP * self.recent_s + seconds
            self.recent_bytes = KEEP * self.recent_bytes + self._bytes
            self._bytes = 0

    @property
    def gbps(self) -> float:
        """1e9 bytes per second; 0 while nothing was moved."""
        return self.recent_bytes / self.recent_s / 1e9 if self.recent_s > 0 else 0.0


class Pair:
    """Counts of one other pod. `begin` and `end` go around every write or read."""

    __slots__ = (
        "_all",
        "_clock",
        "_reads",
        "_writes",
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
        self._all, self._writes, self._reads = _Meter(), _Meter(), _Meter()

    def begin(self, *, reads: bool = False) -> None:
        """A write or read is posted."""
        now = self._clock()
        self._all.begin(now)
        (self._reads if reads else self._writes).begin(now)

    def end(self, blocks: int, num_bytes: int, *, pulled: bool, reads: bool = False) -> None:
        """It is terminal; what it moved, zeros when it failed."""
        now = self._clock()
        self.blocks += blocks
        self.pulled_blocks += blocks if pulled else 0
        self.bytes += num_bytes
        self._all.end(num_bytes, now)
        (self._reads if reads else self._writes).end(num_bytes, now)

    @property
    def busy_s(self) -> float:
        """Seconds in which something was under way."""
        return self._all.busy_s

    @property
    def gbps(self) -> float:
        """1e9 bytes per second while something was written, lately; 0 before."""
        return self._writes.gbps

    def read_gbps(self, way: ReadWay | None) -> float:
        """1e9 bytes per second while something was read, lately; of the read that found out the way, if that is newer;
        0 where both are long ago.
        """
        at, gbps = (self._reads.ended_at, self._reads.gbps) if self._reads.gbps else (float("-inf"), 0.0)
        if way is not None and way.at > at:
            at, gbps = way.at, way.gbps
        return gbps if self._clock() - at < FRESH_S else 0.0


class Pairs:
    """See the top of this file."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pairs: dict[str, Pair] = {}  # the last used at the end

    def of(self, pod: str) -> Pair:
        """The counts for this pod."""
        with self._lock:
            pair = self._pairs.pop(pod) if pod in self._pairs else Pair(self._clock)
            self._pairs[pod] = pair
            if len(self._pairs) > MAX_PAIRS:
                del self._pairs[next(iter(self._pairs))]
            return pair

    def stats(self, peers: tuple[PeerStats, ...]) -> tuple[PairStats, ...]:
        """Every pod that something was moved to or from, or that is connected (peers), by name."""
        connected = {peer.pod: peer for peer in peers}
        with self._lock:
            pairs = dict(self._pairs)
        found = []
        for pod in sorted({*connected, *pairs}):
            pair, peer = pairs.get(pod) or Pair(self._clock), connected.get(pod)
            way = peer.reads if peer else None
            found.append(
                PairStats(
                    pod=pod,
                    generation=peer.generation if peer else 0,
                    address=peer.address if peer else "",
                    transport=peer.transport if peer else "",
                    transport_source=peer.transport_source if peer else "",
                    gbps=pair.gbps or (peer.gbps if peer else 0.0),
                    read_transport=way.transport if way else "",
                    read_source=way.source if way else "",
                    read_gbps=pair.read_gbps(way),
                    reads_refused=bool(way and way.refused),
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
        gb_s=pair.gbps,
        read_transport=pair.read_transport,
        read_transport_source=pair.read_source,
        read_gb_s=pair.read_gbps,
        reads_refused=pair.reads_refused,
        transfers=pair.transfers,
        pulls=pair.pulls,
        blocks=pair.blocks,
        pulled_blocks=pair.pulled_blocks,
        bytes=pair.bytes,
        busy_s=pair.busy_s,
        exposed_s=pair.exposed_s,
        failures=pair.failures,
    )
