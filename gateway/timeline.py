"""What happened to a request and when: seconds since its arrival, for /debug/requests and the demo's waterfall."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

MAX_EVENTS = 512


class Timeline:
    """Events of one request. Not more than MAX_EVENTS are kept. tenant: whose request it is."""

    def __init__(self, request_id: str, client_id: str | None, endpoint: str, tenant: str = "") -> None:
        self.tenant = tenant
        self.request_id = request_id
        self.client_id = client_id
        self.start = time.monotonic()
        self._created = time.time()
        self._facts: dict[str, Any] = {"endpoint": endpoint}
        self._events: list[dict[str, Any]] = []
        self.changed = self.start  # a time.monotonic()
        self.ended = False

    def mark(self, name: str, **details: Any) -> None:
        """Something happened now."""
        self.changed = time.monotonic()
        if len(self._events) < MAX_EVENTS:
            self._events.append({"t": round(self.changed - self.start, 6), "event": name, **details})

    def end(self, outcome: str) -> None:
        """The request is over; its last event, for which there is always room."""
        self.ended, self.changed = True, time.monotonic()
        self._events.append({"t": round(self.changed - self.start, 6), "event": "ended", "outcome": outcome})
        self.note(outcome=outcome)

    def note(self, **facts: Any) -> None:
        """Facts about the request as a whole."""
        self._facts.update(facts)

    def as_json(self) -> dict[str, Any]:
        """The timeline; events in order of time, t in seconds since arrival."""
        head = {"id": self.request_id, "client_request_id": self.client_id, "created": self._created}
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
