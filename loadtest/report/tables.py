"""Prints results of load tests as terminal tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtest.report.comparison import Comparison
from loadtest.report.figures import PERCENTILES, warnings
from loadtest.report.html import LATENCIES, describe_load, ms

ATTAINMENT = 0.9  #: Share of good requests that is the aim if none is set.
GROWTH = 2.0  #: A server does not keep up if the last third of the requests waits this many times as long as the first,
GROWTH_MS = 1000.0  #: and this much longer.


def _table(columns: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    return table


def show(console: Console, document: Mapping[str, Any]) -> None:
    requests, rates, goodput = document["requests"], document["rates"], document["goodput"]
    lines = [
        f"{describe_load(document['config'])}: {requests['sent']} requests in {document['seconds']:.1f} s, "
        f"{requests['answered']} answered, {requests['failed']} failed"
        + (f", {requests['aborted']} aborted by the client" if requests["aborted"] else ""),
        f"{rates['answered_per_s']:.2f} answers/s (intended {rates['intended_per_s']:.2f}/s, sent "
        f"{rates['sent_per_s']:.2f}/s), {rates['output_tokens_per_s']:.1f} output tokens/s, "
        f"{rates['mean_running']:.1f} in flight on average",
    ]
    if goodput is not None:
        kept = ", ".join(f"{name} {share:.1%}" for name, share in goodput["kept"].items())
        lines.append(f"goodput {goodput['per_s']:.2f} requests/s: {goodput['share']:.1%} meet all objectives ({kept})")
    if document["tokens"]["cached_share"] is not None:
        lines.append(f"{document['tokens']['cached_share']:.1%} of the prompt tokens came from a prefix cache")
    columns = ("mean", *PERCENTILES, "max")
    table = _table(("", *columns))
    for name in LATENCIES:
        figures = document["latencies_ms"][name]
        if figures["count"]:
            table.add_row(name.replace("_", " "), *(ms(figures[key]) for key in columns))
    _print_lines(console, *lines)
    console.print(table)
    _print_lines(console, *(f"{e['count']} x {e['kind']}: {'; '.join(e['messages'])}" for e in document["errors"]))
    _print_lines(console, *(f"warning: {warning}" for warning in warnings(document)), f"Verdict: {verdict(document)}")


def verdict(document: Mapping[str, Any]) -> str:
    """Returns one sentence: whether the server met the load and its objectives, and how fast it was."""
    requests, rates, goodput, config = (document[name] for name in ("requests", "rates", "goodput", "config"))
    if not requests["answered"]:
        return "no request was answered."
    times = document["latencies_ms"]
    first = f"first token after {ms(times['ttft']['p50'])} in the median and {ms(times['ttft']['p99'])} at p99"
    load = describe_load(config)
    if goodput is not None:
        aim = config["attainment"] or ATTAINMENT
        kept = "keeps" if goodput["share"] >= aim else "misses"
        text = (
            f"the server {kept} the objectives with {load}: {goodput['share']:.1%} of requests are good, aim {aim:.0%}"
        )
    elif config["users"] is None and (waits := growing_waits_ms(document["records"])):
        text = (
            f"the server does not keep up with {load}: the median first token comes after {ms(waits[0])} at the start "
            f"of the run and after {ms(waits[1])} at its end"
        )
    elif config["users"] is None:
        text = f"the server keeps up with {load}: {first}"
    else:
        text = f"{load} get {rates['output_tokens_per_s']:.1f} output tokens/s: {first}"
    return text + (f"; {requests['failed']} of {requests['sent']} requests failed." if requests["failed"] else ".")


def growing_waits_ms(records: Mapping[str, Sequence[Any]]) -> tuple[float, float] | None:
    """Returns the median TTFT of the first and of the last third of the requests in ms; None if it hardly grows."""
    ttft = [value for value in records["ttft_ms"] if value is not None]
    third = len(ttft) // 3
    if not third:
        return None
    before, after = median(ttft[:third]), median(ttft[-third:])
    return (before, after) if after > max(GROWTH * before, before + GROWTH_MS) else None


def show_sweep(console: Console, done: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None) -> None:
    """Prints runs at rising rates. `best` is the run at the highest rate that met the objectives, or None."""
    columns = (
        "requests/s",
        "answered/s",
        "tokens/s",
        "good",
        "goodput/s",
        "ttft p50",
        "ttft p99",
        "itl p50",
        "itl p99",
    )
    table = _table(columns)
    for document in done:
        rates, goodput, times = document["rates"], document["goodput"], document["latencies_ms"]
        figures = [f"{rates['answered_per_s']:.2f}", f"{rates['output_tokens_per_s']:.0f}", f"{goodput['share']:.1%}"]
        latencies = [ms(times[name][share]) for name in ("ttft", "itl") for share in ("p50", "p99")]
        row = [f"{document['config']['rate']:g}", *figures, f"{goodput['per_s']:.2f}", *latencies]
        table.add_row(*row, style="bold" if document is best else None)
    console.print(table)
    if best is None:
        _print_lines(console, "The first rate already missed the objectives.")
    else:
        rate, per_s = best["config"]["rate"], best["goodput"]["per_s"]
        _print_lines(
            console, f"Highest rate that met the objectives: {rate:g} requests/s, goodput {per_s:.2f} requests/s."
        )


def show_comparison(console: Console, comparison: Comparison, names: Sequence[str]) -> None:
    table = _table(("", *names, "change", "significant"))
    for row in comparison.rows:
        if row.a is not None or row.b is not None:
            text = [ms(v) if row.unit == "ms" else "–" if v is None else f"{v:.4g}{row.unit}" for v in (row.a, row.b)]
            change = "–" if row.change is None else f"{row.change:+.1%}"
            style = None if row.negligible else "red" if row.worse_by else "green"
            table.add_row(row.name, *text, change, row.verdict, style=style)
    console.print(table)
    _print_lines(console, *(f"different setting: {name}: {a} and {b}" for name, a, b in comparison.differences))


def _print_lines(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
