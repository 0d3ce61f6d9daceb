"""GET /dashboard/requests: recent requests with their phases."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.admission.api_keys import Caller
from gateway.api.http.json_value import Json
from gateway.dashboard.spans import Span, spans_of
from gateway.serving.gateway import Gateway
from gateway.telemetry.timeline import Timeline

MAX_REQUESTS = 256


class DashboardRequests:
    """Makes the JSON of recent requests from the gateway's timelines."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def list(self, caller: Caller, *, limit: int, since: float) -> Json:
        """Returns the caller's requests that run or changed after the cursor `since`, newest first."""
        now = time.monotonic()
        timelines = [
            timeline
            for timeline in self._gateway.timelines.newest()
            if _may_see(caller, timeline) and (timeline.changed_at > since or not timeline.ended)
        ]
        return {"cursor": now, "requests": [self._json(timeline, now) for timeline in timelines[:limit]]}

    def find(self, caller: Caller, request_id: str) -> Json | None:
        """Returns one of the caller's recent requests, None if there is none with this id."""
        timeline = self._gateway.timelines.find(request_id)
        if timeline is None or not _may_see(caller, timeline):
            return None
        return self._json(timeline, time.monotonic())

    def _json(self, timeline: Timeline, now: float) -> Json:
        record = timeline.as_json()
        events: Sequence[Mapping[str, Any]] = record["events"]
        last = {event["event"]: event for event in events}
        ended, finished = last.get("ended"), last.get("finished", {})
        end_s = ended["t"] if ended else now - timeline.start
        reserved, first, handed = last.get("reserved", {}), last.get("first_token", {}), last.get("handed_off", {})
        tokens = record.get("output_tokens", finished.get("output_tokens"))
        if tokens is None:
            tokens = self._gateway.num_output_tokens(timeline.request_id)
        copied = ("id", "client_request_id", "created", "endpoint", "model", "trace_id", "error")
        return {
            **{name: record.get(name) for name in (*copied, "ttft_s", "prompt_tokens", "cached_tokens")},
            "tenant": timeline.tenant,
            "state": record.get("outcome", "running"),
            "age_s": now - timeline.start,
            "end_s": end_s if ended else None,
            "output_tokens": tokens,
            "attempts": sum(event["event"] in ("retry", "resume") for event in events) + 1,
            "prefill_pod": first.get("pod", last.get("prefill", {}).get("pod")),
            "decode_pod": reserved.get("pod"),
            "transport": handed.get("transport"),
            "bytes": handed.get("bytes"),
            "accepted": finished.get("accepted"),
            "rejected": finished.get("rejected"),
            "spans": [_span_json(span) for span in spans_of(record, tokens=tokens, end_s=end_s)],
        }


def _may_see(caller: Caller, timeline: Timeline) -> bool:
    return caller.admin or caller.tenant == timeline.tenant


def _span_json(span: Span) -> Json:
    parts = [{"name": name, "start_s": start, "end_s": end} for name, start, end in span.parts]
    return {
        "kind": span.kind,
        "name": span.name,
        "start_s": span.start_s,
        "end_s": span.end_s,
        "detail": span.detail,
        "parts": parts,
    }
