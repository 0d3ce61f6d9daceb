"""Differences of counters and histograms over the dashboard's window."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.telemetry import UnlabeledHistogram
from common.types import PoolCounts
from gateway.dashboard.history import (
    PERIOD_S,
    WINDOW_S,
    HistogramSnapshot,
    MetricsHistory,
    MetricsSample,
    MetricsWindow,
)
from gateway.pods.info import DraftCounts, PeerTraffic, PodActivity
from gateway.telemetry.metrics import GatewayMetrics

BOUNDS = (0.1, 0.5, 1.0, 5.0)
VALUES = st.lists(st.floats(0, 4.9), max_size=40)


def shape(tally: UnlabeledHistogram) -> HistogramSnapshot:
    return HistogramSnapshot.from_metric(next(iter(tally.collect())))


def observed(values: Sequence[float]) -> UnlabeledHistogram:
    tally = UnlabeledHistogram("t", "T.", BOUNDS)
    for value in values:
        tally.observe(value)
    return tally


@given(VALUES, VALUES, st.floats(0.01, 1))
def test_a_difference_has_the_percentiles_of_the_window(before: list[float], after: list[float], q: float) -> None:
    tally = observed(before)
    start = shape(tally)
    for value in after:
        tally.observe(value)
    between = shape(tally).difference(start)
    assert between.count == len(after)
    assert between.total == pytest.approx(sum(after))
    found = between.quantile(q)
    if not after:
        assert found is None
        return
    exact = sorted(after)[max(0, -int(-q * len(after) // 1) - 1)]
    below = max((bound for bound in (0.0, *BOUNDS) if bound < exact), default=0.0)
    above = min(bound for bound in BOUNDS if bound >= exact)
    assert found is not None
    assert below <= found <= above


def test_observations_above_the_last_bound_count_as_that_bound() -> None:
    assert shape(observed([50.0])).quantile(0.5) == 5.0


def activity(**fields: object) -> PodActivity:
    return PodActivity(PoolCounts(1, 0, 1, 0), **fields)  # type: ignore[arg-type]


def test_restarted_pods_and_new_connections_count_from_zero() -> None:
    drafts = DraftCounts("ngram", 10, 20, 5, False)
    old = activity(prefilled=100, generated=50, drafts=drafts, links=(PeerTraffic("d", "tcp", 900, 9.0, 1.0),))
    new = activity(
        prefilled=300,
        generated=90,
        preemptions=2,
        drafts=DraftCounts("ngram", 30, 60, 35, True),
        links=(PeerTraffic("d", "tcp", 1000, 10.0, 1.0), PeerTraffic("d", "cma", 7, 1.0, 2.0)),
    )
    born = activity(prefilled=40, links=(PeerTraffic("d", "tcp", 5, 0.5, 1.0),))
    start = MetricsSample(0.0, {}, {}, {("p", 1): old, ("q", 1): old})
    window = MetricsWindow(start, MetricsSample(10.0, {}, {}, {("p", 1): new, ("q", 2): born}))
    assert window.pod_rate(("p", 1), "prefilled") == 20
    assert window.pod_rate(("p", 1), "generated") == 4
    assert window.pod_rate(("q", 2), "prefilled") == 4
    assert window.pod_rate(("q", 1), "prefilled") == 0
    assert window.preemptions(("p", 1)) == 2
    assert window.drafts(("p", 1)) == DraftCounts("ngram", 20, 40, 30, True)
    assert window.drafts(("q", 2)) is None
    assert [(pod, link.transport, link.bytes, link.busy_s) for pod, link in window.links()] == [
        ("p", "tcp", 100, 1.0),
        ("p", "cma", 7, 1.0),
        ("q", "tcp", 5, 0.5),
    ]
    assert window.end.kv_used() == 0.5


def test_the_ring_keeps_the_last_minutes() -> None:
    now = [0.0]
    metrics = GatewayMetrics()
    history = MetricsHistory(metrics, lambda: (), lambda: 3, lambda: now[0])
    for number in range(100):
        metrics.output_tokens.inc(number)
        history.take()
        now[0] += PERIOD_S
    kept = history.samples
    assert kept[-1].at - kept[0].at == WINDOW_S
    assert MetricsWindow(kept[-2], kept[-1]).rate("output_tokens") == 99 / PERIOD_S
    assert kept[-1].counts["waiting"] == 3


def test_only_failures_of_the_server_count_as_failed() -> None:
    metrics = GatewayMetrics()
    for outcome in ("ok", "aborted", "InvalidRequest", "RateLimited", "NotServed", "Overloaded"):
        metrics.requests.labels("chat", outcome).inc()
    assert metrics.totals()["failed"] == 0
    for outcome in ("internal", "InternalError", "Unavailable", "TransferFailed", "DeadlineExceeded"):
        metrics.requests.labels("chat", outcome).inc()
    assert metrics.totals()["failed"] == 5
    assert metrics.totals()["requests"] == 11
