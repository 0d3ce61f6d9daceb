"""Every path of the HTTP API: what it does, takes and answers. A test holds the list equal to the app's routes."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.api.anthropic.requests import CountTokensRequest, MessageRequest
from gateway.api.http.json import Json
from gateway.api.openai.adapters import LoadAdapterRequest, UnloadAdapterRequest
from gateway.api.openai.bodies import ChatRequest, CompletionRequest
from gateway.api.openai.embeddings import EmbeddingsRequest
from gateway.api.openai.fields import RequestModel
from gateway.api.openai.responses.request import ResponseRequest
from gateway.api.openai.tokenize import DetokenizeRequest, TokenizeRequest
from gateway.api.scoring.rerank import RerankRequest
from gateway.api.scoring.score import ScoreRequest


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    summary: str
    answer: str  #: Name in schemas.SCHEMAS of the answer's schema, "" for plain text.
    errors: tuple[int, ...] = ()  #: HTTP statuses of its errors.
    body: type[RequestModel] | None = None
    event: str = ""  #: Name of the schema of a stream's events, "" without a stream.
    query: tuple[tuple[str, Json], ...] = ()  #: Name and schema of each query parameter.
    error: str = "Error"  #: Name of the schema of its errors.


#: Errors of the operations that read a body and pass admission.
_BODY = (400, 401, 403, 404, 408, 413, 429, 499, 500, 503, 504)
KEY_STATUS = 409  #: The idempotency key belongs to another request.
_STORED = (400, 401, 404, 503)


def _post(path: str, summary: str, answer: str, body: type[RequestModel], event: str = "", *errors: int) -> Operation:
    error = "MessageError" if path.startswith("/v1/messages") else "Error"
    return Operation("POST", path, summary, answer, (*_BODY, *errors), body, event, error=error)


def _get(path: str, summary: str, answer: str, *errors: int, **query: Json) -> Operation:
    return Operation("GET", path, summary, answer, errors, query=tuple(query.items()))


_LIMIT: Json = {"type": "integer", "minimum": 1}
_ITEMS: Json = {
    "limit": {**_LIMIT, "maximum": 100, "default": 20},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string"},
}
_RECENT: Json = {
    "limit": {**_LIMIT, "maximum": 256, "default": 50},
    "since": {"type": "number", "minimum": 0, "default": 0},
}
_RECENT_SUMMARY = (
    "Recent requests of the key's tenant, newest first, with their phases; since: the cursor of an earlier answer, "
    "to get only the requests that changed after it."
)
_RESET_SUMMARY = "Empties the prefix caches of all pods, and so the index; 200 only when every pod has confirmed it."
_EMBEDDINGS_SUMMARY = "A vector for each text, made of the states of its tokens."
_MESSAGES_SUMMARY = "Answers a conversation, in the shape of Anthropic's Messages."
_RERANK_SUMMARY = "Documents in the order of their relevance to a query, as at Jina and Cohere."
_SCORE_SUMMARY = "Scores of pairs of texts, in vLLM's shape."
_RESPONSES_SUMMARY = "Answers a conversation, in the shape of OpenAI's Responses."
_INFO_SUMMARY = "The tokenizer's configuration and the chat template, as lm-eval reads them from vLLM."
_LOAD_SUMMARY = "Gives a LoRA adapter a name, or another name's place, on all pods or none. For administrators."
_UNLOAD_SUMMARY = "Takes the name from a LoRA adapter; requests that are under way finish on it. For administrators."
RERANK_PATHS = ("/v1/rerank", "/rerank", "/v2/rerank")
_TOKENIZE_SUMMARY = "A text or a conversation as token ids, in vLLM's shape."

OPERATIONS: tuple[Operation, ...] = (
    _post(
        "/v1/chat/completions",
        "Answers a conversation.",
        "ChatCompletion",
        ChatRequest,
        "ChatCompletionChunk",
        KEY_STATUS,
    ),
    _post("/v1/completions", "Continues a text.", "Completion", CompletionRequest, "Completion", KEY_STATUS),
    _post("/v1/embeddings", _EMBEDDINGS_SUMMARY, "Embeddings", EmbeddingsRequest, "", 501),
    _post("/v1/responses", _RESPONSES_SUMMARY, "Response", ResponseRequest, "ResponseEvent", KEY_STATUS),
    _get("/v1/responses/{response_id}", "Returns a stored response.", "Response", *_STORED),
    Operation("DELETE", "/v1/responses/{response_id}", "Deletes a stored response.", "ResponseDeleted", _STORED),
    _get(
        "/v1/responses/{response_id}/input_items",
        "Lists the input items of a stored response.",
        "ResponseItems",
        *_STORED,
        **_ITEMS,
    ),
    _post("/v1/messages", _MESSAGES_SUMMARY, "Message", MessageRequest, "MessageEvent", KEY_STATUS, 529),
    _post("/v1/messages/count_tokens", "The number of tokens of a prompt.", "TokenCount", CountTokensRequest, "", 529),
    *(_post(path, _RERANK_SUMMARY, "Reranked", RerankRequest, "", 501) for path in RERANK_PATHS),
    *(_post(path, _SCORE_SUMMARY, "Scores", ScoreRequest, "", 501) for path in ("/v1/score", "/score")),
    _post("/v1/load_lora_adapter", _LOAD_SUMMARY, "Adapter", LoadAdapterRequest),
    _post("/v1/unload_lora_adapter", _UNLOAD_SUMMARY, "Adapter", UnloadAdapterRequest),
    _post("/tokenize", _TOKENIZE_SUMMARY, "Tokenized", TokenizeRequest),
    _post("/detokenize", "Token ids as text, special tokens included.", "Detokenized", DetokenizeRequest),
    _get("/tokenizer_info", _INFO_SUMMARY, "TokenizerInfo", 400, 401, 403, 404, model={"type": "string"}),
    _get("/v1/models", "The served models.", "ModelList", 401),
    _get("/v1/models/{model}", "One served model.", "Model", 401, 403, 404),
    _get("/health", "The same as /ready.", "Status", 503),
    _get("/ready", "200 while requests can be answered.", "Status", 503),
    _get("/live", "200 while the process runs.", "Status"),
    _get("/version", "The version of Baton.", "Version"),
    _get("/metrics", "Metrics in Prometheus' format.", "", 401),
    Operation("POST", "/reset_prefix_cache", _RESET_SUMMARY, "PrefixCacheReset", (401, 403, 503)),
    _get("/debug/requests/{request_id}", "Events of a recent request, with their times.", "Timeline", 401, 404),
    _get("/dashboard/state", "Pods, rates and latencies of the last five minutes.", "DashboardState", 401),
    _get("/dashboard/requests", _RECENT_SUMMARY, "DashboardRequests", 400, 401, **_RECENT),
    _get("/dashboard/requests/{request_id}", "One recent request of the key's tenant.", "DashboardRequest", 401, 404),
)

KEY_HEADER = "Idempotency-Key"
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
    (
        KEY_HEADER,
        "A key of the client's choice, 1 to 255 printable ASCII characters: requests with the same key and body get "
        "the same answer. For chat, completions, responses and messages.",
        {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[ -~]+$"},
    ),
)
