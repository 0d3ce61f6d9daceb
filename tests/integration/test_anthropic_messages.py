"""/v1/messages and /v1/messages/count_tokens over fake pods: prompts, answers, the events of streams, and errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from common.errors import InternalError, Unavailable
from gateway.admission.api_keys import create_key
from gateway.admission.key_store import KeyFile
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.gateway.tool_rig import CALL, CITY, STOP, asked, prompt_of, says
from tests.rigs.pods.fake_pods import FakeCluster, fake_cluster

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER: dict[str, Any] = {"name": "get_weather", "description": "Looks out.", "input_schema": CITY}
TOOLS = [WEATHER, {"name": "stop", "input_schema": {"type": "object", "properties": {}}}]
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
THOUGHT = "<think>\nHm.\n</think>\n\n"
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[FakeCluster]:
    async with fake_cluster() as c:
        yield c


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gw(cluster: FakeCluster, smollm2_dir: Path) -> AsyncIterator[Rig]:
    async with rig(cluster, smollm2_dir, tool_parser="hermes", reasoning_parser="think") as r:
        yield r


async def post(gw: Rig, path: str = "/v1/messages", headers: dict[str, str] | None = None, **fields: Any) -> Any:
    body = {"model": MODEL, "max_tokens": 100, "messages": HELLO, **fields}
    return await gw.http.post(path, json={k: v for k, v in body.items() if v is not ...}, headers=headers)


async def create(gw: Rig, **fields: Any) -> Any:
    answer = await post(gw, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def stream(gw: Rig, **fields: Any) -> list[tuple[str, Any]]:
    """Returns the events of a stream as (event, data)."""
    answer = await post(gw, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        first, second = block.split("\n")
        name, data = first.removeprefix("event: "), json.loads(second.removeprefix("data: "))
        assert name == data["type"]
        events.append((name, data))
    return events


def assemble(events: list[tuple[str, Any]]) -> Any:
    """Returns the message that the events of a stream add up to, as the SDK does it."""
    message: Any = None
    texts: dict[int, str] = {}
    for name, data in events:
        match name:
            case "message_start":
                message = data["message"]
                assert message["content"] == []
            case "content_block_start":
                assert data["index"] == len(message["content"])
                message["content"].append(dict(data["content_block"]))
                texts[data["index"]] = ""
            case "content_block_delta":
                delta, block = data["delta"], message["content"][data["index"]]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] = delta["signature"]
                    case "input_json_delta":
                        texts[data["index"]] += delta["partial_json"]
            case "content_block_stop":
                if message["content"][data["index"]]["type"] == "tool_use":
                    message["content"][data["index"]]["input"] = json.loads(texts[data["index"]])
            case "message_delta":
                message |= data["delta"]
                message["usage"] |= data["usage"]
    return message


async def both_ways(gw: Rig, **fields: Any) -> Any:
    """Returns the whole answer, and checks that the events of a stream add up to the same."""
    whole, streamed = await create(gw, **fields), assemble(await stream(gw, **fields))
    for message in (whole, streamed):
        message["id"] = "..."
        for block in message["content"]:
            if block["type"] == "tool_use":
                assert block["id"].startswith("toolu_")
                block["id"] = "..."
    assert whole == streamed
    return whole


async def test_an_answer_has_the_members_of_a_message(gw: Rig) -> None:
    says(gw, "Hello, world")
    answer = await post(gw)
    body = answer.json()
    assert body["id"].startswith("msg_")
    usage = body.pop("usage")
    assert body == {
        "id": body["id"],
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "Hello, world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    assert usage["output_tokens"] == 4
    assert usage["input_tokens"] == len(asked(gw).prompt_ids)
    assert (usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]) == (0, 0)
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_the_events_of_a_stream_come_in_anthropics_order(gw: Rig) -> None:
    says(gw, THOUGHT + "Well.\n" + CALL + STOP)
    events = await stream(gw, tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 1024})
    names = [name for name, _ in events if name != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    assert names == [
        *("message_start", "content_block_start", "ping", "content_block_stop"),
        *(block * 3),
        *("message_delta", "message_stop"),
    ]
    kinds = [data["content_block"]["type"] for name, data in events if name == "content_block_start"]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert events[0][1]["message"]["stop_reason"] is None
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-1][1] == {"type": "message_stop"}
    assert next(data for name, data in events if name == "ping") == {"type": "ping"}
    starts = [data["content_block"] for name, data in events if name == "content_block_start"]
    assert starts[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert starts[1] == {"type": "text", "text": ""}
    assert (starts[2]["name"], starts[2]["input"]) == ("get_weather", {})


async def test_tools_thinking_and_text_whole_and_streamed(gw: Rig) -> None:
    says(gw, THOUGHT + "Well.\n" + CALL + STOP)
    message = await both_ways(gw, tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 1024})
    assert message["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"},
        {"type": "text", "text": "Well."},
        {"type": "tool_use", "id": "...", "name": "get_weather", "input": {"city": "Tromsø"}},
        {"type": "tool_use", "id": "...", "name": "stop", "input": {}},
    ]
    assert message["stop_reason"] == "tool_use"


async def test_thinking_is_shown_only_if_it_is_enabled(gw: Rig) -> None:
    says(gw, THOUGHT + "Here.")
    for thinking in (..., {"type": "disabled"}):
        message = await both_ways(gw, thinking=thinking)
        assert message["content"] == [{"type": "text", "text": "Here."}]
        assert message["usage"]["output_tokens"] > 5  # the tokens count although they are not shown
    adaptive = await both_ways(gw, thinking={"type": "adaptive"}, output_config={"effort": "high"})
    assert [block["type"] for block in adaptive["content"]] == ["thinking", "text"]


async def test_stop_reasons(gw: Rig) -> None:
    says(gw, "One, two, three")
    stopped = await both_ways(gw, stop_sequences=[" three", ", two"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", ", two")
    assert stopped["content"] == [{"type": "text", "text": "One"}]
    cut = await both_ways(gw, max_tokens=2)
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
    ended = await both_ways(gw)
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("end_turn", None)


async def test_max_tokens_beyond_the_context_end_at_its_end(gw: Rig, cluster: FakeCluster) -> None:
    cluster.script = lambda request: [66] * request.sampling.max_tokens
    message = await create(gw, max_tokens=32000)
    sent = asked(gw)
    assert sent.prompt_len + sent.sampling.max_tokens == 2048
    assert message["stop_reason"] == "model_context_window_exceeded"


async def test_sampling_parameters_reach_the_pods(gw: Rig) -> None:
    says(gw, "x")
    await create(gw, temperature=0.5, top_k=7, top_p=0.25, metadata={"user_id": "u"}, service_tier="auto")
    sampling = asked(gw).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens) == (0.5, 7, 0.25, 100)


async def test_cached_tokens_are_no_input_tokens(
    gw: Rig, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(gw, "x")
    for pod in (*cluster.prefills, *cluster.decodes):
        monkeypatch.setattr(pod, "cached_tokens", 16)
    usage = (await create(gw))["usage"]
    total = len(asked(gw).prompt_ids)
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) in ((total, 0), (total - 16, 16))


async def test_a_history_becomes_the_prompt_of_a_chat(gw: Rig) -> None:
    says(gw, "x")
    await create(
        gw,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=12345;"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be kind."},
        ],
        messages=[
            {"role": "user", "content": "One"},
            {"role": "user", "content": [{"type": "text", "text": "Two", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "abc"},
                    {"type": "redacted_thinking", "data": "abc"},
                    {"type": "text", "text": "Let me look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}},
                    {"type": "tool_use", "id": "toolu_2", "name": "stop", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Rain"}]},
                    {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no", "is_error": True},
                    {"type": "document", "title": "T", "source": {"type": "text", "data": "D"}},
                    {"type": "text", "text": "And now?"},
                ],
            },
        ],
    )
    prompt = prompt_of(gw)
    assert "<|im_start|>system\nBe brief.\n\nBe kind.<|im_end|>" in prompt
    assert "billing" not in prompt
    assert "<|im_start|>user\nOne\nTwo<|im_end|>" in prompt
    assert "Let me look." in prompt
    assert '"city": "Oslo"' in prompt
    assert prompt.index("Rain") < prompt.index("Error: no") < prompt.index("T\nD\nAnd now?")


async def test_an_answer_continues_the_assistants_last_message(gw: Rig) -> None:
    says(gw, '"a": 1}')
    begun = {"role": "assistant", "content": '{"<|im_end|>": 2, '}
    message = await both_ways(gw, messages=[*HELLO, begun])
    assert message["content"] == [{"type": "text", "text": '"a": 1}'}]
    assert prompt_of(gw).endswith('<|im_start|>assistant\n{"<|im_end|>": 2, ')
    end = gw.gateway.tokenizer.raw.token_to_id("<|im_end|>")
    ends = list(asked(gw).prompt_ids).count(end)
    counted = await post(gw, "/v1/messages/count_tokens", max_tokens=..., messages=[*HELLO, begun])
    assert counted.json() == {"input_tokens": len(asked(gw).prompt_ids)}
    await create(gw)
    assert list(asked(gw).prompt_ids).count(end) == ends  # the client's is text


async def test_tools_and_their_choice(gw: Rig) -> None:
    says(gw, CALL)
    await create(gw, tools=[SEARCH, WEATHER])
    assert "get_weather" in prompt_of(gw)
    assert "web_search" not in prompt_of(gw)
    assert asked(gw).grammar is None
    await create(gw, tools=TOOLS, tool_choice={"type": "any"})
    assert asked(gw).grammar is not None
    await create(gw, tools=TOOLS, tool_choice={"type": "tool", "name": "stop"})
    assert "stop" in asked(gw).grammar.text
    await create(gw, tools=TOOLS, tool_choice={"type": "none"})
    assert "get_weather" not in prompt_of(gw)
    says(gw, CALL + STOP)
    one = await both_ways(gw, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["type"] for block in one["content"]] == ["tool_use"]


async def test_a_schema_is_enforced(gw: Rig) -> None:
    says(gw, '{"city": "Oslo"}')
    for field in ({"output_format": {"type": "json_schema", "schema": CITY}},):
        await create(gw, **field)
        assert asked(gw).grammar.field == "output_format.schema"
    await create(gw, output_config={"format": {"type": "json_schema", "schema": CITY}})
    assert asked(gw).grammar is not None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": ...}, "max_tokens is missing"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"temperature": 1.5}, "temperature must be at least 0 and at most 1"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role 'robot' is not supported"),
        ({"messages": [{"role": "user", "content": [PNG]}]}, "messages[0].content[0].type 'image' is not supported"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [PNG]}]}
                ]
            },
            "messages[0].content[0].content[0].type 'image' is not supported, only text, document",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "url", "url": "x"}}]}]},
            "messages[0].content[0].source.type 'url' is not supported, only text",
        ),
        (
            {
                "messages": [*HELLO, {"role": "assistant", "content": "{"}],
                "thinking": {"type": "enabled", "budget_tokens": 1},
            },
            "messages must not end with the assistant's text while thinking is enabled",
        ),
        (
            {
                "messages": [
                    *HELLO,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]},
                ]
            },
            "messages must not end with the assistant's calls",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema is missing"),
        ({"tools": [SEARCH, {"name": "a", "input_schema": {"type": "array"}}]}, "tools[1].input_schema must describe"),
        ({"tools": [WEATHER, WEATHER]}, "tools has two tools of the name 'get_weather'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is any, and there is no tool"),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice is any, and there is no tool"),
        ({"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice.name 'web_search'"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type 'some' is not supported, only auto, any, tool, none"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type 'perhaps' is not supported"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"stop": "x"}, "stop is not supported"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "prompt is too long"),
    ],
)
async def test_errors_name_the_field(gw: Rig, fields: dict[str, Any], said: str) -> None:
    answer = await post(gw, **fields)
    body = answer.json()
    assert (answer.status_code, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert body["error"]["message"].startswith(said)
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_errors_have_anthropics_types(gw: Rig) -> None:
    missing = await post(gw, model="other")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    broken = await gw.http.post("/v1/messages", content=b"{", headers={"x-request-id": "mine"})
    assert (broken.status_code, broken.json()["request_id"]) == (400, "mine")
    assert (await gw.http.get("/v1/messages")).json()["type"] == "error"
    nowhere = await gw.http.post("/v1/messages/batches", json={})
    assert (nowhere.status_code, nowhere.json()["error"]["type"]) == (404, "not_found_error")


async def test_a_gateway_without_room_answers_529(cluster: FakeCluster, smollm2_dir: Path) -> None:
    async with rig(cluster, smollm2_dir, max_inflight=1) as gw:
        gw.gateway._requests["busy"] = None  # type: ignore[assignment]
        full = await post(gw)
        del gw.gateway._requests["busy"]
        assert (full.status_code, full.json()["error"]["type"]) == (529, "overloaded_error")
        assert int(full.headers["retry-after"]) >= 1


async def test_a_stream_that_fails_ends_with_an_error_event(
    gw: Rig, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(gw, "Some text")
    for pod in cluster.decodes:
        monkeypatch.setattr(pod.faults, "decode_error", InternalError("a step failed"))
        monkeypatch.setattr(pod.faults, "token_delay_s", 0.2)  # the first token has begun the answer by then
    name, data = (await stream(gw))[-1]
    assert (name, data["error"]) == ("error", {"type": "api_error", "message": "internal error"})
    for pod in cluster.decodes:
        monkeypatch.setattr(pod.faults, "decode_error", None)
    for pod in cluster.prefills:
        monkeypatch.setattr(pod.faults, "prefill_error", Unavailable("no"))
    failed = await post(gw)
    assert (failed.status_code, failed.json()["error"]["type"]) == (503, "api_error")


async def test_count_tokens_counts_the_prompt_of_the_message(gw: Rig) -> None:
    says(gw, "x")
    body: dict[str, Any] = {"system": "Be brief.", "tools": TOOLS, "thinking": {"type": "enabled", "budget_tokens": 1}}
    counted = await post(gw, "/v1/messages/count_tokens?beta=true", max_tokens=..., **body)
    assert counted.status_code == 200
    message = await create(gw, **body)
    assert counted.json() == {"input_tokens": len(asked(gw).prompt_ids)}
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == len(asked(gw).prompt_ids)
    wrong = await post(gw, "/v1/messages/count_tokens", messages=[])
    assert wrong.json()["error"]["type"] == "invalid_request_error"


async def test_a_request_as_an_agent_sends_it(smollm2_dir: Path) -> None:
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {"a": {}}}
    many = [{"name": f"Tool_{i}", "description": "d" * 2000, "input_schema": schema} for i in range(40)]
    many[-1]["cache_control"] = {"type": "ephemeral"}
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        "x-stainless-lang": "js",
        "user-agent": "claude-cli/2.0.0 (external, cli)",
    }
    async with fake_cluster() as cluster:
        for pod in cluster.pods.values():
            pod.max_model_len, pod.num_blocks = 65536, 4096
        async with rig(cluster, smollm2_dir, tool_parser="hermes", reasoning_parser="think") as gw:
            says(gw, "Done.")
            answer = await post(
                gw,
                "/v1/messages?beta=true",
                headers,
                max_tokens=32000,
                stream=True,
                system=[{"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}],
                tools=many,
                thinking={"type": "enabled", "budget_tokens": 31999},
                temperature=1,
                metadata={"user_id": "user_0_account__session_1"},
                context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
                messages=[
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "<system-reminder>\nx\n</system-reminder>"},
                            {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral", "ttl": "5m"}},
                        ],
                    }
                ],
            )
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')


async def test_an_api_key_in_x_api_key(cluster: FakeCluster, smollm2_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    key, record = create_key("acme", models=("nothing",))
    KeyFile(path).add(record)
    good, other = create_key("acme")
    KeyFile(path).add(other)
    async with rig(cluster, smollm2_dir, api_keys=(str(path),)) as gw:
        says(gw, "x")
        assert (await post(gw, headers={"x-api-key": good})).status_code == 200
        assert (await gw.http.get("/v1/models", headers={"x-api-key": good})).status_code == 200
        for headers in ({}, {"x-api-key": "wrong"}, {"x-api-key": good, "authorization": "Bearer wrong"}):
            refused = await post(gw, headers=headers)
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
            assert refused.json()["request_id"] == refused.headers["request-id"]
        forbidden = await post(gw, headers={"x-api-key": key})
        assert (forbidden.status_code, forbidden.json()["error"]["type"]) == (403, "permission_error")
        await gw.settled()


async def test_the_list_of_models_for_anthropics_clients(gw: Rig) -> None:
    listed = (await gw.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"})).json()
    [model] = listed["data"]
    assert (model["type"], model["id"], model["display_name"]) == ("model", MODEL, MODEL)
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (MODEL, MODEL, False)
    one = (await gw.http.get(f"/v1/models/{MODEL}", headers={"anthropic-version": "2023-06-01"})).json()
    assert one == model
    assert (await gw.http.get("/v1/models")).json()["object"] == "list"


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/version", "/nowhere", "/metrics", "/tokenizer_info"])
async def test_every_answer_has_a_request_id(gw: Rig, path: str) -> None:
    assert len((await gw.http.get(path)).headers["x-request-id"]) == 24
    assert (await gw.http.get(path, headers={"x-request-id": "mine"})).headers["x-request-id"] == "mine"
