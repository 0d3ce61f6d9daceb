"""What a run came to, on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtest.report.comparison import Comparison
from loadtest.report.figures import PERCENTILES, warnings
from loadtest.report.html import LATENCIES, load, ms


def show(console: Console, told: Mapping[str, Any]) -> None:
    """One run."""
    requests, rates, goodput = told["requests"], told["rates"], told["goodput"]
    lines = [
        f"{load(told['config'])}: {requests['sent']} requests in {told['seconds']:.1f} s, "
        f"{requests['answered']} answered, {requests['failed']} failed"
        + (f", {requests['aborted']} left on purpose" if requests["aborted"] else ""),
        f"{rates['answered_per_s']:.2f} answers/s (intended {rates['intended_per_s']:.2f}, sent "
        f"{rates['sent_per_s']:.2f} a second), {rates['output_tokens_per_s']:.1f} output tokens/s, "
        f"{rates['mean_running']:.1f} under way in the mean",
    ]
    if goodput is not None:
        kept = ", ".join(f"{name} {share:.1%}" for name, share in goodput["kept"].items())
        lines.append(f"goodput {goodput['per_s']:.2f}/s: {goodput['share']:.1%} keep all objectives ({kept})")
    if told["tokens"]["cached_share"] is not None:
        lines.append(f"{told['tokens']['cached_share']:.1%} of the prompt tokens came from a prefix cache")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", "mean", *PERCENTILES, "max"):
        table.add_column(column, justify="left" if not column else "right")
    for name in LATENCIES:
        figures = told["latencies_ms"][name]
        if figures["count"]:
            table.add_row(name.replace("_", " "), *(ms(figures[key]) for key in ("mean", *PERCENTILES, "max")))
    for line in lines:
        _say(console, line)
    console.print(table)
    for error in told["errors"]:
        _say(console, f"{error['count']} x {error['kind']}: {'; '.join(error['messages'])}")
    for warning in warnings(told):
        _say(console, f"note: {warning}")


def show_sweep(console: Console, done: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None) -> None:
    """Runs at rising rates, and the highest that was kept."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("rate", "answered/s", "tokens/s", "good", "goodput/s", "ttft p50", "ttft p99", "itl p50", "itl p99"):
        table.add_column(column, justify="right")
    for told in done:
        rates, goodput, times = told["rates"], told["goodput"], told["latencies_ms"]
        figures = [f"{rates['answered_per_s']:.2f}", f"{rates['output_tokens_per_s']:.0f}", f"{goodput['share']:.1%}"]
        latencies = [ms(times[name][share]) for name in ("ttft", "itl") for share in ("p50", "p99")]
        row = [f"{told['config']['rate']:g}", *figures, f"{goodput['per_s']:.2f}", *latencies]
        table.add_row(*row, style="bold" if told is best else None)
    console.print(table)
    if best is None:
        _say(console, "Not even the first rate was kept.")
    else:
        _say(console, f"Kept up with {best['config']['rate']:g} requests/s: goodput {best['goodput']['per_s']:.2f}/s.")


def show_comparison(console: Console, comparison: Comparison, names: Sequence[str]) -> None:
    """Two runs."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", *names, "change", "clear"):
        table.add_column(column, justify="left" if not column else "right")
    for row in comparison.rows:
        if row.a is None and row.b is None:
            continue
        text = [ms(v) if row.unit == "ms" else "–" if v is None else f"{v:.4g}{row.unit}" for v in (row.a, row.b)]
        change = "–" if row.change is None else f"{row.change:+.1%}"
        style = (
            None if row.significant is False or abs(row.change or 0.0) < 0.005 else "red" if row.worse_by else "green"
        )
        verdict = "" if row.significant is None else "yes" if row.significant else "no"
        table.add_row(row.name, *text, change, verdict, style=style)
    console.print(table)
    for name, a, b in comparison.differences:
        _say(console, f"differs: {name}: {a} and {b}")


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
