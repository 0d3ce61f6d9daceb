"""Configuration of pods, the gateway and the one-machine stack: frozen, validated, every error names its field.

A value comes from the flags, else BATON_<FIELD> in the environment, else the TOML file (flat keys), else the default.
Each field carries a Kind that turns text or a TOML value into the field's type and refuses everything else; the same
check runs on values given to the constructor. Unknown keys are errors, and so are BATON_* variables that no
configuration knows (in Kubernetes switch service links off: they inject BATON_*_SERVICE_HOST and the like).
"""

from __future__ import annotations

import ipaddress
import math
import re
import secrets
import socket
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from common.errors import ConfigError
from common.index_url import SCHEMES, IndexUrl
from common.tracing import trace_target
from common.types import Role

ENV_PREFIX = "BATON_"
ENV_OTHERS = frozenset({"BATON_CACHE", "BATON_CONFIG"})  # read elsewhere, no fields
DEFAULT_SECRET = "baton-loopback-only"
DEFAULT_PORT = 8000  # of a gateway
DEFAULT_DRAIN_S = 30.0
# What gateway/tools/choose.py and gateway/reasoning.py know.
TOOL_PARSERS = ("auto", "hermes", "llama3_json", "mistral", "pythonic")
REASONING_PARSERS = ("auto", "none", "think", "deepseek_r1", "mistral", "seed_oss", "kimi")

_FLAG = " on the command line"  # where a value came from; files and the environment have other words

