"""The tree of errors. Each class has a gRPC code (by name), an HTTP status and says whether a retry may help.

Any other exception that reaches an RPC or HTTP boundary is logged with its traceback and reported as InternalError.
`describe` gives a readable text for any exception. The text of `str()` may be empty or name private classes.
"""

from __future__ import annotations

import errno
import os
import re
from functools import singledispatch
from typing import ClassVar


class BatonError(Exception):
    """Base of all expected failures."""

    grpc_code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    openai_type: ClassVar[str] = "server_error"
    by_kind: ClassVar[dict[str, type[BatonError]]] = {}  #: Every subclass by its name (on the wire).

    def __init_subclass__(
        cls,
        *,
        grpc: str | None = None,
        http: int | None = None,
        retryable: bool | None = None,
        openai: str | None = None,
    ) -> None:
        """Sets the properties of a class; a property that is not given is inherited."""
        cls.grpc_code, cls.http_status = grpc or cls.grpc_code, http or cls.http_status
        cls.retryable = cls.retryable if retryable is None else retryable
        cls.openai_type = openai or cls.openai_type
        cls.by_kind[cls.__name__] = cls

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message  #: One sentence for a person.
        self.field = field  #: The field of the request or configuration that is wrong, if any.
        self.retry_after_s = retry_after_s  #: Seconds after which a retry is sensible; None if unknown.

    @property
    def kind(self) -> str:
        """Name of the class; part of the wire format."""
        return type(self).__name__


class InvalidRequest(BatonError, grpc="INVALID_ARGUMENT", http=400, openai="invalid_request_error"):
    """The request itself is wrong; a retry normally fails again."""


class ContextOverflow(InvalidRequest):
    """The prompt, alone or with the answer that the client asks for, is longer than the model's context."""


class ModelNotFound(InvalidRequest, grpc="NOT_FOUND", http=404):
    """The request names a model that the gateway does not serve."""


class ObjectNotFound(InvalidRequest, grpc="NOT_FOUND", http=404):
    """The request names an object that never existed, has expired, or belongs to another tenant."""


class RequestTooLarge(InvalidRequest, grpc="RESOURCE_EXHAUSTED", http=413):
    """The request's body is larger than the gateway's limit."""


class RequestTooSlow(InvalidRequest, grpc="DEADLINE_EXCEEDED", http=408):
    """The request's body did not arrive within the gateway's time limit."""


class InvalidApiKey(InvalidRequest, grpc="UNAUTHENTICATED", http=401):
    """The client sent no API key, or one that is unknown, revoked or expired."""


class PermissionDenied(InvalidRequest, grpc="PERMISSION_DENIED", http=403):
    """The client's API key is valid but does not allow the request."""


class IdempotencyConflict(InvalidRequest, grpc="ALREADY_EXISTS", http=409):
    """The client's idempotency key belongs to a request with another body; a new key is needed."""


class NotServed(InvalidRequest, grpc="UNIMPLEMENTED", http=501):
    """The API has the feature, but this model or these pods do not. It is an InvalidRequest: clients do not retry."""


class Overloaded(BatonError, grpc="RESOURCE_EXHAUSTED", http=429, retryable=True, openai="rate_limit_error"):
    """The request is valid, but there is no capacity for it now."""


class RateLimited(Overloaded):
    """A limit of the client's API key is reached; `field` names it."""


class QuotaExceeded(Overloaded, retryable=False, openai="insufficient_quota"):
    """The budget of the client's API key is spent; the next period begins after `retry_after_s`."""


class Unavailable(BatonError, grpc="UNAVAILABLE", http=503, retryable=True):
    """A pod or peer is unreachable, starting or draining; another one, or the same one later, can serve the request."""


class RoleChanged(Unavailable):
    """The pod changes its role, or has changed it. The request goes on elsewhere, and the attempt does not count."""


class AdapterNotLoaded(BatonError, grpc="FAILED_PRECONDITION", http=503):
    """A pod does not have the request's LoRA adapter and cannot load it; nothing was computed."""


class DeadlineExceeded(BatonError, grpc="DEADLINE_EXCEEDED", http=504):
    """The request's own deadline passed."""


class Cancelled(BatonError, grpc="CANCELLED", http=499):
    """The client disconnected or called Abort."""


class LayoutMismatch(BatonError, grpc="FAILED_PRECONDITION"):
    """Two pods cannot exchange KV; `field` names the first part of the layout that differs."""


class Unauthenticated(BatonError, grpc="UNAUTHENTICATED", http=401, openai="authentication_error"):
    """The cluster's signature on a message is missing or wrong."""


class UnknownTransfer(BatonError, grpc="NOT_FOUND", http=503):
    """The transfer is unknown, expired, aborted or of another generation: nothing may be written for it."""


class TransferFailed(BatonError, grpc="ABORTED", http=503, retryable=True):
    """KV did not reach its KV target; the request can be retried from its prompt."""


class BlockDamaged(TransferFailed):
    """KV that was moved or kept in host memory has a wrong checksum; no token was computed from it."""


