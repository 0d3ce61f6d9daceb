"""Configuration of pods, the gateway and the one-machine stack: frozen, validated, every error names its field.

A value comes from the flags, else BATON_<FIELD> in the environment, else the TOML file (flat keys), else the default.
Each field carries a Kind that turns text or a TOML value into the field's type and refuses everything else; the same
check runs on values given to the constructor. Unknown keys are errors, and so are BATON_* variables that no
configuration knows (in Kubernetes switch service links off: they inject BATON_*_SERVICE_HOST and the like).
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
ENV_NOT_SETTINGS = frozenset({"BATON_CACHE", "BATON_CONFIG"})  # read elsewhere, no fields
DEFAULT_SECRET = "baton-loopback-only"
DEFAULT_PORT = 8000  # of a gateway
DEFAULT_DRAIN_S = 30.0

_FLAG, _ENVIRONMENT = " on the command line", " in the environment"  # where a value came from, unless it is a file


def _setting_field(kind: kinds.SettingKind, default: Any) -> Any:
    return field(default=default, metadata={"kind": kind}, repr=not kind.secret)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class _Config:
    """What all configurations share: validation on construction, and load."""

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
                f"secret: a cluster secret is needed to listen on {self.host} (set BATON_SECRET)", field="secret"
            )

    @classmethod
    def load(cls, *, file: Path | None, env: Mapping[str, str], flags: Mapping[str, object]) -> Self:
        """Reads one configuration; flags that are None count as not given.

        Raises ConfigError with one readable line that names the field, its value and what was expected.
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
                raise ConfigError(f"{_flag(f.name)}: missing; expected {f.metadata['kind'].expected}", field=f.name)
        return cls(**values)


def _parse(name: str, kind: kinds.SettingKind, raw: object, origin: str) -> Any:
    try:
        return kind.parse(raw)
    except (ValueError, OverflowError) as e:
        raise _invalid_value_error(name, kind, raw, origin) from e


def _invalid_value_error(name: str, kind: kinds.SettingKind, raw: object, origin: str) -> ConfigError:
    """A flag or variable is named as a person typed it, and so is a number that came as text."""
    number = isinstance(raw, str) and re.fullmatch(r"[+-]?[\d.]+", raw)
    shown = "this value" if kind.secret else raw if number else repr(raw)
    if origin == _FLAG:
        label, where = _flag(name), ""
    elif origin == _ENVIRONMENT:
        label, where = ENV_PREFIX + name.upper(), ""
    else:
        label, where = name, origin
    return ConfigError(f"{label}: {shown}{where} will not do; expected {kind.expected}", field=name)


