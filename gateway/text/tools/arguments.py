"""Two styles of the arguments of a call: a JSON object, and tagged values without types.

A style reads arguments as they come (`reader`), defines them in a grammar (`rules`) and writes them (`write`).
The third style, Python's keywords, is in pythonic.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from common.errors import InvalidRequest
from common.json_schema.adapted import adapted
from common.json_schema.places import resolve
from gateway.text.tools.format import Function, LarkLiteral, split_at_marker
from gateway.text.tools.json_scanner import JsonScanner, strict_json
from gateway.text.tools.lark import lark_json, lark_string, lark_text, named_properties, parameters_schema
from gateway.text.tools.pythonic import literal_to_json

Schema = Mapping[str, Any]
ONLY_TEXT = frozenset({"string"})  #: The JSON types of a value that can only be a string.


class ArgumentReader(Protocol):
    """Reads the arguments of one call and passes them on as the text of a JSON object."""

    done: bool  #: The arguments are complete.
    invalid: bool  #: The text cannot be arguments.

    def feed(self, text: str, at: int) -> tuple[int, str]:
        """Reads text[at:]. Returns where it stopped, and more of the arguments.

        The next call gets the rest of the text again, with more text behind it.
        """

    def pending(self, text: str) -> str:
        """Returns the rest of the arguments if the answer is cut after `text`, which `feed` left."""


class ArgumentStyle(Protocol):
    """One way in which arguments are written."""

    def reader(self, schema: Schema, ends: Sequence[str]) -> ArgumentReader:
        """Returns a reader for arguments of this JSON schema. One of the texts `ends` follows the arguments."""

    def rules(self, rule: str, function: Function, literal: LarkLiteral) -> str:
        """Returns Lark lines that define `rule` as the arguments of a function."""

    def write(self, arguments: str) -> str:
        """Returns arguments (the text of a JSON object) in this style."""


class JsonObjectReader:
    """Reads arguments that are a JSON object."""

    def __init__(self) -> None:
        self.done = False
        self.invalid = False
        self._scanner = JsonScanner()

    def feed(self, text: str, at: int) -> tuple[int, str]:
        scanner = self._scanner
        if not scanner.depth and text[at : at + 1] != "{":
            self.invalid = at < len(text)
            return at, ""
        at, out = scanner.feed(text, at)
        self.done, self.invalid = scanner.done, scanner.invalid
        return at, out

    def pending(self, text: str) -> str:
        return self._scanner.pending


class JsonArguments:
    """Arguments as a JSON object."""

    def reader(self, schema: Schema, ends: Sequence[str]) -> JsonObjectReader:
        return JsonObjectReader()

    def rules(self, rule: str, function: Function, literal: LarkLiteral) -> str:
        return f"{rule}: {lark_json(parameters_schema(function), strict=function.strict)}"

    def write(self, arguments: str) -> str:
        return arguments


JSON_ARGUMENTS = JsonArguments()


def string_regex(schema: Schema, function: Function) -> str:
    """Returns the regular expression of a string. Raises InvalidRequest for a keyword that it cannot enforce."""
    if not function.strict:
        return r"(.|\n)*"
    least, most = _length(schema, "minLength", function), _length(schema, "maxLength", function)
    if not least and most is None and "pattern" not in schema and "format" not in schema:
        return r"(.|\n)*"
    for key in ("pattern", "format"):
        if key in schema:
            problem = f"{function.field}: {key} of a strict function is not supported with this model's tool format"
            raise InvalidRequest(problem, field=function.field)
    return rf"(.|\n){{{least or 0},{'' if most is None else most}}}"


def _length(schema: Schema, keyword: str, function: Function) -> int | None:
    """Returns a length in a schema, None without one. Another value is refused in a strict function."""
    value = schema.get(keyword)
    if (
        not isinstance(value, bool)
        and isinstance(value, int | float)
        and 0 <= value <= _MAX_LENGTH
        and value == int(value)
    ):
        return int(value)
    if value is not None:
        _refuse(keyword, function)
    return None


_MAX_LENGTH = 1 << 31


_ANY = r"/(.|\n)*/"
_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)(\.[0-9]+)?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
#: Regular expressions of `format`, by RFC 3339, 4122, 5321, 2673 and 3986; generous where the RFCs are.
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt ]{_TIME}",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "email": r"[A-Za-z0-9.!#$%&'*+=?^_`{|}~-]+@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "hostname": r"[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[^ \t\n<>]+",
}
_NOT_LARK = re.compile(r"\(\?[=!<]|\\[1-9bBk]")  #: Parts of a pattern that llguidance does not know.


def lark_regex(text: str) -> str:
    """Returns a regular expression of Lark, without slashes around it, for a text."""
    return re.escape(text).replace("\\\n", "\\n").replace("/", r"\/")


def string_limits(schema: Schema, function: Function) -> list[str]:
    """Returns the regular expressions that a string matches, all of them; none if the schema allows any.

    Raises InvalidRequest for a keyword of a strict function that they cannot enforce.
    """
    limits: list[str] = []
    least, most = _length(schema, "minLength", function), _length(schema, "maxLength", function)
    if least or most is not None:
        limits.append(rf"/(.|\n){{{least or 0},{'' if most is None else most}}}/")
    if isinstance(pattern := schema.get("pattern"), str):
        core = pattern.removeprefix("^")
        core = core[:-1] if core.endswith("$") and not core.endswith(r"\$") else core
        anchored = len(core) < len(pattern)
        if _NOT_LARK.search(core) or re.search(r"(?<![\\\[])[\^$]", core) or (anchored and "|" in core):
            _refuse("pattern", function)
        else:
            before, after = ("" if pattern.startswith("^") else r"(.|\n)*", "" if pattern.endswith("$") else r"(.|\n)*")
            limits.append("/" + before + "(" + re.sub(r"(?<!\\)/", r"\/", core) + ")" + after + "/")
    name = adapted({**schema}).get("format")  # a format that asserts nothing is left out
    if isinstance(name, str) and name in _FORMATS:
        limits.append(f"/{_FORMATS[name]}/")
    elif name is not None:
        _refuse("format", function)
    return limits


def _refuse(keyword: str, function: Function) -> None:
    if function.strict:
        problem = f"{function.field}: {keyword} of a strict function is not supported with this model's tool format"
        raise InvalidRequest(problem, field=function.field)


class TaggedArguments:
    """Arguments between tags, each with its key: <parameter=city>Oslo</parameter>.

    A string stands there as it is, any other value as JSON. The schema decides which of the two a value is. Some
    templates write True, None and {'a': 1} as Python does, so the reader accepts these too.
    """

    def __init__(self, entry: str) -> None:
        """`entry`: one argument with $key and $value, and white space around it as in the model's training."""
        self.before_key, rest = entry.split("$key")
        self.after_key, self.after_value = rest.split("$value")

    def reader(self, schema: Schema, ends: Sequence[str]) -> TaggedArgumentReader:
        return TaggedArgumentReader(self, schema, ends)

    def rules(self, rule: str, function: Function, literal: LarkLiteral) -> str:
        """Properties come in the order of the schema. Properties that are not required may be absent."""
        lines = [f"{rule}: {rule}_0"]
        properties = named_properties(function)
        for n, (key, schema, required) in enumerate(properties):
            skip = "" if required else f" | {rule}_{n + 1}"
            head = lark_text(f"{self.before_key}{key}{self.after_key}", literal)
            lines.append(f"{rule}_{n}: {head} {rule}_value_{n} {rule}_{n + 1}{skip}")
            lines.append(self._value_rule(f"{rule}_value_{n}", schema, function, literal))
        lines.append(f'{rule}_{len(properties)}: ""')
        return "\n".join(lines)

    def _value_rule(self, rule: str, schema: Any, function: Function, literal: LarkLiteral) -> str:
        """Defines `rule` as a value with the text after it."""
        types = json_types(schema, schema)
        if types is not None and "string" not in types:
            return f"{rule}: {lark_json(schema, strict=function.strict)} {lark_text(self.after_value, literal)}"
        if types == ONLY_TEXT and (texts := _enumerated(schema)) is not None:
            return f"{rule}: " + " | ".join(lark_text(text + self.after_value, literal) for text in texts)
        space, close, tail = self.after_value.partition(self.after_value.strip())
        after = f" {lark_string(tail)}" if tail else ""
        limits = string_limits(schema, function) if isinstance(schema, dict) and types == ONLY_TEXT else []
        terminal = f"{rule.upper()}_TEXT"
        if literal(close).startswith("<["):
            return f"{rule}: {terminal} {literal(close)}{after}\n{terminal}: {' & '.join(limits or [_ANY])}"
        if limits:
            limits.append(f"~/(.|\\n)*{lark_regex(close)}(.|\\n)*/")
            text = f"{terminal}: ({' & '.join(limits)}) {lark_string(space + close)}"
            return f"{rule}: {terminal}{after}\n{text}"
        return f"{rule}: {rule}_text{after}\n{rule}_text[lazy]: /(.|\\n)*{lark_regex(space + close)}/"

    def write(self, arguments: str) -> str:
        written = []
        for key, value in json.loads(arguments).items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            written.append(f"{self.before_key}{key}{self.after_key}{text}{self.after_value}")
        return "".join(written)


