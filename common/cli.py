"""The `baton` command. Only reads the command line: what a command does is imported when it runs, so help is quick.

Values of flags arrive here as text: common/config.py alone says what they may be, and in which words it refuses them.

Exit codes: 0 fine, 1 something failed or is missing, 2 wrong usage or configuration (one readable line on stderr), 3 a
pod's KV pool stays quarantined, 4 a pod lost one of its threads; after 3 and 4 a restart helps.
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
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from common.config import GatewayConfig, PodConfig, UpConfig
from common.errors import BatonError, ConfigError
from common.gpus import run_on
from common.types import Role

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

Settings = TypeVar("Settings", UpConfig, PodConfig, GatewayConfig)

# The base of all that typer's parser raises, which typer does not export; older ones take click's.
_CommandLineError: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    help="Serves large language models with prefill and decode on different machines.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _opt(help_text: str, *names: str, metavar: str | None = None) -> Any:
    """names: of the option, where they are not the parameter's; typer 0.27 takes a metavar like it for its name."""
    return typer.Option(*names, help=help_text, metavar=metavar, show_default=False)


Config = Annotated[
    Path | None, _opt("TOML file with the settings below (flat, dashes as underscores).", metavar="FILE")
]
Model = Annotated[str | None, _opt("smollm2 (the default) or a model directory.", metavar="NAME|DIR")]
ServedName = Annotated[str | None, _opt("Name of the model for clients; default: the model's own.")]
Redis = Annotated[
    str | None,
    _opt("URL of the prefix index: redis://, rediss://, unix://, redis+sentinel://, redis+cluster://.", metavar="URL"),
]
Host = Annotated[str | None, _opt("Address to listen on (default 127.0.0.1); others need BATON_SECRET.")]
BlockSize = Annotated[str | None, _opt("Tokens per KV block (default 16).", metavar="N")]
KvMemory = Annotated[
    str | None, _opt("KV pool of a pod, like 2GiB; default: 512M on a CPU, what is left on a GPU.", metavar="SIZE")
]
HostCache = Annotated[
    str | None,
    _opt("Host memory of a pod for KV blocks that leave its pool, like 32GiB (default 0).", metavar="SIZE"),
]
ChunkTokens = Annotated[
    str | None, _opt("Most tokens of one engine step (default 256; GPU: 2048, if nothing decodes 8192).", metavar="N")
]
Speculation = Annotated[
    str | None, _opt("Who drafts tokens: none (default), ngram, suffix, draft_model, eagle.", metavar="PROPOSER")
]
SpeculationModel = Annotated[
    str | None, _opt("Directory of the draft model or EAGLE head, on all pods alike.", metavar="DIR")
]
SpeculationTokens = Annotated[str | None, _opt("Most drafts per sequence and step (default 4).", metavar="N")]
SpeculationAccept = Annotated[str | None, _opt("Of drafts: coupled (the default) or rejection.", metavar="RULE")]
LocalPrefill = Annotated[
    str | None, _opt("Suffixes that decode computes itself: auto (the default), off, or up to N tokens.", metavar="N")
]
PullMode = Annotated[
    str | None, _opt("How prefill gets what other pods hold: push (the default), read, or off.", metavar="MODE")
]
Device = Annotated[str | None, _opt("auto (the default), cpu, cuda or cuda:N.")]
DType = Annotated[str | None, _opt("auto (the default), float32 or bfloat16.")]
LoadFormat = Annotated[str | None, _opt("auto (the default), or dummy: random weights, only config.json is read.")]
WeightsSeed = Annotated[str | None, _opt("Seed of --load-format dummy (default 0).", metavar="N")]
KvDType = Annotated[str | None, _opt("auto (the default: as dtype) or fp8_e4m3, half of bfloat16's memory.")]
MaxModelLen = Annotated[str | None, _opt("Longest prompt plus output; default: the model's.", metavar="N")]
DrainS = Annotated[str | None, _opt("Most seconds that running requests get at the end (default 30).", metavar="N")]
Threads = Annotated[str | None, _opt("CPU threads of a pod; default: automatic.", metavar="N")]
RoutingPolicy = Annotated[
    str | None,
    _opt("cost (default); round_robin, least_loaded, prefix_only to compare.", metavar="POLICY"),
]
ToolParser = Annotated[
    str | None,
    _opt("How the model writes calls: auto (default), hermes, llama3_json, mistral, pythonic.", metavar="NAME"),
]
ReasoningParser = Annotated[
    str | None, _opt("How the model marks what it thinks: auto (default), none, think, ...", metavar="NAME")
]
ApiKeys = Annotated[
    str | None, _opt("File of API keys (.toml or .json), or redis; default: everybody may come in.", metavar="FILE,...")
]
AllowTcp = Annotated[bool | None, typer.Option("--allow-tcp", help="KV on a GPU may travel over TCP.")]
Logs = Annotated[str | None, _opt("debug, info (the default), warning or error.", metavar="LEVEL")]
LogFormat = Annotated[str | None, _opt("json, text, or auto (the default): text on a terminal.", metavar="FORMAT")]
Traces = Annotated[
    str | None,
    _opt("Where spans go: otlp, http://HOST:4318, grpc://HOST:4317 or file:PATH; default: off.", metavar="TARGET"),
]
TraceSample = Annotated[
    str | None, _opt("Share of requests that are traced, where clients do not say (default 1).", metavar="X")
]


