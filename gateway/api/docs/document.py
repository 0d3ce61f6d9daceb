"""The request models as parameters, and the OpenAPI document (/openapi.json)."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.api.docs.operations import HEADERS, KEY_HEADER, KEY_STATUS, OPERATIONS, Operation
from gateway.api.docs.schemas import SCHEMAS, ref
from gateway.api.http.json import Json
from gateway.api.openai.fields import RequestModel

_NULL: Json = {"type": "null"}


_STATUS = {
    400: "The request is not valid; param names the field.",
    401: "No valid API key.",
    403: "The API key does not permit this.",
    404: "The model or the object does not exist.",
    408: "The body did not arrive in time.",
    409: "The Idempotency-Key belongs to another request.",
    413: "The body is larger than the gateway reads.",
    429: "No free capacity, or a rate limit is reached; retry after Retry-After.",
    499: "The request was aborted.",
    500: "Internal error.",
    501: "The model or its pods do not support this.",
    503: "No pod can serve the request now; retry after Retry-After.",
    504: "The request's deadline has passed.",
    529: "No free capacity; retry after Retry-After.",
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a body. A member of an object has the name "object.member"."""

    name: str
    meaning: str
    schema: Json  #: JSON Schema of the accepted values, without null, which counts as absent.
    support: str  #: supported; limited: only listed values; refused: only null; ignored: any value.
    required: bool
    default: str  #: Meaning of an absent parameter in words, "" if the schema's `default` expresses it.

    @property
    def or_null(self) -> Json:
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


_KEYS: Json = {
    "key": {"type": "http", "scheme": "bearer"},
    "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def openapi_document(version: str, models: Sequence[str], root_path: str = "") -> Json:
    """Returns the document of a gateway that serves models of these names, behind `root_path` of a proxy."""
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, models)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version, "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}},
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "paths": paths,
        "components": {"schemas": SCHEMAS, "securitySchemes": _KEYS},
        "security": [*({name: []} for name in _KEYS), {}],
    }


def _operation(operation: Operation, models: Sequence[str]) -> Json:
    in_path = [(name, {"type": "string", "minLength": 1}) for name in re.findall(r"{(\w+)}", operation.path)]
    arguments = [
        {"name": name, "in": place, "required": place == "path", "schema": schema}
        for place, group in (("path", in_path), ("query", operation.query))
        for name, schema in group
    ]
    words = operation.path.replace("/v1/", "").strip("/").translate(str.maketrans("/{}", "___")).rstrip("_")
    if any(other.path == f"/v1{operation.path}" for other in OPERATIONS):
        words += "_without_version"
    operation_id = f"{operation.method.lower()}_{words}"
    out: Json = {"summary": operation.summary, "operationId": operation_id, "parameters": arguments}
    if operation.body is not None:
        out["parameters"] += [
            {"name": name, "in": "header", "description": meaning, "schema": schema}
            for name, meaning, schema in HEADERS
            if name != KEY_HEADER or KEY_STATUS in operation.errors
        ]
        shown = [p for p in parameters(operation.body) if "." not in p.name]
        properties = {p.name: p.or_null for p in shown}
        if models and "model" in properties:
            properties["model"] = {**properties["model"], "examples": list(models)}
        schema = {"type": "object", "properties": properties, "required": [p.name for p in shown if p.required]}
        out["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    content: Json = {"text/plain": {"schema": {"type": "string"}}}
    if operation.answer:
        content = {"application/json": {"schema": ref(operation.answer)}}
    if operation.event:
        content["text/event-stream"] = {"schema": {"type": "string"}, "x-event-schema": ref(operation.event)}
    error: Json = {"application/json": {"schema": ref(operation.error)}}
    errors = {str(status): {"description": _STATUS[status], "content": error} for status in operation.errors}
    return {**out, "responses": {"200": {"description": "Done.", "content": content}, **errors}}
