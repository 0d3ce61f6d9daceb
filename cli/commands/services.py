"""`baton serve`, `worker`, `gateway` and `up`: the processes of a cluster, and a stack on this machine."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from cli import exits
from cli.gpus import run_on
from cli.options import Config, load, opt, takes_settings
from common.errors import ConfigError
from common.settings.gateway import GatewayConfig
from common.settings.pod import PodConfig, WorkerConfig
from common.settings.table import FLAG, Settings, declared, former_names, read_toml, spelt
from common.settings.up import UpConfig

_Settings = TypeVar("_Settings", PodConfig, WorkerConfig, GatewayConfig)
_say = functools.partial(typer.echo, err=True)


ModelArgument = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="The model, as for --model.", show_default=False)
]
Once = Annotated[str | None, opt("Answer this prompt, show its time line, and stop.", metavar="PROMPT")]
Open = Annotated[bool, opt("Open the dashboard with its playground in a browser.", "--open")]


@takes_settings(UpConfig)
def up(
    flags: dict[str, Any], named: ModelArgument = None, config: Config = None, once: Once = None, browse: Open = False
) -> None:
    """Runs a stack on this machine, until Ctrl-C.

    It consists of Valkey (or --redis), prefill and decode pods (or --aggregated pods of both roles), and a gateway.
    """
    _run_stack(_with_model(flags, named), config, once, browse)


@takes_settings(PodConfig, UpConfig)
def serve(
    flags: dict[str, Any], named: ModelArgument = None, config: Config = None, once: Once = None, browse: Open = False
) -> None:
    """Serves a model, like `baton up`; with --role it is one pod.

    `baton serve MODEL` is `baton up --model MODEL`. With --role prefill, decode or both it runs one pod of a cluster. A
    stack takes the flags of `baton up`.
    """
    flags = _with_model(flags, named)
    given = [name for name, value in flags.items() if value is not None]
    if flags["model"] is not None and not _has_role(flags, config):
        _refuse(given, UpConfig, "is a flag of one pod: baton serve --role ROLE")
        _run_stack(flags, config, once, browse)
    if not given and not _has_role(flags, config):
        raise ConfigError("--role: missing: `baton serve MODEL` serves a model, --role ROLE runs one pod", field="role")
    _refuse([*given, *["once"] * (once is not None), *["open"] * browse], PodConfig, "is a flag of a stack: baton up")
    names = {*declared(PodConfig), *former_names(PodConfig)}
    settings = {name: value for name, value in flags.items() if name in names}
    run_service(load(PodConfig, config, settings), _serve_pod)


def _run_stack(flags: dict[str, Any], config: Path | None, once: str | None, browse: bool) -> NoReturn:
    names = {*declared(UpConfig), *former_names(UpConfig)}
    settings = load(UpConfig, config, {name: value for name, value in flags.items() if name in names})
    from cli.stack.up import run

    raise typer.Exit(asyncio.run(run(settings, once=once, browse=browse)))


def _with_model(flags: dict[str, Any], named: str | None) -> dict[str, Any]:
    """The flags with the model that the command line names without a flag. Raises ConfigError for two models."""
    if named is None:
        return flags
    if flags["model"] not in (None, named):
        raise ConfigError(f"--model: {flags['model']} and {named} are two models; a stack has one", field="model")
    return {**flags, "model": named}


def _has_role(flags: Mapping[str, Any], config: Path | None) -> bool:
    """Whether a flag, a variable or the configuration file gives the role of one pod."""
    if flags["role"] is not None or "BATON_ROLE" in os.environ:
        return True
    file = config or os.environ.get("BATON_CONFIG")
    return file is not None and "role" in read_toml(Path(file))


def _refuse(given: Iterable[str], cls: type[Settings], why: str) -> None:
    """Raises ConfigError for the first given flag that is not a setting of the class."""
    for name in given:
        if name not in declared(cls) and name not in former_names(cls):
            raise ConfigError(f"{spelt(name, FLAG)}: {why}", field=name)


@takes_settings(WorkerConfig)
def worker(flags: dict[str, Any], config: Config = None) -> None:
    """Adds this machine's devices to a pod of another machine.

    For tensor parallelism over several machines.
    """
    run_service(load(WorkerConfig, config, flags), _serve_ranks)


@takes_settings(GatewayConfig)
def gateway(
    flags: dict[str, Any],
    config: Config = None,
    model: Annotated[
        list[str] | None,
        opt(
            "A model of the hub (OWNER/NAME[@REVISION]), a model directory, or smollm2; several as NAME=MODEL, "
            "repeated; default: smollm2.",
            metavar="[NAME=]MODEL",
        ),
    ] = None,
) -> None:
    """Runs the gateway: OpenAI REST and gRPC for clients."""
    if model:
        several = len(model) > 1 or re.match(r"[^/=]+=", model[0])
        flags |= {"models": model} if several else {"model": model[0]}
    run_service(load(GatewayConfig, config, flags), _serve_clients)


def run_service(settings: _Settings, serve: Callable[[_Settings], Coroutine[Any, Any, None]]) -> NoReturn:
    """Runs `serve(settings)`, then ends the process. `serve` imports the service's code."""
    # These handlers hold until Lifecycle installs its own. Without them, a container's first process ignores SIGTERM,
    # torch's import of NumPy swallows KeyboardInterrupt, and Ctrl-C waits for a model that is being loaded.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, exits.at_once)
    from common.logs import setup_logs

    setup_logs(settings.log_level, settings.log_format)
    if not isinstance(settings, GatewayConfig) and settings.cpus is not None:
        run_on(settings.cpus)
    code: int | str | None = 0
    try:
        with asyncio.Runner(loop_factory=fast_loop() if isinstance(settings, GatewayConfig) else None) as runner:
            runner.run(serve(settings))
    except SystemExit as end:
        code = end.code
    _end(code if isinstance(code, int) else exits.FAILED)


def fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop, which handles sockets in a third of the time; None if it is not installed (Windows)."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _end(code: int) -> NoReturn:
    """Exits at once, after everything is freed: the exit handlers of torch and NIXL take seconds."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _serve_pod(settings: PodConfig) -> None:
    from cli.stack.supervisor import require_free_port

    # Checked before the model is loaded, which takes minutes for a large model.
    for name in ("port", "metrics_port"):
        require_free_port(settings.host, getattr(settings, name), name)
    settings = _resolved(settings)
    from decode_service.servicer import DecodeServicer
    from pod.runtime import PodRuntime
    from prefill_service.servicer import PrefillServicer

    pod = await PodRuntime.create(settings)
    await pod.run(PrefillServicer(pod), DecodeServicer(pod))


def _resolved(settings: PodConfig) -> PodConfig:
    """The settings with the model's directory and served name filled in. Raises ConfigError."""
    from cli.demo.model import prepared
    from common.model.directory import SMOLLM2, default_served_name

    known_as = settings.served_name or default_served_name(settings.model)
    model = prepared(settings.model, tokenizer=False, weights=settings.load_format == "auto", say=_say)
    if settings.speculation == "draft_model" and settings.speculation_model == SMOLLM2:
        prepared(SMOLLM2, say=_say)
    return dataclasses.replace(settings, model=str(model), served_name=known_as)


async def _serve_ranks(settings: WorkerConfig) -> None:
    from pod.worker import serve

    await serve(settings)


async def _serve_clients(settings: GatewayConfig) -> None:
    from cli.stack.supervisor import require_free_port

    for name in ("port", "grpc_port"):
        require_free_port(settings.host, getattr(settings, name), name)
    from cli.demo.model import demo_model
    from common.model.directory import SMOLLM2
    from gateway.server import serve

    if SMOLLM2 in settings.served_models().values():
        demo_model(_say)
    await serve(settings)
