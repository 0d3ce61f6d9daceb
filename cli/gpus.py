"""The GPUs of this machine, as nvidia-smi lists them, and the CPUs near each. CUDA is not needed."""

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
    """A GPU, or a group of GPUs for one tensor-parallel pod."""

    id: str  # As in CUDA_VISIBLE_DEVICES; of a group, with commas.
    name: str = ""
    cpus: str = ""  # CPUs of the GPU's NUMA node, like `0-15,32-47`; empty if unknown or if there is only one node.


def visible_gpus(env: Mapping[str, str] = os.environ, *, sysfs: Path = Path("/sys")) -> tuple[Gpu, ...]:
    """The GPUs that a process with this environment can use, in CUDA's order; none without a driver."""
    listed = _listed(sysfs)
    chosen = env.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not listed:
        return tuple(listed)
    visible: list[Gpu] = []
    for entry in filter(None, (part.strip() for part in chosen.split(","))):
        if entry.lstrip("-").isdecimal():
            if not 0 <= int(entry) < len(listed):
                break  # as in CUDA: entries after a wrong number are invisible
            visible.append(listed[int(entry)])
        else:
            visible.append(next((gpu for gpu in listed if gpu.id.startswith(entry)), Gpu(entry)))
    return tuple(visible)


def assign_gpus(pods: int, gpus: Sequence[Gpu]) -> list[tuple[Gpu, int] | None]:
    """Per pod its GPU and the number of pods on it; None without GPUs. Pods share GPUs only if there are too few."""
    if not gpus:
        return [None] * pods
    places = [number % len(gpus) for number in range(pods)]
    return [(gpus[place], places.count(place)) for place in places]


def grouped(gpus: Sequence[Gpu], size: int) -> tuple[Gpu, ...]:
    """Groups of `size` neighbouring GPUs, one per tensor-parallel pod; remaining GPUs are unused.

    Raises ConfigError if there are GPUs, but too few for one group.
    """
    groups = [gpus[first : first + size] for first in range(0, len(gpus) - size + 1, size)]
    if gpus and not groups:
        name = "tensor_parallel_size"
        raise ConfigError(f"{name}: {size} GPUs are needed, {len(gpus)} are visible", field=name)
    return tuple(Gpu(joined(g.id for g in group), group[0].name, joined(g.cpus for g in group)) for group in groups)


def joined(names: Iterable[str]) -> str:
    """The names without duplicates and empty ones, joined with commas."""
    return ",".join(dict.fromkeys(filter(None, names)))


def run_on(cpus: str) -> None:
    """Restricts this process and its threads to these CPUs. Raises ConfigError if it may use none of them."""
    ranges = [part.partition("-") for part in cpus.split(",")]
    try:
        os.sched_setaffinity(0, {cpu for low, _, high in ranges for cpu in range(int(low), int(high or low) + 1)})
    except OSError as e:
        raise ConfigError(f"cpus: this process may use none of {cpus}", field="cpus") from e


def _listed(sysfs: Path) -> list[Gpu]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []  # the driver does not work; pods report the reason
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.strip()]
    return [Gpu(uuid, name, _cpus_near(bus, sysfs)) for uuid, name, _, bus in rows]


def _cpus_near(bus: str, sysfs: Path) -> str:
    """CPUs of the NUMA node of a PCI device (domain:bus:device.function).

    nvidia-smi writes the domain with eight digits, the kernel with four.
    """
    nodes = sysfs / "devices" / "system" / "node"
    device = sysfs / "bus" / "pci" / "devices" / bus.lower()[-12:]
    try:
        node = int((device / "numa_node").read_text())
        if node < 0 or not (nodes / "node1").exists():
            return ""
        return (nodes / f"node{node}" / "cpulist").read_text().strip()
    except (OSError, ValueError):
        return ""
