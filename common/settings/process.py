"""Settings that several services have: of every process, certificates, traces, and the model. See table.py."""

from __future__ import annotations

from dataclasses import dataclass

from common.settings import kinds
from common.settings.table import Settings, choice_setting, optional_setting, setting, setting_error

DEFAULT_SECRET = "baton-loopback-only"


@dataclass(frozen=True, kw_only=True)
class ServiceSettings(Settings, section="Process"):
    """Settings of every process."""

    host: str = setting(
        kinds.HOST, "127.0.0.1", "Address to listen on; all but loopback need BATON_SECRET", per_process=True
    )
    secret: str = setting(kinds.SECRET, DEFAULT_SECRET, "Cluster secret, equal on all pods and gateways", flag=False)
    drain_s: float = setting(kinds.seconds(0, 3600), 30.0, "Max seconds for running requests to end after SIGTERM")
    stuck_step_s: float = setting(
        kinds.seconds(0, 3600),
        10.0,
        "Seconds without progress after which an engine step or a loop is stuck, and a request on a pod is stalled; a "
        "step has at least 20 times its predicted time; after twice this time a stuck process ends; 0: never",
    )
    log_level: str = setting(kinds.choice("debug", "info", "warning", "error"), "info", "debug, info, warning or error")
    log_format: str = choice_setting(("auto", "json", "text"), "json, text, or auto: text on a terminal")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.secret == DEFAULT_SECRET and not kinds.is_loopback(self.host):
            raise setting_error("secret", f"listening on {self.host} needs a cluster secret (set BATON_SECRET)")


@dataclass(frozen=True, kw_only=True)
class TlsSettings(ServiceSettings, section="Process"):
    """Certificates of one service, for calls between services."""

    tls_dir: str | None = optional_setting(
        kinds.text("a directory", r".+", "DIR"),
        "Directory with ca.pem, cert.pem and key.pem of this service (`baton certs`), for mutual TLS between services; "
        "needed if --host is not a loopback address; default: no TLS",
        per_process=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        master = getattr(self, "tensor_parallel_master", None)
        for host, what in ((self.host, "listening on"), ((master or "").rpartition(":")[0], "a group of machines at")):
            if host and self.tls_dir is None and not kinds.is_loopback(host):
                problem = f"missing: {what} {host} needs certificates (make them with `baton certs DIR`)"
                raise setting_error("tls_dir", problem)


@dataclass(frozen=True, kw_only=True)
class TraceSettings(Settings, section="Process"):
    """Tracing of pods, gateways and stacks."""

    traces: str | None = optional_setting(
        kinds.TRACES, "Target of spans: otlp, http://HOST:4318, grpc://HOST:4317 or file:PATH; default: off"
    )


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings, section="Model and index"):
    """The model and the prefix index, for pods, gateways and stacks."""

    model: str = setting(
        kinds.MODEL, "smollm2", "A model of the hub (OWNER/NAME[@REVISION]), a model directory, or smollm2"
    )
    served_name: str | None = optional_setting(
        kinds.text("a name", r".+"),
        "Name of the model for clients; default: the model's own",
        also=("served_model_name",),
    )
    redis: str | None = optional_setting(
        kinds.REDIS,
        "URL of the prefix index: redis://, rediss://, unix://, redis+sentinel://, redis+cluster://; default: none",
    )