class StateReader:
    """A reader that is in one of several states."""

    #: Reads text[at:] in the current state, and appends arguments to `out`. Returns where it stopped, None to wait.
    _state: Callable[[str, int, list[str]], int | None]

    def __init__(self) -> None:
        self.done = False
        self.invalid = False

    def feed(self, text: str, at: int) -> tuple[int, str]:
        out: list[str] = []
        while not (self.done or self.invalid):
            after = self._state(text, at, out)
            if after is None:
                break
            at = after
        return at, "".join(out)


class TaggedArgumentReader(StateReader):
    """Reads tagged arguments: (before a key) -> key -> (between) -> value -> (before a key) ... -> an end.

    Strings are passed on as they come, other values when they are complete.
    """

    def __init__(self, style: TaggedArguments, schema: Schema, ends: Sequence[str]) -> None:
        super().__init__()
        self._schema = schema
        self._ends = ends
        self._before_key = style.before_key.strip()
        #: Texts after the key. White space before each of them is skipped.
        self._after_key = style.after_key.split() or [""]
        self._close = style.after_value.strip()
        self._lead_newline, self._last_newline = style.after_key.endswith("\n"), style.after_value.startswith("\n")
        self._state = self._before
        self._keys: set[str] = set()
        self._key = ""
        self._passed = 0  #: Number of texts of `_after_key` that were read.
        self._types: frozenset[str] | None = None
        self._is_text = False  #: The value can only be a string, so it is passed on as it comes.
        self._skip_newline = False
        self._value: list[str] = []
        self._newline = ""  #: A held line break; it belongs to the value if more of the value follows.

    def pending(self, text: str) -> str:
        if self._state != self._in_value or self._is_text:
            return ""
        scanner = JsonScanner()
        _, value = scanner.feed("".join([*self._value, text]).lstrip(), 0)
        if scanner.invalid or not value + scanner.pending or ("string" in (self._types or ("string",))):
            return ""
        return self._lead() + value + scanner.pending

    def _lead(self) -> str:
        return f"{', ' if len(self._keys) > 1 else '{'}{json.dumps(self._key, ensure_ascii=False)}: "

    def _before(self, text: str, at: int, out: list[str]) -> int | None:
        rest = text[at:].lstrip()
        at = len(text) - len(rest)
        if rest.startswith(self._before_key):
            self._state, self._passed = self._in_key, 0
            return at + len(self._before_key)
        if rest.startswith(tuple(self._ends)):
            out.append("}" if self._keys else "{}")
            self.done = True
            return at
        self.invalid = not any(marker.startswith(rest) for marker in (self._before_key, *self._ends))
        return None

    def _in_key(self, text: str, at: int, out: list[str]) -> int | None:
        first = self._after_key[0]
        end = text.find(first, at)
        if end < 0 or end - at > MAX_KEY:
            self.invalid = len(text) - at - len(first) >= MAX_KEY
            return None
        self._key = text[at:end].strip()
        self.invalid = not self._key or self._key in self._keys or "<" in self._key
        self._keys.add(self._key)
        self._passed, self._state = 1, self._between
        return end + len(first)

    def _between(self, text: str, at: int, out: list[str]) -> int | None:
        if self._passed < len(self._after_key):
            rest, expected = text[at:].lstrip(), self._after_key[self._passed]
            if not rest.startswith(expected):
                self.invalid = not expected.startswith(rest)
                return None
            self._passed += 1
            return len(text) - len(rest) + len(expected)
        properties = self._schema.get("properties")
        schema = properties.get(self._key, {}) if isinstance(properties, dict) else {}
        self._types = json_types(schema, self._schema)
        self._is_text = self._types == ONLY_TEXT
        self._skip_newline, self._value, self._newline, self._state = self._lead_newline, [], "", self._in_value
        if self._is_text:
            out.append(self._lead() + '"')
        return at

    def _in_value(self, text: str, at: int, out: list[str]) -> int | None:
        part, close, rest = split_at_marker(text[at:], self._close)
        if self._skip_newline and part:
            self._skip_newline, part = False, part.removeprefix("\n")
        part, self._newline = self._newline + part, ""
        if self._last_newline and part.endswith("\n"):
            part, self._newline = part[:-1], "\n"
        if self._is_text:
            out.append(json_string(part)[1:-1])
        else:
            self._value.append(part)
        if close:
            out.append('"' if self._is_text else self._lead() + typed_value("".join(self._value), self._types))
            self._state = self._before
        elif len(rest) == len(text) - at:
            return None
        return len(text) - len(rest)