_MIB = 1 << 20
_UNITS = {"": 1, "B": 1, **{f"{p}{s}": 1024**i for i, p in enumerate("KMGT", 1) for s in ("", "iB")}}
_UNITS |= {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
_UNITS_FOLDED = {unit.lower(): n for unit, n in _UNITS.items()}


@dataclass(frozen=True)
class Kind:
    """What a field accepts. parse turns raw input into the value (a value stays as it is) or raises ValueError."""

    expected: str
    parse: Callable[[object], Any]
    secret: bool = False


def _integer(low: int, high: int) -> Kind:
    def parse(raw: object) -> int:
        value = int(raw, 10) if isinstance(raw, str) else raw
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError
        return value

    return Kind(f"an integer from {low} to {high}", parse)


def _size(low: int) -> Kind:
    def parse(raw: object) -> int:
        if isinstance(raw, str):
            match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", raw)
            if match is None or match[2].lower() not in _UNITS_FOLDED:
                raise ValueError
            raw = int(float(match[1]) * _UNITS_FOLDED[match[2].lower()])
        if not isinstance(raw, int) or isinstance(raw, bool) or raw < low:
            raise ValueError
        return raw

    return Kind(f"a size of at least {low} bytes, like 512M or 1GiB", parse)


def _seconds(low: float, high: float) -> Kind:
    def parse(raw: object) -> float:
        if isinstance(raw, bool) or not isinstance(raw, str | int | float):
            raise ValueError
        value = float(raw)
        if not math.isfinite(value) or not low <= value <= high:
            raise ValueError
        return value

    return Kind(f"seconds from {low:g} to {high:g}", parse)


def _fraction(low: float, high: float) -> Kind:
    def parse(raw: object) -> float:
        if isinstance(raw, bool) or not isinstance(raw, str | int | float):
            raise ValueError
        value = float(raw)
        if not low < value <= high:
            raise ValueError
        return value

    return Kind(f"a number over {low:g} and at most {high:g}", parse)


def _parse_share(raw: object) -> float:
    if isinstance(raw, bool) or not isinstance(raw, str | int | float) or not 0 <= float(raw) <= 1:
        raise ValueError
    return float(raw)


def _text(expected: str, pattern: str, *, secret: bool = False) -> Kind:
    def parse(raw: object) -> str:
        if not isinstance(raw, str) or re.fullmatch(pattern, raw, re.DOTALL) is None:
            raise ValueError
        return raw

    return Kind(expected, parse, secret)


def _optional(kind: Kind) -> Kind:
    def parse(raw: object) -> Any:
        return None if raw is None or raw == "" else kind.parse(raw)

    return Kind(f"{kind.expected}, or nothing", parse, kind.secret)


def _tuple_of(kind: Kind) -> Kind:
    def parse(raw: object) -> tuple[Any, ...]:
        if isinstance(raw, str):
            raw = [part.strip() for part in raw.split(",") if part.strip()]
        if not isinstance(raw, Sequence):
            raise ValueError
        return tuple(kind.parse(item) for item in raw)

    return Kind(f"a comma-separated list, each {kind.expected}", parse)


def _choice(*names: str) -> Kind:
    def parse(raw: object) -> str:
        if not isinstance(raw, str) or raw not in names:
            raise ValueError
        return raw

    return Kind("one of " + ", ".join(names), parse)


def _parse_bool(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    if not isinstance(raw, str) or raw.lower() not in _BOOLS:
        raise ValueError
    return _BOOLS[raw.lower()]


def _parse_role(raw: object) -> Role:
    if not isinstance(raw, str):
        raise ValueError
    return Role(raw)


_BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_BOOL = Kind("true or false", _parse_bool)
_ROLE = Kind("one of prefill, decode, both", _parse_role)
_PORT = _integer(0, 65535)
_HOST = _text("a host name or IP address", r"[^\s/]+")
_ADDRESS = _text("host:port", r"[^\s/]+:\d{1,5}")


def _parse_redis(raw: object) -> str:
    if not isinstance(raw, str) or not raw.startswith(tuple(f"{scheme}://" for scheme in SCHEMES)):
        raise ValueError
    IndexUrl.parse(raw)
    return raw


def _parse_traces(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError
    return trace_target(raw)


_REDIS = _optional(Kind(f"a URL that starts with {', '.join(f'{scheme}://' for scheme in SCHEMES)}", _parse_redis))
_NAME = _text("1 to 63 letters, digits, dots, dashes or underscores", r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_MODEL = _text("a directory or a known model's name", r".+")
_NAMED_MODEL = _text("NAME=DIR, a served name and a directory or a known model's name", r"[^=,/\s][^=,]*=.+")
_ALIAS = _text("NAME=MODEL, another name and that of a served model", r"[^=,\s][^=,]*=[^=,]+")
_API_KEYS = _tuple_of(_text("a file of API keys, or redis", r".+"))
_SECRET = _text("at least 8 characters", r".{8,}", secret=True)
_DEVICE = _text("auto, cpu, cuda or cuda:N", r"auto|cpu|cuda(:\d+)?")
_DTYPE = _choice("auto", "float32", "bfloat16")
_KV_DTYPE = _choice("auto", "fp8_e4m3")
_SPECULATION = _choice("none", "ngram", "suffix", "draft_model", "eagle")
_DRAFTS = _integer(1, 7)
_ACCEPT = _choice("coupled", "rejection")
_LOAD_FORMAT = _choice("auto", "dummy")
_LOCAL_PREFILL = _text("off, auto or a number of tokens", r"off|auto|\d{1,8}")
_PULL = _choice("off", "push", "read")
_SEED = _integer(0, (1 << 31) - 1)
_MODEL_LEN = _integer(0, 1 << 24)
_ROUTING = _choice("cost", "round_robin", "least_loaded", "prefix_only")
_DISCOVERY = _choice("index", "k8s")
_SERVICES = _tuple_of(_text("the name of a Kubernetes Service", r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"))
_TOOL_PARSER = _choice(*TOOL_PARSERS)
_REASONING_PARSER = _choice(*REASONING_PARSERS)
_LOG_LEVEL = _choice("debug", "info", "warning", "error")
_LOG_FORMAT = _choice("auto", "json", "text")
_TRACES = _optional(Kind("otlp, http://HOST:PORT or grpc://HOST:PORT of a collector, or file:PATH", _parse_traces))
_SHARE = Kind("a number from 0 to 1", _parse_share)
_DRAIN = _seconds(0, 3600)
_THREADS = _integer(0, 1024)
_BLOCK_SIZE = _integer(1, 256)
_GPU_SHARE = _fraction(0, 1)
_CHUNK = _integer(0, 1 << 20)
_NET_DEVICES = _text("network devices as UCX names them, like mlx5_0:1", r"[^\s]+")
_CPUS = _text("CPU numbers, like 0-15,32-47", r"\d+(-\d+)?(,\d+(-\d+)?)*")


def _setting(kind: Kind, default: Any) -> Any:
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
                raise _refusal(f.name, f.metadata["kind"], value, "")
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
            (_from_env(known, env), " in the environment"),
            ({k: v for k, v in flags.items() if v is not None}, _FLAG),
        ):
            for name, raw in source.items():
                if name not in known:
                    raise ConfigError(f"{name}: unknown setting{origin}; known: {', '.join(known)}", field=name)
                values[name] = _parse(name, known[name].metadata["kind"], raw, origin)
        for f in known.values():
            if f.default is MISSING and f.name not in values:
                raise ConfigError(f"{_flag(f.name)}: missing; expected {f.metadata['kind'].expected}", field=f.name)
        return cls(**values)


def _parse(name: str, kind: Kind, raw: object, origin: str) -> Any:
    try:
        return kind.parse(raw)
    except (ValueError, OverflowError) as e:
        raise _refusal(name, kind, raw, origin) from e


def _refusal(name: str, kind: Kind, raw: object, origin: str) -> ConfigError:
    """A flag is named as a person typed it, and so is a number that came as text."""
    number = isinstance(raw, str) and re.fullmatch(r"[+-]?[\d.]+", raw)
    shown = "this value" if kind.secret else raw if number else repr(raw)
    label, where = (_flag(name), "") if origin == _FLAG else (name, origin)
    return ConfigError(f"{label}: {shown}{where} will not do; expected {kind.expected}", field=name)


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
    anywhere = {f.name for c in (PodConfig, GatewayConfig, UpConfig) for f in fields(c)}
    for variable, raw in env.items():
        if not variable.startswith(ENV_PREFIX) or variable in ENV_OTHERS:
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name not in anywhere or variable != variable.upper():
            raise ConfigError(f"{variable}: unknown setting in the environment", field=name)
        if name in known:
            values[name] = raw
    return values


@dataclass(frozen=True, kw_only=True)
class PodConfig(_Config):
    """One prefill, decode or aggregated pod.

    model: a model directory or a known name; served_name: what clients call it (None: the model's own name).
    name: stable over restarts (None: see own_name). port 0: any free one. advertise: host:port under which
    peers reach this pod (None: host and the bound port). redis None: no prefix index. kv_dtype auto: as dtype;
    fp8_e4m3 keeps KV in 8 bits (pods that hand over must agree). load_format dummy: random
    weights, of weights_seed, for a directory that has none. kv_memory: bytes of the KV pool; 0: 512 MiB on a CPU, on a
    GPU what is left of gpu_memory_utilization, the share of the card that the pod may take. host_cache: bytes of host
    memory for KV blocks that leave the pool, from where they come back when a prompt matches them; 0: none. checksums:
    compared of every block that moves to another pod, or to host memory and back (slow). max_model_len 0: the model's.
    chunk_tokens: most tokens of one step, and of one prompt chunk; max_seqs: sequences that run at once; 0:
    256 and 64 on a CPU, 2048 and 256 on a GPU, where a step without decodes then takes 8192 tokens, and twice that of a
    prompt alone. cuda_graphs: decode steps run as graphs, captured at the start. overlap:
    a step is launched before the last one's result is known (None: on a GPU). speculation: who drafts tokens that steps
    verify, speculation_tokens of them per sequence at most; speculation_model: the directory of the draft model or
    EAGLE head, the same on all pods that hand over to each other; speculation_accept coupled: answers are the same as
    without, rejection: only their distribution is. local_prefill: a decode pod computes uncached suffixes itself:
    never, where that is thought to be cheaper, or up to a number of tokens, at most local_chunk_tokens of them in a
    step that decodes (0: 64 on a CPU, 256 on a GPU). pull: how a prefill pod gets a prefix that another pod holds: not
    at all, pushed by the holder, or by reading it there. metrics_port 0: off. threads 0: automatic. drain_s: most
    seconds between SIGTERM and the end. allow_tcp: KV in device memory may travel over TCP, or over a transport that
    cannot be told. net_devices: the NICs that KV may take, as UCX_NET_DEVICES has them (None: what UCX chooses). cpus:
    where the pod's threads run (None: anywhere). log_format auto: JSON unless a terminal reads. traces: where spans go,
    see trace_target; None: nowhere.
    """

    role: Role = field(metadata={"kind": _ROLE})
    model: str = _setting(_MODEL, "smollm2")
    served_name: str | None = _setting(_optional(_MODEL), None)
    name: str | None = _setting(_optional(_NAME), None)
    host: str = _setting(_HOST, "127.0.0.1")
    port: int = _setting(_PORT, 0)
    advertise: str | None = _setting(_optional(_ADDRESS), None)
    redis: str | None = _setting(_REDIS, None)
    secret: str = _setting(_SECRET, DEFAULT_SECRET)
    device: str = _setting(_DEVICE, "auto")
    dtype: str = _setting(_DTYPE, "auto")
    kv_dtype: str = _setting(_KV_DTYPE, "auto")
    load_format: str = _setting(_LOAD_FORMAT, "auto")
    weights_seed: int = _setting(_SEED, 0)
    threads: int = _setting(_THREADS, 0)
    block_size: int = _setting(_BLOCK_SIZE, 16)
    kv_memory: int = _setting(_size(0), 0)
    host_cache: int = _setting(_size(0), 0)
    gpu_memory_utilization: float = _setting(_GPU_SHARE, 0.9)
    max_model_len: int = _setting(_MODEL_LEN, 0)
    chunk_tokens: int = _setting(_CHUNK, 0)
    max_seqs: int = _setting(_integer(0, 65536), 0)
    cuda_graphs: bool = _setting(_BOOL, True)
    overlap: bool | None = _setting(_optional(_BOOL), None)
    speculation: str = _setting(_SPECULATION, "none")
    speculation_model: str | None = _setting(_optional(_MODEL), None)
    speculation_tokens: int = _setting(_DRAFTS, 4)
    speculation_accept: str = _setting(_ACCEPT, "coupled")
    local_prefill: str = _setting(_LOCAL_PREFILL, "auto")
    local_chunk_tokens: int = _setting(_CHUNK, 0)
    pull: str = _setting(_PULL, "push")
    transport: str = _setting(_choice("nixl", "loopback"), "nixl")
    checksums: bool = _setting(_BOOL, False)
    allow_tcp: bool = _setting(_BOOL, False)
    net_devices: str | None = _setting(_optional(_NET_DEVICES), None)
    cpus: str | None = _setting(_optional(_CPUS), None)
    metrics_port: int = _setting(_PORT, 0)
    drain_s: float = _setting(_DRAIN, DEFAULT_DRAIN_S)
    log_level: str = _setting(_LOG_LEVEL, "info")
    log_format: str = _setting(_LOG_FORMAT, "auto")
    traces: str | None = _setting(_TRACES, None)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_whole_blocks(self.chunk_tokens, self.block_size)
        _require_draft(self.speculation, self.speculation_model)

    def own_name(self) -> str:
        """The configured name, or role-host-port, as stable as these; for port 0 a new one at every call."""
        if self.name is not None:
            return self.name
        end = f"-{self.port or secrets.token_hex(4)}"
        host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
        return f"{self.role}-{host}"[: 63 - len(end)] + end


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
    routing_policy: what decides where requests go; all but cost are for comparison. tool_parser, reasoning_parser: how
    models write calls and reasoning sections; auto: told by each model's chat template.
    traces: where spans go; trace_sample: the share of requests that are traced when their client does not decide it.
    """

    host: str = _setting(_HOST, "127.0.0.1")
    port: int = _setting(_PORT, DEFAULT_PORT)
    grpc_port: int = _setting(_PORT, 0)
    redis: str | None = _setting(_REDIS, None)
    pods: tuple[str, ...] = _setting(_tuple_of(_ADDRESS), ())
    discovery: str = _setting(_DISCOVERY, "index")
    k8s_services: tuple[str, ...] = _setting(_SERVICES, ("baton-prefill", "baton-decode"))
    secret: str = _setting(_SECRET, DEFAULT_SECRET)
    model: str = _setting(_MODEL, "smollm2")
    served_name: str | None = _setting(_optional(_MODEL), None)
    models: tuple[str, ...] = _setting(_tuple_of(_NAMED_MODEL), ())
    alias: tuple[str, ...] = _setting(_tuple_of(_ALIAS), ())
    api_keys: tuple[str, ...] = _setting(_API_KEYS, ())
    open_metrics: bool = _setting(_BOOL, True)
    max_body_bytes: int = _setting(_size(1024), 8 * _MIB)
    request_timeout_s: float = _setting(_seconds(0.1, 86400), 600.0)
    max_inflight: int = _setting(_integer(1, 1 << 20), 1024)
    response_ttl_s: float = _setting(_seconds(0, 30 * 86400), 3600.0)
    response_memory: int = _setting(_size(0), 64 * _MIB)
    max_running: int = _setting(_integer(0, 1 << 20), 0)
    max_queue: int = _setting(_integer(0, 1 << 20), 512)
    max_ttft_s: float = _setting(_seconds(0, 86400), 60.0)
    routing_policy: str = _setting(_ROUTING, "cost")
    tool_parser: str = _setting(_TOOL_PARSER, "auto")
    reasoning_parser: str = _setting(_REASONING_PARSER, "auto")
    drain_s: float = _setting(_DRAIN, DEFAULT_DRAIN_S)
    drain_delay_s: float = _setting(_DRAIN, 0.0)
    log_level: str = _setting(_LOG_LEVEL, "info")
    log_format: str = _setting(_LOG_FORMAT, "auto")
    traces: str | None = _setting(_TRACES, None)
    trace_sample: float = _setting(_SHARE, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drain_delay_s > self.drain_s:
            raise ConfigError("drain_delay_s: it is part of drain_s and cannot be longer", field="drain_delay_s")
        if self.models and self.served_name is not None:
            raise ConfigError("served_name: several models have their names in models", field="served_name")
        _named("models", self.models)
        _named("alias", self.alias)

    def served_models(self) -> dict[str, str]:
        """Directory or known name of each model by its served name; "" stands for the model's own name."""
        return _named("models", self.models) or {self.served_name or "": self.model}

    def aliases(self) -> dict[str, str]:
        """The name that each alias stands for."""
        return _named("alias", self.alias)


def _named(setting: str, pairs: Sequence[str]) -> dict[str, str]:
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
    host_cache, speculation, local_prefill, pull, allow_tcp and threads are of each pod, as in PodConfig. Pods share out
    the visible GPUs, one each as long as there are enough; gpu_memory_utilization is for all pods of a GPU together;
    net_devices: NICs of each GPU, in their order. log_dir None: a new directory in the user's state. max_tokens:
    longest answer to `--once`. drain_s: most seconds that running answers get once it is told to stop.
    traces, trace_sample: as in GatewayConfig, for all processes.
    """

    model: str = _setting(_MODEL, "smollm2")
    served_name: str | None = _setting(_optional(_MODEL), None)
    prefill: int = _setting(_integer(1, 64), 1)
    decode: int = _setting(_integer(1, 64), 1)
    redis: str | None = _setting(_REDIS, None)
    api_keys: tuple[str, ...] = _setting(_API_KEYS, ())
    host: str = _setting(_HOST, "127.0.0.1")
    port: int | None = _setting(_optional(_PORT), None)
    grpc_port: int = _setting(_PORT, 0)
    device: str = _setting(_DEVICE, "auto")
    dtype: str = _setting(_DTYPE, "auto")
    kv_dtype: str = _setting(_KV_DTYPE, "auto")
    load_format: str = _setting(_LOAD_FORMAT, "auto")
    weights_seed: int = _setting(_SEED, 0)
    max_model_len: int = _setting(_MODEL_LEN, 0)
    chunk_tokens: int = _setting(_CHUNK, 0)
    speculation: str = _setting(_SPECULATION, "none")
    speculation_model: str | None = _setting(_optional(_MODEL), None)
    speculation_tokens: int = _setting(_DRAFTS, 4)
    speculation_accept: str = _setting(_ACCEPT, "coupled")
    local_prefill: str = _setting(_LOCAL_PREFILL, "auto")
    pull: str = _setting(_PULL, "push")
    block_size: int = _setting(_BLOCK_SIZE, 16)
    kv_memory: int = _setting(_size(0), 0)
    host_cache: int | None = _setting(_optional(_size(0)), None)
    gpu_memory_utilization: float = _setting(_GPU_SHARE, 0.9)
    allow_tcp: bool = _setting(_BOOL, False)
    net_devices: tuple[str, ...] = _setting(_tuple_of(_NET_DEVICES), ())
    threads: int = _setting(_THREADS, 0)
    max_tokens: int = _setting(_integer(1, 1 << 24), 96)
    drain_s: float = _setting(_DRAIN, DEFAULT_DRAIN_S)
    routing_policy: str = _setting(_ROUTING, "cost")
    tool_parser: str = _setting(_TOOL_PARSER, "auto")
    reasoning_parser: str = _setting(_REASONING_PARSER, "auto")
    log_dir: str | None = _setting(_optional(_text("a directory", r".+")), None)
    secret: str = _setting(_SECRET, DEFAULT_SECRET)
    log_level: str = _setting(_LOG_LEVEL, "info")
    log_format: str = _setting(_LOG_FORMAT, "auto")
    traces: str | None = _setting(_TRACES, None)
    trace_sample: float = _setting(_SHARE, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_whole_blocks(self.chunk_tokens, self.block_size)
        _require_draft(self.speculation, self.speculation_model)


def _require_draft(speculation: str, model: str | None) -> None:
    if (speculation in ("draft_model", "eagle")) != (model is not None):
        need = "needs" if model is None else "has no use for"
        raise ConfigError(f"speculation_model: speculation {speculation} {need} one", field="speculation_model")


def _require_whole_blocks(chunk_tokens: int, block_size: int) -> None:
    if 0 < chunk_tokens < block_size:
        raise ConfigError(
            f"chunk_tokens: {chunk_tokens} is less than one block (block_size {block_size})", field="chunk_tokens"
        )
