"""The measured rate of writes to another pod."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kv_transfer.messages import PeerStats
from kv_transfer.peers.traffic import RATE_TTL_S, PairTraffic, PairTrafficTable

BYTES = 1_000_000_000


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def write(pair: PairTraffic, clock: Clock, seconds: float) -> None:
    pair.begin()
    clock.now += seconds
    pair.end(1, BYTES, pulled=False)


def test_a_rate_survives_short_pauses_and_starts_again_after_a_long_one(clock: Clock) -> None:
    pair = PairTraffic(clock)
    write(pair, clock, 2.0)
    clock.now += RATE_TTL_S - 1
    write(pair, clock, 2.0)
    assert pair.gb_s == pytest.approx(0.5)
    clock.now += RATE_TTL_S
    assert pair.gb_s == pytest.approx(0.5)
    write(pair, clock, 0.01)
    assert pair.gb_s == pytest.approx(100.0)
    assert (pair.bytes, pair.busy_s) == (3 * BYTES, pytest.approx(4.01))


def test_the_probe_gives_the_rate_until_something_is_written(clock: Clock) -> None:
    pairs, peer = PairTrafficTable(clock), PeerStats("h", 1, "h:1", "cuda_ipc", "reported", 310.0)
    (pair,) = pairs.stats((peer,))
    assert (pair.transport, pair.gb_s) == ("cuda_ipc", 310.0)
    write(pairs.get("h"), clock, 0.01)
    (pair,) = pairs.stats((peer,))
    assert pair.gb_s == pytest.approx(100.0)