MAX_KEY = 1024  #: Characters of an argument's name.


def json_string(text: str) -> str:
    """Returns a text as a JSON string. Half of a surrogate pair becomes U+FFFD."""
    return json.dumps(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), ensure_ascii=False)


def json_types(schema: Any, root: Any) -> frozenset[str] | None:
    """Returns the JSON types that a schema allows; None if it allows all or names none. `root` has its definitions.

    "integer" stands beside "number". Keywords that this function does not know allow all types.
    """
    return _json_types(schema, root, 16, {})


def _json_types(schema: Any, root: Any, depth: int, known: dict[int, frozenset[str] | None]) -> frozenset[str] | None:
    """Implements json_types. `known` has the result by the id of each schema, so that references cost no time twice."""
    if not isinstance(schema, Mapping) or depth == 0:
        return None
    if id(schema) not in known:
        known[id(schema)] = None  # for references that lead back
        known[id(schema)] = _types_in(schema, lambda part: _json_types(part, root, depth - 1, known), root)
    return known[id(schema)]


def _types_in(schema: Schema, types_of: Callable[[Any], frozenset[str] | None], root: Any) -> frozenset[str] | None:
    found: list[frozenset[str]] = []
    if isinstance(reference := schema.get("$ref"), str):
        found += _known(types_of(resolve(root, reference)))
    named = schema.get("type")
    if isinstance(named, str):
        found.append(frozenset((named,)))
    elif isinstance(named, list) and named:
        found.append(frozenset(map(str, named)))
    if isinstance(values := schema.get("enum"), list):
        found.append(frozenset(map(_type_of, values)))
    if "const" in schema:
        found.append(frozenset((_type_of(schema["const"]),)))
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), list) and options:
            each = [types_of(option) for option in options]
            if None not in each:
                found.append(frozenset[str]().union(*(types for types in each if types is not None)))
    if isinstance(parts := schema.get("allOf"), list):
        for part in parts:
            found += _known(types_of(part))
    if not found:
        return None
    both = frozenset.intersection(*found)
    return both or found[0]


def _known(types: frozenset[str] | None) -> list[frozenset[str]]:
    return [] if types is None else [types]


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


_TYPE_BY_FIRST = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}


def _enumerated(schema: Any) -> list[str] | None:
    """Returns the strings that a schema lists, None if it lists none."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    texts = [value for value in values or () if isinstance(value, str)]
    return texts or None


def typed_value(text: str, types: frozenset[str] | None) -> str:
    """Returns the JSON text of a value that was written without its type. `types` are those that its schema allows.

    If the schema allows a string, the value is a string unless it reads as a value of another allowed type. A text that
    is of no allowed type is a string too: the client checks the arguments.
    """
    if types == ONLY_TEXT:
        return json_string(text)
    value = strict_json(text)
    if value is None and types is not None:
        bare = text.strip()
        if "string" not in types or bare in ("True", "False", "None"):
            value = literal_to_json(bare)
    if value is not None:
        kind = _TYPE_BY_FIRST.get(value[0], "number")
        if types is None or "string" in types:
            accepted = kind != "string" and (
                types is None or kind in types or (kind == "number" and "integer" in types)
            )
        else:
            accepted = True
        if accepted:
            return value
    return json_string(text)
