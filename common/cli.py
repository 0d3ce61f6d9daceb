"""The `baton` command. Only reads the command line: what a command does is imported when it runs, so help is quick.

Exit codes: 0 fine, 1 something failed or is missing, 2 wrong usage or configuration (one readable line on stderr), 3 a
pod's KV pool stays quarantined, 4 a pod lost one of its threads; after 3 and 4 a restart helps.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import importlib
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from common.config import GatewayConfig, PodConfig, UpConfig
from common.errors import BatonError, ConfigError
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


class LogLevel(enum.StrEnum):
    """How much is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def _opt(help_text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help_text, metavar=metavar, show_default=False)


Config = Annotated[
    Path | None, _opt("TOML file with the settings below (flat, dashes as underscores).", metavar="FILE")
]
Model = Annotated[str | None, _opt("smollm2 (the default) or a model directory.", metavar="NAME|DIR")]
ServedName = Annotated[str | None, _opt("Name of the model for clients; default: the model's own.")]
Redis = Annotated[str | None, _opt("redis://, rediss:// or unix:// URL of the prefix index.", metavar="URL")]
Host = Annotated[str | None, _opt("Address to listen on (default 127.0.0.1); others need BATON_SECRET.")]
BlockSize = Annotated[int | None, _opt("Tokens per KV block (default 16).")]
KvMemory = Annotated[str | None, _opt("KV pool of a pod, like 512M (the default) or 2GiB.", metavar="SIZE")]
ChunkTokens = Annotated[int | None, _opt("Most prompt tokens of one engine step (default 256).")]
Threads = Annotated[int | None, _opt("CPU threads of a pod; default: automatic.")]
Logs = Annotated[LogLevel | None, _opt("How much is logged (default info).")]


