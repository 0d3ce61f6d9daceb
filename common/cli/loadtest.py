"""`baton loadtest`. Like the services, load tests are above this package."""

from __future__ import annotations

import importlib
import os
from typing import Annotated

import typer

from common.cli.options import opt


def loadtest(
    url: Annotated[
        str | None,
        opt("The gateway (default http://127.0.0.1:8000); HOST:PORT with --protocol grpc.", "--url", metavar="URL"),
    ] = None,
    protocol: Annotated[str | None, opt("rest (default) or grpc.", "--protocol", metavar="PROTOCOL")] = None,
    endpoint: Annotated[str | None, opt("chat (default) or completions.", "--endpoint", metavar="ENDPOINT")] = None,
    model: Annotated[str | None, opt("Name of the model; default: the first that the server lists.")] = None,
    api_key: Annotated[
        list[str] | None, opt("API key, or several in turn (default: $OPENAI_API_KEY).", metavar="KEY")
    ] = None,
    rate: Annotated[str | None, opt("Open loop: requests per second in the mean.", metavar="X")] = None,
    rates: Annotated[
        str | None, opt("A run at each of these rates, while --slo is kept by --attainment (0.9).", metavar="X,..")
    ] = None,
    arrivals: Annotated[
        str | None, opt("With --rate: poisson (default), constant, gamma (bursts) or onoff.", metavar="KIND")
    ] = None,
    burstiness: Annotated[
        str | None, opt("Of gamma: the gaps' deviation over their mean (default 2; Poisson is 1).", metavar="X")
    ] = None,
    on_s: Annotated[str | None, opt("Of onoff: seconds with requests (default 5).", metavar="N")] = None,
    off_s: Annotated[str | None, opt("Of onoff: seconds without (default 5).", metavar="N")] = None,
    users: Annotated[str | None, opt("Closed loop: users who wait for their answers.", metavar="N")] = None,
    think_s: Annotated[str | None, opt("Mean pause of a user after an answer (default 0).", metavar="N")] = None,
    ramp_s: Annotated[str | None, opt("Seconds over which the users come (default 0).", metavar="N")] = None,
    trace: Annotated[
        str | None, opt("Recorded requests: Mooncake's .jsonl or Azure's .csv; with their times.", metavar="FILE")
    ] = None,
    speed: Annotated[str | None, opt("Replay the trace so many times as fast (default 1).", metavar="X")] = None,
    length_scale: Annotated[
        str | None, opt("Prompts, answers and shared blocks of the trace times this (default 1).", metavar="X")
    ] = None,
    max_input_tokens: Annotated[
        str | None, opt("Leave out requests of the trace with longer prompts, once scaled.", metavar="N")
    ] = None,
    max_output_tokens: Annotated[str | None, opt("Cut answers of the trace to this.", metavar="N")] = None,
    input_tokens: Annotated[
        str | None,
        opt("A user's message: 512, 128:1024 (uniform), ~512 (log-normal; default 256).", metavar="N"),
    ] = None,
    output_tokens: Annotated[str | None, opt("Of an answer, in the same way (default 64).", metavar="N")] = None,
    prefix_tokens: Annotated[str | None, opt("System prompt before the message (default 0).", metavar="N")] = None,
    prefixes: Annotated[
        str | None, opt("How many different system prompts there are (default 1).", metavar="N")
    ] = None,
    turns: Annotated[str | None, opt("Conversations of so many turns, as 4 or 2:8 (default 1).", metavar="N")] = None,
    prompts: Annotated[
        str | None, opt("text, or ids: token ids; default: ids for completions.", metavar="FORM")
    ] = None,
    vocab: Annotated[str | None, opt("Token ids to use (default 1000:30000).", metavar="LOW:HIGH")] = None,
    ignore_eos: Annotated[
        bool | None, typer.Option("--ignore-eos/--heed-eos", help="Answers are as long as asked for (default).")
    ] = None,
    temperature: Annotated[str | None, opt("Of sampling (default 0).", metavar="X")] = None,
    stream: Annotated[
        bool | None, typer.Option("--stream/--no-stream", help="Answers come in pieces (default).")
    ] = None,
    requests: Annotated[str | None, opt("Send so many; default: the whole trace.", metavar="N")] = None,
    duration_s: Annotated[
        str | None, opt("Send for so long, then wait (default 30 without --requests and --trace).", metavar="N")
    ] = None,
    max_concurrency: Annotated[
        str | None,
        opt("Most requests under way; others are held back, and count from when they were due.", metavar="N"),
    ] = None,
    abort_share: Annotated[
        str | None, opt("Share of requests whose client leaves half-way (default 0).", metavar="X")
    ] = None,
    deadline_s: Annotated[str | None, opt("Deadline of each request; the server is told.", metavar="N")] = None,
    warmup: Annotated[str | None, opt("Requests before the run, which are not counted.", metavar="N")] = None,
    settle_s: Annotated[str | None, opt("Seconds at the start that are not counted (default 0).", metavar="N")] = None,
    seed: Annotated[str | None, opt("Another seed: other times, lengths and texts (default 0).", metavar="N")] = None,
    slo: Annotated[
        str | None, opt("What is good: ttft, itl (mean), gap (longest), e2e, as in ttft=2s,itl=50ms.", metavar="TIMES")
    ] = None,
    attainment: Annotated[str | None, opt("Exit with 1 when a smaller share of requests is good.", metavar="X")] = None,
    max_failed: Annotated[str | None, opt("Exit with 1 when a larger share fails, like 1%.", metavar="X")] = None,
    out: Annotated[str | None, opt("Write everything as JSON.", metavar="FILE.json")] = None,
    html: Annotated[str | None, opt("Write a report with charts.", metavar="FILE.html")] = None,
    compare: Annotated[
        tuple[str, str] | None, opt("Run nothing: compare the results of two runs.", metavar="A.json B.json")
    ] = None,
    tolerance: Annotated[
        str | None, opt("With --compare: exit with 1 when a figure is clearly worse by more, like 10%.", metavar="X")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Prints the figures as JSON instead of a table.")] = False,
) -> None:
    """Loads a server by its public API and measures it.

    Open or closed loop, or a recorded trace.
    """
    flags = {name: value for name, value in locals().items() if name != "compare"}
    if compare is None and not api_key and (key := os.environ.get("OPENAI_API_KEY")):
        flags["api_key"] = [key]
    raise typer.Exit(importlib.import_module("loadtest.command").run(compared=compare, **flags))
