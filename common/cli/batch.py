"""`baton batch`: a file of requests, for a running gateway or for a stack of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path
from typing import Annotated

import typer

from common.cli.options import (
    Config,
    Device,
    DType,
    KvMemory,
    Logs,
    MaxModelLen,
    Model,
    ServedName,
    Threads,
    load,
    opt,
)
from common.config import UpConfig
from common.errors import ConfigError


def batch(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Requests in OpenAI's batch format.")],
    target: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Answers; a run goes on where one ended.")],
    url: Annotated[
        str | None,
        opt("A running gateway; default: a stack of our own, until all is answered.", "--url", metavar="URL"),
    ] = None,
    api_key: Annotated[str | None, opt("API key for --url (default: $OPENAI_API_KEY).", metavar="KEY")] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, metavar="N", help="Requests at the same time.")] = 64,
    retries: Annotated[
        int, typer.Option(min=0, metavar="N", help="Further tries of a request that may succeed later.")
    ] = 10,
    timeout_s: Annotated[float, typer.Option(min=0.1, metavar="N", help="Most seconds of one try.")] = 600.0,
    config: Config = None,
    model: Model = None,
    served_name: ServedName = None,
    prefill: Annotated[str | None, opt("Prefill pods of our own stack (default 1).", metavar="N")] = None,
    decode: Annotated[str | None, opt("Decode pods of our own stack (default 1).", metavar="N")] = None,
    device: Device = None,
    dtype: DType = None,
    max_model_len: MaxModelLen = None,
    kv_memory: KvMemory = None,
    threads: Threads = None,
    log_level: Logs = None,
) -> None:
    """Answers a file of requests.

    Run again after an interruption, it goes on where it ended.
    """
    others = ("source", "target", "url", "api_key", "concurrency", "retries", "timeout_s", "config")
    flags = {name: value for name, value in locals().items() if name not in (*others, "others")}
    from rich.console import Console

    from common.batch import run as batches
    from common.batch.records import check
    from common.batch.sender import Sending

    sending = Sending(url=url or "", concurrency=concurrency, retries=retries, timeout_s=timeout_s)
    if url is not None:
        for name, value in (*flags.items(), ("config", config)):
            if value is not None:
                raise ConfigError(f"--{name.replace('_', '-')} is for a stack of our own, without --url", field=name)
        sending = dataclasses.replace(sending, api_key=api_key or os.environ.get("OPENAI_API_KEY"))
        raise typer.Exit(asyncio.run(batches.run(Console(), source, target, sending)))
    settings = dataclasses.replace(load(UpConfig, config, {**flags, "port": "0"}), api_keys=())
    check(source)  # before a minute goes into starting
    from common.display import Board
    from common.stack import Stack
    from common.up import run_stack

    async def work(board: Board, stack: Stack) -> int:
        return await batches.run(board.console, source, target, dataclasses.replace(sending, url=stack.base_url))

    raise typer.Exit(asyncio.run(run_stack(settings, work)))
