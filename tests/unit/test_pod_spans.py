"""Spans of a prefill hand-off, from its history: pulls, preempted chunks, unfinished pushes, failures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from common.errors import TransferFailed
from common.tracing.tracer import TraceContext, Tracer
from kv_transfer.messages import TransferReport
from prefill_service.hand_off import HandOffEvent, Push
from prefill_service.servicer import record_spans

PARENT = TraceContext.new(sampled=True)


def recorded(**fields: Any) -> list[ReadableSpan]:
    memory = InMemorySpanExporter()
    tracer = Tracer(SimpleSpanProcessor(memory), service="prefill", instance="p")
    seq = SimpleNamespace(request_id="r", prompt_len=40, cached_tokens=8, preemptions=0)
    noted: dict[str, Any] = {
        "arrived_at": 10.0,
        "pulled_from": None,
        "pushes": {},
        "outcome": None,
        "history": [],
        "target": SimpleNamespace(pod="decode-0"),
    }
    record_spans(tracer, PARENT, SimpleNamespace(seq=seq, **{**noted, **fields}))  # type: ignore[arg-type]
    return list(memory.get_finished_spans())


def times(spans: list[ReadableSpan], since: ReadableSpan) -> dict[str, tuple[float, float]]:
    """Seconds since the beginning of a span."""
    zero = since.start_time or 0
    return {
        s.name: (round(((s.start_time or 0) - zero) / 1e9, 3), round(((s.end_time or 0) - zero) / 1e9, 3))
        for s in spans
    }


def test_a_prefill_with_a_pull_and_a_complete_hand_off() -> None:
    spans = recorded(
        pulled_from=("prefill-1", 10.25),
        history=[
            HandOffEvent("chunk", 24, 11.0, 10.5),
            HandOffEvent("chunk", 40, 11.5, 11.0),
            HandOffEvent("first_token", 7, 11.5),
            HandOffEvent("end", 2, 12.0),
        ],
        pushes={0: Push(1, 11.0, 11.2), 1: Push(1, 11.5, 11.9)},
        outcome=TransferReport(2, 4096, 1, 0.5, "cma"),
    )
    root = spans[-1]
    assert root.name == "prefill.request"
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == PARENT.span_id
    got = times(spans, root)
    assert got["prefill.request"] == (0.0, 2.0)
    assert got["prefill.pull"] == (0.0, 0.25)
    assert got["prefill.queue"] == (0.25, 0.5)
    assert got["transfer.hand_off"] == (1.0, 2.0)
    chunks = [span for span in spans if span.name == "prefill.chunk"]
    assert [dict(span.attributes or {})["baton.tokens"] for span in chunks] == [16, 16]
    (hand_off,) = [span for span in spans if span.name == "transfer.hand_off"]
    facts = dict(hand_off.attributes or {})
    assert (facts["baton.bytes"], facts["baton.transport"], facts["baton.blocks_early"]) == (4096, "cma", 1)
    for push in (span for span in spans if span.name == "transfer.push"):
        assert push.parent is not None
        assert hand_off.context is not None
        assert push.parent.span_id == hand_off.context.span_id


def test_a_failed_hand_off_has_the_error_and_its_push_ends_with_it() -> None:
    spans = recorded(
        history=[HandOffEvent("chunk", 24, 11.0, 10.5), HandOffEvent("end", 0, 12.0)],
        pushes={0: Push(1, 11.0)},
        outcome=TransferFailed("the peer is gone"),
    )
    failed = {span.name for span in spans if not span.status.is_ok and span.status.description == "the peer is gone"}
    assert failed == {"prefill.request", "transfer.hand_off"}
    assert times(spans, spans[-1])["transfer.push"] == (1.0, 2.0)


def test_a_prefill_that_never_ran_is_one_span() -> None:
    assert [span.name for span in recorded(history=[HandOffEvent("end", 0, 12.0)])] == ["prefill.request"]
