"""KeyBuckets: limits are never exceeded, and unused tokens are returned."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.api_keys import KeyLimits
from gateway.admission.limiter import DAY_MS, MINUTE_MS, KeyBuckets, duration

START = 20_000 * DAY_MS + 12 * 3_600_000

limits = st.builds(
    KeyLimits,
    requests_per_minute=st.integers(0, 20),
    tokens_per_minute=st.integers(0, 500),
    tokens_per_day=st.integers(0, 3000),
    concurrent=st.integers(0, 5),
)
arrivals = st.lists(
    st.tuples(st.integers(0, 40_000), st.integers(1, 300), st.integers(0, 120_000), st.floats(0, 1)), max_size=60
)


@given(limits, arrivals)
def test_no_limit_is_ever_exceeded(key: KeyLimits, arrivals: list[tuple[int, int, int, float]]) -> None:
    buckets, now = KeyBuckets(), START
    running: dict[str, tuple[int, int, int, int]] = {}  # end, cost, used, day
    granted: list[tuple[int, int]] = []  # when, tokens
    spent: dict[int, int] = {}
    for number, (gap, cost, life, part) in enumerate(arrivals):
        now += gap
        for name in [name for name, (end, *_) in running.items() if end <= now]:
            _, taken, used, day = running.pop(name)
            assert buckets.settle(key, name, taken, used, day, now)
            assert not buckets.settle(key, name, taken, used, day, now)
            spent[day] += used - taken if day == buckets.day else 0
        verdict = buckets.reserve(key, str(number), cost, now)
        if verdict.refused:
            assert verdict.wait_ms > 0
            continue
        running[str(number)] = (now + life, cost, int(cost * part), verdict.day)
        granted.append((now, cost))
        spent[verdict.day] = spent.get(verdict.day, 0) + cost
        assert not key.concurrent or len(running) <= key.concurrent
        assert not key.tokens_per_day or spent[verdict.day] <= key.tokens_per_day
    for i, (since, _) in enumerate(granted):
        for j, (until, _) in enumerate(granted[i:], i):
            minutes = 1 + (until - since) / MINUTE_MS
            if key.requests_per_minute:
                assert j - i + 1 <= key.requests_per_minute * minutes + 1e-6


@given(st.integers(10, 500), st.lists(st.tuples(st.integers(0, 30_000), st.integers(1, 300)), max_size=60))
def test_used_tokens_never_exceed_the_rate(tpm: int, arrivals: list[tuple[int, int]]) -> None:
    key, buckets, now = KeyLimits(tokens_per_minute=tpm), KeyBuckets(), START
    granted: list[tuple[int, int]] = []
    for number, (gap, cost) in enumerate(arrivals):
        now += gap
        if not buckets.reserve(key, str(number), cost, now).refused:
            granted.append((now, cost))
            buckets.settle(key, str(number), cost, cost, now // DAY_MS, now)
    for i, (since, _) in enumerate(granted):
        total = 0
        for until, cost in granted[i:]:
            total += cost
            assert total <= tpm * (1 + (until - since) / MINUTE_MS) + 1e-6


@given(limits, st.integers(1, 300))
def test_a_retry_after_the_suggested_wait_succeeds(key: KeyLimits, cost: int) -> None:
    buckets, now = KeyBuckets(), START
    if 0 < key.tokens_per_minute < cost or 0 < key.tokens_per_day < cost:
        return  # refused for good, see Limiter
    for number in range(40):
        verdict = buckets.reserve(key, str(number), cost, now)
        if verdict.refused in ("requests", "tokens", "day"):
            again = buckets.reserve(key, f"{number}-", cost, now + verdict.wait_ms)
            assert again.refused != verdict.refused
            return
        if not verdict.refused:
            buckets.settle(key, str(number), cost, cost, verdict.day, now)


def test_settle_returns_unused_tokens_and_charges_further_ones() -> None:
    key, buckets = KeyLimits(tokens_per_minute=100, tokens_per_day=150), KeyBuckets()
    assert buckets.reserve(key, "a", 100, START).tokens == 0
    assert buckets.reserve(key, "b", 10, START).refused == "tokens"
    buckets.settle(key, "a", 100, 20, START // DAY_MS, START)
    assert buckets.reserve(key, "b", 80, START).refused == ""
    assert buckets.reserve(key, "c", 60, START + MINUTE_MS).refused == "day"
    buckets.settle(key, "b", 80, 120, START // DAY_MS, START + MINUTE_MS)
    assert buckets.spent_today == 140
    assert buckets.reserve(key, "c", 90, START + DAY_MS).refused == ""


def test_reserving_for_a_running_request_changes_nothing() -> None:
    key, buckets = KeyLimits(requests_per_minute=2, concurrent=1), KeyBuckets()
    first = buckets.reserve(key, "a", 1, START)
    assert buckets.reserve(key, "a", 1, START) == first
    assert buckets.reserve(key, "b", 1, START).refused == "concurrent"


def test_durations_are_written_as_openai_does() -> None:
    assert [duration(ms) for ms in (0, 120, 1000, 7200, 59_999, 60_000, 3_600_000)] == [
        "0ms",
        "120ms",
        "1s",
        "7.2s",
        "59.999s",
        "1m0s",
        "1h0m0s",
    ]
