"""TODO-DOCSTRING."""

from __future__ import annotations

import math
from typing import Any

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

Json = dict[str, Any]


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
    """An error in OpenAI's shape; an internal one says no more than that."""
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
    """OpenAI answers for a model that a key may not use as for one that does not exist."""
    if isinstance(error, PermissionDenied) and error.field == "model":
        return _CODES[ModelNotFound]
    return _CODES.get(type(error))


def error_headers(error: BatonError) -> dict[str, str]:
    """Retry-After where waiting helps; no further request over a connection whose last one never came whole."""
    if isinstance(error, RequestTooSlow):
        return {"connection": "close"}
    if isinstance(error, InvalidApiKey):
        return {"www-authenticate": "Bearer"}
    if not isinstance(error, Overloaded | Unavailable):
        return {}
    return {"retry-after": str(max(1, math.ceil(error.retry_after_s or 1.0)))}
