"""The number of attempts of a request: which ones count."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import RoleChanged, Unavailable
from common.types import SamplingParams, ValidRequest
from gateway.dispatch.dispatch import MAX_ATTEMPTS, Dispatch
from gateway.telemetry.metrics import GatewayMetrics
from gateway.telemetry.timeline import Timeline


def attempt_of(outputs: dict[int, list[int]]) -> Any:
    queue = SimpleNamespace(unfinished=lambda: outputs, has_tokens=any(outputs.values()))
    return SimpleNamespace(token_queue=queue, blamed_pods={"a:1"}, layout_fingerprint="f" * 32, close=lambda: None)


@pytest.fixture
def run() -> Dispatch:
    router: Any = SimpleNamespace(metrics=GatewayMetrics())
    request = ValidRequest("r", "m", (1, 2), SamplingParams(max_tokens=8, n=2))
    return Dispatch(router, request, deadline=time.monotonic() + 60, timeline=Timeline("r", None, "test"))


def fail(dispatch: Dispatch, error: Exception, outputs: dict[int, list[int]]) -> None:
    dispatch._attempt_number += 1
    dispatch._attempt = attempt_of(outputs)
    dispatch._prepare_retry(error)  # type: ignore[arg-type]


def test_role_changes_before_the_samples_part_do_not_count_afterwards(run: Dispatch) -> None:
    """A sample of a group gave up at the first loss of its pod, because attempts that do not count were counted."""
    for _ in range(MAX_ATTEMPTS):
        fail(run, RoleChanged("it changes its role"), {0: [], 1: []})
    fail(run, RoleChanged("it changes its role"), {0: [5], 1: [5, 6]})
    sample = run.resumed_samples[1]
    for _ in range(MAX_ATTEMPTS - 1):
        fail(sample, Unavailable("the pod is gone"), {0: []})
    with pytest.raises(Unavailable):
        fail(sample, Unavailable("the pod is gone"), {0: []})
