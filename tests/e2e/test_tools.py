"""Tool calls of SmolLM2 under a grammar, through gateway, prefill, NIXL and decode.

The model is too small to call tools by itself, so a correct call proves that the grammar is enforced: for the first
token on the prefill pod and for the rest on the decode pod.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator

from tests.rigs.stack.cluster import Cluster

pytestmark = pytest.mark.parametrize("cluster", ["1P+1D"], indirect=True)

MESSAGES: Any = [{"role": "user", "content": "Oslo?"}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Bergen"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "additionalProperties": False}}},
]
SCHEMAS: dict[str, dict[str, Any]] = {"get_weather": WEATHER, "stop": TOOLS[1]["function"]["parameters"]}


@pytest_asyncio.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=cluster.base_url, api_key="x", max_retries=0, timeout=60) as c:
        yield c
    cluster.check_idle()


NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(("choice", "temperature"), [("required", 1.5), (NAMED, 0.0)], ids=["required", "named"])
async def test_calls_are_well_formed_streamed_or_not(
    cluster: Cluster, client: openai.AsyncOpenAI, choice: Any, temperature: float
) -> None:
    fields: dict[str, Any] = {
        "model": cluster.model,
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": choice,
        "max_tokens": 60,
        "parallel_tool_calls": False,
        "seed": 7,
        "temperature": temperature,
    }
    whole = (await client.chat.completions.create(**fields)).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    [call] = whole.message.tool_calls or ()
    assert call.type == "function"
    name, arguments = call.function.name, call.function.arguments
    Draft202012Validator(SCHEMAS[name]).validate(json.loads(arguments))
    assert name == "get_weather" or choice == "required"
    parts: list[str] = []
    async for chunk in await client.chat.completions.create(**fields, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            assert delta.function is not None
            parts.append(delta.function.arguments or "")
    assert "".join(parts) == arguments
