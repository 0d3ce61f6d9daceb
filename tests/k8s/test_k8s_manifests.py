"""Every overlay and component renders, matches its schemas and passes the checks; damaged manifests do not."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.k8s import checks, hardening, settings
from tests.k8s.checks import CHECKS, Check
from tests.k8s.manifests import K8S, Object, component, compose, of_kind, render
from tests.k8s.schemas import schemas

OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
COMPONENTS = sorted(
    str(path.parent.relative_to(K8S / "components")) for path in (K8S / "components").rglob("kustomization.yaml")
)
ALL: tuple[Check, ...] = (schemas, *CHECKS)
EVERYTHING = tuple(name for name in COMPONENTS if name not in ("autoscaling/keda", "multi-node"))
GROUPS = ("multi-node", "monitoring")


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    """cpu-dev with all components that can be combined."""
    return compose(tmp_path_factory.mktemp("everything"), components=EVERYTHING)


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    """Pods of several machines, which cannot be combined with components that scale Deployments."""
    return compose(tmp_path_factory.mktemp("grouped"), components=GROUPS)


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_is_right(name: str) -> None:
    objects = render(K8S / "overlays" / name)
    assert [problem for check in ALL for problem in check(objects)] == []
    assert {component(w) for w in of_kind(objects, "Deployment")} == {"gateway", "prefill", "decode", "redis"}


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_component_is_right_on_its_own(name: str, tmp_path: Path) -> None:
    objects = compose(tmp_path, components=(name,))
    assert [problem for check in ALL for problem in check(objects)] == []


def test_all_components_together_are_right(everything: list[Object], grouped: list[Object]) -> None:
    assert [problem for check in ALL for problem in check(everything)] == []
    assert [problem for check in ALL for problem in check(grouped)] == []
    assert not [w for w in of_kind(grouped, "Deployment") if component(w) in settings.ENGINES]


DROP = object()
POD, FIRST = "spec template spec", "spec template spec containers 0"


@dataclass(frozen=True)
class Swap:
    """Replaces one word of a list."""

    old: str
    new: str


# What is wrong: the check that has to see it, the object (kind, name without "baton-", an object's first letters are
# enough), the path to a field, and its new value; without a path, the object goes.
MUTATIONS: dict[str, tuple[Check, str, str, Any]] = {
    "a field nobody knows": (schemas, "Deployment decode", f"{FIRST} imagePullPolice", "Always"),
    "a number as a text": (schemas, "Deployment decode", "spec minReadySeconds", "3"),
    "a custom field nobody knows": (schemas, "PodMonitor engines", "spec interval", "15s"),
    "a kind nobody knows": (schemas, "Service redis", "kind", "Servise"),
    "an API that is gone": (schemas, "HorizontalPodAutoscaler decode", "apiVersion", "autoscaling/v2beta2"),
    "a flag that is not there": (
        checks.commands,
        "Deployment decode",
        f"{FIRST} args",
        Swap("--port=7000", "--prot=7000"),
    ),
    "an invalid value of a flag": (
        checks.commands,
        "Deployment decode",
        f"{FIRST} args",
        Swap("--port=7000", "--port=70000"),
    ),
    "a command that is not there": (checks.commands, "Deployment decode", f"{FIRST} args", Swap("serve", "server")),
    "a setting that is not there": (checks.commands, "ConfigMap config", "data BATON_KV_MEMRY", "1GiB"),
    "an invalid value of a setting": (checks.commands, "ConfigMap config", "data BATON_KV_MEMORY", "much"),
    "a variable of UCX that is not there": (checks.commands, "ConfigMap config", "data UCX_PORTS", "7100"),
    "a variable that is not defined": (checks.commands, "Deployment redis", f"{FIRST} env", DROP),
    "a load that is not there": (checks.commands, "Job loadtest", f"{FIRST} args", Swap("--rate=1", "--rat=1")),
    "a load that makes no sense": (checks.commands, "Job loadtest", f"{FIRST} args", Swap("--rate=1", "--rate=-1")),
    "a load for nobody": (
        checks.commands,
        "Job loadtest",
        f"{FIRST} args",
        Swap("--url=http://baton-gateway:8000", "--url=http://baton-gateway:80"),
    ),
    "a load test that does not test": (checks.commands, "Job loadtest", f"{FIRST} args", Swap("loadtest", "version")),
    "no secret": (checks.commands, "Deployment decode", f"{FIRST} env name=BATON_SECRET", DROP),
    "another port than is declared": (
        checks.ports,
        "Deployment decode",
        f"{FIRST} args",
        Swap("--port=7000", "--port=7001"),
    ),
    "metrics elsewhere": (
        checks.ports,
        "Deployment decode",
        f"{FIRST} args",
        Swap("--metrics-port=9400", "--metrics-port=9401"),
    ),
    "an address that is not the pod's": (
        checks.ports,
        "Deployment decode",
        f"{FIRST} args",
        Swap("--advertise=$(POD_IP):7000", "--advertise=$(POD_IP):7001"),
    ),
    "a Service that leads nowhere": (checks.ports, "Service redis", "spec ports 0 targetPort", "valkey"),
    "a Service's port of another number": (checks.ports, "Service decode", "spec ports 0 port", 7001),
    "a probe of a port that is not declared": (
        checks.ports,
        "Deployment decode",
        f"{FIRST} livenessProbe exec command 2",
        "grpc://127.0.0.1:7001/live",
    ),
    "a Redis that is not there": (checks.ports, "Service redis", "", DROP),
    "a Service that is looked for in vain": (checks.ports, "Service decode", "metadata name", "baton-decoder"),
    "no liveness": (checks.probes, "Deployment gateway", f"{FIRST} livenessProbe", DROP),
    "no start-up": (checks.probes, "Deployment redis", f"{FIRST} startupProbe", DROP),
    "a path that is not there": (checks.probes, "Deployment gateway", f"{FIRST} startupProbe httpGet path", "/alive"),
    "liveness that is readiness": (
        checks.probes,
        "Deployment decode",
        f"{FIRST} livenessProbe exec command 2",
        "grpc://127.0.0.1:7000",
    ),
    "liveness tied to pods": (checks.probes, "Deployment gateway", f"{FIRST} livenessProbe httpGet path", "/ready"),
    "a health nobody serves": (
        checks.probes,
        "Deployment decode",
        f"{FIRST} livenessProbe exec command 2",
        "grpc://127.0.0.1:7000/liveness",
    ),
    "too little grace": (checks.grace, "Deployment decode", f"{POD} terminationGracePeriodSeconds", 130),
    "a preStop that takes the grace": (
        checks.grace,
        "Deployment gateway",
        f"{FIRST} lifecycle preStop sleep seconds",
        155,
    ),
    "no preStop": (checks.grace, "Deployment prefill", f"{FIRST} lifecycle", DROP),
    "answers longer than the drain": (checks.grace, "ConfigMap config", "data BATON_REQUEST_TIMEOUT_S", "300"),
    "labels that nobody selects": (
        checks.selectors,
        "Deployment decode",
        "spec template metadata labels app.kubernetes.io/component",
        "x",
    ),
    "another's pods": (
        checks.selectors,
        "Deployment decode",
        "spec selector matchLabels app.kubernetes.io/component",
        DROP,
    ),
    "no budget": (checks.selectors, "PodDisruptionBudget decode", "", DROP),
    "no spread": (checks.selectors, "Deployment decode", f"{POD} topologySpreadConstraints", DROP),
    "a policy of nobody": (checks.selectors, "NetworkPolicy redis", "spec podSelector matchLabels x", "y"),
    "a Secret without the key": (checks.selectors, "Secret secrets", "data cluster-secret", DROP),
    "a volume that is not there": (checks.selectors, "Deployment decode", f"{POD} volumes 0", DROP),
    "a role that is not there": (checks.selectors, "Role gateway", "", DROP),
    "an account that is not there": (checks.selectors, "Deployment decode", f"{POD} serviceAccountName", "x"),
    "a monitor of no port": (checks.selectors, "PodMonitor engines", "spec podMetricsEndpoints 0 port", "http"),
    "a monitor of no Service": (checks.selectors, "ServiceMonitor gateway", "spec selector matchLabels x", "y"),
    "a route to no port": (checks.selectors, "HTTPRoute ", "spec rules 0 backendRefs 0 port", 80),
    "a route that ends answers": (checks.selectors, "HTTPRoute ", "spec rules 0 timeouts request", "60s"),
    "a pool of nobody": (checks.selectors, "InferencePool ", "spec targetPorts 0 number", 80),
    "an autoscaler of nothing": (checks.selectors, "HorizontalPodAutoscaler decode", "spec scaleTargetRef name", "x"),
    "replicas beside an autoscaler": (checks.selectors, "Deployment decode", "spec replicas", 2),
    "a closed way in": (checks.network, "NetworkPolicy redis", "spec ingress", []),
    "a closed way out": (checks.network, "NetworkPolicy engines", "spec egress 1", DROP),
    "KV ports beyond the policy's": (checks.network, "ConfigMap config", "data UCX_TCP_PORT_RANGE", "7100-7299"),
    "KV ports over the pod's own": (checks.network, "ConfigMap config", "data UCX_TCP_PORT_RANGE", "7000-7199"),
    "an open Redis": (checks.network, "NetworkPolicy redis", "spec ingress 0 from", DROP),
    "an open pod": (checks.network, "NetworkPolicy engines", "spec ingress 0 from", DROP),
    "open metrics": (checks.network, "NetworkPolicy metrics", "spec ingress 0 from", [{"namespaceSelector": {}}]),
    "a way out for Redis": (checks.network, "NetworkPolicy redis", "spec egress", [{}]),
    "no default": (checks.network, "NetworkPolicy default-deny", "", DROP),
    "an image of any version": (hardening.images, "Deployment redis", f"{FIRST} image", "docker.io/valkey/valkey"),
    "the latest image": (hardening.images, "Deployment redis", f"{FIRST} image", "docker.io/valkey/valkey:latest"),
    "a tag that can move": (
        hardening.images,
        "Deployment redis",
        f"{FIRST} image",
        "docker.io/valkey/valkey:8.0.1-alpine",
    ),
    "an image that nobody builds": (hardening.images, "Deployment decode", f"{FIRST} image", "baton-decode:0.1.0"),
    "an image of another version": (hardening.images, "Deployment decode", f"{FIRST} image", "baton-engine-cpu:9.9.9"),
    "no requests": (hardening.resources, "Deployment decode", f"{FIRST} resources requests", DROP),
    "an init container without a limit": (
        hardening.resources,
        "Deployment decode",
        f"{POD} initContainers 0 resources limits",
        DROP,
    ),
    "a volume without a limit": (hardening.resources, "Deployment decode", f"{POD} volumes 0 emptyDir", {}),
    "no certificates": (checks.commands, "Deployment decode", f"{FIRST} env name=BATON_TLS_DIR", DROP),
    "a Secret that is not there": (
        checks.selectors,
        "Deployment decode",
        f"{POD} volumes name=tls secret secretName",
        "baton-tls",
    ),
    "certificates of another role": (
        hardening.certificates,
        "Deployment decode",
        f"{POD} volumes name=tls secret secretName",
        "baton-tls-prefill",
    ),
    "a key that all can read": (
        hardening.certificates,
        "Deployment gateway",
        f"{POD} volumes name=tls secret defaultMode",
        0o444,
    ),
    "root": (hardening.security, "Deployment decode", f"{POD} securityContext runAsUser", 0),
    "no seccomp": (hardening.security, "Deployment redis", f"{POD} securityContext seccompProfile", DROP),
    "a writable image": (
        hardening.security,
        "Deployment decode",
        f"{FIRST} securityContext readOnlyRootFilesystem",
        False,
    ),
    "a capability": (
        hardening.security,
        "Deployment decode",
        f"{FIRST} securityContext capabilities add",
        ["SYS_PTRACE"],
    ),
    "capabilities at the start": (
        hardening.security,
        "Deployment decode",
        f"{POD} initContainers 0 securityContext capabilities",
        DROP,
    ),
    "a token that is not used": (hardening.security, "Deployment decode", f"{POD} automountServiceAccountToken", DROP),
    "a token that is missing": (hardening.security, "Deployment gateway", f"{POD} automountServiceAccountToken", False),
    "an account whose token is everywhere": (
        hardening.security,
        "ServiceAccount redis",
        "automountServiceAccountToken",
        DROP,
    ),
    "service links": (hardening.security, "Deployment decode", f"{POD} enableServiceLinks", DROP),
    "the host's network": (hardening.security, "Deployment decode", f"{POD} hostNetwork", True),
    "the host's files": (hardening.security, "Deployment decode", f"{POD} volumes 0 hostPath", {"path": "/"}),
    "no /dev/shm": (hardening.security, "Deployment decode", f"{FIRST} volumeMounts 2", DROP),
    "nowhere to write": (hardening.security, "Deployment gateway", f"{FIRST} volumeMounts 1", DROP),
}


LWS = "spec leaderWorkerTemplate"
LEADER, WORKER = f"{LWS} leaderTemplate spec", f"{LWS} workerTemplate spec"
ENGINE, HELPER = f"{LEADER} containers 0", f"{WORKER} containers 0"
GROUP_MUTATIONS: dict[str, tuple[Check, str, str, Any]] = {
    "a group's field that nobody knows": (schemas, "LeaderWorkerSet decode", f"{LWS} sise", 2),
    "a pod's field that nobody knows": (
        schemas,
        "LeaderWorkerSet decode",
        f"{WORKER} containers 0 imagePullPolice",
        "Always",
    ),
    "a policy that is none": (schemas, "LeaderWorkerSet decode", f"{LWS} restartPolicy", "Sometimes"),
    "a worker's flag that is not there": (
        checks.commands,
        "LeaderWorkerSet decode",
        f"{HELPER} args",
        Swap("--port=7000", "--prot=7000"),
    ),
    "a variable that LWS does not set": (
        checks.commands,
        "LeaderWorkerSet decode",
        f"{HELPER} args",
        Swap("--tensor-parallel-node=$(LWS_WORKER_INDEX)", "--tensor-parallel-node=$(LWS_INDEX)"),
    ),
    "ranks that cannot be shared out": (checks.commands, "ConfigMap config", "data BATON_TENSOR_PARALLEL_SIZE", "15"),
    "a worker without the secret": (checks.commands, "LeaderWorkerSet decode", f"{HELPER} env name=BATON_SECRET", DROP),
    "a worker's health elsewhere": (
        checks.ports,
        "LeaderWorkerSet decode",
        f"{HELPER} args",
        Swap("--port=7000", "--port=7002"),
    ),
    "a meeting place that is not declared": (checks.ports, "LeaderWorkerSet decode", f"{ENGINE} ports 1", DROP),
    "a worker with its leader's certificates": (
        hardening.certificates,
        "LeaderWorkerSet decode",
        f"{WORKER} volumes name=tls secret secretName",
        "baton-tls-decode",
    ),
    "a worker without liveness": (checks.probes, "LeaderWorkerSet decode", f"{HELPER} livenessProbe", DROP),
    "a worker whose liveness is readiness": (
        checks.probes,
        "LeaderWorkerSet decode",
        f"{HELPER} livenessProbe exec command 2",
        "grpc://127.0.0.1:7000",
    ),
    "a worker with too little grace": (
        checks.grace,
        "LeaderWorkerSet decode",
        f"{WORKER} terminationGracePeriodSeconds",
        100,
    ),
    "a worker that no preStop holds": (checks.grace, "LeaderWorkerSet decode", f"{HELPER} lifecycle", DROP),
    "leaders without a budget": (checks.selectors, "PodDisruptionBudget decode", "", DROP),
    "groups that are not spread": (
        checks.selectors,
        "LeaderWorkerSet decode",
        f"{LEADER} topologySpreadConstraints",
        DROP,
    ),
    "a worker's account that is not there": (
        checks.selectors,
        "LeaderWorkerSet decode",
        f"{WORKER} serviceAccountName",
        "x",
    ),
    "a group that is left in part": (checks.groups, "LeaderWorkerSet decode", f"{LWS} restartPolicy", "None"),
    "workers that wait for a leader that waits": (
        checks.groups,
        "LeaderWorkerSet decode",
        "spec startupPolicy",
        "LeaderReady",
    ),
    "another number of machines": (
        checks.groups,
        "LeaderWorkerSet decode",
        f"{ENGINE} args",
        Swap("--tensor-parallel-nodes=$(LWS_GROUP_SIZE)", "--tensor-parallel-nodes=4"),
    ),
    "another meeting place": (
        checks.groups,
        "LeaderWorkerSet decode",
        f"{HELPER} args",
        Swap(
            "--tensor-parallel-master=$(LWS_LEADER_ADDRESS):7001", "--tensor-parallel-master=$(LWS_LEADER_ADDRESS):7002"
        ),
    ),
    "a meeting place of somebody else": (
        checks.groups,
        "LeaderWorkerSet decode",
        f"{ENGINE} args",
        Swap("--tensor-parallel-master=$(POD_IP):7001", "--tensor-parallel-master=0.0.0.0:7001"),
    ),
    "fewer GPUs than ranks": (
        checks.groups,
        "LeaderWorkerSet decode",
        f"{HELPER} resources limits nvidia.com/gpu",
        "4",
    ),
    "another image for workers": (checks.groups, "LeaderWorkerSet decode", f"{HELPER} image", "baton-engine-cpu:0.1.0"),
    "a worker without the model": (checks.groups, "LeaderWorkerSet decode", f"{HELPER} volumeMounts 0", DROP),
    "a Service of workers": (checks.groups, "Service decode", "spec selector", {"app.kubernetes.io/name": "baton"}),
    "workers that end first": (checks.groups, "LeaderWorkerSet decode", f"{WORKER} terminationGracePeriodSeconds", 600),
    "workers cut off from their leader": (checks.network, "NetworkPolicy decode-groups", "", DROP),
    "workers that cannot hand over": (checks.network, "NetworkPolicy worker-kv", "", DROP),
    "workers open to everybody": (checks.network, "NetworkPolicy decode-workers", "spec ingress 0 from", DROP),
    "workers whose image is any": (
        hardening.images,
        "LeaderWorkerSet decode",
        f"{HELPER} image",
        "baton-engine-gpu:latest",
    ),
    "a worker without requests": (hardening.resources, "LeaderWorkerSet decode", f"{HELPER} resources requests", DROP),
    "a worker that is root": (hardening.security, "LeaderWorkerSet decode", f"{WORKER} securityContext runAsUser", 0),
    "a worker without /dev/shm": (hardening.security, "LeaderWorkerSet decode", f"{HELPER} volumeMounts 2", DROP),
}


def mutate(objects: list[Object], target: str, path: str, value: Any) -> None:
    kind, _, name = target.partition(" ")
    full = f"baton-{name}" if name else "baton"
    found = next(o for o in of_kind(objects, kind) if o["metadata"]["name"].startswith(full))
    if not path:
        objects.remove(found)
        return
    *steps, last = path.split(" ")
    place: Any = found
    for step in steps:
        place = place[_key(place, step)]
    key = _key(place, last)
    if isinstance(value, Swap):
        words = place[key]
        words[words.index(value.old)] = value.new
    elif value is DROP:
        del place[key]
    else:
        place[key] = value


def _key(place: Any, step: str) -> Any:
    """The entry of a list, by number or by name=X."""
    if isinstance(place, dict):
        return step
    name = step.removeprefix("name=")
    return int(step) if step.isdecimal() else next(i for i, item in enumerate(place) if item["name"] == name)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_worse_manifest_fails_its_check(name: str, everything: list[Object]) -> None:
    check, target, path, value = MUTATIONS[name]
    worse = copy.deepcopy(everything)
    mutate(worse, target, path, value)
    assert worse != everything
    assert list(check(worse))


@pytest.mark.parametrize("name", GROUP_MUTATIONS)
def test_a_worse_group_fails_its_check(name: str, grouped: list[Object]) -> None:
    check, target, path, value = GROUP_MUTATIONS[name]
    worse = copy.deepcopy(grouped)
    mutate(worse, target, path, value)
    assert worse != grouped
    assert list(check(worse))


def test_every_check_has_a_mutation() -> None:
    assert {check for check, *_ in (*MUTATIONS.values(), *GROUP_MUTATIONS.values())} == set(ALL)
