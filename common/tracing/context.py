"""W3C trace context: which trace a request belongs to, and the span that asked. https://www.w3.org/TR/trace-context/"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, replace

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MAX_STATE = 512


@dataclass(frozen=True, slots=True)
class TraceContext:
    """trace_id: 32 hex digits, span_id: 16. sampled: whoever sees it records spans. state: others' notes, passed on."""

    trace_id: str
    span_id: str
    sampled: bool
    state: str = ""

    @classmethod
    def parse(cls, traceparent: str | None, tracestate: str | None = None) -> TraceContext | None:
        """From headers; None for one that is missing or wrong, which then begins a trace of its own, as W3C demands."""
        found = None if traceparent is None else _HEADER.fullmatch(traceparent.strip())
        if found is None:
            return None
        version, trace_id, span_id, flags, more = found.groups()
        if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
            return None
        state = tracestate or ""
        return cls(trace_id, span_id, bool(int(flags, 16) & 1), state if len(state) <= _MAX_STATE else "")

    @classmethod
    def new(cls, *, sampled: bool) -> TraceContext:
        """A trace that begins here."""
        return cls(secrets.token_hex(16), secrets.token_hex(8), sampled)

    def new_child(self) -> TraceContext:
        """Of a new span inside the same trace."""
        return replace(self, span_id=secrets.token_hex(8))

    @property
    def traceparent(self) -> str:
        """The traceparent that names this span."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The same for a gRPC call."""
        state = ((TRACESTATE, self.state),) if self.state else ()
        return ((TRACEPARENT, self.traceparent), *state)
