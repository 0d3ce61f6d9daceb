"""Flags of several commands, and how flags become settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from common.settings.configs import GatewayConfig, PodConfig, UpConfig, WorkerConfig

Settings = TypeVar("Settings", UpConfig, PodConfig, WorkerConfig, GatewayConfig)


def opt(help_text: str, *names: str, metavar: str | None = None) -> Any:
    """An option without shown default. `names` are needed if typer 0.27 would take the metavar for the name."""
    return typer.Option(*names, help=help_text, metavar=metavar, show_default=False)


Config = Annotated[
    Path | None, opt("TOML file with these settings (flat keys, underscores for dashes).", metavar="FILE")
]
Model = Annotated[str | None, opt("smollm2 (the default) or a model directory.", metavar="NAME|DIR")]
ServedName = Annotated[str | None, opt("Name of the model for clients; default: the model's own.")]
Redis = Annotated[
    str | None,
    opt("URL of the prefix index: redis://, rediss://, unix://, redis+sentinel://, redis+cluster://.", metavar="URL"),
]
Host = Annotated[str | None, opt("Address to listen on (default 127.0.0.1); all but loopback need BATON_SECRET.")]
BlockSize = Annotated[str | None, opt("Tokens per KV block (default 16).", metavar="N")]
KvMemory = Annotated[
    str | None, opt("KV pool per pod, like 2GiB; default: 512M on a CPU, free memory on a GPU.", metavar="SIZE")
]
HostCache = Annotated[
    str | None,
    opt("Host memory per pod for KV blocks that its pool evicts, like 32GiB (default 0).", metavar="SIZE"),
]
ChunkTokens = Annotated[
    str | None, opt("Most tokens of one engine step (default 256; GPU: 2048, without decodes 8192).", metavar="N")
]
Speculation = Annotated[
    str | None, opt("Proposer of drafts: none (default), ngram, suffix, draft_model, eagle.", metavar="PROPOSER")
]
SpeculationModel = Annotated[
    str | None, opt("Directory of the draft model or EAGLE head, the same on all pods.", metavar="DIR")
]
SpeculationTokens = Annotated[str | None, opt("Most drafts per sequence and step (default 4).", metavar="N")]
SpeculationAccept = Annotated[
    str | None,
    opt(
        "How drafts are accepted: coupled (the default: same answers) or rejection (same distribution).",
        metavar="RULE",
    ),
]
LocalPrefill = Annotated[
    str | None,
    opt("Uncached suffixes that a decode pod computes: auto (the default), off, or up to N tokens.", metavar="N"),
]
PullMode = Annotated[
    str | None,
    opt(
        "A cached prefix of another pod: push (the default: that pod sends it) or off (compute it).",
        metavar="MODE",
    ),
]
Device = Annotated[str | None, opt("auto (the default), cpu, cuda or cuda:N.")]
DType = Annotated[str | None, opt("auto (the default), float32 or bfloat16.")]
LoadFormat = Annotated[str | None, opt("auto (the default), or dummy: random weights, needs only config.json.")]
WeightsSeed = Annotated[str | None, opt("Seed of --load-format dummy (default 0).", metavar="N")]
KvDType = Annotated[str | None, opt("auto (the default: as dtype) or fp8_e4m3, half of bfloat16's memory.")]
MaxModelLen = Annotated[str | None, opt("Longest prompt plus output; default: the model's.", metavar="N")]
DrainS = Annotated[str | None, opt("Most seconds for running requests to end after SIGTERM (default 30).", metavar="N")]
Threads = Annotated[str | None, opt("CPU threads of a pod; default: automatic.", metavar="N")]
ToolParser = Annotated[
    str | None,
    opt("Format of tool calls: auto (default), hermes, llama3_json, mistral, pythonic.", metavar="NAME"),
]
ReasoningParser = Annotated[str | None, opt("Format of reasoning: auto (default), none, think, ...", metavar="NAME")]
ApiKeys = Annotated[
    str | None,
    opt(
        "Files of API keys (JSON if it ends in .json, else TOML), or redis; default: no key needed.",
        metavar="FILE,..",
    ),
]
TensorParallelSize = Annotated[str | None, opt("Devices per pod (default 1).", metavar="N")]
TensorParallelNodes = Annotated[
    str | None, opt("Machines of the pod, with equally many devices (default 1).", metavar="N")
]
NetDevices = Annotated[str | None, opt("NICs for KV, as in UCX_NET_DEVICES; default: any.", metavar="NAME:PORT,..")]
Cpus = Annotated[str | None, opt("CPUs for threads, like 0-15; default: all.", metavar="N-M,..")]
AllowTcp = Annotated[bool | None, typer.Option("--allow-tcp", help="Allow TCP for KV in GPU memory.")]
Logs = Annotated[str | None, opt("debug, info (the default), warning or error.", metavar="LEVEL")]
LogFormat = Annotated[str | None, opt("json, text, or auto (the default): text on a terminal.", metavar="FORMAT")]
Traces = Annotated[
    str | None,
    opt("Target of spans: otlp, http://HOST:4318, grpc://HOST:4317 or file:PATH; default: off.", metavar="TARGET"),
]
TraceSample = Annotated[
    str | None, opt("Share of traced requests, if the client does not decide (default 1).", metavar="X")
]


def load(kind: type[Settings], file: Path | None, flags: dict[str, Any]) -> Settings:
    if file is None and (named := os.environ.get("BATON_CONFIG")):
        file = Path(named)
    return kind.load(file=file, env=os.environ, flags=flags)
