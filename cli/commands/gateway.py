"""`baton gateway`: the server for clients."""

from __future__ import annotations

import functools
import re
from typing import Annotated

import typer

from cli import service
from cli.options import (
    ApiKeys,
    Config,
    DrainS,
    Host,
    LogFormat,
    Logs,
    ReasoningParser,
    Redis,
    ServedName,
    ToolParser,
    Traces,
    TraceSample,
    load,
    opt,
)
from common.settings.configs import GatewayConfig


def gateway(
    config: Config = None,
    model: Annotated[
        list[str] | None,
        opt("smollm2 (the default) or a model directory; several as NAME=DIR, repeated.", metavar="[NAME=]DIR"),
    ] = None,
    served_name: ServedName = None,
    alias: Annotated[list[str] | None, opt("Further name of a model; may be repeated.", metavar="NAME=MODEL")] = None,
    host: Host = None,
    port: Annotated[str | None, opt("HTTP port (default 8000).", metavar="N")] = None,
    grpc_port: Annotated[str | None, opt("Port of the public gRPC API; default: off.", metavar="N")] = None,
    redis: Redis = None,
    pods: Annotated[str | None, opt("Pods to use, with or without Redis.", metavar="HOST:PORT,...")] = None,
    discovery: Annotated[str | None, opt("index (the default), or k8s: also the pods of Kubernetes Services.")] = None,
    k8s_services: Annotated[
        str | None, opt("Services of --discovery k8s (default baton-prefill,baton-decode).", metavar="NAME,...")
    ] = None,
    api_keys: ApiKeys = None,
    open_metrics: Annotated[
        bool | None, typer.Option("--open-metrics/--no-open-metrics", help="/metrics needs no API key (default).")
    ] = None,
    max_body_bytes: Annotated[str | None, opt("Largest request body (default 8MiB).", metavar="SIZE")] = None,
    request_timeout_s: Annotated[
        str | None, opt("Deadline of requests that set none (default 600).", metavar="N")
    ] = None,
    max_inflight: Annotated[str | None, opt("Most requests at once; more get 429 (default 1024).", metavar="N")] = None,
    response_ttl_s: Annotated[
        str | None, opt("Seconds that /v1/responses stay in Redis; 0: off (default 3600).", metavar="N")
    ] = None,
    response_memory: Annotated[
        str | None, opt("Memory of one tenant's stored responses (default 64MiB).", metavar="SIZE")
    ] = None,
    max_running: Annotated[
        str | None,
        opt("Most requests at the pods at once; others wait in fair order (default: no limit).", metavar="N"),
    ] = None,
    max_queue: Annotated[str | None, opt("Most requests that wait per model (default 512).", metavar="N")] = None,
    max_ttft_s: Annotated[
        str | None,
        opt("Refuse requests whose first token is predicted later (default 60; 0: only the deadline).", metavar="N"),
    ] = None,
    tool_parser: ToolParser = None,
    reasoning_parser: ReasoningParser = None,
    drain_s: DrainS = None,
    drain_delay_s: Annotated[
        str | None, opt("Seconds of --drain-s in which new requests are still served (default 0).", metavar="N")
    ] = None,
    log_level: Logs = None,
    log_format: LogFormat = None,
    traces: Traces = None,
    trace_sample: TraceSample = None,
) -> None:
    """Runs the gateway: OpenAI REST and gRPC for clients."""
    flags = {k: v for k, v in locals().items() if k not in ("config", "model")}
    if model and (len(model) > 1 or re.match(r"[^/=]+=", model[0])):
        flags["models"] = model
    elif model:
        flags["model"] = model[0]
    service.run(load(GatewayConfig, config, flags), _serve)


async def _serve(settings: GatewayConfig) -> None:
    from cli.demo.model import demo_model
    from common.model.directory import SMOLLM2
    from gateway.server import serve

    if SMOLLM2 in settings.served_models().values():
        demo_model(functools.partial(typer.echo, err=True))
    await serve(settings)
