"""`baton up`: a stack on this machine."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from cli.options import (
    AllowTcp,
    ApiKeys,
    BlockSize,
    ChunkTokens,
    Config,
    Device,
    DrainS,
    DType,
    KvDType,
    KvMemory,
    LoadFormat,
    LocalPrefill,
    LogFormat,
    Logs,
    MaxModelLen,
    Model,
    PullMode,
    ReasoningParser,
    Redis,
    ServedName,
    Speculation,
    SpeculationAccept,
    SpeculationModel,
    SpeculationTokens,
    TensorParallelSize,
    Threads,
    ToolParser,
    Traces,
    TraceSample,
    WeightsSeed,
    load,
    opt,
)
from common.settings.configs import UpConfig


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
            "Host memory per pod for KV blocks that its pool evicts, like 32GiB; default: none on a CPU, on GPUs "
            "half of the free memory, at most 32GiB per pod.",
            metavar="SIZE",
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        str | None, opt("Share of a GPU for all its pods together (default 0.9).", metavar="X")
    ] = None,
    tensor_parallel_size: TensorParallelSize = None,
    allow_tcp: AllowTcp = None,
    net_devices: Annotated[
        str | None,
        opt("NIC of each GPU, in order, as UCX names them; default: any.", metavar="NAME:PORT,.."),
    ] = None,
    threads: Threads = None,
    drain_s: DrainS = None,
    tool_parser: ToolParser = None,
    reasoning_parser: ReasoningParser = None,
    log_dir: Annotated[str | None, opt("Directory for logs; default: a new one in the user's state directory.")] = None,
    log_level: Logs = None,
    log_format: LogFormat = None,
    traces: Traces = None,
    trace_sample: TraceSample = None,
    once: Annotated[str | None, opt("Answer this prompt, show its time line, and stop.", metavar="PROMPT")] = None,
    max_tokens: Annotated[str | None, opt("Longest answer to --once, in tokens (default 96).", metavar="N")] = None,
) -> None:
    """Runs a stack on this machine, until Ctrl-C.

    It consists of Valkey (or --redis), prefill and decode pods, and a gateway.
    """
    flags = {k: v for k, v in locals().items() if k not in ("config", "once")}
    settings = load(UpConfig, config, flags)
    from cli.stack.up import run

    raise typer.Exit(asyncio.run(run(settings, once=once)))