@app.command()
def up(
    config: Config = None,
    model: Model = None,
    served_name: ServedName = None,
    prefill: Annotated[str | None, _opt("Number of prefill pods (default 1).", metavar="N")] = None,
    decode: Annotated[str | None, _opt("Number of decode pods (default 1).", metavar="N")] = None,
    redis: Redis = None,
    api_keys: ApiKeys = None,
    host: Annotated[str | None, _opt("Address of the gateway (default 127.0.0.1).")] = None,
    port: Annotated[str | None, _opt("Port of the gateway (default 8000, or the next free one).", metavar="N")] = None,
    grpc_port: Annotated[str | None, _opt("Port of the public gRPC API; default: any free one.", metavar="N")] = None,
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
    host_cache: HostCache = None,
    gpu_memory_utilization: Annotated[
        str | None, _opt("Share of a GPU for all of its pods together (default 0.9).", metavar="X")
    ] = None,
    allow_tcp: AllowTcp = None,
    net_devices: Annotated[
        str | None,
        _opt("The NIC of each GPU, in their order, as UCX names them; default: any.", metavar="NAME:PORT,.."),
    ] = None,
    threads: Threads = None,
    drain_s: DrainS = None,
    routing_policy: RoutingPolicy = None,
    tool_parser: ToolParser = None,
    reasoning_parser: ReasoningParser = None,
    log_dir: Annotated[str | None, _opt("Where the processes log; default: a new folder in the user's state.")] = None,
    log_level: Logs = None,
    log_format: LogFormat = None,
    traces: Traces = None,
    trace_sample: TraceSample = None,
    once: Annotated[
        str | None, _opt("Answer this prompt, show where its time went, and stop.", metavar="PROMPT")
    ] = None,
    max_tokens: Annotated[str | None, _opt("Longest answer to --once, in tokens (default 96).", metavar="N")] = None,
) -> None:
    """Runs everything on this machine: Valkey (or --redis), prefill and decode pods, a gateway; until Ctrl-C."""
    flags = {k: v for k, v in locals().items() if k not in ("config", "once")}
    settings = _load(UpConfig, config, flags)
    from common.up import run

    raise typer.Exit(asyncio.run(run(settings, once=once)))


