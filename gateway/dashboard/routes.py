"""The paths of the dashboard's data."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from common.errors import BatonError, InvalidRequest, ObjectNotFound
from gateway.admission.http_auth import caller_of
from gateway.dashboard.requests import MOST, Requests
from gateway.dashboard.state import State
from gateway.openai_schema import error_body
from gateway.service import Gateway

DEFAULT_LIMIT = 50
N = TypeVar("N", int, float)
_HEADERS = {"cache-control": "no-store"}


def routes(gateway: Gateway, version: str) -> list[Route]:
    """All of them."""
    state, requests = State(gateway, version), Requests(gateway)

    async def whole(_request: Request) -> Response:
        return _json(state.as_json())

    async def recent(request: Request) -> Response:
        try:
            limit = _number(request, "limit", DEFAULT_LIMIT, kind=int, low=1, high=MOST)
            since = _number(request, "since", 0.0, kind=float, low=0.0, high=math.inf)
        except InvalidRequest as e:
            return _error(e)
        return _json(requests.list(caller_of(request.scope), limit=limit, since=since))

    async def one(request: Request) -> Response:
        found = requests.find(caller_of(request.scope), request.path_params["request_id"])
        if found is None:
            return _error(ObjectNotFound("no such request among the recent ones", field="request_id"))
        return _json(found)

    return [
        Route("/dashboard/state", whole),
        Route("/dashboard/requests", recent),
        Route("/dashboard/requests/{request_id}", one),
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
    return Response(orjson.dumps(body), status, _HEADERS, media_type="application/json")


def _error(error: BatonError) -> Response:
    return _json(error_body(error), error.http_status)
