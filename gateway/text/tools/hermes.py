"""Tool calls of Hermes, Qwen 2.5 and 3, and many more: <tool_call>{"name": "f", "arguments": {...}}</tool_call>."""

from __future__ import annotations

import json
from collections.abc import Sequence

from gateway.text.tools.call_parser import BufferedParser, JsonCallReader, split_at_marker
from gateway.text.tools.format import Function, LarkLiteral, ToolCall
from gateway.text.tools.lark import json_call_rules

BEGIN = "<tool_call>"
END = "</tool_call>"


class HermesParser(BufferedParser):
    """States: text -> (BEGIN) -> call -> (end of its object) -> closing -> (END, or any other text) -> text."""

    def __init__(self, function_names: frozenset[str], max_calls: int | None = None) -> None:
        super().__init__(function_names, max_calls)
        self._call: JsonCallReader | None = None
        self._closing = False

    def _flush_rest(self) -> None:
        if self._call is not None:
            self._call.reject()
        elif not self._closing:
            self._builder.add_content(self._buffer)

    def _step(self) -> bool:
        """Does one state's work on the buffer. Returns False when it needs more text."""
        if self._call is not None:
            self._buffer = self._call.feed(self._buffer)
            if self._call.done or self._call.invalid:
                self._closing, self._call = self._call.done, None
            return True
        if self._closing:
            rest = self._buffer.lstrip()
            if rest != END and END.startswith(rest):
                return False
            self._closing = False
            if rest.startswith(END):
                self._buffer = rest[len(END) :]
            return True
        before, marker, self._buffer = split_at_marker(self._buffer, BEGIN)
        self._builder.add_content(before)
        if marker:
            self._call = JsonCallReader(self._builder, self._function_names, marker)
        return bool(marker)


class HermesFormat:
    """The tool format of Hermes and Qwen."""

    name = "hermes"
    markers = (BEGIN, END)
    trigger = BEGIN

    def new_parser(self, function_names: frozenset[str], max_calls: int | None = None) -> HermesParser:
        return HermesParser(function_names, max_calls)

    def call_regex(self, functions: Sequence[Function]) -> str:
        return r"(.|\n)*<tool_call>(.|\n)*"

    def lark_rules(
        self, functions: Sequence[Function], literal: LarkLiteral, *, parallel: bool, beside_json: bool
    ) -> str:
        more = ' ("\\n" call)*' if parallel else ""
        call = f'call: begin "\\n" object "\\n" {literal(END)}'
        return f"calls: call{more}\n{call}\n{json_call_rules('object', functions, 'arguments')}"

    def render_calls(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(f'{BEGIN}\n{{"name": {json.dumps(c.name)}, "arguments": {c.arguments}}}\n{END}' for c in calls)
