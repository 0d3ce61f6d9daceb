"""Settings of pods, workers, the gateway and the one-machine stack: frozen and validated dataclasses.

A setting has the value of its flag, else of BATON_<FIELD> in the environment, else of the TOML file (flat keys), else
the default. Each field has a SettingKind that parses text and TOML values and checks values of the constructor. Every
error names its field. Unknown keys and unknown BATON_* variables are errors. Kubernetes' service links must be off,
because they inject variables like BATON_*_SERVICE_HOST.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
import secrets
import socket
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from common.errors import ConfigError
from common.settings import kinds
from common.types import Role

ENV_PREFIX = "BATON_"
#: Variables that other code reads.
ENV_NOT_SETTINGS = frozenset({"BATON_CACHE", "BATON_CONFIG"})
DEFAULT_SECRET = "baton-loopback-only"
#: REST port of a gateway.
DEFAULT_PORT = 8000
DEFAULT_DRAIN_S = 30.0

#: Origins of a value, besides a file.
_FLAG, _ENVIRONMENT = " on the command line", " in the environment"


def _setting_field(kind: kinds.SettingKind, default: Any) -> Any:
    return field(default=default, metadata={"kind": kind}, repr=not kind.secret)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class _Config:
    """Base of all settings classes: validation in the constructor, and `load`."""

    host: str
    secret: str

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]
            value = self.__dict__[f.name]
            parsed = _parse(f.name, f.metadata["kind"], value, "")
            if parsed != value or not isinstance(value, (type(parsed), int)):
                raise _invalid_value_error(f.name, f.metadata["kind"], value, "")
        if self.secret == DEFAULT_SECRET and not _is_loopback(self.host):
            raise ConfigError(
                f"secret: listening on {self.host} needs a cluster secret (set BATON_SECRET)", field="secret"
            )

    @classmethod
    def load(cls, *, file: Path | None, env: Mapping[str, str], flags: Mapping[str, object]) -> Self:
        """Reads the settings of one process; flags that are None count as not given.

        Raises ConfigError: one line with the field, its value and the expected kind of value.
        """
        known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
        values: dict[str, Any] = {}
        for source, origin in (
            (_read_toml(file), f" in {file}"),
            (_from_env(known, env), _ENVIRONMENT),
            ({k: v for k, v in flags.items() if v is not None}, _FLAG),
        ):
            for name, raw in source.items():
                if name not in known:
                    known_as = _suggestion(name, known) or f"; known: {', '.join(known)}"
                    raise ConfigError(f"{name}: unknown setting{origin}{known_as}", field=name)
                values[name] = _parse(name, known[name].metadata["kind"], raw, origin)
        for f in known.values():
            if f.default is MISSING and f.name not in values:
                raise ConfigError(f"{_flag(f.name)}: missing: expected {f.metadata['kind'].expected}", field=f.name)
        return cls(**values)


def _parse(name: str, kind: kinds.SettingKind, raw: object, origin: str) -> Any:
    try:
        return kind.parse(raw)
    except (ValueError, OverflowError) as e:
        raise _invalid_value_error(name, kind, raw, origin) from e


def _invalid_value_error(name: str, kind: kinds.SettingKind, raw: object, origin: str) -> ConfigError:
    """Builds the error with the flag or variable as the user typed it; a number in text is shown without quotes."""
    number = isinstance(raw, str) and re.fullmatch(r"[+-]?[\d.]+", raw)
    shown = "" if kind.secret else f" {raw}" if number else f" {raw!r}"
    if origin == _FLAG:
        label, where = _flag(name), ""
    elif origin == _ENVIRONMENT:
        label, where = ENV_PREFIX + name.upper(), ""
    else:
        label, where = name, origin
    return ConfigError(f"{label}: invalid value{shown}{where}: expected {kind.expected}", field=name)


def _suggestion(name: str, known: Iterable[str], spelt: Callable[[str], str] = str) -> str:
    """Returns the end of an error message: the known setting closest to `name`; empty if none is close."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8)
    return f"; did you mean {spelt(close[0])}?" if close else ""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _read_toml(file: Path | None) -> Mapping[str, object]:
    if file is None:
        return {}
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"config: cannot read {file}: {e.strerror}", field="config") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"config: {file} is not TOML: {e}", field="config") from e


