"""`baton loadtest`: runs a load test, or several at rising rates, or compares two results.

Exit codes:
    0    success
    1    no request was answered, or the share of good requests is below --attainment (with --rates: at the first rate),
         or too many requests failed, or B is worse than --tolerance allows
    2    wrong usage
    130  stopped by Ctrl-C, after printing the figures up to then
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import exits
from cli.commands.services import fast_loop
from cli.options import opt, takes_text
from common.errors import ConfigError

if TYPE_CHECKING:  # imported only when the command runs
    from loadtest.client.base import LoadClient
    from loadtest.config import LoadConfig
    from loadtest.run import LoadRun
    from loadtest.runner import LoadRunner


#: The options with text, which loadtest/config.py parses: by section, name, metavar and help.
OPTIONS = {
    "Server": (
        ("url", "URL", "The gateway (default http://127.0.0.1:8000); HOST:PORT with --protocol grpc."),
        ("protocol", "PROTOCOL", "rest (default) or grpc."),
        ("endpoint", "ENDPOINT", "chat (default) or completions."),
        ("model", "NAME", "Name of the model; default: the first that the server lists."),
        ("deadline_s", "N", "Deadline of each request, sent to the server."),
    ),
    "Arrivals": (
        ("rate", "X", "Open loop: mean requests per second."),
        ("rates", "X,..", "A run at each of these rates, as long as --attainment (0.9) of the requests keep --slo."),
        ("arrivals", "KIND", "With --rate: poisson (default), constant, gamma (bursts) or onoff."),
        ("burstiness", "X", "With gamma: standard deviation of gaps over their mean (default 2; Poisson is 1)."),
        ("on_s", "N", "With onoff: seconds with requests (default 5)."),
        ("off_s", "N", "With onoff: seconds without requests (default 5)."),
        ("users", "N", "Closed loop: number of users, each waiting for its answer."),
        ("think_s", "N", "Mean pause of a user after an answer (default 0)."),
        ("ramp_s", "N", "Seconds over which the users start (default 0)."),
        ("trace", "FILE", "Recorded requests with their times: Mooncake's .jsonl or Azure's .csv."),
        ("speed", "X", "Speed of the replay (default 1)."),
        ("length_scale", "X", "Factor for prompts, answers and shared blocks of the trace (default 1)."),
        ("max_input_tokens", "N", "Skip requests of the trace with longer (scaled) prompts."),
        ("max_output_tokens", "N", "Longest answer of the trace; longer ones are cut."),
        ("max_concurrency", "N", "Max requests in flight; others wait, and their latency counts from their due time."),
        ("abort_share", "X", "Share of requests that the client aborts half-way (default 0)."),
    ),
    "Requests": (
        ("input_tokens", "N", "Length of a user message: 512, 128:1024 (uniform), ~512 (log-normal); default 256."),
        ("output_tokens", "N", "Length of an answer, in the same forms (default 64)."),
        ("prefix_tokens", "N", "Length of the system prompt (default 0)."),
        ("prefixes", "N", "Number of different system prompts (default 1)."),
        ("turns", "N", "Turns of a conversation, like 4 or 2:8 (default 1)."),
        ("prompts", "FORM", "text, or ids: token ids; default: ids for completions."),
        ("vocab", "LOW:HIGH", "Token ids to use (default 1000:30000)."),
        ("temperature", "X", "Sampling temperature (default 0)."),
        ("seed", "N", "Seed of times, lengths and texts (default 0)."),
    ),
    "Length of the run": (
        ("requests", "N", "Number of requests; default: the whole trace."),
        ("duration_s", "N", "Send for N seconds, then wait for answers (default 30 without --requests and --trace)."),
        ("warmup", "N", "Requests before the run that are not counted."),
        ("settle_s", "N", "Seconds at the start that are not counted (default 0)."),
    ),
    "Result": (
        ("slo", "TIMES", "Limits of a good request: ttft, itl (mean), gap (longest), e2e, as in ttft=2s,itl=50ms."),
        ("attainment", "X", "Exit with 1 if a smaller share of requests is good."),
        ("max_failed", "X", "Exit with 1 if a larger share fails, like 1%."),
        ("out", "FILE.json", "Write all results as JSON."),
        ("html", "FILE.html", "Write a report with charts."),
        ("tolerance", "X", "With --compare: exit with 1 if a figure is significantly worse by more, like 10%."),
    ),
}


@takes_text(OPTIONS)
def loadtest(
    flags: dict[str, Any],
    api_key: Annotated[
        list[str] | None, opt("API key; several are used in turn (default: $OPENAI_API_KEY).", metavar="KEY")
    ] = None,
    ignore_eos: Annotated[
        bool | None, typer.Option("--ignore-eos/--heed-eos", help="Answers have the requested length (default).")
    ] = None,
    stream: Annotated[bool | None, typer.Option("--stream/--no-stream", help="Stream the answers (default).")] = None,
    compare: Annotated[
        tuple[str, str] | None, opt("Compare the results of two runs, without a run.", metavar="A.json B.json")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Prints the figures as JSON instead of a table.")] = False,
) -> None:
    """Sends load to a server's public API and measures it.

    Open loop, closed loop, or a recorded trace.
    """
    if compare is None and not api_key and (key := os.environ.get("OPENAI_API_KEY")):
        api_key = [key]
    flags |= {"api_key": api_key, "ignore_eos": ignore_eos, "stream": stream}
    raise typer.Exit(run(compared=compare, quiet=quiet, as_json=as_json, **flags))


def run(*, compared: tuple[str, str] | None, quiet: bool, as_json: bool, **flags: Any) -> int:
    """Runs the command with the flags as typed; returns the exit code. Raises ConfigError, Unavailable."""
    from loadtest.config import LoadConfig, parse_rates

    names = ("out", "html", "rates", "tolerance", "max_failed")
    out, html, rates, tolerance, max_failed = (flags.pop(name) for name in names)
    shown = Output(None if out is None else Path(out), None if html is None else Path(html), quiet, as_json)
    if compared is not None:
        others = {"out": out, "rates": rates, "max_failed": max_failed, **flags}
        given = [name for name, value in others.items() if value not in (None, [])]
        if given:
            raise ConfigError(f"--{given[0].replace('_', '-')} cannot be combined with --compare", field=given[0])
        return _compare(Path(compared[0]), Path(compared[1]), shown.html, _share("tolerance", tolerance))
    if tolerance is not None:
        raise ConfigError("--tolerance needs --compare", field="tolerance")
    max_failed_share = _share("max-failed", max_failed)
    if rates is not None:
        return _sweep(parse_rates(rates), flags, shown)
    config = LoadConfig.of(flags)
    document = _measure(config, shown)
    shown.write(document)
    if document["stopped"]:
        return exits.INTERRUPTED
    return 0 if _succeeded(document, config, max_failed_share) else exits.FAILED


@dataclass(frozen=True, slots=True)
class Output:
    """Where results are written."""

    out: Path | None
    html: Path | None
    quiet: bool  # Print no progress.
    as_json: bool  # Print the figures as JSON.

    def write(self, document: Mapping[str, Any]) -> None:
        """Writes the files, and prints the figures."""
        from rich.console import Console

        from loadtest.report import figures, html, tables

        if self.out is not None:
            figures.write(self.out, document)
        if self.html is not None:
            figures.write_text(self.html, html.page([document], ["run"]))
        if self.as_json:
            figures_only = {k: v for k, v in document.items() if k not in ("records", "curves_ms", "series")}
            print(figures.dumps(figures_only))  # noqa: T201
        else:
            tables.show(Console(), document)

    def of_rate(self, rate: float) -> Output:
        """The same output, with the rate in the file names."""
        out, html = (p and p.with_stem(f"{p.stem}-{rate:g}") for p in (self.out, self.html))
        return replace(self, out=out, html=html)


def _measure(config: LoadConfig, shown: Output) -> dict[str, Any]:
    from importlib import metadata

    from loadtest.report import figures
    from loadtest.run import show_progress

    watch = None if shown.quiet else functools.partial(show_progress, out=sys.stderr)
    return figures.build_document(run_sync(config, watch=watch), metadata.version("baton-serving"))


def _sweep(rates: tuple[float, ...], flags: Mapping[str, Any], shown: Output) -> int:
    from rich.console import Console

    from loadtest.config import LoadConfig, slo_kept, sweep
    from loadtest.report import tables

    if flags.get("rate") is not None:
        raise ConfigError("--rate and --rates exclude each other", field="rates")
    config = LoadConfig.of({**flags, "rate": str(rates[0])})
    if not config.slo:
        raise ConfigError("--rates needs --slo: it searches the highest rate that keeps the SLO", field="rates")
    done = []
    for document in sweep(config, rates, functools.partial(_measure, shown=shown)):
        shown.of_rate(document["config"]["rate"]).write(document)
        done.append(document)
    if done[-1]["stopped"]:
        return exits.INTERRUPTED
    best = [document for document in done if slo_kept(document, config)]
    if not shown.as_json:
        tables.show_sweep(Console(), done, best[-1] if best else None)
    return 0 if best else exits.FAILED


def run_sync(
    config: LoadConfig,
    *,
    watch: Callable[[LoadRun], Awaitable[None]] | None = None,
    stop_after_s: float | None = None,
) -> LoadRun:
    """Runs one load test in a new event loop; Ctrl-C, or `stop_after_s`, ends it early.

    Raises ConfigError, Unavailable.
    """
    import resource

    from loadtest.runner import LoadRunner
    from loadtest.workload.trace import load_trace

    trace = None if config.trace is None else load_trace(config.trace)

    async def work() -> LoadRun:
        client = _client(config)
        runner = LoadRunner(config, client, trace)
        _stop_at_signals(runner)
        if stop_after_s is not None:
            asyncio.get_running_loop().call_later(stop_after_s, runner.stop)
        watching = [] if watch is None else [asyncio.ensure_future(watch(runner.run))]
        try:
            return await runner.execute()
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            await client.close()

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # every REST stream needs an open file
    with asyncio.Runner(loop_factory=fast_loop()) as loop:
        return loop.run(work())


def _stop_at_signals(runner: LoadRunner) -> None:
    """The first SIGINT or SIGTERM stops the run; the second ends the process."""
    loop = asyncio.get_running_loop()

    numbers = (signal.SIGINT, signal.SIGTERM)

    def stop() -> None:
        runner.stop()
        for number in numbers:
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, stop)


def _client(config: LoadConfig) -> LoadClient:
    """The client of the protocol. gRPC is imported only if it is used."""
    if config.protocol == "grpc":
        from loadtest.client.grpc_client import GrpcClient

        return GrpcClient(config)
    from loadtest.client.rest_client import RestClient

    return RestClient(config)


def _succeeded(document: Mapping[str, Any], config: LoadConfig, max_failed_share: float | None) -> bool:
    requests = document["requests"]
    if not requests["answered"] and not requests["aborted"]:
        return False
    if max_failed_share is not None and requests["failed"] > max_failed_share * requests["sent"]:
        return False
    return config.attainment is None or document["goodput"]["share"] >= config.attainment


def _compare(a: Path, b: Path, html: Path | None, tolerance: float | None) -> int:
    from rich.console import Console

    from loadtest.report import figures, tables
    from loadtest.report import html as html_report
    from loadtest.report.comparison import compare_runs

    runs = [figures.read(path) for path in (a, b)]
    names = [a.stem, b.stem] if a.stem != b.stem else [str(a), str(b)]
    comparison = compare_runs(*runs)
    tables.show_comparison(Console(), comparison, names)
    if html is not None:
        figures.write_text(html, html_report.page(runs, names, comparison))
    worse = [] if tolerance is None else comparison.worse(tolerance)
    for row in worse:
        print(f"worse by {row.worse_by:.1%}: {row.name}", file=sys.stderr)  # noqa: T201
    return exits.FAILED if worse else 0


def _share(name: str, text: str | None) -> float | None:
    """The value of a share like `5%` or `0.05`. Raises ConfigError."""
    if text is None:
        return None
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ConfigError(f"--{name}: {text!r} is not a share like 0.05 or 5%", field=name)
    return value
