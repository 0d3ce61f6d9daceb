"""Parses the grammar that a client wants the answer to match, from the forms of OpenAI and of vLLM.

A request may use one form at most. Before anything is spent on the request, `GrammarChecker` compiles the grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from common import grammar as g
from common.errors import InvalidRequest
from common.types import Grammar
from gateway.api.http.json_fields import JsonFields, wrong_type

MAX_CHOICES = 1024

#: The forms that also have a field guided_<form>.
_GUIDED_FORMS = ("json", "regex", "choice", "grammar")

#: Members of structured_outputs without support, and for each the value that has no effect.
_UNSUPPORTED_MEMBERS: dict[str, object] = {
    "structural_tag": None,
    "whitespace_pattern": None,
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
}


def parse_structured_output(fields: JsonFields) -> Grammar | None:
    """Returns the grammar of a generating request, None without one. Raises InvalidRequest, which names the field."""
    grammars = [(name, grammar) for name, grammar in _grammars(fields) if grammar is not None]
    if len(grammars) > 1:
        names = " and ".join(name for name, _ in grammars)
        raise InvalidRequest(f"{names} exclude each other", field=grammars[1][0])
    return grammars[0][1] if grammars else None


def _grammars(fields: JsonFields) -> Iterator[tuple[str, Grammar | None]]:
    yield "response_format", _response_format(fields.mapping("response_format"))
    for name in _GUIDED_FORMS:
        if (value := fields.raw(f"guided_{name}")) is not None:
            yield f"guided_{name}", _FORMS[name](value, f"guided_{name}")
    if (members := fields.mapping("structured_outputs")) is not None:
        yield from _structured_outputs(JsonFields(members, "structured_outputs."))


def _structured_outputs(inner: JsonFields) -> Iterator[tuple[str, Grammar | None]]:
    for name, accepted in _UNSUPPORTED_MEMBERS.items():
        if (value := inner.raw(name)) is not None and value is not accepted:
            raise InvalidRequest(f"structured_outputs.{name} is not supported", field=f"structured_outputs.{name}")
    values = {name: value for name in _FORMS if (value := inner.raw(name)) is not None}
    if not values:
        forms = ", ".join(_FORMS)
        raise InvalidRequest(f"structured_outputs must have one of {forms}", field="structured_outputs")
    for name, value in values.items():
        yield f"structured_outputs.{name}", _FORMS[name](value, f"structured_outputs.{name}")


def _response_format(value: dict[str, Any] | None) -> Grammar | None:
    if value is None:
        return None
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return g.json_object(field="response_format")
    if kind != "json_schema":
        raise InvalidRequest(
            "response_format.type must be text, json_object or json_schema", field="response_format.type"
        )
    name = "response_format.json_schema"
    inner = value.get("json_schema")
    if not isinstance(inner, dict):
        raise wrong_type(name, "an object", inner)
    inside = JsonFields(inner, f"{name}.")
    inside.string("name", 1024)
    inside.boolean("strict")
    schema = inside.mapping("schema")
    if schema is None:
        return g.json_object(field=f"{name}.schema")
    return g.from_json_schema(schema, field=f"{name}.schema")


def _json(value: object, name: str) -> Grammar:
    if not isinstance(value, dict | str | bool):
        raise wrong_type(name, "a JSON schema", value)
    return g.from_json_schema(value, field=name)


def _json_object(value: object, name: str) -> Grammar | None:
    if not isinstance(value, bool):
        raise wrong_type(name, "a boolean", value)
    return g.json_object(field=name) if value else None


def _text(make: Callable[..., Grammar]) -> Callable[[object, str], Grammar]:
    def parse(value: object, name: str) -> Grammar:
        if not isinstance(value, str):
            raise wrong_type(name, "a string", value)
        if not value:
            raise InvalidRequest(f"{name} is empty", field=name)
        return make(value, field=name)

    return parse


def _choice(value: object, name: str) -> Grammar:
    if not isinstance(value, list):
        raise wrong_type(name, "an array of strings", value)
    for choice in value:
        if not isinstance(choice, str):
            raise wrong_type(name, "an array of strings", choice)
    if len(value) > MAX_CHOICES:
        raise InvalidRequest(f"{name} may have at most {MAX_CHOICES} entries", field=name)
    return g.from_choice(value, field=name)


_FORMS: dict[str, Callable[[object, str], Grammar | None]] = {
    "json": _json,
    "regex": _text(g.from_regex),
    "choice": _choice,
    "grammar": _text(g.from_lark_or_gbnf),
    "json_object": _json_object,
}