@app.command()
def serve(
    role: Annotated[
        str | None, _opt("prefill, decode, or both: an aggregated server.", "--role", metavar="ROLE")
    ] = None,
    config: Config = None,
    model: Model = None,
    served_name: ServedName = None,
    name: Annotated[str | None, _opt("Stable name of the pod; default: role, host name and port.")] = None,
    host: Host = None,
    port: Annotated[str | None, _opt("gRPC port; default: any free one.", metavar="N")] = None,
    advertise: Annotated[str | None, _opt("Address under which peers reach this pod.", metavar="HOST:PORT")] = None,
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
        str | None, _opt("Share of the GPU that this pod may take (default 0.9).", metavar="X")
    ] = None,
    max_model_len: MaxModelLen = None,
    chunk_tokens: ChunkTokens = None,
    max_seqs: Annotated[str | None, _opt("Most sequences at once (default 64, on a GPU 256).", metavar="N")] = None,
    cuda_graphs: Annotated[
        bool | None, typer.Option("--cuda-graphs/--no-cuda-graphs", help="Decode steps as CUDA graphs.")
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
        str | None, _opt("Most of a suffix in one step beside decodes (default 64, on a GPU 256).", metavar="N")
    ] = None,
    pull: PullMode = None,
    checksums: Annotated[bool | None, typer.Option("--checksums", help="Check every moved block (slow).")] = None,
    allow_tcp: AllowTcp = None,
    net_devices: Annotated[
        str | None, _opt("NICs for KV, as UCX_NET_DEVICES has them; default: any.", metavar="NAME:PORT,..")
    ] = None,
    cpus: Annotated[
        str | None, _opt("Where the pod's threads run, like 0-15; default: anywhere.", metavar="N-M,..")
    ] = None,
    metrics_port: Annotated[str | None, _opt("Prometheus port; default: off.", metavar="N")] = None,
    drain_s: DrainS = None,
    log_level: Logs = None,
    log_format: LogFormat = None,
    traces: Traces = None,
) -> None:
    """Runs one pod: --role prefill, decode or both."""
    flags = {k: v for k, v in locals().items() if k != "config"}
    settings = _load(PodConfig, config, flags)
    service = "prefill_service" if settings.role is Role.PREFILL else "decode_service"
    _serve(f"{service}.server", settings)


@app.command()
def gateway(
    config: Config = None,
    model: Annotated[
        list[str] | None,
        _opt("smollm2 (the default) or a model directory; NAME=DIR, repeated, for several.", metavar="[NAME=]DIR"),
    ] = None,
    served_name: ServedName = None,
    alias: Annotated[
        list[str] | None, _opt("A further name of a model; may be repeated.", metavar="NAME=MODEL")
    ] = None,
    host: Host = None,
    port: Annotated[str | None, _opt("HTTP port (default 8000).", metavar="N")] = None,
    grpc_port: Annotated[str | None, _opt("Port of the public gRPC API; default: off.", metavar="N")] = None,
    redis: Redis = None,
    pods: Annotated[str | None, _opt("Pods to use without or beside Redis.", metavar="HOST:PORT,...")] = None,
    discovery: Annotated[
        str | None, _opt("index (the default), or k8s: also what is behind Services, inside a cluster.")
    ] = None,
    k8s_services: Annotated[
        str | None, _opt("Services of --discovery k8s (default baton-prefill,baton-decode).", metavar="NAME,...")
    ] = None,
    api_keys: ApiKeys = None,
    open_metrics: Annotated[
        bool | None, typer.Option("--open-metrics/--no-open-metrics", help="/metrics needs no API key (default).")
    ] = None,
    max_body_bytes: Annotated[str | None, _opt("Largest request body (default 8MiB).", metavar="SIZE")] = None,
    request_timeout_s: Annotated[
        str | None, _opt("Deadline of requests that set none (default 600).", metavar="N")
    ] = None,
    max_inflight: Annotated[
        str | None, _opt("Most requests at once; more get 429 (default 1024).", metavar="N")
    ] = None,
    response_ttl_s: Annotated[
        str | None, _opt("How long /v1/responses are kept in Redis; 0: not (default 3600).", metavar="N")
    ] = None,
    response_memory: Annotated[
        str | None, _opt("Most that the kept responses of one tenant take (default 64MiB).", metavar="SIZE")
    ] = None,
    max_running: Annotated[
        str | None, _opt("Most requests at the pods at once; others wait in fair order (default: any).", metavar="N")
    ] = None,
    max_queue: Annotated[str | None, _opt("Most requests that wait per model (default 512).", metavar="N")] = None,
    max_ttft_s: Annotated[
        str | None, _opt("Refuse at once what would wait longer for a token (default: its deadline).", metavar="N")
    ] = None,
    routing_policy: RoutingPolicy = None,
    tool_parser: ToolParser = None,
    reasoning_parser: ReasoningParser = None,
    drain_s: DrainS = None,
    drain_delay_s: Annotated[
        str | None, _opt("Seconds of them in which new requests are still served (default 0).", metavar="N")
    ] = None,
    log_level: Logs = None,
    log_format: LogFormat = None,
    traces: Traces = None,
    trace_sample: TraceSample = None,
) -> None:
    """Runs the gateway: OpenAI REST and gRPC for clients, routing to the pods."""
    flags = {k: v for k, v in locals().items() if k not in ("config", "model")}
    if model and (len(model) > 1 or re.match(r"[^/=]+=", model[0])):
        flags["models"] = model
    elif model:
        flags["model"] = model[0]
    _serve("gateway.server", _load(GatewayConfig, config, flags))


