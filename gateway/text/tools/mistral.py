"""Tool calls of Mistral's models, in their two forms:

    [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]
    [TOOL_CALLS]f[ARGS]{...}                               since 2025, repeated for each call

The newer form may contain an id of the call ([CALL_ID]abc123def before [ARGS]) or leave [ARGS] out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from gateway.text.tools.call_parser import (
    BufferedParser,
    JsonCallReader,
    ToolDeltaBuilder,
    mistral_call_id,
    split_at_marker,
)
from gateway.text.tools.format import Function, LarkLiteral, ToolCall
from gateway.text.tools.json_scanner import JsonScanner
from gateway.text.tools.lark import call_rules, json_call_rules, lark_string

BEGIN = "[TOOL_CALLS]"
ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"
_HEAD = re.compile(r"([^\s\[{]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?")
#: Characters from BEGIN to the arguments.
_MAX_HEAD = 256


class _NamedCallReader:
    """Reads the call f[ARGS]{...}; has the interface of JsonCallReader."""

    def __init__(self, builder: ToolDeltaBuilder, name: str, lead: str) -> None:
        self.done = False
        self.invalid = False
        self._builder = builder
        self._raw = [lead]
        self._scanner = JsonScanner()
        builder.begin_call()
        builder.set_function(name)

    def feed(self, buffer: str) -> str:
        at, clean = self._scanner.feed(buffer, 0)
        self._raw.append(buffer[:at])
        self._builder.add_arguments(clean)
        if self._scanner.invalid:
            self.reject()
        elif self._scanner.done:
            self.done = True
            self._builder.end_call()
        return buffer[at:]

    def reject(self) -> None:
        self.invalid = True
        self._builder.reject_call("".join(self._raw))


class MistralParser(BufferedParser):
    """States: text -> (BEGIN) -> head -> call -> text, or a list: head -> call -> (comma) -> call ... -> text."""

    def __init__(self, function_names: frozenset[str], max_calls: int | None = None) -> None:
        super().__init__(function_names, max_calls, mistral_call_id)
        #: BEGIN, or a list's bracket or comma, of a call that has not begun.
        self._lead = ""
        self._in_list = False
        self._call: JsonCallReader | _NamedCallReader | None = None

    def _flush_rest(self) -> None:
        if self._call is not None:
            self._call.reject()
        else:
            self._builder.add_content(self._lead + self._buffer)

    def _step(self) -> bool:
        if self._call is not None:
            self._buffer = self._call.feed(self._buffer)
            if self._call.invalid:
                self._call, self._in_list = None, False
            elif self._call.done:
                self._call = None
            return True
        if self._in_list:
            return self._next_in_list()
        if self._lead:
            return self._head()
        before, marker, self._buffer = split_at_marker(self._buffer, BEGIN)
        self._builder.add_content(before)
        self._lead = marker
        return bool(marker)

    def _head(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest:
            return False
        space = self._buffer[: len(self._buffer) - len(rest)]
        if rest[0] == "[":
            self._in_list, self._lead, self._buffer = True, self._lead + space + "[", rest[1:]
            return True
        if rest[0] == "{":
            self._call = JsonCallReader(self._builder, self._function_names, self._lead + space)
            self._lead, self._buffer = "", rest
            return True
        arguments = rest.find("{", 0, _MAX_HEAD)
        if arguments < 0 and len(rest) < _MAX_HEAD:
            return False
        head = _HEAD.fullmatch(rest, 0, max(0, arguments))
        if head is None or head[1] not in self._function_names:
            return self._reject_lead()
        self._call = _NamedCallReader(self._builder, head[1], self._lead + space + head[0])
        self._lead, self._buffer = "", rest[arguments:]
        return True

    def _next_in_list(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest:
            return False
        first = self._lead.endswith("[")
        if rest[0] == "{" and self._lead:
            space = self._buffer[: len(self._buffer) - len(rest)]
            self._call = JsonCallReader(self._builder, self._function_names, self._lead + space)
            self._lead, self._buffer = "", rest
        elif rest[0] == "," and not self._lead:
            self._lead, self._buffer = ",", rest[1:]
        elif rest[0] == "]" and not first and not self._lead:
            self._in_list, self._buffer = False, rest[1:]
        else:
            return self._reject_lead()
        return True

    def _reject_lead(self) -> bool:
        self._builder.add_content(self._lead)
        self._lead, self._in_list = "", False
        return True


class MistralFormat:
    """The tool format of Mistral. `named`: the model was trained on the newer form."""

    name = "mistral"
    markers = (BEGIN, ARGS, CALL_ID)
    trigger = BEGIN

    def __init__(self, *, named: bool = False) -> None:
        self._named = named

    def new_parser(self, function_names: frozenset[str], max_calls: int | None = None) -> MistralParser:
        return MistralParser(function_names, max_calls)

    def call_regex(self, functions: Sequence[Function]) -> str:
        return r"(.|\n)*\[TOOL_CALLS\](.|\n)*"

    def lark_rules(
        self, functions: Sequence[Function], literal: LarkLiteral, *, parallel: bool, beside_json: bool
    ) -> str:
        if self._named:
            more = "+" if parallel else ""
            rules = call_rules("call", functions, lambda f: f"begin {lark_string(f.name)} {literal(ARGS)}")
            return f"calls: call{more}\n{rules}"
        more = ' (", " object)*' if parallel else ""
        return f'calls: begin "[" object{more} "]"\n{json_call_rules("object", functions, "arguments")}'

    def render_calls(self, calls: Sequence[ToolCall]) -> str:
        if self._named:
            return "".join(f"{BEGIN}{c.name}{ARGS}{c.arguments}" for c in calls)
        inner = ", ".join(f'{{"name": {json.dumps(c.name)}, "arguments": {c.arguments}}}' for c in calls)
        return f"{BEGIN}[{inner}]"
