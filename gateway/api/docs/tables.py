"""Makes the tables of docs/api.md of the request models and operations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from common.pb import inference_pb2
from gateway.api.docs.document import Parameter, parameters
from gateway.api.docs.operations import HEADERS, OPERATIONS
from gateway.api.openai.bodies import ChatRequest, CompletionRequest, Generation
from gateway.api.openai.fields import RequestModel

BEGIN, END = "<!-- tables: python -m gateway.api.docs -->", "<!-- end of tables -->"

GRPC_FIELDS = tuple(field.name for field in inference_pb2.GenerateRequest.DESCRIPTOR.fields)
#: Fields of GenerateRequest with another name than the parameters that say the same.
_GRPC_NAMES = {
    "messages": ("chat",),
    "prompt": ("text", "tokens"),
    "max_completion_tokens": ("max_tokens",),
    "top_logprobs": ("logprobs",),
    "response_format": ("structured_output",),
    "structured_outputs": ("structured_output",),
}
_GRPC_ONLY = {"request_id": "what X-Request-Id says"}

COMMON = parameters(Generation)
_NAMES = {p.name for p in COMMON}
CHAT, COMPLETION = (
    tuple(p for p in parameters(model) if p.name not in _NAMES) for model in (ChatRequest, CompletionRequest)
)


def tables() -> str:
    """Returns all tables as Markdown."""
    endpoints = ((f"`{o.method} {o.path}`", o.summary, ", ".join(map(str, sorted(o.errors)))) for o in OPERATIONS)
    bodies: dict[type[RequestModel], list[str]] = {}
    for operation in OPERATIONS:
        if operation.body not in (None, ChatRequest, CompletionRequest):
            bodies.setdefault(operation.body, []).append(operation.path)
    parts = [
        "## Endpoints\n\n" + _table(("endpoint", "what it does", "errors"), endpoints),
        "## Headers\n\n" + _table(("header", "meaning"), ((f"`{name}`", meaning) for name, meaning, _ in HEADERS)),
        "## Parameters of chat and completions\n\n" + _parameters(COMMON, grpc=True),
        "## Parameters of /v1/chat/completions only\n\n" + _parameters(CHAT, grpc=True),
        "## Parameters of /v1/completions only\n\n" + _parameters(COMPLETION, grpc=True),
        *(
            f"## Parameters of {', '.join(paths)}\n\n" + _parameters(parameters(body), grpc=False)
            for body, paths in bodies.items()
        ),
        "## Fields of Generate (gRPC)\n\n" + _table(("field", "says the same as"), map(_grpc_row, GRPC_FIELDS)),
    ]
    return "\n".join(parts)


def grpc_fields(parameter: Parameter) -> tuple[str, ...]:
    """Returns the fields of GenerateRequest with the parameter's meaning."""
    same = (parameter.name,) if parameter.name in GRPC_FIELDS else ()
    return _GRPC_NAMES.get(parameter.name, same)


def with_tables(text: str) -> str:
    """Returns docs/api.md with new tables. Raises ValueError if their place is not marked."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the text has no {BEGIN} ... {END}")
    return f"{head}{BEGIN}\n\n{tables()}\n{END}{tail}"


def _parameters(group: Sequence[Parameter], *, grpc: bool) -> str:
    columns = ("parameter", "support", "values", "default", "meaning", *(("gRPC",) if grpc else ()))
    return _table(columns, (_row(p, grpc=grpc) for p in group))


def _row(p: Parameter, *, grpc: bool) -> tuple[str, ...]:
    default = p.default or ("required" if p.required else "")
    if not default and "default" in p.schema:
        default = orjson.dumps(p.schema["default"]).decode()
    values = "" if p.support in ("ignored", "refused") else values_text(p.schema)
    row = (f"`{p.name}`", p.support, values, default, p.meaning)
    return (*row, ", ".join(f"`{name}`" for name in grpc_fields(p))) if grpc else row


def values_text(schema: Mapping[str, Any]) -> str:
    """Returns a schema in words."""
    if "enum" in schema:
        return " or ".join(f"`{orjson.dumps(value).decode()}`" for value in schema["enum"])
    if "anyOf" in schema and "type" not in schema:
        return ", or ".join(dict.fromkeys(values_text(part) for part in schema["anyOf"]))
    if "const" in schema:
        return f"`{orjson.dumps(schema['const']).decode()}`"
    kind = schema.get("type", "anything")
    if kind in ("integer", "number"):
        low, open_low = schema.get("minimum"), schema.get("exclusiveMinimum")
        start = f"over {open_low}" if low is None else f"{low}"
        return f"{kind}, {start} to {schema['maximum']}" if "maximum" in schema else kind
    if kind == "string":
        return f"string of at most {schema['maxLength']} characters" if "maxLength" in schema else "string"
    if kind == "array":
        most = f" at most {schema['maxItems']}" if "maxItems" in schema else ""
        return f"array of{most} {_plural(schema.get('items', {}))}"
    if kind == "object" and "maxProperties" in schema:
        return (
            f"object of at most {schema['maxProperties']} members, each {values_text(schema['additionalProperties'])}"
        )
    return kind if isinstance(kind, str) else " or ".join(kind)


def _plural(items: Mapping[str, Any]) -> str:
    kind = items.get("type", "value")
    if kind == "array":
        return f"arrays of {_plural(items['items'])}"
    return {"string": "strings", "integer": "integers", "object": "objects", "number": "numbers"}.get(kind, "values")


def _grpc_row(field: str) -> tuple[str, str]:
    same = {p.name: None for p in (*COMMON, *CHAT, *COMPLETION) if field in grpc_fields(p)}
    return f"`{field}`", ", ".join(f"`{name}`" for name in same) or _GRPC_ONLY.get(field, "")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