@app.command()
def batch(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Requests in OpenAI's batch format.")],
    target: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Answers; a run goes on where one ended.")],
    url: Annotated[str | None, _opt("A running gateway; default: a stack of our own, until all is answered.")] = None,
    api_key: Annotated[str | None, _opt("API key for --url (default: $OPENAI_API_KEY).", metavar="KEY")] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Requests at the same time.")] = 64,
    retries: Annotated[int, typer.Option(min=0, help="Further tries of a request that may succeed later.")] = 10,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Most seconds of one try.")] = 600.0,
    config: Config = None,
    model: Model = None,
    served_name: ServedName = None,
    prefill: Annotated[str | None, _opt("Prefill pods of our own stack (default 1).", metavar="N")] = None,
    decode: Annotated[str | None, _opt("Decode pods of our own stack (default 1).", metavar="N")] = None,
    device: Device = None,
    dtype: DType = None,
    max_model_len: MaxModelLen = None,
    kv_memory: KvMemory = None,
    threads: Threads = None,
    log_level: Logs = None,
) -> None:
    """Answers a file of requests; run it again to go on after an interruption."""
    others = ("source", "target", "url", "api_key", "concurrency", "retries", "timeout_s", "config")
    flags = {name: value for name, value in locals().items() if name not in (*others, "others")}
    from rich.console import Console

    from common.batch import run as batches
    from common.batch.sender import Sending

    sending = Sending(url=url or "", concurrency=concurrency, retries=retries, timeout_s=timeout_s)
    if url is not None:
        for name, value in (*flags.items(), ("config", config)):
            if value is not None:
                raise ConfigError(f"--{name.replace('_', '-')} is for a stack of our own, without --url", field=name)
        sending = dataclasses.replace(sending, api_key=api_key or os.environ.get("OPENAI_API_KEY"))
        raise typer.Exit(asyncio.run(batches.run(Console(), source, target, sending)))
    settings = dataclasses.replace(_load(UpConfig, config, {**flags, "port": "0"}), api_keys=())
    batches.count(source)  # before a minute goes into starting
    from common.display import Board
    from common.stack import Stack
    from common.up import run_stack

    async def work(board: Board, stack: Stack) -> int:
        return await batches.run(board.console, source, target, dataclasses.replace(sending, url=stack.base_url))

    raise typer.Exit(asyncio.run(run_stack(settings, work)))


keys = typer.Typer(help="Makes, lists and takes back API keys, in a file or in Redis.", add_completion=False)
app.add_typer(keys, name="keys")
KeyStore = Annotated[
    str | None, _opt("File of API keys (.toml or .json), or redis; default: $BATON_API_KEYS.", metavar="FILE|redis")
]


@keys.command("create")
def keys_create(
    tenant: Annotated[str, typer.Argument(help="Whose key it is: letters, digits, dots, dashes, underscores.")],
    api_keys: KeyStore = None,
    redis: Redis = None,
    requests_per_minute: Annotated[int, typer.Option(min=0, help="Most requests a minute (default: any).")] = 0,
    tokens_per_minute: Annotated[int, typer.Option(min=0, help="Most tokens a minute, in and out.")] = 0,
    tokens_per_day: Annotated[int, typer.Option(min=0, help="Most tokens a day (UTC), in and out.")] = 0,
    concurrent: Annotated[int, typer.Option(min=0, help="Most requests at once.")] = 0,
    weight: Annotated[float, typer.Option(help="The tenant's part when there is too little for all.")] = 1.0,
    priority: Annotated[int, typer.Option(help="Of its requests; also the most that they may ask for.")] = 0,
    model: Annotated[list[str] | None, _opt("A model that it may use, repeated; default: all.", metavar="NAME")] = None,
    isolated: Annotated[
        bool, typer.Option("--isolated", help="The tenant shares no prefix cache with others.")
    ] = False,
    admin: Annotated[bool, typer.Option("--admin", help="May empty caches and see all requests' timelines.")] = False,
    days: Annotated[int, typer.Option(min=0, help="Days until it expires (default: never).")] = 0,
    note: Annotated[str, typer.Option(help="What it is for.")] = "",
) -> None:
    """Makes a key and shows it; it cannot be shown again."""
    fields = {k: v for k, v in locals().items() if k not in ("api_keys", "redis", "model")}
    raise typer.Exit(_keys_command("create", api_keys, redis, models=tuple(model or ()), **fields))


