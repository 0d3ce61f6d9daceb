"""The look-up cache of the index reader: validity and size."""

from __future__ import annotations

from prefix_index.lookup_cache import CACHE_S, MAX_ANSWERS, SETTLE_S, LookupCache
from prefix_index.store import PrefixHits

A, B = ("a", 1), ("b", 1)


def test_an_answer_is_valid_for_its_pods_and_for_cache_s() -> None:
    now = 5.0
    cache = LookupCache(clock=lambda: now)
    cache.put("s", b"x", 10, [A, B], {A: PrefixHits(4, 4)}, asked_at=now)
    assert cache.get("s", b"x", [A]) == {A: PrefixHits(4, 4)}
    assert cache.get("s", b"y", [A]) is None
    assert cache.get("t", b"x", [A]) is None
    assert cache.get("s", b"x", [A, ("c", 1)]) is None
    assert cache.get("s", b"x", [("a", 2)]) is None
    now += CACHE_S
    assert cache.get("s", b"x", [B, A]) is not None
    now += 0.01
    assert cache.get("s", b"x", [A]) is None


def test_a_booking_invalidates_the_answer_for_a_pod_that_may_gain_blocks() -> None:
    now = 5.0
    cache = LookupCache(clock=lambda: now)
    cache.put("s", b"x", 10, [A, B], {A: PrefixHits(4, 4), B: PrefixHits(2, 10)}, asked_at=now)
    cache.invalidate_pod("b")  # it holds all of it
    assert cache.get("s", b"x", [A, B]) is not None
    now += 0.1
    cache.invalidate_pod("a")
    assert cache.get("s", b"x", [B]) is not None
    assert cache.get("s", b"x", [A, B]) is None
    for wait, kept in ((SETTLE_S / 2, False), (SETTLE_S, True)):  # the index may not have known yet
        now += wait
        cache.put("s", b"x", 10, [A, B], {A: PrefixHits(4, 4)}, asked_at=now)
        assert (cache.get("s", b"x", [A]) is not None) is kept


def test_the_oldest_answers_are_evicted() -> None:
    cache = LookupCache(clock=lambda: 0.0)
    for i in range(MAX_ANSWERS + 1):
        cache.put("s", bytes([i // 256, i % 256]), 1, [A], {}, asked_at=0.0)
    assert cache.get("s", b"\0\0", [A]) is None
    assert cache.get("s", b"\0\1", [A]) == {}
