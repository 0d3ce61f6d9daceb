"""The GPUs of this machine, as nvidia-smi lists them, and the CPUs near each. Nothing here needs CUDA."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError

QUERY_S = 20.0
_FIELDS = "uuid,name,memory.total,pci.bus_id"


@dataclass(frozen=True, slots=True)
class Gpu:
    """id: what CUDA_VISIBLE_DEVICES calls it. cpus: of its NUMA node, as in `0-15,32-47`; empty where there is one node
    only, or nobody knows.
    """

    id: str
    name: str = ""
    cpus: str = ""


def visible_gpus(env: Mapping[str, str] = os.environ, *, sysfs: Path = Path("/sys")) -> tuple[Gpu, ...]:
    """Those that a process of this environment may use, in its order; none without a driver."""
    there = _listed(sysfs)
    chosen = env.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not there:
        return tuple(there)
    visible: list[Gpu] = []
    for entry in filter(None, (part.strip() for part in chosen.split(","))):
        if entry.lstrip("-").isdecimal():
            if not 0 <= int(entry) < len(there):
                break  # as CUDA does: what follows a wrong number is not visible
            visible.append(there[int(entry)])
        else:
            visible.append(next((gpu for gpu in there if gpu.id.startswith(entry)), Gpu(entry)))
    return tuple(visible)


def shared_out(pods: int, gpus: Sequence[Gpu]) -> list[tuple[Gpu, int] | None]:
    """For each pod its GPU and how many pods that has, one GPU each as long as there are enough; None without any."""
    if not gpus:
        return [None] * pods
    places = [number % len(gpus) for number in range(pods)]
    return [(gpus[place], places.count(place)) for place in places]


def grouped(gpus: Sequence[Gpu], size: int) -> tuple[Gpu, ...]:
    """Neighbours as one each, for pods of so many ranks; what is left over is left out. ConfigError when there are too
    few for one.
    """
    groups = [gpus[first : first + size] for first in range(0, len(gpus) - size + 1, size)]
    if gpus and not groups:
        raise ConfigError(
            f"tensor_parallel_size: {size} GPUs are needed, {len(gpus)} are visible", field="tensor_parallel_size"
        )
    return tuple(Gpu(joined(g.id for g in group), group[0].name, joined(g.cpus for g in group)) for group in groups)


def joined(names: Iterable[str]) -> str:
    """Each once, with commas."""
    return ",".join(dict.fromkeys(filter(None, names)))


def run_on(cpus: str) -> None:
    """Keeps this process, and all threads that it starts, on these CPUs. Raises ConfigError when there are none."""
    wanted: set[int] = set()
    for part in cpus.split(","):
        first, _, last = part.partition("-")
        wanted |= set(range(int(first), int(last or first) + 1))
    try:
        os.sched_setaffinity(0, wanted)
    except OSError as e:
        raise ConfigError(f"cpus: none of {cpus} is there for this process", field="cpus") from e


def _listed(sysfs: Path) -> list[Gpu]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []  # a driver that does not work: pods will say what is wrong with it
    rows = [[cell.strip() for cell in line.split(",")] for line in told.splitlines() if line.strip()]
    return [Gpu(uuid, name, _cpus_near(bus, sysfs)) for uuid, name, _, bus in rows]


def _cpus_near(bus: str, sysfs: Path) -> str:
    """bus: domain:bus:device.function; nvidia-smi writes the domain with eight digits, the kernel with four."""
    nodes = sysfs / "devices" / "system" / "node"
    device = sysfs / "bus" / "pci" / "devices" / bus.lower()[-12:]
    try:
        node = int((device / "numa_node").read_text())
        if node < 0 or not (nodes / "node1").exists():
            return ""
        return (nodes / f"node{node}" / "cpulist").read_text().strip()
    except (OSError, ValueError):
        return ""
