"""Who may import whom: every module of a package is imported in a process that must not have loaded these."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

OURS = {
    "common",
    "engine",
    "kv_transfer",
    "pod",
    "prefill_service",
    "decode_service",
    "gateway",
    "simulator",
    "loadtest",
    "cli",
}
ML = {"torch", "transformers", "triton"}
NETWORK = {"grpc", "redis", "fastapi", "uvicorn"}
NIXL = {"nixl", "nixl_cu12", "nixl_cu13"}

FORBIDDEN = {
    "common": ML | NIXL | (OURS - {"common"}),
    "engine": NETWORK | NIXL | (OURS - {"common", "engine"}),
    "kv_transfer": ML | (OURS - {"common", "kv_transfer"}),
    "pod": OURS - {"common", "engine", "kv_transfer", "pod"},
    "prefill_service": OURS - {"common", "engine", "kv_transfer", "pod", "prefill_service"},
    "decode_service": OURS - {"common", "engine", "kv_transfer", "pod", "decode_service"},
    "gateway": ML | NIXL | (OURS - {"common", "gateway"}),
    "simulator": ML | NIXL | {"grpc", "fastapi", "uvicorn"} | (OURS - {"common", "engine", "gateway", "simulator"}),
    "cli": ML | NIXL,
    "loadtest": ML | NIXL | {"redis", "fastapi", "uvicorn"} | (OURS - {"common", "loadtest"}),
}

# They load when a CUDA device is used; everything else has to do without triton.
NEEDS_TRITON = ["engine.kernels.", "engine.step.decode_step", "engine.sampling.device_sampler", "engine.models.fused"]

# One process forks a child for each package, so that torch is read once: of what a package may load, the children of
# the second half find torch loaded. Prints {package: names of the top-level modules that are loaded, or an error}.
IMPORT_ALL = """
import importlib, json, os, pkgutil, sys, traceback
def load(package, blocked):
    sys.modules.update(dict.fromkeys(blocked))  # None: importing it raises
    for name in [package] + [
        m.name for m in pkgutil.walk_packages(importlib.import_module(package).__path__, package + ".")
        if not m.name.endswith("__main__") and not m.name.startswith(tuple(needs_triton))
    ]:
        importlib.import_module(name)
    return sorted({name.partition(".")[0] for name, module in sys.modules.items() if module is not None})
def in_a_child(*what):
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = load(*what)
        except BaseException:
            said = traceback.format_exc()[-2000:]
        with open(writer, "w") as out:
            json.dump(said, out)
        os._exit(0)
    os.close(writer)
    with open(reader) as answer:
        said = json.load(answer)
    os.waitpid(child, 0)
    return said
bare, with_torch, needs_triton = json.loads(sys.argv[1])
found = {package: in_a_child(package, []) for package in bare}
sys.modules["triton"] = None
import torch
print(json.dumps(found | {package: in_a_child(package, ["triton"]) for package in with_torch}))
"""


def run(source: str, *argv: str) -> Any:
    child = subprocess.run([sys.executable, "-c", source, *argv], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr[-2000:]
    return json.loads(child.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def loaded() -> dict[str, Any]:
    with_torch = [package for package in FORBIDDEN if "torch" not in FORBIDDEN[package]]
    bare = [package for package in FORBIDDEN if package not in with_torch]
    found: dict[str, Any] = run(IMPORT_ALL, json.dumps([bare, with_torch, NEEDS_TRITON]))
    return found


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_package_does_not_load_what_is_above_or_beside_it(package: str, loaded: dict[str, Any]) -> None:
    assert isinstance(loaded[package], list), loaded[package]
    assert package in loaded[package]
    assert not set(loaded[package]) & FORBIDDEN[package]


def test_the_command_line_is_quick_because_it_imports_little() -> None:
    tops = "import cli.app, json, sys; print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
    assert not set(run(tops)) & (ML | NETWORK | NIXL | {"httpx", "openai", "numpy"})