@app.command()
def up(
    config: Config = None,
    model: Model = None,
    prefill: Annotated[int | None, _opt("Number of prefill pods (default 1).")] = None,
    decode: Annotated[int | None, _opt("Number of decode pods (default 1).")] = None,
    redis: Redis = None,
    host: Annotated[str | None, _opt("Address of the gateway (default 127.0.0.1).")] = None,
    port: Annotated[int | None, _opt("Port of the gateway (default 8000, or the next free one).")] = None,
    chunk_tokens: ChunkTokens = None,
    block_size: BlockSize = None,
    kv_memory: KvMemory = None,
    threads: Threads = None,
    log_dir: Annotated[str | None, _opt("Where the processes log; default: a new folder in the user's state.")] = None,
    log_level: Logs = None,
    once: Annotated[
        str | None, _opt("Answer this prompt, show where its time went, and stop.", metavar="PROMPT")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer to --once, in tokens.", min=1)] = 96,
) -> None:
    """Runs everything on this machine: Valkey (or --redis), prefill and decode pods, a gateway; until Ctrl-C."""
    flags = {k: v for k, v in locals().items() if k not in ("config", "once", "max_tokens")}
    settings = _load(UpConfig, config, flags)
    from common.up import run

    raise typer.Exit(asyncio.run(run(settings, once=once, max_tokens=max_tokens)))


@app.command()
def serve(
    role: Annotated[Role | None, _opt("What this pod does; both is an aggregated server.")] = None,
    config: Config = None,
    model: Model = None,
    served_name: ServedName = None,
    name: Annotated[str | None, _opt("Stable name of the pod; default: role and host name.")] = None,
    host: Host = None,
    port: Annotated[int | None, _opt("gRPC port; default: any free one.")] = None,
    advertise: Annotated[str | None, _opt("Address under which peers reach this pod.", metavar="HOST:PORT")] = None,
    redis: Redis = None,
    device: Annotated[str | None, _opt("auto (the default), cpu, cuda or cuda:N.")] = None,
    dtype: Annotated[str | None, _opt("auto (the default), float32 or bfloat16.")] = None,
    threads: Threads = None,
    block_size: BlockSize = None,
    kv_memory: KvMemory = None,
    max_model_len: Annotated[int | None, _opt("Longest prompt plus output; default: the model's.")] = None,
    chunk_tokens: ChunkTokens = None,
    max_seqs: Annotated[int | None, _opt("Most sequences at once (default 64).")] = None,
    local_prefill_tokens: Annotated[int | None, _opt("Suffixes that decode computes itself (default 0).")] = None,
    checksums: Annotated[bool | None, typer.Option("--checksums", help="Check every moved block (slow).")] = None,
    allow_tcp: Annotated[bool | None, typer.Option("--allow-tcp", help="KV on a GPU may travel over TCP.")] = None,
    metrics_port: Annotated[int | None, _opt("Prometheus port; default: off.")] = None,
    drain_s: Annotated[float | None, _opt("Most seconds from SIGTERM to the end (default 30).")] = None,
    log_level: Logs = None,
) -> None:
    """Runs one pod: --role prefill, decode or both."""
    flags = {k: v for k, v in locals().items() if k != "config"}
    settings = _load(PodConfig, config, flags)
    service = "prefill_service" if settings.role is Role.PREFILL else "decode_service"
    _serve(f"{service}.server", settings)


@app.command()
def gateway(
    config: Config = None,
    model: Model = None,
    served_name: ServedName = None,
    host: Host = None,
    port: Annotated[int | None, _opt("HTTP port (default 8000).")] = None,
    grpc_port: Annotated[int | None, _opt("Port of the public gRPC API; default: off.")] = None,
    redis: Redis = None,
    pods: Annotated[str | None, _opt("Pods to use without or beside Redis.", metavar="HOST:PORT,...")] = None,
    max_body_bytes: Annotated[str | None, _opt("Largest request body (default 8MiB).", metavar="SIZE")] = None,
    request_timeout_s: Annotated[float | None, _opt("Deadline of requests that set none (default 600).")] = None,
    max_inflight: Annotated[int | None, _opt("Most requests at once; more get 429 (default 1024).")] = None,
    drain_s: Annotated[float | None, _opt("Most seconds from SIGTERM to the end (default 30).")] = None,
    log_level: Logs = None,
) -> None:
    """Runs the gateway: OpenAI REST and gRPC for clients, routing to the pods."""
    flags = {k: v for k, v in locals().items() if k != "config"}
    _serve("gateway.server", _load(GatewayConfig, config, flags))


@app.command()
def doctor(redis: Redis = None) -> None:
    """Says what this machine offers to Baton, and what is missing and how to get it."""
    from common import doctor as examination

    raise typer.Exit(asyncio.run(examination.report(redis)))


@app.command()
def version() -> None:
    """Prints the version."""
    from importlib import metadata

    typer.echo(f"baton {metadata.version('baton-serving')}")


def _load(kind: type[Settings], file: Path | None, flags: dict[str, Any]) -> Settings:
    if file is None and (named := os.environ.get("BATON_CONFIG")):
        file = Path(named)
    plain = {name: value.value if isinstance(value, enum.Enum) else value for name, value in flags.items()}
    return kind.load(file=file, env=os.environ, flags=plain)


def _serve(module: str, settings: PodConfig | GatewayConfig) -> None:
    """Runs `serve` of a service's module, then ends the process. Services are above this package, hence looked up by
    name.
    """
    from common.logs import setup_logs
    from common.models import resolve_model, served_name

    setup_logs(settings.log_level)
    known_as = settings.served_name or served_name(settings.model)
    model = str(resolve_model(settings.model, say=lambda line: typer.echo(line, err=True)))
    resolved = dataclasses.replace(settings, model=model, served_name=known_as)
    code: int | str | None = 0
    try:
        asyncio.run(importlib.import_module(module).serve(resolved))
    except SystemExit as end:
        code = end.code
    _end(code if isinstance(code, int) else EXIT_FAILED)


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
        code = _complain(f"{error.format_message()} (baton --help)", EXIT_USAGE)
    except ConfigError as error:
        code = _complain(error.message, EXIT_USAGE)
    except BatonError as error:
        code = _complain(error.message, EXIT_FAILED)
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    sys.exit(code or 0)


def _complain(message: str, code: int) -> int:
    """One line for what is wrong; what a process's log said may follow on lines of their own."""
    typer.echo(f"baton: {message.strip()}", err=True)
    return code


if __name__ == "__main__":
    main()
