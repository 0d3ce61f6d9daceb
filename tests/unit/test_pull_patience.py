"""The time limit of a pull, compared with computing the same tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pod.monitoring.rates import PodRates
from prefill_service.prefix_pull import MAX_TIME_S, MIN_TIME_S, UNKNOWN_TIME_S, pull_time_limit_s

STEP = 256


def measured(base: float, per_token: float, *sizes: int) -> PodRates:
    rates = PodRates(STEP)
    for size in sizes:
        rates.observe_step(size, 0, base + per_token * size)
    return rates


@given(
    base=st.floats(1e-4, 0.1),
    per_token=st.floats(1e-6, 1e-2),
    tokens=st.lists(st.integers(1, 100_000), min_size=2, max_size=2).map(sorted),
)
def test_a_pull_may_take_as_long_as_computing_and_no_longer(base: float, per_token: float, tokens: list[int]) -> None:
    rates = measured(base, per_token, STEP, STEP // 4, STEP)
    few, many = (pull_time_limit_s(rates, count) for count in tokens)
    for count, limit in zip(tokens, (few, many), strict=True):
        compute_s = rates.prefill_s(count)
        assert compute_s > 0
        assert limit <= max(MIN_TIME_S, compute_s)
        assert limit >= min(MAX_TIME_S, compute_s)
    assert few <= many


@given(base=st.floats(1e-5, 0.1), per_token=st.floats(1e-7, 1e-2), tokens=st.integers(1, 100_000))
def test_small_steps_alone_give_a_limit_that_follows_them(base: float, per_token: float, tokens: int) -> None:
    rates = measured(base, per_token, 2, 16, 32)
    assert rates.prefill_s(tokens) == 0.0
    limit = pull_time_limit_s(rates, tokens)
    assert MIN_TIME_S <= limit <= UNKNOWN_TIME_S
    assert limit <= max(MIN_TIME_S, 4 * rates.prefill_estimate_s(tokens))


def test_a_pull_gets_no_second_for_tokens_that_an_h200_computes_in_98_ms() -> None:
    """Measured with an 8B model: 36 ms for 1024 tokens, 98 ms for 4096, in steps of 2048."""
    rates = PodRates(2048)
    for _ in range(3):
        rates.observe_step(1024, 0, 0.0155 + 1024 * 2.016e-5)
        rates.observe_step(2048, 0, 0.0155 + 2048 * 2.016e-5)
    assert 0.05 <= pull_time_limit_s(rates, 4096) <= 0.15
    assert pull_time_limit_s(PodRates(2048), 4096) == UNKNOWN_TIME_S
