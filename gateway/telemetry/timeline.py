"""What happened to a request and when: seconds since its arrival, for /debug/requests and the demo's waterfall."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from common.tracing.context import TraceContext
from common.tracing.tracer import Attributes, Tracer

MAX_EVENTS = 512


class Timeline:
    """Events of one request. Not more than MAX_EVENTS are kept. tenant: whose request it is.

    trace: records the request's spans, None for most. trace_id: of its trace, recorded here or not; None without one.
    """

    def __init__(
        self,
        request_id: str,
        client_id: str | None,
        endpoint: str,
        tenant: str = "",
        *,
        trace: RequestTrace | None = None,
        trace_id: str | None = None,
    ) -> None:
        self.trace = trace
        self.trace_id = trace_id
        self.tenant = tenant
        self.request_id = request_id
        self.client_id = client_id
        self.start = time.monotonic()
        self._created = time.time()
        self._facts: dict[str, Any] = {"endpoint": endpoint}
        self._events: list[dict[str, Any]] = []
        self.changed_at = self.start  # a time.monotonic()
        self.ended = False

    def mark(self, name: str, **details: Any) -> None:
        """Something happened now."""
        self.changed_at = time.monotonic()
        if len(self._events) < MAX_EVENTS:
            self._events.append({"t": round(self.changed_at - self.start, 6), "event": name, **details})

    def end(self, outcome: str) -> None:
        """The request is over; its last event, for which there is always room."""
        self.ended, self.changed_at = True, time.monotonic()
        self._events.append({"t": round(self.changed_at - self.start, 6), "event": "ended", "outcome": outcome})
        self.set_facts(outcome=outcome)
        if self.trace is not None:
            self.trace.end(self.start, self._events, {"request_id": self.request_id, **self._facts})

    @property
    def exemplar(self) -> dict[str, str] | None:
        """What ties an observation in a histogram to this request's spans."""
        return None if self.trace is None else {"trace_id": self.trace.context.trace_id}

    @property
    def facts(self) -> Mapping[str, Any]:
        """See note."""
        return self._facts

    def set_facts(self, **facts: Any) -> None:
        """Facts about the request as a whole."""
        self._facts.update(facts)

    def as_json(self) -> dict[str, Any]:
        """The timeline; events in order of time, t in seconds since arrival."""
        head: dict[str, Any] = {"id": self.request_id, "client_request_id": self.client_id, "created": self._created}
        if self.trace_id is not None:
            head["trace_id"] = self.trace_id
        return {**head, **self._facts, "events": self._events}


class RecentTimelines:
    """The last `size` requests."""

    def __init__(self, size: int = 256) -> None:
        self._size = size
        self._by_id: OrderedDict[str, Timeline] = OrderedDict()

    def add(self, timeline: Timeline) -> None:
        """Remembers a request, and forgets the oldest."""
        self._by_id[timeline.request_id] = timeline
        while len(self._by_id) > self._size:
            self._by_id.popitem(last=False)

    def newest(self) -> Iterator[Timeline]:
        """All of them, the latest first."""
        return reversed(self._by_id.values())

    def find(self, request_id: str) -> Timeline | None:
        """By our id, with or without its cmpl- or chatcmpl- prefix, or by the client's own (the latest)."""
        bare = request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")
        if bare in self._by_id:
            return self._by_id[bare]
        return next((t for t in reversed(self._by_id.values()) if t.client_id == request_id), None)


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