def _from_env(known: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, object]:
    """Returns this class's settings from variables. Ignores variables of other classes; unknown ones are errors."""
    values: dict[str, object] = {}
    anywhere = {f.name for c in (PodConfig, WorkerConfig, GatewayConfig, UpConfig) for f in fields(c)}
    for variable, raw in env.items():
        if not variable.startswith(ENV_PREFIX) or variable in ENV_NOT_SETTINGS:
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name not in anywhere or variable != variable.upper():
            meant = _suggestion(name, anywhere, lambda known: ENV_PREFIX + known.upper())
            raise ConfigError(f"{variable}: unknown setting in the environment{meant}", field=name)
        if name in known:
            values[name] = raw
    return values


@dataclass(frozen=True, kw_only=True)
class PodConfig(_Config):
    """One prefill, decode or aggregated pod."""

    role: Role = field(metadata={"kind": kinds.ROLE})
    #: A model directory or a known name.
    model: str = _setting_field(kinds.MODEL, "smollm2")
    #: The model's name for clients; None: the model's own name.
    served_name: str | None = _setting_field(kinds.optional(kinds.MODEL), None)
    #: A name that stays the same over restarts; None: see resolve_name.
    name: str | None = _setting_field(kinds.optional(kinds.NAME), None)
    #: Address to listen on. All but loopback addresses need a `secret`.
    host: str = _setting_field(kinds.HOST, "127.0.0.1")
    #: gRPC port; 0: any free one.
    port: int = _setting_field(kinds.PORT, 0)
    #: host:port under which peers reach this pod; None: `host` and the bound port.
    advertise: str | None = _setting_field(kinds.optional(kinds.ADDRESS), None)
    #: URL of the prefix index; None: no index.
    redis: str | None = _setting_field(kinds.REDIS, None)
    #: The cluster secret, equal on all pods and gateways.
    secret: str = _setting_field(kinds.SECRET, DEFAULT_SECRET)
    device: str = _setting_field(kinds.DEVICE, "auto")
    dtype: str = _setting_field(kinds.DTYPE, "auto")
    #: auto: as `dtype`; fp8_e4m3: KV in 8 bits. Pods that hand over to each other must agree.
    kv_dtype: str = _setting_field(kinds.KV_DTYPE, "auto")
    #: dummy: random weights from `weights_seed`; the directory then needs no weights.
    load_format: str = _setting_field(kinds.LOAD_FORMAT, "auto")
    weights_seed: int = _setting_field(kinds.SEED, 0)
    #: CPU threads for computing; 0: automatic.
    threads: int = _setting_field(kinds.THREADS, 0)
    #: Tokens per KV block.
    block_size: int = _setting_field(kinds.BLOCK_SIZE, 16)
    #: Bytes of the KV pool, of each rank. 0: 512 MiB on a CPU; on a GPU the rest of gpu_memory_utilization.
    kv_memory: int = _setting_field(kinds.size(0), 0)
    #: Bytes of host memory that keep KV blocks evicted from the pool, until a prompt matches them; 0: none.
    host_cache: int = _setting_field(kinds.size(0), 0)
    #: Share of the GPU's memory that the pod may use.
    gpu_memory_utilization: float = _setting_field(kinds.GPU_SHARE, 0.9)
    #: Longest prompt plus output, in tokens; 0: the model's limit.
    max_model_len: int = _setting_field(kinds.MODEL_LEN, 0)
    #: Most tokens of one step, and of one prompt chunk. 0: 256 on a CPU, 2048 on a GPU. A GPU step without decodes
    #: then takes 8192 tokens, and 16384 of a prompt that is alone.
    chunk_tokens: int = _setting_field(kinds.TOKEN_COUNT, 0)
    #: Most sequences that run at once. 0: 64 on a CPU, 256 on a GPU.
    max_seqs: int = _setting_field(kinds.integer(0, 65536), 0)
    #: Decode steps run as CUDA graphs, captured at the start.
    cuda_graphs: bool = _setting_field(kinds.BOOL, True)
    #: Whole chunks that end within the first `chunk_graphs` tokens of a prompt run as CUDA graphs; 0: none.
    chunk_graphs: int = _setting_field(kinds.TOKEN_COUNT, 0)
    #: A step is launched before the result of the last one is known; None: on a GPU.
    overlap: bool | None = _setting_field(kinds.optional(kinds.BOOL), None)
    #: The proposer that drafts tokens: none, ngram, suffix, draft_model or eagle.
    speculation: str = _setting_field(kinds.SPECULATION, "none")
    #: Directory of the draft model or EAGLE head, the same on all pods that hand over to each other.
    speculation_model: str | None = _setting_field(kinds.optional(kinds.MODEL), None)
    #: Most drafts per sequence and step.
    speculation_tokens: int = _setting_field(kinds.DRAFT_TOKENS, 4)
    #: coupled: answers are the same as without drafts; rejection: only their distribution is the same.
    speculation_accept: str = _setting_field(kinds.ACCEPTANCE, "coupled")
    #: Uncached suffixes that a decode pod computes itself: off, auto (if it is predicted to be cheaper than a remote
    #: prefill), or a number: all suffixes of up to this many tokens.
    local_prefill: str = _setting_field(kinds.LOCAL_PREFILL, "auto")
    #: Most tokens of a local prefill in one step that also decodes. 0: 64 on a CPU, 256 on a GPU.
    local_chunk_tokens: int = _setting_field(kinds.TOKEN_COUNT, 0)
    #: push: the pod that holds a prefix sends it to a prefill pod that lacks it; off: the prefill pod computes it.
    pull: str = _setting_field(kinds.PULL, "push")
    #: nixl, or loopback within one process (tests).
    transport: str = _setting_field(kinds.choice("nixl", "loopback"), "nixl")
    #: Checksums are compared for every block that moves to another pod, or to host memory and back (slow).
    checksums: bool = _setting_field(kinds.BOOL, False)
    #: KV in device memory may travel over TCP, or over a transport that cannot be determined.
    allow_tcp: bool = _setting_field(kinds.BOOL, False)
    #: NICs for KV, in the format of UCX_NET_DEVICES; None: UCX chooses.
    net_devices: str | None = _setting_field(kinds.optional(kinds.NET_DEVICES), None)
    #: CPUs that the pod's threads run on; None: all.
    cpus: str | None = _setting_field(kinds.optional(kinds.CPUS), None)
    #: Ranks (devices, or processes on a CPU) that compute the model together.
    tensor_parallel_size: int = _setting_field(kinds.RANK_COUNT, 1)
    #: Machines that the ranks are spread over, in equal numbers.
    tensor_parallel_nodes: int = _setting_field(kinds.RANK_COUNT, 1)
    #: host:port on this machine where `baton worker` of the other machines connect.
    tensor_parallel_master: str | None = _setting_field(kinds.optional(kinds.ADDRESS), None)
    #: Prometheus port; 0: off.
    metrics_port: int = _setting_field(kinds.PORT, 0)
    #: Most seconds from SIGTERM to the end of the process.
    drain_s: float = _setting_field(kinds.DRAIN, DEFAULT_DRAIN_S)
    log_level: str = _setting_field(kinds.LOG_LEVEL, "info")
    #: auto: text on a terminal, otherwise JSON.
    log_format: str = _setting_field(kinds.LOG_FORMAT, "auto")
    #: Where spans go, see parse_trace_target; None: nowhere.
    traces: str | None = _setting_field(kinds.TRACE_TARGET, None)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_whole_blocks(self.chunk_tokens, self.block_size)
        _require_draft_model(self.speculation, self.speculation_model)
        _require_equal_ranks(self.tensor_parallel_size, self.tensor_parallel_nodes)

    def resolve_name(self) -> str:
        """Returns the configured name, or ROLE-HOST-PORT. With port 0 every call returns another name."""
        if self.name is not None:
            return self.name
        end = f"-{self.port or secrets.token_hex(4)}"
        host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
        return f"{self.role}-{host}"[: 63 - len(end)] + end


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(_Config):
    """The ranks that one machine adds to a tensor-parallel pod of another machine.

    The pod sends the worker everything else. Fields with the names of PodConfig mean the same here.
    """

    #: Address of the gRPC health service.
    host: str = _setting_field(kinds.HOST, "127.0.0.1")
    #: Port of the gRPC health service; 0: any free one.
    port: int = _setting_field(kinds.PORT, 0)
    secret: str = _setting_field(kinds.SECRET, DEFAULT_SECRET)
    tensor_parallel_size: int = _setting_field(kinds.RANK_COUNT, 2)
    tensor_parallel_nodes: int = _setting_field(kinds.RANK_COUNT, 2)
    #: Number of this machine, from 1; the pod's machine is 0.
    tensor_parallel_node: int = _setting_field(kinds.RANK_COUNT, 1)
    #: host:port of the pod's tensor_parallel_master.
    tensor_parallel_master: str = field(metadata={"kind": kinds.ADDRESS})
    transport: str = _setting_field(kinds.choice("nixl", "loopback"), "nixl")
    net_devices: str | None = _setting_field(kinds.optional(kinds.NET_DEVICES), None)
    cpus: str | None = _setting_field(kinds.optional(kinds.CPUS), None)
    #: Most seconds that the worker waits for the pod's end after SIGTERM.
    drain_s: float = _setting_field(kinds.DRAIN, DEFAULT_DRAIN_S)
    log_level: str = _setting_field(kinds.LOG_LEVEL, "info")
    log_format: str = _setting_field(kinds.LOG_FORMAT, "auto")

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_equal_ranks(self.tensor_parallel_size, self.tensor_parallel_nodes)
        if self.tensor_parallel_node >= self.tensor_parallel_nodes:
            raise ConfigError(
                f"tensor_parallel_node: {self.tensor_parallel_node} is not below tensor_parallel_nodes "
                f"({self.tensor_parallel_nodes}); the pod's machine is 0",
                field="tensor_parallel_node",
            )

    @property
    def ranks(self) -> range:
        """The ranks of this machine."""
        each = self.tensor_parallel_size // self.tensor_parallel_nodes
        return range(each * self.tensor_parallel_node, each * (self.tensor_parallel_node + 1))


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(_Config):
    """The gateway. Pods are found by the index in `redis`, the static list `pods`, Kubernetes, or several of these."""

    host: str = _setting_field(kinds.HOST, "127.0.0.1")
    port: int = _setting_field(kinds.PORT, DEFAULT_PORT)
    #: Port of the public gRPC API; 0: off.
    grpc_port: int = _setting_field(kinds.PORT, 0)
    #: URL of the prefix index; None: no index.
    redis: str | None = _setting_field(kinds.REDIS, None)
    #: host:port of pods that the gateway always uses.
    pods: tuple[str, ...] = _setting_field(kinds.tuple_of(kinds.ADDRESS), ())
    #: k8s: pods are also found by the EndpointSlices of `k8s_services`; works inside a Kubernetes cluster only.
    discovery: str = _setting_field(kinds.DISCOVERY, "index")
    k8s_services: tuple[str, ...] = _setting_field(kinds.SERVICES, ("baton-prefill", "baton-decode"))
    #: The cluster secret, equal on all pods and gateways.
    secret: str = _setting_field(kinds.SECRET, DEFAULT_SECRET)
    #: Directory (or known name) with tokenizer and chat template.
    model: str = _setting_field(kinds.MODEL, "smollm2")
    #: The model's name for clients; None: the model's own name.
    served_name: str | None = _setting_field(kinds.optional(kinds.MODEL), None)
    #: Several models as NAME=DIR, in place of `model` and `served_name`.
    models: tuple[str, ...] = _setting_field(kinds.tuple_of(kinds.NAMED_MODEL), ())
    #: Further names of models, as NAME=MODEL.
    alias: tuple[str, ...] = _setting_field(kinds.tuple_of(kinds.ALIAS), ())
    #: Files of API keys, or `redis` for the keys in redis; empty: clients need no key.
    api_keys: tuple[str, ...] = _setting_field(kinds.API_KEYS, ())
    #: /metrics needs no key.
    open_metrics: bool = _setting_field(kinds.BOOL, True)
    #: Larger bodies get status 413.
    max_body_bytes: int = _setting_field(kinds.size(1024), 8 << 20)
    #: Deadline of requests that set none.
    request_timeout_s: float = _setting_field(kinds.seconds(0.1, 86400), 600.0)
    #: Further requests get status 429.
    max_inflight: int = _setting_field(kinds.integer(1, 1 << 20), 1024)
    #: Seconds that /v1/responses stay in redis; 0: they are not stored.
    response_ttl_s: float = _setting_field(kinds.seconds(0, 30 * 86400), 3600.0)
    #: Bytes of the stored responses of one tenant.
    response_memory: int = _setting_field(kinds.size(0), 64 << 20)
    #: Most requests at the pods at once; 0: any number.
    max_running: int = _setting_field(kinds.integer(0, 1 << 20), 0)
    #: Most requests that wait for `max_running`.
    max_queue: int = _setting_field(kinds.integer(0, 1 << 20), 512)
    #: A request whose first token is predicted to come later is refused at arrival; 0: only its deadline counts.
    max_ttft_s: float = _setting_field(kinds.seconds(0, 86400), 60.0)
    #: How models write tool calls; auto: derived from each model's chat template.
    tool_parser: str = _setting_field(kinds.TOOL_PARSER, "auto")
    #: How models mark reasoning; auto: derived from each model's chat template.
    reasoning_parser: str = _setting_field(kinds.REASONING_PARSER, "auto")
    #: Most seconds from SIGTERM to the end of the process.
    drain_s: float = _setting_field(kinds.DRAIN, DEFAULT_DRAIN_S)
    #: Part of drain_s in which new requests are still served, so that load balancers see the drain first.
    drain_delay_s: float = _setting_field(kinds.DRAIN, 0.0)
    log_level: str = _setting_field(kinds.LOG_LEVEL, "info")
    log_format: str = _setting_field(kinds.LOG_FORMAT, "auto")
    #: Where spans go, see parse_trace_target; None: nowhere.
    traces: str | None = _setting_field(kinds.TRACE_TARGET, None)
    #: Share of requests that are traced, of those for which the client does not decide it.
    trace_sample: float = _setting_field(kinds.RATIO, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drain_delay_s > self.drain_s:
            raise ConfigError("drain_delay_s: longer than drain_s, which it is a part of", field="drain_delay_s")
        if self.models and self.served_name is not None:
            raise ConfigError(
                "served_name: not allowed together with models, which names each model", field="served_name"
            )
        _parse_name_value_pairs("models", self.models)
        _parse_name_value_pairs("alias", self.alias)

    def served_models(self) -> dict[str, str]:
        """Returns served name -> directory or known name per model; served name "" means the model's own name."""
        return _parse_name_value_pairs("models", self.models) or {self.served_name or "": self.model}

    def aliases(self) -> dict[str, str]:
        """Returns the name of the model for each alias."""
        return _parse_name_value_pairs("alias", self.alias)


def _parse_name_value_pairs(setting: str, pairs: Sequence[str]) -> dict[str, str]:
    """Parses NAME=VALUE pairs. Raises ConfigError if a name occurs twice."""
    named = dict(pair.split("=", 1) for pair in pairs)
    if len(named) != len(pairs):
        raise ConfigError(f"{setting}: a name occurs twice", field=setting)
    return named


@dataclass(frozen=True, kw_only=True)
class UpConfig(_Config):
    """A stack on one machine: `prefill` + `decode` pods and a gateway.

    A field with the name of a PodConfig or GatewayConfig field is that setting, for every process that has it.
    Exceptions are documented below.
    """

    model: str = _setting_field(kinds.MODEL, "smollm2")
    served_name: str | None = _setting_field(kinds.optional(kinds.MODEL), None)
    #: Number of prefill pods.
    prefill: int = _setting_field(kinds.integer(1, 64), 1)
    #: Number of decode pods.
    decode: int = _setting_field(kinds.integer(1, 64), 1)
    #: URL of the prefix index; None: an embedded Valkey.
    redis: str | None = _setting_field(kinds.REDIS, None)
    api_keys: tuple[str, ...] = _setting_field(kinds.API_KEYS, ())
    host: str = _setting_field(kinds.HOST, "127.0.0.1")
    #: REST port; None: DEFAULT_PORT or the next free one after it; 0: any free one.
    port: int | None = _setting_field(kinds.optional(kinds.PORT), None)
    #: gRPC port; 0: any free one.
    grpc_port: int = _setting_field(kinds.PORT, 0)
    device: str = _setting_field(kinds.DEVICE, "auto")
    dtype: str = _setting_field(kinds.DTYPE, "auto")
    kv_dtype: str = _setting_field(kinds.KV_DTYPE, "auto")
    load_format: str = _setting_field(kinds.LOAD_FORMAT, "auto")
    weights_seed: int = _setting_field(kinds.SEED, 0)
    max_model_len: int = _setting_field(kinds.MODEL_LEN, 0)
    chunk_tokens: int = _setting_field(kinds.TOKEN_COUNT, 0)
    speculation: str = _setting_field(kinds.SPECULATION, "none")
    speculation_model: str | None = _setting_field(kinds.optional(kinds.MODEL), None)
    speculation_tokens: int = _setting_field(kinds.DRAFT_TOKENS, 4)
    speculation_accept: str = _setting_field(kinds.ACCEPTANCE, "coupled")
    local_prefill: str = _setting_field(kinds.LOCAL_PREFILL, "auto")
    pull: str = _setting_field(kinds.PULL, "push")
    block_size: int = _setting_field(kinds.BLOCK_SIZE, 16)
    kv_memory: int = _setting_field(kinds.size(0), 0)
    #: Like PodConfig.host_cache; None: a part of the machine's free memory for pods on GPUs, otherwise 0.
    host_cache: int | None = _setting_field(kinds.optional(kinds.size(0)), None)
    #: Share of a GPU's memory for all pods on this GPU together.
    gpu_memory_utilization: float = _setting_field(kinds.GPU_SHARE, 0.9)
    #: Ranks per pod. Each pod has this many GPUs to itself as long as enough are visible.
    tensor_parallel_size: int = _setting_field(kinds.RANK_COUNT, 1)
    allow_tcp: bool = _setting_field(kinds.BOOL, False)
    #: NICs of each GPU, in the order of the GPUs.
    net_devices: tuple[str, ...] = _setting_field(kinds.tuple_of(kinds.NET_DEVICES), ())
    threads: int = _setting_field(kinds.THREADS, 0)
    #: Longest answer to `--once`.
    max_tokens: int = _setting_field(kinds.integer(1, 1 << 24), 96)
    #: Most seconds that running answers get after the stack is asked to stop.
    drain_s: float = _setting_field(kinds.DRAIN, DEFAULT_DRAIN_S)
    tool_parser: str = _setting_field(kinds.TOOL_PARSER, "auto")
    reasoning_parser: str = _setting_field(kinds.REASONING_PARSER, "auto")
    #: Directory of the log files; None: a new directory in the user's state directory.
    log_dir: str | None = _setting_field(kinds.optional(kinds.text("a directory", r".+")), None)
    secret: str = _setting_field(kinds.SECRET, DEFAULT_SECRET)
    log_level: str = _setting_field(kinds.LOG_LEVEL, "info")
    log_format: str = _setting_field(kinds.LOG_FORMAT, "auto")
    traces: str | None = _setting_field(kinds.TRACE_TARGET, None)
    trace_sample: float = _setting_field(kinds.RATIO, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_whole_blocks(self.chunk_tokens, self.block_size)
        _require_draft_model(self.speculation, self.speculation_model)


def _require_equal_ranks(ranks: int, nodes: int) -> None:
    if ranks % nodes:
        raise ConfigError(
            f"tensor_parallel_nodes: {nodes} does not divide tensor_parallel_size {ranks}",
            field="tensor_parallel_nodes",
        )


def _require_draft_model(speculation: str, model: str | None) -> None:
    if (speculation in ("draft_model", "eagle")) != (model is not None):
        problem = "missing: expected a directory, needed" if model is None else "not used"
        raise ConfigError(f"speculation_model: {problem} by speculation {speculation}", field="speculation_model")


def _require_whole_blocks(chunk_tokens: int, block_size: int) -> None:
    if 0 < chunk_tokens < block_size:
        raise ConfigError(
            f"chunk_tokens: {chunk_tokens} is less than one block (block_size {block_size})", field="chunk_tokens"
        )
