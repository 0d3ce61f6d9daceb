"""The tree of errors. Each class has a gRPC code (by name), an HTTP status and says whether a retry may help.

BatonError                                                                            HTTP
 +- InvalidRequest        the client's request is wrong; `field` names where          400
 |   +- ModelNotFound     no such model                                               404
 |   +- ObjectNotFound    no stored object has this id                                404
 |   +- RequestTooLarge   the body exceeds the gateway's limit                        413
 |   +- RequestTooSlow    the body does not arrive in time                            408
 |   +- InvalidApiKey     the API key is missing, unknown, revoked or expired         401
 |   +- PermissionDenied  the API key does not allow this                             403
 |   `- NotServed         these pods or this model do not support it                  501
 +- Overloaded            no capacity now; retry after `retry_after_s`                429
 |   +- RateLimited       the API key's rate is used up for now                       429
 |   `- QuotaExceeded     the API key's budget is used up until the next period       429
 +- Unavailable           a pod or peer is unreachable or draining                    503
 +- DeadlineExceeded      the deadline of the request has passed                      504
 +- Cancelled             the client disconnected or called Abort                     499
 +- LayoutMismatch        two pods hold KV of different shape; `field` names which    500
 +- Unauthenticated       a peer without the cluster's secret                         401
 +- UnknownTransfer       the transfer is unknown or ended; nothing may be written    503
 +- TransferFailed        a hand-off failed; the prompt can be computed again         503
 |   `- BlockDamaged      the checksum of moved or stored KV is wrong                 503
 +- IndexUnavailable      the prefix index does not answer; routing works without it  503
 +- ConfigError           wrong configuration; at start: exit code 2                  --
 `- InternalError         a bug, or a failure of the machine                          500

Any other exception that reaches an RPC or HTTP boundary is logged with its traceback and reported as InternalError.
"""

from __future__ import annotations

from typing import ClassVar


class BatonError(Exception):
    """Base of all expected failures.

    Attributes:
        message: One sentence for a person.
        field: The field of the request or configuration that is wrong, if any.
        retry_after_s: Seconds after which a retry is sensible; None if unknown.
    """

    grpc_code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    openai_type: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:
        """Name of the class; part of the wire format."""
        return type(self).__name__


class InvalidRequest(BatonError):
    """The request itself is wrong; a retry normally fails again."""

    grpc_code = "INVALID_ARGUMENT"
    http_status = 400
    openai_type = "invalid_request_error"


class ModelNotFound(InvalidRequest):
    """The request names a model that the gateway does not serve."""

    grpc_code = "NOT_FOUND"
    http_status = 404


class ObjectNotFound(InvalidRequest):
    """The request names an object that never existed, has expired, or belongs to another tenant."""

    grpc_code = "NOT_FOUND"
    http_status = 404


class RequestTooLarge(InvalidRequest):
    """The request's body is larger than the gateway's limit."""

    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 413


class RequestTooSlow(InvalidRequest):
    """The request's body did not arrive within the gateway's time limit."""

    grpc_code = "DEADLINE_EXCEEDED"
    http_status = 408


class InvalidApiKey(InvalidRequest):
    """The client sent no API key, or one that is unknown, revoked or expired."""

    grpc_code = "UNAUTHENTICATED"
    http_status = 401


class PermissionDenied(InvalidRequest):
    """The client's API key is valid but does not allow the request."""

    grpc_code = "PERMISSION_DENIED"
    http_status = 403


class NotServed(InvalidRequest):
    """The API has the requested feature, but this model or these pods do not support it.

    It is an InvalidRequest, so clients do not retry.
    """

    grpc_code = "UNIMPLEMENTED"
    http_status = 501


class Overloaded(BatonError):
    """The request is valid, but there is no capacity for it now."""

    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 429
    retryable = True
    openai_type = "rate_limit_error"


