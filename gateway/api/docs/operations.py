"""Every path of the HTTP API: what it does, takes and answers. A test holds the list equal to the app's routes."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.api.http.json_value import Json
from gateway.api.openai.embeddings import EmbeddingsRequest
from gateway.api.openai.fields import RequestModel
from gateway.api.openai.requests import ChatRequest, CompletionRequest
from gateway.api.openai.responses.request import ResponseRequest
from gateway.api.openai.tokenize import DetokenizeRequest, TokenizeRequest


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    #: Method and path.
    route: str
    summary: str
    #: Name in schemas.SCHEMAS of the answer's schema, "" for plain text.
    answer: str
    #: Statuses of its errors; all have the schema Error.
    errors: tuple[int, ...] = ()
    body: type[RequestModel] | None = None
    #: Name of the schema of a stream's events, "" without a stream.
    event: str = ""
    #: Name and schema of each query parameter.
    query: tuple[tuple[str, Json], ...] = ()

    @property
    def method(self) -> str:
        return self.route.partition(" ")[0]

    @property
    def path(self) -> str:
        return self.route.partition(" ")[2]


#: Errors of the operations that read a body and take a permit.
_BODY = (400, 401, 403, 404, 408, 413, 429, 499, 500, 503, 504)
_STORED = (400, 401, 404, 503)

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST /v1/chat/completions",
        "Answers a conversation.",
        "ChatCompletion",
        _BODY,
        ChatRequest,
        event="ChatCompletionChunk",
    ),
    Operation("POST /v1/completions", "Continues a text.", "Completion", _BODY, CompletionRequest, event="Completion"),
    Operation(
        "POST /v1/embeddings",
        "Vectors of length 1: the state of each text's last token.",
        "Embeddings",
        (*_BODY, 501),
        EmbeddingsRequest,
    ),
    Operation(
        "POST /v1/responses",
        "Answers a conversation, in the shape of OpenAI's Responses.",
        "Response",
        _BODY,
        ResponseRequest,
        event="ResponseEvent",
    ),
    Operation("GET /v1/responses/{response_id}", "Returns a stored response.", "Response", _STORED),
    Operation("DELETE /v1/responses/{response_id}", "Deletes a stored response.", "ResponseDeleted", _STORED),
    Operation(
        "GET /v1/responses/{response_id}/input_items",
        "Lists the input items of a stored response.",
        "ResponseItems",
        _STORED,
        query=(
            ("limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
            ("order", {"enum": ["asc", "desc"], "default": "desc"}),
            ("after", {"type": "string"}),
        ),
    ),
    Operation(
        "POST /tokenize", "A text or a conversation as token ids, in vLLM's shape.", "Tokenized", _BODY, TokenizeRequest
    ),
    Operation(
        "POST /detokenize", "Token ids as text, special tokens included.", "Detokenized", _BODY, DetokenizeRequest
    ),
    Operation("GET /v1/models", "The served models.", "ModelList", (401,)),
    Operation("GET /v1/models/{model}", "One served model.", "Model", (401, 403, 404)),
    Operation("GET /health", "The same as /ready.", "Status", (503,)),
    Operation("GET /ready", "200 while requests can be answered.", "Status", (503,)),
    Operation("GET /live", "200 while the process runs.", "Status"),
    Operation("GET /version", "The version of Baton.", "Version"),
    Operation("GET /metrics", "Metrics in Prometheus' format.", "", (401,)),
    Operation(
        "POST /reset_prefix_cache",
        "Empties the prefix caches of all pods, and so the index; 200 only when every pod has confirmed it.",
        "PrefixCacheReset",
        (401, 403, 503),
    ),
    Operation(
        "GET /debug/requests/{request_id}", "Events of a recent request, with their times.", "Timeline", (401, 404)
    ),
    Operation(
        "GET /dashboard/state",
        "Pods, rates and latencies of the last five minutes, for the dashboard.",
        "DashboardState",
        (401,),
    ),
    Operation(
        "GET /dashboard/requests",
        "Recent requests of the key's tenant, newest first, with their phases; since: the cursor of an earlier answer, "
        "to get only the requests that changed after it.",
        "DashboardRequests",
        (400, 401),
        query=(
            ("limit", {"type": "integer", "minimum": 1, "maximum": 256, "default": 50}),
            ("since", {"type": "number", "minimum": 0, "default": 0}),
        ),
    ),
    Operation(
        "GET /dashboard/requests/{request_id}",
        "One recent request of the key's tenant.",
        "DashboardRequest",
        (401, 404),
    ),
)

#: Headers that requests may have: name, meaning, schema.
HEADERS: tuple[tuple[str, str, Json], ...] = (
    (
        "X-Request-Id",
        "The client's own id for logs and timelines, at most 128 printable ASCII characters; echoed.",
        {"type": "string"},
    ),
    (
        "X-Request-Timeout",
        "Seconds that the client is willing to wait; the request ends with 504 after them. The gateway's own limit "
        "(--request-timeout-s, 600) holds anyway.",
        {"type": "number", "exclusiveMinimum": 0},
    ),
    (
        "X-Session-Affinity",
        "A hint: the router prefers the same pods for requests with the same value; at most 256 characters.",
        {"type": "string"},
    ),
)
