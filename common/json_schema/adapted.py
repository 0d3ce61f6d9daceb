"""Rewrites a client's JSON schema, so that llguidance enforces what it means and refuses less of it.

- A `format` that asserts nothing is left out. The integer formats of OpenAPI become bounds.
- `multipleOf` gets bounds if it has none. Without bounds llguidance allows numbers that never end, and the limits of
  engine/sampling/digit_limits.py cannot end them.
- `oneOf` becomes `anyOf` where each value fits at most one of the schemas (disjoint.py).

The time is linear in the schema, except for the proofs of disjointness, which have their own limit. References keep
their targets.
"""

from __future__ import annotations

import json
from typing import Any

from common.json_schema.disjoint import DisjointProof
from common.json_schema.places import Json, all_schemas

#: Formats of OpenAPI's registry, pydantic and other schema writers that describe a string and assert nothing.
_ANNOTATIONS = frozenset(
    (
        *("password", "binary", "byte", "base64", "base64url", "char", "commonmark", "html", "markdown", "http-date"),
        *("media-range", "json", "json-string", "float", "float32", "float64", "double", "double-int", "decimal"),
        *("decimal128", "number", "int", "integer", "int64", "uint64", "unixtime", "timestamp", "path", "file-path"),
        *("directory-path", "textarea", "text", "string", "color"),
    )
)
MAX_MULTIPLE = (1 << 63) - (1 << 10)  #: The largest double below 2 ** 63, where llguidance's integers end.
#: Integer formats with bounds that a double holds.
_INTEGERS = {
    **{f"int{bits}": (-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (8, 16, 32)},
    **{f"uint{bits}": (0, (1 << bits) - 1) for bits in (8, 16, 32)},
}
#: Formats that mean another format of a certain version; the version is not enforced.
_SAME = {f"uuid{version}": "uuid" for version in range(1, 9)}
_NUMBERS = ("integer", "number")


def adapted(schema: Json, text: str | None = None) -> Json:
    """Returns the schema as llguidance gets it: the same object if nothing is to change, else a copy.

    `text` is the schema as json.dumps writes it, if the caller has it.
    """
    text = json.dumps(schema) if text is None else text
    if not any(f'"{keyword}"' in text for keyword in ("format", "oneOf", "multipleOf")):
        return schema
    root: Json = json.loads(text)
    with_one_of: list[Json] = []
    # A renamed oneOf breaks pointers into it. With `$id`, pointers begin at another schema and are not followed here.
    keep = False
    for path, part in all_schemas(root):
        if isinstance(part.get("format"), str):
            _without_annotation(part)
        if "multipleOf" in part:
            part["minimum"] = _stricter(max, part.get("minimum"), -MAX_MULTIPLE)
            part["maximum"] = _stricter(min, part.get("maximum"), MAX_MULTIPLE)
        if isinstance(part.get("oneOf"), list):
            with_one_of.append(part)
        keep |= bool(path) and isinstance(part.get("$id"), str)
        keep |= isinstance(reference := part.get("$ref"), str) and "/oneOf" in reference
    proof = DisjointProof(root)
    for part in reversed(with_one_of) if not keep else ():  # inner ones first, since a proof looks into them
        if proof.all_apart(part["oneOf"]):
            _rename_one_of(part)
    return root


def _without_annotation(part: Json) -> None:
    name = part["format"]
    if name in _SAME:
        part["format"] = _SAME[name]
    elif name in _INTEGERS:
        del part["format"]
        if part.get("type") in _NUMBERS:
            least, most = _INTEGERS[name]
            part["minimum"] = _stricter(max, part.get("minimum"), least)
            part["maximum"] = _stricter(min, part.get("maximum"), most)
    elif name in _ANNOTATIONS or part.get("type") in (*_NUMBERS, "boolean", "null", "array", "object"):
        del part["format"]


def _stricter(choose: Any, given: Any, bound: int) -> Any:
    return bound if given is None else choose(given, bound) if type(given) in (int, float) else given


def _rename_one_of(part: Json) -> None:
    """Renames the oneOf of a schema to anyOf. It keeps its place, because llguidance orders properties by keywords."""
    members = dict(part)
    part.clear()
    for key, value in members.items():
        if key != "oneOf":
            part[key] = value
        elif "anyOf" not in members:
            part["anyOf"] = value
        elif "allOf" not in members:
            part["allOf"] = [{"anyOf": value}]
        else:
            part["oneOf"] = value
