"""`baton plan`. Like the services, the simulator is above this package."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

from common.cli.options import opt


def plan(
    trace: Annotated[str | None, opt("Requests: Mooncake's .jsonl or Azure's .csv.", metavar="FILE")] = None,
    slo: Annotated[str | None, opt("What a request wants, as in ttft=2s,itl=50ms.", metavar="TIMES")] = None,
    rates: Annotated[
        str | None,
        opt(
            "h100-8b (default), h100-8b-rdma, flat-8k, or JSON: a result of benchmarks/engine.py or own figures.",
            metavar="R",
        ),
    ] = None,
    gpus: Annotated[str | None, opt("How many there are; default: any number.", metavar="N")] = None,
    attainment: Annotated[str | None, opt("Share of requests that keep the SLO (default 0.9).", metavar="X")] = None,
    requests: Annotated[str | None, opt("How many of the trace to replay (default 1500).", metavar="N")] = None,
    chunks: Annotated[str | None, opt("Chunk sizes to try (default 512,1024,2048,4096,8192).", metavar="N,..")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Prints JSON instead of a table.")] = False,
) -> None:
    """Simulates a trace to find how many pods of each role it needs.

    The prefill:decode ratio, chunk size and number of GPUs with the highest goodput per GPU.
    """
    flags = dict(locals())
    raise typer.Exit(importlib.import_module("simulator.plan_command").run(**flags))