def _suggestion(name: str, known: Iterable[str], spelt: Callable[[str], str] = str) -> str:
    """The setting that a wrong name was probably meant for, as the end of a sentence; nothing when there is none."""
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
    """This configuration's variables; those of the other configurations are someone else's."""
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
    """One prefill, decode or aggregated pod.

    model: a model directory or a known name; served_name: what clients call it (None: the model's own name). name:
    stable over restarts (None: see own_name). port 0: any free one. advertise: host:port under which peers reach this
    pod (None: host and the bound port). redis None: no prefix index. kv_dtype auto: as dtype; fp8_e4m3 keeps KV in 8
    bits (pods that hand over must agree). load_format dummy: random weights, of weights_seed, for a directory that has
    none. kv_memory: bytes of the KV pool; 0: 512 MiB on a CPU, on a GPU what is left of gpu_memory_utilization, the
    share of the card that the pod may take. host_cache: bytes of host memory for KV blocks that leave the pool, from
    where they come back when a prompt matches them; 0: none. checksums: compared of every block that moves to another
    pod, or to host memory and back (slow). max_model_len 0: the model's. chunk_tokens: most tokens of one step, and of
    one prompt chunk; max_seqs: sequences that run at once; 0: 256 and 64 on a CPU, 2048 and 256 on a GPU, where a step
    without decodes then takes 8192 tokens, and twice that of a prompt alone. cuda_graphs: decode steps run as graphs,
    captured at the start; chunk_graphs: so do whole chunks that end within the first so many tokens of a prompt (0:
    none). overlap: a step is launched before the last one's result is known (None: on a GPU). speculation: who drafts
    tokens that steps verify, speculation_tokens of them per sequence at most; speculation_model: the directory of the
    draft model or EAGLE head, the same on all pods that hand over to each other; speculation_accept coupled: answers
    are the same as without, rejection: only their distribution is. local_prefill: a decode pod computes uncached
    suffixes itself: never, where that is thought to be cheaper, or up to a number of tokens, at most local_chunk_tokens
    of them in a step that decodes (0: 64 on a CPU, 256 on a GPU). pull: a prefix that another pod holds is pushed to a
    prefill pod that lacks it (push), or computed again (off). metrics_port 0: off. threads 0: automatic. drain_s: most
    seconds between SIGTERM and the end. allow_tcp: KV in device memory may travel over TCP, or over a transport that
    cannot be told. net_devices: the NICs that KV may take, as UCX_NET_DEVICES has them (None: what UCX chooses). cpus:
    where the pod's threads run (None: anywhere). tensor_parallel_size: devices, or processes on a CPU, that compute
    this pod's model together, in equal numbers on tensor_parallel_nodes machines; kv_memory is of each;
    tensor_parallel_master: where `baton worker` of the other machines find this one. log_format auto: JSON unless a
    terminal reads. traces: where spans go, see trace_target; None: nowhere.
    """

    role: Role = field(metadata={"kind": kinds.ROLE})
    model: str = _setting_field(kinds.MODEL, "smollm2")
    served_name: str | None = _setting_field(kinds.optional(kinds.MODEL), None)
    name: str | None = _setting_field(kinds.optional(kinds.NAME), None)
    host: str = _setting_field(kinds.HOST, "127.0.0.1")
    port: int = _setting_field(kinds.PORT, 0)
    advertise: str | None = _setting_field(kinds.optional(kinds.ADDRESS), None)
    redis: str | None = _setting_field(kinds.REDIS, None)
    secret: str = _setting_field(kinds.SECRET, DEFAULT_SECRET)
    device: str = _setting_field(kinds.DEVICE, "auto")
    dtype: str = _setting_field(kinds.DTYPE, "auto")
    kv_dtype: str = _setting_field(kinds.KV_DTYPE, "auto")
    load_format: str = _setting_field(kinds.LOAD_FORMAT, "auto")
    weights_seed: int = _setting_field(kinds.SEED, 0)
    threads: int = _setting_field(kinds.THREADS, 0)
    block_size: int = _setting_field(kinds.BLOCK_SIZE, 16)
    kv_memory: int = _setting_field(kinds.size(0), 0)
    host_cache: int = _setting_field(kinds.size(0), 0)
    gpu_memory_utilization: float = _setting_field(kinds.GPU_SHARE, 0.9)
    max_model_len: int = _setting_field(kinds.MODEL_LEN, 0)
    chunk_tokens: int = _setting_field(kinds.TOKEN_COUNT, 0)
    max_seqs: int = _setting_field(kinds.integer(0, 65536), 0)
    cuda_graphs: bool = _setting_field(kinds.BOOL, True)
    chunk_graphs: int = _setting_field(kinds.TOKEN_COUNT, 0)
    overlap: bool | None = _setting_field(kinds.optional(kinds.BOOL), None)
    speculation: str = _setting_field(kinds.SPECULATION, "none")
    speculation_model: str | None = _setting_field(kinds.optional(kinds.MODEL), None)
    speculation_tokens: int = _setting_field(kinds.DRAFT_TOKENS, 4)
    speculation_accept: str = _setting_field(kinds.ACCEPTANCE, "coupled")
    local_prefill: str = _setting_field(kinds.LOCAL_PREFILL, "auto")
    local_chunk_tokens: int = _setting_field(kinds.TOKEN_COUNT, 0)
    pull: str = _setting_field(kinds.PULL, "push")
    transport: str = _setting_field(kinds.choice("nixl", "loopback"), "nixl")
    checksums: bool = _setting_field(kinds.BOOL, False)
    allow_tcp: bool = _setting_field(kinds.BOOL, False)
    net_devices: str | None = _setting_field(kinds.optional(kinds.NET_DEVICES), None)
    cpus: str | None = _setting_field(kinds.optional(kinds.CPUS), None)
    tensor_parallel_size: int = _setting_field(kinds.RANK_COUNT, 1)
    tensor_parallel_nodes: int = _setting_field(kinds.RANK_COUNT, 1)
    tensor_parallel_master: str | None = _setting_field(kinds.optional(kinds.ADDRESS), None)
    metrics_port: int = _setting_field(kinds.PORT, 0)
    drain_s: float = _setting_field(kinds.DRAIN, DEFAULT_DRAIN_S)
    log_level: str = _setting_field(kinds.LOG_LEVEL, "info")
    log_format: str = _setting_field(kinds.LOG_FORMAT, "auto")
    traces: str | None = _setting_field(kinds.TRACE_TARGET, None)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_whole_blocks(self.chunk_tokens, self.block_size)
        _require_draft_model(self.speculation, self.speculation_model)
        _require_equal_ranks(self.tensor_parallel_size, self.tensor_parallel_nodes)

    def resolve_name(self) -> str:
        """The configured name, or role-host-port, as stable as these; for port 0 a new one at every call."""
        if self.name is not None:
            return self.name
        end = f"-{self.port or secrets.token_hex(4)}"
        host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
        return f"{self.role}-{host}"[: 63 - len(end)] + end


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(_Config):
    """The ranks that one machine adds to a tensor-parallel pod of another; what they compute, that one says.

    tensor_parallel_size, tensor_parallel_nodes, tensor_parallel_master: as of the pod; tensor_parallel_node: which of
    the machines this is, the pod's own being 0. host, port: of gRPC health, port 0: any free one. transport,
    net_devices, cpus, log_level, log_format: as in PodConfig. drain_s: most seconds that it waits for the pod once it
    is told to leave.
    """

    host: str = _setting_field(kinds.HOST, "127.0.0.1")
    port: int = _setting_field(kinds.PORT, 0)
    secret: str = _setting_field(kinds.SECRET, DEFAULT_SECRET)
    tensor_parallel_size: int = _setting_field(kinds.RANK_COUNT, 2)
    tensor_parallel_nodes: int = _setting_field(kinds.RANK_COUNT, 2)
    tensor_parallel_node: int = _setting_field(kinds.RANK_COUNT, 1)
    tensor_parallel_master: str = field(metadata={"kind": kinds.ADDRESS})
    transport: str = _setting_field(kinds.choice("nixl", "loopback"), "nixl")
    net_devices: str | None = _setting_field(kinds.optional(kinds.NET_DEVICES), None)
    cpus: str | None = _setting_field(kinds.optional(kinds.CPUS), None)
    drain_s: float = _setting_field(kinds.DRAIN, DEFAULT_DRAIN_S)
    log_level: str = _setting_field(kinds.LOG_LEVEL, "info")
    log_format: str = _setting_field(kinds.LOG_FORMAT, "auto")

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_equal_ranks(self.tensor_parallel_size, self.tensor_parallel_nodes)
        if self.tensor_parallel_node >= self.tensor_parallel_nodes:
            raise ConfigError(
                f"tensor_parallel_node: {self.tensor_parallel_node} is none of {self.tensor_parallel_nodes}; the "
                "pod's machine is 0",
                field="tensor_parallel_node",
            )

    @property
    def ranks(self) -> range:
        """This machine's."""
        each = self.tensor_parallel_size // self.tensor_parallel_nodes
        return range(each * self.tensor_parallel_node, each * (self.tensor_parallel_node + 1))


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(_Config):
    """The gateway. Pods come from the index in redis, from the static list `pods`, or both.

    discovery k8s: and from the EndpointSlices of the Services k8s_services, inside a Kubernetes cluster. drain_delay_s:
    seconds at the end in which requests that still come are served, so that load balancers and clients learn of it.
    grpc_port 0: no public gRPC. model: directory (or known name) with tokenizer and chat template. models: several of
    them as NAME=DIR, instead of model and served_name; alias: further names as NAME=MODEL. max_body_bytes: larger
    bodies get 413. api_keys: files of API keys, or `redis` for those in redis; none: everybody may come in.
    open_metrics: /metrics needs no key. request_timeout_s: deadline of a request that sets none. max_inflight: more get
    429.
    response_ttl_s: how long /v1/responses are kept in redis; 0: not at all. response_memory: bytes of one tenant's.
    max_running: requests at pods at once, 0: any number; max_queue: that wait for it; max_ttft_s: a request whose first
    token would come later than this is refused at arrival, 0: only the request's deadline counts.
    tool_parser, reasoning_parser: how models write calls and reasoning sections; auto: told by each model's chat
    template.
    traces: where spans go; trace_sample: the share of requests that are traced when their client does not decide it.
    """

    host: str = _setting_field(kinds.HOST, "127.0.0.1")
    port: int = _setting_field(kinds.PORT, DEFAULT_PORT)
    grpc_port: int = _setting_field(kinds.PORT, 0)
    redis: str | None = _setting_field(kinds.REDIS, None)
    pods: tuple[str, ...] = _setting_field(kinds.tuple_of(kinds.ADDRESS), ())
    discovery: str = _setting_field(kinds.DISCOVERY, "index")
    k8s_services: tuple[str, ...] = _setting_field(kinds.SERVICES, ("baton-prefill", "baton-decode"))
    secret: str = _setting_field(kinds.SECRET, DEFAULT_SECRET)
    model: str = _setting_field(kinds.MODEL, "smollm2")
    served_name: str | None = _setting_field(kinds.optional(kinds.MODEL), None)
    models: tuple[str, ...] = _setting_field(kinds.tuple_of(kinds.NAMED_MODEL), ())
    alias: tuple[str, ...] = _setting_field(kinds.tuple_of(kinds.ALIAS), ())
    api_keys: tuple[str, ...] = _setting_field(kinds.API_KEYS, ())
    open_metrics: bool = _setting_field(kinds.BOOL, True)
    max_body_bytes: int = _setting_field(kinds.size(1024), 8 << 20)
    request_timeout_s: float = _setting_field(kinds.seconds(0.1, 86400), 600.0)
    max_inflight: int = _setting_field(kinds.integer(1, 1 << 20), 1024)
    response_ttl_s: float = _setting_field(kinds.seconds(0, 30 * 86400), 3600.0)
    response_memory: int = _setting_field(kinds.size(0), 64 << 20)
    max_running: int = _setting_field(kinds.integer(0, 1 << 20), 0)
    max_queue: int = _setting_field(kinds.integer(0, 1 << 20), 512)
    max_ttft_s: float = _setting_field(kinds.seconds(0, 86400), 60.0)
    tool_parser: str = _setting_field(kinds.TOOL_PARSER, "auto")
    reasoning_parser: str = _setting_field(kinds.REASONING_PARSER, "auto")
    drain_s: float = _setting_field(kinds.DRAIN, DEFAULT_DRAIN_S)
    drain_delay_s: float = _setting_field(kinds.DRAIN, 0.0)
    log_level: str = _setting_field(kinds.LOG_LEVEL, "info")
    log_format: str = _setting_field(kinds.LOG_FORMAT, "auto")
    traces: str | None = _setting_field(kinds.TRACE_TARGET, None)
    trace_sample: float = _setting_field(kinds.RATIO, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drain_delay_s > self.drain_s:
            raise ConfigError("drain_delay_s: it is part of drain_s and cannot be longer", field="drain_delay_s")
        if self.models and self.served_name is not None:
            raise ConfigError("served_name: several models have their names in models", field="served_name")
        _parse_name_value_pairs("models", self.models)
        _parse_name_value_pairs("alias", self.alias)

    def served_models(self) -> dict[str, str]:
        """Directory or known name of each model by its served name; "" stands for the model's own name."""
        return _parse_name_value_pairs("models", self.models) or {self.served_name or "": self.model}

    def aliases(self) -> dict[str, str]:
        """The name that each alias stands for."""
        return _parse_name_value_pairs("alias", self.alias)


def _parse_name_value_pairs(setting: str, pairs: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE each. Raises ConfigError when a name comes twice."""
    named = dict(pair.split("=", 1) for pair in pairs)
    if len(named) != len(pairs):
        raise ConfigError(f"{setting}: a name is given twice", field=setting)
    return named


@dataclass(frozen=True, kw_only=True)
class UpConfig(_Config):
    """The stack on one machine: `prefill` + `decode` pods and a gateway.

    port None: DEFAULT_PORT or the next free one after it; 0, and grpc_port 0: any free one. redis None: an embedded
    Valkey. api_keys: as in GatewayConfig. device, dtype, kv_dtype, load_format, weights_seed, max_model_len, kv_memory,
    host_cache, speculation, local_prefill, pull, allow_tcp, threads and tensor_parallel_size are of each pod, as in
    PodConfig. Pods share out the visible GPUs, one (or tensor_parallel_size) each as long as there are enough;
    gpu_memory_utilization is for all pods of a GPU together; net_devices: NICs of each GPU, in their order. log_dir
    None: a new directory in the user's state. max_tokens: longest answer to `--once`. drain_s: most seconds that
    running answers get once it is told to stop. traces, trace_sample: as in GatewayConfig, for all processes.
    """

    model: str = _setting_field(kinds.MODEL, "smollm2")
    served_name: str | None = _setting_field(kinds.optional(kinds.MODEL), None)
    prefill: int = _setting_field(kinds.integer(1, 64), 1)
    decode: int = _setting_field(kinds.integer(1, 64), 1)
    redis: str | None = _setting_field(kinds.REDIS, None)
    api_keys: tuple[str, ...] = _setting_field(kinds.API_KEYS, ())
    host: str = _setting_field(kinds.HOST, "127.0.0.1")
    port: int | None = _setting_field(kinds.optional(kinds.PORT), None)
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
    host_cache: int | None = _setting_field(kinds.optional(kinds.size(0)), None)
    gpu_memory_utilization: float = _setting_field(kinds.GPU_SHARE, 0.9)
    tensor_parallel_size: int = _setting_field(kinds.RANK_COUNT, 1)
    allow_tcp: bool = _setting_field(kinds.BOOL, False)
    net_devices: tuple[str, ...] = _setting_field(kinds.tuple_of(kinds.NET_DEVICES), ())
    threads: int = _setting_field(kinds.THREADS, 0)
    max_tokens: int = _setting_field(kinds.integer(1, 1 << 24), 96)
    drain_s: float = _setting_field(kinds.DRAIN, DEFAULT_DRAIN_S)
    tool_parser: str = _setting_field(kinds.TOOL_PARSER, "auto")
    reasoning_parser: str = _setting_field(kinds.REASONING_PARSER, "auto")
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
        what = "missing; expected a directory, which" if model is None else "given, which"
        need = "needs" if model is None else "has no use for"
        raise ConfigError(f"speculation_model: {what} speculation {speculation} {need}", field="speculation_model")


def _require_whole_blocks(chunk_tokens: int, block_size: int) -> None:
    if 0 < chunk_tokens < block_size:
        raise ConfigError(
            f"chunk_tokens: {chunk_tokens} is less than one block (block_size {block_size})", field="chunk_tokens"
        )
