"""A strict JSON scanner (RFC 8259) for text that grows; it builds no values.

Invariant: a prefix of a valid text is neither done nor invalid. A scanner is done with the value's last character (a
number ends with the character after it). It is invalid at the first character that no valid text has there, except
that an invalid number is found at its end. Raw control characters in strings, which JSON forbids but models write,
are escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from enum import Enum, auto

_PLAIN = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]+')
_NO_CHARACTER = "\\ufffd"  #: JSON's escape of the character that stands for invalid text.
_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER_RUN = re.compile(r"[-+.0-9eE]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_HEX = frozenset("0123456789abcdefABCDEF")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
MAX_DEPTH = 256


class Expected(Enum):
    """The part of the JSON text that comes next."""

    VALUE = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    FIRST_ITEM = auto()
    AFTER = auto()
    STRING = auto()
    ESCAPE = auto()
    NUMBER = auto()
    LITERAL = auto()


class JsonScanner:
    """Scans one value. A scanner that is done or invalid takes no more text."""

    def __init__(self) -> None:
        self.done = False
        self.invalid = False
        self.expected = Expected.VALUE
        self.in_key = False  # the string that is read, or was read last, is a key
        self._stack: list[str] = []  # closing brackets of the open containers
        self._atom = ""  # the part read so far of a number, a literal or an escape
        self._high = ""  #: Escape of the first half of a surrogate pair, until its second half comes.

    @property
    def depth(self) -> int:
        """Number of open containers."""
        return len(self._stack)

    def feed(self, text: str, at: int) -> tuple[int, str]:
        """Reads text[at:], at most to the value's end. Returns where it stopped, and the text read as strict JSON."""
        out: list[str] = []
        while at < len(text) and not (self.done or self.invalid):
            at = self.step(text, at, out)
        return at, "".join(out)

    def step(self, text: str, at: int, out: list[str]) -> int:
        """Reads a part of text[at:] that changes the state at most once, like `feed`."""
        match self.expected:
            case Expected.STRING:
                return self._string(text, at, out)
            case Expected.ESCAPE:
                return self._escape(text, at, out)
            case Expected.NUMBER:
                return self._number(text, at, out)
            case Expected.LITERAL:
                return self._literal(text, at, out)
            case _:
                return self._structure(text, at, out)

    def _structure(self, text: str, at: int, out: list[str]) -> int:
        space = _SPACE.match(text, at)
        assert space is not None
        if space.end() > at:
            out.append(space[0])
            return space.end()
        char = text[at]
        match self.expected:
            case Expected.FIRST_KEY | Expected.FIRST_ITEM | Expected.AFTER if self._stack and char == self._stack[-1]:
                self._stack.pop()
                self._ended()
            case Expected.FIRST_KEY | Expected.KEY if char == '"':
                self.expected, self.in_key = Expected.STRING, True
            case Expected.COLON if char == ":":
                self.expected = Expected.VALUE
            case Expected.AFTER if char == ",":
                self.expected = Expected.KEY if self._stack[-1] == "}" else Expected.VALUE
            case Expected.VALUE | Expected.FIRST_ITEM if self._begins(char):
                if self.expected in (Expected.NUMBER, Expected.LITERAL):
                    return at  # the states NUMBER and LITERAL read their first character themselves
            case _:
                self.invalid = True
                return at
        out.append(char)
        return at + 1

    def _begins(self, char: str) -> bool:
        if char in "{[":
            self._stack.append("}" if char == "{" else "]")
            self.expected = Expected.FIRST_KEY if char == "{" else Expected.FIRST_ITEM
            return len(self._stack) <= MAX_DEPTH
        if char == '"':
            self.expected, self.in_key = Expected.STRING, False
        elif char in "-0123456789":
            self.expected, self._atom = Expected.NUMBER, ""
        elif char in _LITERALS:
            self.expected, self._atom = Expected.LITERAL, ""
        else:
            return False
        return True

    def _ended(self) -> None:
        self.expected = Expected.AFTER
        self.done = not self._stack

    @property
    def pending(self) -> str:
        """Text of a number or literal that is not complete yet. If the answer is cut, it ends with this text."""
        return self._atom if self.expected in (Expected.NUMBER, Expected.LITERAL) else ""

    def _string(self, text: str, at: int, out: list[str]) -> int:
        if self._high and text[at] != "\\":
            out.append(_NO_CHARACTER)
            self._high = ""
        plain = _PLAIN.match(text, at)
        if plain is not None:
            out.append(plain[0])
            return plain.end()
        char = text[at]
        if char == '"':
            out.append(char)
            if self.in_key:
                self.expected = Expected.COLON
            else:
                self._ended()
        elif char == "\\":
            self.expected, self._atom = Expected.ESCAPE, char
        else:
            out.append(_NO_CHARACTER if char > "\x1f" else json.dumps(char)[1:-1])
        return at + 1

    def _escape(self, text: str, at: int, out: list[str]) -> int:
        char, size = text[at], len(self._atom)
        self._atom += char
        if char not in ('"\\/bfnrtu' if size == 1 else _HEX):
            self.invalid = True
            return at
        if len(self._atom) == (6 if self._atom[1] == "u" else 2):
            self.expected = Expected.STRING
            half = self._atom[2:4].lower() if self._atom[1] == "u" else ""
            high, self._high = self._high, ""
            if "dc" <= half <= "df":  # the second half
                out.append(high + self._atom if high else _NO_CHARACTER)
                return at + 1
            if high:
                out.append(_NO_CHARACTER)
            if "d8" <= half <= "db":
                self._high = self._atom
            else:
                out.append(self._atom)
        return at + 1

    def _number(self, text: str, at: int, out: list[str]) -> int:
        run = _NUMBER_RUN.match(text, at)
        if run is not None:
            self._atom += run[0]
            return run.end()
        if _NUMBER.fullmatch(self._atom) is None:
            self.invalid = True
        else:
            out.append(self._atom)
            self._ended()
        return at

    def _literal(self, text: str, at: int, out: list[str]) -> int:
        self._atom += text[at]
        whole = _LITERALS[self._atom[0]]
        if not whole.startswith(self._atom):
            self.invalid = True
            return at
        if self._atom == whole:
            out.append(whole)
            self._ended()
        return at + 1


