"""Tool formats that are described by two texts with placeholders: one for a call, one for the section of calls.

From the description come the parser (MarkedParser), the grammar and the writer (MarkedFormat). The parser skips
white space between the parts of a call. A call is complete with its arguments, so the texts after them are optional.

    section     <tools>$calls</tools>              around all calls of an answer, or around nothing
    call        <call>$name$arguments</call>       $name, $arguments; $index, the call's number; or
                <call>$call</call>                 $call, a JSON object with name and arguments
    separator   between two calls
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from gateway.text.tools.arguments import JSON_ARGUMENTS, ArgumentReader, ArgumentStyle
from gateway.text.tools.format import (
    NO_SIGNS,
    Function,
    Functions,
    LarkLiteral,
    Schemas,
    Signs,
    ToolCall,
    ToolParser,
    split_at_marker,
)
from gateway.text.tools.json_scanner import JsonCallScanner
from gateway.text.tools.lark import (
    MARKER,
    json_schema_call_rules,
    lark_json,
    lark_string,
    lark_text,
    parameters_schema,
)

_NAME = re.compile(r"[\w.\-]+")
MAX_NAME = 256  #: Characters of a function's name.
_INDEX = re.compile(r"[0-9]+")


class Part(Enum):
    """A variable part of a call."""

    NAME = "$name"
    INDEX = "$index"
    ARGUMENTS = "$arguments"
    CALL = "$call"


_PARTS = re.compile("(" + "|".join(re.escape(part.value) for part in sorted(Part, key=lambda p: -len(p.value))) + ")")
Script = tuple[str | Part, ...]


def _tokens(text: str) -> list[str]:
    """Returns the texts between which white space does not matter: words, and markers like <x>."""
    return [piece for word in text.split() for piece in re.split(f"({MARKER})", word) if piece]


def _script(call: str) -> Script:
    script: list[str | Part] = []
    for piece in _PARTS.split(call):
        script += [Part(piece)] if piece.startswith("$") else _tokens(piece)
    return tuple(script)


@dataclass(frozen=True, kw_only=True)
class MarkedFormat:
    """A tool format that is described by texts with placeholders."""

    name: str  #: Value of --tool-parser.
    source: str  #: Address of the vendor's template or document.
    call: str  #: One call: $name, $index and $arguments, or $call.
    section: str = "$calls"  #: All calls of an answer.
    separator: str = "\n"  #: Text between two calls.
    arguments: ArgumentStyle = JSON_ARGUMENTS
    arguments_key: str = "arguments"  #: Key of the arguments in $call.
    call_id: str = ""  #: The id that the model's text gives a call, with $name and $index; "": a random id.
    also: str = ""  #: Another text that a call may begin with, if the model left out the texts before it.
    also_openings: tuple[str, ...] = ()  #: Other texts that a section may begin with.
    also_closing: str = ""  #: Text that may follow the end of a section.
    marker: str = ""  #: The text at the beginning of every call, if it does not look like <x> or [X].
    signs: Signs = NO_SIGNS

    @cached_property
    def opening(self) -> str:
        """Text before the first call of a section."""
        return self.section.split("$calls")[0]

    @cached_property
    def closing(self) -> str:
        """Text after the last call of a section."""
        return self.section.split("$calls")[1]

    @cached_property
    def script(self) -> Script:
        """The parts of one call, in order."""
        return _script(self.call)

    @cached_property
    def markers(self) -> tuple[str, ...]:
        """Texts like <x> and [X] of the description: they may be special tokens."""
        style = self.arguments
        texts = [self.section, self.call, *self.also_openings, self.also_closing, *_texts_of(style)]
        found = [marker for text in texts for marker in re.findall(MARKER, text)]
        return tuple(dict.fromkeys([*found, *getattr(style, "markers", ())]))

    @cached_property
    def trigger(self) -> str:
        """The marker at the beginning of every call; "" if calls stand at the beginning of an answer."""
        marker = re.match(MARKER, (self.opening or self.call).strip())
        return marker[0] if marker else self.marker

    @cached_property
    def starts(self) -> tuple[tuple[str, Script, bool], ...]:
        """The texts that begin a call, each with the parts after it and whether it begins a section."""
        whole = (*_tokens(self.opening), *self.script)
        starts: list[tuple[str, Script, bool]] = []
        if isinstance(whole[0], str):
            starts.append((whole[0], whole[1:], bool(self.opening)))
        first = self.script[0]
        if self.opening and isinstance(first, str) and re.fullmatch(MARKER, first):
            starts.append((first, self.script[1:], False))
        if self.also:
            starts.append((self.also, self.script[self.script.index(self.also) + 1 :], False))
        for opening in self.also_openings:
            text, *rest = _tokens(opening)
            starts.append((text, (*rest, *self.script), True))
        return tuple(starts)

    @cached_property
    def lead_chars(self) -> frozenset[str]:
        """The characters that a call may begin with. Most pieces of text have none of them."""
        return frozenset(start[0][0] for start in self.starts)

    def new_parser(
        self, function_names: frozenset[str], max_calls: int | None = None, schemas: Schemas | None = None
    ) -> MarkedParser:
        return MarkedParser(self, function_names, max_calls, schemas)

    def call_regex(self, functions: Functions) -> str:
        if not self.trigger:
            tokens = [*_tokens(self.opening), *(part for part in self.script[:1] if isinstance(part, str))]
            if self.script[0] is Part.CALL:
                tokens += ["{", f'"(name|function|parameters|{self.arguments_key})"']
            elif self.script[0] is Part.NAME:
                tokens.append(f"({'|'.join(re.escape(f.name) for f in functions)})")
            written = [t if t[0] in '("' else re.escape(t) for t in tokens]
            return (r"\s*" + r"\s*".join(written) + r"(.|\n)*").replace("/", r"\/")
        texts = "|".join(re.escape(start[0]) for start in self.starts).replace("/", r"\/")
        return rf"(.|\n)*({texts})(.|\n)*"

    def lark_rules(self, functions: Functions, literal: LarkLiteral, *, parallel: bool, beside_json: bool) -> str:
        """Defines `calls`. The texts that end a section are optional, so that an answer may end after any call."""

        def terms(text: str) -> str:
            return lark_text(text, literal, self.trigger)

        if beside_json and not self.trigger and self.call == "$call":
            return self._rules_beside_json(functions, parallel=parallel)
        head, tail = re.split(r"\$arguments|\$call", self.call)
        lines: list[str] = []

        def define(rule: str, lead: str) -> None:
            lines.append(f"{rule}: {' | '.join(f'{rule}_{i}' for i in range(len(functions)))}")
            for i, function in enumerate(functions):
                pieces = [terms(piece) for piece in self._head(lead + head, function).split("$index")]
                end = terms(tail if "$arguments" in self.call else "}" + tail)
                lines.append(f"{rule}_{i}: {' /[0-9]{1,6}/ '.join(pieces)} arguments_{i} {end}".rstrip())

        define("first", self.opening)
        if parallel:
            define("later", self.separator)
        for i, function in enumerate(functions):
            if "$call" in self.call:
                lines.append(f"arguments_{i}: {lark_json(parameters_schema(function), strict=function.strict)}")
            else:
                lines.append(self.arguments.rules(f"arguments_{i}", function, literal))
        needed, optional = _split_closing(self.closing)
        ends = [terms(optional)] if optional else []
        if self.separator.isspace() and not needed:
            ends.append(lark_string(self.separator))
        close = f" {terms(needed)}" if needed else ""
        close += f" ({' | '.join(ends)})?" if ends else ""
        begin = "" if self.trigger else "begin "
        return "\n".join([f"calls: {begin}first{' later*' if parallel else ''}{close}", *lines])

    def _rules_beside_json(self, functions: Functions, *, parallel: bool) -> str:
        """Defines `calls` like `lark_rules`, for JSON objects with nothing before them that JSON has not."""
        opening, closing = (lark_string(text) if text else "" for text in (self.opening, self.closing))
        more = f" ({lark_string(self.separator)} call)*" if parallel else ""
        rules = json_schema_call_rules("call", functions, self.arguments_key)
        return f"calls: begin {opening} call{more} {closing}\n{rules}"

    def _head(self, text: str, function: Function) -> str:
        """Returns the text before the arguments, with the function's name."""
        if "$arguments" in self.call:
            return text.replace("$name", function.name)
        return f'{text}{{"name": {json.dumps(function.name)}, "{self.arguments_key}": '

    def render_calls(self, calls: Sequence[ToolCall]) -> str:
        written = [self._render(call, index) for index, call in enumerate(calls)]
        return self.section.replace("$calls", self.separator.join(written))

    def _render(self, call: ToolCall, index: int) -> str:
        values = {
            "$name": call.name,
            "$index": str(index),
            "$call": f'{{"name": {json.dumps(call.name)}, "{self.arguments_key}": {call.arguments}}}',
        }
        if "$arguments" in self.call:
            values["$arguments"] = self.arguments.write(call.arguments)
        return _PARTS.sub(lambda part: values[part[0]], self.call)


