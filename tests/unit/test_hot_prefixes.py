"""The list of a pod's most used prefixes: what it counts, and its form in Redis."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.types import Role
from pod import warm_up
from pod.warm_up import HotPrefixes, merge_offers, parse_hot_prefixes
from prefix_index.store import PodRecord


def chain(name: int, blocks: int) -> list[bytes]:
    return [bytes([name, number]).ljust(16, b"\1") for number in range(blocks)]


def record(name: str) -> PodRecord:
    return PodRecord(name, 1, f"127.0.0.1:{len(name)}", Role.PREFILL, "m", "ab", "abcd", 16, 1, 1)


def test_the_most_used_prefixes_come_first_and_later_hits_count_more() -> None:
    now = [0.0]
    hot = HotPrefixes(lambda: now[0])
    assert hot.to_bytes() == b""
    for _ in range(8):
        hot.add(chain(1, 3))
    now[0] = 3 * warm_up.HALF_LIFE_S
    for _ in range(2):
        hot.add(chain(2, 2))
    found = parse_hot_prefixes(hot.to_bytes())
    assert [list(prefix.hashes) for prefix in found] == [chain(2, 2), chain(1, 3)]
    assert [prefix.hits for prefix in found] == pytest.approx([2.0, 1.0])
    now[0] += 100 * warm_up.HALF_LIFE_S
    hot.add(chain(3, 1))
    assert parse_hot_prefixes(hot.to_bytes())[0].hashes == tuple(chain(3, 1))


@pytest.mark.parametrize("idle_s", [50 * warm_up.HALF_LIFE_S, 1100 * warm_up.HALF_LIFE_S, 1e9])
def test_a_pod_that_was_idle_for_long_still_publishes_and_counts(idle_s: float) -> None:
    now = [0.0]
    hot = HotPrefixes(lambda: now[0])
    hot.add(chain(1, 3))
    now[0] += idle_s
    (old,) = parse_hot_prefixes(hot.to_bytes())
    assert old.hits == pytest.approx(0.0, abs=1e-12)
    for _ in range(3):
        hot.add(chain(2, 1))
    assert parse_hot_prefixes(hot.to_bytes())[0] == (pytest.approx(3.0), tuple(chain(2, 1)))


def test_the_list_and_its_bytes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "MAX_KNOWN", 20)
    hot = HotPrefixes()
    for number in range(100):
        hot.add(chain(number, 3))
    assert len(parse_hot_prefixes(hot.to_bytes())) == warm_up.MAX_PUBLISHED
    monkeypatch.setattr(warm_up, "MAX_PUBLISHED_BYTES", 120)
    assert len(parse_hot_prefixes(hot.to_bytes())) == 2


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused_or_parsed(raw: bytes) -> None:
    try:
        found = parse_hot_prefixes(raw)
    except ValueError:
        return
    assert sum(8 + 16 * len(prefix.hashes) for prefix in found) == len(raw)


def test_hits_of_several_pods_add_up_and_single_uses_are_left_out() -> None:
    lists = []
    for uses in ((1, 1, 2), (1, 3, 3, 3)):
        hot = HotPrefixes()
        for name in uses:
            hot.add(chain(name, 2))
        lists.append(hot.to_bytes())
    offers = merge_offers([(record("a"), lists[0]), (record("b"), lists[1]), (record("c"), None), (record("d"), b"x")])
    assert [offer.hashes for offer in offers] == [tuple(chain(1, 2)), tuple(chain(3, 2))]
    assert [round(offer.hits) for offer in offers] == [3, 3]
    assert [[holder.pod for holder in offer.holders] for offer in offers] == [["a", "b"], ["b"]]
