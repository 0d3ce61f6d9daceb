"""Tracing in the gateway: exemplars, spans of failed attempts, and no cost per token."""

from __future__ import annotations

import gc
import json
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import pytest_asyncio

from common.pb import decode_pb2
from common.tracing.tracer import TraceContext, Tracer
from common.types import SamplingParams, Token, ValidRequest
from common.wire import token_to_pb
from gateway.dispatch.attempt import Attempt
from gateway.telemetry.timeline import RequestTrace, Timeline
from tests.rigs.gateway.gateway_rig import MODEL, Rig
from tests.rigs.pods.fake_pods import FakeCluster

OPENMETRICS = {"accept": "application/openmetrics-text; version=1.0.0"}


@pytest_asyncio.fixture
async def spans(gw: Rig, tmp_path: Path) -> AsyncIterator[Callable[[], list[dict[str, Any]]]]:
    """Traces every request of `gw`. A call of the result ends the recording and returns the spans."""
    path = tmp_path / "spans.jsonl"
    tracer = Tracer.open(f"file:{path}", service="gateway", instance="g")
    assert tracer is not None
    gw.gateway.tracer = tracer
    closed = False

    def read() -> list[dict[str, Any]]:
        nonlocal closed
        closed = True
        tracer.close()
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return [span for line in lines for span in line["resourceSpans"][0]["scopeSpans"][0]["spans"]]

    yield read
    gw.gateway.tracer = None
    if not closed:
        tracer.close()


async def test_histograms_have_exemplars_for_scrapers_that_accept_them(
    gw: Rig, spans: Callable[[], list[dict[str, Any]]]
) -> None:
    await gw.complete(max_tokens=3)
    await gw.settled()
    (shown,) = (await gw.http.get("/dashboard/requests")).json()["requests"]
    answer = await gw.http.get("/metrics", headers=OPENMETRICS)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
    exemplars = dict(re.findall(r'^(baton_\w+)_bucket.* # {trace_id="(\w+)"}', answer.text, re.MULTILINE))
    assert set(exemplars) == {"baton_ttft_seconds", "baton_e2e_seconds", "baton_queue_seconds"}
    assert set(exemplars.values()) == {shown["trace_id"]}
    plain = await gw.http.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain")
    assert "trace_id" not in plain.text
    assert {span["traceId"] for span in spans()} == {shown["trace_id"]}


async def test_every_attempt_has_a_span_and_the_failed_one_says_why(
    gw: Rig, cluster: FakeCluster, spans: Callable[[], list[dict[str, Any]]]
) -> None:
    cluster.prefills[0].faults.drop_prefill_after_first = 1
    assert (await gw.complete(max_tokens=3)).status_code == 200
    await gw.settled()
    found = spans()
    attempts = [span for span in found if span["name"] == "gateway.attempt"]
    assert [span["status"].get("code") for span in attempts] == [2, None]
    assert [span["attributes"][0]["value"]["intValue"] for span in attempts] == ["1", "2"]
    (request,) = [span for span in found if span["name"] == "gateway.request"]
    assert request["status"] == {}
    assert {span["parentSpanId"] for span in attempts} == {request["spanId"]}
    assert "parentSpanId" not in request
    for attempt in attempts:
        inside = Counter(span["name"] for span in found if span.get("parentSpanId") == attempt["spanId"])
        assert inside == {"gateway.route": 1, "gateway.reserve": 1, "gateway.stream": 1}


