"""Watches the EndpointSlices of Services in this Kubernetes namespace, to find the addresses of pods.

    list -> watch from the list's version -> watch ended -> watch from the last version seen -> ...
     ^                                    -> 410, the server has forgotten that version
     |                                            |
     +--------------------------------------------+

A list replaces all known addresses. While the API server is away the known addresses stay. Pods that are not ready are
included: the pod itself says whether it can be used. Like client-go's Reflector, with watches short enough to notice a
connection that died silently.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
from pydantic import AliasPath, BaseModel, Field

from common.errors import ConfigError, describe

PORT_NAME = "grpc"  #: Name of the Service port that the pods' RPC servers use.
SERVICE_LABEL = "kubernetes.io/service-name"
WATCH_S = 60  #: Length of a watch. A connection that is silent for SILENCE_S longer counts as dead.
SILENCE_S = 15.0
CALL_TIMEOUT_S = 10.0
BACKOFF_S = (0.2, 10.0)
SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KubernetesApi:
    """The API server, and the service account of this process."""

    url: str
    account: Path  #: Directory with token, ca.crt and namespace, read for each call: the kubelet renews the token.

    @classmethod
    def in_cluster(cls, env: Mapping[str, str] = os.environ, account: Path = SERVICE_ACCOUNT_DIR) -> Self:
        """Returns the API server of this cluster. Raises ConfigError outside a cluster or without a mounted token."""
        host, port = env.get("KUBERNETES_SERVICE_HOST"), env.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ConfigError("discovery: k8s works only inside a cluster", field="discovery")
        if not (account / "token").is_file():
            raise ConfigError(f"discovery: no service account is mounted at {account}", field="discovery")
        return cls(f"https://{f'[{host}]' if ':' in host else host}:{port}", account)

    def slices_path(self) -> str:
        """Returns the URL path of the EndpointSlices of this pod's namespace."""
        namespace = (self.account / "namespace").read_text().strip()
        return f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"

    def headers(self) -> dict[str, str]:
        """Returns request headers with the current token."""
        token = (self.account / "token").read_text().strip()
        return {"Authorization": f"Bearer {token}", "Accept": "application/json"}

    def client(self) -> httpx.AsyncClient:
        """Returns an HTTP client that trusts only the cluster's certificate authority."""
        verify = ssl.create_default_context(cafile=str(self.account / "ca.crt"))
        return httpx.AsyncClient(base_url=self.url, verify=verify, timeout=CALL_TIMEOUT_S, trust_env=False)


class _Meta(BaseModel):
    name: str = ""
    resourceVersion: str = ""


class _Endpoint(BaseModel):
    addresses: list[str]
    terminating: bool | None = Field(default=None, validation_alias=AliasPath("conditions", "terminating"))


class _Port(BaseModel):
    name: str | None = None
    port: int | None = None


class _Slice(BaseModel):
    metadata: _Meta
    addressType: str
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None

    def addresses(self) -> dict[str, bool]:
        """Returns host:port of each endpoint, and whether it is terminating."""
        port = next((p.port for p in self.ports or () if p.name == PORT_NAME and p.port), None)
        if port is None or self.addressType not in ("IPv4", "IPv6"):
            return {}
        return {
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}": endpoint.terminating is True
            for endpoint in self.endpoints or ()
            for host in endpoint.addresses[:1]  # the other addresses belong to the same pod
        }


class _List(BaseModel):
    metadata: _Meta
    items: list[_Slice]


class _Event(BaseModel):
    type: str
    object: dict[str, Any]


class _VersionExpired(Exception):
    """The server has forgotten the version that the watch began with."""


class _WatchRefused(Exception):
    """The server answered with an error."""


