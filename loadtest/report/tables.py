"""Prints results of load tests as terminal tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtest.report.comparison import Comparison
from loadtest.report.figures import PERCENTILES, warnings
from loadtest.report.html import LATENCIES, describe_load, ms


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
        f"{rates['answered_per_s']:.2f} answers/s (intended {rates['intended_per_s']:.2f}, sent "
        f"{rates['sent_per_s']:.2f} a second), {rates['output_tokens_per_s']:.1f} output tokens/s, "
        f"{rates['mean_running']:.1f} in flight on average",
    ]
    if goodput is not None:
        kept = ", ".join(f"{name} {share:.1%}" for name, share in goodput["kept"].items())
        lines.append(f"goodput {goodput['per_s']:.2f}/s: {goodput['share']:.1%} meet all objectives ({kept})")
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
    _print_lines(console, *(f"warning: {warning}" for warning in warnings(document)))


def show_sweep(console: Console, done: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None) -> None:
    """Prints runs at rising rates. `best` is the run at the highest rate that met the objectives, or None."""
    columns = ("rate", "answered/s", "tokens/s", "good", "goodput/s", "ttft p50", "ttft p99", "itl p50", "itl p99")
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
        _print_lines(console, f"Highest rate that met the objectives: {rate:g} requests/s, goodput {per_s:.2f}/s.")


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
