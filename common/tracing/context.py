"""W3C trace context: the trace of a request and the calling span. https://www.w3.org/TR/trace-context/"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, replace

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MAX_STATE = 512


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span within a trace, as processes pass it on."""

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
