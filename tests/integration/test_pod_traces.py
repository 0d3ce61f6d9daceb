"""Spans that real pods record of a traced request: hand-off and local prefill, in one process over loopback."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from common.errors import BatonError
from common.tracing.tracer import TraceContext, Tracer
from common.types import Role
from kv_transfer.messages import TransferReport
from prefill_service.hand_off import Event, PrefillHandOff
from tests.rigs.pods.harness import BLOCK, CHUNK, Cluster, prompt_of, request
from tests.rigs.waiting import until

ATTEMPT = TraceContext.new(sampled=True)


def trace_all(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Makes ATTEMPT the caller's span of every request."""
    memory = InMemorySpanExporter()
    for pod in (*cluster.prefills, *cluster.decodes):
        pod.runtime.tracer = Tracer(SimpleSpanProcessor(memory), service="pod", instance=pod.runtime.name)
        monkeypatch.setattr(pod.runtime, "caller_span", lambda _context: ATTEMPT)
    return memory


def parents(spans: tuple[ReadableSpan, ...]) -> dict[str, str]:
    """Span name -> name of its parent; the gateway's span is `attempt`."""
    names = {span.context.span_id: span.name for span in spans if span.context}
    names[int(ATTEMPT.span_id, 16)] = "attempt"
    return {span.name: names[span.parent.span_id] for span in spans if span.parent}


async def test_a_prompt_in_chunks_and_its_hand_off(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Cluster.start(model_dir) as cluster:
        memory = trace_all(cluster, monkeypatch)
        prompt = prompt_of(2 * CHUNK + 3)
        await cluster.generate(request(prompt, max_tokens=6))
        await until(lambda: {"prefill.request", "decode.run"} <= {span.name for span in memory.get_finished_spans()})
        spans = memory.get_finished_spans()
    assert parents(spans) == {
        "prefill.queue": "prefill.request",
        "prefill.chunk": "prefill.request",
        "transfer.push": "transfer.hand_off",
        "transfer.hand_off": "prefill.request",
        "prefill.request": "attempt",
        "decode.reserve": "attempt",
        "decode.receive": "attempt",
        "decode.run": "attempt",
    }
    assert all(f"{span.context.trace_id:032x}" == ATTEMPT.trace_id for span in spans if span.context)
    chunks = [dict(span.attributes or {})["baton.tokens"] for span in spans if span.name == "prefill.chunk"]
    assert chunks == [CHUNK, CHUNK, 3]
    pushes = [dict(span.attributes or {}) for span in spans if span.name == "transfer.push"]
    assert [push["baton.blocks"] for push in pushes] == [CHUNK // BLOCK, CHUNK // BLOCK, 1]
    (run,) = [dict(span.attributes or {}) for span in spans if span.name == "decode.run"]
    assert (run["baton.output_tokens"], run["baton.finish"]) == (6, "length")


async def test_a_hand_off_is_recorded_whole_before_its_end_is_read(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod holds nothing of the request before a slow caller reads the last event."""
    recorded, take = asyncio.Event(), PrefillHandOff._next

    async def late(hand_off: PrefillHandOff) -> Event | TransferReport | BatonError:
        item = await take(hand_off)
        if isinstance(item, TransferReport):
            await asyncio.wait_for(recorded.wait(), 30)
        return item

    monkeypatch.setattr(PrefillHandOff, "_next", late)
    async with Cluster.start(model_dir) as cluster:
        memory = trace_all(cluster, monkeypatch)
        running = asyncio.create_task(cluster.generate(request(prompt_of(CHUNK + 3), max_tokens=4)))
        await until(lambda: "prefill.request" in {span.name for span in memory.get_finished_spans()})
        recorded.set()
        await running
        (hand_off,) = [span for span in memory.get_finished_spans() if span.name == "transfer.hand_off"]
    assert dict(hand_off.attributes or {})["baton.blocks"] == -(-(CHUNK + 3) // BLOCK)


async def test_an_aggregated_pod(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Cluster.start(model_dir, prefill=0, decode=0) as cluster:
        await cluster.add(Role.BOTH)
        memory = trace_all(cluster, monkeypatch)
        await cluster.generate(request(prompt_of(9), max_tokens=3))
        await until(lambda: "decode.run" in {span.name for span in memory.get_finished_spans()})
        spans = memory.get_finished_spans()
    assert parents(spans) == {"decode.reserve": "attempt", "decode.run": "attempt"}
    (reserve,) = [span for span in spans if span.name == "decode.reserve"]
    assert dict(reserve.attributes or {})["baton.local"] is True
