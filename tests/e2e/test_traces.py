"""Traces of requests over three processes: span order, parent ids and nested times."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest

from common.pb import inference_pb2, inference_pb2_grpc
from common.tracing.tracer import TraceContext
from tests.rigs.stack.cluster import CHUNK, SPANS, Cluster

pytestmark = pytest.mark.parametrize("cluster", ["1P+1D"], indirect=True)

WAIT_S = 60.0
SLACK_NS = 2_000_000  # allows for small changes of the wall clock between two readings
PROMPT = "The quick brown fox jumps over the lazy dog. " * (CHUNK // 9)  # a chunk and a bit


@dataclass(frozen=True)
class Span:
    name: str
    service: str
    id: str
    parent: str
    start: int
    end: int
    facts: dict[str, Any]
    failed: bool


def spans_of(cluster: Cluster, trace_id: str) -> list[Span]:
    """Returns the spans written so far, ordered by start."""
    path = cluster.stack.log_dir / SPANS
    found: list[Span] = []
    for line in path.read_text().splitlines() if path.exists() else ():
        for process in json.loads(line)["resourceSpans"]:
            service = facts_of(process["resource"])["service.name"]
            for span in process["scopeSpans"][0]["spans"]:
                if span["traceId"] == trace_id:
                    times = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
                    ids = span["spanId"], span.get("parentSpanId", "")
                    found.append(
                        Span(span["name"], service, *ids, *times, facts_of(span), span["status"].get("code") == 2)
                    )
    return sorted(found, key=lambda span: span.start)


def facts_of(holder: dict[str, Any]) -> dict[str, Any]:
    return {a["key"]: next(iter(a["value"].values())) for a in holder.get("attributes", ())}


def wait_for(cluster: Cluster, trace_id: str, whole: Callable[[set[str]], bool]) -> list[Span]:
    deadline = time.monotonic() + WAIT_S
    while True:
        found = spans_of(cluster, trace_id)
        if whole({span.name for span in found}):
            return found
        assert time.monotonic() < deadline, [span.name for span in found]
        time.sleep(0.1)


ENDS = {"gateway.request", "prefill.request", "decode.run"}  # the last span of each process


def complete(cluster: Cluster, asked_by: TraceContext, **fields: Any) -> httpx.Response:
    body = {"model": cluster.model, "max_tokens": 12, "temperature": 0, "cache_salt": asked_by.trace_id, **fields}
    return httpx.post(f"{cluster.base_url}/completions", json=body, headers=dict(asked_by.metadata), timeout=120)


def test_one_request_is_one_trace_over_gateway_prefill_transfer_and_decode(cluster: Cluster) -> None:
    asked_by = TraceContext.new(sampled=True)
    usage = complete(cluster, asked_by, prompt=PROMPT, ignore_eos=True).json()["usage"]
    assert usage["prompt_tokens"] > CHUNK
    spans = wait_for(cluster, asked_by.trace_id, ENDS.issubset)
    by_name: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_name[span.name].append(span)
    parents = {
        "gateway.request": None,
        "gateway.tokenize": "gateway.request",
        "gateway.wait": "gateway.request",
        "gateway.attempt": "gateway.request",
        "gateway.route": "gateway.attempt",
        "gateway.reserve": "gateway.attempt",
        "gateway.stream": "gateway.attempt",
        "prefill.request": "gateway.attempt",
        "prefill.queue": "prefill.request",
        "prefill.chunk": "prefill.request",
        "transfer.hand_off": "prefill.request",
        "transfer.push": "transfer.hand_off",
        "decode.reserve": "gateway.attempt",
        "decode.receive": "gateway.attempt",
        "decode.run": "gateway.attempt",
    }
    assert set(by_name) == set(parents)
    several = {name for name, group in by_name.items() if len(group) > 1}
    assert several == {"prefill.chunk", "transfer.push"}
    assert len({span.id for span in spans}) == len(spans)
    for span in spans:
        parent = parents[span.name]
        assert not span.failed
        assert span.service == {"transfer": "prefill"}.get(span.name.split(".")[0], span.name.split(".")[0])
        if parent is None:
            assert span.parent == asked_by.span_id
            continue
        (inside,) = by_name[parent]
        assert span.parent == inside.id, span.name
        assert inside.start - SLACK_NS <= span.start <= span.end, span.name
        if parent != "gateway.attempt":  # pods release a request after the client has the whole answer
            assert span.end <= inside.end + SLACK_NS, span.name

    # Prefill starts in parallel with Reserve on the decode pod. Only the write of KV waits for both.
    for order in (
        (
            "gateway.request",
            "gateway.tokenize",
            "gateway.wait",
            "gateway.attempt",
            "gateway.route",
            "gateway.reserve",
        ),
        ("gateway.reserve", "decode.reserve", "decode.receive", "decode.run"),
        ("gateway.reserve", "prefill.request", "prefill.queue", "prefill.chunk", "transfer.hand_off", "transfer.push"),
        ("transfer.push", "decode.run"),
        ("prefill.chunk", "gateway.stream"),
    ):
        starts = [by_name[name][0].start for name in order]
        found = {name: f"{(start - spans[0].start) / 1e6:.3f} ms" for name, start in zip(order, starts, strict=True)}
        assert all(a <= b + SLACK_NS for a, b in itertools.pairwise(starts)), found
    (reserve,), pushes = by_name["decode.reserve"], by_name["transfer.push"]
    assert min(push.end for push in pushes) >= reserve.start - SLACK_NS  # a push needs the reserved blocks
    chunks = by_name["prefill.chunk"]
    assert sum(int(chunk.facts["baton.tokens"]) for chunk in chunks) == usage["prompt_tokens"]
    assert all(a.end <= b.end for a, b in itertools.pairwise(chunks))
    (hand_off,), (run,), (request,) = (by_name[n] for n in ("transfer.hand_off", "decode.run", "gateway.request"))
    pushed = sum(int(push.facts["baton.blocks"]) for push in pushes)
    assert pushed == int(hand_off.facts["baton.blocks"])
    assert pushes[0].start < chunks[-1].end  # the first chunk's KV leaves while the last computes
    assert (hand_off.facts["baton.decode_pod"], hand_off.facts["baton.transport"]) != ("", "")
    assert int(run.facts["baton.output_tokens"]) == usage["completion_tokens"] == 12
    assert int(request.facts["baton.output_tokens"]) == 12
    assert request.facts["baton.outcome"] == "ok"
    # The sender polls for the end of a write, so decode may start before the push span ends.
    assert by_name["decode.receive"][0].end >= pushes[-1].start - SLACK_NS


def test_grpc_requests_are_traced_and_untraced_requests_are_not(cluster: Cluster) -> None:
    def traces() -> set[str]:
        path = cluster.stack.log_dir / SPANS
        return set(re.findall('"traceId":"([0-9a-f]+)"', path.read_text())) if path.exists() else set()

    before = traces()
    unsampled, sampled = TraceContext.new(sampled=False), TraceContext.new(sampled=True)
    assert complete(cluster, unsampled, prompt="Hello", max_tokens=2).status_code == 200
    request = inference_pb2.GenerateRequest(model=cluster.model, text="Hello there", max_tokens=3, ignore_eos=True)
    with grpc.insecure_channel(cluster.stack.grpc_address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        assert list(stub.Generate(request, timeout=60))
        assert list(stub.Generate(request, metadata=sampled.metadata, timeout=60))
    wait_for(cluster, sampled.trace_id, ENDS.issubset)
    assert traces() - before == {sampled.trace_id}


def test_a_request_that_fails_says_so_in_its_trace(cluster: Cluster) -> None:
    asked_by = TraceContext.new(sampled=True)
    refused = complete(cluster, asked_by, prompt="Hello", max_tokens=1 << 20)
    assert refused.status_code == 400
    (span,) = wait_for(cluster, asked_by.trace_id, {"gateway.request"}.issubset)
    assert span.failed
    assert span.facts["baton.outcome"] == "ContextOverflow"


def test_the_log_has_a_line_for_each_request_with_its_trace(cluster: Cluster) -> None:
    asked_by = TraceContext.new(sampled=True)
    headers = dict(asked_by.metadata) | {"x-request-id": asked_by.trace_id}
    body = {"model": cluster.model, "prompt": "Hello", "max_tokens": 3, "ignore_eos": True}
    answer = httpx.post(f"{cluster.base_url}/completions", json=body, headers=headers, timeout=60)
    deadline = time.monotonic() + WAIT_S
    while not (lines := [line for line in cluster.log("gateway", 500).splitlines() if asked_by.trace_id in line]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (found,) = [json.loads(line) for line in lines]
    assert (found["event"], found["level"], found["outcome"]) == ("request ended", "info", "ok")
    assert found["client_request_id"] == found["trace_id"] == asked_by.trace_id
    assert f"cmpl-{found['request_id']}" == answer.json()["id"]
    assert (found["endpoint"], found["output_tokens"]) == ("completions", 3)
    assert 0 < found["ttft_s"] <= found["duration_s"]
