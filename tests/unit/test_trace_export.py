"""Export of spans to an OTLP collector over HTTP and gRPC; a hanging collector does not block the end of a process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from common.tracing import tracer
from common.tracing.tracer import TraceContext, Tracer

Got = list[tuple[str, trace_service_pb2.ExportTraceServiceRequest]]


@contextmanager
def http_collector(got: Got, hang: threading.Event | None = None) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if hang is not None:
                hang.wait(30)
            got.append((self.path, trace_service_pb2.ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        serving.join()


@contextmanager
def grpc_collector(got: Got) -> Iterator[str]:
    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            got.append(("grpc", request))
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def trace_to(target: str) -> TraceContext:
    tracer = Tracer.open(target, service="decode", instance="decode-0")
    assert tracer is not None
    context = tracer.start_trace(None)
    assert context is not None
    tracer.record_span("decode.run", context.new_child(), context, 1.0, 2.0, {"baton.output_tokens": 7})
    tracer.close()
    return context


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer, "FLUSH_S", 60.0)


@pytest.mark.parametrize("collector", [http_collector, grpc_collector])
def test_a_collector_gets_the_spans(collector: Any) -> None:
    got: Got = []
    with collector(got) as target:
        context = trace_to(target)
    ((path, request),) = got
    assert path in ("/v1/traces", "grpc")
    (process,) = request.resource_spans
    names = {a.key: a.value.string_value for a in process.resource.attributes}
    assert (names["service.namespace"], names["service.name"]) == ("baton", "decode")
    (span,) = process.scope_spans[0].spans
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == (
        "decode.run",
        context.trace_id,
        context.span_id,
    )
    assert span.end_time_unix_nano - span.start_time_unix_nano == 10**9
    assert span.attributes[0].value.int_value == 7


def test_the_path_of_a_target_is_kept() -> None:
    got: Got = []
    with http_collector(got) as target:
        trace_to(f"{target}/otlp/v1/traces")
    assert got[0][0] == "/otlp/v1/traces"


def test_a_hanging_collector_does_not_block_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer, "FLUSH_S", 0.1)
    hang = threading.Event()
    with http_collector([], hang) as target:
        trace_to(target)  # returns
        hang.set()
        for thread in threading.enumerate():
            if thread.name == "traces-end":
                thread.join(20)
