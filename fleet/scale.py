"""Scale adapters: how the fleet planner starts and stops pods."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import httpx

from common.errors import ConfigError, Unavailable, describe
from common.types import Role

ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CALL_S = 10.0
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
FIRST_TO_GO = "-1000"  #: Deletion cost of the pod that a Deployment removes first.

_log = logging.getLogger(__name__)


class ScaleAdapter(Protocol):
    """Starts and stops pods."""

    async def pending(self, pods: Collection[str]) -> Mapping[Role, int] | None:
        """Returns the pods of each role that are ordered and not among `pods`, the pods in the index.

        None if the adapter does not know them. Raises Unavailable.
        """

    async def add(self, role: Role, number: int) -> None:
        """Starts pods of a role. Raises Unavailable."""

    async def remove(self, pod: str, role: Role) -> None:
        """Stops one pod, which drains. Raises Unavailable."""

    async def withdraw(self, role: Role) -> None:
        """Takes back the order of one pod that does not serve yet. Raises Unavailable."""


class PrintOnly:
    """Changes nothing: the planner's log lines are the output."""

    async def pending(self, pods: Collection[str]) -> None:
        """Returns None: no pod is ordered."""

    async def add(self, role: Role, number: int) -> None:
        _log.info("would start %d %s pods", number, role)

    async def remove(self, pod: str, role: Role) -> None:
        _log.info("would stop pod %s", pod)

    async def withdraw(self, role: Role) -> None:
        _log.info("would stop one %s pod that starts", role)


@dataclass(frozen=True, slots=True)
class KubernetesScale:
    """Changes the replicas of a Deployment per role, through its scale sub-resource, with the pod's service account."""

    url: str
    account: Path  #: Directory with token, ca.crt and namespace, read for each call: the kubelet renews the token.
    workloads: Mapping[Role, str]  #: Deployment of each role.

    @classmethod
    def in_cluster(
        cls, workloads: Mapping[Role, str], env: Mapping[str, str] = os.environ, account: Path = ACCOUNT_DIR
    ) -> Self:
        """Returns the adapter of this cluster. Raises ConfigError outside a cluster."""
        host, port = env.get("KUBERNETES_SERVICE_HOST"), env.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not (account / "token").is_file():
            raise ConfigError(
                "--scale: k8s works only in a cluster with a mounted service account; print changes nothing",
                field="scale",
            )
        return cls(f"https://{f'[{host}]' if ':' in host else host}:{port}", account, workloads)

    async def pending(self, pods: Collection[str]) -> Mapping[Role, int]:
        """Returns how many more replicas each Deployment wants than it has pods in the index.

        The API server keeps the orders: a planner that restarts, or whose pods find no machine, orders nothing twice.
        """
        found = {}
        for role, workload in self.workloads.items():
            replicas, _ = await self._read(workload)
            found[role] = max(0, replicas - sum(self._workload_of(pod) == workload for pod in pods))
        return found

    async def add(self, role: Role, number: int) -> None:
        await self._scale(self.workloads[role], number)

    async def withdraw(self, role: Role) -> None:
        """Takes one replica away. A Deployment removes pods that are not ready before all others."""
        await self._scale(self.workloads[role], -1)

    async def remove(self, pod: str, role: Role) -> None:
        """Marks the pod as the first to go and takes one replica away from the Deployment that it belongs to.

        A pod's name in the index is its name in Kubernetes. The Deployment is that of the role at the pod's start.
        """
        if (workload := self._workload_of(pod)) is None:
            raise Unavailable(f"pod {pod} belongs to none of {', '.join(self.workloads.values())}: it is not stopped")
        cost = {"metadata": {"annotations": {DELETION_COST: FIRST_TO_GO}}}
        await self._patch(f"/api/v1/namespaces/{self._namespace()}/pods/{pod}", cost)
        await self._scale(workload, -1)

    def _workload_of(self, pod: str) -> str | None:
        """Returns the Deployment of a pod; the longest name counts, because one may begin with another."""
        return max((name for name in self.workloads.values() if pod.startswith(f"{name}-")), key=len, default=None)

    async def _scale(self, workload: str, change: int) -> None:
        """Changes the replicas. The API server refuses the change if another client made one since the reading."""
        replicas, version = await self._read(workload)
        body: dict[str, object] = {"spec": {"replicas": max(0, replicas + change)}}
        if version is not None:
            body["metadata"] = {"resourceVersion": version}
        await self._patch(self._scale_path(workload), body)

    async def _read(self, workload: str) -> tuple[int, str | None]:
        """Returns the wanted replicas and the version of the scale. Raises Unavailable."""
        scale = await self._call("GET", self._scale_path(workload))
        try:
            version = scale.get("metadata", {}).get("resourceVersion")
            return int(str(scale["spec"].get("replicas", 0))), None if version is None else str(version)
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            raise Unavailable(f"the scale of {workload} cannot be read: {describe(e)}") from e

    def _scale_path(self, workload: str) -> str:
        return f"/apis/apps/v1/namespaces/{self._namespace()}/deployments/{workload}/scale"

    def _namespace(self) -> str:
        return self._account_file("namespace")

    def _account_file(self, name: str) -> str:
        try:
            return (self.account / name).read_text().strip()
        except (OSError, ValueError) as e:
            raise Unavailable(f"the service account has no readable file {name}: {describe(e)}") from e

    async def _patch(self, path: str, body: object) -> None:
        await self._call("PATCH", path, body)

    async def _call(self, method: str, path: str, body: object | None = None) -> dict[str, dict[str, object]]:
        """Returns the answer of the API server, which has CALL_S seconds in all. Raises Unavailable."""
        token = self._account_file("token")
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/merge-patch+json"
        ca = self.account / "ca.crt"
        try:
            verify: ssl.SSLContext | bool = ssl.create_default_context(cafile=str(ca)) if ca.is_file() else True
            async with (
                asyncio.timeout(CALL_S),
                httpx.AsyncClient(base_url=self.url, verify=verify, timeout=CALL_S, trust_env=False) as client,
            ):
                response = await client.request(method, path, headers=headers, json=body)
        except (httpx.HTTPError, OSError) as e:
            raise Unavailable(f"the Kubernetes API does not answer: {describe(e, limit_s=CALL_S)}") from e
        if response.status_code >= 300:
            text = response.content[:200].decode(errors="replace")
            raise Unavailable(f"the Kubernetes API answers {response.status_code} to {method} {path}: {text}")
        try:
            found: dict[str, dict[str, object]] = response.json()
        except ValueError as e:
            raise Unavailable(f"the Kubernetes API answers no JSON to {method} {path}: {describe(e)}") from e
        return found
