"""The images, without Docker: lint, properties of each target, and environments built by the Dockerfile's commands."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.k8s.dockerfile import TARGETS, Dockerfile, Workshop, context, read
from tests.k8s.manifests import K8S, ROOT, containers, main_container, of_kind, render

READY_S = 60.0


def promises(dockerfile: Dockerfile) -> list[str]:
    """Errors of the Dockerfile beyond hadolint's rules."""
    wrong = [f"there is no target {name}" for name in TARGETS if name not in dockerfile.stages]
    for name in [target for target in TARGETS if target in dockerfile.stages]:
        user = dockerfile.last(name, "USER")
        if user is None or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", user):
            wrong.append(f"{name} runs as {user}")
        if dockerfile.last(name, "HEALTHCHECK") is None:
            wrong.append(f"{name} has no HEALTHCHECK")
        if not re.fullmatch(r".+:\d+\.\d+\.\d+\S*@sha256:[0-9a-f]{64}", dockerfile.image(name)):
            wrong.append(f"{name} is made from {dockerfile.image(name)}")
        copied = [rest for stage in dockerfile.chain(name) for word, rest in stage.steps if word == "COPY"]
        if not all(rest.startswith("--from=") for rest in copied):
            wrong.append(f"{name} holds more than what was built for it")
        if any(word == "RUN" and "pip" in rest for stage in dockerfile.chain(name) for word, rest in stage.steps):
            wrong.append(f"{name} installs in its last stage")
    for stage in dockerfile.stages.values():
        for word, rest in stage.steps:
            if word == "ADD":
                wrong.append(f"{stage.name}: ADD")
            sources = [] if rest.startswith("--from=") else rest.split()[:-1]
            if word == "COPY" and any(s != "." and s not in context() for s in sources):
                wrong.append(f"{stage.name} copies {sources}, which .dockerignore leaves out")
            installs = re.findall(r"pip install [^&]*", rest) if word == "RUN" else []
            if any("--require-hashes" not in i and "--no-deps /wheel/" not in i for i in installs):
                wrong.append(f"{stage.name} installs without hashes")
    return wrong


def test_what_targets_promise() -> None:
    assert promises(read()) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (" AS engine-gpu\n", " AS engine-cuda\n"),
        ("USER 65532:65532\nENTRYPOINT", "ENTRYPOINT"),
        ("USER 65532:65532\nCOPY --from=engine-gpu-env", "COPY --from=engine-gpu-env"),
        (
            'HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD ["baton", "probe", "http://127.0.0.1:8000/live"]\n',
            "",
        ),
        ("python:3.11.13-slim-bookworm", "python:latest"),
        ("@sha256:86adf8dbadc3d6e82ee5dd2c74bec2e1c2467cdad47886280501df722372d2e1", ""),
        ("COPY --from=gateway-env /opt/baton /opt/baton\n", "COPY . /opt/baton\n"),
        ("FROM runtime AS gateway\n", "FROM runtime AS gateway\nRUN pip install httpx\n"),
        ("COPY requirements requirements\n", "COPY requirements tests ./\n"),
        ("COPY . source\n", "ADD . source\n"),
        ("pip install --require-hashes -r requirements/gateway.lock", "pip install -r requirements/gateway.lock"),
    ],
)
def test_a_worse_dockerfile_is_seen(old: str, new: str) -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert old in text
    assert promises(Dockerfile.parse(text.replace(old, new)))


def test_hadolint_finds_nothing(tmp_path: Path) -> None:
    hadolint = Path(sys.prefix) / "bin" / "hadolint"
    if not hadolint.exists():
        pytest.skip("hadolint has no wheel for this platform")
    assert subprocess.run([hadolint, ROOT / "Dockerfile"], check=False, capture_output=True).returncode == 0
    worse = tmp_path / "Dockerfile"
    worse.write_text((ROOT / "Dockerfile").read_text().replace("--no-install-recommends ", ""))
    assert subprocess.run([hadolint, worse], check=False, capture_output=True).returncode == 1


def test_images_expose_the_ports_of_the_manifests() -> None:
    objects, dockerfile = render(K8S / "overlays" / "cpu-dev"), read()
    for workload in of_kind(objects, "Deployment"):
        container = main_container(workload)
        target = container["image"].partition(":")[0].removeprefix("baton-")
        if target in TARGETS:
            exposed = (dockerfile.last(target, "EXPOSE") or "").split()
            assert {str(port["containerPort"]) for port in container["ports"]} <= set(exposed)
            probe = json.loads((dockerfile.last(target, "HEALTHCHECK") or "").partition("CMD ")[2])
            assert str(container["ports"][0]["containerPort"]) in probe[-1]
    demo = dockerfile.last("demo-model", "CMD")
    commands = [c["command"] for w in of_kind(objects, "Deployment") for c in containers(w) if c["name"] == "model"]
    assert demo is not None
    assert commands == [json.loads(demo)] * 3


def test_every_requirement_is_one_of_ours_and_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    lines = [*project["dependencies"], *optional["traces"], *optional["gpu"], *optional["cpu"], *optional["demo"]]
    ours = {Requirement(line).name: Requirement(line).extras for line in lines}
    pins = {line.partition("==")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    for name in (path.stem for path in (ROOT / "requirements").glob("*.txt")):
        for requirement in requirements(name):
            assert requirement.name in ours
            assert requirement.extras == ours[requirement.name]
            assert not requirement.specifier
            assert requirement.name in pins


def requirements(name: str) -> list[Requirement]:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith(("#", "-r"))]


#: The requirements of which a lock file has the versions and hashes.
LOCKED = {
    "gateway": ("gateway",),
    "engine-cpu": ("engine", "engine-cpu"),
    "engine-gpu": ("engine", "engine-gpu"),
    "demo-model": ("engine", "demo-model"),
}


