"""The tables of docs/api.md and /openapi.json, made of the request models, agree with what the parsers accept.

If a parameter that you added fails here, gateway/api/openai/fields.py says how to add one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from common.errors import InvalidRequest
from gateway.api.anthropic.requests import parse_count, parse_message
from gateway.api.docs.document import Parameter, openapi_document, parameters
from gateway.api.docs.operations import OPERATIONS
from gateway.api.docs.tables import CHAT, COMMON, COMPLETION, GRPC_FIELDS, grpc_fields, with_tables
from gateway.api.openai.adapters import LoadAdapterRequest, UnloadAdapterRequest
from gateway.api.openai.embeddings import EmbeddingsRequest
from gateway.api.openai.fields import validated
from gateway.api.openai.requests import parse_chat, parse_completion
from gateway.api.openai.responses.request import ResponseBody, parse_response
from gateway.api.openai.tokenize import DetokenizeRequest, TokenizeRequest
from gateway.api.scoring.rerank import RerankRequest
from gateway.api.scoring.score import ScoreRequest
from gateway.serving.request import ChatBody, CompletionBody
from tests.rigs.gateway.openai_document import property_names

ROOT = Path(__file__).parents[2]
MESSAGES = [{"role": "user", "content": "Hi"}]

BODIES = {operation.path: parameters(operation.body) for operation in OPERATIONS if operation.body is not None}
# The parser of each body, and the smallest body that it accepts.
PARSERS: dict[str, tuple[Callable[[object], Any], dict[str, Any]]] = {
    "/v1/chat/completions": (parse_chat, {"model": "m", "messages": MESSAGES}),
    "/v1/completions": (parse_completion, {"model": "m", "prompt": "Hi"}),
    "/v1/embeddings": (partial(validated, EmbeddingsRequest), {"model": "m", "input": "Hi"}),
    "/v1/responses": (parse_response, {"model": "m", "input": "Hi"}),
    "/v1/messages": (parse_message, {"model": "m", "max_tokens": 5, "messages": MESSAGES}),
    "/v1/messages/count_tokens": (parse_count, {"model": "m", "messages": MESSAGES}),
    **dict.fromkeys(
        ("/v1/rerank", "/rerank", "/v2/rerank"),
        (partial(validated, RerankRequest), {"model": "m", "query": "Hi", "documents": ["Hi"]}),
    ),
    **dict.fromkeys(
        ("/v1/score", "/score"),
        (partial(validated, ScoreRequest), {"model": "m", "text_1": "Hi", "text_2": "Hi"}),
    ),
    "/v1/load_lora_adapter": (partial(validated, LoadAdapterRequest), {"lora_name": "a", "lora_path": "a"}),
    "/v1/unload_lora_adapter": (partial(validated, UnloadAdapterRequest), {"lora_name": "a"}),
    "/tokenize": (partial(validated, TokenizeRequest), {"prompt": "Hi"}),
    "/detokenize": (partial(validated, DetokenizeRequest), {"tokens": [1]}),
}
# Fields that a parameter needs beside itself, and fields that must be absent beside it.
NEEDS: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "length_penalty": {"use_beam_search": True},
    "early_stopping": {"use_beam_search": True},
    "tool_choice": {"tools": [{"type": "function", "function": {"name": "f"}}]},
    "function_call": {"functions": [{"name": "f"}]},
    "/v1/completions:max_tokens": {"echo": True},
    "/v1/messages:tool_choice": {"tools": [{"name": "f", "input_schema": {}}]},
    "/v1/messages/count_tokens:tool_choice": {"tools": [{"name": "f", "input_schema": {}}]},
    "/v1/responses:tool_choice": {"tools": [{"type": "function", "name": "f"}]},
}
ONE_OF = {("/tokenize", "prompt"), ("/tokenize", "messages")}  # a body needs one of the two
WITHOUT = {("/tokenize", "messages"): "prompt"}
# Parameters of the same path in OpenAI's document.
REQUESTS = {
    "/v1/chat/completions": "CreateChatCompletionRequest",
    "/v1/completions": "CreateCompletionRequest",
    "/v1/embeddings": "CreateEmbeddingRequest",
    "/v1/responses": "CreateResponse",
}
ANYTHING: list[Any] = [
    True,
    False,
    0,
    1,
    -1,
    3,
    0.5,
    10**20,
    "",
    "x",
    "none",
    [],
    [1],
    [True],
    ["x"],
    [1, "x"],
    [[1]],
    [{}],
    {},
    {"x": 1},
    {"type": "text"},
    {"type": "nothing"},
    MESSAGES,
    [*MESSAGES, {"role": "robot", "content": "x"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    [{"role": "user", "content": [{"type": "image_url"}]}],
    'start: "x"',
    {"type": "text"},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    {"type": "json_schema"},
    {"regex": "x"},
    {"type": "x", "name": "f"},
    [{"name": "f", "input_schema": {}}],
    {"type": "auto"},
    {"type": "enabled"},
    {"type": "json_schema", "schema": {}},
    [{"type": "function", "function": {"name": "f"}}],
    [{"name": "f", "parameters": {}}],
    {"name": "f"},
    "required",
    {"type": "function", "function": {"name": "f"}},
]

CASES = [pytest.param(path, p, id=f"{path}:{p.name}") for path, group in BODIES.items() for p in group]


def needs(path: str, parameter: Parameter) -> dict[str, Any]:
    name = parameter.name.partition(".")[0]
    return NEEDS.get(f"{path}:{name}", NEEDS.get(name, {}))


def body_with(path: str, parameter: Parameter, value: Any) -> dict[str, Any]:
    """Returns the smallest body with one parameter."""
    body = {**PARSERS[path][1], **needs(path, parameter)}
    body.pop(WITHOUT.get((path, parameter.name), ""), None)
    parent, _, member = parameter.name.partition(".")
    return {**body, parent: {member: value} if member else value}


def refusal(parse: Callable[[object], Any], body: object) -> InvalidRequest | None:
    """Returns the error that a body causes, None without one."""
    try:
        parse(body)
    except InvalidRequest as e:
        return e
    return None


def around(schema: Any) -> Iterator[Any]:
    """Yields values at the bounds of a schema and beyond them."""
    yield from schema.get("enum", [])
    for part in schema.get("anyOf", []):
        yield from around(part)
    for bound in ("minimum", "maximum", "exclusiveMinimum"):
        if bound in schema:
            yield from (schema[bound], schema[bound] - 1, schema[bound] + 1)
    if "maxLength" in schema:
        yield from ("a" * schema["maxLength"], "a" * (schema["maxLength"] + 1))
    if (
        schema.get("type") == "array"
        and 0 < schema.get("maxItems", 1 << 30) <= 1 << 11
        and "properties" not in schema["items"]
    ):
        item = next(iter(valid(schema["items"])))
        yield from ([item] * schema["maxItems"], [item] * (schema["maxItems"] + 1))
    if "maxProperties" in schema:
        value = next(iter(valid(schema["additionalProperties"])))
        yield from ({str(i): value for i in range(schema["maxProperties"] + more)} for more in (0, 1))


def valid(schema: Any) -> Iterator[Any]:
    """Yields some values that fit the schema."""
    candidates = [*around(schema), *ANYTHING]
    return (value for value in candidates if Draft202012Validator(schema).is_valid(value))


@pytest.mark.parametrize(("path", "parameter"), CASES)
def test_the_schema_of_a_parameter_accepts_what_the_parser_accepts(path: str, parameter: Parameter) -> None:
    parse = PARSERS[path][0]
    checker = Draft202012Validator(parameter.schema)
    taken = refused = 0
    for value in [*ANYTHING, *around(parameter.schema)]:
        fits = parameter.support == "ignored" or checker.is_valid(value)
        error = refusal(parse, body_with(path, parameter, value))
        assert (error is None) == fits, f"{value!r:.100}: {error}"
        if error is None:
            taken += 1
            continue
        refused += 1
        assert error.field is not None
        if isinstance(value, dict | list):  # the error may name a member of it
            assert re.match(rf"{re.escape(parameter.name)}($|[.\[])", error.field), error.field
        else:
            assert error.field == parameter.name
    assert taken or parameter.support == "refused"
    assert refused or parameter.support == "ignored"
    if not parameter.required and (path, parameter.name) not in ONE_OF:
        parse(body_with(path, parameter, None))


def without_given(body: Any) -> Any:
    """Returns a parsed body that does not know which parameters the client set; the model's files may have others."""
    if isinstance(body, ChatBody | CompletionBody):
        return replace(body, spec=replace(body.spec, given=None))
    return body


