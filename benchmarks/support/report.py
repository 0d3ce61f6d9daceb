"""What every benchmark needs: its command line, measured times, its table of metrics, and its result file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from loadtest.slo import percentile

ROOT = Path(__file__).resolve().parents[2]
#: Metrics for which more is better begin with one of these names or end with tok_s.
RATES = ("tokens_per_step", "acceptance", "speedup", "ratio_")


def arguments(description: str | None, metrics: str = "") -> argparse.ArgumentParser:
    """Returns a parser with --out. The help text shows the description and, after the options, the metrics."""
    parser = argparse.ArgumentParser(
        description=description, epilog=metrics, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="result file")
    return parser


def pairs(texts: Iterable[str]) -> dict[str, str]:
    """Parses NAME=VALUE texts."""
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


def show(metrics: Mapping[str, object]) -> None:
    for name, value in metrics.items():
        print(f"{name:40} {value}", flush=True)


@dataclass(slots=True)
class MetricTable:
    """Prints each metric with its limit, and keeps all for the result file."""

    metrics: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, value: float, note: str = "", *, limit: float | None = None, **more: float) -> None:
        """Adds a metric. limit: the least time, or the highest rate, that the device allows. more: keys of its row."""
        more_is_better = name.startswith(RATES) or name.endswith("tok_s")
        more = {key: round(number, 4) for key, number in more.items()}
        row = {"name": name, "value": round(value, 4), **more}
        shown = f"{name:<28}{value:>10.3f}"
        if limit is not None:
            row |= {"limit": round(limit, 3), "share": round(value / limit if more_is_better else limit / value, 4)}
            shown += f"  limit {limit:.2f} ({row['share']:.1%})"
        self.metrics[name] = row["value"]
        self.rows.append(row)
        print(f"{shown}  {note or more or ''}", flush=True)


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
        "command": _command(),
        "metrics": dict(metrics),
        **more,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")


def _command() -> str:
    """Returns the command line of this process. A module that runs with -m has its name, not its path."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    argv = sys.argv if module is None else ["-m", module.name.removesuffix(".__main__"), *sys.argv[1:]]
    return shlex.join([Path(sys.executable).name, *argv])


SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}


def ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def percentiles_ms(seconds: Sequence[float], *names: str) -> dict[str, float]:
    """Returns the named percentiles (see SHARES) in milliseconds."""
    return {name: ms(percentile(seconds, SHARES[name])) for name in names}


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Returns p50, p90, p99, p99.9, mean and maximum in milliseconds, and the count."""
    more = {"mean": ms(statistics.fmean(seconds)), "max": ms(max(seconds)), "count": len(seconds)}
    return percentiles_ms(seconds, *SHARES) | more


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Runs the work. Returns the seconds and its result."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


async def timed_calls(call: Callable[[], Awaitable[Any]], count: int) -> list[float]:
    """Awaits `count` calls in turn. Returns the seconds of each."""
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        await call()
        seconds.append(time.perf_counter() - began)
    return seconds