@pytest.mark.parametrize("name", LOCKED)
def test_a_lock_has_every_package_with_the_pinned_version_and_hashes(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.lock").read_text()
    entries = {
        canonicalize_name(n): (v, rest) for n, v, rest in re.findall(r"^(\S+)==(\S+)((?: \\\n .*)+)$", text, re.M)
    }
    assert len(entries) == text.count("==")
    pins = dict(re.findall(r"^([^\s#=]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M))
    pins = {canonicalize_name(pinned): version for pinned, version in pins.items()}
    if name == "engine-gpu":
        del pins["triton"]  # torch requires its own
    for package, (version, rest) in entries.items():
        assert version.removesuffix("+cpu") == pins.get(package, version)
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", word) for word in rest.replace("\\", "").split())
    assert closure([r for part in LOCKED[name] for r in requirements(part)]) - {"baton-serving"} <= entries.keys()
    assert ("+cpu" in entries["torch"][0]) == (name != "engine-gpu") if "torch" in entries else name == "gateway"


def closure(wanted: list[Requirement]) -> set[str]:
    """The distributions that pip would install, by the metadata of this environment."""
    found: set[str] = set()
    queue = [(r.name, frozenset(r.extras)) for r in wanted]
    done = set()
    while queue:
        name, extras = queue.pop()
        if (name, extras) in done:
            continue
        done.add((name, extras))
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(canonicalize_name(name))
        for line in lines:
            requirement = Requirement(line)
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in (*extras, "")):
                queue.append((requirement.name, frozenset(requirement.extras)))
    return found


IMPORT_ALL = """
import importlib, json, pkgutil, sys
sys.modules.update(dict.fromkeys(json.loads(sys.argv[1])))  # None: importing it raises
for name in ("cli.app", "cli.probes", "cli.commands.services", "common.logs", "common.model.directory", "common.tracing.tracer"):
    importlib.import_module(name)  # what the command itself needs
importlib.import_module("common.telemetry").memory_usage()  # imports what it needs when it is called
for name in sys.argv[2:]:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        if not module.name.endswith("__main__") and not module.name.startswith(("engine.kernels.", "engine.models.hf")):
            try:
                importlib.import_module(module.name)
            except ImportError as e:
                if "triton" not in str(e):
                    raise
"""


@pytest.mark.parametrize(
    ("name", "packages"),
    [("gateway", ("gateway", "loadtest")), ("engine", ("pod", "prefill_service", "decode_service", "kv_transfer"))],
)
def test_nothing_is_imported_that_the_image_does_not_have(name: str, packages: tuple[str, ...]) -> None:
    installed = closure(requirements(name)) | {"baton-serving"}
    owners = metadata.packages_distributions()
    absent = [top for top, of in owners.items() if not {canonicalize_name(d) for d in of} & installed]
    assert ("torch" in absent) == (name == "gateway")
    argv = [sys.executable, "-c", IMPORT_ALL, json.dumps(absent), *packages]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Builds a stage with the Dockerfile's commands and returns the directory of its programs."""

    def built(stage: str) -> Path:
        # What is to be had of torch depends on where one is; the image's own index is an argument for this reason.
        index = os.environ.get("TORCH_CPU_INDEX", "https://pypi.org/simple")
        workshop = Workshop(tmp_path, read(), sys.executable, {"TORCH_CPU_INDEX": index})
        workshop.build(stage)
        return tmp_path / "opt" / "baton" / "bin"

    yield built
    shutil.rmtree(tmp_path)  # gigabytes


def serves(programs: Path, argv: list[str], url: str) -> None:
    """Starts the service in its environment, runs the image's health check, and stops it by SIGTERM."""
    env = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(programs.parents[2]), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        ["baton", *argv], env=env, cwd=programs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        deadline = time.monotonic() + READY_S
        probe = ["baton", "probe", url]
        while subprocess.run(probe, env=env, cwd=programs, check=False).returncode:
            assert process.poll() is None, process.communicate()[0].decode()[-3000:]
            assert time.monotonic() < deadline, "not ready"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


slow = pytest.mark.skipif("IMAGE_ENVS" not in os.environ, reason="downloads for minutes: make image-env-test")


@slow
def test_the_gateways_environment(build: Callable[[str], Path], smollm2_dir: Path, unused_tcp_port: int) -> None:
    programs, port = build("gateway-env"), unused_tcp_port
    has = subprocess.run(
        [
            programs / "python",
            "-c",
            "import importlib.util as u; print([bool(u.find_spec(n)) for n in ('torch', 'nixl_cu13', 'pip')])",
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd=programs,
    )
    assert has.stdout.strip() == "[False, False, False]"
    argv = ["gateway", f"--model={smollm2_dir}", f"--port={port}", "--pods=127.0.0.1:1"]
    serves(programs, argv, f"http://127.0.0.1:{port}/live")


@slow
@pytest.mark.parametrize("target", ["engine-cpu", "engine-gpu"])
def test_an_engines_environment(
    build: Callable[[str], Path], smollm2_dir: Path, unused_tcp_port: int, target: str
) -> None:
    programs, port = build(f"{target}-env"), unused_tcp_port
    for role in ("prefill", "decode"):
        argv = ["serve", f"--role={role}", "--device=cpu", f"--model={smollm2_dir}", f"--port={port}", "--threads=1"]
        serves(programs, [*argv, "--kv-memory=64MiB", "--max-model-len=512"], f"grpc://127.0.0.1:{port}")


@slow
def test_the_demos_model(build: Callable[[str], Path]) -> None:
    model = build("demo-model-files").parents[1] / "model"
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {path.name for path in model.iterdir()}
