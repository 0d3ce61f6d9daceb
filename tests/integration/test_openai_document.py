"""Answers, chunks, events and errors of many kinds of requests fit OpenAI's published OpenAPI document."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio

from common.errors import InternalError
from common.types import ValidRequest
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.gateway.openai_document import check
from tests.rigs.pods.fake_pods import FakeCluster, fake_cluster
from tests.rigs.pods.scripted import counting

pytestmark = pytest.mark.asyncio(loop_scope="module")

CALL = 'Well.\n<tool_call>\n{"name": "look", "arguments": {"city": "Tromsø"}}\n</tool_call>'
THOUGHT = "<think>\nHm, Tromsø.\n</think>\n\n"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": CITY, "strict": True}}]
FLAT_TOOLS = [{"type": "function", "name": "look", "parameters": CITY, "strict": True}]
SCHEMA = {"name": "city", "schema": CITY, "strict": True}
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Where?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "Here."},
]
LOGPROBS = {"logprobs": True, "top_logprobs": 3}

CHATS: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("", {"max_completion_tokens": 1}),
    ("", {**LOGPROBS, "temperature": 0, "stop": ["x"], "user": "u", "metadata": {"a": "b"}, "store": True}),
    ("", {"messages": HISTORY, "seed": 1, "logit_bias": {"5": -1}, "service_tier": "auto"}),
    (CALL, {"tools": TOOLS}),
    (CALL, {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, **LOGPROBS}),
    (THOUGHT + CALL, {"tools": TOOLS, "reasoning_effort": "low"}),
    (THOUGHT + "Here.", {"messages": HISTORY}),
    ('{"city": "Oslo"}', {"response_format": {"type": "json_schema", "json_schema": SCHEMA}}),
    ('{"a": 1}', {"response_format": {"type": "json_object"}}),
]
COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"prompt": ["a", "b"], "logprobs": 2, "max_tokens": 3},
    {"prompt": [[1, 2], [3]], "stop": "B"},
    {"prompt": [1, 2, 3], "logprobs": 0, "user": "u"},
]
ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "Where?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"city": "Oslo"}'},
    {"type": "function_call_output", "call_id": "call_1", "output": "Here."},
]
RESPONSES: list[tuple[str, dict[str, Any]]] = [
    ("", {"max_output_tokens": 5}),
    ("", {"instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.5, "user": "u"}),
    ("", {"input": ITEMS, "include": ["message.output_text.logprobs"], "top_logprobs": 2, "store": False}),
    (CALL, {"tools": FLAT_TOOLS, "tool_choice": {"type": "function", "name": "look"}}),
    (
        THOUGHT + CALL + CALL.removeprefix("Well."),
        {"tools": FLAT_TOOLS, "tool_choice": "auto", "reasoning": {"effort": "low"}},
    ),
    (THOUGHT + "Here.", {"input": ITEMS}),
    ('{"city": "Oslo"}', {"text": {"format": {"type": "json_schema", **SCHEMA}}}),
    ('{"a": 1}', {"text": {"format": {"type": "json_object"}}}),
]
ERRORS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"temperature": 9}),
    ("/v1/chat/completions", {"model": "other"}),
    ("/v1/completions", {"prompt": 5}),
    ("/v1/completions", {"suffix": "x"}),
    ("/v1/responses", {"background": True}),
    ("/v1/responses", {"previous_response_id": "resp_1"}),
    ("/v1/embeddings", {"input": []}),
    ("/tokenize", {"prompt": 5}),
    ("/v1/nothing", {}),
]
DEFAULTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/embeddings": {"input": "Hi"},
}
EVENTS = {
    "response.created": "ResponseCreatedEvent",
    "response.in_progress": "ResponseInProgressEvent",
    "response.output_item.added": "ResponseOutputItemAddedEvent",
    "response.content_part.added": "ResponseContentPartAddedEvent",
    "response.output_text.delta": "ResponseTextDeltaEvent",
    "response.output_text.done": "ResponseTextDoneEvent",
    "response.reasoning_text.delta": "ResponseReasoningTextDeltaEvent",
    "response.reasoning_text.done": "ResponseReasoningTextDoneEvent",
    "response.function_call_arguments.delta": "ResponseFunctionCallArgumentsDeltaEvent",
    "response.function_call_arguments.done": "ResponseFunctionCallArgumentsDoneEvent",
    "response.content_part.done": "ResponseContentPartDoneEvent",
    "response.output_item.done": "ResponseOutputItemDoneEvent",
    "response.completed": "ResponseCompletedEvent",
    "response.incomplete": "ResponseIncompleteEvent",
    "response.failed": "ResponseFailedEvent",
    "error": "ResponseErrorEvent",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[FakeCluster]:
    async with fake_cluster() as c:
        yield c


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gw(cluster: FakeCluster, smollm2_dir: Path) -> AsyncIterator[Rig]:
    async with rig(cluster, smollm2_dir, tool_parser="hermes", reasoning_parser="think") as r:
        yield r


def says(gw: Rig, text: str) -> None:
    """Sets the text of every answer from now on; "" restores the fake pods' own answers."""
    tokenizer = gw.gateway.tokenizer
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_ids[0]]

    def script(request: ValidRequest) -> list[int]:
        return ids if text else counting(request)[:12]

    gw.cluster.script = script


