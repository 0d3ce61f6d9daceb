"""The parameters of a request model, as the OpenAPI document and the tables of docs/api.md show them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gateway.api.http.json_value import Json
from gateway.api.openai.fields import RequestModel

_NULL: Json = {"type": "null"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a body. A member of an object has the name "object.member"."""

    name: str
    meaning: str
    #: JSON Schema of the accepted values. null counts as absent and is not part of the schema.
    schema: Json
    #: supported; limited or refused: known values are rejected by name; ignored: every value is accepted.
    support: str
    required: bool
    #: Meaning of an absent parameter in words, "" if the schema's `default` expresses it.
    default: str

    @property
    def nullable(self) -> Json:
        """The schema with null, for the document."""
        if self.support == "ignored":
            return {"description": f"Ignored. {self.meaning}"}
        if self.support == "refused":
            return {**_NULL, "description": f"Not supported. {self.meaning}"}
        if self.required:
            return {**self.schema, "description": self.meaning}
        return {"anyOf": [self.schema, _NULL], "description": self.meaning}


@functools.cache
def parameters(model: type[RequestModel]) -> tuple[Parameter, ...]:
    """Returns the parameters of a model, in the order of its fields."""
    whole = model.model_json_schema()
    required = set(whole.get("required", ()))
    return tuple(_parameters(_inlined(whole["properties"], whole.get("$defs", {})), required))


def _parameters(properties: Json, required: set[str], prefix: str = "") -> Iterator[Parameter]:
    for name, shown in properties.items():
        meaning, support, words = (shown.pop(key, "") for key in ("description", "x-support", "x-default"))
        if support or shown.get("default") in (None, "", [], {}):
            shown.pop("default", None)
        variants = [variant for variant in shown.pop("anyOf", []) if variant != _NULL]
        schema = {**variants[0], **shown} if len(variants) == 1 else {**shown, "anyOf": variants} if variants else shown
        yield Parameter(f"{prefix}{name}", meaning, schema, support or "supported", name in required, words)
        members = {k: v for k, v in schema.get("properties", {}).items() if "description" in v}
        yield from _parameters(members, set(), f"{name}.")


def _inlined(node: Any, definitions: Json) -> Any:
    """Returns a schema with definitions in the place of references to them, and without titles."""
    if isinstance(node, list):
        return [_inlined(part, definitions) for part in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        target = definitions[node["$ref"].removeprefix("#/$defs/")]
        node = {**{k: v for k, v in target.items() if k != "description"}, **node}
        del node["$ref"]
    return {
        ("anyOf" if key == "oneOf" else key): _inlined(value, definitions)
        for key, value in node.items()
        if not (key == "title" and isinstance(value, str))
    }
