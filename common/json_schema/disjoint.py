"""Proves that no value fits two JSON schemas, so that `oneOf` means the same as `anyOf`.

The proof is incomplete: False means that it did not succeed. It looks at types, constants, bounds and lengths, and in
objects at properties that one of the schemas requires. A reference stands for the place that it leads to.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from common.json_schema.places import Json, resolve

FUEL = 20_000  #: Comparisons of two schemas in one proof; a proof that needs more does not succeed.
_MAX_DEPTH = 24  #: Of properties in each other.
_MAX_PARTS = 32  #: Of one schema: those that its allOf and its references add up to.
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_NUMBERS = frozenset({"integer", "number"})
#: Pairs of keywords, of which one schema's maximum lies below the other's minimum, by the type that they bind.
_BOUNDS = {
    "string": (("maxLength", "minLength"),),
    "array": (("maxItems", "minItems"),),
    "object": (("maxProperties", "minProperties"),),
}


class DisjointProof:
    """Compares the parts of one schema. Its fuel is that of all its comparisons together."""

    def __init__(self, root: Json, fuel: int = FUEL) -> None:
        self._root = root
        self._fuel = fuel

    def all_apart(self, options: Sequence[Any]) -> bool:
        """Returns whether it is proven that each value fits at most one of the schemas."""
        if self._told_by_constant(options):
            return True
        return all(self._apart(a, b, 0) for i, a in enumerate(options) for b in options[i + 1 :])

    def _told_by_constant(self, options: Sequence[Any]) -> bool:
        """Returns whether a required property has other constants in each schema: all pairs at once, for speed."""
        parts = [self._parts(option) for option in options]
        if not all(parts) or any(_types(each) != {"object"} for each in parts):
            return False
        common = set.intersection(*({*_required(each)} for each in parts)) if parts else set()
        for key in sorted(common)[:16]:
            found = [_constants(self._parts({"allOf": [*_property(each, key)]})) for each in parts]
            if all(values is not None for values in found):
                total = sum(len(values or ()) for values in found)
                if len(set().union(*(values or {} for values in found))) == total:
                    return True
        return False

    def _apart(self, a: object, b: object, depth: int) -> bool:
        self._fuel -= 1
        if self._fuel < 0 or depth > _MAX_DEPTH:
            return False
        parts_a, parts_b = self._parts(a), self._parts(b)
        if False in parts_a or False in parts_b:
            return True
        types = _types(parts_a) & _types(parts_b)
        if not types:
            return True
        for mine, others in ((parts_a, parts_b), (parts_b, parts_a)):
            constants = _constants(mine)
            if constants is not None and all(self._refused(others, value, depth) for value in constants.values()):
                return True
        if self._apart_by_options(parts_a, b, depth) or self._apart_by_options(parts_b, a, depth):
            return True
        if types <= _NUMBERS:
            return _below(parts_a, parts_b) or _below(parts_b, parts_a)
        [kind, *more] = types
        if more or kind not in _BOUNDS:
            return False
        for most, least in _BOUNDS[kind]:
            for mine, others in ((parts_a, parts_b), (parts_b, parts_a)):
                if min(_numbers(mine, most), default=float("inf")) < max(_numbers(others, least), default=0):
                    return True
        if kind != "object":
            return False
        return any(
            self._apart({"allOf": [*_property(parts_a, key)]}, {"allOf": [*_property(parts_b, key)]}, depth + 1)
            for key in dict.fromkeys((*_required(parts_a), *_required(parts_b)))
        )

    def _apart_by_options(self, parts: Sequence[Any], other: object, depth: int) -> bool:
        """Returns whether all alternatives of an anyOf or oneOf among the parts are apart from the other schema."""
        for part in parts:
            for key in ("anyOf", "oneOf"):
                options = part.get(key) if isinstance(part, dict) else None
                if isinstance(options, list) and all(self._apart(option, other, depth + 1) for option in options):
                    return True
        return False

    def _parts(self, schema: object) -> list[Any]:
        """Returns schemas that all hold for each value of a schema: itself, its allOf, the targets of references."""
        found: list[Any] = []
        waiting = [schema]
        while waiting and len(found) < _MAX_PARTS:
            part = waiting.pop()
            if isinstance(part, bool):
                found.append(part)
            elif isinstance(part, dict) and not any(part is other for other in found):
                found.append(part)
                if isinstance(part.get("allOf"), list):
                    waiting += part["allOf"]
                if isinstance(part.get("$ref"), str):
                    waiting.append(resolve(self._root, part["$ref"]))
        return found

    def _refused(self, parts: Sequence[Any], value: Any, depth: int) -> bool:
        """Returns whether it is proven that a value does not fit all parts."""
        self._fuel -= 1
        if self._fuel < 0 or depth > _MAX_DEPTH:
            return False
        kinds = _types_of(value)
        if False in parts or kinds.isdisjoint(_types(parts)):
            return True
        constants = _constants(parts)
        if constants is not None and _key(value) not in constants:
            return True
        if kinds & _NUMBERS:
            point = [{"minimum": value, "maximum": value}]
            return _below(parts, point) or _below(point, parts)
        if "string" in kinds or "array" in kinds:
            most, least = _BOUNDS["string" if "string" in kinds else "array"][0]
            return (
                not max(_numbers(parts, least), default=0)
                <= len(value)
                <= min(_numbers(parts, most), default=float("inf"))
            )
        if "object" in kinds:
            return any(key not in value for key in _required(parts)) or any(
                self._refused(self._parts({"allOf": [*_property(parts, key)]}), inner, depth + 1)
                for key, inner in value.items()
            )
        return False


def _types(parts: Sequence[Any]) -> frozenset[str]:
    """Returns the types that a value of all parts may have; those that match "integer" match "number" too."""
    types = _TYPES
    for part in parts:
        given = part.get("type") if isinstance(part, dict) else None
        names = [given] if isinstance(given, str) else given if isinstance(given, list) else None
        if names is not None:
            named = {name for name in names if isinstance(name, str)}
            types &= named | ({"integer"} if "number" in named else set())
    constants = _constants(parts)
    if constants is not None:
        types &= frozenset().union(*(_types_of(value) for value in constants.values()))
    return types


def _types_of(value: object) -> frozenset[str]:
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return _NUMBERS
    kinds = {float: "number", str: "string", list: "array", dict: "object"}
    return frozenset({kinds[type(value)]})


def _constants(parts: Sequence[Any]) -> dict[str, Any] | None:
    """Returns the values of the shortest enum or const among the parts, by their JSON. None: there is none."""
    found: dict[str, Any] | None = None
    for part in parts:
        if isinstance(part, dict) and ("const" in part or isinstance(part.get("enum"), list)):
            values = {_key(value): value for value in ([part["const"]] if "const" in part else part["enum"])}
            if found is None or len(values) < len(found):
                found = values
    return found


def _key(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _required(parts: Sequence[Any]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, dict) and isinstance(part.get("required"), list):
            yield from (name for name in part["required"] if isinstance(name, str))


def _property(parts: Sequence[Any], name: str) -> Iterator[Any]:
    """Yields schemas that hold for the property of that name."""
    for part in parts:
        if isinstance(part, dict):
            properties = part.get("properties")
            if isinstance(properties, dict) and name in properties:
                yield properties[name]
            elif "additionalProperties" in part and not part.get("patternProperties"):
                yield part["additionalProperties"]


def _numbers(parts: Sequence[Any], key: str) -> list[float]:
    values = (part.get(key) for part in parts if isinstance(part, dict))
    return [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]


def _below(lower: Sequence[Any], upper: Sequence[Any]) -> bool:
    """Returns whether all numbers of one schema lie below those of the other."""
    least = max((*_numbers(upper, "minimum"), *_numbers(upper, "exclusiveMinimum")), default=None)
    most = min((*_numbers(lower, "maximum"), *_numbers(lower, "exclusiveMaximum")), default=None)
    if least is None or most is None:
        return False
    open_end = least in _numbers(upper, "exclusiveMinimum") or most in _numbers(lower, "exclusiveMaximum")
    return most < least or (most == least and open_end)
