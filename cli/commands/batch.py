"""`baton batch`: answers a file of requests by a running gateway or by a stack of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.options import Config, load, opt, takes_settings
from common.errors import ConfigError
from common.settings.up import UpConfig

if TYPE_CHECKING:  # only imported when the command runs
    from rich.console import Console
    from rich.progress import Progress

    from cli.batch import Request, Result, Retry, Sending
    from cli.stack.stack import Stack
    from cli.stack.up import Board

_POD_SETTINGS = ("device", "dtype", "max_model_len", "kv_memory", "threads")  #: Settings of a stack of its own.
STACK_SETTINGS = frozenset({"model", "served_name", "prefill", "decode", "aggregated", "log_level", *_POD_SETTINGS})
SYNC_S = 1.0  # Interval of fsync: the answers that a crash of the machine may lose.
SAY_EVERY_S = 5.0  # Interval of lines about retries.
MAX_REASONS = 5  # Max reasons of failures that the summary lists.
REASON_CHARS = 300


@takes_settings(UpConfig, only=STACK_SETTINGS)
def batch(
    flags: dict[str, Any],
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Requests in OpenAI's batch format.")],
    target: Annotated[
        Path, typer.Argument(metavar="OUT.jsonl", help="Answers; a second run continues where the first ended.")
    ],
    url: Annotated[
        str | None,
        opt("A running gateway; default: a stack that runs until all requests are answered.", "--url", metavar="URL"),
    ] = None,
    api_key: Annotated[str | None, opt("API key for --url (default: $OPENAI_API_KEY).", metavar="KEY")] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, metavar="N", help="Requests at the same time.")] = 64,
    retries: Annotated[
        int, typer.Option(min=0, metavar="N", help="Retries of a request after temporary failures.")
    ] = 10,
    timeout_s: Annotated[float, typer.Option(min=0.1, metavar="N", help="Max seconds of one try.")] = 600.0,
    retry_errors: Annotated[
        bool, opt("Send requests again that a former run ended with an error of any kind.", "--retry-errors")
    ] = False,
    config: Config = None,
) -> None:
    """Answers a file of requests.

    After an interruption, a second run continues where the first ended.
    """
    from rich.console import Console

    from cli.batch import Sending, check

    sending = Sending(url=url or "", concurrency=concurrency, retries=retries, timeout_s=timeout_s)
    if url is not None:
        if given := [name for name, value in (*flags.items(), ("config", config)) if value is not None]:
            flag = f"--{given[0].replace('_', '-')}"
            raise ConfigError(f"{flag} cannot be combined with --url: it is for a stack of its own", field=given[0])
        sending = dataclasses.replace(sending, api_key=api_key or os.environ.get("OPENAI_API_KEY"))
        raise typer.Exit(asyncio.run(run(Console(), source, target, sending, retry_errors=retry_errors)))
    settings = dataclasses.replace(load(UpConfig, config, {**flags, "port": "0"}), api_keys=())
    check(source)  # before the stack starts, which takes a minute
    from cli.stack.up import run_stack

    async def work(board: Board, stack: Stack) -> int:
        own = dataclasses.replace(sending, url=stack.base_url)
        return await run(board.console, source, target, own, retry_errors=retry_errors)

    raise typer.Exit(asyncio.run(run_stack(settings, work)))


async def run(console: Console, source: Path, target: Path, sending: Sending, *, retry_errors: bool = False) -> int:
    """Sends the requests without an answer. Returns 0, or 1 if requests failed, in this run or before.

    `retry_errors` also sends requests again that have errors as answers. Raises ConfigError, Unavailable.
    """
    from cli.batch import Answers, check, requests, send_all
    from cli.client import server_url

    total = check(source)
    server_url(sending.url)
    began = time.monotonic()
    number, reasons = Counter[str](), Counter[str]()
    say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    with Answers(target, retry_errors=retry_errors) as answers, _bar(console) as bar:
        known = frozenset(answers.done)
        before = [answers.done[request.custom_id] for request in requests(source) if request.custom_id in known]
        skipped, failed_before = len(before), sum(before)
        task = bar.add_task("requests", total=total, completed=skipped, errors="")
        synced, said = began, -SAY_EVERY_S

        def done(request: Request, result: Result) -> None:
            nonlocal synced
            answers.append(request.custom_id, result)
            number["answered" if result.answered else "failed"] += 1
            if not result.answered:
                reasons[result.reason[:REASON_CHARS]] += 1
            usage = result.body.get("usage") if isinstance(result.body, dict) else None
            if isinstance(usage, dict):
                number["prompt"] += usage.get("prompt_tokens") or usage.get("input_tokens") or 0
                number["output"] += usage.get("completion_tokens") or usage.get("output_tokens") or 0
            if time.monotonic() - synced > SYNC_S:
                answers.sync()
                synced = time.monotonic()
            bar.update(task, advance=1, errors=f"{number['failed']} failed" if number["failed"] else "")

        def retried(retry: Retry) -> None:
            nonlocal said
            number["retries"] += 1
            if time.monotonic() - said > SAY_EVERY_S:  # the first result may take long
                said = time.monotonic()
                others = f", {number['retries']} retries so far" if number["retries"] > 1 else ""
                say(
                    f"try {retry.number} of {retry.tries} in {retry.pause_s:.1f} s{others}: "
                    f"{retry.reason[:REASON_CHARS]}"
                )

        left = (request for request in requests(source) if request.custom_id not in known)
        await send_all(sending, left, done, retried)
    took = max(1e-9, time.monotonic() - began)
    say(
        f"{number['answered']} answered, {number['failed']} failed, {skipped} had answers already"
        f"{f' ({failed_before} of them errors)' if failed_before else ''}; {number['retries']} retries; "
        f"{number['prompt']} prompt tokens, {number['output']} generated ({number['output'] / took:.1f} tokens/s) in "
        f"{took:.1f} s; {target}"
    )
    for reason, times in reasons.most_common(MAX_REASONS):
        say(f"  {times} failed: {reason}")
    return 1 if number["failed"] or failed_before else 0


def _bar(console: Console) -> Progress:
    from rich import progress as rich

    times = (rich.TimeElapsedColumn(), rich.TimeRemainingColumn())
    columns = ("{task.description}", rich.BarColumn(), rich.MofNCompleteColumn(), *times, "[red]{task.fields[errors]}")
    return rich.Progress(*columns, console=console, transient=True)
