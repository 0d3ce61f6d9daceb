"""Typed access to the members of an untrusted JSON object.

Every error names the field. null counts as absent. A boolean is not a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

from common.errors import InvalidRequest

#: Levels of nested arrays and objects that a body may have; orjson writes at most 254.
MAX_DEPTH = 200

#: A JSON object.
Json = dict[str, Any]


def type_name(value: object) -> str:
    """Returns JSON's name of a value's type."""
    if isinstance(value, bool):
        return "boolean"
    names = {dict: "object", list: "array", str: "string", int: "integer", float: "number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def deeper_than(value: object, most: int) -> bool:
    """Returns whether arrays and objects are nested deeper than `most` levels."""
    level = [value]
    for _ in range(most):
        nested = (v.values() if type(v) is dict else v for v in level if type(v) is dict or type(v) is list)
        level = [v for members in nested for v in members if type(v) is dict or type(v) is list]
        if not level:
            return False
    return True


def unsupported_value(name: str, value: object, served: str) -> InvalidRequest:
    """Returns the error for a value that asks for something that is not served. `served`: the supported values."""
    if value is None:
        return InvalidRequest(f"{name} is missing; only {served} is supported", field=name)
    given = repr(value[:60]) if isinstance(value, str) else f"of type {type_name(value)}"
    return InvalidRequest(f"{name} {given} is not supported, only {served}", field=name)


def wrong_type(name: str, wanted: str, value: object) -> InvalidRequest:
    """Returns the error for a field of the wrong type."""
    return InvalidRequest(f"{name} must be {wanted}, not {type_name(value)}", field=name)


class JsonFields:
    """The members of one JSON object."""

    def __init__(self, members: Mapping[str, Any], prefix: str = "") -> None:
        """
        Args:
            prefix: Put before field names in errors, e.g. "stream_options.".
        """
        self._members = members
        self._prefix = prefix

    @classmethod
    def of_body(cls, body: object) -> Self:
        """Returns the members of a request's body. Raises InvalidRequest if the body is not an object."""
        if not isinstance(body, dict):
            raise InvalidRequest(f"the request body must be a JSON object, not {type_name(body)}")
        return cls(body)

    def raw(self, name: str) -> Any:
        """Returns the value as it came, None if absent."""
        return self._members.get(name)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Returns an integer in [low, high]; a float with an integer value counts as one."""
        value = self.raw(name)
        if value is None:
            return None
        full = self._prefix + name
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(full, "an integer", value)
        if not low <= value <= high:
            raise InvalidRequest(f"{full} must be between {low} and {high}, not {value}", field=full)
        return value

    def number(self, name: str, low: float, high: float, *, open_low: bool = False) -> float | None:
        """Returns a finite number in [low, high], or in (low, high] with open_low."""
        value = self.raw(name)
        if value is None:
            return None
        full = self._prefix + name
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(full, "a number", value)
        if not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
            start = "greater than" if open_low else "at least"
            raise InvalidRequest(f"{full} must be {start} {low:g} and at most {high:g}, not {value}", field=full)
        return float(value)

    def boolean(self, name: str) -> bool | None:
        """Returns true or false."""
        value = self.raw(name)
        if value is None or isinstance(value, bool):
            return value
        raise wrong_type(self._prefix + name, "a boolean", value)

    def string(self, name: str, max_chars: int) -> str | None:
        """Returns a string of at most max_chars characters."""
        value = self.raw(name)
        if value is None:
            return None
        full = self._prefix + name
        if not isinstance(value, str):
            raise wrong_type(full, "a string", value)
        if len(value) > max_chars:
            raise InvalidRequest(f"{full} must have at most {max_chars} characters", field=full)
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        """Returns an object."""
        value = self.raw(name)
        if value is None or isinstance(value, dict):
            return value
        raise wrong_type(self._prefix + name, "an object", value)
