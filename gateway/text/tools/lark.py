"""Rules in llguidance's Lark dialect that several tool formats share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.errors import InvalidRequest
from common.grammar.compiler import MAX_GRAMMAR_CHARS
from common.json_schema.adapted import adapted
from gateway.text.tools.format import Function, LarkLiteral

#: Texts that may be special tokens: <x>, </x>, <|x|>, [X].
MARKER = r"<[^<>\s=\"]+>|\[/?[A-Z][A-Z_]+\]"
# White space as json.dumps writes it, as in training data. With flexible white space a model could write it for ever.
_AS_TRAINED = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}


def lark_string(text: str) -> str:
    """Returns a Lark string literal."""
    return json.dumps(text, ensure_ascii=False)


def lark_text(text: str, literal: LarkLiteral, begin: str = "") -> str:
    """Returns a text as a sequence in Lark: markers as `literal` writes them, the rest as strings.

    The marker `begin` is written as the rule of this name.
    """
    terms: list[str] = []
    plain = ""
    for piece in re.split(f"({re.escape(begin)}|{MARKER})" if begin else f"({MARKER})", text):
        written = "begin" if begin and piece == begin else literal(piece) if re.fullmatch(MARKER, piece) else ""
        if not written or written.startswith('"'):
            plain += piece
            continue
        terms += [lark_string(plain), written] if plain else [written]
        plain = ""
    return " ".join([*terms, lark_string(plain)] if plain else terms)


def lark_json(schema: Mapping[str, Any] | bool, *, strict: bool) -> str:
    """Returns a Lark rule for a JSON value. Without `strict`, keywords that llguidance cannot enforce are left out."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, Mapping):  # llguidance refuses it
        return f"%json {json.dumps(schema)}"
    return f"%json {json.dumps({**adapted({**schema}), 'x-guidance': {**_AS_TRAINED, 'lenient': not strict}})}"


def parameters_schema(function: Function) -> dict[str, Any]:
    """Returns the JSON schema of a function's arguments, which are always an object."""
    return {"type": "object", **function.parameters}


def _one_of(rule: str, functions: Sequence[Function]) -> str:
    return f"{rule}: {' | '.join(f'{rule}_{i}' for i in range(len(functions)))}"


def call_rules(rule: str, functions: Sequence[Function], head: Callable[[Function], str], tail: str = "") -> str:
    """Defines `rule` as <head> {...} <tail> for one of the functions. `head` and `tail` are in Lark."""
    lines = [_one_of(rule, functions)]
    for i, f in enumerate(functions):
        lines.append(f"{rule}_{i}: {head(f)} {rule}_arguments_{i} {tail}".rstrip())
        lines.append(f"{rule}_arguments_{i}: {lark_json(parameters_schema(f), strict=f.strict)}")
    return "\n".join(lines)


def json_call_rules(rule: str, functions: Sequence[Function], key: str) -> str:
    """Defines `rule` as {"name": "f", <key>: {...}} for one of the functions."""
    return call_rules(
        rule, functions, lambda f: lark_string(f'{{"name": {json.dumps(f.name)}, "{key}": '), lark_string("}")
    )


def json_schema_call_rules(rule: str, functions: Sequence[Function], key: str) -> str:
    """Defines the rule of `json_call_rules` with JSON's own lexemes, for a place where other JSON may stand too."""
    lines = [_one_of(rule, functions)]
    for i, f in enumerate(functions):
        schema = {
            "type": "object",
            "properties": {"name": {"const": f.name}, key: _relocate_refs(parameters_schema(f), f"#/properties/{key}")},
            "required": ["name", key],
            "additionalProperties": False,
        }
        lines.append(f"{rule}_{i}: {lark_json(schema, strict=f.strict)}")
    return "\n".join(lines)


def _relocate_refs(schema: Any, to: str) -> Any:
    """Adjusts the references of a schema that is embedded at `to`, a JSON pointer."""
    if isinstance(schema, list):
        return [_relocate_refs(item, to) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: to + value[1:]
        if key == "$ref" and isinstance(value, str) and value[:2] in ("#", "#/")
        else _relocate_refs(value, to)
        for key, value in schema.items()
    }


def keyword_call_rules(rule: str, functions: Sequence[Function], lead: str = "") -> str:
    """Defines `rule` as f(a=1, b="x") for one of the functions, after `lead`."""
    lines = [_one_of(rule, functions)]
    for i, f in enumerate(functions):
        lines.append(f'{rule}_{i}: {lark_string(f"{lead}{f.name}(")} {rule}_{i}_arguments ")"')
        lines.append(keyword_argument_rules(f"{rule}_{i}_arguments", f))
    return "\n".join(lines)


def properties_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the properties of a schema; none if the client's value is not an object."""
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def required_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """Returns the names of required properties; none if the client's value is not an array."""
    required = schema.get("required")
    return frozenset(name for name in required if isinstance(name, str)) if isinstance(required, list) else frozenset()


def named_properties(function: Function) -> list[tuple[str, Any, bool]]:
    """Returns name, schema and whether it is required of each declared property; the schema has its definitions.

    Raises InvalidRequest if the schemas with these copies exceed the longest grammar.
    """
    schema = parameters_schema(function)
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    properties, required = properties_of(schema), required_of(schema)
    if shared and len(properties) * len(json.dumps(shared)) > MAX_GRAMMAR_CHARS:
        problem = f"{function.field}: {len(properties)} properties with these definitions are too large for a grammar"
        raise InvalidRequest(problem, field=function.field)
    return [
        (key, {**value, **shared} if isinstance(value, dict) else value, key in required)
        for key, value in properties.items()
    ]


def keyword_argument_rules(rule: str, function: Function) -> str:
    """Defines `rule` as the arguments a=1, b="x" of a function.

    The properties come in their order. A property that is not required is optional. A schema without properties that
    are identifiers takes no arguments.
    """
    lines = [f"{rule}: {rule}_first_0"]
    named = [(key, value, required) for key, value, required in named_properties(function) if key.isidentifier()]
    for n, (key, value, required) in enumerate(named):
        skip_first = "" if required else f" | {rule}_first_{n + 1}"
        skip_later = "" if required else f" | {rule}_later_{n + 1}"
        entry = f"{lark_string(key + '=')} {rule}_value_{n} {rule}_later_{n + 1}"
        lines.append(f"{rule}_first_{n}: {entry}{skip_first}")
        lines.append(f'{rule}_later_{n}: ", " {entry}{skip_later}')
        lines.append(f"{rule}_value_{n}: {lark_json(value, strict=function.strict)}")
    lines.append(f'{rule}_first_{len(named)}: ""')
    lines.append(f'{rule}_later_{len(named)}: ""')
    return "\n".join(lines)