@pytest.mark.parametrize(("path", "parameter"), CASES)
def test_an_absent_parameter_equals_its_default(path: str, parameter: Parameter) -> None:
    if "default" not in parameter.schema:
        return
    parse, smallest = PARSERS[path]
    context = needs(path, parameter)
    absent, given = parse({**smallest, **context}), parse(body_with(path, parameter, parameter.schema["default"]))
    if isinstance(absent, ResponseBody):  # ids of its items are new each time
        chats = [without_given(response.chat()) for response in (absent, given)]
        assert (chats[0], absent.echoed_fields, absent.store) == (chats[1], given.echoed_fields, given.store)
    else:
        assert without_given(absent) == without_given(given)


@pytest.mark.parametrize(("path", "name"), REQUESTS.items())
def test_the_tables_have_every_parameter_of_openai(path: str, name: str) -> None:
    assert property_names(name) - {p.name for p in BODIES[path]} == set()


def test_every_field_of_generate_has_a_parameter() -> None:
    known = {field for p in (*COMMON, *CHAT, *COMPLETION) for field in grpc_fields(p)} | {"request_id"}
    assert set(GRPC_FIELDS) == known


def test_docs_api_md_has_the_current_tables() -> None:
    page = (ROOT / "docs/api.md").read_text("utf-8")
    assert page == with_tables(page), "run python -m gateway.api.docs"


def test_the_document_is_valid_openapi_without_dangling_references() -> None:
    document = openapi_document("0", ["m"])
    schemas = document["components"]["schemas"]

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if "$ref" in node:
                assert node["$ref"].removeprefix("#/components/schemas/") in schemas
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(document)
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    for path, (_, smallest) in PARSERS.items():
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        Draft202012Validator.check_schema(body)
        Draft202012Validator(body).validate(smallest)
        for p in BODIES[path]:
            if p.required:
                with pytest.raises(ValidationError):
                    Draft202012Validator(body).validate({k: v for k, v in smallest.items() if k != p.name})
