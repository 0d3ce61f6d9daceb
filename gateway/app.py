"""The HTTP routes. Those that generate text are raw ASGI, see api/http/endpoint.py."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from common.errors import BatonError, InternalError, InvalidRequest, ObjectNotFound, Unavailable
from gateway.api.anthropic.endpoint import MessagesHandler, model_card, model_list
from gateway.api.anthropic.errors import AnthropicErrors
from gateway.api.docs.document import openapi_document
from gateway.api.http.endpoint import (
    AuthMiddleware,
    Endpoint,
    RequestHandler,
    RequestIdMiddleware,
    RootPathMiddleware,
    caller_of,
    client_request_id,
    known_caller,
)
from gateway.api.http.json import OPENAI_ERRORS, ErrorFormat, error_body, error_headers
from gateway.api.http.keyed import REPLAYED, serve_keyed
from gateway.api.openai.adapters import AdapterHandler
from gateway.api.openai.embeddings import EmbeddingsHandler
from gateway.api.openai.generate import GenerateHandler
from gateway.api.openai.responses.endpoint import ResponsesHandler
from gateway.api.openai.responses.store import ResponseStore
from gateway.api.openai.tokenize import TokenizeHandler
from gateway.api.scoring.rerank import RerankHandler
from gateway.api.scoring.score import ScoreHandler
from gateway.dashboard.history import MetricsHistory
from gateway.dashboard.routes import page_routes
from gateway.dashboard.routes import routes as dashboard_routes
from gateway.serving.gateway import Gateway
from gateway.serving.models import ServedModel
from gateway.serving.pair_scorer import PairScorer
from gateway.serving.prompt_runner import PromptRunner

MESSAGES = "/v1/messages"
ANTHROPIC_VERSION = "anthropic-version"  #: The header that Anthropic's clients send.
_log = logging.getLogger(__name__)

_ANTHROPIC_ERRORS = AnthropicErrors()


def _errors_of(path: str) -> ErrorFormat:
    """Returns the form of a path's errors."""
    return _ANTHROPIC_ERRORS if path == MESSAGES or path.startswith(f"{MESSAGES}/") else OPENAI_ERRORS


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
    """Answers unknown paths and methods with an error in the shape of the path."""
    assert isinstance(error, HTTPException)
    headers, path = error.headers or {}, request.scope["path"][:200]  # request.url fails if the query is no UTF-8
    why = {
        404: f"there is no endpoint {path!r}; /openapi.json lists all endpoints",
        405: f"{path!r} takes {headers.get('Allow', 'another method')}, not {request.method}",
    }
    kind = ObjectNotFound if error.status_code == 404 else InvalidRequest
    answer = kind(why.get(error.status_code, str(error.detail)))
    errors, request_id = _errors_of(path), client_request_id(request.scope) or secrets.token_hex(12)
    more = {**errors.headers(answer, request_id), "x-request-id": request_id}
    response = _json(errors.body(answer, request_id), error.status_code, more)
    for name, value in headers.items():
        response.headers[name] = value
    return response


#: Headers of answers that a web page of another origin may read.
EXPOSED_HEADERS = (
    *("x-request-id", "request-id", "retry-after", REPLAYED, "x-baton-tier", "x-baton-max-tokens"),
    *(f"x-ratelimit-{what}-{name}" for name in ("requests", "tokens") for what in ("limit", "remaining", "reset")),
)


def _cors(origins: Sequence[str]) -> Middleware:
    """Returns the middleware that lets web pages of these origins call the API. Keys are headers, never cookies."""
    return Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=("DELETE", "GET", "HEAD", "OPTIONS", "POST"),
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=EXPOSED_HEADERS,
        max_age=86400,
    )


