"""Runs the Deployments of rendered manifests like a cluster: starts, probes, routes to, rolls and ends pods.

A pod is a host with one container:

    started -> startup probe -> readiness and liveness probes
    deleted -> terminating in its EndpointSlice -> preStop -> SIGTERM -> SIGKILL after the grace period

Services are names in /etc/hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli import probes
from tests.k8s.manifests import (
    Object,
    Peer,
    command,
    environment,
    main_container,
    named,
    of_kind,
    pod_labels,
    pod_spec,
    port_number,
    selects,
)
from tests.netns.container import Container
from tests.netns.hosts import NODE, Hosts
from tests.rigs.gateway.fake_kube import FakeKube

HERE: Mapping[str, str] = {"kubernetes.io/metadata.name": "baton"}


@dataclass
class Pod:
    """One pod. `restarts` counts failed liveness probes and ended processes, `killed` an exceeded grace period."""

    name: str
    workload: Object
    address: str
    container: Container
    ready: bool = False
    terminating: bool = False
    restarts: int = 0
    killed: bool = False

    @property
    def spec(self) -> Object:
        return main_container(self.workload)

    async def asks(self, probe: Object) -> bool:
        """Probes once, from the node."""
        limit = probe.get("timeoutSeconds", 1)
        kind, handler = next((k, v) for k, v in probe.items() if k in ("httpGet", "exec", "tcpSocket"))
        if kind == "exec":
            return await asyncio.to_thread(self.container.succeeds, handler["command"], limit)
        port = port_number(self.spec, handler["port"])
        assert port is not None
        if kind == "httpGet":
            return await probes.trouble(f"http://{self.address}:{port}{handler['path']}", limit) is None
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(self.address, port), limit)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True


@dataclass
class Kubelet:
    """Runs the Deployments of `objects`. `seeds` and `secrets` are files of volumes (see Container)."""

    objects: list[Object]
    hosts: Hosts
    kube: FakeKube
    logs: Path
    seeds: Mapping[str, Path]
    secrets: Mapping[str, Path]
    pods: dict[str, list[Pod]] = field(default_factory=dict)
    gone: list[Pod] = field(default_factory=list)
    _count: int = 0
    _named: dict[str, list[str]] = field(default_factory=dict)
    _watches: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def deployment(self, component: str) -> Object:
        found = named(self.objects, "Deployment", f"baton-{component}")
        assert found is not None
        return found

    async def run(self, component: str, *, address: str = "") -> Pod:
        """Starts a pod of a Deployment. Returns when it has been ready for minReadySeconds."""
        workload = self.deployment(component)
        self._count += 1
        name = f"baton-{component}-{self._count}"
        address = self.hosts.add(name, Peer(pod_labels(workload), HERE), address)
        pod = Pod(name, workload, address, self._container(workload, name, address))
        self.pods.setdefault(component, []).append(pod)
        pod.container.start()
        await self._publish()
        await self._start(pod)
        self._watches[name] = asyncio.create_task(self._watch(pod))
        while not pod.ready:
            assert pod.container.alive, pod.container.tail()
            await asyncio.sleep(0.05)
        await asyncio.sleep(workload["spec"].get("minReadySeconds", 0))
        return pod

    def _container(self, workload: Object, name: str, address: str) -> Container:
        spec, container = pod_spec(workload), main_container(workload)
        env = environment(self.objects, container, {"metadata.name": name, "status.podIP": address})
        account = self.kube.account if spec.get("automountServiceAccountToken") else None
        if account is not None:
            env |= {"KUBERNETES_SERVICE_HOST": NODE, "KUBERNETES_SERVICE_PORT": str(self.kube.port)}
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        return Container(
            host=name,
            pod=spec,
            spec=container,
            argv=command(container, env),
            env=env,
            names=self.hosts.names,
            log=self.logs / f"{name}.log",
            seeds={
                path: seed for path, seed in self.seeds.items() if any(Path(path).is_relative_to(m) for m in mounted)
            },
            secrets=self.secrets,
            account=account,
        )

    async def _start(self, pod: Pod) -> None:
        probe = pod.spec["startupProbe"]
        for _ in range(probe.get("failureThreshold", 3)):
            assert pod.container.alive, f"{pod.name} ended with {pod.container.exit_code}:\n{pod.container.tail()}"
            if await pod.asks(probe):
                return
            await asyncio.sleep(probe.get("periodSeconds", 10))
        raise AssertionError(f"{pod.name} did not start:\n{pod.container.tail()}")

    async def _watch(self, pod: Pod) -> None:
        """Probes readiness and liveness at their periods until the pod is deleted."""
        await asyncio.gather(self._readiness(pod), self._liveness(pod))

    async def _readiness(self, pod: Pod) -> None:
        probe, failures = pod.spec["readinessProbe"], 0
        while True:
            failures = 0 if await pod.asks(probe) else failures + 1
            ready = failures == 0 or (pod.ready and failures < probe.get("failureThreshold", 3))
            if ready != pod.ready:
                pod.ready = ready
                await self._publish()
            await asyncio.sleep(probe.get("periodSeconds", 10))

    async def _liveness(self, pod: Pod) -> None:
        probe, failures = pod.spec["livenessProbe"], 0
        while True:
            failures = 0 if await pod.asks(probe) else failures + 1
            if failures >= probe.get("failureThreshold", 3) or not pod.container.alive:
                pod.restarts += 1
                pod.container.send(signal.SIGKILL)
                return
            await asyncio.sleep(probe.get("periodSeconds", 10))

    async def delete(self, pod: Pod) -> None:
        """Ends a pod like the API server and the kubelet. Returns when its process has ended."""
        began = time.monotonic()
        pod.terminating = True
        await self._publish()
        watch = self._watches.pop(pod.name)
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch
        grace = pod_spec(pod.workload).get("terminationGracePeriodSeconds", 30)
        await asyncio.sleep(pod.spec.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0))
        pod.container.send(signal.SIGTERM)
        while pod.container.alive and time.monotonic() - began < grace:
            await asyncio.sleep(0.05)
        pod.killed = pod.container.alive
        pod.container.send(signal.SIGKILL)
        self.pods[next(c for c, pods in self.pods.items() if pod in pods)].remove(pod)
        self.gone.append(pod)
        await self._publish()
        self.hosts.remove(pod.name)

    async def roll(self, component: str) -> None:
        """Replaces all pods of a Deployment: new pod first (RollingUpdate), or old pod deleted first (Recreate)."""
        workload = self.deployment(component)
        for old in list(self.pods[component]):
            if workload["spec"].get("strategy", {}).get("type") == "Recreate":
                await self.delete(old)
                await self.run(component, address=old.address)  # the Service's address stays
            else:
                assert workload["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
                await self.run(component)
                await self.delete(old)

    async def stop(self) -> None:
        for watch in self._watches.values():
            watch.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)
        for pod in [pod for pods in self.pods.values() for pod in pods]:
            pod.container.send(signal.SIGKILL)

    async def _publish(self) -> None:
        """Updates the EndpointSlices of all Services and the names of Services with an address."""
        names: dict[str, list[str]] = {}
        for service in of_kind(self.objects, "Service"):
            selector = {"matchLabels": service["spec"]["selector"]}
            behind = [p for pods in self.pods.values() for p in pods if selects(selector, pod_labels(p.workload))]
            name, ports = service["metadata"]["name"], service["spec"]["ports"]
            if service["spec"].get("clusterIP") == "None":
                conditions = {p.address: p.terminating for p in behind}
                fields: dict[str, Any] = {"ports": [{"name": p["name"], "port": p["port"]} for p in ports]}
                before = self.kube.slices.get(f"{name}-abcde", {}).get("endpoints")
                if before != self.kube.endpoints(conditions):
                    await self.kube.put(name, conditions, **fields)
            else:
                ready = [p.address for p in behind if p.ready and not p.terminating]
                # A Service without ready pods keeps its address: its name resolves, and calls fail.
                names[name] = self._named[name] = ready or self._named.get(name, [])
        self.hosts.resolve(names)
