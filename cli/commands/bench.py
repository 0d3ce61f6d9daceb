"""`baton bench`: a load test of about one minute with rising numbers of users, and one table.

Exit codes: 0 success; 1 no request was answered; 2 wrong usage; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import exits
from cli.commands.chat import DEFAULT_URL, Url
from cli.options import opt
from common.errors import ConfigError

if TYPE_CHECKING:  # imported only when the command runs
    from rich.table import Table

    from loadtest.config import LoadConfig

SENDING = 0.75  # Share of a stage in which requests are sent; the rest is for their answers.
ENOUGH = 0.9  # Share of the highest throughput; beyond it more users hardly help.
ROWS = (
    *("users", "answers", "failed", "answers/s", "output tokens/s", "tokens/s per user"),
    *("first token p50 ms", "first token p99 ms", "between tokens p50 ms", "between tokens p99 ms", "answer p50 s"),
)


def bench(
    url: Url = DEFAULT_URL,
    users: Annotated[
        str, typer.Option(metavar="N,..", help="Numbers of users at once, one after the other.")
    ] = "1,4,16",
    seconds: Annotated[
        float, typer.Option(min=1, max=86400, metavar="N", help="Seconds of all stages together.")
    ] = 60.0,
    input_tokens: Annotated[
        str, typer.Option(metavar="N", help="Length of a prompt, as for `baton loadtest`.")
    ] = "256",
    output_tokens: Annotated[str, typer.Option(metavar="N", help="Length of an answer, in the same forms.")] = "64",
    model: Annotated[
        str | None, opt("Name of the model; default: the first that the server lists.", metavar="NAME")
    ] = None,
    api_key: Annotated[str | None, opt("API key (default: $OPENAI_API_KEY).", metavar="KEY")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Prints the figures as JSON instead of a table.")] = False,
) -> None:
    """Measures a server in one minute.

    1, then 4, then 16 users send prompts of 256 tokens and read answers of 64. `baton loadtest` has all other loads.
    """
    from loadtest.config import LoadConfig

    stages = _stages(users)
    key = api_key or os.environ.get("OPENAI_API_KEY")
    flags = {"url": url, "model": model, "api_key": [key] if key else None, "users": str(stages[0]), "warmup": "1"}
    config = LoadConfig.of({**flags, "input_tokens": input_tokens, "output_tokens": output_tokens, "duration_s": "1"})
    raise typer.Exit(run(config, stages, seconds, quiet=quiet, as_json=as_json))


def _stages(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) if part.strip().isdecimal() else 0 for part in text.split(","))
    if not all(0 < number <= 100_000 for number in numbers) or sorted(set(numbers)) != list(numbers):
        raise ConfigError(f"--users: {text!r} is not a rising list of numbers like 1,4,16", field="users")
    return numbers


def run(config: LoadConfig, stages: Sequence[int], seconds: float, *, quiet: bool, as_json: bool) -> int:
    """Runs the stages and prints their figures. Returns the exit code. Raises ConfigError, Unavailable."""
    from importlib import metadata

    from rich.console import Console

    from cli.commands.loadtest import run_sync
    from loadtest.report import figures
    from loadtest.run import show_progress

    stage_s, documents = seconds / len(stages), list[dict[str, Any]]()
    watch = None if quiet else functools.partial(show_progress, out=sys.stderr)
    interrupted = False
    for number, users in enumerate(stages):
        stage = dataclasses.replace(
            config, users=users, duration_s=SENDING * stage_s, seed=config.seed + number, warmup=0 if number else 1
        )
        began = time.monotonic()
        measured = run_sync(stage, watch=watch, stop_after_s=stage_s)
        interrupted = measured.stopped and time.monotonic() - began < stage_s
        documents.append(figures.build_document(measured, metadata.version("baton-serving")))
        if interrupted:
            break
    if as_json:
        print(json.dumps([_figures(document) for document in documents], indent=2))  # noqa: T201
    else:
        console = Console(highlight=False)
        console.print(_table(documents))
        console.print(verdict(documents), soft_wrap=True)
    if interrupted:
        return exits.INTERRUPTED
    return 0 if any(document["requests"]["answered"] for document in documents) else exits.FAILED


def _figures(document: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one stage; times are in ms."""
    requests, rates, times = document["requests"], document["rates"], document["latencies_ms"]
    users, tokens_per_s = document["config"]["users"], rates["output_tokens_per_s"]
    tpot = times["tpot"]["p50"]
    return {
        "users": users,
        "answered": requests["answered"],
        "failed": requests["failed"],
        "answers_per_s": rates["answered_per_s"],
        "output_tokens_per_s": tokens_per_s,
        "tokens_per_s_and_user": 1e3 / tpot if tpot else None,
        **{f"{name}_ms_{share}": times[name][share] for name in ("ttft", "itl", "e2e") for share in ("p50", "p99")},
    }


def _table(documents: Sequence[Mapping[str, Any]]) -> Table:
    """A column per stage, so that each name fits a terminal with 80 columns."""
    from rich.table import Table

    columns = list[list[str]]()
    for document in documents:
        row = _figures(document)
        e2e = row["e2e_ms_p50"]
        shown = [row["users"], row["answered"], row["failed"]]
        rates = [
            f"{row['answers_per_s']:.2f}",
            f"{row['output_tokens_per_s']:.1f}",
            _number(row["tokens_per_s_and_user"]),
        ]
        times = [_number(row[f"{name}_ms_{share}"]) for name in ("ttft", "itl") for share in ("p50", "p99")]
        columns.append([*map(str, shown), *rates, *times, _number(None if e2e is None else e2e / 1e3)])
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    for _ in columns:
        table.add_column(justify="right", no_wrap=True, min_width=8)
    for name, *values in zip(ROWS, *columns, strict=True):
        table.add_row(name, *values)
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def verdict(documents: Sequence[Mapping[str, Any]]) -> str:
    """One sentence about the stages."""
    rows = [row for row in map(_figures, documents) if row["answered"]]
    if not rows:
        errors = [error for document in documents for error in document["errors"]]
        why = (
            f": {errors[0]['kind']}, {'; '.join(errors[0]['messages'])}"
            if errors
            else " in the time of its stage; a larger --seconds helps"
        )
        return f"Verdict: no request was answered{why}."
    most = max(rows, key=lambda row: row["output_tokens_per_s"])
    enough = next(r for r in rows if r["output_tokens_per_s"] >= ENOUGH * most["output_tokens_per_s"])
    failed = sum(document["requests"]["failed"] for document in documents)
    end = "more users may give more" if enough is rows[-1] and len(rows) > 1 else "more users hardly give more"
    return (
        f"Verdict: {enough['users']} users at once get {enough['output_tokens_per_s']:.0f} output tokens/s "
        f"({_number(enough['tokens_per_s_and_user'])} each), and the first token after "
        f"{_number(enough['ttft_ms_p50'])} ms in the median"
        + (f", {end}" if len(rows) > 1 else "")
        + (f"; {failed} requests failed" if failed else "")
        + "."
    )