def build_app(gateway: Gateway, history: MetricsHistory, store: ResponseStore | None = None) -> Starlette:
    """Returns the HTTP application. The caller starts and stops `gateway`. Without `store` no response is kept."""

    def post(path: str, name: str, serve: RequestHandler, *, keyed: bool = False) -> Route:
        serve_key = serve_keyed if keyed and gateway.answer_keys.on else None
        return Route(path, Endpoint(gateway, name, serve, _errors_of(path), serve_keyed=serve_key), methods=["POST"])

    def route(path: str, answer: Callable[[Request], Awaitable[Any]], *methods: str) -> Route:
        """Returns a route that answers with a JSON value, or with the error that `answer` raises."""

        async def respond(request: Request) -> Response:
            try:
                return _json(await answer(request))
            except BatonError as e:
                return _error(e)
            except Exception:
                _log.exception("a request failed inside the gateway")
                return _error(InternalError("internal error"))

        return Route(path, respond, methods=list(methods) or None)

    def model_json(name: str, model: ServedModel) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": model.created, "owned_by": "baton", "root": model.name}
        if (adapter := model.adapter) is not None:
            card |= {"parent": model.name, "root": adapter.path, "digest": adapter.digest, "rank": adapter.rank}
        if defaults := model.defaults.as_json():
            card["generation_defaults"] = defaults
        if weights := model.pod_table.weights:
            card["quantization"] = weights
        ready = model.pod_table.ready
        return {**card, "max_model_len": model.pod_table.limits().max_model_len} if ready else card

    async def models(request: Request) -> dict[str, Any]:
        may_use = caller_of(request.scope).may_use
        named = gateway.models.listed()
        shown = [model_json(name, m) for name, m in named if may_use(name, *m.own_names)]
        return model_list(shown) if ANTHROPIC_VERSION in request.headers else {"object": "list", "data": shown}

    async def model(request: Request) -> dict[str, Any]:
        name = request.path_params["model"]
        shown = model_json(name, gateway.model_for(caller_of(request.scope), name))
        return model_card(shown) if ANTHROPIC_VERSION in request.headers else shown

    async def tokenizer_info(request: Request) -> dict[str, Any]:
        return tokenize.info(caller_of(request.scope), request.query_params.get("model"))

    async def ready(_request: Request) -> dict[str, str]:
        if why := gateway.why_unready():
            raise Unavailable(why, retry_after_s=1.0)
        return {"status": "ready"}

    async def live(_request: Request) -> dict[str, str]:
        return {"status": "live"}

    async def metrics(request: Request) -> Response:
        caller, accept = known_caller(request.scope), request.headers.get("accept", "")

        def may_see(tenant: str) -> bool:
            return caller is not None and (caller.admin or caller.tenant == tenant)

        text = gateway.metrics.exposition(accept, may_see)
        return Response(text, headers={"content-type": gateway.metrics.base.content_type(accept)})

    async def reset_prefix_cache(_request: Request) -> dict[str, Any]:
        pods = [dataclasses.asdict(reset) for reset in await gateway.reset_prefix_cache()]
        totals = {name: sum(pod[name] for pod in pods) for name in ("cleared", "kept")}
        return {"object": "prefix_cache.reset", **totals, "pods": pods}

    async def version_(_request: Request) -> dict[str, str]:
        return {"version": package_version()}

    async def openapi(_request: Request) -> dict[str, Any]:
        return openapi_document(
            package_version(), tuple(gateway.models.by_name), gateway.settings.root_path.rstrip("/")
        )

    async def timeline(request: Request) -> Response:
        caller, found = caller_of(request.scope), gateway.timelines.find(request.path_params["request_id"])
        if found is None or not (caller.admin or caller.tenant == found.tenant):
            return _error(InvalidRequest("this request is not among the recent ones", field="request_id"), 404)
        return _json(found.as_json())

    tokenize, responses = TokenizeHandler(gateway), ResponsesHandler(gateway, store)
    messages, prompts = MessagesHandler(gateway), PromptRunner(gateway)
    scorer, adapters = PairScorer(prompts), AdapterHandler(gateway)
    rerank, score = RerankHandler(gateway, scorer, return_documents=True), ScoreHandler(gateway, scorer)
    routes = [
        post("/v1/completions", "completions", GenerateHandler(gateway, chat=False).serve, keyed=True),
        post("/v1/chat/completions", "chat", GenerateHandler(gateway, chat=True).serve, keyed=True),
        post("/v1/embeddings", "embeddings", EmbeddingsHandler(prompts).serve),
        *(post(path, "rerank", rerank.serve) for path in ("/v1/rerank", "/rerank")),
        post("/v2/rerank", "rerank", RerankHandler(gateway, scorer, return_documents=False).serve),
        *(post(path, "score", score.serve) for path in ("/v1/score", "/score")),
        post("/v1/responses", "responses", responses.create, keyed=True),
        route("/v1/responses/{response_id}", responses.read, "GET"),
        route("/v1/responses/{response_id}", responses.delete, "DELETE"),
        route("/v1/responses/{response_id}/input_items", responses.input_items),
        post(MESSAGES, "messages", messages.create, keyed=True),
        post(f"{MESSAGES}/count_tokens", "count_tokens", messages.count),
        post("/v1/load_lora_adapter", "load_lora_adapter", adapters.load),
        post("/v1/unload_lora_adapter", "unload_lora_adapter", adapters.unload),
        post("/tokenize", "tokenize", tokenize.tokenize),
        post("/detokenize", "detokenize", tokenize.detokenize),
        route("/tokenizer_info", tokenizer_info, "GET"),
        route("/v1/models", models),
        route("/v1/models/{model:path}", model),
        route("/health", ready),
        route("/ready", ready),
        route("/live", live),
        Route("/metrics", metrics),
        route("/openapi.json", openapi),
        route("/version", version_),
        route("/reset_prefix_cache", reset_prefix_cache, "POST"),
        Route("/debug/requests/{request_id}", timeline),
        *dashboard_routes(gateway, history, package_version()),
        *page_routes(),
    ]
    open_metrics = gateway.settings.open_metrics
    middleware = [Middleware(AuthMiddleware, keys=gateway.keys, open_metrics=open_metrics, errors_of=_errors_of)]
    if gateway.settings.cors_origin:  # before authentication, because a browser's preflight has no key
        middleware.insert(0, _cors(gateway.settings.cors_origin))
    if root_path := gateway.settings.root_path.rstrip("/"):
        middleware.insert(0, Middleware(RootPathMiddleware, root_path=root_path))
    middleware.insert(0, Middleware(RequestIdMiddleware))
    app = Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _http_error})
    app.router.redirect_slashes = False
    return app