class IndexUnavailable(BatonError, grpc="UNAVAILABLE", http=503, retryable=True):
    """The prefix index does not answer. The caller continues without it; clients never see this error."""


class ConfigError(BatonError, grpc="FAILED_PRECONDITION"):
    """Wrong configuration. At start it is printed as one line, and the process ends with exit code 2."""


class InternalError(BatonError):
    """A bug, or a failure of the machine."""


#: Kinds of errors with a 5xx status that the client did not cause.
SERVER_FAULTS = frozenset(
    kind for kind, cls in BatonError.by_kind.items() if cls.http_status >= 500 and not issubclass(cls, InvalidRequest)
)

#: Class for a status that names no kind. Several classes share a code; one of them is chosen.
_OF_CODES = (InvalidRequest, ModelNotFound, Overloaded, Unavailable, DeadlineExceeded, Cancelled, LayoutMismatch)
_BY_CODE: dict[str, type[BatonError]] = {
    cls.grpc_code: cls for cls in (*_OF_CODES, Unauthenticated, PermissionDenied, NotServed, TransferFailed)
}


def error_from_grpc_status(code: str, message: str) -> BatonError:
    """Returns the error for a gRPC status without an error kind in its details (another implementation)."""
    return _BY_CODE.get(code, InternalError)(message)


MAX_TEXT_CHARS = 300  #: `describe` cuts the text of an exception of a library to this length.
#: Classes whose names `describe` leaves out, because the name adds nothing to the text.
_SAYS_NOTHING = ("Exception", "RuntimeError", "ValueError", "UnicodeDecodeError", "JSONDecodeError", "HTTPError")
_ERRNO = re.compile(r"\[Errno (-?\d+)\]")
_ADDRESS = re.compile(r"\('([^']+)', (\d+)[^)]*\)")


@singledispatch
def describe(error: BaseException, *, limit_s: float | None = None) -> str:
    """Returns in words what failed, for logs and errors: one line, never empty.

    `limit_s`: time limit of the failed call in seconds. The text for a time-out names it. Packages register functions
    for the exceptions of their libraries (common/redis/client.py, common/rpc.py).
    """
    text, name = first_line(error), public_name(error)
    if any(
        "Timeout" in cls.__name__ for cls in type(error).__mro__
    ):  # time-outs of libraries have no common base class
        return timed_out(limit_s)
    if not text:
        return f"{name} without a text" if error.__cause__ is None else describe(error.__cause__, limit_s=limit_s)
    if number := _ERRNO.search(text):
        return os.strerror(int(number[1])).lower()
    return text if name in _SAYS_NOTHING or type(error).__name__.startswith("_") else f"{name}: {text}"


def first_line(error: BaseException) -> str:
    """Returns the first non-empty line of an exception's text, cut to MAX_TEXT_CHARS; "" without text."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line[:MAX_TEXT_CHARS] for line in lines if line), "")


def public_name(error: BaseException) -> str:
    """Returns the name of the exception's class, or of its first base class with a public name."""
    return next(cls.__name__ for cls in type(error).__mro__ if not cls.__name__.startswith("_"))


def timed_out(limit_s: float | None = None) -> str:
    """Returns the words for a time-out."""
    return "timed out" if limit_s is None else f"timed out after {limit_s:g} s"


@describe.register
def _(error: BatonError, *, limit_s: float | None = None) -> str:
    return error.message or f"{error.kind} without a text"


@describe.register
def _(error: OSError, *, limit_s: float | None = None) -> str:
    """Also names the address or the file, if the exception has it. asyncio puts the address of a call into the text."""
    text = str(error)
    if isinstance(error, TimeoutError) and error.errno is None:
        return timed_out(limit_s)
    numbers = [error.errno] if error.errno is not None else [int(number) for number in _ERRNO.findall(text)]
    addresses = [f"{host}:{port}" if ":" not in host else f"[{host}]:{port}" for host, port in _ADDRESS.findall(text)]
    if not numbers or numbers[0] not in errno.errorcode:  # an error of getaddrinfo or ssl, or a text without a number
        return (error.strerror if isinstance(error.strerror, str) else "") or first_line(error) or public_name(error)
    words = os.strerror(numbers[0])
    where = ", ".join(dict.fromkeys(addresses)) or ("" if error.filename is None else str(error.filename))
    return f"{words[:1].lower()}{words[1:]}{f' ({where})' if where else ''}"


@describe.register
def _(error: KeyError, *, limit_s: float | None = None) -> str:
    return f"{error.args[0]!r} is missing" if error.args else "a key is missing"


@describe.register
def _(error: MemoryError, *, limit_s: float | None = None) -> str:
    return f"out of memory{f': {text}' if (text := first_line(error)) else ''}"


@describe.register
def _(error: EOFError, *, limit_s: float | None = None) -> str:
    return first_line(error) or "the other side ended the connection"


@describe.register(BaseExceptionGroup)
def _(error: BaseExceptionGroup[BaseException], *, limit_s: float | None = None) -> str:
    return "; ".join(dict.fromkeys(describe(each, limit_s=limit_s) for each in error.exceptions))
