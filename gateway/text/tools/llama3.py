"""Tool calls of Llama 3: {"name": "f", "parameters": {...}}, alone or after <|python_tag|>, separated by semicolons.

A bare object is a call only at the beginning of an answer, or where the next call may begin. Elsewhere it is content.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from gateway.text.tools.call_parser import BufferedParser, JsonCallReader, split_at_marker
from gateway.text.tools.format import Function, LarkLiteral, ToolCall
from gateway.text.tools.lark import json_call_rules, json_schema_call_rules

TAG = "<|python_tag|>"


class Llama3Parser(BufferedParser):
    """States: start -> call -> (its end) -> between -> call; from all of them -> text -> (TAG) -> tagged -> call."""

    def __init__(self, function_names: frozenset[str], max_calls: int | None = None) -> None:
        super().__init__(function_names, max_calls)
        #: The tag or separator of a call that has not begun.
        self._lead = ""
        self._may_begin = True
        self._call: JsonCallReader | None = None

    def _flush_rest(self) -> None:
        if self._call is not None:
            self._call.reject()
        else:
            self._builder.add_content(self._lead + self._buffer)

    def _step(self) -> bool:
        if self._call is not None:
            self._buffer = self._call.feed(self._buffer)
            if self._call.done or self._call.invalid:
                self._may_begin, self._call = self._call.done, None
            return True
        if self._may_begin:
            return self._look_for_call()
        before, tag, self._buffer = split_at_marker(self._buffer, TAG)
        self._builder.add_content(before)
        if tag:
            self._lead, self._may_begin = tag, True
        return bool(tag)

    def _look_for_call(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest or (rest != TAG and TAG.startswith(rest)):
            return False
        space = self._buffer[: len(self._buffer) - len(rest)]
        if rest.startswith("{"):
            if not self._lead.strip():
                self._builder.add_content(self._lead + space)
                self._lead = space = ""
            self._call = JsonCallReader(self._builder, self._function_names, self._lead + space)
            self._lead, self._buffer = "", rest
        elif rest.startswith(TAG) and TAG not in self._lead:
            self._lead, self._buffer = self._lead + space + TAG, rest[len(TAG) :]
        elif rest.startswith(";") and self._builder.num_completed and not self._lead:
            self._lead, self._buffer = space + ";", rest[1:]
        else:
            self._builder.add_content(self._lead)
            self._lead, self._may_begin = "", False
        return True


class Llama3Format:
    """The tool format of Llama 3."""

    name = "llama3_json"
    markers = (TAG,)
    trigger = ""

    def new_parser(self, function_names: frozenset[str], max_calls: int | None = None) -> Llama3Parser:
        return Llama3Parser(function_names, max_calls)

    def call_regex(self, functions: Sequence[Function]) -> str:
        return r"\s*(;\s*)?\{\s*\"(name|type|function|parameters|arguments)\"(.|\n)*"

    def lark_rules(
        self, functions: Sequence[Function], literal: LarkLiteral, *, parallel: bool, beside_json: bool
    ) -> str:
        more = ' ("; " object)*' if parallel else ""
        make = json_schema_call_rules if beside_json else json_call_rules
        return f"calls: begin object{more}\n{make('object', functions, 'parameters')}"

    def render_calls(self, calls: Sequence[ToolCall]) -> str:
        return "; ".join(f'{{"name": {json.dumps(c.name)}, "parameters": {c.arguments}}}' for c in calls)
