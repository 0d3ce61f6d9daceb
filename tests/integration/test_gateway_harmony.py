"""Harmony through the gateway: channels, calls, grammars and token counts, streamed and whole alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.rigs.gateway.gateway_rig import Rig, rig
from tests.rigs.gateway.tool_rig import TOOLS, asked, both_ways, compiler_of, harmony_model, prompt_of, says
from tests.rigs.pods.fake_pods import FakeCluster

THINK = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Path:
    return harmony_model(tmp_path_factory.mktemp("gpt-oss"), smollm2_dir)


def fits(gw: Rig, model: Path, text: str) -> bool:
    """Whether the grammar of the last request accepts the text, with its special tokens."""
    matcher = compiler_of(model).compile(asked(gw).grammar).matcher()
    return all(map(matcher.consume_token, encoded(gw, text))) and matcher.is_accepting()


def encoded(gw: Rig, text: str) -> list[int]:
    ids: list[int] = gw.gateway.tokenizer.encode(text, add_special_tokens=False)
    return ids


async def test_the_answer_is_the_final_channel(cluster: FakeCluster, model: Path) -> None:
    async with rig(cluster, model) as gw:
        says(gw, f"{THINK}{FINAL}Hello there.")
        for fields in ({}, {"tools": TOOLS}):
            message, finish = await both_ways(gw, **fields)
            assert (message["reasoning_content"], message["content"], finish) == ("Hm.", "Hello there.", "stop")
            assert "tool_calls" not in message
        assert "# Tools" in prompt_of(gw)
        usage = (await gw.chat()).json()["usage"]
        thought = encoded(gw, THINK.removesuffix("<|start|>assistant"))
        assert usage["completion_tokens_details"]["reasoning_tokens"] == len(thought)
        message, _ = await both_ways(gw, include_reasoning=False)
        assert (message.get("reasoning_content"), message["content"]) == (None, "Hello there.")
        message, finish = await both_ways(gw, stop=" there")
        assert (message["content"], finish) == ("Hello", "stop")
        begun = encoded(gw, "<|channel|>analysis<|message|>Hm")
        message, finish = await both_ways(gw, max_tokens=len(begun))
        assert (message["reasoning_content"], message["content"] or "", finish) == ("Hm", "", "length")


async def test_calls_of_functions(cluster: FakeCluster, model: Path) -> None:
    async with rig(cluster, model) as gw:
        says(gw, f"{THINK}<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant{CALL}")
        message, finish = await both_ways(gw, tools=TOOLS)
        [call] = message["tool_calls"]
        assert (message["reasoning_content"], message["content"], finish) == ("Hm.", "Let me see.", "tool_calls")
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
            "get_weather",
            {"city": "Oslo"},
        )
        length = len(encoded(gw, f"{THINK}{CALL[:-4]}"))
        says(gw, f"{THINK}{CALL}")
        message, finish = await both_ways(gw, tools=TOOLS, max_tokens=length)
        [call] = message["tool_calls"]
        assert (call["function"]["name"], finish) == ("get_weather", "length")
        assert call["function"]["arguments"].startswith('{"city": "')
        history = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [{**call, "id": "1"}]},
            {"role": "tool", "tool_call_id": "1", "content": "cold"},
        ]
        history[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Oslo"}'  # type: ignore[index]
        await gw.chat(messages=history, tools=TOOLS)
        assert prompt_of(gw).endswith(
            "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
            '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>'
            '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"cold"<|end|><|start|>assistant'
        )


async def test_grammars_of_calls_and_of_the_final_channel(cluster: FakeCluster, model: Path) -> None:
    async with rig(cluster, model) as gw:
        says(gw, f"{THINK}{CALL}")
        named = {"type": "function", "function": {"name": "get_weather"}}
        for choice in ("required", named):
            message, finish = await both_ways(gw, tools=TOOLS, tool_choice=choice)
            assert (len(message["tool_calls"]), finish) == (1, "tool_calls")
            assert fits(gw, model, f"{THINK}{CALL}")
            assert not fits(gw, model, f"{FINAL}no")
        says(gw, f"{THINK}{FINAL}{{}}")
        message, _ = await both_ways(gw, response_format={"type": "json_object"})
        assert message["content"] == "{}"
        assert fits(gw, model, f"{THINK}{FINAL}{{}}")
        assert not fits(gw, model, f"{FINAL}no")
