"""Writes spans to a file in OTLP's JSON encoding, one TracesData per line: the format of the otlpjsonfile receiver.

https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/
Each batch is one write to a file opened for appending, so several processes can share it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind
from opentelemetry.trace.status import StatusCode

from common.errors import ConfigError

_KINDS = {SpanKind.INTERNAL: 1, SpanKind.SERVER: 2, SpanKind.CLIENT: 3}


class FileExporter(SpanExporter):
    """Appends spans to `path`. Raises ConfigError if it cannot be opened."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as e:
            raise ConfigError(f"traces: cannot write {path}: {e.strerror}", field="traces") from e

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Writes the spans as one line."""
        if not spans:
            return SpanExportResult.SUCCESS
        line = json.dumps({"resourceSpans": _resource_spans(spans)}, separators=(",", ":")) + "\n"
        try:
            os.write(self._file, line.encode())
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Closes the file."""
        os.close(self._file)


def _resource_spans(spans: Sequence[ReadableSpan]) -> list[dict[str, Any]]:
    """Groups the spans by resource; spans of one resource have the same scope."""
    by_resource = []
    for resource, group in groupby(spans, key=lambda span: span.resource):
        members = list(group)
        scope = members[0].instrumentation_scope
        named = {} if scope is None else {"name": scope.name, "version": scope.version}
        scoped = {"scope": named, "spans": [_span(span) for span in members]}
        by_resource.append({"resource": {"attributes": _attributes(resource.attributes)}, "scopeSpans": [scoped]})
    return by_resource


def _span(span: ReadableSpan) -> dict[str, Any]:
    context = span.get_span_context()
    assert context is not None, "every recorded span has a context"
    out: dict[str, Any] = {
        "traceId": f"{context.trace_id:032x}",
        "spanId": f"{context.span_id:016x}",
        "name": span.name,
        "kind": _KINDS[span.kind],
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _attributes(span.attributes or {}),
        "status": {},
    }
    if span.parent is not None:
        out["parentSpanId"] = f"{span.parent.span_id:016x}"
    if context.trace_state:
        out["traceState"] = context.trace_state.to_header()
    if span.status.status_code is StatusCode.ERROR:
        out["status"] = {"code": 2, "message": span.status.description or ""}
    return out


def _attributes(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):  # before int: bool is a subclass of int
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": str(value)}
