"""The commands that serve: a whole stack, one pod, a part of one, a gateway.

Services are above this package, hence looked up by name.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib
import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer

from common.cli import exits
from common.cli.options import (
    AllowTcp,
    ApiKeys,
    BlockSize,
    ChunkTokens,
    Config,
    Cpus,
    Device,
    DrainS,
    DType,
    Host,
    HostCache,
    KvDType,
    KvMemory,
    LoadFormat,
    LocalPrefill,
    LogFormat,
    Logs,
    MaxModelLen,
    Model,
    NetDevices,
    PullMode,
    ReasoningParser,
    Redis,
    RoutingPolicy,
    ServedName,
    Speculation,
    SpeculationAccept,
    SpeculationModel,
    SpeculationTokens,
    TensorParallelNodes,
    TensorParallelSize,
    Threads,
    ToolParser,
    Traces,
    TraceSample,
    WeightsSeed,
    load,
    opt,
)
from common.config import GatewayConfig, PodConfig, UpConfig, WorkerConfig
from common.gpus import run_on
from common.types import Role


def up(
    config: Config = None,
    model: Model = None,
    served_name: ServedName = None,
    prefill: Annotated[str | None, opt("Number of prefill pods (default 1).", metavar="N")] = None,
    decode: Annotated[str | None, opt("Number of decode pods (default 1).", metavar="N")] = None,
    redis: Redis = None,
    api_keys: ApiKeys = None,
    host: Annotated[str | None, opt("Address of the gateway (default 127.0.0.1).")] = None,
    port: Annotated[str | None, opt("Port of the gateway (default 8000, or the next free one).", metavar="N")] = None,
    grpc_port: Annotated[str | None, opt("Port of the public gRPC API; default: any free one.", metavar="N")] = None,
    device: Device = None,
    dtype: DType = None,
    kv_dtype: KvDType = None,
    load_format: LoadFormat = None,
    weights_seed: WeightsSeed = None,
    max_model_len: MaxModelLen = None,
    chunk_tokens: ChunkTokens = None,
    speculation: Speculation = None,
    speculation_model: SpeculationModel = None,
    speculation_tokens: SpeculationTokens = None,
    speculation_accept: SpeculationAccept = None,
    local_prefill: LocalPrefill = None,
    pull: PullMode = None,
    block_size: BlockSize = None,
    kv_memory: KvMemory = None,
    host_cache: Annotated[
        str | None,
        opt(
            "Host memory of a pod for KV blocks that leave its pool, like 32GiB; default: none on a CPU, on GPUs half "
            "of what is free, at most 32GiB a pod.",
            metavar="SIZE",
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        str | None, opt("Share of a GPU for all of its pods together (default 0.9).", metavar="X")
    ] = None,
    tensor_parallel_size: TensorParallelSize = None,
    allow_tcp: AllowTcp = None,
    net_devices: Annotated[
        str | None,
        opt("The NIC of each GPU, in their order, as UCX names them; default: any.", metavar="NAME:PORT,.."),
    ] = None,
    threads: Threads = None,
    drain_s: DrainS = None,
    routing_policy: RoutingPolicy = None,
    tool_parser: ToolParser = None,
    reasoning_parser: ReasoningParser = None,
    log_dir: Annotated[str | None, opt("Where the processes log; default: a new folder in the user's state.")] = None,
    log_level: Logs = None,
    log_format: LogFormat = None,
    traces: Traces = None,
    trace_sample: TraceSample = None,
    once: Annotated[
        str | None, opt("Answer this prompt, show where its time went, and stop.", metavar="PROMPT")
    ] = None,
    max_tokens: Annotated[str | None, opt("Longest answer to --once, in tokens (default 96).", metavar="N")] = None,
) -> None:
    """Runs everything on this machine, until Ctrl-C.

    Valkey (or --redis), prefill and decode pods, a gateway.
    """
    flags = {k: v for k, v in locals().items() if k not in ("config", "once")}
    settings = load(UpConfig, config, flags)
    from common.up import run

    raise typer.Exit(asyncio.run(run(settings, once=once)))


def serve(
    role: Annotated[
        str | None, opt("prefill, decode, or both: an aggregated server.", "--role", metavar="ROLE")
    ] = None,
    config: Config = None,
    model: Model = None,
    served_name: ServedName = None,
    name: Annotated[str | None, opt("Stable name of the pod; default: role, host name and port.")] = None,
    host: Host = None,
    port: Annotated[str | None, opt("gRPC port; default: any free one.", metavar="N")] = None,
    advertise: Annotated[str | None, opt("Address under which peers reach this pod.", metavar="HOST:PORT")] = None,
    redis: Redis = None,
    device: Device = None,
    dtype: DType = None,
    kv_dtype: KvDType = None,
    load_format: LoadFormat = None,
    weights_seed: WeightsSeed = None,
    threads: Threads = None,
    block_size: BlockSize = None,
    kv_memory: KvMemory = None,
    host_cache: HostCache = None,
    gpu_memory_utilization: Annotated[
        str | None, opt("Share of the GPU that this pod may take (default 0.9).", metavar="X")
    ] = None,
    max_model_len: MaxModelLen = None,
    chunk_tokens: ChunkTokens = None,
    max_seqs: Annotated[str | None, opt("Most sequences at once (default 64, on a GPU 256).", metavar="N")] = None,
    cuda_graphs: Annotated[
        bool | None, typer.Option("--cuda-graphs/--no-cuda-graphs", help="Decode steps as CUDA graphs.")
    ] = None,
    chunk_graphs: Annotated[
        str | None, opt("Chunks within so many tokens of a prompt as CUDA graphs (default 0).", metavar="N")
    ] = None,
    overlap: Annotated[
        bool | None, typer.Option("--overlap/--no-overlap", help="Launch steps ahead of results (default on a GPU).")
    ] = None,
    speculation: Speculation = None,
    speculation_model: SpeculationModel = None,
    speculation_tokens: SpeculationTokens = None,
    speculation_accept: SpeculationAccept = None,
    local_prefill: LocalPrefill = None,
    local_chunk_tokens: Annotated[
        str | None,
        opt("Most tokens of such a rest in one step beside decodes (default 64, on a GPU 256).", metavar="N"),
    ] = None,
    pull: PullMode = None,
    checksums: Annotated[bool | None, typer.Option("--checksums", help="Check every moved block (slow).")] = None,
    allow_tcp: AllowTcp = None,
    net_devices: NetDevices = None,
    cpus: Cpus = None,
    tensor_parallel_size: TensorParallelSize = None,
    tensor_parallel_nodes: TensorParallelNodes = None,
    tensor_parallel_master: Annotated[
        str | None, opt("Where `baton worker` of the other machines find this one.", metavar="HOST:PORT")
    ] = None,
    metrics_port: Annotated[str | None, opt("Prometheus port; default: off.", metavar="N")] = None,
    drain_s: DrainS = None,
    log_level: Logs = None,
    log_format: LogFormat = None,
    traces: Traces = None,
) -> None:
    """Runs one pod: --role prefill, decode or both."""
    flags = {k: v for k, v in locals().items() if k != "config"}
    settings = load(PodConfig, config, flags)
    service = "prefill_service" if settings.role is Role.PREFILL else "decode_service"
    _serve(f"{service}.server", settings)


def worker(
    config: Config = None,
    tensor_parallel_size: Annotated[
        str | None, opt("Devices of all machines that compute the pod's model together (default 2).", metavar="N")
    ] = None,
    tensor_parallel_nodes: Annotated[
        str | None, opt("Machines that these are on, in equal numbers (default 2).", metavar="N")
    ] = None,
    tensor_parallel_node: Annotated[
        str | None, opt("Which of the machines this is, from 1 on (default 1); 0 is the pod's.", metavar="I")
    ] = None,
    tensor_parallel_master: Annotated[
        str | None, opt("Where the pod waits for it; required.", metavar="HOST:PORT")
    ] = None,
    host: Host = None,
    port: Annotated[str | None, opt("Port of gRPC health; default: any free one.", metavar="N")] = None,
    transport: Annotated[str | None, opt("nixl (the default) or loopback, as of the pod.", metavar="NAME")] = None,
    net_devices: NetDevices = None,
    cpus: Cpus = None,
    drain_s: DrainS = None,
    log_level: Logs = None,
    log_format: LogFormat = None,
) -> None:
    """Adds this machine's devices to a pod of another machine.

    For tensor parallelism over several machines.
    """
    flags = {k: v for k, v in locals().items() if k != "config"}
    _serve("pod.worker", load(WorkerConfig, config, flags))


def gateway(
    config: Config = None,
    model: Annotated[
        list[str] | None,
        opt("smollm2 (the default) or a model directory; NAME=DIR, repeated, for several.", metavar="[NAME=]DIR"),
    ] = None,
    served_name: ServedName = None,
    alias: Annotated[list[str] | None, opt("A further name of a model; may be repeated.", metavar="NAME=MODEL")] = None,
    host: Host = None,
    port: Annotated[str | None, opt("HTTP port (default 8000).", metavar="N")] = None,
    grpc_port: Annotated[str | None, opt("Port of the public gRPC API; default: off.", metavar="N")] = None,
    redis: Redis = None,
    pods: Annotated[str | None, opt("Pods to use without or beside Redis.", metavar="HOST:PORT,...")] = None,
    discovery: Annotated[
        str | None, opt("index (the default), or k8s: also what is behind Services, inside a cluster.")
    ] = None,
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
        str | None, opt("How long /v1/responses are kept in Redis; 0: not (default 3600).", metavar="N")
    ] = None,
    response_memory: Annotated[
        str | None, opt("Most that the kept responses of one tenant take (default 64MiB).", metavar="SIZE")
    ] = None,
    max_running: Annotated[
        str | None, opt("Most requests at the pods at once; others wait in fair order (default: any).", metavar="N")
    ] = None,
    max_queue: Annotated[str | None, opt("Most requests that wait per model (default 512).", metavar="N")] = None,
    max_ttft_s: Annotated[
        str | None,
        opt(
            "Refuse at once what would wait longer for its first token (default 60; 0: only its deadline).", metavar="N"
        ),
    ] = None,
    routing_policy: RoutingPolicy = None,
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
    _serve("gateway.server", load(GatewayConfig, config, flags))


def _serve(module: str, settings: PodConfig | WorkerConfig | GatewayConfig) -> None:
    """Runs `serve` of a service's module, then ends the process."""
    # Until Lifecycle takes over. A container's first process would otherwise not hear SIGTERM at all; KeyboardInterrupt
    # is lost in torch's import of NumPy, which then stays half imported, and waits for a model that is being loaded.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, exits.at_once)
    from common.logs import setup_logs
    from common.models import resolve_model, served_name

    setup_logs(settings.log_level, settings.log_format)
    if not isinstance(settings, GatewayConfig) and settings.cpus is not None:
        run_on(settings.cpus)
    if isinstance(settings, PodConfig):
        known_as = settings.served_name or served_name(settings.model)
        weights = settings.load_format == "auto"
        model = resolve_model(
            settings.model, tokenizer=False, weights=weights, say=functools.partial(typer.echo, err=True)
        )
        settings = dataclasses.replace(settings, model=str(model), served_name=known_as)
    code: int | str | None = 0
    try:
        with asyncio.Runner(loop_factory=_fast_loop() if module.startswith("gateway") else None) as runner:
            runner.run(importlib.import_module(module).serve(settings))
    except SystemExit as end:
        code = end.code
    _end(code if isinstance(code, int) else exits.FAILED)


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where there is one (not on Windows): the gateway's work is sockets."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _end(code: int) -> NoReturn:
    """Ends a process that has stopped and freed everything, at once: taking torch and NIXL down would cost seconds."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
