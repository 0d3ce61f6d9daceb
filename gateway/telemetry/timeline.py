"""The events of a request with their times, for /debug/requests and the dashboard, and its trace spans."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.tracing.tracer import Attributes, TraceContext, Tracer

MAX_EVENTS = 512  #: Events that are kept of a request, without its last.


class Timeline:
    """The events and facts of one request."""

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
        self.request_id, self.tenant = request_id, tenant
        self.client_id = client_id  #: The client's own id of the request.
        self.trace = trace  #: Records spans; None for a request that is not sampled.
        self.trace_id = trace_id  #: The client's trace, even if it is not recorded.
        self.start = time.monotonic()  #: Arrival, time.monotonic().
        self._created = time.time()
        self.facts: dict[str, Any] = {"endpoint": endpoint}  #: Facts about the request as a whole.
        self._events: list[dict[str, Any]] = []
        self.changed_at = self.start  #: Time of the last event, time.monotonic().
        self.ended = False

    def mark(self, name: str, **details: Any) -> None:
        """Adds an event that happens now. It is dropped if there are MAX_EVENTS."""
        self.changed_at = time.monotonic()
        if len(self._events) < MAX_EVENTS:
            self._events.append({"t": round(self.changed_at - self.start, 6), "event": name, **details})

    def end(self, outcome: str) -> None:
        """Adds the last event, which is never dropped, and ends the trace."""
        self.ended, self.changed_at = True, time.monotonic()
        self._events.append({"t": round(self.changed_at - self.start, 6), "event": "ended", "outcome": outcome})
        self.set_facts(outcome=outcome)
        if self.trace is not None:
            self.trace.end(self.start, self._events, {"request_id": self.request_id, **self.facts})

    @property
    def exemplar(self) -> dict[str, str] | None:
        """The labels that link an observation in a histogram to the spans of this request; None without spans."""
        return None if self.trace is None else {"trace_id": self.trace.context.trace_id}

    def set_facts(self, **facts: Any) -> None:
        """Adds or replaces facts about the request as a whole."""
        self.facts.update(facts)

    def as_json(self) -> dict[str, Any]:
        """Returns the facts and the events in order of time; `t` is in seconds since arrival."""
        head: dict[str, Any] = {"id": self.request_id, "client_request_id": self.client_id, "created": self._created}
        if self.trace_id is not None:
            head["trace_id"] = self.trace_id
        return {**head, **self.facts, "events": self._events}


class RecentTimelines:
    """The timelines of the last `size` requests."""

    def __init__(self, size: int = 256) -> None:
        self._size = size
        self._by_id: OrderedDict[str, Timeline] = OrderedDict()

    def add(self, timeline: Timeline) -> None:
        """Adds a request and drops the oldest."""
        self._by_id[timeline.request_id] = timeline
        while len(self._by_id) > self._size:
            self._by_id.popitem(last=False)

    def newest(self) -> Iterator[Timeline]:
        """Returns all timelines, newest first."""
        return reversed(self._by_id.values())

    def find(self, request_id: str) -> Timeline | None:
        """Finds a request by its id, with or without cmpl- or chatcmpl-, or the newest with this client id."""
        bare = request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")
        if bare in self._by_id:
            return self._by_id[bare]
        names = (bare, request_id)
        found = (t for t in reversed(self._by_id.values()) if t.facts.get("answer_id") == bare or t.client_id in names)
        return next(found, None)


class AttemptTrace:
    """Records the spans of one attempt, if its request is traced."""

    def __init__(self, trace: RequestTrace | None, number: int) -> None:
        self._trace = trace
        self._context = None if trace is None else trace.context.new_child()
        self.metadata = None if self._context is None else self._context.metadata  #: For gRPC calls.
        self._number = number
        self._start = self._since = time.monotonic()  #: When the attempt began, and when its last step ended.
        self._first_token_at: float | None = None
        self._ended = False

    def on_placed(self, decode: str, prefill: str | None, predicted_tokens: int) -> None:
        """Records that pods were chosen."""
        pods = {"baton.decode_pod": decode, "baton.prefill_pod": prefill}
        self._step("gateway.route", {**pods, "baton.predicted_tokens": predicted_tokens})

    def on_reserve_answer(self, pod: str, outcome: str, error: str | None = None) -> None:
        """Records that a decode pod answered Reserve, or that the call failed."""
        self._step("gateway.reserve", {"baton.pod": pod, "baton.outcome": outcome}, kind="client", error=error)

    def on_first_token(self) -> None:
        """Records that the first token has arrived. Later calls have no effect."""
        if self._first_token_at is None:
            self._first_token_at = time.monotonic()

    def end(self, error: str | None, attributes: Attributes) -> None:
        """Records the spans of the attempt, which has ended. Idempotent."""
        trace, context = self._trace, self._context
        if self._ended or trace is None or context is None:
            return
        self._ended, now = True, time.monotonic()
        record = trace.tracer.record_span
        if self._first_token_at is not None:
            record("gateway.stream", context.new_child(), context, self._first_token_at, now, attributes)
        number = {"baton.attempt": self._number}
        record("gateway.attempt", context, trace.context, self._start, now, number, error=error)

    def _step(self, name: str, attributes: Attributes, *, kind: str = "internal", error: str | None = None) -> None:
        """Records a span from the end of the last step until now."""
        since, self._since = self._since, time.monotonic()
        if self._trace is not None and self._context is not None:
            child, record = self._context.new_child(), self._trace.tracer.record_span
            record(name, child, self._context, since, self._since, attributes, kind=kind, error=error)


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Records the spans of one request."""

    tracer: Tracer
    context: TraceContext  #: The context of the span gateway.request.
    parent: TraceContext | None  #: The context of the client's span, None if there is none.

    def end(self, start: float, events: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
        """Records the request's spans from its timeline. `start` is its arrival, time.monotonic()."""
        since, names = start, {"tokenized": "gateway.tokenize", "admitted": "gateway.wait"}
        for event in events:
            if (name := names.pop(event["event"], None)) is not None:  # only the first event of each name
                until = start + event["t"]
                self.tracer.record_span(name, self.context.new_child(), self.context, since, until)
                since = until
        named = {f"baton.{key}": value for key, value in facts.items() if isinstance(value, str | int | float)}
        failed = facts.get("error") if facts.get("outcome") != "ok" else None
        self.tracer.record_span(
            "gateway.request", self.context, self.parent, start, time.monotonic(), named, kind="server", error=failed
        )
