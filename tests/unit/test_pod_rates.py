"""What a pod says of its own speed."""

from __future__ import annotations

import pytest

from pod.rates import PodRates

FULL = 256


def test_small_steps_refuse_nobody() -> None:
    """A first prompt of one token takes as long as one of many."""
    rates = PodRates(FULL)
    for _ in range(5):
        rates.step(1, 0, 0.3)
    assert rates.prefill_s(4000) == 0
    rates.step(FULL, 0, 1.0)
    assert rates.prefill_s(4000) == pytest.approx(4000 / FULL, rel=0.3)


def test_a_step_is_a_fixed_time_and_a_time_per_token() -> None:
    rates = PodRates(FULL)
    for tokens in (10, FULL, 100, FULL, 200):
        rates.step(tokens, 0, 0.02 + tokens * 0.001)
    rate, base = rates.prefill()
    assert base == pytest.approx(0.02)
    assert rate == pytest.approx(FULL / 0.276)
