"""Authentication of HTTP requests: finds the caller before anything else of the request is read.

The caller is found once and stored in the ASGI scope. The paths of health checks, the OpenAPI document and, by
configuration, /metrics need no key.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import BatonError, PermissionDenied
from gateway.admission.api_keys import Caller
from gateway.admission.key_ring import KeyRing
from gateway.api.http.body import header

OPEN_PATHS = frozenset({"/", "/health", "/live", "/ready", "/version", "/openapi.json"})
#: The files of the page at /. The data that the page shows does need a key.
OPEN_FILES = "/dashboard/page/"
METRICS = "/metrics"
ADMIN_PATHS = frozenset({"/reset_prefix_cache"})
_CALLER = "baton.caller"

Refusal = Callable[[BatonError], ASGIApp]


def caller_of(scope: Scope) -> Caller:
    """Returns the caller of a request that passed AuthMiddleware."""
    caller = scope[_CALLER]
    assert isinstance(caller, Caller)
    return caller


class AuthMiddleware:
    """ASGI middleware that identifies the caller, and rejects a request without a valid key."""

    def __init__(self, app: ASGIApp, *, keys: KeyRing, refuse: Refusal, open_metrics: bool) -> None:
        """
        Args:
            refuse: Returns an application that answers with an error.
            open_metrics: /metrics needs no key.
        """
        self._app = app
        self._keys = keys
        self._refuse = refuse
        self._open = OPEN_PATHS | {METRICS} if open_metrics else OPEN_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_open(scope["path"]):
            try:
                caller = self._keys.identify(header(scope, b"authorization"))
                if scope["path"] in ADMIN_PATHS and not caller.admin:
                    raise PermissionDenied("this needs the key of an administrator")
            except BatonError as e:
                await self._refuse(e)(scope, receive, send)
                return
            scope[_CALLER] = caller
        await self._app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in self._open or path.startswith(OPEN_FILES)
