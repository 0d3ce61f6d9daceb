"""Rendered manifests for checks and tests: containers, environments, network policies."""

from __future__ import annotations

import base64
import copy
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.k8s.kubectl import renderer

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
WORKLOADS = ("Deployment", "StatefulSet", "Job")

Object = dict[str, Any]


class _Strict(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys."""


def _unique(loader: yaml.SafeLoader, node: yaml.MappingNode) -> Object:
    keys = [loader.construct_object(key) for key, _ in node.value]  # type: ignore[no-untyped-call]
    if len(keys) != len(set(keys)):
        raise yaml.YAMLError(f"a key comes twice: {keys}")
    return dict(zip(keys, (loader.construct_object(value, deep=True) for _, value in node.value), strict=True))  # type: ignore[no-untyped-call]


_Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique)


def render(directory: Path) -> list[Object]:
    """The objects that `kubectl apply -k directory` would apply. Uses no cluster and no network."""
    done = subprocess.run([*renderer(), str(directory)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.load_all(done.stdout, _Strict) if found]


def compose(directory: Path, *, components: tuple[str, ...], base: str = "overlays/cpu-dev") -> list[Object]:
    """Renders an overlay of base and components, written to an empty directory."""

    def relative(path: str) -> str:
        return os.path.relpath(K8S / path, directory)

    lines = ["apiVersion: kustomize.config.k8s.io/v1beta1", "kind: Kustomization", "namespace: baton"]
    lines += [f"resources: [{relative(base)}]"]
    lines += ["components:", *(f"  - {relative(f'components/{name}')}" for name in components)]
    (directory / "kustomization.yaml").write_text("\n".join(lines) + "\n")
    return render(directory)


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [found for found in objects if found["kind"] in kinds]


def group_parts(objects: list[Object]) -> list[Object]:
    """Leader and worker of every LeaderWorkerSet, as workloads of their own. Their containers have the variables that
    its controller puts before all others (lws.sigs.k8s.io, reference/labels-annotations-and-environment-variables).
    """
    found = []
    for group in of_kind(objects, "LeaderWorkerSet"):
        template, name = group["spec"]["leaderWorkerTemplate"], group["metadata"]["name"]
        for index, part in enumerate(("leader", "worker")):
            pods = copy.deepcopy(template[f"{part}Template"])
            given = {"LWS_LEADER_ADDRESS": f"{name}-0.{name}.baton", "LWS_GROUP_SIZE": str(template["size"])}
            given["LWS_WORKER_INDEX"] = str(index)
            for container in pods["spec"]["containers"]:
                container["env"] = [{"name": k, "value": v} for k, v in given.items()] + container.get("env", [])
            spec = {"replicas": group["spec"]["replicas"], "template": pods}
            spec["selector"] = {"matchLabels": pods["metadata"]["labels"]}
            found.append({"kind": group["kind"], "metadata": {"name": f"{name}/{part}"}, "spec": spec})
    return found


def named(objects: list[Object], kind: str, name: str) -> Object | None:
    return next((found for found in of_kind(objects, kind) if found["metadata"]["name"] == name), None)


def pod_spec(workload: Object) -> Object:
    spec: Object = workload["spec"]["template"]["spec"]
    return spec


def pod_labels(workload: Object) -> dict[str, str]:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def component(workload: Object) -> str:
    return pod_labels(workload).get("app.kubernetes.io/component", "")


def containers(workload: Object) -> Iterator[Object]:
    """The containers of a pod, including init containers."""
    yield from pod_spec(workload).get("initContainers", [])
    yield from pod_spec(workload)["containers"]


def main_container(workload: Object) -> Object:
    found: Object = pod_spec(workload)["containers"][0]
    return found


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a LabelSelector selects these labels; an empty one selects all."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for term in selector.get("matchExpressions", []):
        value, operator = labels.get(term["key"]), term["operator"]
        if operator == "In" and value not in term["values"]:
            return False
        if operator == "NotIn" and value in term["values"]:
            return False
        if operator == "Exists" and value is None:
            return False
        if operator == "DoesNotExist" and value is not None:
            return False
    return True


def environment(objects: list[Object], container: Object, fields: Mapping[str, str]) -> dict[str, str]:
    """As the kubelet makes it. fields: values of the downward API by path. KeyError for what is not there."""
    env: dict[str, str] = {}
    for source in container.get("envFrom", []):
        found = named(objects, "ConfigMap", source["configMapRef"]["name"])
        if found is None:
            raise KeyError(source["configMapRef"]["name"])
        env.update(found["data"])
    for variable in container.get("env", []):
        source = variable.get("valueFrom")
        if source is None:
            env[variable["name"]] = expand(variable["value"], env)
        elif "fieldRef" in source:
            env[variable["name"]] = fields[source["fieldRef"]["fieldPath"]]
        else:
            env[variable["name"]] = _secret(objects, source["secretKeyRef"])
    return env


def _secret(objects: list[Object], reference: Mapping[str, str]) -> str:
    found = named(objects, "Secret", reference["name"])
    if found is None:  # the operator's, see OUTSIDE in checks.py
        return f"secret-{reference['key']}"
    return base64.b64decode(found["data"][reference["key"]]).decode()


def expand(text: str, env: Mapping[str, str]) -> str:
    """Replaces $(NAME) of variables that are defined before."""
    return re.sub(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)", lambda match: env.get(match[1], match[0]), text)


def command(container: Object, env: Mapping[str, str]) -> list[str]:
    """The whole command line; without a `command`, the image's entry point `baton` comes first."""
    words = [*container.get("command", ["baton"]), *container.get("args", [])]
    return [expand(word, env) for word in words]


def port_number(container: Object, port: str | int) -> int | None:
    """The number of a container port, given by name or number."""
    for declared in container.get("ports", []):
        if port in (declared.get("name"), declared["containerPort"]):
            number: int = declared["containerPort"]
            return number
    return None


@dataclass(frozen=True)
class Peer:
    """One end of a connection. `namespace` are the labels of its namespace. `labels` None: an outside address."""

    labels: Mapping[str, str] | None
    namespace: Mapping[str, str]


@dataclass(frozen=True)
class Opening:
    """The connections that one policy rule allows. `peers` None: any; `ports` are (first, last)."""

    peers: frozenset[str] | None
    ports: tuple[tuple[str, int, int], ...] | None

    def covers(self, peer: str, port: int, protocol: str) -> bool:
        there = self.peers is None or peer in self.peers
        return there and (self.ports is None or any(p == protocol and a <= port <= b for p, a, b in self.ports))


class Policies:
    """All NetworkPolicies together: kubernetes.io/docs/concepts/services-networking/network-policies."""

    def __init__(self, objects: list[Object]) -> None:
        self._policies = [found["spec"] for found in of_kind(objects, "NetworkPolicy")]

    def openings(self, direction: str, subject: Peer, others: Mapping[str, Peer]) -> list[Opening] | None:
        """The allowed connections of the subject in one direction; None: all, because no policy selects it."""
        if subject.labels is None:
            return None
        labels = subject.labels
        mine = [p for p in self._policies if direction in p["policyTypes"] and selects(p["podSelector"], labels)]
        if not mine:
            return None
        key, end = ("ingress", "from") if direction == "Ingress" else ("egress", "to")
        found = []
        for rule in (rule for policy in mine for rule in policy.get(key, [])):
            peers = None
            if end in rule:
                matching = (name for name, other in others.items() if any(_is(p, subject, other) for p in rule[end]))
                peers = frozenset(matching)
            found.append(Opening(peers, _ports(rule)))
        return found

    def allows(self, source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
        """Whether both ends allow a connection from source to target's port."""
        sides = (("Egress", source, target), ("Ingress", target, source))
        for direction, subject, other in sides:
            openings = self.openings(direction, subject, {"other": other})
            if openings is not None and not any(o.covers("other", port, protocol) for o in openings):
                return False
        return True


def _ports(rule: Object) -> tuple[tuple[str, int, int], ...] | None:
    if "ports" not in rule:
        return None
    return tuple((e.get("protocol", "TCP"), e["port"], e.get("endPort", e["port"])) for e in rule["ports"])


def _is(peer: Object, subject: Peer, other: Peer) -> bool:
    if other.labels is None or "ipBlock" in peer:  # which holds no pods here
        return False
    namespaces = peer.get("namespaceSelector")
    same = subject.namespace == other.namespace
    inside = same if namespaces is None else selects(namespaces, other.namespace)
    return inside and selects(peer.get("podSelector", {}), other.labels)
