"""The tool formats of the first models with tools, with calls that are JSON objects: Hermes, Llama 3 and Mistral."""

from __future__ import annotations

import json
import random
import re
import string
from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gateway.text.tools.format import (
    SYSTEM_RANDOM,
    Functions,
    LarkLiteral,
    Signs,
    ToolCall,
    ToolDeltaBuilder,
    ToolParser,
    split_at_marker,
)
from gateway.text.tools.json_scanner import JsonCallScanner, JsonScanner
from gateway.text.tools.lark import call_rules, json_call_rules, json_schema_call_rules, lark_string
from gateway.text.tools.marked import MarkedFormat

LLAMA3_TAG = "<|python_tag|>"
MISTRAL_BEGIN, MISTRAL_ARGS, MISTRAL_CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_MISTRAL_HEAD = re.compile(r"([^\s\[{]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?")
_MAX_MISTRAL_HEAD = 256  #: Characters from MISTRAL_BEGIN to the arguments.


class JsonCallReader:
    """Reads one call that is a JSON object, and passes its name and arguments on as they come."""

    def __init__(self, builder: ToolDeltaBuilder, names: Collection[str], lead: str, name: str | None = None) -> None:
        """Begins a call after its text `lead`. `name`: the function, if the object holds only its arguments."""
        self.done = False  # the call is complete
        self.invalid = False  #: The text is content, not a call.
        self._builder = builder
        self._object = JsonCallScanner(names) if name is None else JsonScanner()
        self._raw = [lead]
        self._named = name is not None
        builder.begin_call()
        if name is not None:
            builder.set_function(name)

    def feed(self, buffer: str) -> str:
        """Reads the object's part of the buffer and returns the rest."""
        at, arguments = self._object.feed(buffer, 0)
        self._raw.append(buffer[:at])
        if not self._named and isinstance(self._object, JsonCallScanner) and self._object.name is not None:
            self._named = True
            self._builder.set_function(self._object.name)
        self._builder.add_arguments(arguments)
        if self._object.invalid:
            self.reject()
        elif self._object.done:
            self.done = True
            self._builder.end_call()
        return buffer[at:]

    def end_cut(self) -> None:
        """Ends a call that max_tokens cut: its arguments so far stay, or it is content if its function is unknown."""
        if self._named:
            self._builder.add_arguments(self._object.pending)
        else:
            self.reject()

    def reject(self) -> None:
        """Turns the call, malformed or unfinished, into content."""
        self.invalid = True
        self._builder.reject_call("".join(self._raw))


class JsonCallParser(ToolParser):
    """Reads calls; subclasses find where they begin."""

    _call: JsonCallReader | None = None
    _lead = ""  #: Text of a call that has not begun: a marker, separator or bracket.

    def _step(self) -> bool:
        if self._call is None:
            return self._look_for_call()
        self._buffer = self._call.feed(self._buffer)
        if self._call.done or self._call.invalid:
            done, self._call = self._call.done, None
            self._on_call_end(done)
        return True

    def _flush_rest(self) -> None:
        if self._call is not None and self._cut:
            self._call.end_cut()
        elif self._call is not None:
            self._call.reject()
        else:
            self._builder.add_content(self._lead + self._buffer)

    def _begin_call(self, space: str, rest: str, name: str | None = None) -> bool:
        """Begins the call that `rest` starts with, after `_lead` and `space`."""
        self._call = JsonCallReader(self._builder, self._function_names, self._lead + space, name)
        self._lead, self._buffer = "", rest
        return True

    def _find_lead(self, marker: str) -> bool:
        """Adds the text before a marker, which becomes `_lead`. Returns False if it is not there."""
        before, self._lead, self._buffer = split_at_marker(self._buffer, marker)
        self._builder.add_content(before)
        return bool(self._lead)

    @abstractmethod
    def _look_for_call(self) -> bool:
        """Does `_step` while no call is open."""

    @abstractmethod
    def _on_call_end(self, done: bool) -> None:
        """The call is complete, or invalid if not `done`."""


HERMES_SIGNS = Signs(tokens=("<tool_call>",), absent=("<invoke name=", "<tool_calls>"), name=r"hermes-[23]")
#: SmolLM 2. Its template has no tools: https://huggingface.co/HuggingFaceTB/SmolLM2-1.7B-Instruct#function-calling
SMOLLM2_SIGNS = Signs(template=("named SmolLM",), absent=("tools",))


@dataclass(frozen=True, kw_only=True)
class HermesFormat(MarkedFormat):
    """Hermes, Qwen 2.5 and 3, Granite 4, and many more: <tool_call>{"name": "f", "arguments": {...}}</tool_call>."""

    name: str = "hermes"
    source: str = "https://github.com/NousResearch/Hermes-Function-Calling"
    call: str = "<tool_call>\n$call\n</tool_call>"
    signs: Signs = HERMES_SIGNS


class Llama3Parser(JsonCallParser):
    """States: start -> call -> (its end) -> between -> call; from all of them -> text -> (tag) -> tagged -> call."""

    _may_begin = True

    def _on_call_end(self, done: bool) -> None:
        self._may_begin = done

    def _look_for_call(self) -> bool:
        if not self._may_begin:
            self._may_begin = self._find_lead(LLAMA3_TAG)
            return self._may_begin
        rest = self._buffer.lstrip()
        if not rest or (rest != LLAMA3_TAG and LLAMA3_TAG.startswith(rest)):
            return False
        space = self._buffer[: len(self._buffer) - len(rest)]
        if rest.startswith("{"):
            if not self._lead.strip():
                self._builder.add_content(self._lead + space)
                self._lead = space = ""
            return self._begin_call(space, rest)
        if rest.startswith(LLAMA3_TAG) and LLAMA3_TAG not in self._lead:
            self._lead, self._buffer = self._lead + space + LLAMA3_TAG, rest[len(LLAMA3_TAG) :]
        elif rest.startswith(";") and self._builder.num_completed and not self._lead:
            self._lead, self._buffer = space + ";", rest[1:]
        else:
            self._builder.add_content(self._lead)
            self._lead, self._may_begin = "", False
        return True


