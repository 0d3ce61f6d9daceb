"""The parts of a JSON schema that are schemas themselves, and the places that references lead to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote

Json = dict[str, Any]

_ONE = ("items", "additionalItems", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_KEYWORDS = frozenset((*_ONE, *_SEVERAL, *_NAMED))
#: Encoded characters that separate names or not, depending on when they are decoded.
_ENCODED_SYNTAX = re.compile("%2f|%7e", re.IGNORECASE)

Path = tuple[str | int, ...]


def subschemas(schema: Json) -> Iterator[tuple[Path, Json]]:
    """Yields the schemas directly inside a schema, with their paths from it. true and false are left out."""
    if _KEYWORDS.isdisjoint(schema):
        return
    for key, value in schema.items():
        if isinstance(value, dict):
            if key in _ONE:
                yield (key,), value
            elif key in _NAMED:
                for name, inner in value.items():
                    if isinstance(inner, dict):
                        yield (key, name), inner
        elif isinstance(value, list) and key in _SEVERAL:
            for index, inner in enumerate(value):
                if isinstance(inner, dict):
                    yield (key, index), inner


def all_schemas(root: Json) -> Iterator[tuple[Path, Json]]:
    """Yields each schema in a schema once, with its path: outer before inner ones, then the targets of references."""
    seen = {id(root)}
    waiting: list[tuple[Path, Json]] = [((), root)]
    for path, schema in waiting:
        yield path, schema
        for inner_path, inner in subschemas(schema):
            if id(inner) not in seen:
                seen.add(id(inner))
                waiting.append((path + inner_path, inner))
        if isinstance(reference := schema.get("$ref"), str):
            target = resolve(root, reference)
            if isinstance(target, dict) and id(target) not in seen:
                seen.add(id(target))
                waiting.append((tuple(pointer_parts(reference)), target))


def resolve(root: object, reference: str, missing: object = None) -> object:
    """Returns the target of a reference of the form `#/...`; `missing` for another form or without a target."""
    if reference[:2] not in ("", "#", "#/") or _ENCODED_SYNTAX.search(reference):
        return missing
    node = root
    for key in pointer_parts(reference):
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isascii() and key.isdecimal() and len(key) < 9 and int(key) < len(node):
            node = node[int(key)]
        else:
            return missing
    return node


def endless_reference(root: Json) -> Path | None:
    """Returns the path of a schema without finite values: each value contains another one. None if there is none.

    A reference leads back to the schema, by itself, by allOf, by a required property or by items that must exist.
    """
    done: set[int] = set()
    for path, start in all_schemas(root):
        if "$ref" not in start or id(start) in done:  # each circle has a reference
            continue
        chain: dict[int, Iterator[Json]] = {}  # the schemas from `start` on, with those that each needs
        waiting = [start]
        while waiting:
            schema = waiting[-1]
            if id(schema) not in chain:
                chain[id(schema)] = iter(_needed(root, schema))
            following = next((inner for inner in chain[id(schema)] if id(inner) not in done), None)
            if following is None:
                done.add(id(waiting.pop()))
                chain.pop(id(schema))
            elif id(following) in chain:
                return path
            else:
                waiting.append(following)
    return None


def _needed(root: Json, schema: Json) -> list[Json]:
    """Returns the schemas that each value of `schema`, or a part of each value, must match."""
    needed: list[Any] = []
    if isinstance(schema.get("$ref"), str):
        needed.append(resolve(root, schema["$ref"]))
    if isinstance(members := schema.get("allOf"), list):
        needed += members
    if schema.get("type") == "object":
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, dict) and isinstance(required, list):
            needed += [properties[name] for name in required if isinstance(name, str) and name in properties]
    elif schema.get("type") == "array" and "prefixItems" not in schema:
        least = schema.get("minItems")
        needed += [schema.get("items")] if isinstance(least, int) and least > 0 else []
    return [inner for inner in needed if isinstance(inner, dict)]


def pointer_parts(reference: str) -> list[str]:
    """Returns the keys that a reference of the form `#/...` names."""
    return [part.replace("~1", "/").replace("~0", "~") for part in unquote(reference[1:]).split("/")[1:]]


def pointer(path: Sequence[str | int]) -> str:
    """Returns a path as a JSON pointer, for messages."""
    return "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in path)
