"""Errors of the Messages API: {"type": "error", "error": {"type", "message"}, "request_id"}."""

from __future__ import annotations

from common.errors import (
    BatonError,
    Cancelled,
    ContextOverflow,
    DeadlineExceeded,
    InternalError,
    InvalidApiKey,
    InvalidRequest,
    ModelNotFound,
    ObjectNotFound,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    RateLimited,
    RequestTooLarge,
    RequestTooSlow,
)
from gateway.api.http.json import ErrorFormat, Json, error_headers

OVERLOADED = 529  #: Anthropic's status for a server without free capacity; 429 is for a limit of the client's key.
#: The type of an error by its class; the first that fits counts.
_TYPES: tuple[tuple[type[BatonError], str], ...] = (
    (InvalidApiKey, "authentication_error"),
    (PermissionDenied, "permission_error"),
    (ModelNotFound, "not_found_error"),
    (ObjectNotFound, "not_found_error"),
    (RequestTooLarge, "request_too_large"),
    (RequestTooSlow, "timeout_error"),
    (InvalidRequest, "invalid_request_error"),
    (RateLimited, "rate_limit_error"),
    (QuotaExceeded, "rate_limit_error"),
    (Overloaded, "overloaded_error"),
    (DeadlineExceeded, "timeout_error"),
    (Cancelled, "api_error"),
)


class AnthropicErrors(ErrorFormat):
    """The form of the errors of the routes under /v1/messages."""

    def status(self, error: BatonError) -> int:
        """Returns the HTTP status."""
        limited = isinstance(error, RateLimited | QuotaExceeded)
        return OVERLOADED if isinstance(error, Overloaded) and not limited else error.http_status

    def body(self, error: BatonError, request_id: str) -> Json:
        """Returns the body. An internal error does not show its message."""
        kind = next((name for cls, name in _TYPES if isinstance(error, cls)), "api_error")
        message = "internal error" if isinstance(error, InternalError) else error.message
        if isinstance(error, ContextOverflow):  # agents search for these words, and then compact their history
            message = f"prompt is too long: {message}"
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}

    def headers(self, error: BatonError, request_id: str) -> dict[str, str]:
        """Returns further headers. `x-should-retry` stops the SDK from useless retries."""
        headers = {**error_headers(error), "request-id": request_id}
        if isinstance(error, QuotaExceeded):
            headers["x-should-retry"] = "false"
        return headers
