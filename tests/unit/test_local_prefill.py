"""Which pod computes the rest of a prompt, by the costs that a decode pod compares."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.types import RemotePrefillCost
from decode_service.admission import MAX_LOCAL_STEPS, DecodePodState, LocalPrefillPolicy, PrefillReason

CHUNK = 256
IDLE = DecodePodState(
    running=0, queued_tokens=0, chunk_tokens=CHUNK, step_s=0.006, chunk_s=lambda tokens: 0.001 + tokens * 2e-5
)
THERE = RemotePrefillCost(queue_s=0.0, compute_s=0.006, hand_off_s=0.005, tokens_per_s=50_000)
AUTO = LocalPrefillPolicy("auto")


def test_an_idle_pod_keeps_a_short_rest_and_a_busy_one_does_not() -> None:
    assert AUTO.decide(100, 900, IDLE, THERE, remote_only=False).local
    busy = AUTO.decide(100, 900, replace(IDLE, running=32), THERE, remote_only=False)
    assert (busy.local, busy.reason) == (False, PrefillReason.CHEAPER)
    assert busy.local_s > 32 * IDLE.chunk_s(100)  # the delay of all neighbours
    # A busy pod computes too if the queue of the prefill pod is long.
    assert AUTO.decide(100, 900, replace(IDLE, running=32), replace(THERE, queue_s=1.0), remote_only=False).local


def test_on_one_processor_the_earlier_first_token_decides() -> None:
    busy, shared = replace(IDLE, running=32), replace(THERE, same_processor=True)
    here = AUTO.decide(100, 900, busy, shared, remote_only=False)
    assert here.local_s == AUTO.decide(100, 900, replace(busy, running=1), THERE, remote_only=False).local_s - (
        IDLE.chunk_s(100)
    )
    assert here.local
    assert not AUTO.decide(100, 900, busy, replace(shared, compute_s=0.001), remote_only=False).local
    assert not AUTO.decide(100, 0, busy, shared, remote_only=False).local


def test_queued_local_prompts_count() -> None:
    assert not AUTO.decide(100, 900, replace(IDLE, queued_tokens=8 * CHUNK), THERE, remote_only=False).local


@pytest.mark.parametrize(
    ("uncached", "cached", "there", "reason"),
    [
        (5, 0, replace(THERE, queue_s=100.0), PrefillReason.NOTHING_CACHED),
        (MAX_LOCAL_STEPS * CHUNK + 1, 5000, replace(THERE, queue_s=100.0), PrefillReason.TOO_LONG),
        (100, 900, None, PrefillReason.UNKNOWN),
    ],
)
def test_whole_prompts_and_unknown_costs_go_to_a_prefill_pod(
    uncached: int, cached: int, there: RemotePrefillCost | None, reason: PrefillReason
) -> None:
    verdict = AUTO.decide(uncached, cached, IDLE, there, remote_only=False)
    assert (verdict.local, verdict.reason) == (False, reason)


def test_the_rate_of_the_prefill_pod_replaces_a_missing_measurement() -> None:
    fresh = replace(IDLE, chunk_s=lambda _: 0.0)
    assert AUTO.decide(100, 900, fresh, THERE, remote_only=False).local_s == pytest.approx(100 / 50_000)
    nobody = replace(THERE, tokens_per_s=0.0)
    assert AUTO.decide(100, 900, fresh, nobody, remote_only=False).reason is PrefillReason.UNKNOWN


@pytest.mark.parametrize("mode", ["off", "auto", "64"])
def test_the_setting_and_a_remote_only_request(mode: str) -> None:
    knob = LocalPrefillPolicy(mode)
    expensive = replace(THERE, queue_s=100.0)
    assert not knob.decide(10, 90, IDLE, expensive, remote_only=True).local
    verdict = knob.decide(64, 0, IDLE, None, remote_only=False)
    assert verdict.local == (mode == "64")
    assert not knob.decide(65, 0, IDLE, None, remote_only=False).local
    if mode == "off":
        assert knob.decide(1, 99, IDLE, expensive, remote_only=False).reason is PrefillReason.OFF


@given(
    uncached=st.integers(1, 2000),
    cached=st.integers(0, 5000),
    running=st.integers(0, 256),
    queued=st.integers(0, 5000),
    queue_s=st.floats(0, 10),
    more=st.floats(0, 10),
)
def test_a_longer_remote_queue_never_makes_a_prompt_remote(
    uncached: int, cached: int, running: int, queued: int, queue_s: float, more: float
) -> None:
    here = replace(IDLE, running=running, queued_tokens=queued)
    first = AUTO.decide(uncached, cached, here, replace(THERE, queue_s=queue_s), remote_only=False)
    second = AUTO.decide(uncached, cached, here, replace(THERE, queue_s=queue_s + more), remote_only=False)
    assert second.local or not first.local
    busier = replace(here, running=running + 1)
    assert (
        first.local
        or not AUTO.decide(uncached, cached, busier, replace(THERE, queue_s=queue_s), remote_only=False).local
    )
    if first.local:
        assert cached > 0
        assert uncached <= MAX_LOCAL_STEPS * CHUNK
