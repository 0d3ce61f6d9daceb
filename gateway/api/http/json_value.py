"""JSON values: their type, the names of their types, and the limit of their nesting."""

from __future__ import annotations

from typing import Any

#: Levels of nested arrays and objects that a body may have; orjson writes at most 254.
MAX_DEPTH = 200

#: A JSON object.
Json = dict[str, Any]

_TYPE_NAMES = {dict: "object", list: "array", str: "string", int: "integer", float: "number", bool: "boolean"}


def type_name(value: object) -> str:
    """Returns JSON's name of a value's type."""
    return "null" if value is None else _TYPE_NAMES.get(type(value), type(value).__name__)


def deeper_than(value: object, most: int) -> bool:
    """Returns whether arrays and objects are nested deeper than `most` levels."""
    level = [value]
    for _ in range(most):
        nested = (v.values() if type(v) is dict else v for v in level if type(v) is dict or type(v) is list)
        level = [v for members in nested for v in members if type(v) is dict or type(v) is list]
        if not level:
            return False
    return True
