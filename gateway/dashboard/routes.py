"""The routes of the dashboard's data (state, and recent requests with their phases), and of its page."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from common.errors import BatonError, InvalidRequest, ObjectNotFound
from gateway.admission.api_keys import Caller
from gateway.api.http.endpoint import caller_of
from gateway.api.http.json import Json, error_body
from gateway.dashboard.history import MetricsHistory
from gateway.dashboard.spans import Span, spans_of
from gateway.dashboard.state import DashboardState
from gateway.serving.gateway import Gateway
from gateway.telemetry.timeline import Timeline

DEFAULT_LIMIT, MAX_REQUESTS = 50, 256
FILES = Path(__file__).parent / "page"
FILES_PATH = "/dashboard/page"
_DATA_HEADERS = {"cache-control": "no-store"}
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

N = TypeVar("N", int, float)


def routes(gateway: Gateway, history: MetricsHistory, version: str) -> list[Route]:
    """Returns the routes of the dashboard's data."""
    state, requests = DashboardState(gateway, history, version), DashboardRequests(gateway)

    async def state_route(_request: Request) -> Response:
        return _json(state.as_json())

    async def requests_route(request: Request) -> Response:
        try:
            limit = _number(request, "limit", DEFAULT_LIMIT, kind=int, low=1, high=MAX_REQUESTS)
            since = _number(request, "since", 0.0, kind=float, low=0.0, high=math.inf)
        except InvalidRequest as e:
            return _error(e)
        return _json(requests.list(caller_of(request.scope), limit=limit, since=since))

    async def request_route(request: Request) -> Response:
        details = requests.find(caller_of(request.scope), request.path_params["request_id"])
        if details is None:
            return _error(ObjectNotFound("this request is not among the recent ones", field="request_id"))
        return _json(details)

    return [
        Route("/dashboard/state", state_route),
        Route("/dashboard/requests", requests_route),
        Route("/dashboard/requests/{request_id}", request_route),
    ]


def _number(request: Request, name: str, default: N, *, kind: type[N], low: N, high: N) -> N:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not low <= value <= high:
        bounds = f"from {low} to {high}" if math.isfinite(high) else f"of at least {low:g}"
        raise InvalidRequest(f"{name} must be a number {bounds}", field=name)
    return value


def _json(body: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, _DATA_HEADERS, media_type="application/json")


def _error(error: BatonError) -> Response:
    return _json(error_body(error), error.http_status)


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
    return {**{name: getattr(span, name) for name in ("kind", "name", "start_s", "end_s", "detail")}, "parts": parts}


class _PageFiles(StaticFiles):
    def file_response(self, *args: object, **kwargs: object) -> Response:
        response = super().file_response(*args, **kwargs)  # type: ignore[arg-type]
        response.headers.update(_PAGE_HEADERS)
        return response


def page_routes() -> list[BaseRoute]:
    """Returns the routes of the page and its files."""

    async def index(_request: Request) -> Response:
        return FileResponse(FILES / "index.html", headers=_PAGE_HEADERS)

    return [Route("/", index), Mount(FILES_PATH, _PageFiles(directory=FILES))]