@keys.command("list")
def keys_list(api_keys: KeyStore = None, redis: Redis = None) -> None:
    """Lists keys by id; what clients send is not kept anywhere."""
    raise typer.Exit(_keys_command("show", api_keys, redis))


@keys.command("revoke")
def keys_revoke(
    key_id: Annotated[str, typer.Argument(help="The key's id, as in its middle or in `baton keys list`.")],
    api_keys: KeyStore = None,
    redis: Redis = None,
) -> None:
    """Takes a key back; running gateways refuse it a second later."""
    raise typer.Exit(_keys_command("revoke", api_keys, redis, key_id=key_id))


def _keys_command(name: str, api_keys: str | None, redis: str | None, **values: Any) -> int:
    from rich.console import Console

    # Like the services, keys are above this package.
    commands = importlib.import_module("gateway.admission.keys_command")
    source, url = api_keys or os.environ.get("BATON_API_KEYS"), redis or os.environ.get("BATON_REDIS")
    run: Callable[..., int] = {"create": commands.create, "show": commands.show, "revoke": commands.revoke}[name]
    return run(Console(), source, url, **values)


@app.command()
def doctor(
    redis: Redis = None,
    pods: Annotated[
        list[str] | None, _opt("Running pods to ask, beside those in --redis; may be repeated.", metavar="HOST:PORT")
    ] = None,
) -> None:
    """Says what this machine offers to Baton, what is missing and how to get it, and how running pods exchange KV."""
    from common import doctor as examination

    raise typer.Exit(asyncio.run(examination.report(redis, pods or ())))


@app.command()
def probe(
    url: Annotated[str, typer.Argument(metavar="URL", help="http://HOST:PORT/PATH, or grpc://HOST:PORT[/SERVICE].")],
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Most seconds.")] = 3.0,
) -> None:
    """Exit code 0 if a server says that it is well, else 1: a health check for containers."""
    from common import probes

    try:
        raise typer.Exit(EXIT_FAILED * (not asyncio.run(probes.answers(url, timeout_s))))
    except ValueError as e:
        raise ConfigError(
            f"url: {e} will not do; expected http://HOST:PORT/PATH or grpc://HOST:PORT", field="url"
        ) from e


