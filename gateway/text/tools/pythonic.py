"""Pythonic tool calls: [f(a=1, b="x"), g()], the whole answer or its beginning (Llama 3.2, ToolACE, and others).

Arguments are keywords with literal values in Python or JSON. Each argument is passed on when it is complete.
Source: https://github.com/meta-llama/llama-models/blob/main/models/llama3_2/text_prompt_format.md
"""

from __future__ import annotations

import ast
import functools
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.text.tools.format import Function, Functions, LarkLiteral, Schemas, Signs, ToolCall, ToolParser
from gateway.text.tools.json_scanner import strict_json
from gateway.text.tools.lark import keyword_argument_rules, keyword_call_rules

START = "<|python_start|>"
END = "<|python_end|>"
_CALL = re.compile(r"\s*([^\s()\[\]{}=,\"']+)\s*\(")
_KEYWORD = re.compile(r"\s*([^\W\d]\w*)\s*=(?!=)")
_JSON_NAMES = {"true": True, "false": False, "null": None}


class PythonLiteralScanner:
    """Finds the end of a literal: a comma or closing bracket outside of all brackets and quotes."""

    def __init__(self) -> None:
        self._at = 0
        self._depth = 0
        self._quote = ""

    @property
    def open_quote(self) -> str:
        """The quote that ends the literal, if the literal is a string that goes on; else ""."""
        return self._quote if self._depth == 0 else ""

    def find_end(self, text: str) -> int | None:
        """Returns the position of the end, None if more text is needed. `text` grows between calls."""
        while self._at < len(text):
            char = text[self._at]
            if self._quote:
                if char == "\\":
                    if self._at + 1 == len(text):
                        return None
                    self._at += 2
                elif text.startswith(self._quote, self._at):
                    self._at += len(self._quote)
                    self._quote = ""
                elif self._quote.startswith(text[self._at :]):
                    return None  # the quote may be closing
                else:
                    self._at += 1
            elif char in "\"'":
                if len(text) - self._at < 3 and set(text[self._at :]) == {char}:
                    return None  # one quote, or the beginning of three
                self._quote = char * 3 if text.startswith(char * 3, self._at) else char
                self._at += len(self._quote)
            elif self._depth == 0 and char in ",)]}":
                return self._at
            else:
                self._depth += (char in "([{") - (char in ")]}")
                self._at += 1
        return None


_QUOTED = re.compile(
    r"""([A-Za-z]*)('{3}(?:[^\\]|\\.)*?'{3}|"{3}(?:[^\\]|\\.)*?"{3}|'(?:[^\\']|\\.)*'|"(?:[^\\"]|\\.)*")""", re.DOTALL
)
_RAW = {"\n": "\\n", "\r": "\\r", "\0": "\\0"}
_RAW_CHAR = re.compile(r"\\.|[\n\r\0]", re.DOTALL)


def _escape_raw(quoted: re.Match[str]) -> str:
    """Returns a string literal without the characters that models write in it and Python does not allow there."""
    if "r" in quoted[1].lower():
        return quoted[0]
    return quoted[1] + _RAW_CHAR.sub(lambda m: _RAW.get(m[0], m[0]), quoted[2])


def literal_to_json(text: str) -> str | None:
    """Returns a Python or JSON literal as JSON text, None if it is neither.

    Takes what Python's literal_eval takes and JSON has a value for: a set becomes an array, bytes become text.
    """
    text = text.strip()
    if any(char in text for char in _RAW):
        text = _QUOTED.sub(_escape_raw, text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes that Python does not know
            value = _value(ast.parse(text, mode="eval").body)
        out = json.dumps(value, ensure_ascii=False, allow_nan=False)
        out.encode()
    except UnicodeEncodeError:  # halves of surrogate pairs: two in a row are a character
        return strict_json(json.dumps(value))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return out


def _value(node: ast.expr) -> object:
    match node:
        case ast.Constant(value=bytes() as value):
            return value.decode(errors="replace")
        case ast.Constant(value=str() | int() | float() | bool() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as value)):
            if isinstance(value, bool):
                raise ValueError("a sign before a bool")
            return -value if isinstance(sign, ast.USub) else value
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [_value(item) for item in items]
        case ast.Call(func=ast.Name(id="set"), args=[], keywords=[]):
            return []
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case _:
            raise ValueError(ast.dump(node))


