"""`baton serve`: runs one pod."""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated

import typer

from cli import service
from cli.options import (
    AllowTcp,
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
    Redis,
    ServedName,
    Speculation,
    SpeculationAccept,
    SpeculationModel,
    SpeculationTokens,
    TensorParallelNodes,
    TensorParallelSize,
    Threads,
    Traces,
    WeightsSeed,
    load,
    opt,
)
from common.settings.configs import PodConfig
from common.types import Role


def serve(
    role: Annotated[
        str | None, opt("prefill, decode, or both: an aggregated server.", "--role", metavar="ROLE")
    ] = None,
    config: Config = None,
    model: Model = None,
    served_name: ServedName = None,
    name: Annotated[str | None, opt("Stable name of the pod; default: ROLE-HOST-PORT.")] = None,
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
        str | None, opt("Share of the GPU's memory for this pod (default 0.9).", metavar="X")
    ] = None,
    max_model_len: MaxModelLen = None,
    chunk_tokens: ChunkTokens = None,
    max_seqs: Annotated[str | None, opt("Most sequences at once (default 64, on a GPU 256).", metavar="N")] = None,
    cuda_graphs: Annotated[
        bool | None, typer.Option("--cuda-graphs/--no-cuda-graphs", help="Run decode steps as CUDA graphs.")
    ] = None,
    chunk_graphs: Annotated[
        str | None, opt("Run chunks within the first N tokens of a prompt as CUDA graphs (default 0).", metavar="N")
    ] = None,
    overlap: Annotated[
        bool | None,
        typer.Option("--overlap/--no-overlap", help="Launch a step before the last one's result (default on a GPU)."),
    ] = None,
    speculation: Speculation = None,
    speculation_model: SpeculationModel = None,
    speculation_tokens: SpeculationTokens = None,
    speculation_accept: SpeculationAccept = None,
    local_prefill: LocalPrefill = None,
    local_chunk_tokens: Annotated[
        str | None,
        opt("Most tokens of a local prefill in one step that decodes (default 64, on a GPU 256).", metavar="N"),
    ] = None,
    pull: PullMode = None,
    checksums: Annotated[
        bool | None, typer.Option("--checksums", help="Compare checksums of all moved blocks (slow).")
    ] = None,
    allow_tcp: AllowTcp = None,
    net_devices: NetDevices = None,
    cpus: Cpus = None,
    tensor_parallel_size: TensorParallelSize = None,
    tensor_parallel_nodes: TensorParallelNodes = None,
    tensor_parallel_master: Annotated[
        str | None, opt("Address here for `baton worker` of the other machines.", metavar="HOST:PORT")
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
    service.run(settings, _serve)


async def _serve(settings: PodConfig) -> None:
    settings = _resolved(settings)
    if settings.role is Role.PREFILL:
        from prefill_service import server as prefill

        await prefill.serve(settings)
    else:
        from decode_service import server as decode

        await decode.serve(settings)


def _resolved(settings: PodConfig) -> PodConfig:
    """The settings with the model's directory and served name filled in. Raises ConfigError."""
    from cli.demo.model import prepared
    from common.model.directory import SMOLLM2, default_served_name

    known_as = settings.served_name or default_served_name(settings.model)
    weights = settings.load_format == "auto"
    say = functools.partial(typer.echo, err=True)
    model = prepared(settings.model, tokenizer=False, weights=weights, say=say)
    if settings.speculation == "draft_model" and settings.speculation_model == SMOLLM2:
        prepared(SMOLLM2, say=say)
    return dataclasses.replace(settings, model=str(model), served_name=known_as)
