"""Who may import whom: every module of a package is imported in a fresh process, which must not have loaded these."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

OURS = {"common", "engine", "kv_transfer", "pod", "prefill_service", "decode_service", "gateway", "loadtest"}
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
}

IMPORT_ALL = """
import importlib, json, pkgutil, sys
blocked = json.loads(sys.argv[2])
sys.modules.update(dict.fromkeys(blocked))  # None: importing it raises
for name in [sys.argv[1]] + [
    m.name for m in pkgutil.walk_packages(importlib.import_module(sys.argv[1]).__path__, sys.argv[1] + ".")
    if not m.name.endswith("__main__") and not m.name.startswith("engine.kernels.")
]:
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name, module in sys.modules.items() if module is not None})))
"""


def loaded_after(source: str, *argv: str) -> set[str]:
    child = subprocess.run([sys.executable, "-c", source, *argv], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr[-2000:]
    return set(json.loads(child.stdout.splitlines()[-1]))


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_package_does_not_load_what_is_above_or_beside_it(package: str) -> None:
    # Above the kernels themselves, which load when a CUDA device is used, everything has to do without triton.
    blocked = ["triton"] if "torch" not in FORBIDDEN[package] else []
    assert not loaded_after(IMPORT_ALL, package, json.dumps(blocked)) & FORBIDDEN[package]


def test_the_command_line_is_quick_because_it_imports_little() -> None:
    tops = "import common.cli, json, sys; print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
    assert not loaded_after(tops) & (ML | NETWORK | NIXL | {"httpx", "openai", "numpy"})
