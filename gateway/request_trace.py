"""The spans that a gateway records of one traced request. An untraced one has no RequestTrace.

    gateway.request
        gateway.tokenize, gateway.wait
        gateway.attempt                 one for each; what the pods record are its children, over gRPC's metadata
            gateway.route, gateway.reserve (one for each pod that was asked), gateway.stream

Ids that others need are made at once, spans when they are over.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from common.trace_context import TraceContext
from common.tracing import Attributes, Tracer


class AttemptTrace:
    """One attempt; end it once."""

    def __init__(self, tracer: Tracer, parent: TraceContext, number: int) -> None:
        self.context = parent.new_child()
        self._tracer = tracer
        self._parent = parent
        self._number = number
        self._start = self._since = time.monotonic()
        self._first: float | None = None
        self._over = False

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """For the calls to pods."""
        return self.context.metadata

    def on_placed(self, decode: str, prefill: str | None, predicted_tokens: int) -> None:
        """Pods were chosen."""
        found = {"baton.decode_pod": decode, "baton.prefill_pod": prefill, "baton.predicted_tokens": predicted_tokens}
        self._step("gateway.route", found)

    def on_reserve_answer(self, pod: str, outcome: str, error: str | None = None) -> None:
        """A decode pod answered Reserve, or did not."""
        self._step("gateway.reserve", {"baton.pod": pod, "baton.outcome": outcome}, kind="client", error=error)

    def on_first_token(self) -> None:
        """It is here; again is fine."""
        if self._first is None:
            self._first = time.monotonic()

    def end(self, error: str | None, attributes: Attributes) -> None:
        """The attempt is over. Idempotent."""
        if self._over:
            return
        self._over, now = True, time.monotonic()
        if self._first is not None:
            self._tracer.record_span(
                "gateway.stream", self.context.new_child(), self.context, self._first, now, attributes
            )
        number = {"baton.attempt": self._number}
        self._tracer.record_span("gateway.attempt", self.context, self._parent, self._start, now, number, error=error)

    def _step(self, name: str, attributes: Attributes, *, kind: str = "internal", error: str | None = None) -> None:
        now = time.monotonic()
        child = self.context.new_child()
        self._tracer.record_span(name, child, self.context, self._since, now, attributes, kind=kind, error=error)
        self._since = now


class RequestTrace:
    """context: of gateway.request. parent: the client's span, if it named one."""

    def __init__(self, tracer: Tracer, context: TraceContext, parent: TraceContext | None) -> None:
        self.context = context
        self._tracer = tracer
        self._parent = parent

    def new_attempt(self, number: int) -> AttemptTrace:
        """One more, from 1."""
        return AttemptTrace(self._tracer, self.context, number)

    def end(self, start: float, events: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
        """The request is over. start: its arrival; events, facts: of its timeline."""
        since = start
        seen = set()
        for event in events:
            name = {"tokenized": "gateway.tokenize", "admitted": "gateway.wait"}.get(event["event"])
            if name is not None and name not in seen:
                seen.add(name)
                until = start + event["t"]
                self._tracer.record_span(name, self.context.new_child(), self.context, since, until)
                since = until
        named = {f"baton.{key}": value for key, value in facts.items() if isinstance(value, str | int | float)}
        failed = facts.get("error") if facts.get("outcome") != "ok" else None
        self._tracer.record_span(
            "gateway.request", self.context, self._parent, start, time.monotonic(), named, kind="server", error=failed
        )
