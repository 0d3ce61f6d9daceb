"""Runs the command of a manifest like a kubelet and its container runtime.

The command is process 1 of a process namespace in the pod's network namespace. It has a read-only root, the pod's
volumes and user, and no capabilities. There are no images: `baton` is the one of this checkout, `valkey-server` the
embedded one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cli.stack.valkey import valkey_binary
from tests.k8s.manifests import ROOT, Object

UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
VENV = Path(sys.prefix)


def size(text: str) -> int:
    """Returns the bytes of a Kubernetes quantity."""
    return int(text[:-2]) * UNITS[text[-2:]] if text[-2:] in UNITS else int(text)


def image_env() -> dict[str, str]:
    """Returns the environment of the Dockerfile's stage `runtime`, with this checkout instead of /opt/baton."""
    line = re.search(r"^FROM \S+ AS runtime\nENV (.+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert line is not None
    env = dict(pair.split("=", 1) for pair in line[1].split())
    env["PATH"] = (
        env["PATH"].replace("/opt/baton/bin", str(VENV / "bin")).replace("$PATH", "/usr/local/bin:/usr/bin:/bin")
    )
    return {**env, "PYTHONPATH": str(ROOT)}


@dataclass
class Container:
    """One container.

    `seeds` maps paths in the container to host directories with the volumes' initial files, `secrets` names of Secrets
    to directories with their files.
    """

    host: str
    pod: Object
    spec: Object
    argv: Sequence[str]
    env: Mapping[str, str]
    names: Path
    log: Path
    seeds: Mapping[str, Path]
    secrets: Mapping[str, Path]
    account: Path | None = None
    _popen: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        script = "\n".join(["set -e", *self._mounts(), self._exec()])
        with self.log.open("ab") as out:
            self._popen = subprocess.Popen(
                [
                    *("ip", "netns", "exec", self.host, "unshare", "--mount", "--pid", "--fork", "--kill-child"),
                    *("--mount-proc", "--propagation", "private", "sh", "-c", script),
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def exit_code(self) -> int | None:
        return None if self._popen is None else self._popen.poll()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to process 1 of the container, the only child of the started process."""
        for child in self._children():
            os.kill(child, number)

    def status(self) -> str:
        """/proc/PID/status of process 1."""
        (child,) = self._children()
        return Path(f"/proc/{child}/status").read_text()

    def _children(self) -> list[int]:
        assert self._popen is not None
        pid = self._popen.pid
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()] if self.alive else []

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _mounts(self) -> list[str]:
        """Mounts the volumes over the host's files and the rest read-only.

        The interpreter and this checkout are mounted again where a volume or the empty /root hides them.
        """
        lines = [f"mount --bind {shlex.quote(str(self.names))} /etc/hosts"]
        hidden = ["/root", *(mount["mountPath"] for mount in self.spec.get("volumeMounts", []))]
        ours = dict.fromkeys((sys.base_prefix, str(ROOT), str(VENV)))
        private = [path for path in ours if any(Path(path).is_relative_to(place) for place in hidden)]

        def mount_again(place: str) -> list[str]:
            below = [(number, path) for number, path in enumerate(private) if Path(path).is_relative_to(place)]
            return [
                f"mkdir -p {shlex.quote(p)} && mount --move /mnt/root/{number} {shlex.quote(p)}" for number, p in below
            ]

        lines += ["mount -t tmpfs tmpfs /mnt", "mkdir /mnt/root"]
        for number, path in enumerate(private):
            lines += [f"mkdir /mnt/root/{number}", f"mount --bind {shlex.quote(path)} /mnt/root/{number}"]
        for number, seed in enumerate(self.seeds.values()):
            lines += [f"mkdir /mnt/seed{number}", f"mount --bind {shlex.quote(str(seed))} /mnt/seed{number}"]
        if self.account is not None:
            lines += ["mkdir /mnt/account", f"cp {shlex.quote(str(self.account))}/[tcn]* /mnt/account"]
        lines += ["mount -t tmpfs -o mode=755 tmpfs /root", *mount_again("/root")]
        volumes = {volume["name"]: volume for volume in self.pod["volumes"]}
        mounts = self.spec.get("volumeMounts", [])
        secrets = {m["mountPath"]: volumes[m["name"]]["secret"] for m in mounts if "secret" in volumes[m["name"]]}
        for number, secret in enumerate(secrets.values()):
            files = shlex.quote(str(self.secrets[secret["secretName"]]))
            lines += [f"mkdir /mnt/secret{number}", f"cp {files}/*.pem /mnt/secret{number}"]
        lines.append("mount -t tmpfs -o mode=755 tmpfs /run")
        if self.account is not None:
            lines += [f"mkdir -p {ACCOUNT}", f"cp /mnt/account/* {ACCOUNT}"]
        group = self.pod["securityContext"]["fsGroup"]
        for number, (path, secret) in enumerate(secrets.items()):
            assert Path(path).is_relative_to("/run"), path
            lines += [f"mkdir -p {path}", f"cp /mnt/secret{number}/* {path}", f"chgrp {group} {path}/*"]
            lines.append(f"chmod {secret['defaultMode']:o} {path}/*")
        for mount in mounts:
            if mount["mountPath"] in secrets:
                continue
            path, limit = mount["mountPath"], size(volumes[mount["name"]]["emptyDir"]["sizeLimit"])
            lines += [f"[ -d {path} ] || {{ mount -t tmpfs tmpfs $(dirname {path}); mkdir {path}; }}"]
            lines += [f"mount -t tmpfs -o size={limit},mode=1777 tmpfs {path}", *mount_again(path)]
            for number, seed in enumerate(self.seeds):
                if Path(seed).is_relative_to(path):
                    lines += [f"mkdir {seed}", f"mount --bind /mnt/seed{number} {seed}"]
            if mount.get("readOnly"):
                lines.append(f"mount -o remount,bind,ro {path}")
        assert self.spec["securityContext"]["readOnlyRootFilesystem"] is True
        return [*lines, "mount -o remount,bind,ro /"]

    def _exec(self) -> str:
        return f"cd /tmp\nexec {shlex.join(self._as_user(self.argv))}"

    def _as_user(self, argv: Sequence[str]) -> list[str]:
        """Returns the command with the container's user, rights and environment."""
        context = self.pod["securityContext"]
        user, group = context["runAsUser"], context["runAsGroup"]
        env = {**image_env(), **self.env}
        env["PATH"] += f":{valkey_binary().parent}"
        variables = [f"{name}={value}" for name, value in env.items()]
        return [
            *("setpriv", f"--reuid={user}", f"--regid={group}", f"--groups={context['fsGroup']}", "--no-new-privs"),
            *("--bounding-set=-all", "--inh-caps=-all", "env", "-i", *variables, *argv),
        ]

    def succeeds(self, argv: Sequence[str], timeout_s: float) -> bool:
        """Runs a command in the container and returns whether it ends with 0 in time."""
        if not (children := self._children()):
            return False
        enter = ["nsenter", f"--target={children[0]}", "--mount", "--pid", "--net"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            quiet = subprocess.DEVNULL
            done = subprocess.run(
                [*enter, *self._as_user(argv)], stdout=quiet, stderr=quiet, timeout=timeout_s, check=False
            )
            return done.returncode == 0
        return False
