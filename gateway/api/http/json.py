"""JSON of the HTTP API: values, the names of their types, the limit of their nesting, and errors in OpenAI's shape."""

from __future__ import annotations

import math
import re
from typing import Any

import orjson

from common.errors import (
    BatonError,
    ContextOverflow,
    IdempotencyConflict,
    InternalError,
    InvalidApiKey,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    RateLimited,
    RequestTooLarge,
    RequestTooSlow,
    Unavailable,
)

MAX_DEPTH = 200  #: Levels of nested arrays and objects that a body may have; orjson writes at most 254.
Json = dict[str, Any]  #: A JSON object.
_LONE_SURROGATES = re.compile("[\ud800-\udfff]")
_TYPE_NAMES = {dict: "object", list: "array", str: "string", int: "integer", float: "number", bool: "boolean"}
_CODES = {
    ModelNotFound: "model_not_found",
    ContextOverflow: "context_length_exceeded",
    IdempotencyConflict: "idempotency_key_in_use",
    RequestTooLarge: "request_too_large",
    RequestTooSlow: "request_timeout",
    InvalidApiKey: "invalid_api_key",
    Overloaded: "rate_limit_exceeded",
    RateLimited: "rate_limit_exceeded",
    QuotaExceeded: "insufficient_quota",
}


def encoded(value: Json) -> bytes:
    """Returns a value as JSON. Half a surrogate pair, which UTF-8 cannot encode, becomes U+FFFD."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return orjson.dumps(without_lone_surrogates(value))


def well_formed(text: str) -> str:
    """Returns a text with U+FFFD in place of halves of surrogate pairs."""
    return text if text.isascii() else _LONE_SURROGATES.sub("\ufffd", text)


def without_lone_surrogates(value: Any) -> Any:
    """Returns a JSON value with U+FFFD in place of halves of surrogate pairs, in all of its texts."""
    if isinstance(value, dict):
        return {without_lone_surrogates(k): without_lone_surrogates(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [without_lone_surrogates(v) for v in value]
    return well_formed(value) if isinstance(value, str) else value


def type_name(value: object) -> str:
    """Returns JSON's name of a value's type."""
    return "null" if value is None else _TYPE_NAMES.get(type(value), type(value).__name__)


def deeper_than(value: object, most: int) -> bool:
    """Returns whether arrays and objects are nested deeper than `most` levels."""
    level = [value]
    for _ in range(most):
        nested = (v.values() if type(v) is dict else v for v in level if type(v) is dict or type(v) is list)
        level = [v for members in nested for v in members if type(v) is dict or type(v) is list]
        if not level:
            return False
    return True


def error_body(error: BatonError) -> Json:
    """Returns an error in OpenAI's shape. An internal error does not show its message."""
    hidden = isinstance(error, InternalError)
    refused_model = isinstance(error, PermissionDenied) and error.field == "model"
    return {
        "error": {
            "message": "internal error" if hidden else error.message,
            "type": error.openai_type,
            "param": error.field if isinstance(error, InvalidRequest) else None,
            # As with OpenAI, a model that a key may not use has the code of a model that does not exist.
            "code": _CODES.get(ModelNotFound if refused_model else type(error)),
        }
    }


def error_headers(error: BatonError) -> dict[str, str]:
    """Returns Retry-After where a retry helps, and `connection: close` after an incomplete request."""
    if isinstance(error, RequestTooSlow):
        return {"connection": "close"}
    if isinstance(error, InvalidApiKey):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, IdempotencyConflict):  # the SDKs repeat a 409 otherwise
        return {"x-should-retry": "false"}
    if not isinstance(error, Overloaded | Unavailable):
        return {}
    return {"retry-after": str(max(1, math.ceil(error.retry_after_s or 1.0)))}


class ErrorFormat:
    """The form of the errors of some routes; this class has OpenAI's."""

    def status(self, error: BatonError) -> int:
        """Returns the HTTP status."""
        return error.http_status

    def body(self, error: BatonError, request_id: str) -> Json:
        """Returns the body. An internal error does not show its message."""
        return error_body(error)

    def headers(self, error: BatonError, request_id: str) -> dict[str, str]:
        """Returns further headers."""
        return error_headers(error)


OPENAI_ERRORS = ErrorFormat()
