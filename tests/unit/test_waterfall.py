"""The waterfall of a request in a terminal: names of transports, and the legend of its marks."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from cli.demo.answer import SCALE, show_waterfall
from gateway.dashboard.spans import spans_of


def drawn(transport: str, end_s: float) -> str:
    first = {
        "t": 0.4,
        "event": "first_token",
        "pod": "prefill-0",
        "compute_s": 0.3,
        "queue_s": 0.05,
        "cached_tokens": 0,
    }
    handed_off: dict[str, Any] = {"t": 0.42, "event": "handed_off", "blocks": 8, "bytes": 1 << 20}
    handed_off |= {"blocks_before_last_chunk": 4, "transport": transport, "exposed_s": 0.01}
    events = [
        {"t": 0.01, "event": "reserved", "outcome": "target", "pod": "decode-0"},
        first,
        handed_off,
        {"t": 0.5, "event": "decode"},
    ]
    out = io.StringIO()
    show_waterfall(Console(file=out, width=200), {"events": events}, tokens=20, end_s=end_s)
    return out.getvalue()


@pytest.mark.parametrize(
    ("transport", "words"), [("cma", "by shared memory (cma),"), ("tcp", "by TCP,"), ("new-one", "by new-one,")]
)
def test_transports_are_named_in_words(transport: str, words: str) -> None:
    assert words in drawn(transport, 2.0)


def test_the_scale_is_explained_when_a_bar_exceeds_it() -> None:
    assert SCALE in drawn("cma", 2.0)
    assert ">" in drawn("cma", 2.0).replace(SCALE, "")
    assert ">" not in drawn("cma", 0.5)


def test_a_prompt_that_decode_computes_has_a_span() -> None:
    events: list[dict[str, Any]] = [
        {"t": 0.01, "event": "reserved", "outcome": "local", "pod": "decode-0"},
        {"t": 0.4, "event": "decode"},
    ]
    prefill, decode = spans_of({"events": events}, tokens=5, end_s=1.4)[1:]
    assert (prefill.kind, prefill.start_s, prefill.end_s) == ("chunk", 0.01, 0.4)
    assert (decode.start_s, decode.end_s) == (0.4, 1.4)
