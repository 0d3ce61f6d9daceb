"""Checks of rendered manifests beyond their schemas. A check yields one line per error."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from unittest import mock
from urllib.parse import urlsplit

from cli.app import CommandLineError
from common.errors import ConfigError
from common.redis.url import RedisUrl
from common.rpc import LIVENESS_SERVICE
from common.settings.gateway import GatewayConfig
from common.settings.pod import PodConfig, WorkerConfig
from common.tls import CA_FILE, CERT_FILE, KEY_FILE, ROLES
from gateway.api.docs.operations import OPERATIONS
from gateway.pods.endpoint_slices import PORT_NAME
from gateway.server import STOP_S
from tests.k8s.hardening import certificates, images, resources, security
from tests.k8s.manifests import (
    Object,
    Peer,
    Policies,
    command,
    component,
    containers,
    environment,
    group_parts,
    main_container,
    named,
    of_kind,
    pod_labels,
    pod_spec,
    port_number,
    selects,
)
from tests.k8s.settings import (
    ENGINES,
    FIELDS,
    PLANNER,
    Problems,
    command_line,
    servers,
    settings_of,
    settings_or_none,
    worker_of,
    workloads,
)

Check = Callable[[list[Object]], Problems]

# Objects that an operator creates before `kubectl apply -k`; see k8s/README.md.
OUTSIDE = {
    ("Secret", "baton-secrets"): ("cluster-secret", "redis-password"),
    **{("Secret", f"baton-tls-{role}"): (CA_FILE, CERT_FILE, KEY_FILE) for role in ROLES},
    ("PersistentVolumeClaim", "baton-models"): (),
}
UCX_VARIABLES = ("UCX_TLS", "UCX_NET_DEVICES", "UCX_TCP_PORT_RANGE")
# The required connections: client, server, port. All others between these components must be blocked.
OURS = ("gateway", "prefill", "decode", "redis")
NEEDED = {
    *(("gateway", engine, "grpc") for engine in ENGINES),
    *((a, b, port) for a in ENGINES for b in ENGINES for port in ("grpc", "kv")),
    *((client, "redis", "redis") for client in ("gateway", *ENGINES)),
    *(("stranger", "gateway", port) for port in ("http", "grpc")),
}
GRACE_S = STOP_S  # time from the end of the drain to the end of the process


def commands(objects: list[Object]) -> Problems:
    """Every command, flag and variable exists, and its value is accepted."""
    for workload in workloads(objects):
        where = workload["metadata"]["name"]
        container = main_container(workload)
        try:
            env = environment(objects, container, FIELDS)
            words = command(container, env)
            left = [word for word in (*words, *env.values()) if re.search(r"\$\([A-Za-z_]", word)]
            left += [word for word in words if set(re.findall(r"\$([A-Z][A-Z_]*)", word)) - env.keys()]  # of a shell
            if left:
                yield f"{where}: {left} names a variable that is not defined before"
            if _scales(workload, words):
                _planner(words, env)
            elif words[0] == "baton" and settings_of(objects, workload) is None:
                yield from _loadtest(objects, words, where)
        except KeyError as e:
            yield f"{where}: {e} is not there"
        except (ConfigError, CommandLineError) as e:
            yield f"{where}: {e}"
        else:
            for name in env:
                if name.startswith("UCX_") and name not in UCX_VARIABLES:
                    yield f"{where}: {name} is no variable that is known"


class _Accepted(Exception):
    """Stands for the start of a load test."""


def _scales(workload: Object, words: list[str]) -> bool:
    return component(workload) == PLANNER and words[:2] == ["baton", "planner"] and "--scale=k8s" in words


def _planner(words: list[str], env: dict[str, str]) -> None:
    """Raises what the parser of `baton planner` raises for the command line."""
    started = mock.Mock(side_effect=_Accepted)
    with (
        mock.patch("cli.commands.planner._run", started),
        mock.patch.dict(os.environ, env, clear=True),
        contextlib.suppress(_Accepted),
    ):
        command_line().main(words[1:], standalone_mode=False)


def _loadtest(objects: list[Object], words: list[str], where: str) -> Problems:
    """The parser of `baton loadtest` accepts the command line, and the URL is that of a Service."""
    started = mock.Mock(side_effect=_Accepted)
    with mock.patch("cli.commands.loadtest.run_sync", started), contextlib.suppress(_Accepted):
        command_line().main(words[1:], standalone_mode=False)
    if not started.called:
        yield f"{where}: {words} is no load test"
        return
    url = urlsplit(started.call_args.args[0].url)
    found = named(objects, "Service", url.hostname or "")
    if found is None or url.port not in [port["port"] for port in found["spec"]["ports"]]:
        yield f"{where}: there is no Service at {url.netloc}"


def ports(objects: list[Object]) -> Problems:
    """Flags, container ports, Services and probes agree."""
    for workload in workloads(objects):
        where, container = workload["metadata"]["name"], main_container(workload)
        declared = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        if len(set(declared.values())) != len(container.get("ports", [])):
            yield f"{where}: two ports are the same"
        try:
            settings = settings_of(objects, workload)
        except (KeyError, ConfigError, CommandLineError):
            continue  # `commands` says so
        if isinstance(settings, GatewayConfig) and declared != {"http": settings.port, "grpc": settings.grpc_port}:
            yield f"{where}: it listens on {settings.port} and {settings.grpc_port}, and declares {declared}"
        if isinstance(settings, PodConfig):
            listens = {"grpc": settings.port, "metrics": settings.metrics_port}
            if settings.tensor_parallel_master is not None:
                listens["group"] = int(settings.tensor_parallel_master.rpartition(":")[2])
            if declared != listens:
                yield f"{where}: it listens on {listens}, and declares {declared}"
            if settings.advertise != f"{FIELDS['status.podIP']}:{settings.port}":
                yield f"{where}: it advertises {settings.advertise}"
        if isinstance(settings, WorkerConfig) and declared != {"grpc": settings.port}:
            yield f"{where}: it listens on {settings.port}, and declares {declared}"
        if isinstance(settings, GatewayConfig) and settings.discovery == "k8s":
            for service in settings.k8s_services:
                found = named(objects, "Service", service)
                if found is None or PORT_NAME not in [port.get("name") for port in found["spec"]["ports"]]:
                    yield f"{where}: there is no Service {service} with a port {PORT_NAME}"
        if isinstance(settings, PodConfig | GatewayConfig) and settings.redis:
            for host, port in RedisUrl.parse(settings.redis).nodes:
                found = named(objects, "Service", host)
                if found is None or port not in [entry["port"] for entry in found["spec"]["ports"]]:
                    yield f"{where}: there is no Service {host} with port {port}"
        for name, probe in _probes(container):
            port = health(probe)[0]
            if port_number(container, port) is None:
                yield f"{where}: {name} asks port {port}, which is not declared"
    for service in of_kind(objects, "Service"):
        where = service["metadata"]["name"]
        behind = [w for w in workloads(objects) if service["spec"]["selector"].items() <= pod_labels(w).items()]
        for port in service["spec"]["ports"]:
            for workload in behind:
                if port_number(main_container(workload), port.get("targetPort", port["port"])) is None:
                    yield f"Service {where}: {port['name']} leads to no port of {workload['metadata']['name']}"
                elif port_number(main_container(workload), port["name"]) != port["port"]:
                    yield f"Service {where}: {port['name']} has another number than in {workload['metadata']['name']}"


def _probes(container: Object) -> Iterator[tuple[str, Object]]:
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        if name in container:
            yield name, container[name]


def health(probe: Object) -> tuple[str | int, str | None]:
    """The port that a probe asks, and the path or the gRPC health service; None for another kind of probe."""
    if "exec" in probe:
        program, command, url = probe["exec"]["command"]
        assert (program, command) == ("baton", "probe")
        parts = urlsplit(url)
        assert (parts.scheme, parts.hostname) == ("grpc", "127.0.0.1")
        assert parts.port is not None
        return parts.port, parts.path.strip("/")
    kind = next(kind for kind in ("httpGet", "tcpSocket") if kind in probe)
    return probe[kind]["port"], probe[kind].get("path")


def probes(objects: list[Object]) -> Problems:
    """Each container has all three probes, of existing endpoints, and liveness differs from readiness."""
    paths = {operation.path for operation in OPERATIONS}
    for workload in servers(objects):
        if component(workload) == PLANNER:
            continue
        where, container = workload["metadata"]["name"], main_container(workload)
        found = dict(_probes(container))
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            if name not in found:
                yield f"{where}: no {name}"
        for name, probe in found.items():
            if "httpGet" in probe and probe["httpGet"]["path"] not in paths:
                yield f"{where}: {name} asks {probe['httpGet']['path']}, which is no path of the gateway"
            if "exec" in probe and health(probe)[1] not in ("", LIVENESS_SERVICE):
                yield f"{where}: {name} asks for the health of {health(probe)[1]}, which nobody serves"
        asks = {name: health(probe)[1] for name, probe in found.items()}
        engines = [*ENGINES, *map(worker_of, ENGINES)]
        expected = {"gateway": ("/ready", "/live"), **dict.fromkeys(engines, ("", LIVENESS_SERVICE))}.get(
            component(workload)
        )
        if expected and (asks.get("readinessProbe"), asks.get("livenessProbe")) != expected:
            yield f"{where}: readiness and liveness ask {asks}"


def grace(objects: list[Object]) -> Problems:
    """terminationGracePeriodSeconds covers preStop, the drain with the longest allowed answer, and closing."""
    asked = [s for w in workloads(objects) if isinstance(s := settings_or_none(objects, w), GatewayConfig)]
    longest = max((s.request_timeout_s for s in asked), default=0.0)
    for workload in servers(objects):
        settings = settings_or_none(objects, workload)
        if settings is None:
            continue
        where = workload["metadata"]["name"]
        stop = main_container(workload).get("lifecycle", {}).get("preStop")
        if stop is None:
            yield f"{where}: no preStop"
            continue
        delay = settings.drain_delay_s if isinstance(settings, GatewayConfig) else 0.0
        if settings.drain_s < delay + longest:
            yield f"{where}: an answer may take {longest} s, the drain {settings.drain_s} s"
        need = stop["sleep"]["seconds"] + settings.drain_s + GRACE_S
        have = pod_spec(workload).get("terminationGracePeriodSeconds", 30)
        if have < need:
            yield f"{where}: {have} s until it is killed, and ending may take {need} s"


def selectors(objects: list[Object]) -> Problems:
    """Every name and selector refers to an existing object."""
    for workload in servers(objects):
        where, labels = workload["metadata"]["name"], pod_labels(workload)
        if not selects(workload["spec"]["selector"], labels):
            yield f"{where}: selects other pods than its own"
        others = [o for o in workloads(objects) if o["metadata"] != workload["metadata"]]
        if any(selects(workload["spec"]["selector"], pod_labels(other)) for other in others):
            yield f"{where}: selects pods of another workload"
        budgets = [b for b in of_kind(objects, "PodDisruptionBudget") if selects(b["spec"]["selector"], labels)]
        if len(budgets) != (
            component(workload) not in (PLANNER, *map(worker_of, ENGINES))
        ):  # a group's is its leader's
            yield f"{where}: {len(budgets)} PodDisruptionBudgets"
        constraints = pod_spec(workload).get("topologySpreadConstraints", [])
        if workload["spec"].get("replicas") != 1 or constraints:
            keys = {c["topologyKey"] for c in constraints if selects(c["labelSelector"], labels)}
            alone = ("redis", *map(worker_of, ENGINES))
            if keys != {"kubernetes.io/hostname", "topology.kubernetes.io/zone"} and component(workload) not in alone:
                yield f"{where}: its pods are spread over {keys or 'nothing'}"
    for kind, path in (
        ("Service", None),
        ("NetworkPolicy", "podSelector"),
        ("PodDisruptionBudget", "selector"),
        ("PodMonitor", "selector"),
    ):
        for found in of_kind(objects, kind):
            selector = {"matchLabels": found["spec"]["selector"]} if path is None else found["spec"][path]
            if not any(selects(selector, pod_labels(w)) for w in workloads(objects)):
                yield f"{kind} {found['metadata']['name']}: selects nothing"
    for workload in workloads(objects):
        yield from _references(objects, workload)
    for binding in of_kind(objects, "RoleBinding"):
        for subject in binding["subjects"]:
            if named(objects, subject["kind"], subject["name"]) is None:
                yield f"RoleBinding: there is no {subject['kind']} {subject['name']}"
        if named(objects, binding["roleRef"]["kind"], binding["roleRef"]["name"]) is None:
            yield f"RoleBinding: there is no {binding['roleRef']['kind']} {binding['roleRef']['name']}"
    yield from _monitors(objects)
    yield from _routes(objects)
    for kind in ("HorizontalPodAutoscaler", "ScaledObject"):
        for scaler in of_kind(objects, kind):
            target = scaler["spec"]["scaleTargetRef"]
            found = named(objects, target.get("kind", "Deployment"), target["name"])
            if found is None:
                yield f"{kind} {scaler['metadata']['name']}: there is no {target['name']}"
            elif "replicas" in found["spec"]:
                yield f"{kind} {scaler['metadata']['name']}: each apply sets {target['name']} back"


def _references(objects: list[Object], workload: Object) -> Problems:
    where, spec = workload["metadata"]["name"], pod_spec(workload)
    if named(objects, "ServiceAccount", spec.get("serviceAccountName", "default")) is None:
        yield f"{where}: there is no such ServiceAccount"
    volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
    for container in containers(workload):
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                yield f"{where}: there is no volume {mount['name']}"
        for variable in container.get("env", []):
            key = variable.get("valueFrom", {}).get("secretKeyRef")
            if key and key["key"] not in _keys(objects, "Secret", key["name"]):
                yield f"{where}: Secret {key['name']} has no {key['key']}"
        for source in container.get("envFrom", []):
            if named(objects, "ConfigMap", source["configMapRef"]["name"]) is None:
                yield f"{where}: there is no ConfigMap {source['configMapRef']['name']}"
    for volume in volumes.values():
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if (
            claim
            and ("PersistentVolumeClaim", claim) not in OUTSIDE
            and named(objects, "PersistentVolumeClaim", claim) is None
        ):
            yield f"{where}: there is no claim {claim}"
        secret = volume.get("secret", {}).get("secretName")
        if secret and not _keys(objects, "Secret", secret):
            yield f"{where}: there is no Secret {secret}"
        config = volume.get("configMap", {}).get("name")
        if config and named(objects, "ConfigMap", config) is None:
            yield f"{where}: there is no ConfigMap {config}"


def _keys(objects: list[Object], kind: str, name: str) -> tuple[str, ...]:
    found = named(objects, kind, name)
    return OUTSIDE.get((kind, name), ()) if found is None else tuple(found["data"])


def _monitors(objects: list[Object]) -> Problems:
    for monitor in of_kind(objects, "PodMonitor"):
        for workload in workloads(objects):
            for endpoint in monitor["spec"]["podMetricsEndpoints"]:
                if not selects(monitor["spec"]["selector"], pod_labels(workload)):
                    continue
                if port_number(main_container(workload), endpoint["port"]) is None:
                    yield f"PodMonitor: {workload['metadata']['name']} has no port {endpoint['port']}"
    for monitor in of_kind(objects, "ServiceMonitor"):
        services = [
            s for s in of_kind(objects, "Service") if selects(monitor["spec"]["selector"], s["metadata"]["labels"])
        ]
        names = [port["name"] for service in services for port in service["spec"]["ports"]]
        if not all(endpoint["port"] in names for endpoint in monitor["spec"]["endpoints"]):
            yield f"ServiceMonitor {monitor['metadata']['name']}: no such port behind it"


def _routes(objects: list[Object]) -> Problems:
    longest = max(
        (
            s.request_timeout_s
            for w in workloads(objects)
            if isinstance(s := settings_or_none(objects, w), GatewayConfig)
        ),
        default=0,
    )
    for route in of_kind(objects, "HTTPRoute"):
        for rule in route["spec"]["rules"]:
            if float(rule["timeouts"]["request"].removesuffix("s")) < longest:
                yield f"HTTPRoute {route['metadata']['name']}: ends answers that may take {longest} s"
            for backend in rule["backendRefs"]:
                kind = backend.get("kind", "Service")
                found = named(objects, kind, backend["name"])
                if found is None:
                    yield f"HTTPRoute: there is no {kind} {backend['name']}"
                elif kind == "Service" and backend["port"] not in [p["port"] for p in found["spec"]["ports"]]:
                    yield f"HTTPRoute: {backend['name']} has no port {backend['port']}"
    for pool in of_kind(objects, "InferencePool"):
        behind = [w for w in workloads(objects) if selects(pool["spec"]["selector"], pod_labels(w))]
        numbers = [target["number"] for target in pool["spec"]["targetPorts"]]
        if not behind or any(port_number(main_container(w), n) is None for w in behind for n in numbers):
            yield f"InferencePool: nobody listens on {numbers}"


def network(objects: list[Object]) -> Problems:
    """NetworkPolicies allow the connections in NEEDED and no others."""
    policies, here = Policies(objects), {"kubernetes.io/metadata.name": "baton"}
    by_name = {component(w): w for w in servers(objects)}
    grouped = [engine for engine in ENGINES if worker_of(engine) in by_name]
    ours = (*OURS, *map(worker_of, grouped))
    peers = {name: Peer(pod_labels(by_name[name]), here) for name in ours}
    peers["stranger"] = Peer({"app": "stranger"}, {"kubernetes.io/metadata.name": "elsewhere"})
    peers["monitoring"] = Peer({"app": "prometheus"}, {"kubernetes.io/metadata.name": "monitoring"})
    open_ports: dict[str, dict[str, list[int]]] = {
        name: {port["name"]: [port["containerPort"]] for port in main_container(by_name[name])["ports"]}
        for name in ours
    }
    for engine in (*ENGINES, *map(worker_of, grouped)):
        low, high = kv_ports(objects, by_name[engine])
        open_ports[engine]["kv"] = [low, (low + high) // 2, high]
        if any(low <= port[0] <= high for name, port in open_ports[engine].items() if name != "kv"):
            yield f"{engine}: a port lies among those for KV"
    wanted = set(NEEDED) | {("monitoring", "gateway", "http"), ("monitoring", "gateway", "grpc")}
    if of_kind(objects, "PodMonitor"):
        wanted |= {("monitoring", engine, "metrics") for engine in ENGINES}
    for engine in grouped:  # collectives choose their ports
        worker = worker_of(engine)
        for a, b in ((engine, worker), (worker, engine), (worker, worker)):
            wanted |= {(a, b, port) for port in (*open_ports[b], "any")}
        wanted |= {(worker, worker_of(other), "kv") for other in grouped}
    for source, origin in peers.items():
        for target in ours:
            for name, numbers in {**open_ports[target], "system": [22], "any": [9999, 50000]}.items():
                for number in numbers:
                    if policies.allows(origin, peers[target], number) != ((source, target, name) in wanted):
                        state = "closed" if (source, target, name) in wanted else "open"
                        yield f"{source} -> {target}:{number} ({name}) is {state}"
    another = Peer({"app.kubernetes.io/name": "baton", "app.kubernetes.io/component": "another"}, here)
    for name, peer in peers.items():
        if policies.allows(peer, another, 8000) or policies.allows(another, peers["redis"], 6379):
            yield f"{name} -> another component of ours is open"
    outside = Peer(None, {})
    for name in ours:
        for number in (443, 80):
            if policies.allows(peers[name], outside, number) != (name == "gateway" and number == 443):
                yield f"{name} -> anywhere:{number} is {'closed' if name == 'gateway' else 'open'}"


def groups(objects: list[Object]) -> Problems:
    """Pods of a LeaderWorkerSet connect to their leader, have consistent sizes, and end in the right order."""
    for group in of_kind(objects, "LeaderWorkerSet"):
        where, template = group["metadata"]["name"], group["spec"]["leaderWorkerTemplate"]
        leader, worker = (w for w in group_parts(objects) if w["metadata"]["name"].startswith(f"{where}/"))
        pod, other = settings_or_none(objects, leader), settings_or_none(objects, worker)
        if not isinstance(pod, PodConfig) or not isinstance(other, WorkerConfig):
            yield f"{where}: its leader is no pod, or its worker none"
            continue
        if template.get("restartPolicy") != "RecreateGroupOnPodRestart":
            yield f"{where}: what is left of a group is not replaced"
        if group["spec"].get("startupPolicy", "LeaderCreated") != "LeaderCreated":
            yield f"{where}: the leader waits for workers that wait for the leader"
        size = template["size"]
        if (pod.tensor_parallel_nodes, other.tensor_parallel_nodes) != (size, size):
            yield f"{where}: it has {size} machines, and is told of another number"
        shapes = {(c.tensor_parallel_size, c.transport, c.net_devices) for c in (pod, other)}
        if len(shapes) != 1:
            yield f"{where}: leader and worker disagree: {shapes}"
        _, _, port = (pod.tensor_parallel_master or "").rpartition(":")
        at = environment(objects, main_container(worker), FIELDS)["LWS_LEADER_ADDRESS"]
        if pod.tensor_parallel_master != f"{FIELDS['status.podIP']}:{port}":
            yield f"{where}: the leader waits at {pod.tensor_parallel_master}"
        if other.tensor_parallel_master != f"{at}:{port}":
            yield f"{where}: workers look for it at {other.tensor_parallel_master}"
        for part in (leader, worker):
            gpus = main_container(part)["resources"]["limits"].get("nvidia.com/gpu")
            if gpus != str(pod.tensor_parallel_size // size):
                yield f"{part['metadata']['name']}: {pod.tensor_parallel_size // size} ranks have {gpus} GPUs"
        for key in ("image", "volumeMounts"):
            if main_container(leader)[key] != main_container(worker)[key]:
                yield f"{where}: leader and worker differ in {key}"
        if component(worker) != worker_of(component(leader)):
            yield f"{where}: its workers are taken for another's"
        for service in of_kind(objects, "Service"):
            if service["spec"]["selector"].items() <= pod_labels(worker).items():
                yield f"{where}: Service {service['metadata']['name']} leads to workers"
        graces = [pod_spec(part).get("terminationGracePeriodSeconds", 30) for part in (leader, worker)]
        if graces[1] < graces[0] or other.drain_s < pod.drain_s:
            yield f"{where}: a worker may be killed while its leader ends requests"


def kv_ports(objects: list[Object], engine: Object) -> tuple[int, int]:
    """First and last port of UCX."""
    low, high = environment(objects, main_container(engine), FIELDS)["UCX_TCP_PORT_RANGE"].split("-")
    return int(low), int(high)


CHECKS: tuple[Check, ...] = (
    commands,
    ports,
    probes,
    grace,
    selectors,
    groups,
    network,
    images,
    resources,
    certificates,
    security,
)
