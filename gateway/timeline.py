"""What happened to a request and when: seconds since its arrival, for /debug/requests and the demo's waterfall."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.request_trace import RequestTrace

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


class Timelines:
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
