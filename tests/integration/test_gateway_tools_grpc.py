"""Tools, structured output and reasoning over the public gRPC API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from common import rpc
from common.pb import inference_pb2, inference_pb2_grpc, types_pb2
from tests.rigs.gateway.gateway_rig import MODEL, Rig, rig
from tests.rigs.gateway.tool_rig import CALL, CITY, SCHEMA, STOP, asked, fits, prompt_of, says, tool, with_template
from tests.rigs.pods.fake_pods import FakeCluster


async def generate(stub: Any, **fields: Any) -> list[inference_pb2.GenerateResponse]:
    request = inference_pb2.GenerateRequest(**{"model": MODEL, "max_tokens": 100, **fields})
    return [m async for m in stub.Generate(request)]


def chat_prompt(*messages: dict[str, Any]) -> inference_pb2.ChatPrompt:
    return inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(**m) for m in messages or (HELLO,)])


HELLO = {"role": "user", "content": "Hello"}
WEATHER = inference_pb2.Function(name="get_weather", parameters=json.dumps(CITY))


async def test_tools_over_grpc(gw: Rig, stub: Any, smollm2_dir: Path) -> None:
    says(gw, f"So: {CALL}\n{CALL}")
    got = await generate(stub, chat=chat_prompt(), tools=[WEATHER])
    assert "".join(m.text for m in got) == "So:"
    parts = [part for m in got for part in m.tool_calls]
    assert [(p.index, p.name, bool(p.id)) for p in parts if p.name] == [(i, "get_weather", True) for i in (0, 1)]
    for index in (0, 1):
        assert json.loads("".join(p.arguments for p in parts if p.index == index)) == {"city": "Tromsø"}
    assert got[-1].finish_reason == types_pb2.FINISH_REASON_TOOL_CALLS
    rest_prompt = asked(gw).prompt_ids
    await gw.chat(tools=[tool()])
    assert asked(gw).prompt_ids == rest_prompt
    got = await generate(stub, chat=chat_prompt(), tools=[WEATHER], parallel_tool_calls=False)
    assert {part.index for m in got for part in m.tool_calls} == {0}
    for choice, good, bad in (
        (inference_pb2.ToolChoice(mode=inference_pb2.ToolChoice.MODE_REQUIRED), CALL, "x"),
        (inference_pb2.ToolChoice(function="get_weather"), CALL, STOP),
    ):
        await generate(stub, chat=chat_prompt(), tools=[WEATHER], tool_choice=choice)
        assert fits(smollm2_dir, asked(gw).grammar, good)
        assert not fits(smollm2_dir, asked(gw).grammar, bad)
    none = inference_pb2.ToolChoice(mode=inference_pb2.ToolChoice.MODE_NONE)
    got = await generate(stub, chat=chat_prompt(), tools=[WEATHER], tool_choice=none)
    assert not any(m.tool_calls for m in got)
    assert "get_weather" not in prompt_of(gw)
    strict = inference_pb2.Function(name="f", parameters=json.dumps(CITY), strict=True)
    await generate(stub, chat=chat_prompt(), tools=[strict])
    assert asked(gw).grammar is not None
    call = inference_pb2.ToolCall(id="c", name="get_weather", arguments='{"city": "Oslo"}')
    answer = {"role": "tool", "content": "cold", "tool_call_id": "c"}
    await generate(stub, chat=chat_prompt(HELLO, {"role": "assistant", "tool_calls": [call]}, answer))
    assert '"arguments": {"city": "Oslo"}' in prompt_of(gw)
    assert "<tool_response>\ncold\n" in prompt_of(gw)


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ({"json_schema": json.dumps(SCHEMA)}, '{"a": 1}', "{}"),
        ({"json_object": True}, "{}", "1"),
        ({"regex": "a+b?"}, "aab", "ba"),
        ({"choice": inference_pb2.Alternatives(texts=["yes", "no"])}, "no", "maybe"),
        ({"grammar": 'start: "x"'}, "x", "y"),
    ],
)
async def test_structured_output_over_grpc(
    gw: Rig, stub: Any, smollm2_dir: Path, form: dict[str, Any], good: str, bad: str
) -> None:
    for prompt in ({"text": "x"}, {"chat": chat_prompt()}):
        await generate(stub, structured_output=inference_pb2.StructuredOutput(**form), **prompt)
        assert fits(smollm2_dir, asked(gw).grammar, good)
        assert not fits(smollm2_dir, asked(gw).grammar, bad)


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "x", "tools": [WEATHER]},
        {"text": "x", "include_reasoning": False},
        {"text": "x", "structured_output": inference_pb2.StructuredOutput()},
        {"text": "x", "structured_output": inference_pb2.StructuredOutput(json_schema='{"not": {}}')},
        {"chat": chat_prompt(), "tools": [inference_pb2.Function(name="f", parameters="[")]},
        {"chat": chat_prompt(), "tool_choice": inference_pb2.ToolChoice(function="f")},
        {"chat": chat_prompt(), "chat_template_kwargs": "1"},
    ],
)
async def test_grpc_rejects_what_rest_rejects(gw: Rig, stub: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await generate(stub, **fields)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not gw.cluster.decodes[0].seen.reserved


async def test_grpc_splits_reasoning_and_passes_template_variables(
    cluster: FakeCluster, tmp_path: Path, smollm2_dir: Path, unused_tcp_port: int
) -> None:
    model = with_template(tmp_path, smollm2_dir, "{{ x }}{{ '<think>' if on }}{% for m in messages %}{% endfor %}")
    async with rig(cluster, model, reasoning_parser="think", grpc_port=unused_tcp_port) as gw:
        says(gw, "<think>hm</think>yes")
        channel = rpc.open_channel(f"127.0.0.1:{gw.server.grpc_port}")
        stub = inference_pb2_grpc.InferenceStub(channel)
        got = await generate(stub, chat=chat_prompt(), chat_template_kwargs='{"x": "seen"}')
        assert ("".join(m.reasoning for m in got), "".join(m.text for m in got)) == ("hm", "yes")
        assert got[-1].usage.reasoning_tokens > 2
        assert prompt_of(gw) == "seen"
        got = await generate(stub, chat=chat_prompt(), include_reasoning=False, chat_template_kwargs='{"x": "seen"}')
        assert ("".join(m.reasoning for m in got), "".join(m.text for m in got)) == ("", "yes")
        says(gw, "<|im_start|>hm")
        for skip, text in ((True, "hm"), (False, "<|im_start|>hm")):
            got = await generate(stub, text="x", skip_special_tokens=skip)
            assert "".join(m.text for m in got) == text
        await channel.close()


async def test_an_unknown_tool_choice_is_rejected(gw: Rig, stub: Any) -> None:
    choice = inference_pb2.ToolChoice(mode=9)  # type: ignore[arg-type]
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await generate(stub, chat=chat_prompt(), tools=[WEATHER], tool_choice=choice)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "tool_choice" in (error.value.details() or "")
