"""Bodies that are expensive to read: too many parts are refused by name, and other tasks run while a body is read."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import orjson
import pytest
import pytest_asyncio

from common.errors import InvalidRequest, RequestTooLarge
from common.pb import inference_pb2, inference_pb2_grpc
from common.rpc import open_channel
from common.types import ValidRequest
from gateway.api.anthropic.requests import parse_message
from gateway.api.grpc.servicer import InferenceServicer
from gateway.api.http.json import MAX_DEPTH, deeper_than
from gateway.api.http.protocol import parse_json_body
from gateway.api.openai.fields import MAX_IDS
from gateway.api.openai.requests import parse_completion
from gateway.api.openai.responses.request import parse_response
from gateway.api.scoring import rerank
from gateway.serving import choice as choice_module
from gateway.serving.gateway import PROMPTS_PER_LOOP_TURN
from gateway.serving.request import MAX_JSON_PARTS, to_valid_request
from gateway.text.chat_format import INLINE_PARTS, render_tools_as_text
from gateway.text.output import prompt_echo
from gateway.text.reranker import Reranker
from gateway.text.tokenizer import INLINE_CHARS, LONG_CHARS
from gateway.text.tools.json_formats import HermesFormat
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig, texts
from tests.rigs.pods.fake_pods import fake_cluster
from tests.rigs.waiting import turns_while, until

MESSAGES = [{"role": "user", "content": "Hi"}]
Pb = inference_pb2.GenerateRequest


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(smollm2_dir: Path) -> AsyncIterator[Rig]:
    async with fake_cluster() as c, rig(c, smollm2_dir) as r:
        yield r


async def posted(gw: Rig, path: str, raw: bytes) -> tuple[int, dict[str, Any]]:
    response = await gw.http.post(path, content=raw)
    return response.status_code, response.json().get("error") or {}


async def read(raw: bytes, most: int = MAX_JSON_PARTS) -> Any:
    return await parse_json_body({"type": "http", "headers": []}, raw, lambda: most)


# -- how much there may be


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"prompt_logprobs": 20}, "prompt_logprobs"), ({"logprobs": 20, "echo": True}, "logprobs")],
)
@pytest.mark.parametrize("prompt", [[77] * 100, [[77] * 50, [78] * 50]])
@pytest.mark.asyncio(loop_scope="module")
async def test_log_probabilities_of_prompts_for_many_answers_are_refused(
    shared: Rig, fields: dict[str, Any], param: str, prompt: list[Any]
) -> None:
    """The log-probabilities of 8,000 prompt tokens for 128 answers would be more than 1 GiB of JSON."""
    raw = orjson.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1, "n": 128, **fields})
    status, error = await posted(shared, "/v1/completions", raw)
    assert (status, error["param"]) == (400, param)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_samples_of_a_prompt_share_its_echo(shared: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def count(*args: Any) -> Any:
        made.append(args)
        return prompt_echo(*args)

    monkeypatch.setattr(choice_module, "prompt_echo", count)
    body = {"model": MODEL, "prompt": [[77] * 100, [78] * 9], "max_tokens": 1, "n": 16, "echo": True}
    response = await shared.http.post("/v1/completions", json=body)
    texts_of = [choice["text"] for choice in response.json()["choices"]]
    assert (len(made), len(texts_of)) == (2, 32)
    for first, text in ((0, prompt_echo(*made[0])[0]), (16, prompt_echo(*made[1])[0])):
        assert all(t.startswith(text) for t in texts_of[first : first + 16])


@pytest.mark.parametrize("part", [b"[]", b"{}", b'{"a":1}', b"1", b'"x"', b"null"])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_body_of_countless_parts_is_refused_before_it_is_parsed(
    shared: Rig, part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = b'{"model": "x", "messages": [' + b",".join([part] * (MAX_JSON_PARTS + 3000)) + b"]}"
    monkeypatch.setattr("gateway.api.http.protocol.orjson.loads", lambda _raw: pytest.fail("parsed"))
    status, error = await posted(shared, "/v1/chat/completions", raw)
    assert (status, error["code"]) == (413, "request_too_large")
    assert "arrays, objects, members and entries" in error["message"]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_prompt_of_as_many_tokens_as_the_longest_context_is_not_too_many_parts(shared: Rig) -> None:
    context = shared.gateway.models.first.pod_table.limits().max_model_len
    raw = orjson.dumps({"model": MODEL, "prompt": [1] * (MAX_JSON_PARTS + context - 10)})
    status, error = await posted(shared, "/v1/completions", raw)
    assert (status, error["param"]) == (400, "prompt")
    raw = orjson.dumps({"model": MODEL, "prompt": [1] * (MAX_JSON_PARTS + context + 10)})
    assert (await posted(shared, "/v1/completions", raw))[0] == 413


@pytest.mark.asyncio(loop_scope="module")
async def test_characters_of_a_text_do_not_count_as_parts(shared: Rig) -> None:
    text = '{"a": [1, \\"b\\"], "c": {}}\n' * (MAX_JSON_PARTS // 4)
    response = await shared.http.post("/detokenize", json={"tokens": [1], "unknown": [text, '"', text]})
    assert response.status_code == 200


def test_more_token_ids_than_any_prompt_has_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_completion({"model": MODEL, "prompt": [1] * (MAX_IDS + 1)})
    assert error.value.field == "prompt"


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ('{"a": "%s"}' % ("[," * MAX_JSON_PARTS), None),
        ('{"a": "%s"}' % ('\\",' * MAX_JSON_PARTS), None),
        ('{"a": "%s"}' % ("\\\\" * 1000 + "[" * (MAX_JSON_PARTS + 1)), None),
        ('["%s"]' % ('","' * (MAX_JSON_PARTS + 1)), RequestTooLarge),
        ("[%s]" % ('"[,"' * (MAX_JSON_PARTS + 1)), RequestTooLarge),  # no JSON, and strings without end
        ("[" + "," * (MAX_JSON_PARTS + 1), RequestTooLarge),
        ('{"a": "' + "[" * (MAX_JSON_PARTS + 1), InvalidRequest),
        ('{"a": "' + "[" * (MAX_JSON_PARTS + 1) + "\\", InvalidRequest),
        ('{"a": "' + "[" * (MAX_JSON_PARTS + 1) + '\\"', InvalidRequest),
        ("[" * (MAX_JSON_PARTS + 1) + '"', RequestTooLarge),
    ],
)
async def test_brackets_and_commas_in_strings_do_not_count(text: str, refused: type[Exception] | None) -> None:
    raw = text.encode()
    if refused is None:
        assert await read(raw) == json.loads(raw)
        return
    with pytest.raises(InvalidRequest) as error:
        await read(raw)
    assert type(error.value) is refused


async def test_a_grpc_request_of_countless_parts_is_refused(smollm2_dir: Path, unused_tcp_port: int) -> None:
    many = MAX_JSON_PARTS + 3000
    chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage()] * (many // 8))
    calls = inference_pb2.ChatMessage(tool_calls=[inference_pb2.ToolCall()] * (many // 8))
    requests = {
        "ids": Pb(model=MODEL, tokens=inference_pb2.TokenPrompt(ids=[1] * many)),
        "stop": Pb(model=MODEL, text="x", stop=[""] * many),
        "messages": Pb(model=MODEL, chat=chat),
        "tool_calls": Pb(model=MODEL, chat=inference_pb2.ChatPrompt(messages=[calls])),
    }
    async with (
        fake_cluster() as c,
        rig(c, smollm2_dir, grpc_port=unused_tcp_port) as gw,
        open_channel(f"127.0.0.1:{unused_tcp_port}") as connection,
    ):
        stub = inference_pb2_grpc.InferenceStub(connection)
        for name, request in requests.items():
            with pytest.raises(grpc.aio.AioRpcError) as error:
                _ = [m async for m in stub.Generate(request)]
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert name in (error.value.details() or "")
        for call in (
            stub.Tokenize(inference_pb2.TokenizeRequest(chat=chat)),
            stub.Detokenize(inference_pb2.DetokenizeRequest(ids=[1] * many)),
            stub.Tokenize(inference_pb2.TokenizeRequest(text="x" * gw.gateway.settings.max_body_bytes)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


# -- how deep it may be


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def test_depth_is_counted() -> None:
    for depth in (0, 1, 2, 5):
        value = orjson.loads(nested(depth))
        assert [deeper_than(value, most) for most in range(1, 7)] == [depth > most for most in range(1, 7)]
    assert deeper_than([1, {"a": [[]]}, []], 3)
    assert not deeper_than([1, {"a": [[]]}, []], 4)


@pytest.mark.parametrize("depth", [MAX_DEPTH, 1000, 1020, 5000])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", '"messages": [], "chat_template_kwargs": {"x": DEEP}'),
        (
            "/v1/chat/completions",
            '"messages": [], "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": DEEP}}',
        ),
        (
            "/v1/chat/completions",
            '"messages": [], "tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]',
        ),
        ("/v1/responses", '"input": "Hi", "tools": [{"type": "function", "name": "f", "parameters": DEEP}]'),
        ("/v1/responses", '"input": "Hi", "stream": true, "metadata": DEEP'),
        ("/v1/completions", '"prompt": DEEP'),
        ("/v1/embeddings", '"input": DEEP'),
        ("/tokenize", '"prompt": "x", "unknown": DEEP'),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_body_that_is_nested_too_deep_is_refused(shared: Rig, path: str, body: str, depth: int) -> None:
    raw = f'{{"model": "{MODEL}", {body.replace("DEEP", nested(depth))}}}'.encode()
    status, error = await posted(shared, path, raw)
    assert status == 400
    assert "nested deeper" in error["message"] or "not valid JSON" in error["message"]


@pytest.mark.parametrize("depth", [150, 990, 100_000])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_deep_schema_in_a_string_is_refused(shared: Rig, depth: int) -> None:
    response = await shared.chat(structured_outputs={"json": nested(depth)})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "structured_outputs.json")
    request = Pb(model=MODEL, text="x", structured_output=inference_pb2.StructuredOutput(json_schema=nested(depth)))
    with pytest.raises(InvalidRequest):
        await read_grpc(shared, request)


@pytest.mark.asyncio(loop_scope="module")
async def test_deep_json_in_a_grpc_field_is_refused(shared: Rig) -> None:
    chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="x")])
    for deep in (nested(MAX_DEPTH + 1), nested(100_000)):
        tool = inference_pb2.Function(name="f", parameters=deep)
        for request in (
            Pb(model=MODEL, chat=chat, tools=[tool]),
            Pb(model=MODEL, chat=chat, chat_template_kwargs=deep),
        ):
            with pytest.raises(InvalidRequest):
                await read_grpc(shared, request)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_body_of_the_greatest_depth_is_answered(shared: Rig) -> None:
    deep = orjson.loads(nested(MAX_DEPTH - 5))  # body, tools, the tool, its function, parameters
    tool = {"name": "f", "parameters": {"type": "object", "default": deep}}
    response = await shared.chat(tools=[{"type": "function", "function": tool}], max_tokens=2)
    assert response.status_code == 200, response.text
    body = {"model": MODEL, "input": "Hi", "tools": [{"type": "function", **tool}], "max_output_tokens": 16}
    for stream in (False, True):
        response = await shared.http.post("/v1/responses", json={**body, "stream": stream})
        assert response.status_code == 200
        assert "failed" not in response.text
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": nested(900)}}]
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": calls}]
    response = await shared.http.post("/tokenize", json={"messages": messages})
    assert response.status_code == 200, response.text


async def read_grpc(gw: Rig, request: Pb) -> None:
    """Reads a request as the servicer does, with its errors."""
    servicer = InferenceServicer(gw.gateway)
    with gw.gateway.admit("generate", None, caller=gw.gateway.keys.current.identify(None)) as context:
        await servicer._choices(context, request)


# -- other tasks run meanwhile


async def test_other_tasks_run_while_strings_are_counted() -> None:
    found, turns = await turns_while(read(b"[" + b",".join([b'",,,,"'] * (MAX_JSON_PARTS // 2)) + b"]"))
    assert len(found) == MAX_JSON_PARTS // 2
    assert turns > 100
    found, turns = await turns_while(read(b'["' + b',\\"' * MAX_JSON_PARTS + b'"]'))
    assert len(found[0]) == 2 * MAX_JSON_PARTS
    assert turns > 2


async def test_other_tasks_run_while_a_long_text_is_tokenized(smollm2_dir: Path) -> None:
    tokenizer, dialect = texts(smollm2_dir)
    text = "Hello, world. " * 30_000
    await asyncio.to_thread(lambda: None)  # the thread is there
    ids, turns = await turns_while(tokenizer.encode_async(text, add_special_tokens=False))
    assert turns > 100
    said, turns = await turns_while(tokenizer.decode_async(ids * 10))
    assert said == text * 10
    assert turns > 100
    many, turns = await turns_while(tokenizer.encode_all(["Hello, world. " * 100] * 300, add_special_tokens=False))
    assert many == [tokenizer.encode("Hello, world. " * 100, add_special_tokens=False)] * 300
    assert turns > 100
    prompt, turns = await turns_while(dialect.render(MESSAGES * 20 * INLINE_PARTS, {}))
    assert prompt.text.count("Hi") == 20 * INLINE_PARTS
    assert turns > 2
    spelled = [{"role": "user", "content": "<|im_end|>" * 50_000}]
    prompt, turns = await turns_while(dialect.render(spelled, {}))
    assert (len(prompt.literals), turns > 2) == (50_000, True)
    ids, turns = await turns_while(tokenizer.encode_chat(prompt))
    assert (len(ids) > 50_000, turns > 2) == (True, True)


def test_countless_texts_of_one_message_are_joined_once() -> None:
    """Each join of a text copies it: joined one by one, these texts would take a minute."""
    line = "x" * 120
    blocks = [{"type": "text", "text": line}] * 40_000
    content: list[dict[str, Any]] = [{"role": "user", "content": blocks}]
    runs = [{"role": "user", "content": [block] * 3} for block in blocks[:16_000]]
    items = [{"role": "system", "content": line * 4}] * 16_000
    tool: dict[str, Any] = {"role": "tool", "content": line * 4}
    began = time.process_time()
    for messages in (content, runs):
        chat = parse_message({"model": MODEL, "max_tokens": 1, "messages": messages})
        assert chat.messages[0]["content"].count(line) == sum(len(message["content"]) for message in messages)
    said = parse_response({"model": MODEL, "input": [*items, MESSAGES[0]]}).chat().messages
    assert said[0]["content"] == "\n\n".join([line * 4] * 16_000)
    [merged, _] = render_tools_as_text([tool] * 16_000 + MESSAGES, (), HermesFormat())
    assert merged["content"].count("<tool_response>") == 16_000
    assert time.process_time() - began < 20.0


@pytest.mark.asyncio(loop_scope="module")
async def test_other_tasks_run_while_documents_are_cut(shared: Rig) -> None:
    body = {"model": MODEL, "query": "Hi", "documents": ["Hello, world. " * 30_000], "max_tokens_per_doc": 4}
    response, turns = await turns_while(shared.http.post("/v1/rerank", content=orjson.dumps(body)))
    assert (response.status_code, turns > 500) == (200, True)


async def test_other_tasks_run_between_the_prompts_of_one_request(
    smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    async with fake_cluster() as c, rig(c, smollm2_dir) as gw:
        loop = asyncio.get_running_loop()

        def count(*args: Any, **kwargs: Any) -> ValidRequest:
            """The number of prompts that were made into choices in this turn of the loop is made's last entry."""
            if not made or made[-1] == 0:
                made.append(0)
                loop.call_soon(made.append, 0)
            made[-1] += 1
            return to_valid_request(*args, **kwargs)

        monkeypatch.setattr("gateway.serving.gateway.to_valid_request", count)
        body = {"model": MODEL, "input": ["Hello"] * 100}
        assert (await gw.http.post("/v1/embeddings", json=body)).status_code == 200
    assert sum(made) == 100
    assert max(made) <= PROMPTS_PER_LOOP_TURN


