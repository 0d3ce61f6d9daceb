"""One tree of errors; each class knows its gRPC code (by name), its HTTP status and whether a retry may help.

BatonError
 +- InvalidRequest        the client's request is wrong; `field` names where           400
 |   +- ModelNotFound     no such model                                               404
 |   +- ObjectNotFound    nothing is kept (any more) under that id                    404
 |   +- RequestTooLarge   the body is larger than the gateway reads                   413
 |   +- RequestTooSlow    the body does not arrive in time                            408
 |   +- InvalidApiKey     no API key, or one that does not count                      401
 |   +- PermissionDenied  the API key does not allow this                             403
 |   `- NotServed         these pods, or this model, cannot do that                   501
 +- Overloaded            no room now; try again after `retry_after_s`                 429
 |   +- RateLimited       the API key's rate is used up for now                       429
 |   `- QuotaExceeded     the API key's budget is used up until the next period       429
 +- Unavailable           a pod or peer is away or leaving; another may serve          503
 +- DeadlineExceeded      the request's time is over                                   504
 +- Cancelled             the client went away or called Abort                         499
 +- LayoutMismatch        two pods hold KV of different shape; `field` names which     500
 +- Unauthenticated       a peer without the cluster's secret                          401
 +- UnknownTransfer       no such transfer (any more); nothing may be written for it   503
 +- TransferFailed        a hand-off broke; the prompt may be computed again           503
 |   `- BlockDamaged      KV arrived, or came back from the host, with another checksum 503
 +- IndexUnavailable      the prefix index is away; routes go on without it            503
 +- ConfigError           wrong configuration; ends the process with exit code 2       --
 `- InternalError         our bug, or a failure of the machine                         500

A class outside this tree that reaches an RPC or HTTP boundary is reported as InternalError and logged with its trace.
"""

from __future__ import annotations

from typing import ClassVar


class BatonError(Exception):
    """Base of all expected failures.

    message: one sentence for a person. field: the request's or configuration's field at fault, if any.
    retry_after_s: seconds after which a retry is sensible; None when unknown.
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
        """Stable name of the class, as it travels on the wire."""
        return type(self).__name__


class InvalidRequest(BatonError):
    """The request itself is wrong; sending it again will not help."""

    grpc_code = "INVALID_ARGUMENT"
    http_status = 400
    openai_type = "invalid_request_error"


class ModelNotFound(InvalidRequest):
    """The request names a model that is not served here."""

    grpc_code = "NOT_FOUND"
    http_status = 404


class ObjectNotFound(InvalidRequest):
    """The request names something that is not kept here: it never was, it expired, or it belongs to someone else."""

    grpc_code = "NOT_FOUND"
    http_status = 404


class RequestTooLarge(InvalidRequest):
    """The request's body is larger than the gateway is willing to read."""

    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 413


class RequestTooSlow(InvalidRequest):
    """The request's body did not arrive in the time that the gateway waits for it."""

    grpc_code = "DEADLINE_EXCEEDED"
    http_status = 408


class InvalidApiKey(InvalidRequest):
    """The client sent no API key, or one that is unknown, revoked or expired."""

    grpc_code = "UNAUTHENTICATED"
    http_status = 401


class PermissionDenied(InvalidRequest):
    """The client's API key is valid, and does not allow this."""

    grpc_code = "PERMISSION_DENIED"
    http_status = 403


class NotServed(InvalidRequest):
    """What is asked for exists, but not with this model, or not on these pods."""

    grpc_code = "UNIMPLEMENTED"
    http_status = 501


class Overloaded(BatonError):
    """Nothing is wrong with the request, there is no room for it now."""

    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 429
    retryable = True
    openai_type = "rate_limit_error"


class RateLimited(Overloaded):
    """A limit of the client's API key is reached; `field` names it."""


class QuotaExceeded(Overloaded):
    """The budget of the client's API key is spent; it begins anew after `retry_after_s`."""

    retryable = False
    openai_type = "insufficient_quota"


class Unavailable(BatonError):
    """A pod or peer is away, starting or leaving; another one, or the same one later, may serve."""

    grpc_code = "UNAVAILABLE"
    http_status = 503
    retryable = True


class DeadlineExceeded(BatonError):
    """The request's own deadline passed."""

    grpc_code = "DEADLINE_EXCEEDED"
    http_status = 504


class Cancelled(BatonError):
    """The client went away or asked for the end."""

    grpc_code = "CANCELLED"
    http_status = 499


class LayoutMismatch(BatonError):
    """Two pods cannot exchange KV; `field` names the first part of the layout that differs."""

    grpc_code = "FAILED_PRECONDITION"


class Unauthenticated(BatonError):
    """A message that should carry the cluster's signature does not, or carries a wrong one."""

    grpc_code = "UNAUTHENTICATED"
    http_status = 401
    openai_type = "authentication_error"


class UnknownTransfer(BatonError):
    """The transfer is unknown, expired, aborted or of another generation: nothing may be written for it."""

    grpc_code = "NOT_FOUND"
    http_status = 503


class TransferFailed(BatonError):
    """KV did not reach its home; the request can be tried again from its prompt."""

    grpc_code = "ABORTED"
    http_status = 503
    retryable = True


class BlockDamaged(TransferFailed):
    """KV is not what was sent or put away, by its checksum; nothing was computed from it."""


class IndexUnavailable(BatonError):
    """The prefix index does not answer; whoever asked goes on without it. Never an answer to a client."""

    grpc_code = "UNAVAILABLE"
    http_status = 503
    retryable = True


class ConfigError(BatonError):
    """Wrong configuration: printed as one line, ends the process with exit code 2."""

    grpc_code = "FAILED_PRECONDITION"


class InternalError(BatonError):
    """Our bug, or the machine's failure."""


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

# Kinds that a client gets through no fault of its own.
SERVER_FAULTS = frozenset(
    kind for kind, cls in _BY_KIND.items() if cls.http_status >= 500 and not issubclass(cls, InvalidRequest)
)

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
    """Class for a kind that came over the wire; an unknown kind (a newer peer) is an InternalError."""
    return _BY_KIND.get(kind, InternalError)


def error_from_grpc_status(code: str, message: str) -> BatonError:
    """The error that stands for a gRPC status whose details carry no kind (a foreign or broken peer)."""
    return _BY_CODE.get(code, InternalError)(message)
