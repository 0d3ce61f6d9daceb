"""The one shape of every result file: what ran, on which commit and card, with which versions, and the figures."""

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
    """BATON_COMMIT where it is set: a copy of the tree, on a GPU machine, cannot tell. Else the commit that is checked
    out, with `-dirty` when tracked files other than results differ from it; empty outside git.
    """
    if told := os.environ.get("BATON_COMMIT"):
        return told
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    differs = [*git, "diff", "--quiet", "HEAD", "--", ".", ":(exclude)benchmarks/results"]
    dirty = subprocess.run(differs, capture_output=True, check=False).returncode == 1
    return head + "-dirty" if head and dirty else head


def card() -> str:
    """Name of the GPU, or of the processor where there is none."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()}, {torch.get_num_threads()} threads"
    return platform.processor()


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python and of the packages named; absent ones are left out."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write(out: Path | None, name: str, metrics: Mapping[str, object], *packages: str, **more: object) -> None:
    """Writes the result file (nothing when out is None); `more` goes in beside the metrics (rows, settings)."""
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
