"""Rules of llguidance's Lark dialect that several formats share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.tools.protocol import Function

MAX_SPACE = 40  # characters of white space in a row, so that a model that indents for ever ends


def quoted(text: str) -> str:
    """A string literal."""
    return json.dumps(text, ensure_ascii=False)


def json_value(schema: Mapping[str, Any] | bool, *, strict: bool) -> str:
    """A value by its schema; not strict: what llguidance cannot enforce is left out instead of refused."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    options = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_SPACE}}}", "lenient": not strict}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def parameters(function: Function) -> dict[str, Any]:
    """The schema of a function's arguments: always an object."""
    return {"type": "object", **function.parameters}


def call_objects(rule: str, functions: Sequence[Function], key: str) -> str:
    """`rule` is {"name": "f", <key>: {...}} of one of the functions."""
    lines = [f"{rule}: {' | '.join(f'{rule}_{i}' for i in range(len(functions)))}"]
    for i, f in enumerate(functions):
        head = quoted(f'{{"name": {json.dumps(f.name)}, "{key}": ')
        lines.append(f'{rule}_{i}: {head} {rule}_arguments_{i} "}}"')
        lines.append(f"{rule}_arguments_{i}: {json_value(parameters(f), strict=f.strict)}")
    return "\n".join(lines)


def named_arguments(rule: str, functions: Sequence[Function], begin: str, between: str) -> str:
    """`rule` is begin f between {...} of one of the functions."""
    lines = [f"{rule}: {' | '.join(f'{rule}_{i}' for i in range(len(functions)))}"]
    for i, f in enumerate(functions):
        lines.append(f"{rule}_{i}: {begin} {quoted(f.name)} {between} {rule}_arguments_{i}")
        lines.append(f"{rule}_arguments_{i}: {json_value(parameters(f), strict=f.strict)}")
    return "\n".join(lines)


def keyword_calls(rule: str, functions: Sequence[Function]) -> str:
    """`rule` is f(a=1, b="x") of one of the functions: its properties in their order, what is not required optional.

    A schema without properties that are identifiers takes no arguments.
    """
    lines = [f"{rule}: {' | '.join(f'{rule}_{i}' for i in range(len(functions)))}"]
    for i, f in enumerate(functions):
        lines.append(f'{rule}_{i}: {quoted(f.name + "(")} {rule}_{i}_first_0 ")"')
        schema = parameters(f)
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        named = [(k, v) for k, v in schema.get("properties", {}).items() if k.isidentifier()]
        for n, (key, value) in enumerate(named):
            skip_first = "" if key in schema.get("required", ()) else f" | {rule}_{i}_first_{n + 1}"
            skip_later = "" if key in schema.get("required", ()) else f" | {rule}_{i}_later_{n + 1}"
            entry = f"{quoted(key + '=')} {rule}_{i}_value_{n} {rule}_{i}_later_{n + 1}"
            lines.append(f"{rule}_{i}_first_{n}: {entry}{skip_first}")
            lines.append(f'{rule}_{i}_later_{n}: ", " {entry}{skip_later}')
            inner = {**value, **shared} if isinstance(value, dict) else value
            lines.append(f"{rule}_{i}_value_{n}: {json_value(inner, strict=f.strict)}")
        lines.append(f'{rule}_{i}_first_{len(named)}: ""')
        lines.append(f'{rule}_{i}_later_{len(named)}: ""')
    return "\n".join(lines)
