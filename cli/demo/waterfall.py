"""Draws the time line of one request from the gateway's record: a bar per phase on one axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.dashboard.spans import Span, spans_of

MIN_BAR, MAX_BAR = 16, 48
SCALE = "bars until the first token and its hand-off, and a third beyond; > goes on"
#: Columns for the text beside the bars, if the terminal is wide enough.
DETAIL_WIDTH = 74


def draw(console: Console, spans: Sequence[Span], axis_s: float) -> None:
    """Prints a table of bars over [0, axis_s]. A longer bar ends in ">". Without a terminal the bars are ASCII."""
    bar_width = max(MIN_BAR, min(MAX_BAR, console.width - DETAIL_WIDTH))
    block = "\u2588" if console.is_terminal else "#"
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, min_width=bar_width)
    table.add_column()
    for span in spans:
        left = min(round(span.start_s / axis_s * bar_width), bar_width - 1)
        width = max(1, min(round((span.end_s - span.start_s) / axis_s * bar_width), bar_width - left))
        beyond = ">" if _goes_on(span, axis_s) else ""
        bar = Text(" " * left)
        bar.append(block * (width - len(beyond)) + beyond, style=span.style)
        bar.append(" " * (bar_width - left - width))
        table.add_row(span.name, f"{(span.end_s - span.start_s) * 1000:.1f} ms", bar, span.detail)
    console.print(table)


def _goes_on(span: Span, axis_s: float) -> bool:
    return span.end_s > axis_s * 1.001


def axis_of(spans: Sequence[Span]) -> float:
    """Length of the axis: at most 4/3 of the time before decode, so that a long decode does not hide other phases."""
    before = max((span.end_s for span in spans if span.kind != "decode"), default=0.0)
    end = max((span.end_s for span in spans), default=0.0)
    return min(end, before * 4 / 3 or end) or 1e-9


def show_waterfall(console: Console, timeline: Mapping[str, Any], *, tokens: int, end_s: float) -> None:
    """Prints the waterfall of one request, with a note on the scale if a bar is cut."""
    spans = spans_of(timeline, tokens=tokens, end_s=end_s)
    axis_s = axis_of(spans)
    draw(console, spans, axis_s)
    if any(_goes_on(span, axis_s) for span in spans):
        console.print(SCALE, style="dim")