def _key(node: ast.expr | None) -> str:
    """Returns a key as JSON has it: numbers, bools and None are written as text."""
    value = None if node is None else _value(node)
    if isinstance(value, str):
        return value
    if node is None or isinstance(value, list | dict):
        raise ValueError("a key is not a simple value")
    return json.dumps(value, allow_nan=False)


class PythonArgumentReader:
    """Reads a=1, b="x" up to `end`, which it leaves. Each argument is passed on when it is complete."""

    def __init__(self, end: str = ")") -> None:
        self.done = False
        self.invalid = False
        self._end = end
        self._keys: set[str] = set()
        self._key: str | None = None  # of the value that is read, None before an argument
        self._value = PythonLiteralScanner()

    def feed(self, text: str, at: int) -> tuple[int, str]:
        """Reads text[at:], at most one argument. Returns where it stopped, and more of the arguments as JSON."""
        out: list[str] = []
        while not (self.done or self.invalid or out):
            after = self._keyword(text, at, out) if self._key is None else self._literal(text, at, out)
            if after is None:
                break
            at = after
        return at, "".join(out)

    def _lead(self) -> str:
        return f"{', ' if self._keys else '{'}{json.dumps(self._key)}: "

    def _keyword(self, text: str, at: int, out: list[str]) -> int | None:
        rest = text[at:].lstrip()
        if not rest:
            return None
        if rest.startswith(self._end):
            out.append("}" if self._keys else "{}")
            self.done = True
            return len(text) - len(rest)
        keyword = _KEYWORD.match(text, at)
        if keyword is None or keyword.end() == len(text):
            self.invalid = keyword is None and not "".join(rest.split()).isidentifier()
            return None
        self._key, self._value = keyword[1], PythonLiteralScanner()
        self.invalid = self._key in self._keys
        return keyword.end()

    def _literal(self, text: str, at: int, out: list[str]) -> int | None:
        rest = text[at:]
        end = self._value.find_end(rest)
        if end is None:
            return None
        value = literal_to_json(rest[:end])
        self.invalid = value is None or not rest.startswith((",", self._end), end)
        if value is None or self.invalid or self._key is None:
            return at
        out.append(self._lead() + value)
        self._keys.add(self._key)
        self._key = None
        return at + end + (rest[end] == ",")

    def pending(self, text: str) -> str:
        """Returns the rest of the arguments if the answer is cut after `text`, which `feed` left: part of a string."""
        if self._key is None or not (quote := self._value.open_quote):
            return ""
        value = literal_to_json(text + quote)
        return "" if value is None else self._lead() + value[:-1]


class PythonArguments:
    """Arguments as keywords with literal values: a=1, b="x"."""

    def __init__(self, *, json_values: bool = False) -> None:
        """`json_values`: models of this format write true, false and null."""
        self._write = functools.partial(json.dumps, ensure_ascii=False) if json_values else repr

    def reader(self, schema: Mapping[str, Any], ends: Sequence[str]) -> PythonArgumentReader:
        return PythonArgumentReader(ends[0])

    def rules(self, rule: str, function: Function, literal: LarkLiteral) -> str:
        return keyword_argument_rules(rule, function)

    def write(self, arguments: str) -> str:
        return ", ".join(f"{key}={self._write(value)}" for key, value in json.loads(arguments).items())


