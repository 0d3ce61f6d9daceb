"""Scale adapters: how the fleet planner starts and stops pods."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Mapping
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

    async def add(self, role: Role, number: int) -> None:
        """Starts pods of a role. Raises Unavailable."""

    async def remove(self, pod: str, role: Role) -> None:
        """Stops one pod, which drains. Raises Unavailable."""


class PrintOnly:
    """Changes nothing: the planner's log lines are the output."""

    async def add(self, role: Role, number: int) -> None:
        _log.info("would start %d %s pods", number, role)

    async def remove(self, pod: str, role: Role) -> None:
        _log.info("would stop pod %s", pod)


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

    async def add(self, role: Role, number: int) -> None:
        await self._scale(self.workloads[role], number)

    async def remove(self, pod: str, role: Role) -> None:
        """Marks the pod as the first to go and takes one replica away from the Deployment that it belongs to.

        A pod's name in the index is its name in Kubernetes. The Deployment is that of the role at the pod's start.
        """
        workload = next((name for name in self.workloads.values() if pod.startswith(f"{name}-")), None)
        if workload is None:
            raise Unavailable(f"pod {pod} belongs to none of {', '.join(self.workloads.values())}: it is not stopped")
        cost = {"metadata": {"annotations": {DELETION_COST: FIRST_TO_GO}}}
        await self._patch(f"/api/v1/namespaces/{self._namespace()}/pods/{pod}", cost)
        await self._scale(workload, -1)

    async def _scale(self, workload: str, change: int) -> None:
        path = f"/apis/apps/v1/namespaces/{self._namespace()}/deployments/{workload}/scale"
        scale = await self._call("GET", path)
        try:
            replicas = int(str(scale["spec"].get("replicas", 0)))
        except (KeyError, TypeError, ValueError) as e:
            raise Unavailable(f"the scale of {workload} cannot be read: {describe(e)}") from e
        await self._patch(path, {"spec": {"replicas": max(0, replicas + change)}})

    def _namespace(self) -> str:
        return (self.account / "namespace").read_text().strip()

    async def _patch(self, path: str, body: object) -> None:
        await self._call("PATCH", path, body)

    async def _call(self, method: str, path: str, body: object | None = None) -> dict[str, dict[str, object]]:
        token = (self.account / "token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/merge-patch+json"
        ca = self.account / "ca.crt"
        verify: ssl.SSLContext | bool = ssl.create_default_context(cafile=str(ca)) if ca.is_file() else True
        try:
            async with httpx.AsyncClient(base_url=self.url, verify=verify, timeout=CALL_S, trust_env=False) as client:
                response = await client.request(method, path, headers=headers, json=body)
        except (httpx.HTTPError, OSError) as e:
            raise Unavailable(f"the Kubernetes API does not answer: {describe(e, limit_s=CALL_S)}") from e
        if response.status_code >= 300:
            text = response.content[:200].decode(errors="replace")
            raise Unavailable(f"the Kubernetes API answers {response.status_code} to {method} {path}: {text}")
        found: dict[str, dict[str, object]] = response.json()
        return found
