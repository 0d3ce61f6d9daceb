"""Answers of a model: tool calls in every format, and reasoning sections.

The deltas must add up to the same message however the text is cut: whole, into characters, and in two at each place.
An input is two bytes that choose format and options, and the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import chain, product

from common.types import FinishReason
from gateway.text.output import OutputParser, OutputParserConfig
from gateway.text.reasoning import REASONING_FORMATS, ReasoningParser, ReasoningSection
from gateway.text.tools.format import ParsedMessage, ToolCall, assemble
from gateway.text.tools.json_scanner import strict_json_object
from tests.fuzz.mutators import words
from tests.fuzz.target import FuzzTarget
from tests.rigs.tool_formats import FORMATS, SCHEMAS

NAMES = ("f", "get_weather", "ns.do-it")
_MAX_CALLS = (None, 1, 2)
_SECTIONS = list(ReasoningSection)
_ARGUMENTS: list[dict[str, object]] = [
    {},
    {"city": "Paris", "days": 3},
    {"a": 'x "q" \\ }]</tool_call>', "b": [1, {"c": None}], "é": -1.5e9},
    {"_x1": True, "n": {}, "t": "世\n"},
]
_MARKERS = chain(*((s.start, s.end) for s in REASONING_FORMATS), *(fmt.markers for fmt in FORMATS))
WORDS = (*words("answers"), *(marker.encode() for marker in _MARKERS), b" ", b"\n")
_MOST_CUTS = 16  #: Longer texts are not cut in two at every place.


def _cuts(text: str) -> Iterable[list[str]]:
    """Yields the text whole, as characters, and in two at each place."""
    yield [text]
    yield list(text)
    if len(text) <= _MOST_CUTS:
        yield from ([text[:at], text[at:]] for at in range(1, len(text)))


class ToolCalls(FuzzTarget):
    """The parsers of tool calls, behind reasoning sections."""

    words = WORDS
    usual_bytes = 256

    def seeds(self) -> Sequence[bytes]:
        calls = [ToolCall("x", name, json.dumps(arguments)) for name, arguments in product(NAMES, _ARGUMENTS)]
        texts = [fmt.render_calls(calls[i : i + 1 + i % 3]) for fmt in FORMATS for i in range(len(calls))]
        return [
            bytes([i % 251, i % 7 + 128 * (i % 3 == 0)]) + text.encode()
            for i, text in enumerate([*texts, "Hi", "<think>\nx</think>Hi"])
        ]

    def run(self, data: bytes) -> str:
        head, text = data[:2].ljust(2, b"\0"), data[2:].decode(errors="replace")
        fmt, max_calls = FORMATS[head[0] % len(FORMATS)], _MAX_CALLS[head[0] // len(FORMATS) % len(_MAX_CALLS)]
        section = _SECTIONS[head[1] // (len(REASONING_FORMATS) + 1) % len(_SECTIONS)]
        config = OutputParserConfig(
            tokenizer=None,  # type: ignore[arg-type]  # only for counts of reasoning tokens, and there are no tokens
            reasoning_format=(None, *REASONING_FORMATS)[head[1] % (len(REASONING_FORMATS) + 1)],
            initial_section=section,
            tool_format=fmt,
            function_names=frozenset(NAMES),
            schemas=SCHEMAS,
            max_calls=max_calls,
        )
        whole: tuple[object, ...] | None = None
        ended = FinishReason.LENGTH if head[1] & 128 else FinishReason.STOP
        for parts in _cuts(text):
            message, finish = _read(config, parts, ended)
            found = (
                message.content,
                message.reasoning,
                [(call.name, call.arguments) for call in message.tool_calls],
                finish,
            )
            whole = whole or found
            assert found == whole, f"cut into {len(parts)} parts: {found} instead of {whole}"
        for call in message.tool_calls:
            assert call.name in NAMES
            assert ended is FinishReason.LENGTH or strict_json_object(call.arguments) is not None
        return f"{fmt.name} {len(message.tool_calls)} {message.content is None} {message.reasoning is None} {finish}"


def _read(
    config: OutputParserConfig, parts: list[str], ended: FinishReason
) -> tuple[ParsedMessage, FinishReason | None]:
    parser = OutputParser(config)
    deltas = [delta for part in parts for delta in parser.feed(part, (), None)[0]]
    last, finish = parser.feed("", (), ended)
    return assemble([*deltas, *last]), finish


class Reasoning(FuzzTarget):
    """The parser of reasoning sections."""

    words = WORDS
    usual_bytes = 256

    def seeds(self) -> Sequence[bytes]:
        return [
            bytes([i, j]) + text.encode()
            for i, fmt in enumerate(REASONING_FORMATS)
            for j in range(len(_SECTIONS))
            for text in (
                f"{fmt.start}\nso\n{fmt.end}\n\nHi {fmt.start}",
                f" so{fmt.end}Hi",
                "Hi",
                f"{fmt.start} so",
                "",
            )
        ]

    def run(self, data: bytes) -> str:
        head, text = data[:2].ljust(2, b"\0"), data[2:].decode(errors="replace")
        fmt, section = REASONING_FORMATS[head[0] % len(REASONING_FORMATS)], _SECTIONS[head[1] % len(_SECTIONS)]
        whole: tuple[str, str] | None = None
        for parts in _cuts(text):
            parser = ReasoningParser(fmt, section)
            pieces = [*(parser.feed(part) for part in parts), parser.finish()]
            found = "".join(r for r, _ in pieces), "".join(a for _, a in pieces)
            whole = whole or found
            assert found == whole, f"cut into {len(parts)} parts: {found} instead of {whole}"
        return f"{fmt.name} {section} {bool(found[0])} {bool(found[1])}"
