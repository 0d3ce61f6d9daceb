"""The routes of the dashboard's data, and of its page."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from common.errors import BatonError, InvalidRequest, ObjectNotFound
from gateway.api.http.endpoint import caller_of
from gateway.api.http.errors import error_body
from gateway.dashboard.history import MetricsHistory
from gateway.dashboard.requests import MAX_REQUESTS, DashboardRequests
from gateway.dashboard.state import DashboardState
from gateway.serving.gateway import Gateway

DEFAULT_LIMIT = 50
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
