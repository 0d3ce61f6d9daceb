"""Settings of `baton up`, the one-machine stack. See table.py."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ConfigError
from common.settings import kinds
from common.settings.engine import EngineSettings, SpeculationSettings
from common.settings.gateway import DEFAULT_PORT, ApiSettings
from common.settings.pod import AdapterSettings, HandOffSettings
from common.settings.process import ServiceSettings
from common.settings.table import optional_setting, setting
from common.types import Role


@dataclass(frozen=True, kw_only=True)
class UpConfig(
    ApiSettings,
    EngineSettings,
    SpeculationSettings,
    HandOffSettings,
    AdapterSettings,
    ServiceSettings,
    command="up",
    section="Stack",
):
    """A stack on one machine. Settings of pods or gateways apply to every process that has them."""

    prefill: int = setting(kinds.integer(1, 64), 1, "Number of prefill pods")
    decode: int = setting(kinds.integer(1, 64), 1, "Number of decode pods")
    aggregated: int = setting(
        kinds.integer(0, 64), 0, "Number of pods with both roles, in place of prefill and decode pods; default: none"
    )
    port: int | None = optional_setting(
        kinds.PORT,
        f"REST port of the gateway; 0: any free one; default: {DEFAULT_PORT} or the next free one",
        per_process=True,
    )
    grpc_port: int = setting(kinds.PORT, 0, "Port of the public gRPC API; default: any free one", per_process=True)
    redis: str | None = optional_setting(
        kinds.REDIS, "URL of the prefix index, as for pods; default: an embedded Valkey"
    )
    host_cache: int | None = optional_setting(
        kinds.size(0),
        "Host memory of each rank for KV blocks that the pool evicts, like 32GiB; default: none on a CPU, with several "
        "ranks or with kv_groups, else half of the free memory for all pods, at most 32GiB for each",
    )
    gpu_memory_utilization: float = setting(kinds.GPU_SHARE, 0.9, "Share of a GPU's memory for all its pods together")
    net_devices: tuple[str, ...] = setting(
        kinds.tuple_of(kinds.NET_DEVICES),
        (),
        "NIC of each GPU, in the order of the GPUs, as UCX names them; default: any",
    )
    log_dir: str | None = optional_setting(
        kinds.text("a directory", r".+"),
        "Directory for logs; default: a new one in the user's state directory",
        per_process=True,
    )
    tls_dir: str | None = optional_setting(
        kinds.text("a directory", r".+", "DIR"),
        "Directory that `baton certs` made, for TLS between the processes; default: certificates for this run only",
        per_process=True,
    )
    max_tokens: int = setting(kinds.integer(1, 1 << 24), 96, "Longest answer to --once, in tokens")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prefill", "decode"):
            if self.aggregated and (count := getattr(self, name)) != 1:
                problem = f"{name} {count} cannot be combined with aggregated {self.aggregated}: these pods do both"
                raise ConfigError(problem, field=name)

    @property
    def pods(self) -> dict[Role, int]:
        """The number of pods of each role."""
        if self.aggregated:
            return {Role.BOTH: self.aggregated}
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode}

    @property
    def num_pods(self) -> int:
        """The number of pods of all roles together."""
        return sum(self.pods.values())