async def test_drafts_are_in_usage_and_trace(
    gw: Rig, cluster: FakeCluster, spans: Callable[[], list[dict[str, Any]]]
) -> None:
    cluster.decodes[0].drafts = (4, 1)
    answer = await gw.complete(max_tokens=4)
    details = answer.json()["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 3
    assert details["rejected_prediction_tokens"] == 9
    await gw.settled()
    (stream,) = [span for span in spans() if span["name"] == "gateway.stream"]
    assert {"key": "baton.drafts_proposed", "value": {"intValue": "12"}} in stream["attributes"]
    assert {"key": "baton.drafts_accepted", "value": {"intValue": "3"}} in stream["attributes"]


async def test_a_pod_that_refuses_is_in_the_trace(
    gw: Rig, cluster: FakeCluster, spans: Callable[[], list[dict[str, Any]]]
) -> None:
    cluster.decodes[0].faults.reject = 1
    assert (await gw.complete(max_tokens=3)).status_code == 429
    await gw.settled()
    found = spans()
    (reserve,) = [span for span in found if span["name"] == "gateway.reserve"]
    assert {"key": "baton.outcome", "value": {"stringValue": "rejected"}} in reserve["attributes"]
    (request,) = [span for span in found if span["name"] == "gateway.request"]
    assert request["status"]["code"] == 2


async def test_without_a_tracer_the_clients_trace_id_is_logged(gw: Rig, caplog: pytest.LogCaptureFixture) -> None:
    asked_by = TraceContext.new(sampled=True)
    with caplog.at_level(logging.INFO, logger="gateway.serving.gateway"):
        await gw.http.post(
            "/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 2}, headers=dict(asked_by.metadata)
        )
        await gw.settled()
        await gw.http.post("/v1/completions", json={"model": MODEL})
        await gw.settled()
    good, bad = [record for record in caplog.records if record.msg == "request ended"]
    assert (good.trace_id, good.outcome, good.output_tokens) == (asked_by.trace_id, "ok", 2)  # type: ignore[attr-defined]
    assert (bad.outcome, bad.error) == ("InvalidRequest", "prompt is missing")  # type: ignore[attr-defined]
    assert not hasattr(bad, "trace_id")
    (_, shown) = (await gw.http.get("/dashboard/requests")).json()["requests"]
    assert shown["trace_id"] == asked_by.trace_id


def calls_of(work: Callable[[], None]) -> Counter[str]:
    """Counts the calls of every Python and C function in `work`, with the garbage collector off."""
    seen: Counter[str] = Counter()

    def note(frame: FrameType, event: str, what: Any) -> None:
        if event == "call":
            seen[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            seen[what.__qualname__] += 1

    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return seen


async def started_attempt(gw: Rig, tracer: Tracer | None) -> Attempt:
    request = ValidRequest("r", MODEL, (1, 2, 3), SamplingParams(max_tokens=500))
    trace = None if tracer is None else RequestTrace(tracer, TraceContext.new(sampled=True), None)
    plan, timeline = (
        await gw.gateway.models.first.router.plan(request),
        Timeline("id", None, "completions", trace=trace),
    )
    attempt = Attempt(plan, deadline=time.monotonic() + 30, timeline=timeline)
    await attempt.start()
    return attempt


async def test_tracing_adds_no_call_per_token(gw: Rig, cluster: FakeCluster, tmp_path: Path) -> None:
    """For 200 tokens the same functions are called equally often with and without a trace."""
    cluster.prefills[0].faults.prefill_delay_s = 60.0  # the test itself sends the tokens
    tracer = Tracer.open(f"file:{tmp_path}/spans.jsonl", service="gateway", instance="g")
    assert tracer is not None
    counted = []
    for traced in (None, tracer):
        attempt = await started_attempt(gw, traced)
        deltas = [
            decode_pb2.SequenceDelta(request_id="r", tokens=[token_to_pb(Token(index, 66))]) for index in range(201)
        ]
        attempt.on_delta(deltas[0])  # does the one-time work

        def rest(attempt: Attempt = attempt, deltas: list[decode_pb2.SequenceDelta] = deltas) -> None:
            for delta in deltas[1:]:
                attempt.on_delta(delta)

        counted.append(calls_of(rest))
        assert len((await attempt.token_queue.next()).tokens) == 201
        attempt.close()
    assert counted[0]["Attempt.on_delta"] == 200
    assert counted[0] == counted[1]
    tracer.close()
    await gw.settled()