def _texts_of(style: object) -> list[str]:
    return [value for value in vars(style).values() if isinstance(value, str)]


def _split_closing(closing: str) -> tuple[str, str]:
    """Returns the part of a section's end that a complete text needs, like a bracket, and the markers after it."""
    marker = re.search(rf"\s*{MARKER}", closing)
    at = marker.start() if marker else len(closing)
    return (closing[:at] if closing[:at].strip() else ""), closing[at:]


class MarkedParser(ToolParser):
    """Parser of a MarkedFormat.

    States: text -> (start) -> call -> (its arguments end) -> tail -> between (calls of a section) -> call ... -> text
    """

    def __init__(
        self,
        tool_format: MarkedFormat,
        function_names: frozenset[str],
        max_calls: int | None = None,
        schemas: Schemas | None = None,
    ) -> None:
        super().__init__(function_names, max_calls, schemas)
        self._format = tool_format
        self._state = self._text if tool_format.trigger else self._start
        self._script: Script = ()  # of the open call
        self._at = 0  # position in the script
        self._in_section = False
        self._raw: list[str] = []  #: Text of the open call.
        self._name = ""
        self._index = ""
        self._ids: set[str] = set()  #: Ids of calls that the text gave so far.
        self._reader: ArgumentReader | JsonCallScanner | None = None

    def _step(self) -> bool:
        return self._state()

    def _flush_rest(self) -> None:
        rest, self._buffer = self._buffer, ""
        if self._state == self._call and self._cut and self._builder.named:
            self._builder.add_arguments("" if self._reader is None else _pending(self._reader, rest))
        elif self._state == self._call:
            self._builder.reject_call("".join(self._raw) + rest)
        elif self._state == self._tail or (self._state == self._between and self._begins_closing(rest.lstrip())):
            return
        else:
            self._builder.add_content(rest)

    def _take(self, count: int) -> None:
        """Moves the buffer's first characters to the text of the call."""
        self._raw.append(self._buffer[:count])
        self._buffer = self._buffer[count:]

    def _expect(self, text: str) -> bool | None:
        """Takes white space and this text. Returns False if another text follows, None if more text must come."""
        rest = self._buffer.lstrip()
        if rest.startswith(text):
            self._take(len(self._buffer) - len(rest) + len(text))
            return True
        return None if text.startswith(rest) else False

    def _begin(self, script: Script, raw: str, *, in_section: bool) -> None:
        self._script, self._at, self._raw, self._in_section = script, 0, [raw], in_section
        self._name = self._index = ""
        self._reader = None
        self._builder.begin_call()
        self._state = self._call

    def _start(self) -> bool:
        """Expects calls at the beginning of the answer."""
        rest = self._buffer.lstrip()
        if not rest:
            return False
        opening = _tokens(self._format.opening)
        for other in map(_tokens, self._format.also_openings):
            if rest.startswith(other[0]):
                opening = other
            elif other[0].startswith(rest):
                return False
        self._builder.add_content(self._buffer[: len(self._buffer) - len(rest)])
        self._buffer = rest
        self._begin((*opening, *self._format.script), "", in_section=True)
        return True

    def _text(self) -> bool:
        if not self._format.trigger:
            self._builder.add_content(self._buffer)
            self._buffer = ""
            return False
        if self._format.lead_chars.isdisjoint(self._buffer):
            self._builder.add_content(self._buffer)
            self._buffer = ""
            return False
        found = [(at, start) for start in self._format.starts if (at := self._buffer.find(start[0])) >= 0]
        if not found:
            keep = max(len(split_at_marker(self._buffer, start[0])[2]) for start in self._format.starts)
            at = len(self._buffer) - keep
            self._builder.add_content(self._buffer[:at])
            self._buffer = self._buffer[at:]
            return False
        at, (text, script, section) = min(found, key=lambda one: (one[0], -len(one[1][0])))
        if any(len(rest) > len(self._buffer) - at for rest in self._longer(text)):
            return False
        self._builder.add_content(self._buffer[:at])
        self._buffer = self._buffer[at + len(text) :]
        self._begin(script, text, in_section=section)
        return True

    def _longer(self, text: str) -> list[str]:
        """Returns the other starts that begin with this one."""
        return [start[0] for start in self._format.starts if start[0] != text and start[0].startswith(text)]

    def _reject(self) -> bool:
        self._builder.reject_call("".join(self._raw))
        self._raw, self._in_section, self._state = [], False, self._text
        return True

    def _call(self) -> bool:
        part = self._script[self._at]
        if isinstance(part, str):
            found = self._expect(part)
            if found is None:
                return False
            if not found and not (part == "[" and self._buffer.lstrip().startswith("{")):  # a list of one call
                return self._reject()
            self._at += 1
            return True
        if part in (Part.NAME, Part.INDEX):
            return self._word(part)
        return self._arguments(part)

    def _word(self, part: Part) -> bool:
        space = len(self._buffer) - len(self._buffer.lstrip())
        word = (_NAME if part is Part.NAME else _INDEX).match(self._buffer, space)
        if space == len(self._buffer):
            return False
        if word is None or len(word[0]) > MAX_NAME:
            return self._reject()
        if word.end() == len(self._buffer):
            return False
        if part is Part.NAME and word[0] not in self._function_names:
            return self._reject()
        self._take(word.end())
        self._at += 1
        if part is Part.NAME:
            self._name = word[0]
        else:
            self._index = word[0]
        if part is Part.INDEX or Part.INDEX not in self._script[self._at :]:
            call_id = self._format.call_id.replace("$name", self._name).replace("$index", self._index)
            if call_id in self._ids:  # the model wrote the same id twice
                call_id = ""
            self._ids.add(call_id)
            self._builder.set_function(self._name, call_id)
        return True

    def _arguments(self, part: Part) -> bool:
        if self._reader is None:
            self._take(len(self._buffer) - len(self._buffer.lstrip()))
            if not self._buffer:
                return False
            ends = [text for text in self._script[self._at + 1 :] if isinstance(text, str)]
            schema = self._schemas.get(self._name, {})
            reads_call = part is Part.CALL
            style = self._format.arguments
            self._reader = JsonCallScanner(self._function_names) if reads_call else style.reader(schema, ends)
        reader = self._reader
        at, arguments = reader.feed(self._buffer, 0)
        self._take(at)
        if isinstance(reader, JsonCallScanner) and reader.name is not None and not self._name:
            self._name = reader.name
            self._builder.set_function(reader.name)
        self._builder.add_arguments(arguments)
        if reader.invalid:
            return self._reject()
        if reader.done:
            self._builder.end_call()
            self._at += 1
            self._raw, self._state = [], self._tail
            return True
        return at > 0

    def _tail(self) -> bool:
        """Takes the texts that end a call, as far as they come."""
        while self._at < len(self._script):
            text = self._script[self._at]
            assert isinstance(text, str)
            found = self._expect(text)
            if found is None:
                return False
            self._at += 1
        self._raw, self._state = [], self._between if self._in_section else self._text
        return True

    def _begins_closing(self, rest: str) -> bool:
        closing = _tokens(self._format.closing)
        return bool(closing) and any(text.startswith(rest) for text in (*closing, *_tokens(self._format.also_closing)))

    def _between(self) -> bool:
        """Expects the next call of a section, or the section's end."""
        rest = self._buffer.lstrip()
        closing = _tokens(self._format.closing)
        closing += _tokens(self._format.also_closing) if closing else []
        for at, text in enumerate(closing):
            if rest.startswith(text):
                self._script, self._at, self._in_section, self._state = tuple(closing[at:]), 0, False, self._tail
                return True
        script = (*_tokens(self._format.separator), *self._format.script)
        first = script[0]
        if rest.startswith(first) if isinstance(first, str) else rest and self._may_begin(first, rest[0]):
            self._begin(script, "", in_section=True)
            return True
        if self._begins_closing(rest) or (isinstance(first, str) and first.startswith(rest)):
            return False
        if rest:
            self._in_section, self._state = False, self._text
        return bool(rest)

    def _may_begin(self, part: Part, char: str) -> bool:
        return char == "{" if part is Part.CALL else _NAME.match(char) is not None


def _pending(reader: ArgumentReader | JsonCallScanner, rest: str) -> str:
    return reader.pending if isinstance(reader, JsonCallScanner) else reader.pending(rest)
