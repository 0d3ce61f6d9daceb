"""Makes the OpenAPI document (/openapi.json) of the parameters, operations and schemas."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.api.docs.operations import HEADERS, OPERATIONS, Operation
from gateway.api.docs.parameter import Parameter
from gateway.api.docs.parameters import BODIES
from gateway.api.docs.schemas import SCHEMAS, ref
from gateway.api.http.json_fields import Json

_STATUS = {
    400: "The request is not valid; param names the field.",
    401: "No valid API key.",
    403: "The API key does not permit this.",
    404: "The model or the object does not exist.",
    408: "The body did not arrive in time.",
    413: "The body is larger than the gateway reads.",
    429: "No free capacity, or a rate limit is reached; retry after Retry-After.",
    499: "The request was aborted.",
    500: "Internal error.",
    501: "The model or its pods do not support this.",
    503: "No pod can serve the request now; retry after Retry-After.",
    504: "The request's deadline has passed.",
}


def body_schema(parameters: Sequence[Parameter]) -> Json:
    """Returns the schema of a body. A parameter named "a.b" is the member b of parameter a, which comes before it."""
    members: dict[str, Json] = {p.name: p.nullable for p in parameters if "." not in p.name}
    for p in parameters:
        parent, _, name = p.name.partition(".")
        if name:
            variants = members[parent]["anyOf"]
            variants[0].setdefault("properties", {})[name] = p.nullable
    return {
        "type": "object",
        "properties": members,
        "required": [p.name for p in parameters if p.required],
    }


def openapi_document(version: str, models: Sequence[str]) -> Json:
    """Returns the document of a gateway that serves models of these names."""
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, models)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version, "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": SCHEMAS, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def _operation(operation: Operation, models: Sequence[str]) -> Json:
    parameters = [
        {"name": name, "in": place, "required": place == "path", "schema": schema}
        for place, group in (("path", operation.path_parameters), ("query", operation.query))
        for name, schema in group
    ]
    out: Json = {"summary": operation.summary, "operationId": _operation_id(operation), "parameters": parameters}
    if operation.path in BODIES:
        out["parameters"] += [
            {"name": name, "in": "header", "description": meaning, "schema": schema}
            for name, meaning, schema in HEADERS
        ]
        schema = body_schema(BODIES[operation.path])
        if models and "model" in schema["properties"]:
            schema["properties"]["model"] = {**schema["properties"]["model"], "examples": list(models)}
        out["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    content: Json = {"text/plain": {"schema": {"type": "string"}}}
    if operation.answer:
        content = {"application/json": {"schema": ref(operation.answer)}}
    if operation.event:
        content["text/event-stream"] = {
            "schema": {"type": "string"},
            "x-event-schema": ref(operation.event),
        }
    out["responses"] = {"200": {"description": "Done.", "content": content}}
    for status in operation.errors:
        out["responses"][str(status)] = {
            "description": _STATUS[status],
            "content": {"application/json": {"schema": ref("Error")}},
        }
    return out


def _operation_id(operation: Operation) -> str:
    words = operation.path.replace("/v1/", "").strip("/").translate(str.maketrans("/{}", "___"))
    return f"{operation.method.lower()}_{words.rstrip('_')}"
