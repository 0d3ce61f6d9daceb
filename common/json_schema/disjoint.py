"""Proves that no value fits two JSON schemas, so that `oneOf` means the same as `anyOf`.

The proof is incomplete: False means that it did not succeed. It looks at types, constants, bounds and lengths, and in
objects at properties that one of the schemas requires. A reference stands for its target.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from common.json_schema.places import Json, resolve

#: Fuel of all proofs in one schema, for comparisons and for the length of the compared values. It lasts for 0.1 s at
#: most. A proof that needs more does not succeed.
FUEL = 3_000
_MAX_DEPTH = 24  #: Max nesting of properties.
_MAX_PARTS = 32  #: Max subschemas of one schema, with those in its allOf and behind its references.
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_NUMBERS = frozenset({"integer", "number"})
#: Keywords of maximum and minimum by type. Schemas are apart if the maximum of one is below the other's minimum.
_BOUNDS = {
    "string": (("maxLength", "minLength"),),
    "array": (("maxItems", "minItems"),),
    "object": (("maxProperties", "minProperties"),),
}


class DisjointProof:
    """Compares the parts of one schema. All comparisons share its fuel."""

    def __init__(self, root: Json, fuel: int = FUEL) -> None:
        self._root = root
        self._fuel = fuel
        #: By the id of a schema: the values of its enum or const by their JSON, and the types of these values.
        self._known: dict[int, tuple[dict[str, Any], frozenset[str]]] = {}

    def _spend(self, cost: int) -> bool:
        """Takes fuel. Returns whether there was enough."""
        self._fuel -= cost
        return self._fuel >= 0

    def all_apart(self, options: Sequence[Any]) -> bool:
        """Returns whether it is proven that each value fits at most one of the schemas."""
        if self._apart_by_constant(options):
            return True
        return all(self._apart(a, b, 0) for i, a in enumerate(options) for b in options[i + 1 :])

    def _apart_by_constant(self, options: Sequence[Any]) -> bool:
        """Returns whether a required property has different constants in all schemas. One pass covers all pairs."""
        parts = [self._parts(option) for option in options]
        sizes = sum(1 + len(part["required"]) for each in parts for part in each if _has_list(part, "required"))
        if not self._spend((len(parts) + sizes) // 16):
            return False
        if not all(parts) or any(self._types(each) != {"object"} for each in parts):
            return False
        common: set[str] = set.intersection(*({*_required(each)} for each in parts)) if parts else set()
        for key in sorted(common)[:16]:
            found = [self._constants(self._parts({"allOf": [*_property(each, key)]})) for each in parts]
            if all(values is not None for values in found):
                total = sum(len(values or ()) for values in found)
                if len(set[str]().union(*(values or {} for values in found))) == total:
                    return True
        return False

    def _apart(self, a: object, b: object, depth: int) -> bool:
        if not self._spend(1) or depth > _MAX_DEPTH:
            return False
        parts_a, parts_b = self._parts(a), self._parts(b)
        if False in parts_a or False in parts_b:
            return True
        types = self._types(parts_a) & self._types(parts_b)
        if not types:
            return True
        for mine, others in ((parts_a, parts_b), (parts_b, parts_a)):
            constants = self._constants(mine)
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
        needed = dict.fromkeys((*_required(parts_a), *_required(parts_b)))
        return self._spend(len(needed) // 16) and any(
            self._apart({"allOf": [*_property(parts_a, key)]}, {"allOf": [*_property(parts_b, key)]}, depth + 1)
            for key in needed
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
                if _has_list(part, "allOf"):
                    waiting += part["allOf"][:_MAX_PARTS]
                if isinstance(reference := part.get("$ref"), str) and self._spend(len(reference) >> 6):
                    waiting.append(resolve(self._root, reference))
        return found

    def _refused(self, parts: Sequence[Any], value: Any, depth: int) -> bool:
        """Returns whether it is proven that a value does not fit all parts."""
        if not self._spend(1) or depth > _MAX_DEPTH:
            return False
        kinds = _types_of(value)
        if False in parts or kinds.isdisjoint(self._types(parts)):
            return True
        constants = self._constants(parts)
        if constants is not None and (key := _key(value)) not in constants:
            return self._spend(len(key) >> 6)
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

    def _types(self, parts: Sequence[Any]) -> frozenset[str]:
        """Returns the types that a value of all parts may have; those that match "integer" match "number" too."""
        types = _TYPES
        for part in parts:
            given = part.get("type") if isinstance(part, dict) else None
            names = (
                [given] if isinstance(given, str) else given if isinstance(given, list) and len(given) < 99 else None
            )
            if names is not None:
                named = {name for name in names if isinstance(name, str)}
                types &= named | ({"integer"} if "number" in named else set())
            if isinstance(part, dict) and (known := self._values(part)) is not None:
                types &= known[1]
        return types

    def _constants(self, parts: Sequence[Any]) -> dict[str, Any] | None:
        """Returns the values of the shortest enum or const among the parts, by their JSON. None: there is none."""
        known = [self._values(part) for part in parts if isinstance(part, dict)]
        return min((values for values, _ in filter(None, known)), key=len, default=None)

    def _values(self, part: Json) -> tuple[dict[str, Any], frozenset[str]] | None:
        if "const" not in part and not _has_list(part, "enum"):
            return None
        if id(part) not in self._known:
            values = {_key(value): value for value in ([part["const"]] if "const" in part else part["enum"])}
            self._spend(sum(1 + (len(key) >> 6) for key in values) >> 4)
            self._known[id(part)] = values, frozenset[str]().union(*map(_types_of, values.values()))
        return self._known[id(part)]


def _has_list(part: object, key: str) -> bool:
    return isinstance(part, dict) and isinstance(part.get(key), list)


def _types_of(value: object) -> frozenset[str]:
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return _NUMBERS
    kinds = {float: "number", str: "string", list: "array", dict: "object"}
    return frozenset({kinds[type(value)]})


def _key(value: Any) -> str:
    """Returns a text that is the same for equal values; 1.0 equals 1."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return {key: _plain(inner) for key, inner in value.items()} if isinstance(value, dict) else value


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
