"""`baton loadtest`: runs a load test, or several at rising rates, or compares two.

Exit codes: 0 fine; 1 nothing was answered, the share of good requests is below --attainment (of --rates: at the first),
too many failed, or B is worse than --tolerance allows; 2 wrong usage; 130 stopped by Ctrl-C, after the figures of what
was done.
"""

from __future__ import annotations

import asyncio
import functools
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console

from common.errors import ConfigError
from common.trace import load_trace
from loadtest import figures, progress, report, run_file, tables
from loadtest.client import Client
from loadtest.comparison import compare
from loadtest.config import LoadConfig
from loadtest.run import Run
from loadtest.runner import Runner
from loadtest.sweep import kept, parse_rates, sweep

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130


def run(
    *,
    out: str | None,
    html: str | None,
    rates: str | None,
    compared: tuple[str, str] | None,
    tolerance: str | None,
    max_failed: str | None,
    quiet: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    """Values are as typed. The exit code. Raises ConfigError, Unavailable."""
    shown = Output(None if out is None else Path(out), None if html is None else Path(html), quiet, as_json)
    if compared is not None:
        others = {"out": out, "rates": rates, "max_failed": max_failed, **flags}
        given = [name for name, value in others.items() if value not in (None, [])]
        if given:
            raise ConfigError(f"--{given[0].replace('_', '-')} is not for --compare", field=given[0])
        return _compare(Path(compared[0]), Path(compared[1]), shown.html, _share("tolerance", tolerance))
    if tolerance is not None:
        raise ConfigError("--tolerance is for --compare", field="tolerance")
    most_failed = _share("max-failed", max_failed)
    if rates is not None:
        return _sweep(parse_rates(rates), flags, shown)
    config = LoadConfig.of(flags)
    told = _measure(config, shown)
    shown.write(told)
    if told["stopped"]:
        return EXIT_INTERRUPTED
    return 0 if _fine(told, config, most_failed) else EXIT_FAILED


@dataclass(frozen=True, slots=True)
class Output:
    """Where results go. quiet: no progress. as_json: figures as JSON on stdout."""

    out: Path | None
    html: Path | None
    quiet: bool
    as_json: bool

    def write(self, told: Mapping[str, Any]) -> None:
        """Files, and the figures on stdout."""
        if self.out is not None:
            run_file.write(self.out, told)
        if self.html is not None:
            run_file.write_text(self.html, report.page([told], ["run"]))
        if self.as_json:
            figures_only = {k: v for k, v in told.items() if k not in ("records", "curves_ms", "series")}
            print(run_file.dumps(figures_only))  # noqa: T201
        else:
            tables.show(Console(), told)

    def of_rate(self, rate: float) -> Output:
        """The same, with the rate in the names of the files."""
        out, html = (p and p.with_stem(f"{p.stem}-{rate:g}") for p in (self.out, self.html))
        return replace(self, out=out, html=html)


def _measure(config: LoadConfig, shown: Output) -> dict[str, Any]:
    watch = None if shown.quiet else functools.partial(progress.show, out=sys.stderr)
    return figures.document(run_sync(config, watch=watch), metadata.version("baton-serving"))


def _sweep(rates: tuple[float, ...], flags: Mapping[str, Any], shown: Output) -> int:
    if flags.get("rate") is not None:
        raise ConfigError("--rate and --rates exclude each other", field="rates")
    config = LoadConfig.of({**flags, "rate": str(rates[0])})
    if not config.slo:
        raise ConfigError("--rates needs --slo: it looks for the highest rate that keeps it", field="rates")
    done = []
    for told in sweep(config, rates, functools.partial(_measure, shown=shown)):
        shown.of_rate(told["config"]["rate"]).write(told)
        done.append(told)
    if done[-1]["stopped"]:
        return EXIT_INTERRUPTED
    best = [told for told in done if kept(told, config)]
    if not shown.as_json:
        tables.show_sweep(Console(), done, best[-1] if best else None)
    return 0 if best else EXIT_FAILED


def run_sync(config: LoadConfig, *, watch: Callable[[Run], Awaitable[None]] | None = None) -> Run:
    """One run in an event loop of its own; Ctrl-C ends it early. Raises ConfigError, Unavailable."""
    trace = None if config.trace is None else load_trace(config.trace)

    async def work() -> Run:
        client = _client(config)
        runner = Runner(config, client, trace)
        _stop_at_signals(runner)
        watching = None if watch is None else asyncio.ensure_future(watch(runner.run))
        try:
            return await runner.go()
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.wait((watching,))
            await client.close()

    _allow_connections()
    with asyncio.Runner(loop_factory=_fast_loop()) as loop:
        return loop.run(work())


def _stop_at_signals(runner: Runner) -> None:
    """The first Ctrl-C, or the end that a cluster orders, stops the run; the second ends the process."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        runner.stop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)


def _allow_connections() -> None:
    """As many open files as the system lets us have: every stream over REST is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _client(config: LoadConfig) -> Client:
    """gRPC is only loaded where it is used."""
    if config.protocol == "grpc":
        from loadtest.grpc_client import GrpcClient

        return GrpcClient(config)
    from loadtest.rest_client import RestClient

    return RestClient(config)


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where there is one (not on Windows): it reads sockets in a third of the time."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _fine(told: Mapping[str, Any], config: LoadConfig, most_failed: float | None) -> bool:
    requests, goodput = told["requests"], told["goodput"]
    if not requests["answered"] and not requests["aborted"]:
        return False
    if most_failed is not None and requests["failed"] > most_failed * requests["sent"]:
        return False
    return config.attainment is None or goodput["share"] >= config.attainment


def _compare(a: Path, b: Path, html: Path | None, tolerance: float | None) -> int:
    runs = [run_file.read(path) for path in (a, b)]
    names = [a.stem, b.stem] if a.stem != b.stem else [str(a), str(b)]
    comparison = compare(*runs)
    tables.show_comparison(Console(), comparison, names)
    if html is not None:
        run_file.write_text(html, report.page(runs, names, comparison))
    worse = [] if tolerance is None else comparison.worse(tolerance)
    for row in worse:
        print(f"worse by {row.worse_by:.1%}: {row.name}", file=sys.stderr)  # noqa: T201
    return EXIT_FAILED if worse else 0


def _share(name: str, text: str | None) -> float | None:
    """`5%` or `0.05`."""
    if text is None:
        return None
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ConfigError(f"--{name}: {text!r} is not a share like 0.05 or 5%", field=name)
    return value
