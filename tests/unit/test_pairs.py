"""Rates of what was written and read, each by itself."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kv_transfer.messages import PeerStats, ReadWay
from kv_transfer.pairs import FRESH_S, Pair, Pairs

BYTES = 1_000_000_000


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def move(pair: Pair, clock: Clock, seconds: float, *, reads: bool) -> None:
    pair.begin(reads=reads)
    clock.now += seconds
    pair.end(1, BYTES, pulled=reads, reads=reads)


def test_slow_reads_leave_the_rate_of_writes_alone(clock: Clock) -> None:
    pair = Pair(clock)
    move(pair, clock, 0.01, reads=False)
    move(pair, clock, 2.0, reads=True)
    assert (pair.gbps, pair.read_gbps(None)) == (pytest.approx(100.0), pytest.approx(0.5))
    assert (pair.bytes, pair.busy_s) == (2 * BYTES, pytest.approx(2.01))


def test_a_rate_of_reads_is_believed_for_a_while_and_nothing_of_it_stays(clock: Clock) -> None:
    pair = Pair(clock)
    move(pair, clock, 2.0, reads=True)
    clock.now += FRESH_S - 1
    assert pair.read_gbps(None) == pytest.approx(0.5)
    clock.now += 1
    assert pair.read_gbps(None) == 0.0
    move(pair, clock, 0.01, reads=True)
    assert pair.read_gbps(None) == pytest.approx(100.0)


def test_the_newer_of_a_measurement_and_what_was_read_counts(clock: Clock) -> None:
    pair, way = Pair(clock), ReadWay("rdma", "reported", 40.0, at=0.0)
    assert pair.read_gbps(way) == 40.0
    move(pair, clock, 2.0, reads=True)
    assert pair.read_gbps(way) == pytest.approx(0.5)
    assert pair.read_gbps(ReadWay("rdma", "reported", 40.0, at=3.0)) == 40.0


def test_what_carries_reads_is_told_beside_what_carries_writes(clock: Clock) -> None:
    way = ReadWay("tcp", "reported", 0.5, at=0.0, refused="TCP")
    (pair,) = Pairs(clock).stats((PeerStats("h", 1, "h:1", "cuda_ipc", "reported", 310.0, way),))
    assert (pair.transport, pair.gbps) == ("cuda_ipc", 310.0)
    assert (pair.read_transport, pair.read_source, pair.read_gbps, pair.reads_refused) == ("tcp", "reported", 0.5, True)
