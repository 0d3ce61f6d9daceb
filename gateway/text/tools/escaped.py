"""Arguments of FunctionGemma and Gemma 4: pairs key:value with bare keys, and strings between two equal marks.

city:<escape>Oslo<escape>,days:3,units:[<escape>C<escape>],place:{lat:59.9}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import InvalidRequest
from common.json_schema.places import resolve
from gateway.text.tools.arguments import (
    MAX_KEY,
    ONLY_TEXT,
    Schema,
    StateReader,
    json_string,
    json_types,
    string_regex,
    typed_value,
)
from gateway.text.tools.format import Function, LarkLiteral, split_at_marker
from gateway.text.tools.json_scanner import MAX_DEPTH, JsonScanner
from gateway.text.tools.lark import lark_json, lark_string, parameters_schema, properties_of, required_of

_BARE_KEY = re.compile(r"[\w.$-]+")
_BARE_END = re.compile(r"[,}\]]")
MAX_BARE = 1 << 16  #: Max characters of a value without marks; the reader waits for all of it.
_MAX_RULES = 10_000  #: Rules of one function; llguidance refuses grammars of this size.
_MAX_SCHEMA_DEPTH = 8  #: Levels of a schema that a grammar follows; a value below them may be any value.
#: JSON values by Python's spelling, which some templates write.
_PYTHON_NAMES = {"None": "null", "True": "true", "False": "false"}
_SCALARS = frozenset({"number", "integer", "boolean", "null"})
_OF_STRINGS = frozenset({"minLength", "maxLength", "pattern", "format"})  #: string_regex enforces or refuses them.
#: Keywords of a schema that the rules enforce, and keywords that do not restrict a value.
_ENFORCED = frozenset(("type", "properties", "required", "additionalProperties", "items", "enum", "const")) | {
    *("$ref", "$defs", "definitions", "title", "description", "default", "examples", "nullable"),
}


class EscapedArguments:
    """Arguments as key:value pairs; `mark` stands before and after a string."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.markers = (mark,)

    def reader(self, schema: Schema, ends: Sequence[str]) -> EscapedReader:
        return EscapedReader(self.mark, schema)

    def rules(self, rule: str, function: Function, literal: LarkLiteral) -> str:
        """Properties come in the order of the alphabet, as the templates write them."""
        rules = _EscapedRules(self.mark, function, literal)
        rules.pairs(rule, parameters_schema(function), 0)
        return "\n".join(rules.lines)

    def write(self, arguments: str) -> str:
        return self._pairs(json.loads(arguments))

    def _pairs(self, values: Mapping[str, Any]) -> str:
        return ",".join(f"{self.key(key)}:{self.value(values[key])}" for key in sorted(values, key=str.lower))

    def key(self, key: str) -> str:
        """Returns a key, between marks if it could not stand without them."""
        return key if _BARE_KEY.fullmatch(key) else f"{self.mark}{key}{self.mark}"

    def value(self, value: Any) -> str:
        """Returns a JSON value in this style."""
        match value:
            case str():
                return f"{self.mark}{value}{self.mark}"
            case Mapping():
                return f"{{{self._pairs(value)}}}"
            case list():
                return f"[{','.join(map(self.value, value))}]"
            case _:
                return json.dumps(value)


class _Container:
    """An object or array that is being read."""

    def __init__(self, close: str) -> None:
        self.close = close  # its closing bracket
        self.empty = True
        self.keys: set[str] = set()


