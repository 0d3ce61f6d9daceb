"""Draws where one request's time went: a bar per phase on one axis, from the gateway's record of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

MIN_BAR, MAX_BAR = 16, 48
SCALE = "bars until the first token and its hand-off, and a third beyond; > goes on"
# Transports as kv_transfer names them, in words.
_TRANSPORTS = {
    "cma": "shared memory (cma)",
    "shm": "shared memory (shm)",
    "cuda_ipc": "NVLink or PCIe (cuda_ipc)",
    "cuda": "CUDA copies",
    "rdma": "RDMA",
    "tcp": "TCP",
    "loopback": "loopback (no network)",
    "unknown": "a transport that UCX chose",
}
# What the gateway did until each of these events.
_GATEWAY = (("tokenized", "tokenize"), ("admitted", "wait"), ("reserved", "route, reserve"))
DETAIL_WIDTH = 74  # kept free beside the bars where the terminal is wide enough


@dataclass(frozen=True)
class Span:
    """One phase, in seconds since the request arrived. parts: what it is made of, each with its start and end."""

    kind: str
    name: str
    start_s: float
    end_s: float
    detail: str = ""
    style: str = "cyan"
    parts: tuple[tuple[str, float, float], ...] = ()


def spans_of(timeline: Mapping[str, Any], *, tokens: int, end_s: float) -> list[Span]:
    """Phases of a request, from the JSON of GET /debug/requests/{id}; phases that did not happen are left out, and
    those of an attempt that another one followed.

    Events carry `t`, the second they reached the gateway, so a phase on a pod is placed by when its news arrived.
    tokens: how many were generated; end_s: when the client had the last one.
    """
    events: list[Mapping[str, Any]] = timeline["events"]
    last = {event["event"]: event for event in events}
    retried = max((i for i, event in enumerate(events) if event["event"] in ("retry", "resume")), default=-1)
    chunks = [event for event in events[retried + 1 :] if event["event"] == "chunk"]
    spans: list[Span] = []
    reserved, first, handed_off = last.get("reserved"), last.get("first_token"), last.get("handed_off")
    if reserved:
        what = (
            "tokenize, route, reserve" if reserved["outcome"] == "target" else "tokenize, route; decode prefills itself"
        )
        marks = [(word, last[event]["t"]) for event, word in _GATEWAY if event in last]
        starts = (0.0, *(end for _, end in marks))
        parts = tuple((word, start, end) for start, (word, end) in zip(starts, marks, strict=False))
        detail = f"{what} on {reserved['pod']}"
        spans.append(Span("gateway", "gateway", 0.0, reserved["t"], detail, "blue", parts))
    if first:
        start = max(first["t"] - first["compute_s"], 0.0)
        spans.append(Span("queue", "queue", max(start - first["queue_s"], 0.0), start, f"on {first['pod']}", "yellow"))
        done = first["cached_tokens"]
        for number, chunk in enumerate(chunks, 1):
            detail = f"tokens {done}-{chunk['computed_tokens']}, {chunk['delivered_blocks']} blocks delivered"
            spans.append(Span("chunk", f"chunk {number}", min(start, chunk["t"]), chunk["t"], detail, "cyan"))
            start, done = chunk["t"], chunk["computed_tokens"]
    if first and handed_off:
        early = handed_off["blocks_before_last_chunk"]
        by = _TRANSPORTS.get(handed_off["transport"], handed_off["transport"])
        detail = (
            f"{handed_off['blocks']} blocks, {handed_off['bytes'] / 2**20:.1f} MiB by {by}, "
            f"{early} before the last chunk's end"
        )
        pushes = tuple((f"blocks {p[0]}-{p[0] + p[1] - 1}", p[2], p[3]) for p in handed_off.get("pushes", ()))
        begin = min([*(chunk["t"] for chunk in chunks), first["t"], *(start for _, start, _ in pushes)])
        spans.append(Span("pushes", "pushes", begin, handed_off["t"], detail, "magenta", pushes))
        exposed = handed_off["exposed_s"]
        detail = "from the last chunk until decode has everything"
        spans.append(
            Span("hand_off", "hand-off", max(handed_off["t"] - exposed, 0.0), handed_off["t"], detail, "magenta")
        )
    decode = last.get("decode")
    if decode and reserved and reserved["outcome"] == "local":
        detail = f"by {reserved['pod']} itself, beside what it decodes"
        spans.append(Span("chunk", "prefill", reserved["t"], decode["t"], detail, "cyan"))
    if decode:
        begin = first["t"] if first else decode["t"]
        rest = tokens - 1 if first else tokens
        detail = f"{rest} tokens, {rest / max(end_s - begin, 1e-9):.0f} a second"
        spans.append(Span("decode", "decode", begin, max(end_s, decode["t"]), detail, "green"))
    return spans


def draw(console: Console, spans: Sequence[Span], axis_s: float) -> None:
    """A table of bars over [0, axis_s]; one that goes on beyond ends in >. Plain characters unless on a terminal."""
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
    """Up to a third beyond what comes before decode, which would otherwise leave the rest a sliver."""
    before = max((span.end_s for span in spans if span.kind != "decode"), default=0.0)
    end = max((span.end_s for span in spans), default=0.0)
    return min(end, before * 4 / 3 or end) or 1e-9


def show_waterfall(console: Console, timeline: Mapping[str, Any], *, tokens: int, end_s: float) -> None:
    """The waterfall of one request; a word on its scale when not everything fits."""
    spans = spans_of(timeline, tokens=tokens, end_s=end_s)
    axis_s = axis_of(spans)
    draw(console, spans, axis_s)
    if any(_goes_on(span, axis_s) for span in spans):
        console.print(SCALE, style="dim")
