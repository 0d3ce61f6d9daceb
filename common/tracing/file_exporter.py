"""Writes spans to a file in OTLP's JSON encoding, one TracesData per line: the format of the otlpjsonfile receiver.

https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/
Each batch is one write to a file opened for appending, so several processes can share it.
"""

from __future__ import annotations

import json
import os
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path

from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from common.errors import ConfigError


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
        traces = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
        for process in traces["resourceSpans"]:
            for span in (span for scope in process["scopeSpans"] for span in scope["spans"]):
                ids = {name: span[name] for name in ("traceId", "spanId", "parentSpanId") if name in span}
                span |= {name: b64decode(value).hex() for name, value in ids.items()}  # OTLP's JSON has them in hex
        try:
            os.write(self._file, json.dumps(traces, separators=(",", ":")).encode() + b"\n")
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Closes the file."""
        os.close(self._file)
