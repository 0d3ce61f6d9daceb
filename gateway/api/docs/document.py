"""Makes the OpenAPI document (/openapi.json) of the request models, operations and schemas of answers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gateway.api.docs.operations import HEADERS, OPERATIONS, Operation
from gateway.api.docs.parameters import parameters
from gateway.api.docs.schemas import SCHEMAS, ref
from gateway.api.http.json_value import Json
from gateway.api.openai.fields import RequestModel

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


def body_schema(model: type[RequestModel]) -> Json:
    """Returns the schema of a body."""
    shown = [p for p in parameters(model) if "." not in p.name]
    properties = {p.name: p.nullable for p in shown}
    return {"type": "object", "properties": properties, "required": [p.name for p in shown if p.required]}


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
    arguments = [
        {"name": name, "in": place, "required": place == "path", "schema": schema}
        for place, group in (("path", _path_parameters(operation)), ("query", operation.query))
        for name, schema in group
    ]
    out: Json = {"summary": operation.summary, "operationId": _operation_id(operation), "parameters": arguments}
    if operation.body is not None:
        out["parameters"] += [
            {"name": name, "in": "header", "description": meaning, "schema": schema}
            for name, meaning, schema in HEADERS
        ]
        schema = body_schema(operation.body)
        if models and "model" in schema["properties"]:
            schema["properties"]["model"] = {**schema["properties"]["model"], "examples": list(models)}
        out["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    content: Json = {"text/plain": {"schema": {"type": "string"}}}
    if operation.answer:
        content = {"application/json": {"schema": ref(operation.answer)}}
    if operation.event:
        content["text/event-stream"] = {"schema": {"type": "string"}, "x-event-schema": ref(operation.event)}
    out["responses"] = {"200": {"description": "Done.", "content": content}}
    for status in operation.errors:
        out["responses"][str(status)] = {
            "description": _STATUS[status],
            "content": {"application/json": {"schema": ref("Error")}},
        }
    return out


def _path_parameters(operation: Operation) -> list[tuple[str, Json]]:
    return [(name, {"type": "string", "minLength": 1}) for name in re.findall(r"{(\w+)}", operation.path)]


def _operation_id(operation: Operation) -> str:
    words = operation.path.replace("/v1/", "").strip("/").translate(str.maketrans("/{}", "___"))
    return f"{operation.method.lower()}_{words.rstrip('_')}"
