"""The HTTP routes. Those that generate text are raw ASGI, see api/http/endpoint.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from common.errors import BatonError, InvalidRequest, Unavailable
from gateway.api.docs.document import openapi_document
from gateway.api.http.auth import AuthMiddleware, caller_of
from gateway.api.http.endpoint import Endpoint, RequestHandler
from gateway.api.http.errors import error_body, error_headers
from gateway.api.openai.embeddings import EmbeddingsHandler
from gateway.api.openai.generate import GenerateHandler
from gateway.api.openai.responses.endpoint import ResponsesHandler
from gateway.api.openai.responses.store import ResponseStore
from gateway.api.openai.tokenize import TokenizeHandler
from gateway.dashboard.history import MetricsHistory
from gateway.dashboard.routes import page_routes
from gateway.dashboard.routes import routes as dashboard_routes
from gateway.serving.gateway import Gateway
from gateway.serving.models import ServedModel


def package_version() -> str:
    """Returns the version of the installed distribution."""
    try:
        return version("baton-serving")
    except PackageNotFoundError:
        return "0.0.0"


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def _error(error: BatonError, status: int | None = None) -> Response:
    return _json(error_body(error), status or error.http_status, error_headers(error))


def _http_error(request: Request, error: Exception) -> Response:
    """Answers unknown paths and methods with an error in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    headers, path = error.headers or {}, request.url.path[:200]
    why = {
        404: f"there is no endpoint {path!r}; /openapi.json lists all endpoints",
        405: f"{path!r} takes {headers.get('Allow', 'another method')}, not {request.method}",
    }
    response = _error(InvalidRequest(why.get(error.status_code, str(error.detail))), error.status_code)
    for name, value in headers.items():
        response.headers[name] = value
    return response


class _App(FastAPI):
    """FastAPI with an OpenAPI document that describes the raw ASGI routes too, see gateway.api.docs."""

    models: tuple[str, ...] = ()

    def openapi(self) -> dict[str, Any]:
        """Returns the document of /openapi.json."""
        return openapi_document(package_version(), self.models)


def build_app(gateway: Gateway, history: MetricsHistory, store: ResponseStore | None = None) -> FastAPI:
    """Returns the HTTP application of one gateway; the caller starts and stops the gateway.

    Args:
        history: Metrics samples that the dashboard shows.
        store: Where responses are kept; None keeps none.
    """
    app = _App(title="Baton", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.models = tuple(gateway.models.names())
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(AuthMiddleware, keys=gateway.keys, refuse=_error, open_metrics=gateway.settings.open_metrics)

    def post(path: str, name: str, serve: RequestHandler) -> Route:
        return Route(path, Endpoint(gateway, name, serve), methods=["POST"])

    def model_json(name: str, model: ServedModel) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": model.created, "owned_by": "baton", "root": model.name}
        return {**card, "max_model_len": model.limits().max_model_len} if model.pod_table.ready else card

    async def models(request: Request) -> Response:
        may_use = caller_of(request.scope).may_use
        named = gateway.models.names().items()
        cards = [model_json(name, model) for name, model in named if may_use(name, model.name)]
        return _json({"object": "list", "data": cards})

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        try:
            return _json(model_json(name, gateway.model_for(caller_of(request.scope), name)))
        except InvalidRequest as e:
            return _error(e)

    async def ready(_request: Request) -> Response:
        if gateway.ready:
            return _json({"status": "ready"})
        why = "the gateway is leaving" if gateway.leaving else "no prefill and decode pods are ready"
        return _error(Unavailable(why, retry_after_s=1.0))

    async def live(_request: Request) -> Response:
        return _json({"status": "live"})

    async def metrics(request: Request) -> Response:
        base, accept = gateway.metrics.base, request.headers.get("accept", "")
        return Response(base.exposition(accept), headers={"content-type": base.content_type(accept)})

    async def reset_prefix_cache(_request: Request) -> Response:
        try:
            pods = [dataclasses.asdict(reset) for reset in await gateway.reset_prefix_cache()]
        except Unavailable as e:
            return _error(e)
        totals = {name: sum(pod[name] for pod in pods) for name in ("cleared", "kept")}
        return _json({"object": "prefix_cache.reset", **totals, "pods": pods})

    async def version_(_request: Request) -> Response:
        return _json({"version": package_version()})

    async def timeline(request: Request) -> Response:
        caller, found = caller_of(request.scope), gateway.timelines.find(request.path_params["request_id"])
        if found is None or not (caller.admin or caller.tenant == found.tenant):
            return _error(InvalidRequest("this request is not among the recent ones", field="request_id"), 404)
        return _json(found.as_json())

    def json_route(answer: Callable[[Request], Awaitable[dict[str, Any]]]) -> Callable[[Request], Awaitable[Response]]:
        async def route(request: Request) -> Response:
            try:
                return _json(await answer(request))
            except BatonError as e:
                return _error(e)

        return route

    tokenize, responses = TokenizeHandler(gateway), ResponsesHandler(gateway, store)
    app.router.routes.extend(
        [
            post("/v1/completions", "completions", GenerateHandler(gateway, chat=False).serve),
            post("/v1/chat/completions", "chat", GenerateHandler(gateway, chat=True).serve),
            post("/v1/embeddings", "embeddings", EmbeddingsHandler(gateway).serve),
            post("/v1/responses", "responses", responses.create),
            Route("/v1/responses/{response_id}", json_route(responses.read), methods=["GET"]),
            Route("/v1/responses/{response_id}", json_route(responses.delete), methods=["DELETE"]),
            Route("/v1/responses/{response_id}/input_items", json_route(responses.input_items)),
            post("/tokenize", "tokenize", tokenize.tokenize),
            post("/detokenize", "detokenize", tokenize.detokenize),
            Route("/v1/models", models),
            Route("/v1/models/{model:path}", model),
            Route("/health", ready),
            Route("/ready", ready),
            Route("/live", live),
            Route("/metrics", metrics),
            Route("/version", version_),
            Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
            Route("/debug/requests/{request_id}", timeline),
            *dashboard_routes(gateway, history, package_version()),
            *page_routes(),
        ]
    )
    return app