class EndpointSliceWatcher:
    """Calls `on_change` after every change, on its event loop: all addresses, and whether the pods are terminating."""

    def __init__(
        self,
        api: KubernetesApi,
        services: Sequence[str],
        on_change: Callable[[Mapping[str, bool]], None],
        *,
        watch_s: int = WATCH_S,
        backoff_s: tuple[float, float] = BACKOFF_S,
    ) -> None:
        self._api = api
        self._selector = f"{SERVICE_LABEL} in ({','.join(services)})"
        self._on_change = on_change
        self._watch_s = watch_s
        self._backoff_s = backoff_s
        self._slices: dict[str, dict[str, bool]] = {}  # addresses by the name of the slice
        self._version = ""  #: Resource version to watch from; "" if a list comes next.
        self._notified: dict[str, bool] | None = None  #: The addresses of the last `on_change`.
        self.up = False  #: The API server answered the last call.
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the watch in the background."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="endpoint-slices")

    async def stop(self) -> None:
        """Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        low, high = self._backoff_s
        backoff = low
        while True:
            try:
                async with self._api.client() as client:
                    while True:
                        if not self._version:
                            await self._list(client)
                        if await self._watch(client):
                            backoff = low
                        else:  # the server ends each watch at once: limits the rate of calls
                            await asyncio.sleep(low)
            except _VersionExpired:
                _log.info("endpoint slices: the API server forgot the version, listing again")
            except (httpx.HTTPError, OSError, ValueError, _WatchRefused) as e:
                self._set_up(False, describe(e))
            except Exception as e:
                _log.exception("endpoint slices: unexpected error, trying again")
                self._set_up(False, describe(e))
            self._version = ""  # the next connection may reach another server, with other versions
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(high, 2 * backoff)

    def _set_up(self, up: bool, why: str = "") -> None:
        if up != self.up or (why and self._notified is None):
            _log.log(logging.INFO if up else logging.WARNING, "Kubernetes API: %s", "up" if up else f"away ({why})")
        self.up = up

    async def _list(self, client: httpx.AsyncClient) -> None:
        path, headers, params = self._api.slices_path(), self._api.headers(), {"labelSelector": self._selector}
        response = await client.get(path, params=params, headers=headers)
        if response.status_code != 200:
            raise _WatchRefused(_status_text(response))
        found = _List.model_validate_json(response.content)
        self._slices = {item.metadata.name: item.addresses() for item in found.items}
        self._version = found.metadata.resourceVersion
        self._set_up(True)
        self._notify()

    async def _watch(self, client: httpx.AsyncClient) -> bool:
        """Watches until the server ends the watch. Returns False if it did so at once and without an event."""
        params: dict[str, str | int] = {
            "labelSelector": self._selector,
            "watch": 1,
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": self._watch_s,
        }
        timeout = httpx.Timeout(CALL_TIMEOUT_S, read=self._watch_s + SILENCE_S)
        path, headers, got_event = self._api.slices_path(), self._api.headers(), False
        started = asyncio.get_running_loop().time()
        async with client.stream("GET", path, params=params, headers=headers, timeout=timeout) as response:
            if response.status_code == 410:
                raise _VersionExpired
            if response.status_code != 200:
                await response.aread()
                raise _WatchRefused(_status_text(response))
            async for line in response.aiter_lines():
                if line:
                    self._apply(_Event.model_validate_json(line))
                    got_event = True
        return got_event or asyncio.get_running_loop().time() - started >= 1.0

    def _apply(self, event: _Event) -> None:
        kind, body = event.type, event.object
        if kind == "ERROR":
            if body.get("code") == 410:
                raise _VersionExpired
            raise _WatchRefused(f"{body.get('code')}: {body.get('message')}")
        meta = _Meta.model_validate(body.get("metadata", {}))
        if kind in ("ADDED", "MODIFIED"):
            self._slices[meta.name] = _Slice.model_validate(body).addresses()
        elif kind == "DELETED":
            self._slices.pop(meta.name, None)
        self._version = meta.resourceVersion
        self._notify()

    def _notify(self) -> None:
        """Calls `on_change` after a change. A pod in two slices, because it moved, is terminating if both say so."""
        now: dict[str, bool] = {}
        for addresses in self._slices.values():
            for address, terminating in addresses.items():
                now[address] = terminating and now.get(address, True)
        if now != self._notified:
            self._notified = now
            self._on_change(now)


def _status_text(response: httpx.Response) -> str:
    return f"{response.status_code}: {response.content[:200].decode(errors='replace')}"
