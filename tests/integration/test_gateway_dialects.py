"""Bodies as other clients and servers write them, the ends of OpenAI's ranges, and OpenAI's codes of errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio

from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.gateway.tool_rig import asked, prompt_of, says
from tests.rigs.pods.fake_pods import fake_cluster

HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
BIG = "word " * 4000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(smollm2_dir: Path) -> AsyncIterator[Rig]:
    async with fake_cluster() as cluster, rig(cluster, smollm2_dir) as r:
        yield r


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def post(gw: Rig, path: str, **fields: Any) -> tuple[int, Any]:
    default = {"completions": {"prompt": "Hi"}, "chat/completions": {"messages": HI}, "responses": {"input": "Hi"}}
    short = {"responses": {"max_output_tokens": 4}}.get(path, {"max_tokens": 4})
    response = await gw.http.post(f"/v1/{path}", json={"model": MODEL, **default.get(path, {}), **short, **fields})
    return response.status_code, response.json()


# -- refusals in a history


@pytest.mark.parametrize(
    "message",
    [
        {"content": [{"type": "refusal", "refusal": "I will not."}]},
        {"content": [{"type": "text", "text": "I will not."}, {"type": "refusal", "refusal": "Sorry."}]},
        {"content": None, "refusal": "I will not."},
        {"refusal": "I will not."},
        {"content": "I will not.", "refusal": None},
    ],
)
async def test_a_refusal_in_a_history_is_text_of_the_assistant(shared: Rig, message: dict[str, Any]) -> None:
    messages = [*HI, {"role": "assistant", **message}, *HI]
    status, body = await post(shared, "chat/completions", messages=messages)
    assert status == 200, body
    assert "assistant\nI will not." in prompt_of(shared)
    for part in message.get("content") or ():
        if part == {"type": "refusal", "refusal": "Sorry."}:
            assert "I will not.\nSorry." in prompt_of(shared)


async def test_an_answer_can_be_sent_back_as_it_came(shared: Rig) -> None:
    _, body = await post(shared, "chat/completions")
    messages = [*HI, body["choices"][0]["message"], *HI]
    assert (await post(shared, "chat/completions", messages=messages))[0] == 200


@pytest.mark.parametrize("part", [{"type": "refusal"}, {"type": "refusal", "refusal": 1}, {"type": "audio"}, "x"])
async def test_a_wrong_part_is_named(shared: Rig, part: Any) -> None:
    status, body = await post(shared, "chat/completions", messages=[{"role": "assistant", "content": [part]}, *HI])
    assert status == 400
    assert body["error"]["param"].startswith("messages[0].content[0]")


# -- the ends of OpenAI's ranges


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
async def test_top_p_zero_is_greedy(shared: Rig, path: str) -> None:
    status, body = await post(shared, path, top_p=0, temperature=1.5)
    assert status == 200, body
    assert (asked(shared).sampling.temperature, asked(shared).sampling.top_p) == (0.0, 1.0)
    if path == "responses":
        assert (body["top_p"], body["temperature"]) == (0, 1.5)  # as the client sent them
    await post(shared, path, top_p=0)
    assert asked(shared).sampling.greedy


ENDS: dict[str, list[Any]] = {
    "temperature": [0, 2],
    "top_p": [0, 1],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "seed": [-9223372036854776000, 9223372036854776000, -(2**63), 2**63 - 1],
    "logit_bias": [{"5": -100}, {"5": 100}],
    "n": [1, 128],
}


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in ENDS.items() for value in values])
async def test_the_ends_of_a_range_belong_to_it(shared: Rig, path: str, name: str, value: Any) -> None:
    status, body = await post(shared, path, **{name: value})
    assert status == 200, body


async def test_further_ends(shared: Rig) -> None:
    for path, fields in (
        ("completions", {"logprobs": 0}),
        ("completions", {"logprobs": 5}),
        ("completions", {"best_of": 0}),
        ("completions", {"best_of": 20}),
        ("completions", {"max_tokens": 0}),
        ("chat/completions", {"logprobs": True, "top_logprobs": 0}),
        ("chat/completions", {"logprobs": True, "top_logprobs": 20}),
        ("responses", {"top_logprobs": 0}),
        ("responses", {"top_logprobs": 20}),
        ("responses", {"top_p": 1, "temperature": 2}),
    ):
        status, body = await post(shared, path, **fields)
        assert status == 200, (fields, body)


async def test_no_tokens_are_an_empty_answer(shared: Rig) -> None:
    _, body = await post(shared, "completions", max_tokens=0)
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("", "length")
    assert body["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses", "embeddings"])
@pytest.mark.parametrize("value", [5, True, ["u"], {"id": "u"}])
async def test_a_user_is_a_string(shared: Rig, path: str, value: Any) -> None:
    fields: dict[str, Any] = {"input": "Hi"} if path == "embeddings" else {}
    status, body = await post(shared, path, user=value, **fields)
    assert (status, body["error"]["param"]) == (400, "user")
    for good in (None, "", "someone"):
        assert (await post(shared, path, user=good, **fields))[0] == 200


# -- a format at the place of another API


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        *(
            (path, field, value)
            for path in ("completions", "chat/completions")
            for field, value in (
                ("json_schema", {"type": "object"}),
                ("format", {"type": "object"}),
                ("format", "json"),
                ("text", {"format": {"type": "json_object"}}),
                ("regex", "a+"),
                ("ebnf", "root ::= 'a'"),
                ("grammar", "root ::= 'a'"),
                ("extra_body", {"guided_json": {"type": "object"}}),
            )
        ),
        ("responses", "response_format", {"type": "json_object"}),
        ("responses", "guided_json", {"type": "object"}),
        ("responses", "structured_outputs", {"json": {"type": "object"}}),
    ],
)
async def test_a_format_elsewhere_is_refused_and_not_dropped(shared: Rig, path: str, field: str, value: Any) -> None:
    status, body = await post(shared, path, **{field: value})
    assert (status, body["error"]["param"]) == (400, field)
    assert "schema" in body["error"]["message"]


async def test_empty_places_of_formats_have_no_effect(shared: Rig) -> None:
    for fields in ({"format": ""}, {"json_schema": {}}, {"grammar": None}, {"extra_body": {"top_k": 5}}):
        assert (await post(shared, "chat/completions", **fields))[0] == 200


# -- too long


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"prompt": BIG}, "prompt"),
        ("completions", {"prompt": [5] * 3000}, "prompt"),
        ("completions", {"max_tokens": 5000}, "max_tokens"),
        ("chat/completions", {"messages": [{"role": "user", "content": BIG}]}, "messages"),
        ("chat/completions", {"max_tokens": 5000}, "max_tokens"),
        ("chat/completions", {"max_tokens": None, "max_completion_tokens": 5000}, "max_completion_tokens"),
        ("responses", {"input": BIG}, "input"),
        ("responses", {"max_output_tokens": 5000}, "max_output_tokens"),
        ("embeddings", {"input": BIG}, "input"),
        ("chat/completions", {"messages": [{"role": "user", "content": BIG * 60}]}, "messages"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_context_overflow_has_openais_code_and_words(
    shared: Rig, path: str, fields: dict[str, Any], param: str, stream: bool
) -> None:
    status, body = await post(shared, path, **fields, **({"stream": True} if stream and path != "embeddings" else {}))
    error = body["error"]
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert error["message"].startswith("This model's maximum context length is 2048 tokens. However, ")
    assert "Please reduce the length of the" in error["message"]


# -- tools and items of /v1/responses

FUNCTION: dict[str, Any] = {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}}
OTHERS: list[dict[str, Any]] = [
    {"type": "web_search"},
    {"type": "web_search_preview", "search_context_size": "low"},
    {"type": "local_shell"},
    {"type": "custom", "name": "apply_patch", "description": "d", "format": {"type": "grammar", "syntax": "lark"}},
    {"type": "namespace", "name": "mcp", "description": "d", "tools": [FUNCTION]},
    {"type": "mcp", "server_label": "x", "server_url": "https://x.example"},
]


async def test_tools_that_are_no_functions_are_left_out(shared: Rig) -> None:
    for choice in ("auto", "none"):
        status, body = await post(shared, "responses", tools=[FUNCTION, *OTHERS], tool_choice=choice)
        assert status == 200, body
        assert [tool["name"] for tool in body["tools"]] == ["shell"]
        assert "apply_patch" not in prompt_of(shared)
    assert (await post(shared, "responses", tools=OTHERS))[0] == 200


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        (OTHERS, "required"),
        ([FUNCTION, *OTHERS], {"type": "web_search"}),
        ([FUNCTION, *OTHERS], {"type": "custom", "name": "apply_patch"}),
        ([FUNCTION, *OTHERS], {"type": "function", "name": "apply_patch"}),
        (
            [FUNCTION, *OTHERS],
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "apply_patch"}]},
        ),
    ],
)
async def test_a_tool_that_is_left_out_cannot_be_required(shared: Rig, tools: Any, choice: Any) -> None:
    status, body = await post(shared, "responses", tools=tools, tool_choice=choice)
    assert status == 400
    assert body["error"]["param"].startswith("tool_choice")


async def test_allowed_tools_may_name_tools_that_are_left_out(shared: Rig) -> None:
    allowed = [{"type": "web_search"}, {"type": "function", "name": "shell"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    assert (await post(shared, "responses", tools=[FUNCTION, *OTHERS], tool_choice=choice))[0] == 200
    choice["tools"] = allowed[:1]
    assert (await post(shared, "responses", tools=[FUNCTION, *OTHERS], tool_choice=choice))[0] == 200
    assert "shell" not in prompt_of(shared)


CALL = '<tool_call>\n{"name": "shell", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    "text", [f"Before {CALL} after", f"{CALL} after", f"{CALL}\n{CALL}", "<tool_call>\nno", "plain"]
)
async def test_the_items_of_a_response_have_one_order_and_go_round(shared: Rig, text: str) -> None:
    says(shared, text)
    fields: dict[str, Any] = {"tools": [FUNCTION], "max_output_tokens": 200, "store": False}
    status, whole = await post(shared, "responses", **fields)
    assert status == 200
    body = {"model": MODEL, "input": "Hi", "stream": True, **fields}
    async with shared.http.stream("POST", "/v1/responses", json=body) as response:
        lines = (await response.aread()).decode().split("\n")
    streamed = [orjson.loads(line[6:]) for line in lines if line.startswith("data: ")][-1]["response"]

    def shapes(output: list[dict[str, Any]]) -> list[tuple[str, str]]:
        return [(i["type"], i["name"] if "name" in i else i["content"][0]["text"].strip()) for i in output]

    assert shapes(whole["output"]) == shapes(streamed["output"])
    if "after" in text:
        assert [item["type"] for item in whole["output"]][-2:] == ["function_call", "message"]
    items: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    for item in whole["output"]:
        items.append(item)
        if item["type"] == "function_call":
            items.append({"type": "function_call_output", "call_id": item["call_id"], "output": "done"})
    status, body = await post(shared, "responses", input=[*items, {"role": "user", "content": "Go on"}], **fields)
    assert status == 200, body


async def test_items_with_all_members_that_clients_send_back(shared: Rig) -> None:
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": "Hi"},
        {
            "id": "rs_1",
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "s"}],
            "content": [{"type": "reasoning_text", "text": "thinking"}],
            "encrypted_content": None,
            "status": "completed",
        },
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "phase": "commentary",
            "content": [{"type": "output_text", "text": "Hm", "annotations": [], "logprobs": []}],
        },
        {
            "id": "fc_1",
            "type": "function_call",
            "call_id": "c1",
            "name": "shell",
            "arguments": '{"a": "\\ud83d", "b',
            "status": "incomplete",
            "namespace": None,
        },
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "out"}]},
        {"id": "rs_2", "type": "reasoning", "summary": [], "content": []},
        {"role": "user", "content": [{"type": "input_text", "text": "And?"}]},
    ]
    status, body = await post(shared, "responses", input=items, tools=[FUNCTION])
    assert status == 200, body


# -- text that UTF-8 cannot express


async def test_half_a_surrogate_pair_in_the_arguments_of_a_history(shared: Rig) -> None:
    for arguments in ('{"a": "\\ud83d"}', '{"\\uDE00": [{"b": "x\\uD83Dy"}]}', '{"a": "\\ud83d\\ude00"}'):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}, *HI]
        status, body = await post(shared, "chat/completions", messages=messages)
        assert status == 200, body
        broken = "\\ufffd" in prompt_of(shared) or "\ufffd" in prompt_of(shared)
        assert broken is not arguments.endswith('\\ude00"}')
