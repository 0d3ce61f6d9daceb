"""Settings of pods and of the workers of their ranks. See table.py."""

from __future__ import annotations

import re
import secrets
import socket
from dataclasses import dataclass, field

from common.errors import ConfigError
from common.settings import kinds
from common.settings.engine import PodEngineSettings, require_equal_ranks
from common.settings.process import ModelSettings, TlsSettings, TraceSettings
from common.settings.table import Settings, about, choice_setting, optional_setting, setting, setting_error
from common.types import Role


@dataclass(frozen=True, kw_only=True)
class HandOffSettings(Settings, section="Hand-off between pods"):
    """Cooperation of pods, for pods and stacks."""

    local_prefill: str = setting(
        kinds.LOCAL_PREFILL,
        "auto",
        "Uncached suffixes that a decode pod computes itself: off, up to N tokens, or auto: if it is predicted to be "
        "cheaper than a remote prefill",
        was=("local_prefill_tokens",),
    )
    pull: str = setting(
        kinds.choice("off", "push"),
        "push",
        "A cached prefix of another pod: push (that pod sends it) or off (compute it)",
        was_values={"read": "push"},
    )
    warm_up_s: float = setting(
        kinds.seconds(0, 600),
        0.0,
        "Max seconds in which a new pod pulls the most used prefixes of its peers before it is ready; needs a prefix "
        "index; 0: none",
    )
    warm_up_size: int = setting(kinds.size(0), 4 << 30, "Max bytes of these prefixes, and at most half of the KV pool")
    allow_tcp: bool = setting(kinds.BOOL, False, "Allow TCP, or an unknown transport, for KV in GPU memory")
    staging: str = setting(
        kinds.choice("auto", "on", "off"),
        "auto",
        "KV through host memory: auto (from GPUs, where neither NVLink nor RDMA connects two pods), on (always) or off",
    )
    staging_memory: int = setting(
        kinds.size(1 << 20), 512 << 20, "Host memory that a pod uses for staging, once it is needed"
    )
    staging_dir: str = setting(
        kinds.text("an absolute path", r"/.+", "DIR"),
        "/dev/shm",
        "Directory in memory that pods of one machine share for staging",
    )
    pair_probe_s: float = setting(
        kinds.seconds(0.1, 3600), 10.0, "Seconds without KV to a peer after which a pod sends it a test block"
    )


@dataclass(frozen=True, kw_only=True)
class AdapterSettings(Settings, section="LoRA adapters"):
    """Where pods find LoRA adapters, for pods and stacks."""

    adapter_dir: str | None = optional_setting(
        kinds.text("a directory", r".+", "DIR"),
        "Directory with a sub-folder for each LoRA adapter, which clients name as the model; default: no adapters",
    )
    adapter_names: str | None = optional_setting(
        kinds.text("a file", r".+", "FILE"),
        "Names of the adapters with their sub-folders, NAME = 'FOLDER' (TOML, or JSON if it ends in .json); default: "
        "each sub-folder under its own name",
    )
    adapter_memory: int = setting(
        kinds.size(0),
        0,
        "Host memory for LoRA adapters with a name, like 64GiB: those that were used longest ago are read again when a "
        "request needs them; default: no bound",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("adapter_names", "adapter_memory", "max_adapters"):
            if self.adapter_dir is None and getattr(self, name, None):
                raise setting_error(name, "not used without adapter_dir, where the adapters are")


@dataclass(frozen=True, kw_only=True)
class RankSettings(Settings, section="Hand-off between pods"):
    """Transport and CPUs of the ranks of pods and workers."""

    transport: str = choice_setting(("nixl", "loopback"), "nixl, or loopback within one process (tests)", flag=False)
    net_devices: str | None = optional_setting(kinds.NET_DEVICES, "NICs for KV, as in UCX_NET_DEVICES; default: any")
    cpus: str | None = optional_setting(kinds.CPUS, "CPUs for threads, like 0-15; default: all")


@dataclass(frozen=True, kw_only=True)
class PodConfig(
    ModelSettings,
    PodEngineSettings,
    HandOffSettings,
    AdapterSettings,
    RankSettings,
    TraceSettings,
    TlsSettings,
    command="serve",
    section="Pod",
):
    """One prefill, decode or aggregated pod."""

    role: Role = field(metadata=about(kinds.ROLE, "prefill, decode, or both: an aggregated server", per_process=True))
    name: str | None = optional_setting(kinds.NAME, "Stable name of the pod; default: ROLE-HOST-PORT", per_process=True)
    port: int = setting(kinds.PORT, 0, "gRPC port; default: any free one", per_process=True)
    advertise: str | None = optional_setting(
        kinds.ADDRESS, "Address under which peers reach this pod; default: --host and the port", per_process=True
    )
    metrics_port: int = setting(kinds.PORT, 0, "Prometheus port; default: off", per_process=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.staging == "on" and self.tensor_parallel_size > 1:
            problem = f"staging on cannot be combined with tensor_parallel_size {self.tensor_parallel_size}"
            raise ConfigError(f"{problem}: each rank has its own part of a block; use auto or off", field="staging")

    @property
    def pulls_prefixes(self) -> bool:
        """Whether this pod takes cached prefixes from other pods; without a prefix cache it could not keep them."""
        return self.pull != "off" and self.prefix_cache

    def resolve_name(self) -> str:
        """Returns the configured name, or ROLE-HOST-PORT. With port 0 every call returns another name."""
        if self.name is not None:
            return self.name
        end = f"-{self.port or secrets.token_hex(4)}"
        host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
        return f"{self.role}-{host}"[: 63 - len(end)] + end


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(RankSettings, TlsSettings, command="worker", section="Worker"):
    """The ranks that one machine adds to a tensor-parallel pod of another machine, which sends everything else."""

    tensor_parallel_size: int = setting(kinds.RANK_COUNT, 2, "Ranks of the pod on all machines together")
    tensor_parallel_nodes: int = setting(
        kinds.RANK_COUNT, 2, "Machines of the pod, with equally many ranks", per_process=True
    )
    tensor_parallel_node: int = setting(kinds.RANK_COUNT, 1, "Number of this machine, from 1; 0 is the pod's machine")
    tensor_parallel_master: str = field(
        metadata=about(kinds.ADDRESS, "Address where the pod waits for workers", per_process=True)
    )
    port: int = setting(kinds.PORT, 0, "Port of gRPC health; default: any free one", per_process=True)
    transport: str = choice_setting(("nixl", "loopback"), "nixl or loopback; as for the pod")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_equal_ranks(self.tensor_parallel_size, self.tensor_parallel_nodes)
        if self.tensor_parallel_node >= self.tensor_parallel_nodes:
            below = f"is not below tensor_parallel_nodes ({self.tensor_parallel_nodes}); the pod's machine is 0"
            raise setting_error("tensor_parallel_node", f"{self.tensor_parallel_node} {below}")

    @property
    def ranks(self) -> range:
        """The ranks of this machine."""
        each = self.tensor_parallel_size // self.tensor_parallel_nodes
        return range(each * self.tensor_parallel_node, each * (self.tensor_parallel_node + 1))
