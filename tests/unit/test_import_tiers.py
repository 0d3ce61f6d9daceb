"""The order of packages and rooms: by the imports in the sources, and by the libraries that a package loads.

The source is read without running it, so imports inside functions, imports for type checkers only and module names in
strings count too. The second half imports each package in a process of its own and looks at what that loaded.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

_POD = {"common", "engine", "kv_transfer", "prefix_index", "pod"}
#: For each package the packages that it may import, besides itself.
PACKAGES: dict[str, set[str]] = {
    "common": set(),
    "engine": {"common"},
    "kv_transfer": {"common"},
    "prefix_index": {"common"},
    "pod": _POD - {"pod"},
    "prefill_service": _POD,
    "decode_service": _POD,
    "gateway": {"common", "prefix_index"},
    "loadtest": {"common"},
    "fleet": {"common", "prefix_index"},
    "simulator": {"common", "engine", "prefix_index", "gateway", "loadtest", "fleet"},
}
PACKAGES["cli"] = set(PACKAGES)
PACKAGES["baton"] = {"common", "engine"}  # the import name for users; no package imports it

#: The rooms of a package, lowest first. A module may import its own line and the lines before it.
ROOMS = {
    "common": [
        "errors block_hash grammar.matcher",
        "types kv_layout kv_groups kv_slices redis.url json_schema call_wrapper",
        "redis tracing grammar process model logs telemetry tls",
        "settings wire auth pb",
        "rpc",
    ],
    "prefix_index": [
        "store",
        "lookup_cache pipelined_connection",
        "demand publisher reader",
    ],
    "kv_transfer": [
        "memory",
        "messages",
        "backend",
        "transfer_thread probe",
        "peers",
        "sender receiver",
        "servicer",
        "node",
    ],
    "pod": [
        "adapters grammars health index limits requests warm_up",
        "role",
        "monitoring services",
        "rank worker",
        "runtime",
    ],
    "fleet": ["forecast", "decision", "demand lease roles scale", "planner"],
    "loadtest": ["slo workload recipes", "config run", "client", "runner report", "__main__"],
    "cli": [
        "client exits gpus other_flags probes settings_page",
        "options fit",
        "demo",
        "stack batch chat",
        "doctor",
        "commands",
        "app",
        "__main__",
    ],
    "engine": [
        "config device cuda_graphs progress quantization",
        "kv",
        "kernels",
        "attention",
        "models adapters",
        "model_size card_rates",
        "parallel",
        "sampling",
        "schedule",
        "speculation",
        "step",
        "hybrid",
        "engine",
        "loop",
        "llm",
    ],
    "gateway": [
        "telemetry",
        "text.tools",
        "text",
        "pods",
        "routing",
        "dispatch",
        "admission",
        "serving",
        "api.http",
        "api.blocks",
        "api.openai",
        "api.openai.responses api.anthropic api.scoring",
        "api.grpc",
        "api.docs",
        "dashboard",
        "app server",
    ],
}

#: Entry points, like scripts: `python -m loadtest` is `baton loadtest`.
ENTRY_POINTS = {"loadtest.__main__"}


@dataclass(frozen=True)
class Import:
    """One import of a Baton module by another."""

    importer: str
    imported: str
    line: int
    #: The name is in a string: code of, or the command line of, another process.
    in_string: bool = False

    def __str__(self) -> str:
        return f"{self.importer.replace('.', '/')}.py:{self.line} imports {self.imported}"


@cache
def modules() -> dict[str, Path]:
    """Dotted name of every module, packages included, and its file."""
    found = {}
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def _module(name: str) -> str | None:
    """The Baton module that a dotted name is, or is in; None for other packages."""
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name or None


def _names(tree: ast.Module) -> Iterator[tuple[str, int, bool]]:
    """Dotted names that a module imports, or that its strings hold (`python -m`, `python -c`, import_module).

    With the line, and whether the name is in a string.
    """
    docstrings = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from ((alias.name, node.lineno, False) for alias in node.names)
            case ast.ImportFrom():
                assert not node.level, "imports are absolute"
                yield from ((f"{node.module}.{alias.name}", node.lineno, False) for alias in node.names)
            case ast.Expr(value=ast.Constant()):
                docstrings.add(node.value)
            case ast.Constant(value=str(text)) if node not in docstrings:
                if text in modules() and "." in text:
                    yield text, node.lineno, True
                yield from (
                    (f"{m[1]}.{m[2] or ''}", node.lineno, True)
                    for m in re.finditer(r"(?:^|[\n;])\s*(?:from|import) ([\w.]+)(?: import (\w+))?", text)
                )


@cache
def imports() -> list[Import]:
    """All imports between Baton modules."""
    return [
        Import(name, imported, line, in_string)
        for name, file in modules().items()
        for text, line, in_string in _names(ast.parse(file.read_text()))
        if (imported := _module(text)) and imported != name
    ]


def room(module: str) -> int | None:
    """The line of ROOMS that a module is on, by its longest prefix; None when it is on none."""
    package, _, inside = module.partition(".")
    fits = [
        (len(prefix), number)
        for number, line in enumerate(ROOMS[package])
        for prefix in line.split()
        if f"{inside}.".startswith(f"{prefix}.")
    ]
    return max(fits)[1] if fits else None


def test_a_package_imports_only_allowed_packages() -> None:
    wrong = []
    for entry in imports():
        package, other = (name.partition(".")[0] for name in (entry.importer, entry.imported))
        if other not in PACKAGES[package] | {package} and entry.importer not in ENTRY_POINTS:
            wrong.append(str(entry))
    assert wrong == []


@pytest.mark.parametrize("package", ROOMS)
def test_a_room_imports_no_room_above_it(package: str) -> None:
    wrong = []
    for entry in imports():
        if not entry.importer.startswith(f"{package}.") or not entry.imported.startswith(f"{package}."):
            continue
        mine, other = room(entry.importer), room(entry.imported)
        if mine is not None and other is not None and other > mine:
            wrong.append(str(entry))
    assert wrong == []


@pytest.mark.parametrize("package", ROOMS)
def test_every_module_has_a_room(package: str) -> None:
    packages = {name for name, file in modules().items() if file.name == "__init__.py"}
    assert [
        name for name in modules() if name.startswith(f"{package}.") and room(name) is None and name not in packages
    ] == []


def test_there_is_no_circle_of_imports() -> None:
    needs: dict[str, set[str]] = {name: set() for name in modules()}
    for entry in imports():
        if not entry.in_string:
            needs[entry.importer].add(entry.imported)
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


ML = {"torch", "transformers", "triton"}
NETWORK = {"grpc", "redis", "starlette", "uvicorn"}
NIXL = {"nixl", "nixl_cu12", "nixl_cu13"}

#: Libraries that no module of a package may load when it is imported.
FORBIDDEN_LIBRARIES = {
    "common": ML | NIXL,
    "engine": NETWORK | NIXL | {"numba"},
    "kv_transfer": ML,
    "prefix_index": ML | NIXL | {"grpc", "starlette", "uvicorn"},
    "pod": set(),
    "prefill_service": set(),
    "decode_service": set(),
    "gateway": ML | NIXL,
    "fleet": ML | NIXL | {"starlette", "uvicorn"},
    "loadtest": ML | NIXL | {"redis", "starlette", "uvicorn"},
    "simulator": ML | NIXL | {"grpc", "starlette", "uvicorn"},
    "cli": ML | NIXL,
    "baton": ML | NIXL | NETWORK,
}

#: Modules that load on machines with a CUDA device only; all others load without triton.
NEEDS_TRITON = [
    "engine.kernels.",
    "engine.step.decode_step",
    "engine.sampling.device_sampler",
    "engine.models.fused",
    "engine.adapters.triton_rows",
    "engine.parallel.one_shot",
    "engine.models.fixed_order",
    "engine.models.compiled_row",
]

# One process forks a child for each package, so that torch is read once: the children of packages that may load torch
# find it loaded. Prints {package: names of the top-level modules that are loaded, or an error}.
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
def in_a_child(*args):
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = load(*args)
        except BaseException:
            answer = traceback.format_exc()[-2000:]
        with open(writer, "w") as out:
            json.dump(answer, out)
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        answer = json.load(pipe)
    os.waitpid(child, 0)
    return answer
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
    with_torch = [package for package in PACKAGES if "torch" not in FORBIDDEN_LIBRARIES[package]]
    bare = [package for package in PACKAGES if package not in with_torch]
    found: dict[str, Any] = run(IMPORT_ALL, json.dumps([bare, with_torch, NEEDS_TRITON]))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_loads_only_allowed_packages_and_libraries(package: str, loaded: dict[str, Any]) -> None:
    assert isinstance(loaded[package], list), loaded[package]
    assert package in loaded[package]
    packages_above = set(PACKAGES) - PACKAGES[package] - {package}
    assert not set(loaded[package]) & (FORBIDDEN_LIBRARIES[package] | packages_above)


def test_the_command_line_imports_no_heavy_library() -> None:
    tops = "import cli.app, json, sys; print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
    assert not set(run(tops)) & (ML | NETWORK | NIXL | {"httpx", "openai", "numpy"})