class Llama3Format:
    """Llama 3: {"name": "f", "parameters": {...}}, alone or after <|python_tag|>, separated by semicolons.

    A bare object is a call only at the beginning of an answer, or where the next call may begin; else it is content.
    Source: https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md
    """

    name = "llama3_json"
    signs = Signs(tokens=(LLAMA3_TAG,), template=('"parameters": dictionary of argument name',), absent=("<function=",))
    markers = (LLAMA3_TAG,)
    trigger = ""
    new_parser = Llama3Parser

    def call_regex(self, functions: Functions) -> str:
        return r"\s*(;\s*)?\{\s*\"(name|type|function|parameters|arguments)\"(.|\n)*"

    def lark_rules(self, functions: Functions, literal: LarkLiteral, *, parallel: bool, beside_json: bool) -> str:
        more = ' ("; " object)*' if parallel else ""
        make = json_schema_call_rules if beside_json else json_call_rules
        return f"calls: begin object{more}\n{make('object', functions, 'parameters')}"

    def render_calls(self, calls: Sequence[ToolCall]) -> str:
        return "; ".join(_json_call(call, "parameters") for call in calls)


def mistral_call_id(source: random.Random = SYSTEM_RANDOM) -> str:
    """Returns a new call id of nine letters and digits; the templates of Mistral's models accept no other."""
    return "".join(source.choices(string.ascii_letters + string.digits, k=9))


class MistralParser(JsonCallParser):
    """States: text -> (begin) -> head -> call -> text, or a list: head -> call -> (comma) -> call ... -> text."""

    new_id = staticmethod(mistral_call_id)
    _in_list = False

    def _on_call_end(self, done: bool) -> None:
        self._in_list = self._in_list and done

    def _look_for_call(self) -> bool:
        if not (self._in_list or self._lead):
            return self._find_lead(MISTRAL_BEGIN)
        rest = self._buffer.lstrip()
        if not rest:
            return False
        space = self._buffer[: len(self._buffer) - len(rest)]
        return self._next_in_list(space, rest) if self._in_list else self._head(space, rest)

    def _head(self, space: str, rest: str) -> bool:
        if rest[0] == "[":
            self._in_list, self._lead, self._buffer = True, self._lead + space + "[", rest[1:]
            return True
        if rest[0] == "{":
            return self._begin_call(space, rest)
        arguments = rest.find("{", 0, _MAX_MISTRAL_HEAD)
        if arguments < 0 and len(rest) < _MAX_MISTRAL_HEAD:
            return False
        head = _MISTRAL_HEAD.fullmatch(rest, 0, max(0, arguments))
        if head is None or head[1] not in self._function_names:
            return self._reject_lead()
        return self._begin_call(space + head[0], rest[arguments:], head[1])

    def _next_in_list(self, space: str, rest: str) -> bool:
        if rest[0] == "{" and self._lead:
            return self._begin_call(space, rest)
        if rest[0] == "," and not self._lead:
            self._lead, self._buffer = ",", rest[1:]
        elif rest[0] == "]" and not self._lead:
            self._in_list, self._buffer = False, rest[1:]
        else:
            return self._reject_lead()
        return True

    def _reject_lead(self) -> bool:
        self._builder.add_content(self._lead)
        self._lead, self._in_list = "", False
        return True


class MistralFormat:
    """Mistral's models, in two forms. `named`: the model was trained on the newer one.

        [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]
        [TOOL_CALLS]f[ARGS]{...}                               since 2025, repeated for each call

    The newer form may contain an id of the call ([CALL_ID]abc123def before [ARGS]) or leave [ARGS] out.
    Source: https://github.com/mistralai/mistral-common/blob/main/docs/usage/tools.md
    """

    name = "mistral"
    signs = Signs(tokens=(MISTRAL_BEGIN,))
    markers = (MISTRAL_BEGIN, MISTRAL_ARGS, MISTRAL_CALL_ID)
    trigger = MISTRAL_BEGIN
    new_parser = MistralParser

    def __init__(self, *, named: bool = False) -> None:
        self._named = named

    def call_regex(self, functions: Functions) -> str:
        return r"(.|\n)*\[TOOL_CALLS\](.|\n)*"

    def lark_rules(self, functions: Functions, literal: LarkLiteral, *, parallel: bool, beside_json: bool) -> str:
        if self._named:
            more = "+" if parallel else ""
            rules = call_rules("call", functions, lambda f: f"begin {lark_string(f.name)} {literal(MISTRAL_ARGS)}")
            return f"calls: call{more}\n{rules}"
        more = ' (", " object)*' if parallel else ""
        return f'calls: begin "[" object{more} "]"\n{json_call_rules("object", functions, "arguments")}'

    def render_calls(self, calls: Sequence[ToolCall]) -> str:
        if self._named:
            return "".join(f"{MISTRAL_BEGIN}{call.name}{MISTRAL_ARGS}{call.arguments}" for call in calls)
        return f"{MISTRAL_BEGIN}[{', '.join(_json_call(call, 'arguments') for call in calls)}]"


def _json_call(call: ToolCall, key: str) -> str:
    return f'{{"name": {json.dumps(call.name)}, "{key}": {call.arguments}}}'
