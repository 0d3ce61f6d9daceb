"""Memory of this process's control group (a container's limit, where the kernel ends it), else of the machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes. used: what cannot be given back at once. free: what may still be taken, by the limit and the machine."""

    used: int
    limit: int
    free: int


def host_memory(cgroup: Path = CGROUP) -> HostMemory:
    """Of now. Files that the kernel caches do not count as used, as in Kubernetes' working set."""
    import psutil

    machine = psutil.virtual_memory()
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit != "max" and int(limit) <= machine.total:
            stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
            used = max(0, int((cgroup / "memory.current").read_text()) - int(stat["inactive_file"]))
            return HostMemory(used, int(limit), max(0, min(int(limit) - used, machine.available)))
    except (OSError, ValueError, KeyError):
        pass  # not in a control group of version 2 with a limit of its own
    return HostMemory(machine.total - machine.available, machine.total, machine.available)
