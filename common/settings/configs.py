"""The settings of pods, workers, gateways, engines and the one-machine stack, declared in groups. See table.py."""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from common.errors import ConfigError
from common.settings import kinds
from common.settings.table import Settings, about, choice_setting, optional_setting, setting, setting_error
from common.settings.tiers import Tier, parse_tiers
from common.types import Role

DEFAULT_SECRET = "baton-loopback-only"
DEFAULT_PORT = 8000  #: REST port of a gateway.
MODEL_PROPOSERS = ("draft_model", "eagle")  #: Proposers with a model of their own.
MAX_DRAFTS = 7  #: Drafts and the token before them are at most the eight tokens of a row in the decode kernel.


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


@dataclass(frozen=True, kw_only=True)
class EngineSettings(Settings, section="Engine"):
    """Settings of an engine that `baton up` has too."""

    device: str = setting(kinds.DEVICE, "auto", "auto, cpu, cuda or cuda:N")
    dtype: str = choice_setting(
        ("auto", "float32", "bfloat16", "float16"),
        "float32, bfloat16, float16, or auto: float32 on a CPU, bfloat16 on a GPU (float16 before Ampere)",
    )
    kv_dtype: str = choice_setting(
        ("auto", "fp8_e4m3"), "KV in dtype (auto) or in 8 bits with scales (fp8_e4m3), the same on all pods"
    )
    weights: str = choice_setting(
        ("auto", "fp8", "int8"),
        "Weights of the layers as in the checkpoint (auto), or quantised while they load: fp8, or int8 (inputs stay)",
    )
    load_format: str = choice_setting(("auto", "dummy"), "auto, or dummy: random weights, needs only config.json")
    weights_seed: int = setting(kinds.integer(0, (1 << 31) - 1), 0, "Seed of --load-format dummy; default: 0")
    threads: int = setting(kinds.integer(0, 1024), 0, "CPU threads of a pod; default: automatic")
    block_size: int = setting(kinds.integer(1, 256), 16, "Tokens per KV block")
    kv_memory: int = setting(
        kinds.size(0),
        0,
        "KV pool of each device, like 2GiB; default: 512M on a CPU, the rest of --gpu-memory-utilization on a GPU",
        also=("kv_cache_memory_bytes",),
    )
    gpu_memory_utilization: float = setting(kinds.GPU_SHARE, 0.9, "Share of the GPU's memory for this pod")
    kv_order: str = choice_setting(
        ("auto", "layers", "heads"),
        "Order of a block's KV: heads lets pods with other numbers of ranks take part; auto: heads with several ranks",
    )
    prefix_cache: bool = setting(kinds.BOOL, True, "Keep the KV of prompts and answers for later requests")
    cache_policy: str = choice_setting(
        ("lru", "gdsf", "s3fifo"),
        "Which cached block is evicted first: the least recently used (lru), or by frequency too (gdsf, s3fifo)",
    )
    disk_cache: str | None = optional_setting(
        kinds.text("a directory", r".+", "DIR"),
        "Directory on a local NVMe disk for KV blocks that leave the host tier, kept over restarts; needs host_cache; "
        "default: none",
    )
    disk_cache_size: int = setting(
        kinds.size(0), 64 << 30, "Bytes of each pod in --disk-cache, like 500GiB; default: 64GiB"
    )
    disk_cache_codec: str = choice_setting(
        ("none", "int4"),
        "Blocks in --disk-cache as they are (none), or in 4 bits (int4): answers after a read may differ; the same on "
        "all pods",
    )
    cache_pin: int = setting(kinds.size(0), 0, "KV bytes that requests may pin in each pool, like 4GiB; default: 0")
    cache_pin_tenant: int = setting(
        kinds.size(0), 0, "KV bytes of --cache-pin that the requests of one tenant may pin; default: all of them"
    )
    kv_groups: bool = setting(
        kinds.BOOL,
        False,
        "Free the KV of layers with a window when it leaves the window, if the model has other layers too, and serve "
        "models with recurrent states; the same on all pods",
    )
    max_model_len: int = setting(
        kinds.integer(0, 1 << 24), 0, "Longest prompt plus output, in tokens; default: the model's"
    )
    chunk_tokens: int = setting(
        kinds.TOKEN_COUNT,
        0,
        "Max tokens of a step and of a prompt chunk; default: 256 on a CPU, 2048 on a GPU (8192 without decodes, 16384 "
        "for a lone prompt)",
        was=("token_budget",),
        also=("max_num_batched_tokens",),
    )
    max_seqs: int = setting(
        kinds.integer(0, 65536),
        0,
        "Max sequences of a pod at once; default: 64 on a CPU, 256 on a GPU",
        also=("max_num_seqs",),
    )
    pooling: str = choice_setting(
        ("auto", "last", "mean", "cls"),
        "Pooling of embeddings: last token, mean, first token (cls), or auto: as in the model's files, else last",
    )
    tensor_parallel_size: int = setting(
        kinds.RANK_COUNT, 1, "Ranks of a pod: GPUs, or processes on a CPU, that compute the model together"
    )
    expert_parallel: bool = setting(
        kinds.BOOL,
        False,
        "Give each rank whole experts of a mixture of experts; default: a part of each expert, if their size allows it",
        also=("enable_expert_parallel",),
    )
    max_adapters: int = setting(
        kinds.integer(0, 1024),
        0,
        "LoRA adapters on the device at once; default: 8 with --adapter-dir, else none",
        also=("max_loras",),
    )
    max_adapter_rank: int = setting(
        kinds.integer(1, 256), 16, "Largest rank of a LoRA adapter", also=("max_lora_rank",)
    )
    deterministic: bool = setting(
        kinds.BOOL,
        False,
        "Compute each token in one order of sums, so that its bits do not depend on batch, chunks, cache hits, "
        "preemption, hand-off or drafts; the same on all pods",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.chunk_tokens < self.block_size:
            problem = f"{self.chunk_tokens} is less than one block (block_size {self.block_size})"
            raise setting_error("chunk_tokens", problem)
        if not self.prefix_cache and getattr(self, "host_cache", None):
            raise setting_error("host_cache", "not used: it keeps blocks of the prefix cache, which is off")


@dataclass(frozen=True, kw_only=True)
class SpeculationSettings(Settings, section="Speculation"):
    """Speculative decoding in engines, pods and stacks."""

    speculation: str = choice_setting(
        ("none", "ngram", "suffix", *MODEL_PROPOSERS), "Proposer of drafts: none, ngram, suffix, draft_model or eagle"
    )
    speculation_model: str | Path | None = optional_setting(  # noqa: RUF009
        kinds.MODEL_PATH, "Directory of the draft model or EAGLE head, the same on all pods; default: none"
    )
    speculation_tokens: int = setting(kinds.integer(1, MAX_DRAFTS), 4, "Max drafts per sequence and step")
    speculation_accept: str = choice_setting(
        ("coupled", "rejection"),
        "How drafts are accepted: coupled (the same answers as without) or rejection (the same distribution)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.speculation in MODEL_PROPOSERS) != (self.speculation_model is not None):
            problem = "missing: expected a directory, needed" if self.speculation_model is None else "not used"
            raise setting_error("speculation_model", f"{problem} by speculation {self.speculation}")


@dataclass(frozen=True, kw_only=True)
class PodEngineSettings(EngineSettings, SpeculationSettings):
    """Settings of an engine that only a single pod has."""

    removed: ClassVar = {"chunk_graphs": "steps of up to 1024 tokens are always CUDA graphs, longer ones never"}

    host_cache: int = setting(
        kinds.size(0), 0, "Host memory of each rank for KV blocks that the pool evicts, like 32GiB; default: 0"
    )
    cuda_graphs: bool = setting(
        kinds.BOOL, True, "Run decode steps, and steps of up to 1024 tokens, as CUDA graphs, captured at the start"
    )
    overlap: bool | None = optional_setting(kinds.BOOL, "Launch a step before the previous one ends; default: on a GPU")
    local_chunk_tokens: int = setting(
        kinds.TOKEN_COUNT,
        0,
        "Max tokens of a local prefill in one step that decodes; default: 64 on a CPU, 256 on a GPU",
        was=("mixed_tokens",),
    )
    checksums: bool = setting(
        kinds.BOOL, False, "Compare checksums of all blocks that move to a pod, or to host memory and back (slow)"
    )
    tensor_parallel_reduce: str = choice_setting(
        ("nccl", "one_shot"),
        "Sums of short vectors over the ranks' GPUs: by NCCL, or by a kernel over peer memory (one_shot, not measured)",
    )
    tensor_parallel_nodes: int = setting(
        kinds.RANK_COUNT, 1, "Machines of the pod, with equally many ranks", per_process=True
    )
    tensor_parallel_master: str | None = optional_setting(
        kinds.ADDRESS,
        "Address on this machine for `baton worker` of the other machines; default: none",
        per_process=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        size, nodes = self.tensor_parallel_size, self.tensor_parallel_nodes
        _require_equal_ranks(size, nodes)
        if nodes > 1 and self.tensor_parallel_master is None:
            raise setting_error("tensor_parallel_master", f"{nodes} nodes need the address of rank 0")
        self._check_deterministic()
        if self.disk_cache is not None and size > 1:
            problem = f"disk_cache {self.disk_cache} cannot be combined with tensor_parallel_size {size}"
            raise ConfigError(f"{problem}: each rank has its own part of a block", field="disk_cache")
        if self.disk_cache is not None and not self.host_cache:
            raise setting_error("disk_cache", "needs host_cache: blocks go to the disk by way of host memory")

    def _check_deterministic(self) -> None:
        """Raises ConfigError for settings with which bits would depend on the batch, or are not proven."""
        rejects = self.speculation != "none" and self.speculation_accept == "rejection"
        for name, asked, why in (
            ("kv_dtype", self.kv_dtype != "auto", "its attention has no fixed order of sums"),
            ("disk_cache_codec", self.disk_cache_codec != "none", "a decoded block differs from the computed one"),
            ("weights", self.weights != "auto", "its product has no fixed order of sums"),
            ("tensor_parallel_size", self.tensor_parallel_size > 1, "an all-reduce has no fixed order of sums"),
            ("speculation_accept", rejects, "the accepted tokens depend on the drafts"),
        ):
            if self.deterministic and asked:
                problem = f"{name} {getattr(self, name)} cannot be combined with deterministic: {why}"
                raise ConfigError(problem, field=name)


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
    warm_up_size: int = setting(
        kinds.size(0), 4 << 30, "Max bytes of these prefixes, and at most half of the KV pool; default: 4GiB"
    )
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

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("adapter_names", "max_adapters"):
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
        _require_equal_ranks(self.tensor_parallel_size, self.tensor_parallel_nodes)
        if self.tensor_parallel_node >= self.tensor_parallel_nodes:
            below = f"is not below tensor_parallel_nodes ({self.tensor_parallel_nodes}); the pod's machine is 0"
            raise setting_error("tensor_parallel_node", f"{self.tensor_parallel_node} {below}")

    @property
    def ranks(self) -> range:
        """The ranks of this machine."""
        each = self.tensor_parallel_size // self.tensor_parallel_nodes
        return range(each * self.tensor_parallel_node, each * (self.tensor_parallel_node + 1))


@dataclass(frozen=True, kw_only=True)
class ApiSettings(ModelSettings, TraceSettings, section="API"):
    """The public API of gateways and stacks."""

    removed: ClassVar = {"routing_policy": "the gateway always routes by cost"}

    api_keys: tuple[str, ...] = setting(
        kinds.tuple_of(kinds.text("a file of API keys, or redis", r".+", "FILE")),
        (),
        "Files of API keys (JSON if it ends in .json, else TOML), or redis; default: no key needed",
    )
    api_key: tuple[str, ...] = setting(
        kinds.tuple_of(kinds.text("printable ASCII without spaces and commas", r"[!-+\--~]+", "KEY", secret=True)),
        (),
        "Keys that clients may send; other users of this machine see the flag, but not BATON_API_KEY; default: no key "
        "needed",
        per_process=True,
    )
    share_cache: bool = setting(
        kinds.BOOL, False, "Tenants share cached prefixes, so each can find out which prompts the others sent"
    )
    tool_parser: str = setting(
        kinds.tool_parser(),
        "auto",
        f"Format of tool calls: {', '.join(kinds.TOOL_PARSERS)}, or a registered one",
        also=("tool_call_parser",),
    )
    reasoning_parser: str = choice_setting(
        kinds.REASONING_PARSERS, f"Format of reasoning: {', '.join(kinds.REASONING_PARSERS)}"
    )
    reranker: str = choice_setting(
        ("auto", "qwen3", "embeddings"),
        "How /v1/rerank and /v1/score compare texts: the verdict of a Qwen3-Reranker (qwen3), the cosine of "
        "embeddings, or auto: the verdict if the model's files or name show a reranker",
    )
    chat_template: str | None = optional_setting(
        kinds.text("a file", r".+", "FILE"), "Jinja file in place of the model's chat templates; default: the model's"
    )
    default_chat_template_kwargs: str | None = optional_setting(
        kinds.JSON_OBJECT,
        'Variables of the chat template for requests that do not set them, like {"enable_thinking": false}; default: '
        "none",
    )
    generation_config: str = choice_setting(
        ("auto", "none"),
        "Sampling parameters and length of requests that do not set them: auto (the model's generation_config.json) or "
        "none (OpenAI's)",
    )
    trace_sample: float = setting(kinds.SHARE, 1.0, "Share of traced requests, if the client does not decide")
    tier: tuple[str, ...] = setting(
        kinds.tuple_of(kinds.TIER),
        (),
        "Priority tier NAME:PRIORITY:SHARE, with :TOKENS for shorter answers under overload, like batch:-10:0.1:256; "
        "may be repeated; default: none",
    )
    cors_origin: tuple[str, ...] = setting(
        kinds.tuple_of(kinds.ORIGIN),
        (),
        "Origin of web pages that may call the API, or *; may be repeated",
        also=("allowed_origins",),
    )
    root_path: str = setting(
        kinds.ROOT_PATH, "", "Path before all paths, like /llm, if a proxy forwards only paths below it; default: none"
    )
    ping_s: float = setting(
        kinds.seconds(0, 3600), 5.0, "Seconds without an event after which a stream gets a comment (`: ping`); 0: never"
    )
    pod_wait_s: float = setting(
        kinds.seconds(0, 3600), 30.0, "Seconds that a running request waits for lost pods if there are no others"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tiers()

    def tiers(self) -> tuple[Tier, ...]:
        """Returns the priority tiers, the highest first. Raises ConfigError if two have one name or priority."""
        return parse_tiers(self.tier)


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(ApiSettings, TlsSettings, command="gateway", section="Gateway"):
    """The gateway. Pods are found by the index in `redis`, the static list `pods`, Kubernetes, or several of these."""

    models: tuple[str, ...] = setting(
        kinds.tuple_of(kinds.NAMED_MODEL), (), "Several models, in place of model and served_name", flag=False
    )
    alias: tuple[str, ...] = setting(kinds.tuple_of(kinds.ALIAS), (), "Further name of a model; may be repeated")
    port: int = setting(kinds.PORT, DEFAULT_PORT, "HTTP port", per_process=True)
    grpc_port: int = setting(kinds.PORT, 0, "Port of the public gRPC API; default: off", per_process=True)
    tls_cert: str | None = optional_setting(
        kinds.text("a file", r".+", "FILE"),
        "Certificate chain (PEM) of the public side, for HTTPS and gRPC over TLS; read again when it changes; default: "
        "no TLS",
        per_process=True,
    )
    tls_key: str | None = optional_setting(
        kinds.text("a file", r".+", "FILE"), "Private key (PEM) of --tls-cert; default: none", per_process=True
    )
    pods: tuple[str, ...] = setting(
        kinds.tuple_of(kinds.ADDRESS), (), "Pods to use, with or without Redis; default: none", per_process=True
    )
    discovery: str = choice_setting(
        ("index", "k8s"), "index, or k8s: also the pods of Kubernetes Services, from inside the cluster"
    )
    k8s_services: tuple[str, ...] = setting(
        kinds.tuple_of(kinds.SERVICE), ("baton-prefill", "baton-decode"), "Services of --discovery k8s"
    )
    open_metrics: bool = setting(kinds.BOOL, True, "/metrics needs no API key")
    max_body_bytes: int = setting(kinds.size(1024), 8 << 20, "Largest request body; larger ones get 413")
    request_timeout_s: float = setting(kinds.seconds(0.1, 86400), 600.0, "Deadline of requests that set none")
    max_inflight: int = setting(kinds.integer(1, 1 << 20), 4096, "Max requests at once; more get 429")
    max_client_connections: int = setting(
        kinds.integer(0, 1 << 20), 4096, "Max connections of one client address; 0: three quarters of all"
    )
    max_client_slow: int = setting(
        kinds.integer(0, 1 << 20),
        128,
        "Max heads and bodies over 1 s of one client address or key; beyond it the oldest gets 408; 0: no limit",
    )
    response_ttl_s: float = setting(
        kinds.seconds(0, 30 * 86400), 3600.0, "Seconds that /v1/responses stay in Redis; 0: not stored"
    )
    response_memory: int = setting(kinds.size(0), 64 << 20, "Memory of one tenant's stored responses")
    idempotency_ttl_s: float = setting(
        kinds.seconds(0, 7 * 86400),
        600.0,
        "Seconds that an idempotency key is known after its answer; 0: keys are ignored",
    )
    idempotency_memory: int = setting(
        kinds.size(0), 64 << 20, "Memory of answers with idempotency keys, which retries get without computing"
    )
    max_running: int = setting(
        kinds.integer(0, 1 << 20), 0, "Max requests at the pods at once; others wait in fair order; default: no limit"
    )
    max_queue: int = setting(
        kinds.integer(0, 1 << 20), 2048, "Max requests that wait, per model; it bounds memory, --max-ttft-s the time"
    )
    max_ttft_s: float = setting(
        kinds.seconds(0, 86400),
        60.0,
        "Refuse a request if its first token is predicted or comes later; 0: only the deadline counts",
    )
    drain_delay_s: float = setting(
        kinds.seconds(0, 3600),
        0.0,
        "Part of --drain-s in which new requests are still served, so that load balancers see the drain; default: 0",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drain_delay_s > self.drain_s:
            raise setting_error("drain_delay_s", "longer than drain_s, which it is a part of")
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_key" if self.tls_key is None else "tls_cert"
            raise setting_error(missing, "missing: tls_cert and tls_key are given together")
        if self.models and self.chat_template is not None:
            raise setting_error("chat_template", "not allowed together with models: each model has its own template")
        if self.models and self.served_name is not None:
            raise setting_error("served_name", "not allowed together with models, which names each model")
        _parse_name_value_pairs("models", self.models)
        _parse_name_value_pairs("alias", self.alias)

    def served_models(self) -> dict[str, str]:
        """Returns served name -> directory or known name per model; served name "" means the model's own name."""
        return _parse_name_value_pairs("models", self.models) or {self.served_name or "": self.model}

    def aliases(self) -> dict[str, str]:
        """Returns the name of the model for each alias."""
        return _parse_name_value_pairs("alias", self.alias)


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


def _parse_name_value_pairs(setting: str, pairs: Sequence[str]) -> dict[str, str]:
    """Parses NAME=VALUE pairs. Raises ConfigError if a name occurs twice."""
    named = dict(pair.split("=", 1) for pair in pairs)
    if len(named) != len(pairs):
        raise setting_error(setting, "a name occurs twice")
    return named


def _require_equal_ranks(ranks: int, nodes: int) -> None:
    if ranks % nodes:
        raise setting_error("tensor_parallel_nodes", f"{nodes} does not divide tensor_parallel_size {ranks}")
