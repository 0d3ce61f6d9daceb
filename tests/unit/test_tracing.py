"""W3C trace contexts, and spans in files with their times, parents and attributes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.tracing import tracer as tracer_module
from common.tracing.tracer import TraceContext, Tracer, parse_trace_target

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f" 00-{TRACE}-{SPAN}-03 ", True),
        (f"cc-{TRACE}-{SPAN}-01-what-comes-later", True),
    ],
)
def test_traceparents(header: str, sampled: bool) -> None:
    assert TraceContext.parse(header, "a=b") == TraceContext(TRACE, SPAN, sampled, "a=b")


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
    ],
)
def test_wrong_traceparents_are_ignored(header: str | None) -> None:
    assert TraceContext.parse(header) is None


def test_a_long_tracestate_is_dropped_without_the_trace() -> None:
    found = TraceContext.parse(f"00-{TRACE}-{SPAN}-01", "a=" + "b" * 600)
    assert found is not None
    assert found.state == ""


@given(st.booleans(), st.sampled_from(["", "vendor=1,other=2"]))
def test_metadata_of_one_process_is_read_by_the_next(sampled: bool, state: str) -> None:
    context = TraceContext(TRACE, SPAN, sampled, state).new_child()
    assert context.trace_id == TRACE
    assert context.span_id != SPAN
    sent = dict(context.metadata)
    assert TraceContext.parse(sent["traceparent"], sent.get("tracestate")) == context


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def traced(path: Path, **options: Any) -> Tracer:
    tracer = Tracer.open(f"file:{path}", service="gateway", instance="g-0", **options)
    assert tracer is not None
    return tracer


def test_a_span_in_a_file_is_otlp(tmp_path: Path) -> None:
    tracer = traced(tmp_path / "spans.jsonl")
    parent = TraceContext(TRACE, SPAN, True, "vendor=1")
    context = tracer.start_trace(parent)
    assert context is not None
    tracer.record_span(
        "work",
        context,
        parent,
        10.0,
        10.25,
        {"n": 3, "x": 0.5, "ok": True, "name": "a", "absent": None},
        kind="server",
        error="it broke",
    )
    tracer.record_span("inner", context.new_child(), context, 10.1, 10.05)  # never ends before it began
    tracer.close()
    (line,) = lines(tmp_path / "spans.jsonl")
    (process,) = line["resourceSpans"]
    resource = {a["key"]: a["value"]["stringValue"] for a in process["resource"]["attributes"]}
    assert (resource["service.name"], resource["service.instance.id"]) == ("gateway", "g-0")
    work, inner = process["scopeSpans"][0]["spans"]
    assert (work["traceId"], work["parentSpanId"], work["traceState"]) == (TRACE, SPAN, "vendor=1")
    assert (work["kind"], work["status"]) == (2, {"code": 2, "message": "it broke"})
    assert work["attributes"] == [
        {"key": "n", "value": {"intValue": "3"}},
        {"key": "x", "value": {"doubleValue": 0.5}},
        {"key": "ok", "value": {"boolValue": True}},
        {"key": "name", "value": {"stringValue": "a"}},
    ]
    assert int(work["endTimeUnixNano"]) - int(work["startTimeUnixNano"]) == 250_000_000
    assert inner["parentSpanId"] == work["spanId"]
    assert inner["startTimeUnixNano"] == inner["endTimeUnixNano"]
    assert int(inner["startTimeUnixNano"]) - int(work["startTimeUnixNano"]) == 100_000_000


def test_two_processes_may_share_a_file(tmp_path: Path) -> None:
    tracers = [traced(tmp_path / "spans.jsonl") for _ in range(2)]
    for tracer in tracers:
        tracer.record_span("work", TraceContext.new(sampled=True), None, 0.0, 1.0)
    for tracer in tracers:
        tracer.close()
    assert len(lines(tmp_path / "spans.jsonl")) == 2


def test_the_client_decides_on_sampling_otherwise_the_share(tmp_path: Path) -> None:
    never, half = (traced(tmp_path / "spans.jsonl", sample=share) for share in (0.0, 0.5))
    assert never.start_trace(TraceContext(TRACE, SPAN, True)) is not None
    assert half.start_trace(TraceContext(TRACE, SPAN, False)) is None
    assert all(never.start_trace(None) is None for _ in range(50))
    taken = sum(half.start_trace(None) is not None for _ in range(400))
    assert 130 < taken < 270
    for tracer in (never, half):
        tracer.close()


@pytest.mark.parametrize("text", ["otlp", "http://c:4318", "https://c/v1/traces", "grpc://c:4317", "file:/tmp/x"])
def test_targets(text: str) -> None:
    assert parse_trace_target(text) == text


@pytest.mark.parametrize("text", ["", "file:", "grpc://", "c:4317", "udp://c:1", "http:///"])
def test_invalid_targets_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a trace target"):
        parse_trace_target(text)


def test_tracing_is_off_by_default_and_a_file_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    assert Tracer.open(None, service="gateway", instance="g-0") is None
    with pytest.raises(ConfigError, match="cannot write"):
        Tracer.open(f"file:{tmp_path}/no/where", service="gateway", instance="g-0")


@pytest.mark.parametrize("waits", [(50, 0), (0, 50), (3, 20)])
def test_a_thread_suspended_between_two_clock_reads_shifts_no_span(
    monkeypatch: pytest.MonkeyPatch, waits: tuple[int, int]
) -> None:
    """`waits`: milliseconds of suspension after the first and second clock of a reading; the last reading has none."""
    lead, now, reads = 7_000_000, 0, 0

    def read() -> int:
        nonlocal now, reads
        told, (which, reading) = now, (reads % 3, reads // 3)
        reads += 1
        now += 100 if which == 2 or reading == 3 else 1_000_000 * waits[which]
        return told

    monkeypatch.setattr(tracer_module, "time", SimpleNamespace(monotonic_ns=read, time_ns=lambda: read() + lead))
    assert abs(tracer_module._read_offset() - lead) <= 100
