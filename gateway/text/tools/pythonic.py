"""Pythonic tool calls: [f(a=1, b="x"), g()], the whole answer or its beginning (Llama 3.2 and 4, ToolACE, and others).

Arguments are keywords with literal values in Python or JSON. Each argument is passed on when it is complete.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Sequence

from gateway.text.tools.format import Functions, LarkLiteral, ToolCall, ToolParser
from gateway.text.tools.lark import keyword_call_rules

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


def literal_to_json(text: str) -> str | None:
    """Returns a Python or JSON literal as JSON text, None if it is neither."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes that Python does not know
            value = _value(ast.parse(text.strip(), mode="eval").body)
        out = json.dumps(value, ensure_ascii=False, allow_nan=False)
        out.encode()
    except UnicodeEncodeError:  # lone surrogates
        return json.dumps(value)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return out


def _value(node: ast.expr) -> object:
    match node:
        case ast.Constant(value=str() | int() | float() | bool() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case _:
            raise ValueError(ast.dump(node))


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a key is not a string")


class PythonicParser(ToolParser):
    """States: start -> name -> keyword -> value -> keyword ... -> after (a call) -> name ... -> text."""

    def __init__(self, function_names: frozenset[str], max_calls: int | None = None) -> None:
        super().__init__(function_names, max_calls)
        self._raw = ""  #: Text of the open call, or text before the first call.
        self._state = self._start
        self._value = PythonLiteralScanner()
        self._keyword = ""
        self._keywords: set[str] = set()
        self._open = False

    def _step(self) -> bool:
        return self._state()

    def _flush_rest(self) -> None:
        rest, self._buffer = self._raw + self._buffer, ""
        if self._open:
            self._builder.reject_call(rest)
        elif rest.strip() != END:
            self._builder.add_content(rest)

    def _take(self, count: int) -> None:
        """Moves the buffer's first characters to the text of the call."""
        self._raw += self._buffer[:count]
        self._buffer = self._buffer[count:]

    def _give_up(self) -> bool:
        """Turns the open call, or the text before the first call, into content."""
        if self._open:
            self._builder.reject_call(self._raw)
        else:
            self._builder.add_content(self._raw)
        self._raw, self._open, self._state = "", False, self._text
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
        self._open, self._keywords, self._state = True, set(), self._next_keyword
        return True

    def _next_keyword(self) -> bool:
        rest = self._buffer.lstrip()
        if rest.startswith(")"):
            self._builder.add_arguments("}" if self._keywords else "{}")
            self._builder.end_call()
            self._buffer, self._raw, self._open, self._state = rest[1:], "", False, self._after
            return True
        keyword = _KEYWORD.match(self._buffer)
        if keyword is None or keyword.end() == len(self._buffer):
            waits = not rest or keyword is not None or "".join(rest.split()).isidentifier()
            return False if waits else self._give_up()
        self._keyword = keyword[1]
        if self._keyword in self._keywords:
            return self._give_up()
        self._take(keyword.end())
        self._value, self._state = PythonLiteralScanner(), self._read_value
        return True

    def _read_value(self) -> bool:
        end = self._value.find_end(self._buffer)
        if end is None:
            return False
        value = literal_to_json(self._buffer[:end])
        self._take(end)
        if value is None or self._buffer[0] not in ",)":
            return self._give_up()
        self._builder.add_arguments(f"{', ' if self._keywords else '{'}{json.dumps(self._keyword)}: {value}")
        self._keywords.add(self._keyword)
        if self._buffer[0] == ",":
            self._take(1)
        self._state = self._next_keyword
        return True

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
        written = []
        for call in calls:
            arguments = json.loads(call.arguments)
            written.append(f"{call.name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})")
        return f"[{', '.join(written)}]"