class PythonicParser(ToolParser):
    """States: start -> name -> arguments -> after (a call) -> name ... -> text."""

    def __init__(
        self, function_names: frozenset[str], max_calls: int | None = None, schemas: Schemas | None = None
    ) -> None:
        super().__init__(function_names, max_calls, schemas)
        self._raw = ""  #: Text of the open call, or text before the first call.
        self._state = self._start
        self._reader: PythonArgumentReader | None = None  # of the open call

    def _step(self) -> bool:
        return self._state()

    def _flush_rest(self) -> None:
        rest = self._raw + self._buffer
        if self._reader is not None and self._cut:
            self._builder.add_arguments(self._reader.pending(self._buffer))
        elif self._reader is not None:
            self._builder.reject_call(rest)
        elif rest.strip() != END:
            self._builder.add_content(rest)
        self._buffer = ""

    def _take(self, count: int) -> None:
        """Moves the buffer's first characters to the text of the call."""
        self._raw += self._buffer[:count]
        self._buffer = self._buffer[count:]

    def _give_up(self) -> bool:
        """Turns the open call, or the text before the first call, into content."""
        if self._reader is not None:
            self._builder.reject_call(self._raw)
        else:
            self._builder.add_content(self._raw)
        self._raw, self._reader, self._state = "", None, self._text
        return True

    def _start(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest or (rest != START and START.startswith(rest)):
            return False
        space = len(self._buffer) - len(rest)
        if rest.startswith(START) and not self._raw:
            self._take(space + len(START))
        elif rest.startswith("["):
            self._take(space + 1)
            self._state = self._name
        else:
            return self._give_up()
        return True

    def _name(self) -> bool:
        call = _CALL.match(self._buffer)
        if call is None:
            rest = self._buffer.strip()
            if rest.startswith("]") and self._raw == ",":  # Python allows a last comma
                self._raw, self._state = "", self._after
                return True
            waits = not rest or _CALL.match(self._buffer + "(") is not None
            return False if waits else self._give_up()
        if call[1] not in self._function_names:
            return self._give_up()
        space = self._raw[: len(self._raw) - len(self._raw.lstrip())]
        self._builder.add_content(space)
        self._raw = self._raw[len(space) :]
        self._take(call.end())
        self._builder.begin_call()
        self._builder.set_function(call[1])
        self._reader, self._state = PythonArgumentReader(), self._arguments
        return True

    def _arguments(self) -> bool:
        assert self._reader is not None
        at, arguments = self._reader.feed(self._buffer, 0)
        self._take(at)
        self._builder.add_arguments(arguments)
        if self._reader.invalid:
            return self._give_up()
        if self._reader.done:
            self._builder.end_call()
            self._buffer, self._raw, self._reader, self._state = self._buffer[1:], "", None, self._after
        return at > 0 or self._reader is None

    def _after(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest:
            return False
        if rest[0] == ",":
            self._raw, self._buffer, self._state = ",", rest[1:], self._name
        elif rest[0] == "]":
            self._buffer, self._state = rest[1:], self._closing
        else:
            self._state = self._text
        return True

    def _closing(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest or (rest != END and END.startswith(rest)):
            return False
        self._buffer = rest.removeprefix(END) if rest.startswith(END) else self._buffer
        self._state = self._text
        return True

    def _text(self) -> bool:
        self._builder.add_content(self._buffer)
        self._buffer = ""
        return False


class PythonicFormat:
    """The tool format [f(a=1)]."""

    name = "pythonic"
    signs = Signs(tokens=(START,), template=("func_name1(",))
    markers = (START, END)
    trigger = ""
    new_parser = PythonicParser

    def call_regex(self, functions: Functions) -> str:
        function_names = "|".join(re.escape(f.name) for f in functions)
        return rf"\s*\[\s*({function_names})\((.|\n)*"

    def lark_rules(self, functions: Functions, literal: LarkLiteral, *, parallel: bool, beside_json: bool) -> str:
        more = ' (", " call)*' if parallel else ""
        later = keyword_call_rules("call", functions)
        if beside_json:
            return f'calls: begin "[" call{more} "]"\n{later}'
        return f'calls: begin first{more} "]"\n{later}\n{keyword_call_rules("first", functions, lead="[")}'

    def render_calls(self, calls: Sequence[ToolCall]) -> str:
        return f"[{', '.join(f'{call.name}({PythonArguments().write(call.arguments)})' for call in calls)}]"