class RateLimited(Overloaded):
    """A limit of the client's API key is reached; `field` names it."""


class QuotaExceeded(Overloaded):
    """The budget of the client's API key is spent; the next period begins after `retry_after_s`."""

    retryable = False
    openai_type = "insufficient_quota"


class Unavailable(BatonError):
    """A pod or peer is unreachable, starting or draining; another one, or the same one later, can serve the request."""

    grpc_code = "UNAVAILABLE"
    http_status = 503
    retryable = True


class DeadlineExceeded(BatonError):
    """The request's own deadline passed."""

    grpc_code = "DEADLINE_EXCEEDED"
    http_status = 504


class Cancelled(BatonError):
    """The client disconnected or called Abort."""

    grpc_code = "CANCELLED"
    http_status = 499


class LayoutMismatch(BatonError):
    """Two pods cannot exchange KV; `field` names the first part of the layout that differs."""

    grpc_code = "FAILED_PRECONDITION"


class Unauthenticated(BatonError):
    """The cluster's signature on a message is missing or wrong."""

    grpc_code = "UNAUTHENTICATED"
    http_status = 401
    openai_type = "authentication_error"


class UnknownTransfer(BatonError):
    """The transfer is unknown, expired, aborted or of another generation: nothing may be written for it."""

    grpc_code = "NOT_FOUND"
    http_status = 503


class TransferFailed(BatonError):
    """KV did not reach its KV target; the request can be retried from its prompt."""

    grpc_code = "ABORTED"
    http_status = 503
    retryable = True


class BlockDamaged(TransferFailed):
    """KV that was moved or kept in host memory has a wrong checksum; no token was computed from it."""


class IndexUnavailable(BatonError):
    """The prefix index does not answer. The caller continues without it; clients never see this error."""

    grpc_code = "UNAVAILABLE"
    http_status = 503
    retryable = True


class ConfigError(BatonError):
    """Wrong configuration. At start it is printed as one line, and the process ends with exit code 2."""

    grpc_code = "FAILED_PRECONDITION"


class InternalError(BatonError):
    """A bug, or a failure of the machine."""


_BY_KIND: dict[str, type[BatonError]] = {
    cls.__name__: cls
    for cls in (
        InvalidRequest,
        ModelNotFound,
        ObjectNotFound,
        RequestTooLarge,
        RequestTooSlow,
        InvalidApiKey,
        PermissionDenied,
        NotServed,
        Overloaded,
        RateLimited,
        QuotaExceeded,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        LayoutMismatch,
        Unauthenticated,
        UnknownTransfer,
        TransferFailed,
        BlockDamaged,
        IndexUnavailable,
        ConfigError,
        InternalError,
    )
}

#: Kinds of errors with a 5xx status that the client did not cause.
SERVER_FAULTS = frozenset(
    kind for kind, cls in _BY_KIND.items() if cls.http_status >= 500 and not issubclass(cls, InvalidRequest)
)

#: Class for a status that names no kind. Several classes share a code (see `grpc_code`); one of them is chosen.
_BY_CODE: dict[str, type[BatonError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "NOT_FOUND": ModelNotFound,
    "RESOURCE_EXHAUSTED": Overloaded,
    "UNAVAILABLE": Unavailable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
    "FAILED_PRECONDITION": LayoutMismatch,
    "UNAUTHENTICATED": Unauthenticated,
    "PERMISSION_DENIED": PermissionDenied,
    "UNIMPLEMENTED": NotServed,
    "ABORTED": TransferFailed,
}


def error_class(kind: str) -> type[BatonError]:
    """Returns the class of an error kind from the wire; InternalError for an unknown kind (of a newer peer)."""
    return _BY_KIND.get(kind, InternalError)


def error_from_grpc_status(code: str, message: str) -> BatonError:
    """Returns the error for a gRPC status without an error kind in its details (another implementation)."""
    return _BY_CODE.get(code, InternalError)(message)
