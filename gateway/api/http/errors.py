"""Errors in the shape of OpenAI's API: the body and the headers of an error answer."""

from __future__ import annotations

import math

from common.errors import (
    BatonError,
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
from gateway.api.http.json_value import Json

_CODES = {
    ModelNotFound: "model_not_found",
    RequestTooLarge: "request_too_large",
    RequestTooSlow: "request_timeout",
    InvalidApiKey: "invalid_api_key",
    Overloaded: "rate_limit_exceeded",
    RateLimited: "rate_limit_exceeded",
    QuotaExceeded: "insufficient_quota",
}


def error_body(error: BatonError) -> Json:
    """Returns an error in OpenAI's shape. An internal error does not show its message."""
    hidden = isinstance(error, InternalError)
    return {
        "error": {
            "message": "internal error" if hidden else error.message,
            "type": error.openai_type,
            "param": error.field if isinstance(error, InvalidRequest) else None,
            "code": _code(error),
        }
    }


def _code(error: BatonError) -> str | None:
    """Returns the error's code, None if there is none.

    A model that a key may not use has the code of a model that does not exist, as with OpenAI.
    """
    if isinstance(error, PermissionDenied) and error.field == "model":
        return _CODES[ModelNotFound]
    return _CODES.get(type(error))


def error_headers(error: BatonError) -> dict[str, str]:
    """Returns Retry-After where a retry helps, and `connection: close` after an incomplete request."""
    if isinstance(error, RequestTooSlow):
        return {"connection": "close"}
    if isinstance(error, InvalidApiKey):
        return {"www-authenticate": "Bearer"}
    if not isinstance(error, Overloaded | Unavailable):
        return {}
    return {"retry-after": str(max(1, math.ceil(error.retry_after_s or 1.0)))}
