"""A pod's measurements of its own speed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pod.monitoring.rates import FASTEST_POINTS, PULL_TTL_S, PodRates


def test_rates_are_zero_before_the_first_step() -> None:
    rates = PodRates(256)
    rates.observe_step(0, 0, 1.0)
    rates.observe_step(8, 0, 0.0)
    rates.observe_hand_off(0, 1.0)
    assert (rates.prefill_fit(), rates.decode_fit(), rates.transfer_fit()) == ((0.0, 0.0),) * 3


@given(st.floats(0.0, 0.05), st.floats(1e-5, 1e-2), st.lists(st.integers(1, 256), min_size=5, max_size=60, unique=True))
def test_fixed_time_and_time_per_token_are_separated(base: float, slope: float, sizes: list[int]) -> None:
    rates = PodRates(256)
    for size in (1, *sizes, 256):  # enough spread for a fit
        rates.observe_step(size, 0, base + slope * size)
        rates.observe_step(0, size, base + slope * size)
        rates.observe_hand_off(size, base + slope * size)
    prefill_rate, overhead_s = rates.prefill_fit()
    assert prefill_rate == pytest.approx(256 / (base + 256 * slope), rel=1e-3)
    assert overhead_s == pytest.approx(base, rel=1e-3, abs=1e-5)
    assert rates.decode_fit() == pytest.approx((base, slope), rel=1e-3, abs=1e-5)
    assert rates.transfer_fit() == pytest.approx((1 / slope, base), rel=1e-3, abs=1e-5)


def test_equal_steps_give_a_rate_and_a_change_is_followed() -> None:
    rates = PodRates(256)
    for _ in range(10):
        rates.observe_step(256, 4, 0.26)
    assert rates.prefill_fit() == (pytest.approx(256 / 0.256), 0.0)
    for _ in range(200):
        rates.observe_step(256, 4, 0.52)
    assert rates.prefill_fit()[0] == pytest.approx(256 / 0.512, rel=0.01)


def test_decode_steps_of_one_size_leave_half_to_the_batch() -> None:
    rates = PodRates(256)
    for _ in range(10):
        rates.observe_step(0, 16, 0.032)
    assert rates.decode_fit() == pytest.approx((0.016, 0.001))


def test_a_chunk_beside_decodes_costs_the_time_that_it_adds_to_the_step() -> None:
    rates = PodRates(256)
    assert rates.chunk_s(64) == 0.0
    rates.observe_step(64, 0, 0.2)
    assert rates.chunk_s(64) == pytest.approx(0.2)  # as without decodes, until it is known
    for sequences in (2, 4, 8):
        rates.observe_step(0, sequences, 0.01 + 0.001 * sequences)
    for tokens in (16, 32, 64, 128):
        rates.observe_step(tokens, 4, 0.014 + 0.001 + 0.0005 * tokens)
    assert rates.chunk_s(64) == pytest.approx(0.001 + 0.032, rel=1e-3)


def test_the_time_of_a_pull_without_its_bytes_follows_the_latest_pulls() -> None:
    rates = PodRates(256)
    assert rates.pull_s() == 0.0
    rates.observe_pull(0.05, 0.03)
    assert rates.pull_s() == pytest.approx(0.02)
    for _ in range(60):
        rates.observe_pull(0.05, 0.04)
    assert rates.pull_s() == pytest.approx(0.01, rel=1e-2)
    for _ in range(60):
        rates.observe_pull(0.05, 0.5)  # the pair's rate was measured under load
    assert 0 < rates.pull_s() < 1e-3


def test_the_time_of_pulls_expires_without_new_pulls() -> None:
    """A long time stops all pulls, so no new pull would correct it."""
    now = [0.0]
    rates = PodRates(256, lambda: now[0])
    rates.observe_pull(2.0, 0.0)
    now[0] += PULL_TTL_S - 1
    assert rates.pull_s() == pytest.approx(2.0)
    now[0] += 1
    assert rates.pull_s() == 0.0
    rates.observe_pull(0.01, 0.0)
    assert rates.pull_s() == pytest.approx(0.01)


def test_short_prompts_alone_do_not_overestimate_long_ones() -> None:
    rates = PodRates(256)
    for tokens in (1, 1, 2, 1):
        rates.observe_step(tokens, 0, 0.1)
    per_s, base_s = rates.prefill_fit()
    assert base_s + 256 / per_s < 1.0


def test_one_slow_step_does_not_become_the_fixed_time_of_every_prompt() -> None:
    """The first steps of a process are slow. A burst of prompts would be refused, because each counts a fixed time."""
    rates = PodRates(2048)
    rates.observe_step(36, 0, 6.0)
    assert rates.prefill_fit() == (0.0, 0.0)
    rates.observe_step(36, 0, 6.0)
    assert rates.prefill_fit() == (0.0, 0.0)
    for tokens in (800, 400):
        rates.observe_step(tokens, 0, 0.1 + tokens * 5e-4)
        per_s, base_s = rates.prefill_fit()
        assert base_s <= 0.1 + tokens * 5e-4
    assert 12 * base_s + 1400 / per_s < 15.0


@given(st.lists(st.tuples(st.integers(1, 256), st.floats(1e-3, 10.0)), min_size=1, max_size=200))
def test_the_fixed_time_is_at_most_that_of_the_fastest_recent_step(steps: list[tuple[int, float]]) -> None:
    rates = PodRates(256)
    for tokens, seconds in steps:
        rates.observe_step(tokens, 0, seconds)
        rates.observe_step(0, tokens, seconds)
        rates.observe_hand_off(tokens, seconds)
    fastest = min(seconds for _, seconds in steps[-FASTEST_POINTS:])
    assert rates.prefill_fit()[1] <= fastest
    assert rates.decode_fit()[0] <= fastest
    assert rates.transfer_fit()[1] <= fastest
    assert all(part >= 0 for part in (*rates.prefill_fit(), *rates.decode_fit(), *rates.transfer_fit()))


@pytest.mark.parametrize("slow_steps", [1, 3, 12])
def test_steps_of_a_cold_pod_do_not_spoil_its_rates(slow_steps: int) -> None:
    """Kernels compile, and the machine is busy: the first steps take 20 s. The forecast must not be minutes."""
    rates = PodRates(256)
    for _ in range(slow_steps):
        rates.observe_step(256, 0, 20.0)
        rates.observe_step(0, 4, 5.0)
        rates.observe_hand_off(256, 3.0)
    for _ in range(3):
        rates.observe_step(256, 0, 0.25)
        rates.observe_step(0, 4, 0.02)
        rates.observe_hand_off(256, 0.01)
    assert rates.prefill_s(256) == pytest.approx(0.25, rel=0.1)
    assert rates.prefill_fit()[0] == pytest.approx(1024, rel=0.1)
    assert sum(rates.decode_fit()) == pytest.approx(0.0125, rel=0.1)  # half the step does not grow with sequences
    assert rates.transfer_fit()[0] == pytest.approx(25_600, rel=0.1)


def test_a_small_step_shows_that_a_large_one_was_slow_for_another_reason() -> None:
    rates = PodRates(256)
    rates.observe_step(256, 0, 20.0)
    for _ in range(3):
        rates.observe_step(64, 0, 0.07)
    assert rates.prefill_estimate_s(256) < 0.5


def test_one_slow_step_later_hardly_changes_the_rates_but_a_lasting_change_does() -> None:
    rates = PodRates(256)
    for _ in range(50):
        rates.observe_step(256, 0, 0.25)
    rates.observe_step(256, 0, 60.0)
    assert rates.prefill_s(256) < 0.35
    for _ in range(120):
        rates.observe_step(256, 0, 5.0)
    assert rates.prefill_s(256) == pytest.approx(5.0, rel=0.1)
