"""Streams one chat answer through the OpenAI API, and shows its time line from the gateway's record."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin

import httpx
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from common.errors import BatonError, Unavailable
from gateway.dashboard.spans import Span, spans_of

TIMEOUT_S = 120.0
MIN_BAR, MAX_BAR = 16, 48
SCALE = "the scale ends a third after the first token's hand-off; > means longer"
DETAIL_WIDTH = 74  # Columns for the text beside the bars, if the terminal is wide enough.


@dataclass(frozen=True)
class Answer:
    """A complete answer. Times are seconds since the request was sent."""

    request_id: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    first_s: float  # Time of the first text.
    last_s: float  # Time of the end of the stream.


def show_answer(console: Console, base_url: str, model: str, prompt: str, max_tokens: int, *, where: str = "") -> int:
    """Sends the prompt, prints the text as it arrives, then the waterfall and a line of figures that ends in `where`.

    Returns 0, or 1 without an answer.
    """
    console.print(f"\nPOST {base_url}/chat/completions", style="dim")
    console.print(f"> {prompt}\n", markup=False, style="bold")
    try:
        show = functools.partial(console.print, end="", markup=False, soft_wrap=True)
        answer = stream_chat(base_url, model, prompt, max_tokens, on_text=show)
        with _request("GET", urljoin(base_url, f"/debug/requests/{answer.request_id}")) as reply:
            timeline = json.loads(reply.read())
    except BatonError as error:
        console.print(f"\nno answer: {error.message}", markup=False)
        return 1
    console.print("\n")
    rest = answer.completion_tokens - 1
    rate = f", then {rest / (answer.last_s - answer.first_s):.0f} tokens/s" if rest > 0 else ""
    show_waterfall(console, timeline, tokens=answer.completion_tokens, end_s=answer.last_s)
    console.print(
        f"\n{answer.prompt_tokens} prompt tokens, {answer.completion_tokens} generated ({answer.finish_reason}); "
        f"first after {answer.first_s * 1000:.0f} ms{rate}{where}",
        style="dim",
        soft_wrap=True,
    )
    return 0


def stream_chat(base_url: str, model: str, prompt: str, max_tokens: int, *, on_text: Callable[[str], None]) -> Answer:
    """One streamed, greedy chat completion through the OpenAI API. Raises Unavailable if it fails at any point."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.monotonic()
    request_id, finish_reason, first_s = "", "", 0.0
    usage: dict[str, int] = {}
    with _request("POST", f"{base_url}/chat/completions", json=body) as reply:
        for line in reply.iter_lines():
            if line == "data: [DONE]":
                break
            if not line.startswith("data: "):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise Unavailable(event["error"].get("message", "the stream ended with an error"))
            request_id = event.get("id", request_id)
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                finish_reason = choice.get("finish_reason") or finish_reason
                if text := choice["delta"].get("content"):
                    first_s = first_s or time.monotonic() - started
                    on_text(text)
    if not finish_reason:
        raise Unavailable("the stream ended without a finish reason")
    return Answer(
        request_id=request_id,
        finish_reason=finish_reason,
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=usage.get("completion_tokens", 0),
        first_s=first_s,
        last_s=time.monotonic() - started,
    )


@contextlib.contextmanager
def _request(method: str, url: str, **content: Any) -> Iterator[httpx.Response]:
    """The response to one request. Raises Unavailable for every failure, also for statuses of 400 and more."""
    path = httpx.URL(url).path
    try:
        with httpx.stream(method, url, timeout=TIMEOUT_S, trust_env=False, **content) as reply:
            if reply.status_code >= 400:
                text = reply.read().decode("utf-8", "replace")
                raise Unavailable(f"{method} {path} answered {reply.status_code}: {text}")
            yield reply
    except (httpx.HTTPError, httpx.StreamError, ValueError) as error:
        raise Unavailable(f"{method} {path} failed: {error}") from error


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
