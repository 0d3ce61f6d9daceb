"""Which pods are behind Services of this Kubernetes namespace: the EndpointSlices, listed once and then watched.

    list -> watch from the list's version -> ended: watch from the last version seen
     ^                                    -> 410, that version is forgotten
     +------------------------------------------+

Invariants: a list replaces everything known; what is known stays while the API server is away. Pods that are not ready
yet are named too: whether one can be used is for the pod itself to say. Like client-go's Reflector, with a shorter
watch, so that a connection that died silently is noticed.
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
from pydantic import BaseModel

from common.errors import ConfigError

PORT_NAME = "grpc"  # of the port that is used of a Service's
SERVICE_LABEL = "kubernetes.io/service-name"
WATCH_S = 60
SILENCE_S = 15.0  # beyond the end of a watch, until the connection counts as dead
CALL_TIMEOUT_S = 10.0
BACKOFF_S = (0.2, 10.0)
SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KubernetesApi:
    """Where the API server is, and the directory of the service account: token, ca.crt, namespace.

    The files are read for each call: the kubelet renews the token.
    """

    url: str
    account: Path

    @classmethod
    def in_cluster(cls, env: Mapping[str, str] = os.environ, account: Path = SERVICE_ACCOUNT_DIR) -> Self:
        """As every pod finds it. Raises ConfigError outside of a cluster, and where no token is mounted."""
        host, port = env.get("KUBERNETES_SERVICE_HOST"), env.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ConfigError("discovery: k8s works inside a cluster only", field="discovery")
        if not (account / "token").is_file():
            raise ConfigError(f"discovery: no service account is mounted at {account}", field="discovery")
        return cls(f"https://{f'[{host}]' if ':' in host else host}:{port}", account)

    def slices_path(self) -> str:
        """The EndpointSlices of the pod's own namespace."""
        namespace = (self.account / "namespace").read_text().strip()
        return f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"

    def headers(self) -> dict[str, str]:
        """With the token as it is now."""
        token = (self.account / "token").read_text().strip()
        return {"Authorization": f"Bearer {token}", "Accept": "application/json"}

    def client(self) -> httpx.AsyncClient:
        """Trusts the cluster's authority and nobody else."""
        verify = ssl.create_default_context(cafile=str(self.account / "ca.crt"))
        return httpx.AsyncClient(base_url=self.url, verify=verify, timeout=CALL_TIMEOUT_S, trust_env=False)


class _Meta(BaseModel):
    name: str = ""
    resourceVersion: str = ""


class _Conditions(BaseModel):
    terminating: bool | None = None


class _Endpoint(BaseModel):
    addresses: list[str]
    conditions: _Conditions = _Conditions()


class _Port(BaseModel):
    name: str | None = None
    port: int | None = None


class _Slice(BaseModel):
    metadata: _Meta
    addressType: str
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None

    def addresses(self) -> dict[str, bool]:
        """host:port of each endpoint, and whether it is terminating."""
        found: dict[str, bool] = {}
        port = next((p.port for p in self.ports or () if p.name == PORT_NAME and p.port), None)
        if port is not None and self.addressType in ("IPv4", "IPv6"):
            for endpoint in self.endpoints or ():
                for host in endpoint.addresses[:1]:  # all of them stand for the same pod
                    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
                    found[address] = endpoint.conditions.terminating is True
        return found


class _List(BaseModel):
    metadata: _Meta
    items: list[_Slice]


class _Event(BaseModel):
    type: str
    object: dict[str, Any]


class _VersionExpired(Exception):
    """The server does not know our version any more."""


class _WatchRefused(Exception):
    """The server answered, but not with what was asked for."""


class EndpointSliceWatcher:
    """Calls on_change with every address and whether its pod is terminating, whenever that changed.

    On the event loop that `start` runs on.
    """

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
        self._slices: dict[str, dict[str, bool]] = {}
        self._version = ""  # "": a list comes next
        self._notified: dict[str, bool] | None = None
        self._up = False
        self._task: asyncio.Task[None] | None = None

    @property
    def up(self) -> bool:
        """The API server answered last time."""
        return self._up

    async def start(self) -> None:
        """Begins in the background."""
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
                        else:  # a server that ends each watch at once must not be asked all the time
                            await asyncio.sleep(low)
            except _VersionExpired:
                self._version = ""
                _log.info("endpoint slices: version forgotten by the API server, listing again")
            except (httpx.HTTPError, OSError, ValueError, _WatchRefused) as e:
                self._is_up(False, f"{type(e).__name__}: {e}")
                # Where a server is reached again, it may be another, with another history.
                self._version = ""
            except Exception as e:
                _log.exception("endpoint slices: unexpected error, trying again")
                self._is_up(False, repr(e))
                self._version = ""
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(high, 2 * backoff)

    def _is_up(self, up: bool, why: str = "") -> None:
        if up != self._up or (why and self._notified is None):
            _log.log(logging.INFO if up else logging.WARNING, "Kubernetes API: %s", "up" if up else f"away ({why})")
        self._up = up

    async def _list(self, client: httpx.AsyncClient) -> None:
        response = await client.get(
            self._api.slices_path(), params={"labelSelector": self._selector}, headers=self._api.headers()
        )
        if response.status_code != 200:
            raise _WatchRefused(_status_text(response.status_code, response.content))
        found = _List.model_validate_json(response.content)
        self._slices = {item.metadata.name: item.addresses() for item in found.items}
        self._version = found.metadata.resourceVersion
        self._is_up(True)
        self._notify()

    async def _watch(self, client: httpx.AsyncClient) -> bool:
        """Until the server ends it; False when it did so without having said anything."""
        params: dict[str, str | int] = {
            "labelSelector": self._selector,
            "watch": 1,
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": self._watch_s,
        }
        timeout = httpx.Timeout(CALL_TIMEOUT_S, read=self._watch_s + SILENCE_S)
        path, headers, heard = self._api.slices_path(), self._api.headers(), False
        started = asyncio.get_running_loop().time()
        async with client.stream("GET", path, params=params, headers=headers, timeout=timeout) as response:
            if response.status_code == 410:
                raise _VersionExpired
            if response.status_code != 200:
                raise _WatchRefused(_status_text(response.status_code, await response.aread()))
            async for line in response.aiter_lines():
                if line:
                    self._take(_Event.model_validate_json(line))
                    heard = True
        return heard or asyncio.get_running_loop().time() - started >= 1.0

    def _take(self, event: _Event) -> None:
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
        """A pod in two slices, for it moved, leaves only when both say so."""
        now: dict[str, bool] = {}
        for addresses in self._slices.values():
            for address, leaving in addresses.items():
                now[address] = leaving and now.get(address, True)
        if now != self._notified:
            self._notified = now
            self._on_change(now)


def _status_text(status: int, body: bytes) -> str:
    return f"{status}: {body[:200].decode(errors='replace')}"