async def answer(gw: Rig, path: str, fields: dict[str, Any]) -> Any:
    response = await gw.http.post(path, json={"model": MODEL, **DEFAULTS.get(path, {}), **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def stream(gw: Rig, path: str, fields: dict[str, Any]) -> list[Any]:
    body = {"model": MODEL, "stream": True, **DEFAULTS[path], **fields}
    events: list[Any] = []
    async with gw.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                events.append(orjson.loads(line.removeprefix("data: ")))
    return events


@pytest.mark.parametrize("number", range(len(CHATS)))
async def test_chats(gw: Rig, number: int) -> None:
    said, fields = CHATS[number]
    says(gw, said)
    body = await answer(gw, "/v1/chat/completions", fields)
    check("CreateChatCompletionResponse", body)
    if said == CALL:
        assert body["choices"][0]["finish_reason"] == "tool_calls"
    options = {"include_usage": True}
    for event in await stream(gw, "/v1/chat/completions", {**fields, "stream_options": options}):
        check("CreateChatCompletionStreamResponse", event)


@pytest.mark.parametrize("number", range(len(COMPLETIONS)))
async def test_completions(gw: Rig, number: int) -> None:
    says(gw, "")
    check("CreateCompletionResponse", await answer(gw, "/v1/completions", COMPLETIONS[number]))
    for event in await stream(gw, "/v1/completions", COMPLETIONS[number]):
        for choice in event[
            "choices"
        ]:  # the document has no schema of chunks, which have no finish reason before the last
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        check("CreateCompletionResponse", event)


@pytest.mark.parametrize("number", range(len(RESPONSES)))
async def test_responses(gw: Rig, number: int) -> None:
    said, fields = RESPONSES[number]
    says(gw, said)
    whole = await answer(gw, "/v1/responses", fields)
    check("Response", whole)
    events = await stream(gw, "/v1/responses", fields)
    for event in events:
        check(EVENTS[event["type"]], event)
    kinds = [[item["type"] for item in body["output"]] for body in (whole, events[-1]["response"])]
    assert kinds[0] == kinds[1]
    calls = [item for item in events[-1]["response"]["output"] if item["type"] == "function_call"]
    assert len(calls) == said.count("<tool_call>")
    assert all(call["arguments"] == '{"city": "Tromsø"}' for call in calls)
    assert ("reasoning" in kinds[0]) == said.startswith(THOUGHT)


async def test_a_response_that_fails(gw: Rig, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    says(gw, "Some text")
    for pod in cluster.decodes:
        monkeypatch.setattr(pod.faults, "decode_error", InternalError("a step failed"))
        monkeypatch.setattr(pod.faults, "token_delay_s", 0.5)  # the first token has begun the answer by then
    events = await stream(gw, "/v1/responses", {})
    assert events[-1]["type"] == "response.failed"
    for event in events:
        check(EVENTS[event["type"]], event)


async def test_embeddings_and_models(gw: Rig) -> None:
    body = await answer(gw, "/v1/embeddings", {"input": ["a", "b"]})
    check("CreateEmbeddingResponse", body)
    check("ListModelsResponse", (await gw.http.get("/v1/models")).json())
    check("Model", (await gw.http.get(f"/v1/models/{MODEL}")).json())


@pytest.mark.parametrize(("path", "fields"), ERRORS)
async def test_errors(gw: Rig, path: str, fields: dict[str, Any]) -> None:
    response = await gw.http.post(path, json={"model": MODEL, **DEFAULTS.get(path, {}), **fields})
    assert 400 <= response.status_code < 500
    check("ErrorResponse", response.json())