class EscapedReader(StateReader):
    """Reads pairs up to the bracket that closes them, which it leaves.

    States: key -> value -> (string, or the first key or value of a container) -> after -> key ...
    """

    def __init__(self, mark: str, schema: Schema) -> None:
        super().__init__()
        self._mark = mark
        self._schema = schema
        self._state = self._key
        self._stack = [_Container("}")]
        self._argument = ""  #: The name of the argument that is being read.

    def pending(self, text: str) -> str:
        if self._state != self._value:
            return ""
        scanner = JsonScanner()
        _, value = scanner.feed(text.strip(), 0)
        value += scanner.pending
        if scanner.invalid or scanner.depth or value.startswith('"') or not value:
            return ""
        container = self._stack[-1]
        return value if container.close == "}" or container.empty else f", {value}"

    def _waits(self, rest: str) -> bool:
        """Whether more text must come to decide if `rest` begins with the mark."""
        return self._mark.startswith(rest) and rest != self._mark

    def _key(self, text: str, at: int, out: list[str]) -> int | None:
        rest = text[at:].lstrip()
        if rest.startswith("}"):
            return self._close(len(text) - len(rest), out)
        if self._waits(rest):
            return None
        if rest.startswith(self._mark):
            pair = rest[len(self._mark) :].partition(self._mark)
            key, colon = pair[0], pair[2].lstrip()
            self.invalid = bool(colon) and not colon.startswith(":")
            complete, after = bool(colon), colon[1:]
        else:
            key, found, after = rest.partition(":")
            key, complete = key.strip(), bool(found)
            self.invalid = any(char in key for char in "{}[],\n") or (complete and not key)
        container = self._stack[-1]
        self.invalid = self.invalid or len(key) > MAX_KEY or (complete and key in container.keys)
        if self.invalid or not complete:
            return None
        opening = "{" if len(self._stack) == 1 else ""
        out.append(f"{opening if container.empty else ', '}{json_string(key)}: ")
        container.keys.add(key)
        container.empty = False
        if len(self._stack) == 1:
            self._argument = key
        self._state = self._value
        return len(text) - len(after)

    def _value(self, text: str, at: int, out: list[str]) -> int | None:
        rest, container = text[at:].lstrip(), self._stack[-1]
        at = len(text) - len(rest)
        if self._waits(rest):
            return None
        in_array = container.close == "]"
        if in_array and rest.startswith("]"):
            return self._close(at, out)
        end = _BARE_END.search(rest)
        opens = rest[0] in "{["
        if not opens and not rest.startswith(self._mark) and end is None:
            self.invalid = len(rest) > MAX_BARE
            return None
        if in_array:
            out.append("" if container.empty else ", ")
            container.empty = False
        if opens:
            out.append(rest[0])
            self._stack.append(_Container("}" if rest[0] == "{" else "]"))
            self._state = self._key if rest[0] == "{" else self._value
            self.invalid = len(self._stack) > MAX_DEPTH
            return at + 1
        types = self._types()
        if rest.startswith(self._mark):
            at += len(self._mark)
            self._state = self._string if types is None or "string" in types else self._typed
            out.append('"' if self._state == self._string else "")
            return at
        assert end is not None
        bare = rest[: end.start()].strip()
        self.invalid = not bare
        out.append(_PYTHON_NAMES.get(bare) or typed_value(bare, types))
        self._state = self._after
        return at + end.start()

    def _types(self) -> frozenset[str] | None:
        """Returns the types that the schema allows for the value, None if that is not known."""
        properties = self._schema.get("properties")
        if len(self._stack) > 1 or not isinstance(properties, Mapping):
            return None
        return json_types(properties.get(self._argument), self._schema)

    def _typed(self, text: str, at: int, out: list[str]) -> int | None:
        """Reads a string where another type is expected: some templates write every value between marks."""
        end = text.find(self._mark, at)
        if end < 0:
            return None
        out.append(typed_value(text[at:end], self._types()))
        self._state = self._after
        return end + len(self._mark)

    def _string(self, text: str, at: int, out: list[str]) -> int | None:
        part, mark, rest = split_at_marker(text[at:], self._mark)
        out.append(json_string(part)[1:-1])
        if mark:
            out.append('"')
            self._state = self._after
        elif not part:
            return None
        return len(text) - len(rest)

    def _after(self, text: str, at: int, out: list[str]) -> int | None:
        rest = text[at:].lstrip()
        if not rest:
            return None
        if rest[0] == ",":
            self._state = self._key if self._stack[-1].close == "}" else self._value
            return len(text) - len(rest) + 1
        if rest[0] == self._stack[-1].close:
            return self._close(len(text) - len(rest), out)
        self.invalid = True
        return None

    def _close(self, at: int, out: list[str]) -> int:
        container = self._stack.pop()
        if self._stack:
            out.append(container.close)
            self._state = self._after
            return at + 1
        out.append("{}" if container.empty else "}")
        self.done = True
        return at


