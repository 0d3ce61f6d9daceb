"""Trace contexts, and OpenTelemetry spans of this process, exported by OTLP or to a file.

A span is recorded once, after its end, from times that the code measures anyway (time.monotonic()). The offset to the
wall clock is read once per hour, so the spans of one request stay in order. Tracer.open imports the SDK.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter

Attributes = Mapping[str, str | bool | int | float | None]

SCOPE = "baton"
CLOCK_SYNC_S = 3600.0
CLOCK_READINGS = 8
FLUSH_S = 5.0
TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MAX_STATE = 512

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span within a trace, as processes pass it on: W3C trace context, https://www.w3.org/TR/trace-context/."""

    trace_id: str  # 32 hex digits.
    span_id: str  # 16 hex digits.
    sampled: bool  # Every process on the request's way records its spans.
    state: str = ""  # The tracestate header, passed on unchanged.

    @classmethod
    def parse(cls, traceparent: str | None, tracestate: str | None = None) -> TraceContext | None:
        """Parses the context in headers; None if traceparent is missing or invalid: the caller starts a trace (W3C)."""
        match = None if traceparent is None else _HEADER.fullmatch(traceparent.strip())
        if match is None:
            return None
        version, trace_id, span_id, flags, more = match.groups()
        if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
            return None
        state = tracestate or ""
        return cls(trace_id, span_id, bool(int(flags, 16) & 1), state if len(state) <= _MAX_STATE else "")

    @classmethod
    def new(cls, *, sampled: bool) -> TraceContext:
        """Returns the context of the first span of a new trace."""
        return cls(secrets.token_hex(16), secrets.token_hex(8), sampled)

    def new_child(self) -> TraceContext:
        """Returns the context of a new span in the same trace."""
        return replace(self, span_id=secrets.token_hex(8))

    @property
    def traceparent(self) -> str:
        """The traceparent header of this span."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of a gRPC call from this span."""
        state = ((TRACESTATE, self.state),) if self.state else ()
        return ((TRACEPARENT, self.traceparent), *state)


class Tracer:
    """Records the spans of one process. `sample` is the share of traced requests if the client does not decide."""

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
            missing = f"traces: {e.name} is missing (pip install 'baton-serving[traces]')"
            raise ConfigError(missing, field="traces") from e
        return cls(BatchSpanProcessor(exporter), service=service, instance=instance, sample=sample)

    def start_trace(self, parent: TraceContext | None) -> TraceContext | None:
        """Returns the context of a request's first span here; None if not sampled. The client's context decides."""
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

        now = time.monotonic()
        if now - self._offset_at > CLOCK_SYNC_S:
            self._offset, self._offset_at = _read_offset(), now
        offset = self._offset
        span = ReadableSpan(
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
        self._processor.on_end(span)

    def close(self) -> None:
        """Exports the remaining spans and stops; blocks at most FLUSH_S, also if the collector is down."""
        ending = threading.Thread(target=self._processor.shutdown, name="traces-end", daemon=True)
        ending.start()
        ending.join(FLUSH_S)
        if ending.is_alive():
            _log.warning("the last spans could not be exported within %.0f s", FLUSH_S)


def _read_offset() -> int:
    """Returns wall clock - monotonic clock in ns, by the fastest reading: a thread may pause between two reads."""
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

    if target == "otlp":
        return OverHttp()
    scheme, _, rest = target.partition("://")
    host, _, path = rest.partition("/")
    return OverHttp(endpoint=f"{scheme}://{host}/{path or 'v1/traces'}")
