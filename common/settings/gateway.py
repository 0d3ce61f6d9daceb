"""Settings of gateways. See table.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from common.settings import kinds
from common.settings.process import ModelSettings, TlsSettings, TraceSettings
from common.settings.table import choice_setting, optional_setting, setting, setting_error
from common.settings.tiers import Tier, parse_tiers

DEFAULT_PORT = 8000  #: REST port of a gateway.


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


def _parse_name_value_pairs(setting: str, pairs: Sequence[str]) -> dict[str, str]:
    """Parses NAME=VALUE pairs. Raises ConfigError if a name occurs twice."""
    named = dict(pair.split("=", 1) for pair in pairs)
    if len(named) != len(pairs):
        raise setting_error(setting, "a name occurs twice")
    return named
