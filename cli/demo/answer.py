"""Streams one chat answer through the OpenAI API, and shows its time line from the gateway's record."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from cli.client import Server
from common.errors import BatonError
from gateway.dashboard.spans import Span, spans_of

TIMEOUT_S = 120.0
#: Titles of the phases in a sum, with the kinds of their spans.
PHASES = {"queue": "queue", "prefill": "chunk", "transfer": "hand_off", "decode": "decode"}
MIN_BAR, MAX_BAR = 16, 48
SCALE = "the scale ends a third after the first token's hand-off; > means longer"
DETAIL_WIDTH = 74  # Columns for the text beside the bars, if the terminal is wide enough.


def show_answer(
    console: Console,
    base_url: str,
    model: str,
    prompt: str,
    max_tokens: int,
    *,
    where: str = "",
    api_key: str | None = None,
) -> int:
    """Sends the prompt, prints the text as it arrives, then the waterfall and a line of figures that ends in `where`.

    Returns 0, or 1 without an answer.
    """
    console.print(f"\nPOST {base_url}/chat/completions", style="dim")
    console.print(f"> {prompt}\n", markup=False, style="bold")
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    try:
        with Server(base_url, api_key, timeout_s=TIMEOUT_S) as server:
            show = functools.partial(console.print, end="", markup=False, soft_wrap=True)
            answer = server.stream_chat(body, show)
            timeline = server.timeline(answer.request_id)
    except BatonError as error:
        console.print(f"\nno answer: {error.message}", markup=False)
        return 1
    console.print("\n")
    show_phases(console, timeline, tokens=answer.completion_tokens, end_s=answer.last_s)
    console.print(f"\n{answer.figures}{where}", style="dim", soft_wrap=True)
    return 0


def draw(console: Console, spans: Sequence[Span], axis_s: float) -> None:
    """Prints a table of bars over [0, axis_s]. A longer bar ends in ">". Without a terminal the bars are ASCII."""
    bar_width = max(MIN_BAR, min(MAX_BAR, console.width - DETAIL_WIDTH))
    block = "\u2588" if console.is_terminal else "#"
    columns = (Column(no_wrap=True), Column(justify="right", no_wrap=True), Column(no_wrap=True, min_width=bar_width))
    table = Table(*columns, Column(), box=None, pad_edge=False, show_header=False)
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


def show_phases(console: Console, timeline: Mapping[str, Any], *, tokens: int, end_s: float) -> None:
    """Prints the waterfall of one request, and the sums of its phases."""
    show_waterfall(console, timeline, tokens=tokens, end_s=end_s)
    spans = spans_of(timeline, tokens=tokens, end_s=end_s)
    sums = {title: sum(s.end_s - s.start_s for s in spans if s.kind == kind) for title, kind in PHASES.items()}
    console.print(", ".join(f"{title} {1e3 * took_s:.1f} ms" for title, took_s in sums.items()), style="dim")
