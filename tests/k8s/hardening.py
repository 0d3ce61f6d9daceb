"""Checks of single containers: image, resources, certificates and rights."""

from __future__ import annotations

import re
import tomllib

from common.settings.gateway import GatewayConfig
from common.settings.pod import PodConfig, WorkerConfig
from tests.k8s.manifests import (
    ROOT,
    Object,
    component,
    containers,
    main_container,
    of_kind,
    pod_spec,
)
from tests.k8s.settings import ENGINES, PLANNER, Problems, settings_or_none, worker_of, workloads


def images(objects: list[Object]) -> Problems:
    """Every image has a version, and one of somebody else a digest. Baton's are targets of the Dockerfile."""
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for workload in workloads(objects):
        for container in containers(workload):
            image, where = container["image"], f"{workload['metadata']['name']}/{container['name']}"
            name, _, tag = image.rpartition("/")[2].partition("@")[0].partition(":")
            if not tag or tag == "latest" or not (name.startswith("baton-") or "@sha256:" in image):
                yield f"{where}: {image} may be any version"
            if name.startswith("baton-") and (name.removeprefix("baton-") not in targets or tag != version):
                yield f"{where}: {image} is not what the Dockerfile makes of version {version}"


def resources(objects: list[Object]) -> Problems:
    """Containers have CPU and memory requests and a memory limit; every emptyDir has a size limit."""
    for workload in workloads(objects):
        where = workload["metadata"]["name"]
        for container in containers(workload):
            has = container.get("resources", {})
            if not {"cpu", "memory"} <= has.get("requests", {}).keys() or "memory" not in has.get("limits", {}):
                yield f"{where}/{container['name']}: requests of cpu and memory and a limit of memory are needed"
        for volume in pod_spec(workload).get("volumes", []):
            if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
                yield f"{where}: {volume['name']} has no limit"


def certificates(objects: list[Object]) -> Problems:
    """Every Baton container has the certificates of its role, which its user can read."""
    for workload in workloads(objects):
        settings = settings_or_none(objects, workload)
        if settings is None:
            continue
        where, spec = workload["metadata"]["name"], pod_spec(workload)
        if isinstance(settings, PodConfig):
            role = settings.role.value
        else:
            role = "worker" if isinstance(settings, WorkerConfig) else "gateway"
        mounts = {mount["mountPath"]: mount for mount in main_container(workload)["volumeMounts"]}
        mount = mounts.get(settings.tls_dir or "", {})
        secrets = {volume["name"]: volume["secret"] for volume in spec["volumes"] if "secret" in volume}
        secret = secrets.get(mount.get("name", ""), {})
        if secret.get("secretName") != f"baton-tls-{role}" or not mount.get("readOnly"):
            yield f"{where}: {settings.tls_dir} does not have the certificates of a {role}"
        elif secret.get("defaultMode", 0o644) != 0o440 or "fsGroup" not in spec["securityContext"]:
            yield f"{where}: others can read its key, or its user cannot"


def mounted(container: Object, spec: Object, kind: str) -> set[str]:
    """Returns the paths at which a container mounts volumes of this kind."""
    names = {volume["name"] for volume in spec.get("volumes", []) if kind in volume}
    return {mount["mountPath"] for mount in container.get("volumeMounts", []) if mount["name"] in names}


def security(objects: list[Object]) -> Problems:
    """No container runs as root, writes to its image, has capabilities or an unused token."""
    for account in of_kind(objects, "ServiceAccount"):
        if account.get("automountServiceAccountToken") is not False:
            yield f"ServiceAccount {account['metadata']['name']} mounts its token everywhere"
    for workload in workloads(objects):
        where, spec = workload["metadata"]["name"], pod_spec(workload)
        pod = spec.get("securityContext", {})
        if (
            not pod.get("runAsNonRoot")
            or not pod.get("runAsUser")
            or pod.get("seccompProfile", {}).get("type") != "RuntimeDefault"
        ):
            yield f"{where}: not (non-root, a user's number, seccomp)"
        for name in ("hostNetwork", "hostPID", "hostIPC"):
            if spec.get(name):
                yield f"{where}: {name}"
        settings = settings_or_none(objects, workload)
        uses = isinstance(settings, GatewayConfig) and settings.discovery == "k8s"
        uses = uses or (component(workload) == PLANNER and "--scale=k8s" in main_container(workload).get("args", []))
        if spec.get("automountServiceAccountToken", True) != uses:
            yield f"{where}: {'needs a token' if uses else 'holds a token that it does not use'}"
        if spec.get("enableServiceLinks", True):
            yield f"{where}: service links become BATON_ variables that nobody knows"
        for container in containers(workload):
            has = container.get("securityContext", {})
            capabilities = has.get("capabilities", {})
            if (
                has.get("allowPrivilegeEscalation") is not False
                or has.get("readOnlyRootFilesystem") is not True
                or has.get("privileged")
            ):
                yield f"{where}/{container['name']}: may gain privileges or write to its image"
            if capabilities.get("drop") != ["ALL"] or not set(capabilities.get("add", [])) <= {"IPC_LOCK"}:
                yield f"{where}/{container['name']}: has capabilities"
        paths = {volume["hostPath"].get("path") for volume in spec.get("volumes", []) if "hostPath" in volume}
        staging = settings.staging_dir if isinstance(settings, PodConfig) else None
        if not paths <= {"/dev/shm"} or (paths and staging not in mounted(main_container(workload), spec, "hostPath")):
            yield f"{where}: mounts a path of the host"
        mounts = {mount["mountPath"] for mount in main_container(workload).get("volumeMounts", [])}
        if settings is not None and "/tmp" not in mounts:
            yield f"{where}: cannot write anywhere"
        if component(workload) in (*ENGINES, *map(worker_of, ENGINES)):
            shm = [v for v in spec["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"]
            if "/dev/shm" not in mounts or not shm:
                yield f"{where}: /dev/shm has 64 MiB"