def strict_json(text: str) -> str | None:
    """Returns one JSON value as strict JSON without white space around it; None if the text is no JSON value."""
    scanner = JsonScanner()
    at, clean = scanner.feed(text + "\n", 0)  # a number ends with the character after it
    return clean.strip() if scanner.done and not text[at:].strip() else None


def strict_json_object(text: str) -> str | None:
    """Returns a text that is a JSON object as strict JSON, None if it is not an object."""
    clean = strict_json(text)
    return clean if clean is not None and clean.startswith("{") else None


_NAME_KEYS = ("name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters")
_BEFORE_KEY = (Expected.FIRST_KEY, Expected.KEY)
_IN_STRING = (Expected.STRING, Expected.ESCAPE)


class JsonCallScanner:
    """Scans an object that describes a call, like {"name": "f", "arguments": {"a": 1}}, with keys in any order.

    Arguments are available as they are read, once the name is known. The key "parameters" is accepted for "arguments".
    The value may be a string that holds the object. No value, or null, means no arguments.
    """

    def __init__(self, function_names: Collection[str]) -> None:
        self.done = False
        self.invalid = False  #: The object is not a call of a declared function.
        self.name: str | None = None
        self._function_names = function_names
        self._scanner = JsonScanner()
        self._key = ""
        self._read = ""  # text of the current key or value, unless it is passed on
        self._passing = False  #: The current value is the arguments' object.
        self._has_arguments = False
        self._pending = ""  # arguments not returned yet

    def feed(self, text: str, at: int) -> tuple[int, str]:
        """Reads text[at:], at most to the object's end.

        Returns where it stopped, and the arguments that were not returned before: "" while the name is not known.
        """
        while at < len(text) and not (self.done or self.invalid):
            if not self._scanner.depth and text[at] not in "{ \t\n\r":
                self.invalid = True
            else:
                at = self._step(text, at)
        if self.name is None:
            return at, ""
        out, self._pending = self._pending, ""
        return at, out

    @property
    def pending(self) -> str:
        """Arguments that are not complete yet. If the answer is cut, it ends with them."""
        return self._scanner.pending if self._passing and self.name is not None else ""

    def _step(self, text: str, at: int) -> int:
        scanner, out = self._scanner, list[str]()
        depth, expected, in_key = scanner.depth, scanner.expected, scanner.in_key
        at = scanner.step(text, at, out)
        part = "".join(out)
        if scanner.invalid:
            self.invalid = True
        elif scanner.done:
            self._close()
        elif depth == 1 and (expected in _BEFORE_KEY or (in_key and expected in _IN_STRING)):
            self._read = (self._read + part).lstrip()
            if scanner.expected is Expected.COLON:
                self._key, self._read = json.loads(self._read), ""
        elif depth > 1 or (depth == 1 and expected not in (Expected.COLON, Expected.AFTER)):
            self._add_to_value(part)
            if scanner.depth == 1 and scanner.expected is Expected.AFTER:
                if not self._passing:
                    self._value_ended()
                self._read, self._passing = "", False
        return at

    def _add_to_value(self, part: str) -> None:
        if not (self._read or self._passing):
            part = part.lstrip()
            self._passing = self._key in _ARGUMENT_KEYS and part.startswith("{")
            if self._passing:
                self._claim_arguments()
        if self._passing:
            self._pending += part
        else:
            self._read += part

    def _value_ended(self) -> None:
        if self._key not in (*_NAME_KEYS, *_ARGUMENT_KEYS):
            return
        value = json.loads(self._read, parse_int=str)  # int() refuses thousands of digits
        if self._key in _NAME_KEYS:
            self.invalid = self.name is not None or not isinstance(value, str) or value not in self._function_names
            if not self.invalid:
                self.name = value
        elif self._key in _ARGUMENT_KEYS:
            self._claim_arguments()
            inner = "{}" if value is None else strict_json_object(value) if isinstance(value, str) else None
            self.invalid = self.invalid or inner is None
            self._pending += inner or ""

    def _claim_arguments(self) -> None:
        self.invalid, self._has_arguments = self.invalid or self._has_arguments, True

    def _close(self) -> None:
        if self.name is None:
            self.invalid = True
            return
        if not self._has_arguments:
            self._pending = "{}"
        self.done = True