@app.command()
def plan(
    trace: Annotated[str | None, _opt("Requests: Mooncake's .jsonl or Azure's .csv.", metavar="FILE")] = None,
    slo: Annotated[str | None, _opt("What a request wants, as in ttft=2s,itl=50ms.", metavar="TIMES")] = None,
    rates: Annotated[
        str | None,
        _opt("h100-8b (default), h100-8b-rdma, or JSON: a result of benchmarks/engine.py or own figures.", metavar="R"),
    ] = None,
    gpus: Annotated[str | None, _opt("How many there are; default: any number.", metavar="N")] = None,
    attainment: Annotated[str | None, _opt("Share of requests that keep the SLO (default 0.9).", metavar="X")] = None,
    requests: Annotated[str | None, _opt("How many of the trace to replay (default 1500).", metavar="N")] = None,
    chunks: Annotated[str | None, _opt("Chunk sizes to try (default 512,1024,2048,4096,8192).", metavar="N,..")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Prints JSON instead of a table.")] = False,
) -> None:
    """Simulates a trace to find the prefill:decode ratio, chunk size and pods with the most goodput per GPU."""
    # Like the services, the simulator is above this package.
    flags = dict(locals())
    raise typer.Exit(importlib.import_module("simulator.plan_command").run(**flags))


@app.command()
def loadtest(
    url: Annotated[
        str | None,
        _opt("The gateway (default http://127.0.0.1:8000); HOST:PORT with --protocol grpc.", "--url", metavar="URL"),
    ] = None,
    protocol: Annotated[str | None, _opt("rest (default) or grpc.", "--protocol", metavar="PROTOCOL")] = None,
    endpoint: Annotated[str | None, _opt("chat (default) or completions.", "--endpoint", metavar="ENDPOINT")] = None,
    model: Annotated[str | None, _opt("Name of the model; default: the first that the server lists.")] = None,
    api_key: Annotated[
        list[str] | None, _opt("API key, or several in turn (default: $OPENAI_API_KEY).", metavar="KEY")
    ] = None,
    rate: Annotated[str | None, _opt("Open loop: requests per second in the mean.", metavar="X")] = None,
    rates: Annotated[
        str | None, _opt("A run at each of these rates, while --slo is kept by --attainment (0.9).", metavar="X,..")
    ] = None,
    arrivals: Annotated[
        str | None, _opt("With --rate: poisson (default), constant, gamma (bursts) or onoff.", metavar="KIND")
    ] = None,
    burstiness: Annotated[
        str | None, _opt("Of gamma: the gaps' deviation over their mean (default 2; Poisson is 1).", metavar="X")
    ] = None,
    on_s: Annotated[str | None, _opt("Of onoff: seconds with requests (default 5).", metavar="N")] = None,
    off_s: Annotated[str | None, _opt("Of onoff: seconds without (default 5).", metavar="N")] = None,
    users: Annotated[str | None, _opt("Closed loop: users who wait for their answers.", metavar="N")] = None,
    think_s: Annotated[str | None, _opt("Mean pause of a user after an answer (default 0).", metavar="N")] = None,
    ramp_s: Annotated[str | None, _opt("Seconds over which the users come (default 0).", metavar="N")] = None,
    trace: Annotated[
        str | None, _opt("Recorded requests: Mooncake's .jsonl or Azure's .csv; with their times.", metavar="FILE")
    ] = None,
    speed: Annotated[str | None, _opt("Replay the trace so many times as fast (default 1).", metavar="X")] = None,
    length_scale: Annotated[
        str | None, _opt("Prompts, answers and shared blocks of the trace times this (default 1).", metavar="X")
    ] = None,
    max_input_tokens: Annotated[
        str | None, _opt("Leave out requests of the trace with longer prompts, once scaled.", metavar="N")
    ] = None,
    max_output_tokens: Annotated[str | None, _opt("Cut answers of the trace to this.", metavar="N")] = None,
    input_tokens: Annotated[
        str | None,
        _opt("A user's message: 512, 128:1024 (uniform), ~512 (log-normal; default 256).", metavar="N"),
    ] = None,
    output_tokens: Annotated[str | None, _opt("Of an answer, in the same way (default 64).", metavar="N")] = None,
    prefix_tokens: Annotated[str | None, _opt("System prompt before the message (default 0).", metavar="N")] = None,
    prefixes: Annotated[
        str | None, _opt("How many different system prompts there are (default 1).", metavar="N")
    ] = None,
    turns: Annotated[str | None, _opt("Conversations of so many turns, as 4 or 2:8 (default 1).", metavar="N")] = None,
    prompts: Annotated[
        str | None, _opt("text, or ids: token ids; default: ids for completions.", metavar="FORM")
    ] = None,
    vocab: Annotated[str | None, _opt("Token ids to use (default 1000:30000).", metavar="LOW:HIGH")] = None,
    ignore_eos: Annotated[
        bool | None, typer.Option("--ignore-eos/--heed-eos", help="Answers are as long as asked for (default).")
    ] = None,
    temperature: Annotated[str | None, _opt("Of sampling (default 0).", metavar="X")] = None,
    stream: Annotated[
        bool | None, typer.Option("--stream/--no-stream", help="Answers come in pieces (default).")
    ] = None,
    requests: Annotated[str | None, _opt("Send so many; default: the whole trace.", metavar="N")] = None,
    duration_s: Annotated[
        str | None, _opt("Send for so long, then wait (default 30 without --requests and --trace).", metavar="N")
    ] = None,
    max_concurrency: Annotated[
        str | None,
        _opt("Most requests under way; others are held back, and count from when they were due.", metavar="N"),
    ] = None,
    abort_share: Annotated[
        str | None, _opt("Share of requests whose client leaves half-way (default 0).", metavar="X")
    ] = None,
    deadline_s: Annotated[str | None, _opt("Deadline of each request; the server is told.", metavar="N")] = None,
    warmup: Annotated[str | None, _opt("Requests before the run, which are not counted.", metavar="N")] = None,
    settle_s: Annotated[str | None, _opt("Seconds at the start that are not counted (default 0).", metavar="N")] = None,
    seed: Annotated[str | None, _opt("Another seed: other times, lengths and texts (default 0).", metavar="N")] = None,
    slo: Annotated[
        str | None, _opt("What is good: ttft, itl (mean), gap (longest), e2e, as in ttft=2s,itl=50ms.", metavar="TIMES")
    ] = None,
    attainment: Annotated[
        str | None, _opt("Exit with 1 when a smaller share of requests is good.", metavar="X")
    ] = None,
    max_failed: Annotated[str | None, _opt("Exit with 1 when a larger share fails, like 1%.", metavar="X")] = None,
    out: Annotated[str | None, _opt("Write everything as JSON.", metavar="FILE.json")] = None,
    html: Annotated[str | None, _opt("Write a report with charts.", metavar="FILE.html")] = None,
    compare: Annotated[
        tuple[str, str] | None, _opt("Run nothing: compare the results of two runs.", metavar="A.json B.json")
    ] = None,
    tolerance: Annotated[
        str | None, _opt("With --compare: exit with 1 when a figure is clearly worse by more, like 10%.", metavar="X")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Prints the figures as JSON instead of a table.")] = False,
) -> None:
    """Loads a server by its public API and measures it: open or closed loop, or a recorded trace."""
    flags = {name: value for name, value in locals().items() if name != "compare"}
    if compare is None and not api_key and (key := os.environ.get("OPENAI_API_KEY")):
        flags["api_key"] = [key]
    # Like the services, load tests are above this package.
    raise typer.Exit(importlib.import_module("loadtest.command").run(compared=compare, **flags))


@app.command()
def version() -> None:
    """Prints the version."""
    from importlib import metadata

    typer.echo(f"baton {metadata.version('baton-serving')}")


def _load(kind: type[Settings], file: Path | None, flags: dict[str, Any]) -> Settings:
    if file is None and (named := os.environ.get("BATON_CONFIG")):
        file = Path(named)
    return kind.load(file=file, env=os.environ, flags=flags)


def _serve(module: str, settings: PodConfig | GatewayConfig) -> None:
    """Runs `serve` of a service's module, then ends the process. Services are above this package, hence looked up by
    name.
    """
    from common.logs import setup_logs
    from common.models import resolve_model, served_name

    setup_logs(settings.log_level, settings.log_format)
    # Until Lifecycle takes over. A container's first process would otherwise not hear it at all.
    signal.signal(signal.SIGTERM, lambda number, _frame: os._exit(128 + number))
    if isinstance(settings, PodConfig):
        if settings.cpus is not None:
            run_on(settings.cpus)
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
    _end(code if isinstance(code, int) else EXIT_FAILED)


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


def main() -> NoReturn:
    """Entry point of the console script."""
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="baton", standalone_mode=False)
    except _CommandLineError as error:
        code = _complain(f"{error.format_message()} {_hint()}", EXIT_USAGE)
    except ConfigError as error:
        code = _complain(f"{error.message} {_hint()}" if error.message.startswith("--") else error.message, EXIT_USAGE)
    except BatonError as error:
        code = _complain(error.message, EXIT_FAILED)
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    sys.exit(code or 0)


def _hint() -> str:
    """Where to read about the flags of the command that was asked for."""
    commands = {command.callback.__name__ for command in app.registered_commands if command.callback is not None}
    path = ("baton", *(name for name in sys.argv[1:2] if name in commands or name == "keys"))
    return f"({' '.join(path)} --help)"


def _complain(message: str, code: int) -> int:
    """One line for what is wrong; what a process's log said may follow on lines of their own."""
    typer.echo(f"baton: {message.strip()}", err=True)
    return code


if __name__ == "__main__":
    main()
