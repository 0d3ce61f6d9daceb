"""The installed wheel, without a checkout: every module imports and the command runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [
    "baton",
    "common",
    "engine",
    "kv_transfer",
    "prefix_index",
    "pod",
    "prefill_service",
    "decode_service",
    "gateway",
    "simulator",
    "fleet",
    "loadtest",
    "cli",
]
NOT_SOURCE = (".git", ".venv", ".run", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")

IMPORT_ALL = """
import importlib, json, pkgutil, sys
files = {}
for package in sys.argv[1:]:
    files[package] = importlib.import_module(package).__file__
    for m in pkgutil.walk_packages(sys.modules[package].__path__, package + "."):
        if not m.name.startswith("engine.kernels."):
            files[m.name] = importlib.import_module(m.name).__file__
print(json.dumps(files))
"""


@dataclass
class Installed:
    wheel: Path
    prefix: Path
    elsewhere: Path

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        return subprocess.run(argv, cwd=self.elsewhere, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel in a new environment that uses the dependencies of this one, but not its editable install."""
    tmp = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, tmp / "source", ignore=shutil.ignore_patterns(*NOT_SOURCE))
    pip = [sys.executable, "-m", "pip", "-qq"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(tmp), str(tmp / "source")]
    subprocess.run([*pip, *build], check=True)
    (wheel,) = tmp.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp / "env")], check=True)
    fresh = tmp / "env" / "bin" / "python"
    subprocess.run([*pip, "--python", str(fresh), "install", "--no-deps", "--no-index", str(wheel)], check=True)
    (site,) = (tmp / "env" / "lib").glob("python*/site-packages")
    # A directory named in a .pth file is searched, but .pth files inside it are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (tmp / "elsewhere").mkdir()
    return Installed(wheel, tmp / "env", tmp / "elsewhere")


def test_the_wheel_contains_the_packages_and_scripts_only(installed: Installed) -> None:
    names = zipfile.ZipFile(installed.wheel).namelist()
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == set(PACKAGES)
    scripts = {str(file.relative_to(ROOT)) for package in PACKAGES for file in (ROOT / package).rglob("*.lua")}
    assert scripts
    assert scripts <= set(names)
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)


def test_every_module_imports_from_the_wheel_and_users_import_from_baton(installed: Installed) -> None:
    users = "from baton import *; print(LLM.__module__, SamplingParams(min_p=0.5).min_p, baton.__version__)"
    code = f"import baton\n{users}\n{IMPORT_ALL}"
    done = installed.run(str(installed.prefix / "bin" / "python"), "-c", code, *PACKAGES)
    assert done.returncode == 0, done.stderr[-2000:]
    used, listed = done.stdout.splitlines()[-2:]
    assert used.split() == ["engine.llm", "0.5", metadata.version("baton-serving")]
    files = json.loads(listed)
    assert [name for name, file in files.items() if not Path(file).is_relative_to(installed.prefix)] == []


def test_the_command_runs(installed: Installed) -> None:
    baton = str(installed.prefix / "bin" / "baton")
    assert "serve" in installed.run(baton, "--help").stdout
    assert installed.run(baton, "version").stdout.startswith("baton 0.")
    refused = installed.run(baton, "serve", "--role", "prefill", "--model", "/does/not/exist")
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1
