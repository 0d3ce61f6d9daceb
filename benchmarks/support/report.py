"""Writes the result file of a benchmark: metrics, command, commit, hardware and package versions."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def commit() -> str:
    """Returns the commit that is measured.

    This is BATON_COMMIT if set (a copy of the tree on a GPU machine has no git history), otherwise git's HEAD, with
    `-dirty` if tracked files other than results differ from it. Empty outside git.
    """
    if from_env := os.environ.get("BATON_COMMIT"):
        return from_env
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    differs = [*git, "diff", "--quiet", "HEAD", "--", ".", ":(exclude)benchmarks/results"]
    dirty = subprocess.run(differs, capture_output=True, check=False).returncode == 1
    return head + "-dirty" if head and dirty else head


def card() -> str:
    """Returns the name of the GPU, or of the processor if there is no GPU."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()}, {torch.get_num_threads()} threads"
    return platform.processor()


def versions(*packages: str) -> dict[str, str]:
    """Returns the versions of Python and of those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write(out: Path | None, name: str, metrics: Mapping[str, object], *packages: str, **more: object) -> None:
    """Writes the result file if `out` is not None.

    Args:
        packages: packages to record the versions of.
        more: further keys of the file, beside the metrics (rows, settings).
    """
    if out is None:
        return
    result = {
        "name": name,
        "commit": commit(),
        "card": card(),
        "versions": versions(*packages),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "metrics": dict(metrics),
        **more,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