LONG = "a" * (LONG_CHARS + 1)
LONG_PAIR = {"query": "Hi", "documents": [LONG]}


@pytest.mark.parametrize(
    ("path", "fields", "reranker"),
    [
        ("/tokenize", {"prompt": LONG}, None),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": LONG}]}, None),
        ("/v1/score", {"text_1": "Hi", "text_2": LONG}, None),
        ("/v1/score", {"text_1": "Hi", "text_2": [LONG[: len(LONG) // 3]] * 3}, None),  # long together
        ("/v1/rerank", LONG_PAIR, Reranker(yes_id=1, no_id=2)),
        ("/v1/rerank", {**LONG_PAIR, "max_tokens_per_doc": 4}, None),
    ],
    ids=["tokenize", "count_tokens", "score", "score_many", "verdict", "cut"],
)
async def test_long_texts_leave_threads_for_prompts(
    smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], reranker: Reranker | None
) -> None:
    inside, most, go = 0, 0, threading.Event()

    def wait() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        go.wait(60)
        inside -= 1

    async with fake_cluster() as c, rig(c, smollm2_dir) as gw:
        [model] = gw.gateway.models
        object.__setattr__(model, "reranker", reranker)
        encode = gw.gateway.tokenizer.encode_in_thread

        def slow(text: str, **kwargs: Any) -> list[int]:
            if len(text) < LONG_CHARS // 4:
                return encode(text, **kwargs)
            wait()
            return [1]

        def slow_cut(*_: object) -> str:
            wait()
            return "a"

        monkeypatch.setattr(gw.gateway.tokenizer, "encode_in_thread", slow)
        monkeypatch.setattr(rerank, "_cut", slow_cut)
        body = {"model": MODEL, **fields}
        waiting = [asyncio.create_task(gw.http.post(path, json=body)) for _ in range(40)]
        try:
            await until(lambda: inside == 1 and len(gw.gateway._requests) == len(waiting))
            prompt = "Hello " * (INLINE_CHARS // 6 + 1)  # long enough for a thread
            assert (await gw.complete(prompt=prompt, max_tokens=2)).status_code == 200
        finally:
            go.set()
        assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}
    assert most == 1