class _EscapedRules:
    """Builds the Lark rules of one function's arguments."""

    def __init__(self, mark: str, function: Function, literal: LarkLiteral) -> None:
        self.lines: list[str] = []
        self._mark = literal(mark)
        self._escaped = re.escape(mark).replace("/", r"\/")
        self._write = EscapedArguments(mark)
        self._function = function
        self._root = parameters_schema(function)
        self._any: str | None = None

    def pairs(self, rule: str, schema: Schema, depth: int) -> None:
        """Defines `rule` as the pairs of an object."""
        required = required_of(schema)
        properties = sorted(properties_of(schema).items(), key=lambda pair: pair[0].lower())
        self.lines.append(f"{rule}: {rule}_first_0")
        for n, (key, value) in enumerate(properties):
            skip = [""] * 2 if key in required else [f" | {rule}_{place}_{n + 1}" for place in ("first", "later")]
            entry = f"{lark_string(self._write.key(key) + ':')} {rule}_value_{n} {rule}_later_{n + 1}"
            self.lines.append(f"{rule}_first_{n}: {entry}{skip[0]}")
            self.lines.append(f'{rule}_later_{n}: "," {entry}{skip[1]}')
            self._value(f"{rule}_value_{n}", value, depth + 1)
        self.lines += [f'{rule}_{place}_{len(properties)}: ""' for place in ("first", "later")]

    def _value(self, rule: str, schema: Any, depth: int) -> None:
        """Defines `rule` as a value of a schema. Raises InvalidRequest if references lead to too many rules."""
        if len(self.lines) > _MAX_RULES:
            problem = f"{self._function.field} has too many parts with its references, more than {_MAX_RULES}"
            raise InvalidRequest(problem, field=self._function.field)
        if depth <= _MAX_SCHEMA_DEPTH and isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
            schema = resolve(self._root, schema["$ref"])
        if depth > _MAX_SCHEMA_DEPTH or not isinstance(schema, Mapping):
            schema = {}
        types = json_types(schema, self._root)
        if types is not None and types <= _SCALARS:
            self.lines.append(f"{rule}: {lark_json(schema, strict=self._function.strict)}")
            return
        if (values := self._listed(schema)) is not None:
            self.lines.append(f"{rule}: {' | '.join(values)}")
            return
        self._require_enforced(schema, types)
        options: list[str] = []
        if types is None:
            options.append(self._any_value())
        for kind in sorted(types or ()):
            match kind:
                case "string":
                    options.append(self._text(f"{rule}_text", schema if types == ONLY_TEXT else {}))
                case "array":
                    options.append(self._array(f"{rule}_item", schema, depth))
                case "object" if properties_of(schema):
                    self.pairs(f"{rule}_pairs", schema, depth)
                    options.append(f'"{{" {rule}_pairs "}}"')
                case "object":
                    options.append(f"{self._any_value()}_object")
                case _:
                    options.append(lark_string("null") if kind == "null" else f"{self._any_value()}_scalar")
        self.lines.append(f"{rule}: {' | '.join(options)}")

    def _listed(self, schema: Schema) -> list[str] | None:
        """Returns the values that a schema lists; None if it lists none, or an object or array."""
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if not isinstance(values, list) or not values or any(isinstance(value, list | dict) for value in values):
            return None
        return [self._marked(value) if isinstance(value, str) else lark_string(json.dumps(value)) for value in values]

    def _marked(self, text: str) -> str:
        return f"{self._mark} {lark_string(text)} {self._mark}" if text else f"{self._mark} {self._mark}"

    def _text(self, rule: str, schema: Schema) -> str:
        """Returns a string as Lark, defined by `rule` if it has to be a rule."""
        text = string_regex(schema, self._function)
        if self._mark.startswith("<["):
            return f"{self._mark} /{text}/ {self._mark}"
        self.lines.append(f"{rule}[lazy]: /{text}{self._escaped}/")
        return f"{self._mark} {rule}"

    def _array(self, rule: str, schema: Schema, depth: int) -> str:
        item = self._any_value()
        if isinstance(schema.get("items"), Mapping):
            self._value(rule, schema["items"], depth + 1)
            item = rule
        return f'"[" ({item} ("," {item})*)? "]"'

    def _any_value(self) -> str:
        """Returns the name of the rule of any value. The first call defines the rule."""
        if self._any is None:
            self._any = rule = f"{self.lines[0].partition(':')[0]}_any"
            text = self._text(f"{rule}_text", {})
            self.lines += [
                f'{rule}: {text} | {rule}_scalar | {rule}_object | "[" ({rule} ("," {rule})*)? "]"',
                f'{rule}_object: "{{" ({rule}_pair ("," {rule}_pair)*)? "}}"',
                f"{rule}_pair: /[A-Za-z0-9_.$-]+:/ {rule}",
                f"{rule}_scalar: {lark_json({'type': ['number', 'boolean', 'null']}, strict=False)}",
            ]
        return self._any

    def _require_enforced(self, schema: Schema, types: frozenset[str] | None) -> None:
        """Raises InvalidRequest for a keyword that the rules do not enforce, if the function is strict."""
        known = _ENFORCED | _OF_STRINGS if types == ONLY_TEXT else _ENFORCED
        unknown = sorted(set(schema) - known)
        if self._function.strict and unknown:
            field = self._function.field
            problem = f"{field}: {unknown[0]} of a strict function is not supported with this model's tool format"
            raise InvalidRequest(problem, field=field)
