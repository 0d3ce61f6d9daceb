"""OpenTelemetry spans of this process, exported by OTLP or to a file.

A span is recorded once, after its end, from times that the code measures anyway. Without tracing there is no Tracer.
Contexts that other processes continue are made before the span ends. Times are time.monotonic(). The offset to the wall
clock is read once per hour, so the spans of one request stay in order. The SDK is imported by Tracer.open; if it is not
installed, that raises ConfigError.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigError
from common.tracing.context import TraceContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter

AttributeValue = str | bool | int | float
Attributes = Mapping[str, AttributeValue | None]

SCOPE = "baton"
CLOCK_SYNC_S = 3600.0
CLOCK_READINGS = 8
FLUSH_S = 5.0

_log = logging.getLogger(__name__)


class Tracer:
    """Records the spans of one process.

    `sample` is the share of traced requests among the requests without a decision of the client.
    """

    def __init__(self, processor: SpanProcessor, *, service: str, instance: str, sample: float = 1.0) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        version = metadata.version("baton-serving")
        names = {"service.namespace": "baton", "service.name": service, "service.instance.id": instance}
        self._resource = Resource.create({**names, "service.version": version})
        self._scope = InstrumentationScope(SCOPE, version)
        self._processor = processor
        self._below = round(sample * (1 << 64))
        self._offset, self._offset_at = 0, float("-inf")

    @classmethod
    def open(cls, target: str | None, *, service: str, instance: str, sample: float = 1.0) -> Tracer | None:
        """Opens a tracer that exports to `target` (parse_trace_target); None without a target. Raises ConfigError."""
        if target is None:
            return None
        try:
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            exporter = _exporter(target)
        except ImportError as e:
            raise ConfigError(
                f"traces: {e.name} is missing (pip install 'baton-serving[traces]')", field="traces"
            ) from e
        return cls(BatchSpanProcessor(exporter), service=service, instance=instance, sample=sample)

    def start_trace(self, parent: TraceContext | None) -> TraceContext | None:
        """Returns the context of a request's first span in this process; None if the request is not sampled.

        The client decides, if its request has a trace context.
        """
        if parent is not None:
            return parent.new_child() if parent.sampled else None
        context = TraceContext.new(sampled=True)
        return context if int(context.trace_id[16:], 16) < self._below else None

    def record_span(
        self,
        name: str,
        context: TraceContext,
        parent: TraceContext | None,
        start: float,
        end: float,
        attributes: Attributes | None = None,
        *,
        kind: str = "internal",
        error: str | None = None,
    ) -> None:
        """Records a span that has ended. `kind` is internal, server or client. Attributes that are None are omitted."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
        from opentelemetry.trace.status import Status, StatusCode

        def named(of: TraceContext) -> SpanContext:
            flags, state = TraceFlags(int(of.sampled)), TraceState.from_header([of.state] if of.state else [])
            return SpanContext(int(of.trace_id, 16), int(of.span_id, 16), of is not context, flags, state)

        offset = self._wall_offset()
        self._processor.on_end(
            ReadableSpan(
                name,
                context=named(context),
                parent=None if parent is None else named(parent),
                resource=self._resource,
                attributes={key: value for key, value in (attributes or {}).items() if value is not None},
                kind=SpanKind[kind.upper()],
                status=Status() if error is None else Status(StatusCode.ERROR, error),
                start_time=offset + round(start * 1e9),
                end_time=offset + round(max(start, end) * 1e9),
                instrumentation_scope=self._scope,
            )
        )

    def close(self) -> None:
        """Exports the remaining spans and stops; blocks at most FLUSH_S, also if the collector is down."""
        ending = threading.Thread(target=self._processor.shutdown, name="traces-end", daemon=True)
        ending.start()
        ending.join(FLUSH_S)
        if ending.is_alive():
            _log.warning("the last spans could not be exported within %.0f s", FLUSH_S)

    def _wall_offset(self) -> int:
        now = time.monotonic()
        if now - self._offset_at > CLOCK_SYNC_S:
            self._offset, self._offset_at = _read_offset(), now
        return self._offset


def _read_offset() -> int:
    """Returns the wall clock minus the monotonic clock, in ns, from the fastest of several readings.

    On a busy machine this thread may be suspended between two clock reads, for tens of milliseconds.
    """
    readings = []
    for _ in range(CLOCK_READINGS):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after - before, wall - (before + after) // 2))
    return min(readings)[1]


def parse_trace_target(text: str) -> str:
    """Checks a trace target and returns it. Raises ValueError.

    otlp                  OTLP, configured by the OTEL_EXPORTER_OTLP_* variables
    http(s)://host:port   OTLP over HTTP
    grpc://host:port      OTLP over gRPC
    file:PATH             OTLP as JSON, one line per batch
    """
    if text == "otlp" or (text.startswith("file:") and len(text) > len("file:")):
        return text
    scheme, found, rest = text.partition("://")
    if not found or scheme not in ("http", "https", "grpc") or not rest.strip("/"):
        raise ValueError(f"{text!r} is not a trace target")
    return text


def _exporter(target: str) -> SpanExporter:
    if target.startswith("file:"):
        from common.tracing.file_exporter import FileExporter

        return FileExporter(Path(target.removeprefix("file:")))
    if target.startswith("grpc://"):
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

        return OverGrpc(endpoint=target.removeprefix("grpc://").rstrip("/"), insecure=True)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

    return OverHttp() if target == "otlp" else OverHttp(endpoint=_traces_url(target))


def _traces_url(target: str) -> str:
    """Returns the target with OTLP's default path, if it has no path."""
    scheme, _, rest = target.partition("://")
    host, _, path = rest.partition("/")
    return f"{scheme}://{host}/{path or 'v1/traces'}"
